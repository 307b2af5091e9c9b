"""The row-wise stage of a chunk as Triton kernels: what `TorchTiles` does in PyTorch."""

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs

from harmonic_sft.ops.arguments import Arguments
from harmonic_sft.ops.chunk import Chunk
from harmonic_sft.ops.geometry import Geometry
from harmonic_sft.ops.products import GradientProducts
from harmonic_sft.ops.triton_kernels import (
    Coefficients,
    Plan,
    Scores,
    Statistics,
    coefficient_kernel,
    statistics_kernel,
)
from harmonic_sft.ops.triton_rows import Pairs, Rows

INTERPRETED = bool(knobs.runtime.interpret)
# Said aloud, because triton 3.9 warns where the default of a later version will differ.
OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
BLOCK_ROWS, BLOCK_CLASSES = (16, 32) if INTERPRETED else (32, 128)
# Of one product. Its converted prototypes and its 16-bit coefficients are small copies.
PRODUCT_CLASSES, PRODUCT_BYTES = 2**14, 2**27
# A tile reports its closest near pair. More than this many of a row (a cluster of prototypes that
# the hidden state sits in) are dropped, since counting them would halt the device; hence the
# narrower notion of near than on the CPU.
NEAR_PER_ROW = 4
NEAR_SHARE = 2.0**-3


