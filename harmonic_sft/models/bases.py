"""Bases: what a new head is put on."""

import importlib.util
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from .backbones import (
    build_backbone,
    cast_parameters_,
    is_quantized,
    load_backbone,
    load_checked,
    set_dropout_,
)
from .configuration_harmonic import quantization_method
from .decoders import load_decoder
from .head import Head
from .linear_heads import LinearHead
from .modeling_backbone import HarmonicModel, HarmonicPreTrainedModel
from .modeling_neobert import NeoBERTForMaskedLM
from .partial import commit_of

QUANTIZED = ("bitsandbytes", "torchao")  # what may stay frozen under a new head


class Base(NamedTuple):
    """A loaded base: its backbone, its head if one of ours was asked for, and where it is from."""

    name: str
    backbone: PreTrainedModel
    head: Head | None
    labels: list[str]  # of the head's rows, if it is a classifier's
    origin: dict[str, Any]  # fields of the configuration
    generation_config: GenerationConfig | None = None  # of a decoder


def load_base(
    name: str,
    revision: str | None,
    *,
    head_class: type[HarmonicPreTrainedModel] | None,
    dtype: torch.dtype,
    dropout: float | None,
    is_causal: bool = False,
) -> Base:
    """Load what a new head is put on.

    Args:
        name: A folder or a name on the Hub; also one of our own checkpoints.
        revision: A revision on the Hub.
        head_class: What loads a checkpoint of its own kind with the head; None leaves heads alone.
        dtype: Of the backbone.
        dropout: Probability of every dropout of the backbone; None is the base's own.
        is_causal: Load a decoder, with the head that it was published with.

    Raises:
        ValueError: The checkpoint does not fill the backbone, is none of this kind, is quantized
            otherwise than by bitsandbytes or torchao, or has no token embeddings.
    """
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    check_quantization(name, config, is_causal=is_causal)
    if dropout is not None:
        set_dropout_(config.get_text_config(), dropout)
    # Beside packed weights, transformers casts some of the others and leaves some: later then.
    source: dict[str, Any] = {"config": config, "revision": revision, "dtype": dtype}
    if quantization_method(config) is not None:
        source["dtype"] = "auto"
    head = generation_config = None
    if config.model_type == "harmonic" and config.is_causal != is_causal:
        kind = "a decoder" if is_causal else "an encoder"
        raise ValueError(f"base {name}: expected {kind}, got {config.architectures}")
    architecture = None if head_class is None else head_class.__name__
    if config.model_type == "harmonic" and architecture in (config.architectures or []):
        loaded = load_checked(head_class, name, **source)
        backbone, head = loaded.model.backbone, loaded.dist_head
        generation_config = loaded.generation_config if is_causal else None
    elif config.model_type == "harmonic":
        backbone = load_checked(HarmonicModel, name, **source).backbone
    elif config.model_type == "neobert" and architecture == "HarmonicForMaskedLM":
        loaded = load_checked(NeoBERTForMaskedLM, name, **source)
        backbone, head = loaded.base_model, LinearHead(config.hidden_size, config.vocab_size)
        head.load_state_dict(loaded.get_submodule("decoder").state_dict())
    elif is_causal:
        backbone, head, generation_config = load_decoder(name, **source)
    else:
        backbone = load_backbone(name, **source)
    check_embeddings(name, backbone)
    cast_parameters_(backbone, dtype)  # a base of ours may have had float32 blocks
    backbone.config.name_or_path = ""  # a local path is nobody's business
    origin = {
        "base_model": Path(name).name if os.path.isabs(name) else name,
        "base_revision": commit_of(name, revision),  # a branch may move on; a folder has none
        "base_dtype": str(dtype).removeprefix("torch."),
        "dtype": dtype,
    }
    labels = list((config.id2label or {}).values())
    return Base(name, backbone, head, labels, origin, generation_config)


def check_embeddings(name: str, backbone: PreTrainedModel) -> None:
    """Refuse a backbone without token embeddings that prototypes could be taken from.

    Raises:
        ValueError: It has none, or quantized ones.
    """
    try:
        weight = getattr(backbone.get_input_embeddings(), "weight", None)
    except NotImplementedError:  # what transformers raises where it finds none
        weight = None
    if weight is None or weight.dim() != 2:
        raise ValueError(
            f"base {name}: expected token embeddings, got none in a {type(backbone).__name__}"
        )
    if is_quantized(weight):
        raise ValueError(f"base {name}: expected token embeddings that are not quantized")


def check_quantization(name: str, config: PreTrainedConfig, *, is_causal: bool) -> None:
    """Refuse a base whose weights are quantized in a way that could not be loaded again.

    Args:
        name: Of the base.
        config: Its configuration.
        is_causal: It is to be a decoder.

    Raises:
        ValueError: By something else than bitsandbytes and torchao, or that is not installed; or
            an encoder.
    """
    method = quantization_method(config)
    if method is None:
        return
    if not is_causal or method not in QUANTIZED:
        known = f" or quantized by one of {list(QUANTIZED)}" if is_causal else ""
        raise ValueError(
            f"base {name}: expected weights in a floating dtype{known}, got {method!r}. Take the "
            "model that they were made of; dtype: bfloat16 halves what a frozen body takes"
        )
    if importlib.util.find_spec(method) is None:
        raise ValueError(
            f"base {name}: expected package {method}, which its weights are quantized with, got "
            f"none. Install it: pip install {method}"
        )


def random_base(
    name: str, revision: str | None, *, dtype: torch.dtype, dropout: float | None
) -> Base:
    """Build a backbone in the shape of a published one, with random weights and no head.

    Args:
        name: A folder or a name on the Hub, of which the configuration alone is read.
        revision: A revision on the Hub.
        dtype: Of the backbone.
        dropout: Probability of every dropout; None is the one in the configuration.
    """
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    config = config.get_text_config()
    vars(config).pop("quantization_config", None)
    if dropout is not None:
        set_dropout_(config, dropout)
    backbone = build_backbone(config)
    cast_parameters_(backbone, dtype)
    config.name_or_path = ""
    origin = {"base_dtype": str(dtype).removeprefix("torch."), "dtype": dtype}
    return Base(name, backbone, None, [], origin)


def copy_head_(head: Head, base: Base) -> None:
    """Copy the weights of the base's own head.

    Raises:
        ValueError: It has none of this name.
    """
    expected = head.settings()["name"]
    if (
        base.head is None
        or base.head.settings()["name"] != expected
        or base.head.state_dict().keys() != head.state_dict().keys()
    ):
        raise ValueError(
            f"init base_head: expected base {base.name} to have a {expected} head with the same "
            "fields"
        )
    caps = [one.settings().get("softcap") for one in (base.head, head)]
    if caps[0] != caps[1]:
        raise ValueError(
            f"head.softcap: expected that of base {base.name}, {caps[0]}, got {caps[1]}"
        )
    head.load_state_dict(base.head.state_dict())
