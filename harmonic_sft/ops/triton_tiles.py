"""The row-wise stage of a chunk as Triton kernels: what `TorchTiles` does in PyTorch."""

from collections.abc import Iterator

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs

from harmonic_sft.ops.arguments import Arguments
from harmonic_sft.ops.geometry import Geometry
from harmonic_sft.ops.stages import Chunk
from harmonic_sft.ops.triton_kernels import (
    Coefficients,
    Plan,
    Scores,
    Statistics,
    Weights,
    coefficient_kernel,
    statistics_kernel,
)
from harmonic_sft.ops.triton_rows import OPTIONS, Pairs, Rows

INTERPRETED = bool(knobs.runtime.interpret)
# Rows, classes and warps of one program: of the statistics, and of the coefficients, whose classes
# are of one tile of the statistics.
STATISTICS, COEFFICIENTS = (2, 1024, 4), (16, 256, 4)
if INTERPRETED:
    STATISTICS = COEFFICIENTS = (16, 32, 1)
SCORE_BYTES = 2**27  # of the scores of one block of classes
# Of converted prototypes: all are converted at once if they fit in this, otherwise a block at a
# time.
TERM_BYTES = 160 * 2**20
ALIGNED = 64  # classes: products over other than multiples took three to six times as long
# A tile reports its two closest near pairs, and of these the closest `NEAR_PER_ROW` of a row are
# kept. A row has more only inside a cluster of prototypes; further ones are dropped, since counting
# them would halt the device. Hence the narrower notion of near than on the CPU.
NEAR_PER_ROW = 8
NEAR_SHARE = 2.0**-3


