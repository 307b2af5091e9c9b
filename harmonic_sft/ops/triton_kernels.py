"""The row-wise stage of cross-entropy as Triton kernels over the products of some classes.

Legend: T rows of a chunk, W classes of a block, whose scores are in the cache when they are read,
tile = the classes that one program of the statistics handles, counted through all blocks. Every
output element has one writer, so nothing is atomic and every run is the same.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice


class Scores(NamedTuple):
    """What turns products into logits; None = not part of this head."""

    products: Any  # [T, W] float32
    width: Any  # of its rows: W, up to a multiple of 64. No constexpr, since it varies with T
    labels: Any  # [T, num_labels], -1 = none
    row: Any  # [T]; d2 = row + column - 2 * row_factor * column_factor * product
    column: Any  # [V]; None is 2 + eps, of points on the sphere
    row_factor: Any  # [T]
    column_factor: Any  # [V]
    unit: Any  # [T]
    near: Any  # [T], limits of near pairs
    h_exp: Any  # one number on the device
    eps: Any
    bias: Any  # [V]


class Statistics(NamedTuple):
    """Where the statistics go, `[num_tiles, T]`; None = not wanted."""

    log_scale: Any
    sums: Any
    near: Any  # [2, num_tiles, T], the closest near pairs: see `_take_closest`
    moments: Any  # [3, num_tiles, T]
    logits: Any
    best: Any
    weights: Any  # [2, num_tiles, T], sums of `Weights.softmax` and `.inverse` before rounding


class Weights(NamedTuple):
    """What is kept of each class for the gradients, `[T, V]`, rows padded; None = not needed."""

    softmax: Any  # e / d2, or e for a linear head
    inverse: Any  # 1 / d2
    exps: Any  # e


class Coefficients(NamedTuple):
    """What the coefficients are made of, and which sums of them are wanted; None = not part."""

    shares: Any  # [num_tiles, T], of the weights in the coefficients
    floor: Any  # [T], what is subtracted of `Weights.inverse`, or of all
    mass: Any  # [num_tiles, T], of `Weights.exps` in the bias's gradient
    bias_floor: Any  # [T]
    row_sums: Any  # [num_parts, T]
    column_sums: Any  # [num_blocks, V]
    class_sums: Any  # [num_blocks, V]


class Plan(NamedTuple):
    """What a kernel is compiled for; every field is a `tl.constexpr`."""

    num_classes: Any
    stride: Any  # of the rows of `[T, V]` matrices: V, up to a multiple of 64
    num_labels: Any
    linear: Any
    near_share: Any  # of the limits of near pairs
    tile: Any  # classes of one tile of the statistics
    block_t: Any  # rows of one program
    block_v: Any  # classes of one program
    interpreted: Any


@triton.jit
def _load_row(ptr, rows, num_rows):
    return tl.load(ptr + rows, mask=rows < num_rows, other=0.0)[:, None]


@triton.jit
def _load_column(ptr, columns, plan):
    return tl.load(ptr + columns, mask=columns < plan.num_classes, other=0.0)[None, :]


@triton.jit
def _log(values, plan):
    """The logarithm of the hardware, with an absolute error of 2e-7."""
    return tl.log(values) if plan.interpreted else libdevice.fast_logf(values)


@triton.jit
def _load_scores(scores, rows, columns, first, num_rows, plan):
    """Products or squared distances of one tile, and which of them exist and are no label."""
    # What stands behind the last class is read with it, so that reads are whole vectors.
    local = columns - first
    inside = (rows < num_rows)[:, None] & (local < scores.width)[None, :]
    ptrs = scores.products + rows.to(tl.int64)[:, None] * scores.width + local[None, :]
    keep = inside & (columns < plan.num_classes)[None, :]
    values = tl.load(ptrs, mask=inside, other=0.0)
    for slot in tl.static_range(plan.num_labels):
        ptrs = scores.labels + rows * plan.num_labels + slot
        label = tl.load(ptrs, mask=rows < num_rows, other=-1)
        keep = keep & (label[:, None] != columns[None, :])
    if not plan.linear:
        values *= -2.0
        if scores.row_factor is not None:
            values *= _load_row(scores.row_factor, rows, num_rows)
        if scores.column_factor is not None:
            values *= _load_column(scores.column_factor, columns, plan)
        if scores.column is None:
            values += 2.0 + scores.eps
        else:
            values += _load_column(scores.column, columns, plan)
        if scores.row is not None:
            values += _load_row(scores.row, rows, num_rows)
    return values, keep


@triton.jit
def _without_nan(values, replacement):
    """Values to take a minimum or maximum of; a NaN shows in the sums."""
    return tl.where(values == values, values, replacement)


@triton.jit
def _peaks(logits, keep):
    """The largest logit of each row, 0 where nothing is kept."""
    peaks = tl.max(_without_nan(tl.where(keep, logits, float("-inf")), float("-inf")), axis=1)
    return tl.where(peaks == float("-inf"), 0.0, peaks)


@triton.jit
def _take_closest(distances, keep, limits, columns):
    """Take out the closest pair of each row if it is near.

    A near pair is one int64 that sorts by distance: the bits of its squared distance in the upper
    half, its column in the lower. If there is none, it is the largest int64, whose lower half is
    -1.
    """
    nearest = tl.min(_without_nan(distances, float("inf")), axis=1)
    near = nearest < limits
    at_nearest = distances == nearest[:, None]
    place = tl.min(tl.where(at_nearest, columns[None, :], 2**30), axis=1)
    place = tl.where(near, place, -1)
    bits = tl.maximum(nearest, 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    pair = tl.where(near, (bits << 32) | place, 2**63 - 1)
    keep = keep & (columns[None, :] != place[:, None])
    return tl.where(keep, distances, float("inf")), keep, pair


@triton.jit
def _leave_out(distances, keep, limits, columns, plan):
    """Take out the two closest pairs of each row if they are near; find the closest that is left.

    Returns:
        Distances, what is kept, the least distance, and the pairs, as `_take_closest` has them.
    """
    distances = tl.where(keep, distances, float("inf"))
    nearest = tl.min(_without_nan(distances, float("inf")), axis=1)
    first = tl.full((plan.block_t,), 2**63 - 1, tl.int64)
    second = first
    if tl.max((nearest < limits).to(tl.int32), axis=0) > 0:
        distances, keep, first = _take_closest(distances, keep, limits, columns)
        distances, keep, second = _take_closest(distances, keep, limits, columns)
        # Only a third near pair of one tile can be below this floor. Its distance is then rounding
        # error, perhaps a negative one, which must not reach the logarithm.
        floor = tl.maximum(limits * 2.0**-10, 1e-30)[:, None]
        distances = tl.where(distances < floor, floor, distances)
        distances = tl.where(keep, distances, float("inf"))
        nearest = tl.min(_without_nan(distances, float("inf")), axis=1)
    return distances, keep, nearest, (first, second)


@triton.jit
def _store_moments(logits, exps, keep, bias, rows, columns, tile, out, num_rows, plan):
    """Store the sums of e * log e, of e * bias and of the biases, and the best columns."""
    inside = rows < num_rows
    slots = tile.to(tl.int64) * num_rows + rows
    step = tl.cdiv(plan.num_classes, plan.block_v) * num_rows.to(tl.int64)
    best = tl.argmax(_without_nan(tl.where(keep, logits, float("-inf")), float("-inf")), axis=1)
    tl.store(out.best + slots, (tile * plan.block_v + best).to(tl.int64), mask=inside)
    products = exps * tl.where(exps != 0.0, logits, 0.0)
    tl.store(out.moments + slots, tl.sum(products, axis=1), mask=inside)
    finite = tl.where(bias == float("-inf"), 0.0, bias)
    tl.store(out.moments + step + slots, tl.sum(exps * finite, axis=1), mask=inside)
    there = tl.where(keep & (bias != float("-inf")), finite, 0.0)
    tl.store(out.moments + 2 * step + slots, tl.sum(there, axis=1), mask=inside)


@triton.jit
def _load(matrix, rows, columns, num_rows, plan):
    """Load one tile of a `[T, V]` matrix."""
    ptrs = matrix + rows.to(tl.int64)[:, None] * plan.stride + columns[None, :]
    there = (rows < num_rows)[:, None] & (columns < plan.stride)[None, :]
    return tl.load(ptrs, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _store(out, values, rows, columns, num_rows, plan):
    """Store one tile of a `[T, V]` matrix."""
    ptrs = out + rows.to(tl.int64)[:, None] * plan.stride + columns[None, :]
    there = (rows < num_rows)[:, None] & (columns < plan.stride)[None, :]
    tl.store(ptrs, values.to(out.dtype.element_ty), mask=there)


@triton.jit
def _keep(kept, sums, slots, exps, inverse, rows, columns, num_rows, plan):
    """Store the weights of one tile and, in `sums`, their sums."""
    if sums is not None:
        inside = rows < num_rows
        tl.store(sums + slots, tl.sum(exps * inverse, axis=1), mask=inside)
        if kept.inverse is not None:
            step = tl.cdiv(plan.num_classes, plan.block_v) * num_rows.to(tl.int64)
            tl.store(sums + step + slots, tl.sum(inverse, axis=1), mask=inside)
    if kept.softmax is not None:
        _store(kept.softmax, exps * inverse, rows, columns, num_rows, plan)
    if kept.inverse is not None:
        _store(kept.inverse, inverse, rows, columns, num_rows, plan)
    if kept.exps is not None:
        _store(kept.exps, exps, rows, columns, num_rows, plan)


@triton.jit(do_not_specialize=["num_rows", "first"])
def statistics_kernel(scores, out, kept, num_rows, first, plan):
    """Sums over one tile of its rows, and its weights: what `TorchTiles` writes.

    The block begins with the tile `first`.
    """
    tile = first + tl.program_id(1)
    rows = tl.program_id(0) * plan.block_t + tl.arange(0, plan.block_t)
    columns = tile * plan.block_v + tl.arange(0, plan.block_v)
    inside = rows < num_rows
    slots = tile.to(tl.int64) * num_rows + rows
    logits, keep = _load_scores(scores, rows, columns, first * plan.block_v, num_rows, plan)
    log_scale = tl.zeros((plan.block_t,), tl.float32)
    inverse = 1.0
    if not plan.linear:
        limits = plan.near_share * tl.load(scores.near + rows, mask=inside, other=0.0)
        distances, keep, nearest, pairs = _leave_out(logits, keep, limits, columns, plan)
        tl.store(out.near + slots, pairs[0], mask=inside)
        step = tl.cdiv(plan.num_classes, plan.block_v) * num_rows.to(tl.int64)
        tl.store(out.near + step + slots, pairs[1], mask=inside)
        nearest = tl.where(nearest == float("inf"), 1.0, nearest)
        h_exp = tl.load(scores.h_exp)
        # The ratio keeps digits that a difference of large logits would lose.
        ratio = tl.where(keep, distances * (1.0 / nearest)[:, None], 1.0)
        logits = h_exp * _log(ratio, plan)
        log_scale = h_exp * tl.log(nearest / tl.load(scores.unit + rows, mask=inside, other=1.0))
        inverse = 1.0 / distances  # 0 where left out
        if scores.column_factor is not None:
            inverse *= _load_column(scores.column_factor, columns, plan)
    bias = tl.zeros((1, plan.block_v), tl.float32)
    if scores.bias is not None:
        bias = _load_column(scores.bias, columns, plan)
        logits += bias
    if scores.bias is not None or plan.linear:
        peaks = _peaks(logits, keep)
        logits -= peaks[:, None]
        log_scale += peaks
    exps = tl.where(keep, tl.exp(logits), 0.0)
    tl.store(out.log_scale + slots, log_scale, mask=inside)
    tl.store(out.sums + slots, tl.sum(exps, axis=1), mask=inside)
    if out.logits is not None:
        total = tl.sum(tl.where(keep, logits + log_scale[:, None], 0.0), axis=1)
        tl.store(out.logits + slots, total, mask=inside)
    if out.moments is not None:
        _store_moments(logits, exps, keep, bias, rows, columns, tile, out, num_rows, plan)
    _keep(kept, out.weights, slots, exps, inverse, rows, columns, num_rows, plan)


@triton.jit(do_not_specialize=["num_rows"])
def coefficient_kernel(kept, out, num_rows, plan):
    """Turn the weights into the gradients' coefficients, in place, and sum these."""
    num_blocks = tl.cdiv(num_rows, plan.block_t)
    # The grid has one axis, because the second one of a GPU's grid ends at 65,535.
    block, part = tl.program_id(0) % num_blocks, tl.program_id(0) // num_blocks
    rows = block * plan.block_t + tl.arange(0, plan.block_t)
    columns = part * plan.block_v + tl.arange(0, plan.block_v)
    inside, existing = rows < num_rows, columns < plan.num_classes
    tile = part * plan.block_v // plan.tile
    slots = tile.to(tl.int64) * num_rows + rows
    places = block.to(tl.int64) * plan.num_classes + columns
    weights = _load(kept.softmax, rows, columns, num_rows, plan)
    shares = tl.load(out.shares + slots, mask=inside, other=0.0)[:, None]
    values = tl.where(weights != 0.0, shares * weights, 0.0)
    if out.floor is not None:
        floor = _load_row(out.floor, rows, num_rows)
        if kept.inverse is not None:
            floor *= _load(kept.inverse, rows, columns, num_rows, plan)
        values -= floor
    if out.class_sums is not None:
        slopes = values
        if kept.exps is not None:
            mass = tl.load(out.mass + slots, mask=inside, other=0.0)[:, None]
            slopes = mass * _load(kept.exps, rows, columns, num_rows, plan)
            slopes -= _load_row(out.bias_floor, rows, num_rows)
        tl.store(out.class_sums + places, tl.sum(slopes, axis=0), mask=existing)
    values = values.to(kept.softmax.dtype.element_ty)
    _store(kept.softmax, values, rows, columns, num_rows, plan)
    if out.row_sums is not None:
        rounded = tl.where(existing[None, :], values.to(tl.float32), 0.0)
        slots = part.to(tl.int64) * num_rows + rows
        tl.store(out.row_sums + slots, tl.sum(rounded, axis=1), mask=inside)
        tl.store(out.column_sums + places, tl.sum(rounded, axis=0), mask=existing)
