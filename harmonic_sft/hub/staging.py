"""What a repo will hold, made in a folder of its own before anything is sent."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import get_token
from safetensors import safe_open
from safetensors.torch import save_file

from harmonic_sft import models
from harmonic_sft.hub.adapter import WEIGHTS_NAME as ADAPTER_WEIGHTS
from harmonic_sft.hub.adapter import write_adapter
from harmonic_sft.hub.model_card import model_card
from harmonic_sft.hub.run_folder import (
    HEADER_LENGTH,
    INDEX,
    TrainedFolder,
    read_header,
    weight_files,
)
from harmonic_sft.models import BLOCKS_FILE, HEAD_FILE, HarmonicConfig, max_positions
from harmonic_sft.models.configuration_harmonic import quantization_method

Form = Literal["full", "head", "peft"]
FIGURE = "training.png"
TOKENIZER = (
    *("tokenizer*.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt", "chat_template.jinja", "*.spm", "spiece.model"),
    *("sentencepiece.bpe.model",),
)
WORDS = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt")  # may spell a path as a token
SENTENCES = ("modules.json", "sentence_bert_config.json", "1_Pooling/config.json")
CODE = tuple(path.name for path in Path(models.__file__).parent.glob("[!_]*.py"))


def stage(trained: TrainedFolder, target: Path, *, form: Form, repo_id: str) -> None:
    """Write everything that a repo will hold.

    Args:
        trained: What to publish.
        target: An empty folder.
        form: `full`, everything; `head`, what was trained, completed from the base while loading;
            `peft`, an adapter.
        repo_id: Its name, for the card.

    Raises:
        ValueError: The form does not suit this run, or a secret would have been published.
    """
    check_form(trained.config, form)
    write: Callable[[TrainedFolder, Path], None] = WRITERS[form]
    write(trained, target)
    _copy(trained.path, target, TOKENIZER)
    clean_tokenizer_config(target / "tokenizer_config.json")
    if trained.figure is not None:
        shutil.copyfile(trained.figure, target / FIGURE)
    card = model_card(
        trained.config,
        repo_id=repo_id,
        form=form,
        run=trained.run,
        results=trained.results,
        step=trained.step,
        figure=FIGURE if trained.figure is not None else None,
    )
    (target / "README.md").write_text(card)
    check_clean(target, trained)


def check_form(config: HarmonicConfig, form: Form) -> None:
    """Refuse a form that could not be loaded again.

    Raises:
        ValueError: The form `head` without a base on the Hub, or without knowing what was trained;
            another form than `full` for a resized vocabulary.
    """
    if form == "full":
        return
    method = quantization_method(config)
    if method is not None:
        raise ValueError(
            f"--form {form}: expected a base in a floating dtype, got one quantized by {method}. "
            "Use --form full"
        )
    if config.base_vocab_size is not None:
        raise ValueError(
            f"--form {form}: expected the base's vocabulary, got {config.text_config.vocab_size} "
            f"tokens instead of {config.base_vocab_size}. Use --form full"
        )
    if form == "peft" and config.tie_word_embeddings:
        raise ValueError(
            "--form peft: expected a head of its own, got one tied to the embeddings, which an "
            "adapter cannot hold. Use --form full"
        )
    if config.trained_parameters is None:
        raise ValueError(
            f"--form {form}: expected a run that says what it trained, got one of an earlier "
            "version. Use --form full"
        )
    if form == "head" and config.base_revision is None:
        raise ValueError(
            f"--form head: expected a base on the Hub, got {config.base_model!r} of this machine, "
            "which nobody else could fetch. Use --form full, or push the base, and train from it"
        )


def check_clean(target: Path, trained: TrainedFolder) -> None:
    """Refuse to publish a token, or where files lie on this machine.

    Raises:
        ValueError: One was found, with the file it is in.
    """
    secrets = {
        "the token of the Hub": get_token(),
        "the path of your home": f"{Path.home()}/" if str(Path.home()) != "/" else None,
        "the path of the run": str(trained.path.resolve()),
    }
    for path in sorted(target.rglob("*")):
        if not path.is_file() or path.suffix in (".safetensors", ".png") or path.name in WORDS:
            continue
        content = path.read_bytes()
        for what, secret in secrets.items():
            if secret and secret.encode() in content:
                raise ValueError(
                    f"{path.name}: expected nothing private, got {what}. Not published"
                )


def _write_full(trained: TrainedFolder, target: Path) -> None:
    for path in weight_files(trained.path):
        copy_weights(path, target / path.name, step=trained.step)
    _copy(trained.path, target, (INDEX, "generation_config.json"))
    _write_config(trained, target, partial=False)


def _write_trained(trained: TrainedFolder, target: Path) -> None:
    head, blocks = {}, {}
    names = set(trained.config.trained_parameters or ())
    for name, tensor in _tensors(trained.path):
        if name.startswith("dist_head."):
            head[name] = tensor
        elif name in names:
            blocks[name] = tensor
    save_file(head, target / HEAD_FILE, _metadata(trained.step))
    if blocks:
        save_file(blocks, target / BLOCKS_FILE, _metadata(trained.step))
    _copy(trained.path, target, ("generation_config.json",))
    _write_config(trained, target, partial=True)


def _write_peft(trained: TrainedFolder, target: Path) -> None:
    config = trained.config
    base = _public_base(trained) or ""
    write_adapter(trained.path, target, base=base, revision=config.base_revision)
    with tempfile.TemporaryDirectory(dir=target) as draft:
        plain = (target / ADAPTER_WEIGHTS).rename(Path(draft) / ADAPTER_WEIGHTS)
        copy_weights(plain, target / ADAPTER_WEIGHTS, step=trained.step)


WRITERS = {"full": _write_full, "head": _write_trained, "peft": _write_peft}


def copy_weights(source: Path, target: Path, *, step: int | None) -> None:
    """Copy a safetensors file; its metadata then name the format and the step."""
    header, start = read_header(source)
    header["__metadata__"] = {**header.get("__metadata__", {}), **_metadata(step)}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the weights stay aligned
    with source.open("rb") as reader, target.open("wb") as writer:
        writer.write(len(encoded).to_bytes(HEADER_LENGTH, "little") + encoded)
        reader.seek(start)
        shutil.copyfileobj(reader, writer, 2**24)


def _metadata(step: int | None) -> dict[str, str]:
    return {"format": "pt"} if step is None else {"format": "pt", "step": str(step)}


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                yield name, file.get_tensor(name)


def _write_config(trained: TrainedFolder, target: Path, *, partial: bool) -> None:
    """Write the configuration, the code it names, and what an encoder of sentences needs."""
    fields = json.loads((trained.path / "config.json").read_text())
    fields |= {"base_model": _public_base(trained), "partial": partial}
    for private in (fields, fields["text_config"]):
        private.pop("_name_or_path", None)
    (target / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    _copy(trained.path, target, CODE)  # the folder may hold other files by now
    if not trained.config.is_causal:
        _write_sentence_config(trained, target)


def _write_sentence_config(trained: TrainedFolder, target: Path) -> None:
    """Write what sentence-transformers reads of an encoder."""
    text_config = trained.config.text_config
    length = {"max_seq_length": max_positions(text_config), "do_lower_case": False}
    _write_json(target / "sentence_bert_config.json", length)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    _write_json(
        target / "modules.json",
        [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
            for i, (path, name) in enumerate(modules)
        ],
    )
    (target / "1_Pooling").mkdir()
    pooling = {
        "word_embedding_dimension": text_config.hidden_size,
        "pooling_mode_mean_tokens": trained.config.pooling == "mean",
        "pooling_mode_cls_token": trained.config.pooling == "cls",
    }
    _write_json(target / "1_Pooling" / "config.json", pooling)


def _public_base(trained: TrainedFolder) -> str | None:
    """Return the base's name, of a folder only the last part."""
    base = trained.config.base_model
    if base is None or trained.config.base_revision is not None or base.startswith("package:"):
        return base
    return Path(base).name


def clean_tokenizer_config(path: Path) -> None:
    """Take the folder that a tokenizer came from out of its configuration."""
    if not path.is_file():
        return
    fields = json.loads(path.read_text())
    fields.pop("name_or_path", None)
    _write_json(path, fields)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _copy(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        for path in source.glob(pattern):
            if not path.name.startswith("_"):  # the Hub's clients leave such files out
                shutil.copyfile(path, target / path.name)
