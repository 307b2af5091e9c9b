"""Rows of norm 1 with a cheap gradient."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def unit_rows(rows: Tensor) -> Tensor:
    """Return the rows `[N, D]` at norm 1, as `F.normalize` does.

    Where the rows are a whole vocabulary, the ten passes over it that `F.normalize` and its
    gradient take cost as much as several matrix products; these are five.
    """
    unit: Tensor = _UnitRows.apply(rows)
    return unit


class _UnitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        scale = 1 / torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp_min(1e-12)
        unit = rows * scale
        ctx.save_for_backward(unit, scale)
        return unit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        unit, scale = ctx.saved_tensors
        (grad,) = upstream
        radial = torch.bmm(grad.unsqueeze(1), unit.unsqueeze(2)).squeeze(-1)  # [rows, 1]
        return torch.addcmul(grad, unit, radial, value=-1).mul_(scale)