class TritonTiles:
    """Works through one chunk after another on a GPU, without halting it.

    The products of a chunk are written once, in float32: 16-bit hidden states as they are, times
    prototypes that are the sum of two 16-bit terms if they are float32; other hidden states in
    float32. The statistics are taken of them, then the coefficients.

    Args:
        arguments: The arguments of the call.
        geometry: How the prototypes `[V, D]` are compared.
        h_exp: The exponent.
        hidden_states: `[N, D]`, of all chunks.
        gradients: Takes the gradients of hidden states and prototypes.
    """

    num_kept = 1  # matrix `[T, V]` of float32: the products

    def __init__(
        self,
        arguments: Arguments,
        geometry: Geometry,
        h_exp: float | Tensor,
        hidden_states: Tensor,
        gradients: GradientProducts,
    ):
        self.geometry, self.rows = geometry, Rows(geometry)
        self.smoothed = arguments.label_smoothing > 0
        self.gradients = gradients
        self.learns_bias = arguments.needs_gradient("class_bias")
        self.hidden_states = hidden_states
        self.takes_raw = hidden_states.dtype.itemsize == 2 and geometry.center is None
        num_classes, hidden_size = geometry.prototypes.shape
        size = min(PRODUCT_CLASSES, max(PRODUCT_BYTES // (4 * hidden_size), 1))
        size = -(-num_classes // -(-num_classes // size))  # blocks of one size
        size = -(-size // BLOCK_CLASSES) * BLOCK_CLASSES
        self.blocks = [
            slice(start, min(start + size, num_classes)) for start in range(0, num_classes, size)
        ]
        if not isinstance(h_exp, Tensor):  # a copy from the host would halt the device
            h_exp = torch.full((), h_exp, device=arguments.prototypes.device)
        self.h_exp = h_exp.float()
        bias = arguments.class_bias
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.column = self.column_factor = None
        if not geometry.linear:
            self.column = geometry.columns().contiguous()
            scale = geometry.scale
            self.column_factor = torch.ones_like(self.column) if scale is None else scale
        self.kept: tuple[Tensor, Tensor | None] | None = None

    def score(self, chunk: Chunk, *, keep: bool, measure: bool) -> Tensor | None:
        """Write the sums of all tiles; return the columns of near pairs: see `TorchTiles`."""
        products = self._products(chunk)
        num_rows, num_classes = products.shape
        num_tiles = -(-num_classes // BLOCK_CLASSES)
        chunk.reserve(num_tiles, measure=measure, smoothed=self.smoothed)
        near = None
        if not self.geometry.linear:
            near = torch.empty_like(chunk.sums, dtype=torch.int32)
        out = Statistics(
            chunk.log_scale, chunk.sums, near, chunk.moments, chunk.logit_sums, chunk.best
        )
        scores, plan, grid = self._launch(chunk, products)
        with torch.cuda.device_of(products):
            statistics_kernel[grid](scores, out, num_rows, plan, **OPTIONS)
        self.kept = (products, near) if keep else None
        return _closest(near)

    def accumulate(self, chunk: Chunk) -> Tensor | None:
        """Add a chunk's products to the gradients, from what `score` kept: see `TorchTiles`."""
        kept, self.kept = self.kept, None
        gradients = self.gradients
        assert kept is not None, "accumulate: expected score with keep before"
        products, near = kept
        scores, plan, grid = self._launch(chunk, products)
        num_rows, num_classes = products.shape
        with_sums = self.geometry.with_sums
        row_sums = products.new_empty(grid[1], num_rows) if with_sums else None
        column_sums = products.new_empty(grid[0], num_classes) if with_sums else None
        class_sums = products.new_empty(grid[0], num_classes) if self.learns_bias else None
        known = (chunk.log_normalizer, chunk.mass, chunk.floor)
        terms = [row.float().contiguous() for row in known]
        for block in self.blocks:
            values = products[:, block]  # float32 coefficients take the products' place
            if gradients.dtype != torch.float32:
                values = _padded_rows(products, num_rows, values.shape[1], gradients.dtype)
            out = Coefficients(*terms, near, values, row_sums, column_sums, class_sums)
            here = plan._replace(kept_stride=tl.constexpr(values.stride(0)))
            first, count = block.start // BLOCK_CLASSES, -(-values.shape[1] // BLOCK_CLASSES)
            with torch.cuda.device_of(products):
                coefficient_kernel[grid[0], count](scores, out, num_rows, first, here, **OPTIONS)
            gradients.multiply(0, block, values)
        if row_sums is not None and column_sums is not None:
            gradients.add_sums(row_sums.sum(0), column_sums.sum(0))
        return None if class_sums is None else class_sums.sum(0)

    def pair_scores(self, chunk: Chunk, columns: Tensor) -> Tensor:
        """Return dot products or squared distances of pairs: see `TorchTiles`."""
        with torch.cuda.device_of(columns):
            return self.rows.scores(chunk.placed, columns)

    def finish(self, chunk: Chunk, slopes: Tensor, hidden_gradient: Tensor | None) -> None:
        """Add the pairs' part and complete the hidden states' gradient: see `TorchTiles`."""
        gradients, known = self.gradients, (chunk.placed, chunk.columns, slopes.float())
        pairs = Pairs(*(tensor.contiguous() for tensor in known))
        with torch.cuda.device_of(slopes):
            if hidden_gradient is not None:
                total = gradients.hidden_gradient()
                self.rows.pull(pairs, chunk.inverse, total, hidden_gradient)
            if gradients.prototypes is not None:
                self.rows.push(pairs, gradients.prototypes)
        gradients.end()

    def complete(self) -> None:
        """Complete the prototypes' gradient after the last chunk."""
        if self.gradients.prototypes is not None and not self.geometry.linear:
            with torch.cuda.device_of(self.gradients.prototypes):
                self.rows.complete(self.gradients.columns, self.gradients.prototypes)

    def _products(self, chunk: Chunk) -> Tensor:
        """Return hidden states times prototypes, `[T, V]` in float32."""
        geometry, states = self.geometry, self.hidden_states[chunk.tokens]
        num_classes = len(geometry.prototypes)
        products = _padded_rows(chunk.placed, len(states), num_classes, chunk.placed.dtype)
        doubled = states
        if geometry.prototypes.dtype != states.dtype:
            doubled = torch.cat([states, states], 1)
        for block in self.blocks:
            if not self.takes_raw:
                tile = geometry.tile(block)
                torch.mm(chunk.placed, tile.T, out=products[:, block])
                continue
            tile = geometry.prototypes[block]
            if tile.dtype != states.dtype:  # a high and a low term, in one product
                with torch.cuda.device_of(tile):
                    tile = self.rows.split(block, states.dtype)
            wide_product(doubled, tile.T, products[:, block])
        return products

    def _launch(self, chunk: Chunk, products: Tensor) -> tuple[Scores, Plan, tuple[int, int]]:
        """Return what both kernels are given."""
        num_rows, num_classes = products.shape
        labels = chunk.labels.contiguous()
        scores = Scores(products, labels, *[None] * 7, bias=self.bias)
        if not self.geometry.linear:
            row_factor = torch.full_like(chunk.unit, -2.0)
            if self.takes_raw and chunk.inverse is not None:
                row_factor = row_factor * chunk.inverse
            row = torch.zeros_like(chunk.unit) if chunk.row is None else chunk.row
            near = NEAR_SHARE * chunk.near_limits
            vectors = (row, self.column, row_factor, self.column_factor, chunk.unit, near)
            scores = Scores(products, labels, *vectors, h_exp=self.h_exp, bias=self.bias)
        shape = (num_classes, products.stride(0), labels.shape[1])
        grid = (-(-num_rows // BLOCK_ROWS), -(-num_classes // BLOCK_CLASSES))
        return scores, Plan(*map(tl.constexpr, (*shape, BLOCK_ROWS, BLOCK_CLASSES))), grid


def _padded_rows(like: Tensor, num_rows: int, num_classes: int, dtype: torch.dtype) -> Tensor:
    """Return a new `[T, V]` matrix, whose rows start at multiples of 64 numbers; 0 behind V."""
    rows = like.new_empty(num_rows, -(-num_classes // 64) * 64, dtype=dtype)
    rows[:, num_classes:].zero_()
    return rows[:, :num_classes]


def wide_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write the product of 16-bit matrices in float32."""
    if left.device.type == "cuda":
        torch.mm(left, right, out_dtype=torch.float32, out=out)
    else:  # the interpreter's tests
        torch.mm(left.float(), right.float(), out=out)


def _closest(near: Tensor | None) -> Tensor | None:
    """Return the columns of near pairs `[T, S]`, -1 where there is none."""
    if near is None:
        return None
    columns = near.T.long()  # [T, tiles]
    return columns.topk(min(NEAR_PER_ROW, columns.shape[1]), dim=1).values
