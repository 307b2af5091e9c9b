"""How hidden states and prototypes become scores: dot products or squared distances."""

from functools import cached_property

import torch
from torch import Tensor

from harmonic_sft.models.head import NEAR, inverse_norms, unit_rows

# A mean of the prototypes that holds this share of their squared norm is subtracted first: what is
# left of the distances after it would have lost its digits.
DOMINANT = 0.5
CENTER_SAMPLE = 2048  # rows that the mean is taken of: any center is exact, a near one is enough
SQUARED_ROWS = 2048  # of prototypes at once, so that no second table of them is written


class Geometry:
    """How raw hidden states and prototypes enter the matrix products of one call.

    The squared distance of a pair is `row_i + column_j + inverse_j * <-2 x_i, w_j>`.

    Args:
        kind: "linear", "euclidean" or "sphere".
        prototypes: `[V, D]`, raw.
        eps: Added to the squared distance.
        dtype: All arithmetic is done in it, float32 or better.
        centered: Whether the mean of the prototypes is subtracted; None looks whether it dominates
            them, which would halt a GPU.

    Attributes:
        inverse: `[V]`, 1 / |w| on the sphere, 0 for a prototype of norm 0; None elsewhere. Taken
            when it is first asked for: where kernels split the prototypes they write it.
        center: `[D]`, subtracted from both sides (of norm 1 on the sphere); None for 0.
        spread: Mean squared norm of the prototypes less the center, of no axis; None for a linear
            head.
    """

    def __init__(
        self,
        kind: str,
        prototypes: Tensor,
        eps: float,
        dtype: torch.dtype,
        *,
        centered: bool | None = None,
    ):
        self.kind, self.prototypes, self.eps, self.dtype = kind, prototypes.detach(), eps, dtype
        self.center: Tensor | None = None
        self.spread: Tensor | None = None
        if self.linear:
            return
        if kind == "sphere" and centered is False:
            self.spread = self.prototypes.new_ones((), dtype=dtype)
            return
        sample = self.prototypes[:: max(len(prototypes) // CENTER_SAMPLE, 1)].to(dtype)
        if kind == "sphere":
            sample = unit_rows(sample)
        center, energy = sample.mean(0), sample.square().sum(-1).mean()
        share = center.square().sum()
        self.spread = energy
        if bool(share > DOMINANT * energy) if centered is None else centered:
            self.center, self.spread = center, energy - share

    @cached_property
    def inverse(self) -> Tensor | None:
        """See above."""
        return inverse_norms(self.prototypes).to(self.dtype) if self.kind == "sphere" else None

    @property
    def linear(self) -> bool:
        """Whether scores are dot products."""
        return self.kind == "linear"

    @property
    def with_sums(self) -> bool:
        """Whether gradients need the row and column sums of the coefficients.

        On the sphere these terms are radial and vanish, unless a center is subtracted.
        """
        return self.kind == "euclidean" or self.center is not None

    def place(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return hidden states `[T, D]` as they are compared, and 1 / |x| `[T, 1]` on the sphere.

        A hidden state of norm 0 has no direction: its distance to every prototype is that of a
        right angle, and its gradient is 0.
        """
        hidden_states = hidden_states.to(self.dtype)
        inverse = None
        if self.kind == "sphere":
            inverse = inverse_norms(hidden_states).unsqueeze(1)
            hidden_states = hidden_states * inverse
        if self.center is not None:
            hidden_states = hidden_states - self.center
        return hidden_states, inverse

    def unit(self, squared: Tensor) -> Tensor:
        """Return a squared distance `[T, 1]` typical of placed hidden states of squared norms.

        Logarithms are taken of distances over it: h_exp * log(d2) itself is so far from 0 that
        rounding it costs a relative error of 1e-5 in p.
        """
        if self.spread is None:
            return torch.ones_like(squared)
        # Not 0 either where all prototypes are one, and the hidden state is too.
        return (squared + self.spread).clamp_min(torch.finfo(squared.dtype).tiny)

    def near_limits(self, squared: Tensor) -> Tensor:
        """Return the squared distances `[T, 1]` below which expansion has lost digits.

        Near means |w| close to |x|, so that |x|^2 + |w|^2 is at most 2.6 |x|^2.
        """
        return squared * (2.6 * NEAR) + self.eps

    def row(self, squared: Tensor, inverse: Tensor | None) -> Tensor | None:
        """Return `row_i` `[T, 1]` of the squared distances; None for 0."""
        if self.linear or (self.kind == "sphere" and self.center is None):
            return None
        return squared if inverse is None else squared + (inverse == 0)

    def columns(self) -> Tensor:
        """Return `column_j` `[V]` of the squared distances, eps included."""
        if self.kind == "sphere" and self.center is None:
            return self.prototypes.new_full((len(self.prototypes),), 2 + self.eps, dtype=self.dtype)
        starts = range(0, len(self.prototypes), SQUARED_ROWS)
        tiles = (self.tile(slice(start, start + SQUARED_ROWS)) for start in starts)
        columns = torch.cat([torch.linalg.vecdot(tile, tile) for tile in tiles]).add_(self.eps)
        return columns if self.inverse is None else columns + (self.inverse == 0)

    def rows(self, classes: Tensor) -> Tensor:
        """Return the prototypes of `classes` `[P]` as they are compared, `[P, D]`."""
        prototypes = self.prototypes[classes].to(self.dtype)
        if self.kind == "sphere":
            prototypes = prototypes * inverse_norms(prototypes).unsqueeze(1)
        return prototypes if self.center is None else prototypes - self.center

    def undirected(self, inverse: Tensor | None, classes: Tensor) -> Tensor | float:
        """Return what a direct difference lacks where a side of norm 0 has no direction.

        Args:
            inverse: `[T, 1]` of the hidden states, from `place`.
            classes: `[T, S]`.
        """
        if self.inverse is None or inverse is None:
            return 0.0
        return (inverse == 0).to(self.dtype) + (self.inverse[classes] == 0)

    def tile(self, classes: slice) -> Tensor:
        """Return what multiplies hidden states for some classes, `[W, D]`.

        On the sphere without a center these are the raw prototypes; their products are scaled by
        `inverse`, since a normalized copy of the tile costs more.
        """
        prototypes = self.prototypes[classes].to(self.dtype)
        if self.center is None:
            return prototypes
        if self.inverse is not None:
            prototypes = prototypes * self.inverse[classes].unsqueeze(1)
        return prototypes - self.center

    @property
    def scale(self) -> Tensor | None:
        """`[V]`, what the products with `tile` are multiplied by; None for 1."""
        return self.inverse if self.center is None else None
