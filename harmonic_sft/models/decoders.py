"""Decoders: a published causal language model, taken apart into its backbone and its old head."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from .backbones import is_quantized, load_checked
from .linear_heads import LinearHead

# What stands between the old head's dot products and its logits. Every other decoder is taken to
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
SOFT_CAPPED = {  # at a field of the configuration, if that is a number
    "beam": "final_logit_softcapping",
    "gemma2": "final_logit_softcapping",
    "gemma3_text": "final_logit_softcapping",
    "gemma3n_text": "final_logit_softcapping",
    "gemma4_text": "final_logit_softcapping",
    "gemma4_unified_text": "final_logit_softcapping",
    "nanochat": "final_logit_softcapping",
    "vaultgemma": "final_logit_softcapping",
}
TRIED = 8  # tokens of a trial


class Decoder(NamedTuple):
    """A causal language model in parts.

    Attributes:
        backbone: Everything below the head.
        head: What it predicted with; its logits are those of the model.
        generation_config: How it generates.
    """

    backbone: PreTrainedModel
    head: LinearHead
    generation_config: GenerationConfig


def load_decoder(name: str, config: PreTrainedConfig, **options: Any) -> Decoder:
    """Load a causal language model and take it apart.

    Args:
        name: A folder or a name on the Hub.
        config: The checkpoint's configuration.
        options: Further arguments of `from_pretrained`.

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
    if model.base_model is model:
        raise ValueError(
            f"base {name}: expected a backbone below the head, got none in {type(model).__name__}"
        )
    decoder = Decoder(model.base_model, old_head(model), model.generation_config)
    if model.device.type != "meta" and not isinstance(decoder.head.weight, FakeTensor):
        _try(model, decoder.head, name)
    return decoder


@torch.no_grad()
def _try(model: PreTrainedModel, head: LinearHead, name: str) -> None:
    """Run a few tokens: taken apart, a decoder must predict what it did, and from the past alone.

    Raises:
        ValueError: It does not.
    """
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
    field = SOFT_CAPPED.get(config.model_type)
    softcap = None if field is None else getattr(config, field)
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
