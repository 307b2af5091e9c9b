"""LoRA on frozen layers of the backbone: put in, merged into copies, saved and loaded."""

import logging
import os
from collections.abc import Collection, Iterable
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from peft.utils.integrations import dequantize_module_weight
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME

from harmonic_sft.config import parse
from harmonic_sft.hub.run_folder import ADAPTER_FOLDER, public_base, read_tensors
from harmonic_sft.models import HarmonicHeadModel, find_blocks
from harmonic_sft.models.backbones import settle_quantized_, trains
from harmonic_sft.models.configuration_harmonic import quantization_method
from harmonic_sft.models.partial_checkpoint import BACKBONE, RESUME_FILE
from harmonic_sft.training.checkpoints import trained_state
from harmonic_sft.training.run_config import PeftConfig

logger = logging.getLogger(__name__)
NAME = "default"  # PEFT's name of the only adapter
PREFIX = "base_model.model."  # PEFT puts it before every name
OPTIONS = ("r", "lora_alpha", "lora_dropout", "target_modules", "layers_to_transform")


def as_peft_config(peft_config: PeftConfig | LoraConfig | None) -> PeftConfig | None:
    """Return PEFT's configuration as ours; refuse what has no counterpart."""
    if peft_config is None or isinstance(peft_config, PeftConfig):
        return peft_config
    if type(peft_config) is not LoraConfig:
        name = type(peft_config).__name__
        raise ValueError(f"peft_config: expected a LoraConfig, got a {name}, which is not merged")
    given = {name: getattr(peft_config, name) for name in OPTIONS}
    if given["target_modules"] is None:
        logger.warning("peft_config: no target_modules, so LoRA goes to all linear layers.")
    plain = LoraConfig(**given).to_dict()
    ignored = {"task_type", "base_model_name_or_path", "inference_mode", "revision"}
    if peft_config.modules_to_save == ["dist_head"]:  # the head trains and is saved anyway
        ignored.add("modules_to_save")
    different = [
        name
        for name, value in peft_config.to_dict().items()
        if name not in ignored and value != plain[name]
    ]
    if different:
        raise ValueError(
            f"peft_config: expected no more than {list(OPTIONS)}, got {different}. Leave them out"
        )
    if isinstance(given["target_modules"], set):
        given["target_modules"] = sorted(given["target_modules"])
    if isinstance(given["layers_to_transform"], int):
        given["layers_to_transform"] = [given["layers_to_transform"]]
    return parse(PeftConfig, {name: value for name, value in given.items() if value is not None})


def add_lora_(model: HarmonicHeadModel, peft: PeftConfig) -> None:
    """Put trainable float32 LoRA weights beside frozen linear layers of the blocks.

    The model keeps its class and its single head, and its `save_pretrained` saves it merged.
    `model.config` lists the merged weights as trained, and keeps them in float32 when the rest is
    loaded in 16 bits.

    Source:
        Hu et al. 2021, LoRA: Low-Rank Adaptation of Large Language Models, arXiv:2106.09685.
    """
    backbone = model.model.backbone
    targets = _target_layers(backbone, peft)
    low_precision = next(backbone.parameters()).dtype != torch.float32
    trained = [p for p in backbone.parameters() if p.requires_grad]
    # PEFT would make the weights in the body's dtype, so they get no memory until below. It fails
    # under a FakeTensorMode, as in memory estimates, but works if only the backbone is fake.
    with unset_fake_temporarily():
        config = LoraConfig(
            r=peft.r,
            lora_alpha=peft.lora_alpha,
            lora_dropout=peft.lora_dropout,
            target_modules=targets,
            fan_in_fan_out=isinstance(backbone.get_submodule(targets[0]), Conv1D),
        )
        # PEFT gets the model around the backbone: in a bare backbone of a known type it would take
        # layers with the old names of experts, such as `up_proj`, for experts.
        inject_adapter_in_model(config, model.model, low_cpu_mem_usage=True)
    for parameter in trained:  # PEFT froze everything but LoRA
        parameter.requires_grad_(True)
    for layer in lora_layers(model).values():
        for part in (layer.lora_A[NAME], layer.lora_B[NAME]):
            shape = part.get_parameter("weight").shape
            empty = torch.empty(shape, dtype=torch.float32, device=backbone.device)
            part.weight = nn.Parameter(empty)
        layer.reset_lora_parameters(NAME, init_lora_weights=True)
    config = model.config
    weights = [f"{name}.weight" for name in targets]
    merged = [f"{BACKBONE}{name}" for name in weights]
    config.trained_parameters = list(dict.fromkeys([*(config.trained_parameters or []), *merged]))
    if low_precision:
        config.float32_modules = sorted([*(config.float32_modules or []), *weights])
    settle_quantized_(model, merged=targets)
    # On the instance, so that the class stays; deepcopy and pickle bind the partial to the copy.
    vars(model)["save_pretrained"] = partial(_save_merged, model)