class TritonTiles:
    """Works through one chunk after another on a GPU, without halting it.

    The products of a block of classes are written in float32. 16-bit hidden states enter as they
    are, unless a center is subtracted; float32 prototypes are then the sum of two 16-bit terms.
    Other hidden states enter in float32. One kernel computes the statistics of the products and
    keeps weights for the gradients: in bfloat16 if the hidden states have 16 bits, since gradients
    need no more digits than these. When the normalizer is known, a second kernel turns the weights
    into coefficients, in place.

    Args:
        arguments: The arguments of the call.
        geometry: How the prototypes `[V, D]` are compared.
        h_exp: The exponent.
        hidden_states: `[N, D]`, of all chunks.
        wants_hidden: Whether the hidden states get a gradient.
        prototype_gradient: `[V, D]`, where it is written; None if it is not wanted.
    """

    def __init__(
        self,
        arguments: Arguments,
        geometry: Geometry,
        h_exp: float | Tensor,
        hidden_states: Tensor,
        *,
        wants_hidden: bool,
        prototype_gradient: Tensor | None,
    ):
        self.geometry = geometry
        self.smoothed = arguments.label_smoothing > 0
        self.wants_hidden, self.prototype_gradient = wants_hidden, prototype_gradient
        self.learns_bias = arguments.needs_gradient("class_bias")
        self.hidden_states = hidden_states
        is_16_bit = hidden_states.dtype.itemsize == 2
        self.takes_raw = is_16_bit and geometry.center is None
        self.dtype = torch.bfloat16 if is_16_bit else torch.float32
        distances, self.untouched = not geometry.linear, True
        self.kept_inverse = distances and self.smoothed
        self.kept_exps = distances and self.learns_bias
        # Matrices `[T, V]` of a chunk, in units of float32.
        self.num_kept = (1 + self.kept_inverse + self.kept_exps) * self.dtype.itemsize / 4
        if not isinstance(h_exp, Tensor):  # a copy from the host would halt the device
            h_exp = torch.full((), h_exp, device=arguments.prototypes.device)
        self.h_exp = h_exp.float()
        bias = arguments.class_bias
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.num_classes, self.hidden_size = geometry.prototypes.shape
        self.column_terms = self.column_sums = None
        if distances and geometry.with_sums:
            self.column_terms = geometry.column_terms().contiguous()
        if geometry.with_sums and self.prototype_gradient is not None:
            self.column_sums = self.prototype_gradient.new_zeros(self.num_classes)
        self.splits = self.takes_raw and geometry.prototypes.dtype != hidden_states.dtype
        if self.splits and geometry.kind == "sphere":  # the kernel that splits prototypes writes it
            geometry.inverse = self.h_exp.new_zeros(self.num_classes)
        self.rows = Rows(geometry)
        self.terms: Tensor | None = None
        if self.splits and 4 * self.num_classes * self.hidden_size <= TERM_BYTES:
            self.terms = self._split(slice(0, self.num_classes))
        self.kept: Weights | None = None
        self.weight_sums: Tensor | None = None

    def score(self, chunk: Chunk, *, keep: bool, measure: bool) -> Tensor | None:
        """Write the sums of all tiles; return the columns of near pairs: see `TorchTiles`."""
        num_rows, tile = len(chunk.placed), STATISTICS[1]
        num_tiles = -(-self.num_classes // tile)
        chunk.reserve(num_tiles, measure=measure, best=measure, smoothed=self.smoothed)
        near = None
        if not self.geometry.linear:
            near = chunk.labels.new_empty(2, *chunk.sums.shape)
        sums = None
        if keep and self.wants_hidden and self.dtype == torch.bfloat16 and self.geometry.with_sums:
            sums = chunk.sums.new_empty(2, *chunk.sums.shape)
        found = chunk.log_scale, chunk.sums, near, chunk.moments, chunk.logit_sums, chunk.best
        out = Statistics(*found, weights=sums)
        wanted = (keep, keep and self.kept_inverse, keep and self.kept_exps)
        kept = Weights(*(self._matrix(num_rows) if one else None for one in wanted))
        states = self.hidden_states[chunk.tokens] if self.takes_raw else chunk.placed
        if self.splits:
            states = torch.cat([states, states], 1)
        scores, plan = self._scores(chunk), self._plan(STATISTICS[:2], chunk)
        size = self._block_size(num_rows)
        buffer = chunk.placed.new_empty(num_rows * _aligned(min(size, self.num_classes)))
        for block in _blocks(self.num_classes, size):
            width = _aligned(block.stop - block.start)
            products = buffer[: num_rows * width].view(num_rows, width)
            products[:, block.stop - block.start :].zero_()
            self._multiply(states, block, products)
            grid = -(-num_rows // STATISTICS[0]), -(-(block.stop - block.start) // tile)
            here = scores._replace(products=products, width=width)
            given = here, out, kept, num_rows, block.start // tile
            with torch.cuda.device_of(products):
                statistics_kernel[grid](*given, plan, **OPTIONS | {"num_warps": STATISTICS[2]})
        self.kept, self.weight_sums = kept if keep else None, sums
        return _closest(near)

    def accumulate(self, chunk: Chunk) -> Tensor | None:
        """Add a chunk's products to the gradients, from what `score` kept: see `TorchTiles`."""
        kept, self.kept = self.kept, None
        assert kept is not None, "accumulate: expected score with keep before"
        coefficients = kept.softmax[:, : self.num_classes]
        sums = self._weigh(chunk, kept)
        if self.wants_hidden:
            # Hidden states may be strided, and `zeros_like` alone would take over their order.
            self.total = torch.zeros_like(chunk.placed, memory_format=torch.contiguous_format)
            for block in _blocks(self.num_classes, self._vectors_size()):
                vectors = self._vectors(block)
                for part in _parts(block):
                    local = slice(part.start - block.start, part.stop - block.start)
                    _add_product_(self.total, coefficients[:, part], vectors[local], beta=1)
            self._add_row_sums_(chunk, sums)
        if self.prototype_gradient is not None:  # the first chunk writes, the others add
            operand = chunk.placed.to(self.dtype)
            for part in _parts(slice(0, self.num_classes)):
                weights = coefficients[:, part].T
                total = self.prototype_gradient[part]
                _add_product_(total, weights, operand, beta=1 - self.untouched)
        self.untouched = False
        if self.column_sums is not None and sums.column_sums is not None:
            self.column_sums += sums.column_sums.sum(0)
        return None if sums.class_sums is None else sums.class_sums.sum(0)

    def _add_row_sums_(self, chunk: Chunk, made: Coefficients) -> None:
        """Subtract the hidden states times the sums of their coefficients.

        Far from all prototypes these sums nearly cancel the label's coefficient, so they are taken
        before rounding. What rounding takes from the coefficients is placed at the mean of the
        prototypes, so that the error grows with their spread, not with the distance.
        """
        if made.row_sums is None:
            return
        sums = rounded = made.row_sums.sum(0)
        if self.weight_sums is not None:
            softmax, inverse = self.weight_sums
            sums = (made.shares * softmax).sum(0)
            if made.floor is not None:
                sums -= made.floor * inverse.sum(0)
            if self.geometry.mean is not None:
                self.total.addr_(sums - rounded, self.geometry.mean)
        self.total -= chunk.placed * sums.unsqueeze(1)

    def pair_scores(self, chunk: Chunk, columns: Tensor) -> Tensor:
        """Return dot products or squared distances of pairs: see `TorchTiles`."""
        with torch.cuda.device_of(columns):
            return self.rows.scores(chunk.placed, chunk.inverse, columns)

    def finish(self, chunk: Chunk, coefficients: Tensor, hidden_gradient: Tensor | None) -> None:
        """Add the pairs' part and complete the hidden states' gradient: see `TorchTiles`."""
        known = (chunk.placed, chunk.columns, coefficients.float())
        pairs = Pairs(*(tensor.contiguous() for tensor in known))
        with torch.cuda.device_of(coefficients):
            if hidden_gradient is not None:
                self.rows.pull(pairs, chunk.inverse, self.total, hidden_gradient)
            if self.prototype_gradient is not None:
                self.rows.push(pairs, self.prototype_gradient)

    def complete(self) -> None:
        """Complete the prototypes' gradient after the last chunk."""
        if self.prototype_gradient is not None and not self.geometry.linear:
            with torch.cuda.device_of(self.prototype_gradient):
                self.rows.complete(self.column_sums, self.prototype_gradient)

    def _multiply(self, states: Tensor, block: slice, out: Tensor) -> None:
        """Write hidden states `[T, D]`, or twice that, times the prototypes of some classes."""
        if not self.takes_raw:
            vectors = self.geometry.tile(block)
        elif self.terms is not None:
            vectors = self.terms[block]
        elif self.splits:
            vectors = self._split(block)
        else:
            vectors = self.geometry.prototypes[block]
        for part in _parts(block):
            local = slice(part.start - block.start, part.stop - block.start)
            _wide_product_(out[:, local], states, vectors[local].T)

    def _split(self, block: slice) -> Tensor:
        with torch.cuda.device_of(self.geometry.prototypes):
            return self.rows.split(block, self.hidden_states.dtype)

    def _vectors(self, block: slice) -> Tensor:
        """Return the vectors `[W, D]` that coefficients weigh in the hidden states' gradients."""
        if self.terms is not None and self.terms.dtype == self.dtype:
            return self.terms[block, : self.hidden_size]
        return self.geometry.tile(block).to(self.dtype)

    def _vectors_size(self) -> int:
        """Return for how many classes `_vectors` are made at once."""
        if self.geometry.prototypes.dtype == self.dtype and self.geometry.center is None:
            return self.num_classes  # as they are stored
        size = TERM_BYTES // (self.dtype.itemsize * self.hidden_size)
        return max(size // ALIGNED, 1) * ALIGNED

    def _block_size(self, num_rows: int) -> int:
        """Return for how many classes scores are made at once: whole tiles, blocks of one size."""
        size = max(SCORE_BYTES // (4 * num_rows), 1)
        if self.terms is None:
            size = min(size, max(TERM_BYTES // (4 * self.hidden_size), 1))
        size, tile = -(-self.num_classes // -(-self.num_classes // size)), STATISTICS[1]
        return -(-size // tile) * tile

    def _weigh(self, chunk: Chunk, kept: Weights) -> Coefficients:
        """Turn the weights into coefficients; return what these are made of, and their sums."""
        num_rows = len(chunk.placed)
        block_t, block_v, num_warps = COEFFICIENTS
        block_v = min(block_v, STATISTICS[1])
        num_blocks, num_parts = -(-num_rows // block_t), -(-self.num_classes // block_v)
        shares = chunk.mass * torch.exp(chunk.log_scale - chunk.log_normalizer)  # [tiles, T]
        mass, floor = shares.float(), chunk.floor.float()
        slope = 1.0 if self.geometry.linear else -2 * self.h_exp
        row_sums = column_sums = class_sums = None
        if self.geometry.with_sums:
            row_sums = mass.new_empty(num_parts, num_rows)
            column_sums = mass.new_empty(num_blocks, self.num_classes)
        if self.learns_bias:
            class_sums = mass.new_empty(num_blocks, self.num_classes)
        taken = slope * floor if self.smoothed else None
        sums = (row_sums, column_sums, class_sums)
        out = Coefficients(slope * mass, taken, mass, floor, *sums)
        plan = self._plan((block_t, block_v), chunk)
        with torch.cuda.device_of(mass):
            coefficient_kernel[(num_blocks * num_parts,)](
                kept, out, num_rows, plan, **OPTIONS | {"num_warps": num_warps}
            )
        return out

    def _scores(self, chunk: Chunk) -> Scores:
        """Return all that turns products into logits, without the products."""
        labels = chunk.labels.contiguous()
        geometry = self.geometry
        if geometry.linear:
            return Scores(None, 0, labels, *[None] * 8, bias=self.bias)
        row_factor = chunk.inverse if self.takes_raw else None
        vectors = (chunk.row_terms, self.column_terms, row_factor, geometry.scale, chunk.unit)
        others = (chunk.near_limits, self.h_exp, geometry.eps)
        return Scores(None, 0, labels, *vectors, *others, bias=self.bias)

    def _matrix(self, num_rows: int) -> Tensor:
        """Return a new matrix whose rows start at multiples of 64 numbers, `[T, stride]`."""
        return self.h_exp.new_empty(num_rows, _aligned(self.num_classes), dtype=self.dtype)

    def _plan(self, program: tuple[int, int], chunk: Chunk) -> Plan:
        shape = (self.num_classes, _aligned(self.num_classes), chunk.labels.shape[1])
        kind = (self.geometry.linear, NEAR_SHARE)
        return Plan(*map(tl.constexpr, (*shape, *kind, STATISTICS[1], *program, INTERPRETED)))


def _aligned(num_classes: int) -> int:
    return -(-num_classes // ALIGNED) * ALIGNED


def _blocks(num_classes: int, size: int) -> Iterator[slice]:
    """Yield slices of at most `size` classes."""
    for start in range(0, num_classes, size):
        yield slice(start, min(start + size, num_classes))


def _parts(block: slice) -> list[slice]:
    """Return the part of the classes that is aligned, and the few that are left."""
    middle = block.start + (block.stop - block.start) // ALIGNED * ALIGNED
    parts = slice(block.start, middle), slice(middle, block.stop)
    return [part for part in parts if part.start < part.stop]


def _wide_product_(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Write the product of two matrices, 16-bit ones too, in float32."""
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    elif left.device.type == "cuda":
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:  # the interpreter's tests
        torch.mm(left.float(), right.float(), out=out)


def _add_product_(total: Tensor, left: Tensor, right: Tensor, *, beta: int) -> None:
    """Multiply `total` by beta, 0 or 1, and add left @ right in its own precision."""
    if left.device.type != "cuda":  # the interpreter's tests
        left, right = left.to(total.dtype), right.to(total.dtype)
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, beta=beta, out=total)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)


def _closest(near: Tensor | None) -> Tensor | None:
    """Return the columns of the closest near pairs `[T, S]`, -1 where there is none.

    Args:
        near: `[2, tiles, T]`, as the statistics write it; None for a linear head.
    """
    if near is None:
        return None
    near = near.flatten(0, 1).T
    pairs = near.topk(min(NEAR_PER_ROW, near.shape[1]), dim=1, largest=False).values
    return pairs.int().long()  # the lower half
