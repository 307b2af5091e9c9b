"""Bases: what a new head is put on, with the head that it was published with."""

import importlib.util
import os
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from .backbones import build_backbone, cast_parameters_, is_quantized, load_checked, set_dropout_
from .configuration_harmonic import quantization_method
from .head import Head
from .linear_heads import LinearHead
from .modeling_backbone import HarmonicPreTrainedModel, commit_of, load_backbone
from .modeling_neobert import NeoBERTForMaskedLM

QUANTIZED = ("bitsandbytes", "torchao")  # what may stay frozen under a new head
# What stands between a decoder's dot products and its logits. Every other decoder is taken to
# have nothing there, which a trial when it is loaded makes sure of.
MULTIPLIED = {  # by a field of the configuration, or by one over it, if that is a number
    "cohere": ("logit_scale", 1),
    "cohere2": ("logit_scale", 1),
    "cohere2_moe": ("logit_scale", 1),
    "cohere_compass_text": ("logit_scale", 1),
    "falcon_h1": ("lm_head_multiplier", 1),
    "granite": ("logits_scaling", -1),
    "granite_swa": ("logits_scaling", -1),
    "granitemoe": ("logits_scaling", -1),
    "granitemoe_swa": ("logits_scaling", -1),
    "granitemoeshared": ("logits_scaling", -1),
    "granitemoehybrid": ("logits_scaling", -1),
    "hyperclovax": ("logits_scaling", 1),
    "minicpm3": ("logits_scaling", -1),
}
SOFT_CAPPED = (  # at config.final_logit_softcapping, if that is a number
    "beam",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "gemma4_unified_text",
    "nanochat",
    "vaultgemma",
)
TRIED = 8  # tokens of a trial


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
        dtype: The backbone's dtype.
        dropout: Probability of every dropout of the backbone; None is the base's own.
        is_causal: Load a decoder, with the head that it was published with.

    Raises:
        ValueError: The checkpoint does not fill the backbone, is none of this kind, is quantized
            otherwise than by bitsandbytes or torchao, or has no token embeddings.
    """
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    check_quantization(name, config, is_causal=is_causal)
    is_ours = config.model_type == "harmonic"
    if is_ours and config.is_causal != is_causal:
        kind = "a decoder" if is_causal else "an encoder"
        raise ValueError(f"base {name}: expected {kind}, got {config.architectures}")
    if dropout is not None:
        set_dropout_(config.get_text_config(), dropout)
    # Beside packed weights, transformers casts some of the others and leaves some: later then.
    loaded_dtype = dtype if quantization_method(config) is None else "auto"
    source: dict[str, Any] = {"config": config, "revision": revision, "dtype": loaded_dtype}
    architecture = None if head_class is None else head_class.__name__
    head = generation_config = None
    if is_ours and architecture in (config.architectures or []):
        model = load_checked(head_class, name, **source)
        backbone, head = model.model.backbone, model.dist_head
        generation_config = model.generation_config if is_causal else None
    elif config.model_type == "neobert" and architecture == "HarmonicForMaskedLM":
        model = load_checked(NeoBERTForMaskedLM, name, **source)
        backbone, head = model.base_model, LinearHead(config.hidden_size, config.vocab_size)
        head.load_state_dict(model.get_submodule("decoder").state_dict())
    elif is_causal and not is_ours:
        backbone, head, generation_config = _load_decoder(name, **source)
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


def base_of(model: PreTrainedModel, *, dtype: torch.dtype, is_causal: bool) -> Base:
    """Take a model of transformers apart: its backbone, and a decoder's head.

    Where its weights came from is left out: they may have been changed since.

    Args:
        model: Not copied.
        dtype: The backbone is cast to it.
        is_causal: It is a decoder.

    Raises:
        ValueError: It is none of this kind, or has no backbone or token embeddings.
    """
    name = type(model).__name__
    check_quantization(name, model.config, is_causal=is_causal)
    head = generation_config = None
    backbone = cast("PreTrainedModel", model.base_model)
    if is_causal:
        head = _checked_head(model, name)
        generation_config = model.generation_config
    elif isinstance(model, NeoBERTForMaskedLM):
        head = LinearHead(model.config.hidden_size, model.config.vocab_size)
        head.load_state_dict(model.get_submodule("decoder").state_dict())
    check_embeddings(name, backbone)
    cast_parameters_(backbone, dtype)
    backbone.config.name_or_path = ""
    origin = {"base_dtype": str(dtype).removeprefix("torch."), "dtype": dtype}
    return Base(name, backbone, head, [], origin, generation_config)


def random_base(
    name: str, revision: str | None, *, dtype: torch.dtype, dropout: float | None
) -> Base:
    """Build a backbone in the shape of a published one, with random weights and no head.

    Args:
        name: A folder or a name on the Hub, of which the configuration alone is read.
        revision: A revision on the Hub.
        dtype: The backbone's dtype.
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
        name: The base's name.
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


