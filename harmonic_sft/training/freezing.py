"""What trains and what stays: unfreezing blocks, their precision, and the table that shows it."""

import copy
from collections.abc import Iterable
from fnmatch import fnmatchcase
from itertools import groupby
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from harmonic_sft.models import HarmonicHeadModel, find_blocks, known_blocks
from harmonic_sft.models.backbones import castable, is_quantized
from harmonic_sft.training.run_config import UnfreezeConfig


class Part(NamedTuple):
    """One row of the start-up table: parameters of one kind."""

    name: str
    dtype: str
    parameters: int
    trainable: int
    bytes: int
    training_bytes: int


def unfreeze_(model: HarmonicHeadModel, unfreeze: UnfreezeConfig) -> None:
    """Freeze the backbone except what `unfreeze` names; the head trains."""
    backbone = model.model.backbone
    model.requires_grad_(False)
    parameters, cast = dict(backbone.named_parameters()), {id(p) for p in castable(backbone)}
    for name in _trained_names(backbone, unfreeze):
        parameter = parameters[name].requires_grad_(True)
        if id(parameter) in cast:
            parameter.data = parameter.data.to(getattr(torch, unfreeze.dtype))
    model.dist_head.requires_grad_(True)
    earlier = set(model.config.trained_parameters or ())  # trained by an earlier run on the base
    model.config.trained_parameters = [
        name for name, p in model.named_parameters() if p.requires_grad or name in earlier
    ]
    parameters = {name: p for name, p in parameters.items() if not is_quantized(p)}
    kept = [name for name, parameter in parameters.items() if parameter.dtype == torch.float32]
    if len(kept) < len(parameters):
        # Loading casts to the dtype of the first parameter, except what is named here.
        if next(backbone.parameters()).dtype == torch.float32:
            raise ValueError(
                "model.unfreeze.patterns: expected no token embeddings on a bfloat16 body, got "
                f"{unfreeze.patterns}. Set model.dtype: float32, or leave the embeddings frozen"
            )
        model.config.float32_modules = sorted(kept)


def frozen_copy(module: nn.Module) -> nn.Module:
    """Return a copy in eval mode that never trains; it shares what does not train in `module`."""
    shared = {id(p): p for p in module.parameters() if not p.requires_grad}
    return copy.deepcopy(module, shared).requires_grad_(False).eval()


def _trained_names(backbone: PreTrainedModel, unfreeze: UnfreezeConfig) -> list[str]:
    names = [name for name, _ in backbone.named_parameters()]
    if unfreeze.last_blocks is not None:
        path, blocks = find_blocks(backbone)
        if unfreeze.last_blocks > len(blocks):
            raise ValueError(
                f"model.unfreeze.last_blocks: expected at most {len(blocks)}, "
                f"got {unfreeze.last_blocks}"
            )
        first = len(blocks) - unfreeze.last_blocks
        prefixes = tuple(f"{path}.{index}." for index in range(first, len(blocks)))
        return [name for name in names if name.startswith(prefixes)]
    for pattern in unfreeze.patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"model.unfreeze.patterns: expected a pattern of parameter names such as "
                f"{names[-1]!r}, got {pattern!r}, which matches none"
            )
    return [n for n in names if any(fnmatchcase(n, pattern) for pattern in unfreeze.patterns)]


def parts(model: HarmonicHeadModel) -> list[Part]:
    """Return the parameters by part: embeddings, frozen and trained blocks, the rest, the head."""
    backbone = model.model.backbone
    path, blocks = known_blocks(backbone)
    groups: dict[str, list[nn.Parameter]] = {}
    embeddings = {id(p) for p in backbone.get_input_embeddings().parameters()}
    names = _block_names(blocks)
    for name, parameter in backbone.named_parameters():
        if id(parameter) in embeddings:
            part = "token embeddings"
        elif name.startswith(f"{path}."):
            part = names[int(name.removeprefix(f"{path}.").split(".")[0])]
        else:
            part = "other (norms, positions)"
        groups.setdefault(part, []).append(parameter)
    shared = id(model.dist_head.weight) in embeddings
    head = [p for p in model.dist_head.parameters() if id(p) not in embeddings]
    groups["head (tied)" if shared else "head"] = head
    return [_part(name, parameters) for name, parameters in groups.items()]


def _state(block: nn.Module) -> str:
    """Return whether a block is frozen, frozen with LoRA, or trained."""
    trained = [name for name, parameter in block.named_parameters() if parameter.requires_grad]
    if not trained:
        return "frozen"
    return "frozen, LoRA" if all(".lora_" in name for name in trained) else "trained"


def _block_names(blocks: Iterable[nn.Module]) -> list[str]:
    """Name every block by the span of equally trained blocks that it is in."""
    names: list[str] = []
    for state, alike in groupby(map(_state, blocks)):
        first, count = len(names), len(list(alike))
        span = f"block {first}" if count == 1 else f"blocks {first}-{first + count - 1}"
        names += [f"{span}, {state}"] * count
    return names


def _part(name: str, parameters: Iterable[nn.Parameter]) -> Part:
    parameters = list(parameters)
    trainable = [p for p in parameters if p.requires_grad]
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
    return Part(
        name=name,
        dtype=", ".join(dtypes) or "-",
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in trainable),
        bytes=sum(p.numel() * p.dtype.itemsize for p in parameters),
        training_bytes=sum(_training_bytes(p) for p in trainable),
    )


def _training_bytes(parameter: nn.Parameter) -> int:
    """Return the bytes of gradient and two moments, in float32, and of a 16-bit weight's master."""
    master = 4 if parameter.dtype.itemsize < 4 else 0
    return parameter.numel() * (max(4, parameter.dtype.itemsize) + 8 + master)
