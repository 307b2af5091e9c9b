"""What a repo will hold, made in a folder of its own before anything is sent."""

import html
import importlib.metadata
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import get_token, hf_hub_download, metadata_load
from huggingface_hub.errors import HTTPError, RemoteEntryNotFoundError
from safetensors.torch import save_file
from torch import Tensor
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
)

from harmonic_sft.data.heldout import run_home
from harmonic_sft.hub.model_card import model_card
from harmonic_sft.hub.run_folder import (
    ADAPTER_FOLDER,
    Destination,
    Form,
    TrainedFolder,
    public_base,
    read_tensors,
    saved_tokenizer,
    weight_files,
)
from harmonic_sft.models import (
    BLOCKS_FILE,
    HEAD_FILE,
    HarmonicConfig,
    HarmonicForCausalLM,
    HarmonicForMaskedLM,
    HarmonicModel,
    Head,
    build_head,
    check_prototypes,
    max_positions,
)
from harmonic_sft.models.configuration_harmonic import quantization_method
from harmonic_sft.models.head import find_not_finite
from harmonic_sft.models.partial_checkpoint import BACKBONE, base_state_dict, hub_base
from harmonic_sft.results import read_results, reading, without_secrets

FORMAT = {"format": "pt"}  # metadata of safetensors that transformers asks for
FIGURE, LICENSE = "training.png", "LICENSE"
TOKENIZER_FILES = (
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "*.spm",
    "spiece.model",
    "sentencepiece.bpe.model",
)
# Not searched for secrets: a token of the vocabulary may look like one.
VOCABULARY = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")
SENTENCE_FILES = ("modules.json", "sentence_bert_config.json", "1_Pooling/config.json")
CODE_FIELDS = ("auto_map", "custom_pipelines")  # name code of the base, which training does not run
SECRET = re.compile(  # in a card or JSON
    r"hf_[A-Za-z0-9]{30}|signature=|token=|[?&]sig=|x-(amz|goog)-credential=", re.I
)


class PushError(RuntimeError):
    """The Hub did not answer, or refused the push; the run is as it was.

    Raise it from None or from another of its kind: Python prints causes, and in the client's error
    the Hub may repeat a token.
    """


def stage(trained: TrainedFolder, target: Path, to: Destination) -> None:
    """Write everything that a repo will hold into an empty folder.

    The form `full` holds everything; `head` what was trained, completed from the base while
    loading; `peft` an adapter.

    Raises:
        ValueError: The form does not suit this run, its weights predict nothing, or a secret would
            have been published.
        PushError: The base's license is not known, because its card cannot be fetched.
    """
    check_form(trained.config, to.form, trained.has_adapter)
    check_publishable(trained, to.form)
    if to.form == "peft":
        adapter = trained.path / ADAPTER_FOLDER
        check_adapter(trained.config, adapter)
        _copy(adapter, target, (ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_CONFIG_NAME))
    else:
        if to.form == "full":
            weights = [path.name for path in weight_files(trained.path)]
            _copy(trained.path, target, (*weights, SAFE_WEIGHTS_INDEX_NAME))
        else:
            head = dict(read_tensors(trained.path, ("dist_head.",)))
            save_file(head, target / HEAD_FILE, FORMAT)
            if blocks := _trained_blocks(trained):
                save_file(blocks, target / BLOCKS_FILE, FORMAT)
        _write_config(trained, target, partial=to.form == "head")
        _copy(trained.path, target, ("generation_config.json",))
        package = importlib.metadata.distribution("harmonic-sft")  # its code is published too
        (target / LICENSE).write_text(package.read_text("licenses/LICENSE") or "")
    copy_tokenizer(trained.path, target)
    figure = None
    if trained.figure is not None:
        figure = FIGURE
        shutil.copyfile(trained.figure, target / figure)
    license = {"license": to.license} if to.license else base_license(trained.config)
    card = model_card(trained, to, figure=figure, license=license)
    (target / "README.md").write_text(card, encoding="utf-8")
    check_clean(target, trained)


def check_form(config: HarmonicConfig, form: Form, has_adapter: bool) -> None:
    """Raise a ValueError for a form that could not be loaded again."""
    if form == "full":
        return
    vocab_size, trained = config.text_config.vocab_size, config.trained_parameters
    method, base = quantization_method(config), config.base_model
    if method is not None and form == "head":
        expected, got = "a base in a floating dtype", f"one quantized by {method}"
    elif config.base_vocab_size is not None:
        expected = "the base's vocabulary"
        got = f"{vocab_size} tokens instead of {config.base_vocab_size}"
    elif form == "peft" and not has_adapter:
        expected, got = "a run with LoRA (`peft:` in its file)", "one that PEFT would load in part"
    elif form == "peft" and config.tie_word_embeddings:
        expected, got = "a head of its own", "one tied to the embeddings, which no adapter holds"
    elif trained is None:
        expected, got = "a run that says what it trained", "one of an earlier version"
    elif form == "head" and hub_base(config) is None:
        expected, got = "a base on the Hub at a commit", f"{base!r}, which nobody else could fetch"
    else:
        return
    raise ValueError(f"--form {form}: expected {expected}, got {got}. Use --form full")


