"""The distance head of harmonic loss."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from .head import DistanceLogits, SphereHead, at_least_float32, exact_nll, unit_rows

Metric = Literal["euclidean", "mahalanobis"]


class DistLayer(SphereHead):
    """Distances to one prototype per token, turned into logits by the harmonic law.

    p_j is proportional to (d_j ** 2 + eps) ** h_exp, so the logits are h_exp * log(d_j ** 2 + eps)
    and the harmonic loss is their cross-entropy. On the unit sphere both sides are normalized and
    d ** 2 = 2 - 2 cos; the normalization is part of the forward pass, so the gradient of a
    prototype is tangent to the sphere.

    The mahalanobis metric, d ** 2 = (x - w)^T (diag(a ** 2) + U U^T) (x - w) with a and U learned,
    is the Euclidean distance of stretched vectors, at V * D * (1 + rank) operations more;
    `unit_sphere` normalizes both sides before. It starts at a = 1 and a small random U.

    The exponent is in `settings()`; it is in the `state_dict` only if it is learned.

    Args:
        hidden_size: D.
        vocab_size: V.
        h_exp: Below 0. Acts on the squared distance, as in the authors' released code; the
            paper's Eq. 2 raises the distance itself to -n, so n = -2 * h_exp.
        unit_sphere: Normalize hidden states and prototypes.
        eps: Added to d ** 2 before the logarithm, in squared units of the hidden states.
        learn_h_exp: Make the exponent a parameter, log(-h_exp), that starts at `h_exp`.
        metric: How d is measured.
        rank: Columns of U in the mahalanobis metric; 0 means the diagonal only.

    Raises:
        ValueError: A number is out of its range, the metric is unknown or removed, or `rank` is
            given for another metric.

    Source:
        Baek et al. 2025, Harmonic Loss Trains Interpretable AI Models, arXiv:2502.01628, Eq. 1-2.
        The paper has no eps, no sphere and a fixed exponent; eps is added, not clamped, so that
        the gradient is smooth and 0 at d = 0. Metrics: Miller-Golub et al. 2026, Rethinking the
        Harmonic Loss via Non-Euclidean Distance Layers, arXiv:2603.10225; their code squares only
        the Euclidean distance, and divides each distance by the smallest of its row.
    """

    scaled_by_h_exp = True

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        h_exp: float = -12.0,
        unit_sphere: bool = True,
        eps: float = 1e-6,
        learn_h_exp: bool = False,
        metric: Metric = "euclidean",
        rank: int = 0,
    ):
        super().__init__()
        if not 0 < eps < math.inf:
            raise ValueError(f"eps: expected a number above 0, got {eps}")
        check_metric(metric)
        if metric != "mahalanobis" and rank != 0:
            raise ValueError(
                f"rank: expected nothing for metric {metric}, got {rank}. It is that of mahalanobis"
            )
        if not 0 <= rank <= hidden_size:
            raise ValueError(f"rank: expected a number from 0 to {hidden_size}, got {rank}")
        self.log_steepness = None
        self.h_exp = h_exp
        self.metric, self.rank = metric, rank
        self.unit_sphere = unit_sphere
        self.eps = float(eps)
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=torch.float32))
        if learn_h_exp:
            self.log_steepness = nn.Parameter(torch.empty((), dtype=torch.float32))
        self.diagonal = self.factor = None
        if metric == "mahalanobis":
            self.diagonal = nn.Parameter(torch.empty(hidden_size, dtype=torch.float32))
        if rank > 0:
            self.factor = nn.Parameter(torch.empty(hidden_size, rank, dtype=torch.float32))
        self.reset_parameters()
        self.renormalize_()

    @property
    def h_exp(self) -> float:
        """The exponent now."""
        if self.log_steepness is None or self.log_steepness.is_meta:
            return self._h_exp
        return -math.exp(self.log_steepness.item())

    @h_exp.setter
    def h_exp(self, value: float) -> None:
        if not -math.inf < value < 0:
            raise ValueError(f"h_exp: expected a number below 0, got {value}")
        self._h_exp = float(value)
        if self.log_steepness is not None:
            self.log_steepness.data.fill_(math.log(-self._h_exp))

    def lazy_logits(self, hidden_states: Tensor) -> DistanceLogits:
        """Return what the logits are made of, for hidden states `[N, D]`."""
        h_exp = self._h_exp if self.log_steepness is None else -self.log_steepness.exp()
        if self.diagonal is None:
            return DistanceLogits(hidden_states, self.weight, h_exp, self.unit_sphere, self.eps)
        return DistanceLogits(*self._stretched(hidden_states), h_exp, False, self.eps)

    def nll(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return the harmonic loss `[N]` of each label, in nats; see `exact_nll`."""
        return exact_nll(self.lazy_logits(hidden_states), labels)

    def reset_parameters(self) -> None:
        """Draw prototypes of norm 1 on average; the exponent is the one given."""
        super().reset_parameters()
        if self.log_steepness is not None:
            init.constant_(self.log_steepness, math.log(-self._h_exp))
        if self.diagonal is not None:
            init.ones_(self.diagonal)
        if self.factor is not None:  # at 0 it would have no gradient
            init.normal_(self.factor, std=0.1 * len(self.factor) ** -0.5)

    def settings(self) -> dict[str, Any]:
        """Return the name and the fields of this head, with the h_exp it has now."""
        fields = {"h_exp": self.h_exp, "unit_sphere": self.unit_sphere, "eps": self.eps}
        learned = {"learn_h_exp": True} if self.log_steepness is not None else {}
        metric = {} if self.diagonal is None else {"metric": self.metric, "rank": self.rank}
        return {"name": "dist", **fields, **learned, **metric}

    def _stretched(self, hidden_states: Tensor) -> list[Tensor]:
        """Return both sides as `_stretch` maps them, normalized before on the sphere."""
        assert self.diagonal is not None, "the mahalanobis metric has a diagonal"
        with maybe_autocast(hidden_states.device.type, enabled=False):
            hidden_states = at_least_float32(hidden_states)
            sides = [hidden_states, self.weight.to(hidden_states.dtype)]
            if self.unit_sphere:
                sides = [unit_rows(side) for side in sides]
            return [_stretch(side, self.diagonal, self.factor) for side in sides]


def _stretch(vectors: Tensor, diagonal: Tensor, factor: Tensor | None) -> Tensor:
    """Map `[..., D]` to `[..., D + rank]`, where the Mahalanobis distance is the Euclidean one.

    |stretch(x) - stretch(w)| ** 2 = (x - w)^T (diag(a ** 2) + U U^T) (x - w), a `[D]` being the
    diagonal and U `[D, rank]` the factor.
    """
    scaled = vectors * diagonal.to(vectors)
    return scaled if factor is None else torch.cat([scaled, vectors @ factor.to(vectors)], dim=-1)


def check_metric(metric: str) -> None:
    """Refuse a metric that is unknown or removed."""
    if metric == "cosine":
        raise ValueError(
            "metric: expected euclidean or mahalanobis, got 'cosine', which is removed. Use "
            "metric: euclidean with unit_sphere: true and twice the h_exp, which is the same"
        )
    if metric not in ("euclidean", "mahalanobis"):
        raise ValueError(f"metric: expected one of ['euclidean', 'mahalanobis'], got {metric!r}")
