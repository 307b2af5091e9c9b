"""The row-wise stage of cross-entropy as Triton kernels over the products of a chunk.

Legend: T rows of a chunk, V classes, tile = the `block_v` classes that one program handles. Every
output element has one writer, so nothing is atomic and every run is the same.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Scores(NamedTuple):
    """What turns products into logits; None = not part of this head."""

    products: Any  # [T, V] float32, rows padded: see `Plan`
    labels: Any  # [T, num_labels], -1 = none
    row: Any  # [T], with column and the factors of the squared distance
    column: Any  # [V]
    row_factor: Any  # [T]
    column_factor: Any  # [V]
    unit: Any  # [T]
    near: Any  # [T], squared distances below are near
    h_exp: Any  # one number on the device
    bias: Any  # [V]


class Statistics(NamedTuple):
    """Where the statistics go, `[num_tiles, T]`; None = not wanted."""

    log_scale: Any
    sums: Any
    near_columns: Any
    moments: Any  # [3, num_tiles, T]
    logits: Any
    best: Any


class Coefficients(NamedTuple):
    """What the coefficients are made of, `[T]`, and where they go; None = not wanted."""

    log_normalizer: Any
    mass: Any
    floor: Any
    near_columns: Any  # [num_tiles, T]
    coefficients: Any  # [T, W], of the classes of one launch
    row_sums: Any  # [num_tiles, T]
    column_sums: Any  # [num_blocks, V]
    class_sums: Any  # [num_blocks, V]


class Plan(NamedTuple):
    """What a kernel is compiled for; every field is a `tl.constexpr`."""

    num_classes: Any
    stride: Any  # of the rows of `[T, V]` matrices: V, up to a multiple of 64
    num_labels: Any
    block_t: Any
    block_v: Any
    kept_stride: Any = None  # of the rows of coefficients


@triton.jit
def _load_row(ptr, rows, num_rows):
    return tl.load(ptr + rows, mask=rows < num_rows, other=0.0)[:, None]


@triton.jit
def _load_column(ptr, columns, plan):
    return tl.load(ptr + columns, mask=columns < plan.num_classes, other=0.0)[None, :]


@triton.jit
def _load_scores(scores, rows, columns, num_rows, plan):
    """Products or squared distances of one tile, and which of them exist and are no label."""
    # What stands behind the last class is read with it, so that reads are whole vectors.
    inside = (rows < num_rows)[:, None] & (columns < plan.stride)[None, :]
    ptrs = scores.products + rows.to(tl.int64)[:, None] * plan.stride + columns[None, :]
    keep = inside & (columns < plan.num_classes)[None, :]
    values = tl.load(ptrs, mask=inside, other=0.0)
    for slot in tl.static_range(plan.num_labels):
        ptrs = scores.labels + rows * plan.num_labels + slot
        label = tl.load(ptrs, mask=rows < num_rows, other=-1)
        keep = keep & (label[:, None] != columns[None, :])
    if scores.row is not None:
        factors = _load_row(scores.row_factor, rows, num_rows)
        factors *= _load_column(scores.column_factor, columns, plan)
        values = _load_column(scores.column, columns, plan) + factors * values
        values += _load_row(scores.row, rows, num_rows)
    return values, keep


@triton.jit
def _without_nan(values, replacement):
    """Values to take a minimum or maximum of; a NaN shows in the sums."""
    return tl.where(values == values, values, replacement)


@triton.jit
def _clean(distances, keep, rows, scores, num_rows):
    """Excluded pairs at infinity, kept ones positive, NaN left alone."""
    # Only a second near pair of one tile can come down to this floor: what is left of it is
    # rounding error, which must not reach the logarithm with its sign.
    floor = tl.maximum(_load_row(scores.near, rows, num_rows) * 2.0**-10, 1e-30)
    return tl.where(keep, tl.where(distances < floor, floor, distances), float("inf"))


@triton.jit
def _store_moments(logits, probs, keep, bias, rows, columns, tile, out, num_rows, plan):
    """Store the sums of e * log e, of e * bias and of the biases, and the best columns."""
    inside = rows < num_rows
    slots = tile.to(tl.int64) * num_rows + rows
    step = tl.cdiv(plan.num_classes, plan.block_v) * num_rows.to(tl.int64)
    best = tl.argmax(_without_nan(tl.where(keep, logits, float("-inf")), float("-inf")), axis=1)
    tl.store(out.best + slots, (tile * plan.block_v + best).to(tl.int64), mask=inside)
    products = probs * tl.where(probs != 0.0, logits, 0.0)
    tl.store(out.moments + slots, tl.sum(products, axis=1), mask=inside)
    finite = tl.where(bias == float("-inf"), 0.0, bias)
    tl.store(out.moments + step + slots, tl.sum(probs * finite, axis=1), mask=inside)
    there = tl.where(keep & (bias != float("-inf")), finite, 0.0)
    tl.store(out.moments + 2 * step + slots, tl.sum(there, axis=1), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def statistics_kernel(scores, out, num_rows, plan):
    """Sums over one tile of its rows: what `TorchTiles` writes to `Chunk`."""
    tile = tl.program_id(1)
    rows = tl.program_id(0) * plan.block_t + tl.arange(0, plan.block_t)
    columns = tile * plan.block_v + tl.arange(0, plan.block_v)
    inside = rows < num_rows
    slots = tile.to(tl.int64) * num_rows + rows
    logits, keep = _load_scores(scores, rows, columns, num_rows, plan)
    log_scale = tl.zeros((plan.block_t,), tl.float32)
    if scores.row is not None:
        distances = _without_nan(tl.where(keep, logits, float("inf")), float("inf"))
        closest, place = tl.min(distances, axis=1, return_indices=True)
        near = closest < tl.load(scores.near + rows, mask=inside, other=0.0)
        near_column = tl.where(near, tile * plan.block_v + place, -1)
        tl.store(out.near_columns + slots, near_column, mask=inside)
        keep = keep & (columns[None, :] != near_column[:, None])
        distances = _clean(logits, keep, rows, scores, num_rows)
        nearest = tl.min(_without_nan(distances, float("inf")), axis=1)
        nearest = tl.where(nearest == float("inf"), 1.0, nearest)
        h_exp = tl.load(scores.h_exp)
        # The ratio keeps digits that a difference of large logits would lose.
        ratio = tl.where(keep, distances / nearest[:, None], 1.0)
        logits = h_exp * tl.log(ratio)
        unit = tl.load(scores.unit + rows, mask=inside, other=1.0)
        log_scale = h_exp * tl.log(nearest / unit)
    bias = tl.zeros((1, plan.block_v), tl.float32)
    if scores.bias is not None:
        bias = _load_column(scores.bias, columns, plan)
        logits += bias
    if scores.bias is not None or scores.row is None:
        peaks = tl.max(_without_nan(tl.where(keep, logits, float("-inf")), float("-inf")), axis=1)
        peaks = tl.where(peaks == float("-inf"), 0.0, peaks)
        logits -= peaks[:, None]
        log_scale += peaks
    probs = tl.where(keep, tl.exp(logits), 0.0)
    tl.store(out.log_scale + slots, log_scale, mask=inside)
    tl.store(out.sums + slots, tl.sum(probs, axis=1), mask=inside)
    if out.logits is not None:
        total = tl.sum(tl.where(keep, logits + log_scale[:, None], 0.0), axis=1)
        tl.store(out.logits + slots, total, mask=inside)
    if out.moments is not None:
        _store_moments(logits, probs, keep, bias, rows, columns, tile, out, num_rows, plan)


@triton.jit(do_not_specialize=["num_rows", "first"])
def coefficient_kernel(scores, out, num_rows, first, plan):
    """The gradients' coefficients of one tile, once the normalizer of each row is known.

    The coefficients begin with the columns of the tile `first`.
    """
    block, tile = tl.program_id(0), first + tl.program_id(1)
    rows = block * plan.block_t + tl.arange(0, plan.block_t)
    columns = tile * plan.block_v + tl.arange(0, plan.block_v)
    inside = rows < num_rows
    slots = tile.to(tl.int64) * num_rows + rows
    logits, keep = _load_scores(scores, rows, columns, num_rows, plan)
    floor = _load_row(out.floor, rows, num_rows)
    slope = 1.0
    if scores.row is not None:
        near_column = tl.load(out.near_columns + slots, mask=inside, other=-1)
        keep = keep & (columns[None, :] != near_column[:, None])
        distances = _clean(logits, keep, rows, scores, num_rows)
        h_exp = tl.load(scores.h_exp)
        unit = tl.load(scores.unit + rows, mask=inside, other=1.0)[:, None]
        logits = h_exp * tl.log(tl.where(keep, distances / unit, 1.0))
        slope = -2.0 * h_exp / distances  # 0 where left out
    if scores.bias is not None:
        logits += _load_column(scores.bias, columns, plan)
    log_normalizer = _load_row(out.log_normalizer, rows, num_rows)
    probs = tl.where(keep, tl.exp(logits - log_normalizer), 0.0)
    gradients = _load_row(out.mass, rows, num_rows) * probs - floor
    existing = columns < plan.num_classes
    places = block.to(tl.int64) * plan.num_classes + columns
    if out.class_sums is not None:
        tl.store(out.class_sums + places, tl.sum(gradients, axis=0), mask=existing)
    values = (gradients * slope).to(out.coefficients.dtype.element_ty)
    if out.row_sums is not None:
        rounded = tl.where(existing[None, :], values.to(tl.float32), 0.0)
        tl.store(out.row_sums + slots, tl.sum(rounded, axis=1), mask=inside)
        tl.store(out.column_sums + places, tl.sum(rounded, axis=0), mask=existing)
    elif scores.row is not None:
        scaled = gradients * slope * _load_column(scores.column_factor, columns, plan)
        values = scaled.to(out.coefficients.dtype.element_ty)
    local = columns - first * plan.block_v
    ptrs = out.coefficients + rows.to(tl.int64)[:, None] * plan.kept_stride + local[None, :]
    tl.store(ptrs, values, mask=inside[:, None] & (columns < plan.stride)[None, :])
