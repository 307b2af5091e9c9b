"""The mean of several softmaxes, each over its own slice of hidden states and prototypes."""

from typing import Any

import torch
from torch import Tensor, nn

from .cosine_heads import CosineHead
from .head import (
    AffineLogits,
    DistanceLogits,
    MixtureLogits,
    SphereHead,
    at_least_float32,
    exact_nll,
    mixture_nll,
)
from .unit_rows import unit_rows

INNER = ("cosine", "dist", "linear")


class MultiHead(SphereHead):
    """The mean of M softmaxes: p_j = mean_m softmax_j of head m on columns m of x and W.

    Hidden states and prototypes are cut into M slices of D / M columns. Every slice is compared as
    the inner head would compare it, on a unit sphere of its own where that head has one. The weight
    stays one matrix, so that it can be tied; bias, scale and exponent of the inner head hold for
    all slices. With M = 1 it is the inner head.

    Args:
        hidden_size: D.
        vocab_size: V.
        num_heads: M, a divisor of D.
        inner: `{"name": ..., fields...}` of a linear, cosine or Euclidean dist head; default:
            linear.

    Raises:
        ValueError: M does not divide D, or the inner head is another one.

    Source:
        Liu 2026, Multi-head cross entropy loss (blog): the sum over linear heads, which the softmax
        of its logarithm makes the mean. Over distances, multi-head harmonic loss, it is ours.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        num_heads: int = 4,
        inner: dict[str, Any] | None = None,
    ):
        from .heads import build_head  # whose table holds this head

        super().__init__()
        inner = inner or {"name": "linear"}
        if num_heads < 1 or hidden_size % num_heads:
            raise ValueError(
                f"num_heads: expected a divisor of hidden_size {hidden_size}, got {num_heads}"
            )
        if inner.get("name") not in INNER:
            raise ValueError(
                f"multi_head inner: expected one of {list(INNER)}, got {inner.get('name')!r}"
            )
        if inner.get("metric", "euclidean") != "euclidean":
            raise ValueError(f"multi_head inner metric: expected euclidean, got {inner['metric']}")
        self.num_heads = num_heads
        self.inner = build_head(inner, hidden_size=hidden_size, vocab_size=vocab_size)
        self.scaled_by_h_exp = self.inner.scaled_by_h_exp and num_heads == 1
        self.unit_sphere = isinstance(self.inner, SphereHead) and self.inner.unit_sphere
        self.renormalize_()

    @property
    def weight(self) -> nn.Parameter:  # ty: ignore[incompatible-property-override]
        """The inner head's weight, `[V, D]`."""
        return self.inner.weight

    @property
    def prototypes(self) -> Tensor:
        """The slices the head compares with, side by side, `[V, D]`: each of norm 1 on spheres."""
        return self._unit_slices(self.weight) if self.unit_sphere else self.weight

    @property
    def h_exp(self) -> float | None:
        """The exponent of all slices, None where they measure no distances."""
        return self.inner.h_exp

    @h_exp.setter
    def h_exp(self, value: float) -> None:
        self.inner.h_exp = value

    def lazy_logits(self, hidden_states: Tensor) -> MixtureLogits:
        """Return what the logits of `[N, D]` are made of: one part for each slice."""
        return MixtureLogits(self._whole(hidden_states), self.num_heads)

    def nll(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return the negative log-likelihood of each label, accurate also where it is close to 0.

        Args:
            hidden_states: `[N, D]`.
            labels: `[N]`, every one a class in `[0, V)`.

        Returns:
            `[N]`, in nats.
        """
        parts = self.lazy_logits(hidden_states).parts
        return mixture_nll(torch.stack([exact_nll(part, labels) for part in parts]))

    def renormalize_(self) -> None:
        """Scale every slice of every prototype back to norm 1; nothing to do off the sphere."""
        if self.unit_sphere:
            with torch.no_grad():
                self.weight.copy_(self.prototypes)

    def reset_parameters(self) -> None:
        """Draw the inner head again."""
        self.inner.reset_parameters()

    def settings(self) -> dict[str, Any]:
        """Return the name and the fields of this head, with the inner head's settings."""
        fields = {"num_heads": self.num_heads, "inner": self.inner.settings()}
        return {"name": "multi_head", **fields}

    def _whole(self, hidden_states: Tensor) -> AffineLogits | DistanceLogits:
        """Return the logits whose columns are those of all slices."""
        if not isinstance(self.inner, CosineHead):
            whole = self.inner.lazy_logits(hidden_states)
            assert isinstance(whole, AffineLogits | DistanceLogits), "INNER holds no other heads"
            return whole
        with torch.autocast(hidden_states.device.type, enabled=False):
            directions = self._unit_slices(hidden_states)  # [N, D]
            return AffineLogits(self.inner.scale * directions, self.prototypes)

    def _unit_slices(self, vectors: Tensor) -> Tensor:
        """Return `[N, D]` with every slice at norm 1, in float32 or better."""
        slices = vectors.reshape(-1, vectors.shape[1] // self.num_heads)  # [N * M, D / M]
        return unit_rows(at_least_float32(slices)).view_as(vectors)