def check_adapter(config: HarmonicConfig, adapter: Path) -> None:
    """Refuse an adapter whose base is not the published one.

    Raises:
        ValueError: An earlier run trained something in the backbone that the adapter does not hold.
    """
    fields = read_results(adapter / ADAPTER_CONFIG_NAME, "target_modules", "modules_to_save")
    held = tuple(f"{name}." for name in (*fields["target_modules"], *fields["modules_to_save"]))
    if left := [name for name in config.trained_parameters or () if not name.startswith(held)]:
        raise ValueError(
            f"--form peft: expected an adapter on {config.base_model!r} as it was published, got "
            f"one on weights that were trained before, such as {left[0]}. Use --form head"
        )


def check_completed(trained: TrainedFolder, form: Form) -> None:
    """Refuse the forms `head` and `peft` of a model that its base does not complete.

    An adapter whose base is quantized, or not on the Hub, is not checked.

    Raises:
        ValueError: What the run did not train is not the base's.
        PushError: The base cannot be fetched.
    """
    config = trained.config
    if hub_base(config) is None or quantization_method(config) is not None:
        return
    try:
        base = base_state_dict(f"--form {form}", config, {"revision": None})
    except ValueError as error:
        raise PushError(without_secrets(f"{str(error).rstrip('.')}.")) from None
    state = dict(read_tensors(trained.path, (BACKBONE,)))
    if not state.keys() <= base.keys():
        state = _state_of_model(trained)
    for name in sorted(state.keys() - set(config.trained_parameters or ())):
        if not torch.equal(base[name].to(state[name].dtype), state[name]):
            raise ValueError(
                f"--form {form}: expected what was not trained to be that of "
                f"{config.base_model}, got another {name}, which was changed before the "
                "run. Use --form full"
            )


def check_publishable(trained: TrainedFolder, form: Form) -> None:
    """Refuse to publish NaN, a head that predicts nothing, and one whose code is not published.

    The form `full` reads all weights, the others only those that were trained.
    """
    config, state = trained.config, dict(read_tensors(trained.path, ("dist_head.",)))
    tensors: Iterable[tuple[str, Tensor]] = read_tensors(trained.path, ("",))
    if form != "full":
        tensors = [*state.items(), *_trained_blocks(trained).items()]
    if name := find_not_finite(tensors):
        raise ValueError(f"weights: expected finite numbers, got others in {name}")
    if config.tie_word_embeddings:
        model_class = HarmonicForCausalLM if config.is_causal else HarmonicForMaskedLM
        with torch.device("meta"):
            [(own, table)] = model_class(config)._tied_weights_keys.items()
        [(_, state[own])] = read_tensors(trained.path, (table,))
    state = {name.removeprefix("dist_head."): tensor for name, tensor in state.items()}
    size = config.text_config.hidden_size
    vocab_size = next(len(t) for name, t in state.items() if name.split(".")[-1] == "weight")
    with torch.device("meta"):
        head = build_head(config.head, hidden_size=size, vocab_size=vocab_size)
    for part in head.modules():
        if isinstance(part, Head) and not type(part).__module__.startswith("harmonic_sft.models."):
            raise ValueError(
                "head: expected a class of harmonic_sft/models, whose files are published, got "
                f"{type(part).__name__} of {type(part).__module__}. Write it there"
            )
    head.load_state_dict(state, assign=True)
    for problem in check_prototypes(head, is_tied=config.tie_word_embeddings):
        raise ValueError(f"weights: expected a head that predicts, got one of which {problem}")


