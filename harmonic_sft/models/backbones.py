"""Backbones: build one from a configuration, load one and check it, find its blocks."""

import copy
import inspect
from typing import Any, cast

import torch
from torch import nn
from transformers import MODEL_MAPPING, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from .configuration_neobert import NeoBERTConfig
from .modeling_neobert import NeoBERTModel

OFFSET_POSITIONS = ("camembert", "data2vec-text", "roberta", "xlm-roberta", "xlm-roberta-xl")


def build_backbone(config: PreTrainedConfig) -> PreTrainedModel:
    """Build a backbone of `config` with random weights."""
    if config.model_type == "neobert":
        return NeoBERTModel(cast(NeoBERTConfig, config))
    return AutoModel.from_config(config, **without_pooler(config))


def without_pooler(config: PreTrainedConfig) -> dict[str, bool]:
    """Return what leaves the pooler out: a masked model has none, so it could not be filled."""
    if type(config) not in MODEL_MAPPING:
        return {}
    parameters = inspect.signature(MODEL_MAPPING[type(config)].__init__).parameters
    return {"add_pooling_layer": False} if "add_pooling_layer" in parameters else {}


def load_checked(model_class: Any, name: str, config: PreTrainedConfig, **options: Any) -> Any:
    """Load a model and make sure that the checkpoint fills it.

    Weights outside the model's own modules (the base's old head, a pooler) may be left over.

    Args:
        model_class: Has `from_pretrained`.
        name: A folder or a name on the Hub.
        config: The checkpoint's configuration.
        options: Further arguments of `from_pretrained`.

    Raises:
        ValueError: A weight is missing, has another shape, or is not used.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # transformers would print the report that is checked below
    try:
        model, report = model_class.from_pretrained(
            name,
            config=config,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=False,
            **options,
        )
    finally:
        logging.set_verbosity(verbosity)
    own = {key.split(".")[0] for key in model.state_dict()}
    prefix = f"{model.base_model_prefix}."
    unused = {
        key
        for key in report["unexpected_keys"]
        if key.removeprefix(prefix).split(".")[0] in own and not key.endswith("position_ids")
    }
    for problem, keys in (
        ("missing", report["missing_keys"]),
        ("of another shape", report["mismatched_keys"]),
        ("not used", unused),
    ):
        if keys:
            shown = ", ".join(sorted(map(str, keys))[:3]) + (" ..." if len(keys) > 3 else "")
            raise ValueError(
                f"base {name}: expected a checkpoint that fills the backbone, "
                f"got {len(keys)} weights {problem}: {shown}"
            )
    settle_quantized_(model)
    return model


def find_blocks(backbone: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of the transformer blocks.

    Raises:
        ValueError: No list of modules is as long as the configuration says.
    """
    num_blocks = backbone.config.num_hidden_layers
    for name, module in backbone.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_blocks:
            return name, module
    raise ValueError(
        f"backbone: expected a list of {num_blocks} blocks, got none in {type(backbone).__name__}"
    )


def trains(module: nn.Module) -> bool:
    """Whether any parameter of the module is trained."""
    return any(parameter.requires_grad for parameter in module.parameters())


def blocks_without_graph(backbone: PreTrainedModel) -> list[Any]:
    """Return the blocks below the first one that anything trained can reach."""
    if trains(backbone.get_input_embeddings()):
        return []
    blocks = list(find_blocks(backbone)[1])
    first = next((index for index, block in enumerate(blocks) if trains(block)), len(blocks))
    return blocks[:first]


def position_offset(config: PreTrainedConfig) -> int:
    """Return the first position of a row: the RoBERTa family counts from pad_token_id + 1."""
    return config.pad_token_id + 1 if config.model_type in OFFSET_POSITIONS else 0


def max_positions(config: PreTrainedConfig) -> int:
    """Return the longest row that a backbone of `config` takes, in tokens.

    Raises:
        ValueError: The configuration does not say.
    """
    name = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    if name not in config.to_dict():
        raise ValueError(
            "model.base: expected a model with max_position_embeddings, "
            f"got one of type {config.model_type!r}"
        )
    return config.max_position_embeddings - position_offset(config)


def set_dropout_(config: PreTrainedConfig, probability: float) -> None:
    """Set every dropout probability of a configuration.

    Raises:
        ValueError: It has none, and the probability is not 0.
    """
    names = [
        name
        for name, value in config.to_dict().items()
        if ("dropout" in name or name.endswith("pdrop")) and type(value) in (int, float)
    ]
    if probability and not names:
        raise ValueError(
            f"model.dropout: expected a model with dropout, got one of type {config.model_type!r}. "
            "Leave model.dropout out"
        )
    for name in names:
        setattr(config, name, probability)


def cast_parameters_(backbone: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast all parameters but quantized ones; buffers (rotary frequencies) stay as they are."""
    for parameter in backbone.parameters():
        if not is_quantized(parameter):
            parameter.data = parameter.data.to(dtype)


def is_quantized(parameter: torch.Tensor) -> bool:
    """Whether a weight is quantized: a class of bitsandbytes' or torchao's."""
    return type(parameter).__module__.startswith(("bitsandbytes.", "torchao."))


def settle_quantized_(model: PreTrainedModel) -> None:
    """Let a quantized model be saved as it is now; do nothing to another.

    Its configuration names the linear layers that are not packed, as they are called here. And
    bitsandbytes is kept from packing 4-bit weights again for some CPUs: it saves them wrong then.
    """
    quantizer = vars(model).get("hf_quantizer")
    if quantizer is None:
        return
    plain = ["dist_head"]
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            module.hf_quantizer = quantizer
        if isinstance(module, nn.Linear | Conv1D) and not is_quantized(module.weight):
            plain.append(name.removeprefix("model."))  # an ending, also where the body is alone
        if "support_avx512bf16_for_cpu" in vars(module):
            vars(module)["support_avx512bf16_for_cpu"] = False
    quantization = copy.deepcopy(quantizer.quantization_config)
    for field in ("llm_int8_skip_modules", "modules_to_not_convert"):
        if field in vars(quantization):
            setattr(quantization, field, plain)
    model.config.quantization_config = quantization