def has_lora(model: HarmonicHeadModel) -> bool:
    """Whether `add_lora_` has changed the model."""
    return bool(lora_layers(model))


def lora_layers(model: HarmonicHeadModel) -> dict[str, LoraLinear]:
    """Return the layers with LoRA by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LoraLinear)}


@torch.no_grad()
def merged_state(model: HarmonicHeadModel) -> dict[str, Tensor]:
    """Return the state of an ordinary model that computes the same; `model` stays as it is.

    Merged weights are float32, also in a quantized body, whose other weights stay packed.
    """
    whole = {name: value for name, value in model.state_dict().items() if ".lora_" not in name}
    state = {name.replace(".base_layer.", "."): value for name, value in whole.items()}
    for name, layer in lora_layers(model).items():
        kept = {f"{name}.{part}" for part in ("weight", "bias")}  # others say how it was packed
        state = {k: v for k, v in state.items() if k in kept or not k.startswith(f"{name}.")}
        weight = dequantize_module_weight(layer.base_layer)
        state[f"{name}.weight"] = weight.float() + layer.get_delta_weight(NAME)
    return state


def _save_merged(
    model: HarmonicHeadModel,
    save_directory: str | os.PathLike,
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    **kwargs: Any,
) -> None:
    """Save a model as `save_pretrained` of its class does, with LoRA merged."""
    if state_dict is None or any(".lora_" in name for name in state_dict):
        state_dict = merged_state(model)
    # With a quantizer transformers would save the model's own weights and ignore `state_dict`.
    quantizer, vars(model)["hf_quantizer"] = vars(model).get("hf_quantizer"), None
    try:
        type(model).save_pretrained(model, save_directory, is_main_process, state_dict, **kwargs)
    finally:
        vars(model)["hf_quantizer"] = quantizer


def save_adapter(model: HarmonicHeadModel, folder: Path) -> None:
    """Write the LoRA weights, the head and unfrozen modules in PEFT's form into `adapter/`.

    The model card says how to load them. Targets have full names, which begin with
    `model.backbone`. The plain base has no such layers, and PEFT says so.
    """
    layers = lora_layers(model)
    modules = _saved_modules(model)
    config = copy(cast(Any, model.model).peft_config[NAME])
    config.modules_to_save, config.target_modules = modules, sorted(layers)
    config.base_model_name_or_path = public_base(model.config)
    config.revision, config.inference_mode = model.config.base_revision, True
    target, state = folder / ADAPTER_FOLDER, model.state_dict()
    target.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(target))
    names = _saved_names(model, modules)
    tensors = {saved: state[live].contiguous() for live, saved in names.items()}
    save_file(tensors, target / ADAPTER_SAFE_WEIGHTS_NAME, metadata={"format": "pt"})


def load_part_(model: HarmonicHeadModel, folder: Path) -> bool:
    """Load what trains, exactly, from a checkpoint whose body is merged, packed or left out.

    Return False, with nothing loaded, for any other checkpoint.
    """
    names: Collection[str]
    if (folder / RESUME_FILE).is_file():
        names, saved = trained_state(model), load_file(folder / RESUME_FILE)
    elif has_lora(model):
        adapter = load_file(folder / ADAPTER_FOLDER / ADAPTER_SAFE_WEIGHTS_NAME)
        names_in_file = _saved_names(model, _saved_modules(model))
        live = {in_file: name for name, in_file in names_in_file.items()}
        names, saved = live.values(), {live.get(name, name): adapter[name] for name in adapter}
    elif quantization_method(model.config) is not None:
        saved = dict(read_tensors(folder, ("dist_head.",)))
        names = [name for name in model.state_dict() if name.startswith("dist_head.")]
    else:
        return False
    if different := sorted(saved.keys() ^ set(names)):
        raise ValueError(
            f"resume: expected the tensors that this run trains, got {str(folder)!r} with others, "
            f"such as {different[0]!r}. Resume with the settings of the run that saved it"
        )
    model.load_state_dict(saved, strict=False)
    return True


def _target_layers(backbone: PreTrainedModel, peft: PeftConfig) -> list[str]:
    """Return the names of the layers that get LoRA, relative to the backbone."""
    path, blocks = find_blocks(backbone)
    chosen = range(len(blocks)) if peft.layers_to_transform is None else peft.layers_to_transform
    outside = sorted(set(chosen) - set(range(len(blocks))))
    if outside:
        raise ValueError(
            f"peft.layers_to_transform: expected blocks from 0 to {len(blocks) - 1}, got {outside}"
        )
    linear = [
        f"{path}.{index}.{name}"
        for index in sorted(set(chosen))
        for name, module in blocks[index].named_modules()
        if isinstance(module, nn.Linear | Conv1D)  # GPT-2 has Conv1D, transposed
        and "Router" not in type(module).__name__  # phimoe's are linear layers, too
    ]
    targets = linear
    if peft.target_modules != "all-linear":
        matched = {name for target in peft.target_modules for name in _matches(target, linear)}
        targets = [name for name in linear if name in matched]
    frozen = [name for name in targets if not trains(backbone.get_submodule(name))]
    if not frozen or (len(frozen) < len(targets) and peft.layers_to_transform is not None):
        open_layer = next((name for name in targets if name not in frozen), "no linear layer")
        raise ValueError(
            "peft.layers_to_transform: expected blocks whose targets model.unfreeze leaves frozen, "
            f"got {open_layer}, which trains as a whole. Choose other blocks or unfreeze fewer"
        )
    return frozen


def _matches(target: str, names: list[str]) -> list[str]:
    """Return the names that are `target` or end with it, as PEFT matches."""
    matching = [name for name in names if f".{name}".endswith(f".{target}")]
    if not matching:
        raise ValueError(
            f"peft.target_modules: expected names of linear layers such as {names[-1:]}, or their "
            f"ends, got {target!r}, which matches none in these blocks"
        )
    return matching


def _saved_modules(model: HarmonicHeadModel) -> list[str]:
    """Return the modules saved whole: the head, and what holds unfrozen parameters."""
    lora = tuple(f"{name}." for name in lora_layers(model))
    trained = [n for n, p in model.named_parameters() if p.requires_grad and not n.startswith(lora)]
    return covering_modules(trained)


def covering_modules(trained: Iterable[str]) -> list[str]:
    """Return the modules PEFT saves whole: the head, and every layer with a trained parameter."""
    layers = {n.rpartition(".")[0] for n in trained if not n.startswith("dist_head.")}
    layers.add("dist_head")
    return sorted(
        name for name in layers if not any(name.startswith(f"{other}.") for other in layers)
    )


def _saved_names(model: HarmonicHeadModel, modules: list[str]) -> dict[str, str]:
    """Return PEFT's name for every tensor of the state that an adapter holds."""
    lora = tuple(f"{name}.lora_" for name in lora_layers(model))
    whole = tuple(f"{module}." for module in modules)
    names = {}
    for key in cast(dict[str, Tensor], model.state_dict()):
        if key.startswith(lora):
            names[key] = PREFIX + key.replace(f".{NAME}.", ".")
        elif key.startswith(whole):
            names[key] = PREFIX + key
    return names