def base_license(config: HarmonicConfig) -> dict[str, Any]:
    """Return the license fields of the base's card, none if there is no card or no YAML in it.

    Raises:
        PushError: The card cannot be fetched.
    """
    base = hub_base(config)
    if base is None:
        return {}
    try:
        card = hf_hub_download(base, "README.md", revision=config.base_revision)
    except RemoteEntryNotFoundError:
        return {}
    except (HTTPError, OSError, ValueError) as error:
        raise PushError(
            f"license: expected the card of {base}, got {type(error).__name__}. Check the network "
            "and your access to it, or say the license: --license, in a run's file hub.license."
        ) from None
    try:
        fields = metadata_load(Path(card)) or {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    names = ("license", "license_name", "license_link")
    return {name: fields[name] for name in names if isinstance(fields.get(name), str)}


def check_clean(target: Path, trained: TrainedFolder) -> None:
    """Refuse to publish a token, or where files lie on this machine."""
    secrets = {
        "the token of the Hub": get_token(),
        "the path of your home": f"{Path.home()}/" if str(Path.home()) != "/" else None,
        "the path of the run": str(run_home(trained.path.resolve())),
    }
    for path in sorted(target.rglob("*")):
        if not path.is_file() or path.suffix in (".safetensors", ".png") or path.name in VOCABULARY:
            continue
        content = path.read_text(encoding="utf-8", errors="replace")
        leaks = [
            what
            for what, secret in secrets.items()
            if secret and (secret in content or json.dumps(secret)[1:-1] in content)
        ]
        if path.suffix in (".md", ".json") and (secret := SECRET.search(html.unescape(content))):
            leaks.append(f"what looks like a secret, {secret[0][:10]}...")
        if leaks:
            raise ValueError(
                f"{path.name}: expected nothing private, got {leaks[0]}. Not published"
            )


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer, without the name of the folder that it came from.

    Code that its configuration names stays behind: training loads tokenizers without it.

    Raises:
        ValueError: The tokenizer that trained has code of its own, or its files are damaged.
    """
    _copy(source, target, TOKENIZER_FILES)
    path = target / "tokenizer_config.json"
    if not path.is_file():
        return
    with reading(source / path.name):
        fields = dict(json.loads(path.read_bytes()))
    for module in re.findall(r'"(\w+)\.\w+"', json.dumps(fields.pop("auto_map", None))):
        if (source / f"{module}.py").is_file():  # it is saved only if it was run
            raise ValueError(
                f"tokenizer: expected a class of transformers, got one of {module}.py, which is "
                "not published. Train with a tokenizer that loads without trust_remote_code"
            )
    names = saved_tokenizer(source).vocab_files_names  # PhoBERT's are vocab.txt and bpe.codes
    _copy(source, target, tuple(names.values()))
    fields.pop("name_or_path", None)
    _write_json(path, fields)


def _trained_blocks(trained: TrainedFolder) -> dict[str, Tensor]:
    """Return the trained weights of the backbone, by their names in a model."""
    names = {name for name in trained.config.trained_parameters or () if name.startswith(BACKBONE)}
    saved = dict(read_tensors(trained.path, tuple(names)))
    if names <= saved.keys():
        return {name: saved[name] for name in names}
    state = _state_of_model(trained)
    return {name: state[name].contiguous() for name in names}


def _state_of_model(trained: TrainedFolder) -> dict[str, Tensor]:
    """Return the backbone's weights by their names in a model; files hold experts one by one."""
    model = HarmonicModel.from_pretrained(trained.path, dtype="auto")
    return {f"model.{name}": value for name, value in model.state_dict().items()}


def _write_config(trained: TrainedFolder, target: Path, *, partial: bool) -> None:
    """Write the configuration, the code it names, and what an encoder of sentences needs."""
    config = trained.config
    fields = json.loads((trained.path / "config.json").read_bytes())
    fields |= {"base_model": public_base(config), "partial": partial}
    for private in (fields, fields["text_config"]):
        private.pop("_name_or_path", None)
    for name in CODE_FIELDS:
        fields["text_config"].pop(name, None)
    (target / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    for name in fields["auto_map"].values():  # only these: the folder may hold other files
        module = trained.path / f"{Path(name).name.split('.')[0]}.py"
        for path in (module, *map(Path, get_relative_import_files(module))):
            shutil.copyfile(trained.path / path.name, target / path.name)
    if not config.is_causal:
        _write_sentence_config(config, target)


def _write_sentence_config(config: HarmonicConfig, target: Path) -> None:
    """Write the configuration by which sentence-transformers loads an encoder."""
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate([("", "Transformer"), ("1_Pooling", "Pooling")])
    ]
    length = {"max_seq_length": max_positions(config.text_config), "do_lower_case": False}
    pooling = {
        "word_embedding_dimension": config.text_config.hidden_size,
        "pooling_mode_mean_tokens": config.pooling == "mean",
        "pooling_mode_cls_token": config.pooling == "cls",
    }
    (target / "1_Pooling").mkdir()
    for name, content in zip(SENTENCE_FILES, (modules, length, pooling), strict=True):
        _write_json(target / name, content)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _copy(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        for path in source.glob(pattern):
            copied = target / path.relative_to(source)
            copied.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copied)
