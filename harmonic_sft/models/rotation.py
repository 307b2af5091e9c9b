"""A learned rotation of the hidden states before any other head."""

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal
from transformers import initialization as init

from .head import Head, LazyLogits, at_least_float32


class RotationHead(Head):
    """Another head, on hidden states turned by a learned orthogonal matrix R.

    R is the Cayley transform (I + A / 2) (I - A / 2)^-1 of a skew-symmetric A, as torch computes
    it: the family of (I - A) (I + A)^-1, with -2 A for A. A is the part of `skew` below the
    diagonal, minus its transpose; it starts at 0 and R at I. R never mirrors, and turns no plane
    by 180 degrees. One solve of D equations is made in each forward pass.

    Where the inner head compares by dot product, cosine or Euclidean distance, R is no more than
    R^T on all its prototypes: it learns something new only where these are frozen or tied, and
    where the axes matter (a multi_head, an Lp distance).

    Args:
        hidden_size: D.
        vocab_size: V.
        inner: `{"name": ..., fields...}` of the head behind the rotation; default: cosine.

    Source:
        Cayley 1846. Lezcano-Casado 2019, Trivializations for Gradient-Based Optimization on
        Manifolds, arXiv:1909.09501, is what torch follows; here with the base point I.
    """

    def __init__(self, hidden_size: int, vocab_size: int, *, inner: dict[str, Any] | None = None):
        from .heads import build_head  # whose table holds this head

        super().__init__()
        self.inner = build_head(
            inner or {"name": "cosine"}, hidden_size=hidden_size, vocab_size=vocab_size
        )
        self.scaled_by_h_exp = self.inner.scaled_by_h_exp
        # On a layer, `orthogonal` would move the matrix into a module of torch that transformers
        # (5.23) does not initialize where a checkpoint lacks it. So only its map is taken.
        self.skew = nn.Parameter(torch.zeros(hidden_size, hidden_size, dtype=torch.float32))
        layer = nn.Linear(1, 1, bias=False, device="meta")
        orthogonal(layer, orthogonal_map="cayley", use_trivialization=False)
        self.cayley = layer.get_submodule("parametrizations.weight.0")

    @property
    def rotation(self) -> Tensor:
        """R, `[D, D]`, in the precision of the head."""
        return self.cayley(self.skew)

    @property
    def weight(self) -> nn.Parameter:  # ty: ignore[incompatible-property-override]
        """The inner head's weight, `[V, D]`."""
        return self.inner.weight

    @property
    def prototypes(self) -> Tensor:
        """The inner head's prototypes, `[V, D]`: what rotated hidden states are compared with."""
        return self.inner.prototypes

    @property
    def h_exp(self) -> float | None:
        """The inner head's exponent, None for heads without one."""
        return self.inner.h_exp

    @h_exp.setter
    def h_exp(self, value: float) -> None:
        self.inner.h_exp = value

    def rotate(self, hidden_states: Tensor) -> Tensor:
        """Return R x for each row x of `[N, D]`, in float32 or better, whatever autocast says."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            hidden_states = at_least_float32(hidden_states)
            return F.linear(hidden_states, self.rotation.to(hidden_states.dtype))

    def lazy_logits(self, hidden_states: Tensor) -> LazyLogits | None:
        """Return what the inner head's logits of the rotated `[N, D]` are made of."""
        return self.inner.lazy_logits(self.rotate(hidden_states))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the inner head's logits `[N, V]` of the rotated hidden states `[N, D]`."""
        return self.inner(self.rotate(hidden_states))

    def nll(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return the inner head's loss `[N]`, in nats, of the rotated hidden states `[N, D]`."""
        return self.inner.nll(self.rotate(hidden_states), labels)

    def initialize_(self, embeddings: Tensor) -> Self:
        """Copy `embeddings` `[V, D]` into the inner head's prototypes; R stays as it is."""
        self.inner.initialize_(embeddings)
        return self

    def renormalize_(self) -> None:
        """Bring the inner head's prototypes back to where it defines them."""
        self.inner.renormalize_()

    def reset_parameters(self) -> None:
        """Draw the inner head again and set R to I."""
        self.inner.reset_parameters()
        init.zeros_(self.skew)

    def settings(self) -> dict[str, Any]:
        """Return the name of this head and the settings of the inner one."""
        return {"name": "rotation", "inner": self.inner.settings()}
