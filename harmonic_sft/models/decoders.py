"""Decoders: a published causal language model, taken apart into its backbone and its old head."""

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from .backbones import load_checked
from .linear_heads import LinearHead

# What stands between the old head's dot products and its logits. Every other decoder is taken to
# have nothing there; the tests compare both kinds with transformers' own logits.
MULTIPLIED = {  # by a field of the configuration, or by one over it
    "cohere": ("logit_scale", 1),
    "cohere2": ("logit_scale", 1),
    "granite": ("logits_scaling", -1),
    "granitemoe": ("logits_scaling", -1),
    "granitemoeshared": ("logits_scaling", -1),
    "granitemoehybrid": ("logits_scaling", -1),
}
SOFT_CAPPED = {  # at a field of the configuration, if that is a number
    "gemma2": "final_logit_softcapping",
    "gemma3_text": "final_logit_softcapping",
    "gemma4_text": "final_logit_softcapping",
    "nanochat": "final_logit_softcapping",
    "recurrent_gemma": "logits_soft_cap",
    "vaultgemma": "final_logit_softcapping",
}


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
        ValueError: It is not a native decoder of text, or the checkpoint does not fill it.
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
    return Decoder(model.base_model, old_head(model), model.generation_config)


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
    vocab_size, hidden_size = output.weight.shape
    field = SOFT_CAPPED.get(config.model_type)
    softcap = None if field is None else getattr(config, field)
    factor = 1.0
    if config.model_type in MULTIPLIED:
        field, power = MULTIPLIED[config.model_type]
        factor = getattr(config, field) ** power
    head = LinearHead(hidden_size, vocab_size, bias=output.bias is not None, softcap=softcap)
    head.to(output.weight.device)
    head.weight.copy_(output.weight.float() * factor)
    if head.bias is not None:
        head.bias.copy_(output.bias.float() * factor)
    return head
