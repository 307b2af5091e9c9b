"""Distances other than the Euclidean one, squared, between hidden states and prototypes."""

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .head import squared_distances

Metric = Literal["euclidean", "cosine", "lp", "chebyshev", "bray_curtis", "mahalanobis"]
# On a GPU the backward pass of torch.cdist holds [rows, V, D] (pytorch/pytorch#24345): 1 GiB.
MAX_ELEMENTS = 2**28
MAX_P = 8.0  # beyond, coordinates of 1e4 to the power p leave float32
SMALL = 1e-6  # added to the denominator of Bray-Curtis, in units of the hidden states


def cosine(hidden_states: Tensor, prototypes: Tensor, p: float) -> Tensor:
    """Square of 1 - cos, from |x - w| ** 2 / 2 of the normalized vectors: exact also near 0."""
    norms = torch.linalg.vector_norm(prototypes, dim=-1).clamp_min(1e-12)
    unit = F.normalize(hidden_states, dim=-1)
    return (squared_distances(unit, prototypes, inverse_norms=1 / norms) / 2).square()


def lp(hidden_states: Tensor, prototypes: Tensor, p: float) -> Tensor:
    """Square of (sum_i |x_i - w_i| ** p) ** (1 / p)."""
    return elementwise_distances(hidden_states, prototypes, p).square()


def chebyshev(hidden_states: Tensor, prototypes: Tensor, p: float) -> Tensor:
    """Square of max_i |x_i - w_i|."""
    return elementwise_distances(hidden_states, prototypes, math.inf).square()


def bray_curtis(hidden_states: Tensor, prototypes: Tensor, p: float) -> Tensor:
    """Square of sum_i |x_i - w_i| / (sum_i |x_i + w_i| + 1e-6).

    scipy's definition for numbers of any sign; the code of arXiv:2603.10225 divides by
    |sum_i (x_i + w_i)|, which is 0 for vectors that have little in common.
    """
    difference = elementwise_distances(hidden_states, prototypes, 1.0)
    total = elementwise_distances(hidden_states, -prototypes, 1.0)
    return (difference / (total + SMALL)).square()


# Of [N, D] and [V, D] in float32 or better: [N, V]. The number p is that of lp alone.
SQUARED_METRICS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "cosine": cosine,
    "lp": lp,
    "chebyshev": chebyshev,
    "bray_curtis": bray_curtis,
}


def check_metric(metric: str, *, p: float, rank: int, hidden_size: int, vocab_size: int) -> None:
    """Refuse a metric that does not exist, does not fit in memory, or another metric's fields.

    Args:
        metric: Its name.
        p: Of lp, from 1 to 8; 1 otherwise.
        rank: Of mahalanobis, from 0 to D; 0 otherwise.
        hidden_size: D.
        vocab_size: V.

    Raises:
        ValueError: One of them.
    """
    names = ["euclidean", *SQUARED_METRICS, "mahalanobis"]
    if metric not in names:
        raise ValueError(f"metric: expected one of {names}, got {metric!r}")
    if metric == "lp" and not 1 <= p <= MAX_P:
        raise ValueError(
            f"p: expected a number from 1 to {MAX_P:g}, got {p}. For more use metric: chebyshev"
        )
    if metric != "lp" and p != 1:
        raise ValueError(f"p: expected nothing for metric {metric}, got {p}. It is that of lp")
    if metric != "mahalanobis" and rank != 0:
        raise ValueError(
            f"rank: expected nothing for metric {metric}, got {rank}. It is that of mahalanobis"
        )
    if not 0 <= rank <= hidden_size:
        raise ValueError(f"rank: expected a number from 0 to {hidden_size}, got {rank}")
    elements = vocab_size * hidden_size
    if metric in ("lp", "chebyshev", "bray_curtis") and elements > MAX_ELEMENTS:
        raise ValueError(
            f"metric {metric}: expected vocab_size * hidden_size of at most {MAX_ELEMENTS}, got "
            f"{elements}. Use euclidean, cosine or mahalanobis, which are matrix products"
        )


def elementwise_distances(hidden_states: Tensor, prototypes: Tensor, p: float) -> Tensor:
    """Distances of `torch.cdist` without a matrix product, a few rows at a time.

    Args:
        hidden_states: `[N, D]`.
        prototypes: `[V, D]`.
        p: 1 or more, `inf` for the largest coordinate.

    Returns:
        `[N, V]`; the gradient at a distance of 0 is 0.
    """
    rows = max(1, MAX_ELEMENTS // prototypes.numel())
    mode = "donot_use_mm_for_euclid_dist"  # p = 2 is accurate near 0 then, too
    pieces = hidden_states.split(rows)
    return torch.cat([torch.cdist(piece, prototypes, p, mode) for piece in pieces])


def stretch(vectors: Tensor, diagonal: Tensor, factor: Tensor | None) -> Tensor:
    """Map vectors to where the Mahalanobis distance is the Euclidean one.

    |stretch(x) - stretch(w)| ** 2 = (x - w)^T (diag(a ** 2) + U U^T) (x - w).

    Args:
        vectors: `[..., D]`.
        diagonal: a, `[D]`.
        factor: U, `[D, rank]`, or None.

    Returns:
        `[..., D + rank]`.
    """
    scaled = vectors * diagonal
    return scaled if factor is None else torch.cat([scaled, vectors @ factor], dim=-1)
