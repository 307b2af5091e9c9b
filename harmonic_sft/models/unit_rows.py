"""Vectors of norm 1: where there is no direction, and a cheap gradient."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TINY = 1e-12  # norms up to which a vector has no direction


def inverse_norms(vectors: Tensor) -> Tensor:
    """Return 1 / |v| of the last axis, `[...]`, and 0 for a vector without a direction."""
    dtype = torch.promote_types(vectors.dtype, torch.float32)
    norms = torch.linalg.vector_norm(vectors, dim=-1, dtype=dtype)
    return norms.masked_fill(norms <= TINY, torch.inf).reciprocal()


def unit_rows(rows: Tensor) -> Tensor:
    """Return the rows `[N, D]` at norm 1; one without a direction is 0 and gets no gradient.

    Where the rows are a whole vocabulary, the ten passes over it that `F.normalize` and its
    gradient take cost as much as several matrix products; these are five.
    """
    unit: Tensor = _UnitRows.apply(rows)
    return unit


class _UnitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        scale = inverse_norms(rows).unsqueeze(-1).to(rows.dtype)
        unit = rows * scale
        ctx.save_for_backward(unit, scale)
        return unit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        unit, scale = ctx.saved_tensors
        (grad,) = upstream
        with torch.autocast(grad.device.type, enabled=False):
            radial = torch.linalg.vecdot(grad, unit).unsqueeze(-1)  # [N, 1]
            return torch.addcmul(grad, unit, radial, value=-1).mul_(scale)
