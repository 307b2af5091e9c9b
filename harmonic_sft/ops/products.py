"""The two gradient products of a chunk's coefficients, accumulated over tiles and chunks."""

import torch
from torch import Tensor

from harmonic_sft.ops.geometry import Geometry
from harmonic_sft.ops.workers import Workers

COMPLETED_ELEMENTS = 3 * 2**17  # of prototypes at once: 1.5 MB, which stays in a core's cache


class GradientProducts:
    """Gradients of hidden states and prototypes from coefficients c_ij = -2 dL/d(d2_ij).

    dx_i = sum_j c_ij (w_j - x_i) and dw_j = sum_i c_ij (x_i - w_j): two matrix products, and row
    and column sums where these do not vanish. For a linear head c_ij is dL/dlogit_ij, and the sums
    drop out.

    Args:
        geometry: How the prototypes `[V, D]` are compared.
        workers: Share the tiles.
        hidden_states: Whether their gradient is wanted.
        prototypes: `[V, D]`, where their gradient is accumulated; None if nobody wants it.

    Attributes:
        columns: `[V]`, sums over the tokens, which complete the prototypes' gradient; or None.
    """

    def __init__(
        self,
        geometry: Geometry,
        workers: Workers,
        *,
        hidden_states: bool,
        prototypes: Tensor | None,
    ):
        self.geometry, self.workers = geometry, workers
        self.wants_hidden, self.prototypes = hidden_states, prototypes
        self.columns: Tensor | None = None
        if prototypes is not None and geometry.with_sums:
            self.columns = prototypes.new_zeros(len(prototypes))
        self.untouched = True

    def start(self, placed: Tensor) -> None:
        """Begin with the hidden states `[T, D]` of a chunk, as the geometry compares them."""
        self.placed = placed
        count = self.workers.count
        self.sums = placed.new_zeros(count, len(placed), 1)
        self.parts = [torch.zeros_like(placed) for _ in range(count if self.wants_hidden else 0)]

    def add(self, worker: int, tile: slice, coefficients: Tensor) -> None:
        """Add the products of a tile's coefficients `[T, W]`, which are overwritten."""
        if self.geometry.with_sums:
            self.sums[worker].add_(coefficients.sum(1, keepdim=True))
            if self.columns is not None:
                self.columns[tile].add_(coefficients.sum(0))
        if self.geometry.scale is not None:
            coefficients.mul_(self.geometry.scale[tile])
        if self.wants_hidden:
            vectors = self.geometry.tile(tile)
            torch.addmm(self.parts[worker], coefficients, vectors, out=self.parts[worker])
        if self.prototypes is not None:  # the first chunk writes, the others add
            target, beta = self.prototypes[tile], 0 if self.untouched else 1
            torch.addmm(target, coefficients.T, self.placed, beta=beta, out=target)

    def hidden_gradient(self) -> Tensor:
        """Return the gradient of the placed hidden states `[T, D]`, and end the chunk."""
        total = sum(self.parts[1:], self.parts[0])
        if self.geometry.with_sums:
            total -= self.placed * self.sums.sum(0)
        return total

    def add_pairs(self, classes: Tensor, coefficients: Tensor) -> Tensor:
        """Add pairs of the chunk by direct difference; return the hidden states' part `[T, D]`.

        Args:
            classes: `[T]`.
            coefficients: `[T]`, 0 where there is no pair.
        """
        vectors, coefficients = self.geometry.rows(classes), coefficients.unsqueeze(1)
        if self.geometry.linear:
            if self.prototypes is not None:
                add_rows_(self.prototypes, classes, self.placed * coefficients)
            return vectors.mul_(coefficients)
        pulls = vectors.sub_(self.placed).mul_(coefficients)  # [T, D]
        if self.prototypes is not None:
            scale = self.geometry.scale
            pushes = -pulls if scale is None else pulls * -scale[classes].unsqueeze(1)
            add_rows_(self.prototypes, classes, pushes)
        return pulls

    def end(self) -> None:
        """Forget the chunk."""
        self.untouched = False
        del self.placed, self.sums, self.parts

    def finish(self) -> None:
        """Complete the prototypes' gradient in place; on the sphere it is made tangent."""
        target, geometry = self.prototypes, self.geometry
        if target is None or geometry.linear:
            return
        # On a CPU little enough for a core's cache, and enough for its operations to be few.
        rows = max(COMPLETED_ELEMENTS // max(target.shape[1], 1), 1)
        size = rows if target.is_cpu else 8192

        def complete(_: int, k: int) -> None:
            part = slice(k * size, (k + 1) * size)
            tile = target[part]
            if self.columns is not None:
                columns = self.columns[part].unsqueeze(1)
                tile.addcmul_(geometry.tile(part), columns, value=-1)
            if geometry.inverse is not None:
                inverse = geometry.inverse[part].unsqueeze(1)
                raw = geometry.prototypes[part].to(geometry.dtype)
                radial = torch.linalg.vecdot(tile, raw).unsqueeze(1) * inverse.square()
                tile.addcmul_(raw, radial, value=-1)
                if geometry.scale is None:
                    tile.mul_(inverse)

        self.workers.run(complete, -(-len(target) // size))


def add_rows_(target: Tensor, index: Tensor, values: Tensor) -> None:
    """Add `values` to the rows `index` of `target`, in the same order in every run."""
    if target.device.type == "cpu":
        target.index_add_(0, index, values)
    else:  # index_add_ would use atomic additions there
        target.index_put_((index,), values, accumulate=True)