def _load_decoder(
    name: str, config: PreTrainedConfig, **options: Any
) -> tuple[PreTrainedModel, LinearHead, GenerationConfig]:
    """Load a causal language model and take it apart: backbone, head, how it generates.

    Raises:
        ValueError: It is not a native decoder of text with a cache of keys and values, the
            checkpoint does not fill it, or its logits are more than a linear layer, factors and
            soft caps.
    """
    known = AutoModelForCausalLM._model_mapping
    if type(config) not in known or config.get_text_config() is not config:
        raise ValueError(
            f"base {name}: expected a causal language model that transformers knows, of text "
            f"alone, got one of type {config.model_type!r}"
        )
    model = load_checked(AutoModelForCausalLM, name, config, **options)
    return model.base_model, _checked_head(model, name), model.generation_config


def _checked_head(model: PreTrainedModel, name: str) -> LinearHead:
    """Return the head of a decoder, after a trial.

    Raises:
        ValueError: There is no backbone below it, or its logits are more than a linear layer,
            factors and soft caps.
    """
    if model.base_model is model:
        raise ValueError(
            f"base {name}: expected a backbone below the head, got none in {type(model).__name__}"
        )
    head = old_head(model)
    if model.device.type != "meta" and not isinstance(head.weight, FakeTensor):
        _try(model, head, name)
    return head


@torch.no_grad()
def old_head(model: PreTrainedModel) -> LinearHead:
    """Return the head of a causal language model, in float32, as one of ours with the same logits.

    A factor on the logits goes into the weight.

    Raises:
        ValueError: The model has no linear output layer.
    """
    output, config = model.get_output_embeddings(), model.config
    if not isinstance(output, nn.Linear):
        kind = "none" if output is None else f"a {type(output).__name__}"
        raise ValueError(f"base: expected a linear output layer, got {kind}")
    if is_quantized(output.weight):
        raise ValueError("base: expected an output layer that is not quantized")
    vocab_size, hidden_size = output.weight.shape
    softcap = config.final_logit_softcapping if config.model_type in SOFT_CAPPED else None
    factor = 1.0
    if config.model_type in MULTIPLIED:
        field, power = MULTIPLIED[config.model_type]
        value = getattr(config, field)
        factor = 1.0 if value is None else value**power
    head = LinearHead(hidden_size, vocab_size, bias=output.bias is not None, softcap=softcap)
    head.to(output.weight.device)
    head.weight.copy_(output.weight.float() * factor)
    if head.bias is not None:
        head.bias.copy_(output.bias.float() * factor)
    return head


@torch.no_grad()
def _try(model: PreTrainedModel, head: LinearHead, name: str) -> None:
    """Run a few tokens: a decoder in parts must predict what it did, and from the past alone."""
    model.eval()
    vocab_size = model.config.vocab_size
    rows = torch.arange(2 * TRIED, device=model.device).view(2, TRIED) * 7 % vocab_size
    rows[1, :-1] = rows[0, :-1]  # another last token alone
    outputs = model.base_model(input_ids=rows)
    kind = type(model).__name__
    hidden_states = outputs.last_hidden_state
    if _differ(*hidden_states[:, :-1].unbind(), 0.01):
        raise ValueError(
            f"base {name}: expected a decoder, got a {kind} whose tokens see those behind them. "
            "For an encoder set model.task: masked_lm"
        )
    if getattr(outputs, "past_key_values", None) is None:
        raise ValueError(
            f"base {name}: expected a decoder with a cache of keys and values, got a {kind}, which "
            "keeps another state"
        )
    native = model(input_ids=rows).logits
    tolerance = 0.01 if native.dtype == torch.float32 else 0.05
    if _differ(head(hidden_states.flatten(0, 1)).view_as(native), native, tolerance):
        raise ValueError(
            f"base {name}: expected logits of one linear layer, a factor and a soft cap at most, "
            f"got a {kind}, which does more between its hidden states and its logits"
        )


def _differ(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether two tensors differ by more than a share of their size."""
    return bool(torch.dist(one.float(), other.float()) > tolerance * other.float().norm())
