"""Backbones: build one, load one and check it, find its blocks, cast and quantize it."""

import copy
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    MODEL_MAPPING,
    AutoModel,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import load_state_dict
from transformers.pytorch_utils import Conv1D
from transformers.utils import CONFIG_NAME, cached_file, logging

from .configuration_neobert import NeoBERTConfig
from .modeling_neobert import NeoBERTModel

# Encoders that count positions from pad_token_id + 1.
OFFSET_POSITIONS = (
    "camembert",
    "data2vec-text",
    "esm",
    "ibert",
    "longformer",
    "luke",
    "mpnet",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
UNBOUNDED = 2**31 - 1  # positions of a backbone that has none, such as BLOOM
# Weights that published checkpoints have and their models do not use: buffers, DeBERTa's position
# table, a copy of the embeddings (mDeBERTa), and the layer of BERT's next-sentence task.
UNUSED = (
    "position_ids",
    ".position_embeddings.weight",
    ".word_embeddings._weight",
    ".seq_relationship.weight",
    ".seq_relationship.bias",
)
# transformers 5.24 renamed the cache that a decoder takes and returns.
CACHE = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"


def take_cache(kwargs: dict[str, Any]) -> Any:
    """Remove the cache from the arguments of a model, under either of its names, and return it."""
    older, cache = kwargs.pop("past_key_values", None), kwargs.pop("cache", None)
    return older if cache is None else cache


def build_backbone(config: PreTrainedConfig) -> PreTrainedModel:
    """Build a backbone of `config` with random weights."""
    if config.model_type == "neobert":
        return NeoBERTModel(cast(NeoBERTConfig, config))
    return AutoModel.from_config(config, **without_pooler(config))


def without_pooler(config: PreTrainedConfig) -> dict[str, bool]:
    """Return the option that leaves the pooler out: checkpoints of masked models have none."""
    if type(config) not in MODEL_MAPPING:
        return {}
    parameters = inspect.signature(MODEL_MAPPING[type(config)].__init__).parameters
    return {"add_pooling_layer": False} if "add_pooling_layer" in parameters else {}


def load_checked(model_class: Any, name: str, config: PreTrainedConfig, **options: Any) -> Any:
    """Load a model and make sure that the checkpoint fills it.

    Weights outside the model's own modules (the base's old head, a pooler) may be left over.

    Raises:
        ValueError: A weight is missing, has another shape, or is not used, or a file is damaged.
    """
    check_whole(Path(name).glob("model*.safetensors"))
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
    # Unused weights in the body count too for a masked model, but not for a decoder: published
    # ones have old buffers there, such as GPT-2's.
    parts = [model, model.base_model] if model_class is AutoModelForMaskedLM else [model]
    own = {key.split(".")[0] for part in parts for key in part.state_dict()}
    prefix = f"{model.base_model_prefix}."
    unused = {
        key
        for key in report["unexpected_keys"]
        if key.removeprefix(prefix).split(".")[0] in own and not key.endswith(UNUSED)
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


def check_whole(files: Iterable[Path]) -> None:
    """Refuse weights that are cut or damaged, by their headers; a missing file passes.

    Raises:
        ValueError: A file of safetensors has no header, or another length.
        PermissionError: A file may not be read; safetensors would report it as missing.
    """
    for path in filter(Path.is_file, files):
        path.open("rb").close()
        try:
            load_state_dict(path, map_location="meta")  # the header alone
        except (OSError, ValueError):  # not damage; loading the file will report it
            continue
        except Exception as error:  # safetensors has a class of its own
            raise ValueError(
                f"{path}: expected whole weights, got a file that is half written or damaged: "
                f"{error}. Copy or download it again"
            ) from error


def load_backbone(name: str, config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """Load the backbone of a checkpoint of transformers, NeoBERT or of ours; see `load_checked`."""
    if config.model_type == "harmonic":
        from .modeling_backbone import HarmonicModel  # it imports this module

        return load_checked(HarmonicModel, name, config, **options).backbone
    backbone_class = NeoBERTModel if config.model_type == "neobert" else AutoModel
    return load_checked(backbone_class, name, config, **options, **without_pooler(config))


def commit_of(name: str, revision: str | None = None, **hub: Any) -> str | None:
    """Return the commit that a revision of a repo stands for, None for a folder."""
    if Path(name).is_dir():
        return None
    path = cached_file(name, CONFIG_NAME, revision=revision, **hub)
    match = re.search(r"/snapshots/([0-9a-f]{40})/", Path(path or "").as_posix())
    return match[1] if match else None


def find_blocks(backbone: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of the transformer blocks.

    Raises:
        ValueError: There is no list of blocks, as in ALBERT, whose blocks share their weights, or
            there is one list for each part of a block, as in XLM.
    """
    lists = _block_lists(backbone)
    if len(lists) != 1:
        raise ValueError(
            f"backbone: expected one list of {backbone.config.num_hidden_layers} blocks, got "
            f"{list(lists)} in {type(backbone).__name__}. Name what trains, without LoRA: "
            "model.unfreeze.patterns"
        )
    return next(iter(lists.items()))


def known_blocks(backbone: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the result of `find_blocks`, or an empty name and an empty list where it raises."""
    lists = _block_lists(backbone)
    return next(iter(lists.items())) if len(lists) == 1 else ("", nn.ModuleList())


def _block_lists(backbone: PreTrainedModel) -> dict[str, nn.ModuleList]:
    """Return the first list of `num_hidden_layers` modules, and its siblings of that length."""
    num_blocks, lists = backbone.config.num_hidden_layers, dict[str, nn.ModuleList]()
    for name, module in backbone.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_blocks:
            first = next(iter(lists), name)
            if name.rpartition(".")[0] == first.rpartition(".")[0]:
                lists[name] = module
    return lists


def trains(module: nn.Module) -> bool:
    """Whether any parameter of the module is trained."""
    return any(parameter.requires_grad for parameter in module.parameters())


def blocks_without_graph(backbone: PreTrainedModel) -> list[Any]:
    """Return the blocks before the first one that trains; none if their input trains."""
    name, blocks = known_blocks(backbone)
    for parameter_name, parameter in backbone.named_parameters():
        if parameter_name.startswith(f"{name}."):
            break
        if parameter.requires_grad:  # embeddings, or a norm of theirs
            return []
    first = next((index for index, block in enumerate(blocks) if trains(block)), len(blocks))
    return list(blocks)[:first]


def position_offset(config: PreTrainedConfig) -> int:
    """Return the first position of a row, 0 for most."""
    return config.pad_token_id + 1 if config.model_type in OFFSET_POSITIONS else 0


def max_positions(config: PreTrainedConfig) -> int:
    """Return the longest row that a backbone of `config` takes, in tokens."""
    name = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    if name not in config.to_dict():
        return UNBOUNDED
    return config.max_position_embeddings - position_offset(config)


def set_dropout_(config: PreTrainedConfig, probability: float) -> None:
    """Set every dropout probability of a configuration.

    Raises:
        ValueError: The configuration has none, and the probability is not 0.
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


def keep_float32_(backbone: PreTrainedModel, built: PreTrainedModel) -> None:
    """Keep the parameters in float32 that its class makes float32 in `built`, a 16-bit model.

    transformers keeps only those that the class names.
    """
    made = {name for name, p in built.named_parameters() if p.dtype == torch.float32}
    backbone._keep_in_fp32_modules_strict = made.union(backbone._keep_in_fp32_modules_strict or ())


def castable(backbone: PreTrainedModel) -> Iterator[nn.Parameter]:
    """Yield all parameters but those that transformers or `keep_float32_` keeps in float32."""
    kept = tuple(f".{name}." for name in backbone._keep_in_fp32_modules_strict or ())
    for name, parameter in backbone.named_parameters():
        if not any(part in f".{name}." for part in kept):
            yield parameter


def cast_parameters_(
    backbone: PreTrainedModel, dtype: torch.dtype, kept: Iterable[str] | None = None
) -> None:
    """Cast `castable` parameters, except quantized and `kept` ones; leave buffers (rotary) alone.

    `kept` are the names of parameters that a run held in float32.
    """
    if dtype != torch.float32:
        with torch.device("meta"):
            config = copy.deepcopy(backbone.config)
            keep_float32_(backbone, type(backbone)._from_config(config, dtype=dtype))
    names = set(kept or ())
    held = {id(p) for name, p in backbone.named_parameters() if name in names}
    for parameter in castable(backbone):
        if not is_quantized(parameter) and id(parameter) not in held:
            parameter.data = parameter.data.to(dtype)


def is_quantized(parameter: torch.Tensor) -> bool:
    """Whether a weight is quantized: a class of bitsandbytes' or torchao's."""
    return type(parameter).__module__.startswith(("bitsandbytes.", "torchao."))


def settle_quantized_(model: PreTrainedModel, merged: Sequence[str] = ()) -> None:
    """Prepare a quantized model for saving; do nothing to any other.

    The configuration gets the names of the linear layers that are not packed, and of those that
    will be saved `merged` with LoRA, named as in the backbone. bitsandbytes is kept from packing
    4-bit weights once more for some CPUs, since it saves those wrong.
    """
    quantizer = vars(model).get("hf_quantizer")
    if quantizer is None:
        return
    plain = ["dist_head", *merged]
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            module.hf_quantizer = quantizer
        if isinstance(module, nn.Linear | Conv1D) and not is_quantized(module.weight):
            plain.append(name.removeprefix("model."))  # also a suffix of the name in the body alone
        # bitsandbytes 0.50.2 undoes this packing in `functional.py:1780` when it saves, and leaves
        # the statistics in bfloat16, and transposed unless they are nested (the same packing as in
        # https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2078). This can go when
        # test_bitsandbytes_still_saves_other_statistics_after_a_pass_on_some_cpus fails.
        if "support_avx512bf16_for_cpu" in vars(module):
            vars(module)["support_avx512bf16_for_cpu"] = False
    quantization = copy.deepcopy(quantizer.quantization_config)
    for field in ("llm_int8_skip_modules", "modules_to_not_convert"):
        if field in vars(quantization):
            setattr(quantization, field, plain)
    model.config.quantization_config = quantization
