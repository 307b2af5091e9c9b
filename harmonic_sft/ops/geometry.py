"""How hidden states and prototypes become scores, and coefficients their gradients."""

from functools import cached_property

import torch
from torch import Tensor

from harmonic_sft.models.head import NEAR, inverse_norms, unit_rows
from harmonic_sft.ops.workers import Workers

# If the mean of the prototypes has this share of their mean squared norm, it is subtracted first:
# otherwise distances, small beside the mean, would lose digits. With a smaller share there is
# little to gain, and distances of hidden states that are far from the mean would lose digits.
DOMINANT = 0.9
CENTER_SAMPLE = 2048  # rows that the mean is taken of: any center is correct, a near one is enough
SQUARED_ROWS = 2048  # of prototypes at once, so that no second table of them is written
COMPLETED_ELEMENTS = 3 * 2**17  # of prototypes at once: 1.5 MB, which stays in a core's cache


class Geometry:
    """How raw hidden states and prototypes enter the matrix products of one call.

    The squared distance of hidden state x_i and prototype j, with t_j of `tile` and s_j of `scale`,
    is `row_terms_i + column_terms_j - 2 * s_j * <x_i, t_j>`.

    Args:
        kind: "linear", "euclidean" or "sphere".
        prototypes: `[V, D]`, raw.
        eps: Added to the squared distance.
        dtype: All arithmetic is done in it, float32 or better.
        centered: Whether the mean of the prototypes is subtracted if it dominates them; False never
            does. None tests on the host whether it dominates, which would halt a GPU. True needs no
            such test: it subtracts the mean or zeros.
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
        # [D], subtracted from both sides (of norm 1 on the sphere); None for 0.
        self.center: Tensor | None = None
        # [D], near the mean of the prototypes; None where it is `center` or not computed.
        self.mean: Tensor | None = None
        # Mean squared norm of the prototypes less the center, a scalar; None for a linear head.
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
        self.spread, is_dominant = energy, share > DOMINANT * energy
        if bool(is_dominant) if centered is None else centered:
            self.center = center.where(is_dominant, 0)
            self.spread = energy - share.where(is_dominant, 0)
        else:
            self.mean = center

    @cached_property
    def inverse(self) -> Tensor | None:
        """`[V]`, 1 / |w| on the sphere, 0 for a prototype of norm 0; None elsewhere.

        Computed on first use, except where kernels split the prototypes: there these write it.
        """
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

    def direct(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return hidden states `[T, D]` for differences, and 1 / |x| `[T, 1]` on the sphere.

        On the sphere they have norm 1. A hidden state of norm 0 has no direction: its distance to
        every prototype is that of a right angle, and its gradient is 0.
        """
        hidden_states = hidden_states.to(self.dtype)
        if self.kind != "sphere":
            return hidden_states, None
        inverse = inverse_norms(hidden_states).unsqueeze(1)
        return hidden_states * inverse, inverse

    def place(self, direct: Tensor) -> Tensor:
        """Return vectors of `direct` or `direct_prototypes` as products compare them."""
        return direct if self.center is None else direct - self.center

    def unit(self, squared: Tensor) -> Tensor:
        """Return a typical squared distance `[T, 1]` of hidden states of squared norm `squared`.

        Logarithms are taken of distances divided by it: h_exp * log(d2) itself is so far from 0
        that rounding it costs a relative error of 1e-5 in p.
        """
        if self.spread is None:
            return torch.ones_like(squared)
        # Above 0 even where all prototypes and the hidden state are one point.
        return (squared + self.spread + self.eps).clamp_min(torch.finfo(squared.dtype).tiny)

    def near_limits(self, squared: Tensor) -> Tensor:
        """Return the squared distances `[T, 1]` below which expansion has lost digits.

        Near means |w| close to |x|, so that |x|^2 + |w|^2 is at most 2.6 |x|^2.
        """
        return squared * (2.6 * NEAR) + self.eps

    def row_terms(self, squared: Tensor, inverse: Tensor | None) -> Tensor | None:
        """Return what the squared distances of each row have in common, `[T, 1]`; None for 0."""
        if self.linear or (self.kind == "sphere" and self.center is None):
            return None
        return squared if inverse is None else squared + (inverse == 0)

    def column_terms(self) -> Tensor:
        """Return what the squared distances to each prototype have in common, `[V]`, with eps."""
        if self.kind == "sphere" and self.center is None:
            return self.prototypes.new_full((len(self.prototypes),), 2 + self.eps, dtype=self.dtype)
        starts = range(0, len(self.prototypes), SQUARED_ROWS)
        tiles = (self.tile(slice(start, start + SQUARED_ROWS)) for start in starts)
        terms = torch.cat([torch.linalg.vecdot(tile, tile) for tile in tiles]).add_(self.eps)
        return terms if self.inverse is None else terms + (self.inverse == 0)

    def direct_prototypes(self, classes: Tensor) -> Tensor:
        """Return the prototypes of `classes` `[P]` for differences, `[P, D]`; see `direct`.

        The center is not subtracted, since that would round them.
        """
        prototypes = self.prototypes[classes].to(self.dtype)
        if self.kind == "sphere":
            prototypes = prototypes * inverse_norms(prototypes).unsqueeze(1)
        return prototypes

    def undirected(self, inverse: Tensor | None, classes: Tensor) -> Tensor | float:
        """Return 1 for each side without a direction, which direct differences leave out.

        Args:
            inverse: `[T, 1]` of the hidden states, from `direct`.
            classes: `[T, S]`.
        """
        if self.inverse is None or inverse is None:
            return 0.0
        return (inverse == 0).to(self.dtype) + (self.inverse[classes] == 0)

    def tile(self, classes: slice) -> Tensor:
        """Return the factors of the products with hidden states, one row for each class, `[W, D]`.

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


class GradientProducts:
    """Gradients of hidden states and prototypes from coefficients c_ij = -2 dL/d(d2_ij).

    dx_i = sum_j c_ij (w_j - x_i) and dw_j = sum_i c_ij (x_i - w_j): two matrix products, and row
    and column sums where these do not vanish. For a linear head c_ij is dL/dlogit_ij, and the sums
    drop out.

    Args:
        geometry: How the prototypes `[V, D]` are compared.
        workers: Share the tiles.
        wants_hidden: Whether the hidden states get a gradient.
        prototype_gradient: `[V, D]`, where it is accumulated; None if it is not wanted.
    """

    def __init__(
        self,
        geometry: Geometry,
        workers: Workers,
        *,
        wants_hidden: bool,
        prototype_gradient: Tensor | None,
    ):
        self.geometry, self.workers = geometry, workers
        self.wants_hidden, self.prototype_gradient = wants_hidden, prototype_gradient
        self.column_sums: Tensor | None = None  # [V], over the tokens so far; None if they drop out
        if prototype_gradient is not None and geometry.with_sums:
            self.column_sums = prototype_gradient.new_zeros(len(prototype_gradient))
        self.untouched = True

    def start_chunk(self, direct: Tensor) -> None:
        """Begin a chunk, with its hidden states `[T, D]` as `Geometry.direct` makes them."""
        self.direct, self.placed = direct, self.geometry.place(direct)
        count = self.workers.count
        self.row_sums = direct.new_zeros(count, len(direct), 1)
        self.hidden_parts = [torch.zeros_like(direct) for _ in range(count * self.wants_hidden)]

    def add(self, worker: int, tile: slice, coefficients: Tensor) -> None:
        """Add the products of a tile's coefficients `[T, W]`, which are overwritten."""
        if self.geometry.with_sums:
            self.row_sums[worker].add_(coefficients.sum(1, keepdim=True))
            if self.column_sums is not None:
                self.column_sums[tile].add_(coefficients.sum(0))
        if self.geometry.scale is not None:
            coefficients.mul_(self.geometry.scale[tile])
        if self.wants_hidden:
            vectors = self.geometry.tile(tile)
            part = self.hidden_parts[worker]
            torch.addmm(part, coefficients, vectors, out=part)
        if self.prototype_gradient is not None:  # the first chunk writes, the others add
            target, beta = self.prototype_gradient[tile], 0 if self.untouched else 1
            torch.addmm(target, coefficients.T, self.placed, beta=beta, out=target)

    def hidden_gradient(self) -> Tensor:
        """Return the gradient `[T, D]` of the placed hidden states from all tiles of the chunk."""
        total = sum(self.hidden_parts[1:], self.hidden_parts[0])
        if self.geometry.with_sums:
            total -= self.placed * self.row_sums.sum(0)
        return total

    def add_pairs(self, classes: Tensor, coefficients: Tensor) -> Tensor:
        """Add one pair of every token by difference; return the hidden states' part `[T, D]`.

        Args:
            classes: `[T]`.
            coefficients: `[T]`, 0 where there is no pair.
        """
        vectors, coefficients = self.geometry.direct_prototypes(classes), coefficients.unsqueeze(1)
        if self.geometry.linear:
            if self.prototype_gradient is not None:
                add_rows_(self.prototype_gradient, classes, self.direct * coefficients)
            return vectors.mul_(coefficients)
        pulls = vectors.sub_(self.direct).mul_(coefficients)  # [T, D]
        if self.prototype_gradient is not None:
            scale = self.geometry.scale
            pushes = -pulls if scale is None else pulls * -scale[classes].unsqueeze(1)
            add_rows_(self.prototype_gradient, classes, pushes)
        return pulls

    def end_chunk(self) -> None:
        """Forget the chunk."""
        self.untouched = False
        del self.direct, self.placed, self.row_sums, self.hidden_parts

    def complete(self) -> None:
        """Complete the prototypes' gradient after the last chunk; on the sphere make it tangent."""
        target, geometry = self.prototype_gradient, self.geometry
        if target is None or geometry.linear:
            return
        # Rows at once: on a CPU as many as stay in a core's cache.
        num_cached = max(COMPLETED_ELEMENTS // max(target.shape[1], 1), 1)
        size = num_cached if target.is_cpu else 8192

        def complete_part(_: int, k: int) -> None:
            part = slice(k * size, (k + 1) * size)
            tile = target[part]
            if self.column_sums is not None:
                sums = self.column_sums[part].unsqueeze(1)
                tile.addcmul_(geometry.tile(part), sums, value=-1)
            if geometry.inverse is not None:
                inverse = geometry.inverse[part].unsqueeze(1)
                raw = geometry.prototypes[part].to(geometry.dtype)
                radial = torch.linalg.vecdot(tile, raw).unsqueeze(1) * inverse.square()
                tile.addcmul_(raw, radial, value=-1)
                if geometry.scale is None:
                    tile.mul_(inverse)

        self.workers.run(complete_part, -(-len(target) // size))


def log_ratio(squared: Tensor, unit: Tensor) -> Tensor:
    """Return log(squared / unit), finite also where the quotient is below all numbers."""
    return torch.log((squared / unit).clamp_min_(torch.finfo(squared.dtype).tiny))


def add_rows_(target: Tensor, index: Tensor, values: Tensor) -> None:
    """Add `values` to the rows `index` of `target`, in the same order in every run."""
    if target.device.type == "cpu":
        target.index_add_(0, index, values)
    else:  # index_add_ would use atomic additions there
        target.index_put_((index,), values, accumulate=True)
