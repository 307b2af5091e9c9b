# ty: ignore[invalid-argument-type]
"""Triton kernels of the fused cross-entropy: logits live in registers, one tile at a time.

Legend: T rows of a chunk, V classes, D hidden size, tile = the `block_v` classes that one program
handles. Every output element has one writer, so nothing is atomic and every run is the same.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Plan(NamedTuple):
    """What a kernel is compiled for; every field is a `tl.constexpr`."""

    num_classes: Any  # V
    hidden_size: Any  # D
    num_labels: Any  # columns of labels
    distance: Any  # False: linear head
    integer: Any  # h_exp = -power, and no exponential or logarithm per logit
    block_t: Any
    block_v: Any
    block_d: Any
    upcast: Any  # multiply in float32 whatever comes in
    precision: Any  # of float32 products


class Source(NamedTuple):
    """Where dot products come from: two matrices, or ready ones of another library."""

    hidden_states: Any  # [T, D]
    prototypes: Any  # [V, D]
    dots: Any  # [T, V] float32, or None


class Pairs(NamedTuple):
    """What turns dot products into logits; None = not part of this head."""

    row: Any  # [T], with column and scale of the squared distance
    column: Any  # [V]
    scales: Any  # [V], or None: one number for all
    scale: Any
    near_row: Any  # [T]
    h_ptr: Any  # scalar on the device, or None: h_exp below
    h_exp: Any
    bias: Any  # [V]
    labels: Any  # [T, num_labels], -1 = none


class ScoreOutputs(NamedTuple):
    """Where phase 1 writes; None = not wanted."""

    weights: Any  # [T, V]
    log_scale: Any  # [num_tiles, T], as all below
    sums: Any
    weight_sums: Any
    min_distance: Any
    near_columns: Any
    moments: Any  # [4, num_tiles, T]
    argmax: Any


class RowTerms(NamedTuple):
    """What phase 1b knows of a row once its normalizer is known."""

    log_normalizer: Any  # [T]
    mass: Any  # [T]
    smooth: Any  # [T]
    near_columns: Any  # [num_tiles, T] or None


@triton.jit
def _tile_dots(source, rows, columns, num_rows, plan):
    """Dot products of one tile, [block_t, block_v] float32."""
    inside_rows = (rows < num_rows)[:, None]
    inside_columns = (columns < plan.num_classes)[None, :]
    if source.dots is not None:
        ptrs = source.dots + rows.to(tl.int64)[:, None] * plan.num_classes + columns[None, :]
        return tl.load(ptrs, mask=inside_rows & inside_columns, other=0.0)
    else:
        offsets = tl.arange(0, plan.block_d)
        row_starts = rows.to(tl.int64)[:, None] * plan.hidden_size
        class_starts = columns.to(tl.int64)[None, :] * plan.hidden_size
        hidden_ptrs = source.hidden_states + row_starts + offsets[None, :]
        class_ptrs = source.prototypes + class_starts + offsets[:, None]
        dots = tl.zeros((plan.block_t, plan.block_v), tl.float32)
        for start in range(0, plan.hidden_size, plan.block_d):
            inside = start + offsets < plan.hidden_size
            x = tl.load(hidden_ptrs + start, mask=inside_rows & inside[None, :], other=0.0)
            w = tl.load(class_ptrs + start, mask=inside_columns & inside[:, None], other=0.0)
            if plan.upcast:
                x = x.to(tl.float32)
                w = w.to(tl.float32)
            dots = tl.dot(x, w, dots, input_precision=plan.precision)
        return dots


@triton.jit
def _kept(rows, columns, labels_ptr, num_rows, plan):
    """Whether a pair exists and is none of its row's labels, [block_t, block_v]."""
    inside = rows < num_rows
    keep = inside[:, None] & (columns < plan.num_classes)[None, :]
    for slot in tl.static_range(plan.num_labels):
        label = tl.load(labels_ptr + rows * plan.num_labels + slot, mask=inside, other=-1)
        keep = keep & (label[:, None] != columns[None, :])
    return keep


@triton.jit
def _h_exp(pairs):
    if pairs.h_ptr is not None:
        return tl.load(pairs.h_ptr)
    else:
        return pairs.h_exp


@triton.jit
def _distances(dots, rows, columns, pairs, num_rows, plan):
    """Squared distance + eps of every pair, [block_t, block_v]."""
    inside = columns < plan.num_classes
    row = tl.load(pairs.row + rows, mask=rows < num_rows, other=0.0)[:, None]
    column = tl.load(pairs.column + columns, mask=inside, other=0.0)[None, :]
    if pairs.scales is not None:
        dots *= tl.load(pairs.scales + columns, mask=inside, other=0.0)[None, :]
    else:
        dots *= pairs.scale
    return row + column + dots


@triton.jit
def _clean(distances, keep, rows, near_ptr, num_rows):
    """Excluded pairs at infinity, kept ones positive, NaN left alone."""
    floor = tl.full(rows.shape, 1e-30, tl.float32)
    if near_ptr is not None:
        # Only a second near pair of one tile can come down to this floor: what is left of it is
        # rounding error, which must not reach the logarithm with its sign.
        near = tl.load(near_ptr + rows, mask=rows < num_rows, other=0.0)
        floor = tl.maximum(near * 2.0**-10, floor)
    distances = tl.where(distances < floor[:, None], floor[:, None], distances)
    return tl.where(keep, distances, float("inf"))


@triton.jit
def _without_nan(values, replacement):
    """Values to take a minimum or maximum of; a NaN shows in the sums."""
    return tl.where(values == values, values, replacement)


@triton.jit
def _set_near_aside(distances, keep, rows, columns, tile, pairs, out, num_rows, plan):
    """The pairs to keep without each row's closest one, if that is near; note which it was."""
    inside = rows < num_rows
    candidates = _without_nan(tl.where(keep, distances, float("inf")), float("inf"))
    closest, nearest = tl.min(candidates, axis=1, return_indices=True)
    near = closest < tl.load(pairs.near_row + rows, mask=inside, other=0.0)
    near_column = tl.where(near, tile * plan.block_v + nearest, -1)
    tl.store(out.near_columns + tile.to(tl.int64) * num_rows + rows, near_column, mask=inside)
    return keep & (columns[None, :] != near_column[:, None])


@triton.jit
def _integer_power(base, power):
    """Repeated squaring; power is one number for the whole program, so no lane diverges."""
    result = tl.full(base.shape, 1.0, tl.float32)
    while power > 0:
        result = tl.where((power & 1) != 0, result * base, result)
        base = base * base
        power = power >> 1
    return result


@triton.jit
def _relative_logits(dots, ratio, keep, columns, pairs, plan):
    """Logits less the h_exp * log(distance) of the tile's closest pair, excluded ones too.

    Differences of large logits would lose the digits that the ratio keeps.
    """
    relative = -_h_exp(pairs) * tl.log(tl.where(keep, ratio, 1.0)) if plan.distance else dots
    if pairs.bias is not None:
        bias = tl.load(pairs.bias + columns, mask=columns < plan.num_classes, other=0.0)
        relative += bias[None, :]
    return relative


@triton.jit
def _store_weights(weights, rows, columns, slots, weights_ptr, stride, sums_ptr, num_rows):
    """Store a tile in the weights' type, and the row sums of what was stored."""
    inside = rows < num_rows
    rounded = weights.to(weights_ptr.dtype.element_ty)
    tl.store(sums_ptr + slots, tl.sum(rounded.to(tl.float32), axis=1), mask=inside)
    # The padding of a row is written too (with zeros), so that phase 2 reads whole vectors.
    ptrs = weights_ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(ptrs, rounded, mask=inside[:, None] & (columns < stride)[None, :])


@triton.jit
def _store_moments(terms, relative, offset, smallest, ratio, keep, rows, tile, out, num_rows, plan):
    """Store the row sums of e z, e log d, z and log d, e = exp(z - log_scale)."""
    inside = rows < num_rows
    logits = tl.where(keep, relative + offset[:, None], 0.0)
    logs = tl.zeros((plan.block_t, plan.block_v), tl.float32)
    if plan.distance:
        logs = tl.log(smallest)[:, None] - tl.log(tl.where(keep, ratio, 1.0))
        logs = tl.where(keep, logs, 0.0)
    step = tl.cdiv(plan.num_classes, plan.block_v) * num_rows.to(tl.int64)
    ptrs = out.moments + tile.to(tl.int64) * num_rows + rows
    tl.store(ptrs, tl.sum(terms * logits, axis=1), mask=inside)
    tl.store(ptrs + step, tl.sum(terms * logs, axis=1), mask=inside)
    tl.store(ptrs + 2 * step, tl.sum(logits, axis=1), mask=inside)
    tl.store(ptrs + 3 * step, tl.sum(logs, axis=1), mask=inside)


@triton.jit
def _store_scores(terms, log_scale, smallest, ratio, rows, columns, tile, out, stride, num_rows):
    """Store what every head gets from phase 1."""
    inside = rows < num_rows
    slots = tile.to(tl.int64) * num_rows + rows
    total = tl.sum(terms, axis=1)
    # A tile with anything left has one term of 1.
    log_scale = tl.where(total == 0.0, float("-inf"), log_scale)
    tl.store(out.log_scale + slots, tl.where(total == total, log_scale, total), mask=inside)
    tl.store(out.sums + slots, total, mask=inside)
    tl.store(out.min_distance + slots, smallest, mask=inside)
    if out.argmax is not None:
        best = tl.argmax(_without_nan(terms, 0.0), axis=1)
        tl.store(out.argmax + slots, (tile * terms.shape[1] + best).to(tl.int64), mask=inside)
    if out.weights is not None:
        terms *= ratio
        sums_ptr = out.weight_sums
        _store_weights(terms, rows, columns, slots, out.weights, stride, sums_ptr, num_rows)


@triton.jit(do_not_specialize=["power", "num_rows"])
def score_kernel(source, pairs, out, stride, power, num_rows, plan):
    """Phase 1 of one tile: scale, sums and weights of the logits of its rows."""
    # Neighboring programs share a tile of prototypes: the hidden states of a chunk fit in L2.
    tile = tl.program_id(1)
    rows = tl.program_id(0) * plan.block_t + tl.arange(0, plan.block_t)
    columns = tile * plan.block_v + tl.arange(0, plan.block_v)
    dots = _tile_dots(source, rows, columns, num_rows, plan)
    keep = _kept(rows, columns, pairs.labels, num_rows, plan)
    smallest = tl.full((plan.block_t,), 1.0, tl.float32)
    ratio = 1.0
    offset = tl.zeros((plan.block_t,), tl.float32)
    if plan.distance:
        distances = _distances(dots, rows, columns, pairs, num_rows, plan)
        if pairs.near_row is not None:
            keep = _set_near_aside(distances, keep, rows, columns, tile, pairs, out, num_rows, plan)
        distances = _clean(distances, keep, rows, pairs.near_row, num_rows)
        smallest = tl.min(_without_nan(distances, float("inf")), axis=1)
        smallest = tl.where(smallest == float("inf"), 1.0, smallest)
        ratio = smallest[:, None] / distances  # in [0, 1], 0 at excluded pairs
        offset = _h_exp(pairs) * tl.log(smallest)
    log_scale = offset
    if plan.integer:
        terms = _integer_power(ratio, power)
    else:
        relative = _relative_logits(dots, ratio, keep, columns, pairs, plan)
        if pairs.bias is not None or not plan.distance:
            candidates = tl.where(keep, _without_nan(relative, float("-inf")), float("-inf"))
            peak = tl.max(candidates, axis=1)
            peak = tl.where(peak == float("-inf"), 0.0, peak)
            terms = tl.where(keep, tl.exp(relative - peak[:, None]), 0.0)
            log_scale += peak
        else:
            terms = tl.where(keep, tl.exp(relative), 0.0)
    _store_scores(terms, log_scale, smallest, ratio, rows, columns, tile, out, stride, num_rows)
    if out.moments is not None:
        if plan.integer:
            relative = _relative_logits(dots, ratio, keep, columns, pairs, plan)
        _store_moments(
            terms, relative, offset, smallest, ratio, keep, rows, tile, out, num_rows, plan
        )


@triton.jit(do_not_specialize=["num_rows"])
def coefficient_kernel(
    source, pairs, terms, weights_ptr, stride, sums_ptr, class_sums_ptr, num_rows, plan
):
    """Phase 1b of one tile: the gradient's coefficients, once each row's normalizer is known."""
    block = tl.program_id(0)
    tile = tl.program_id(1)
    rows = block * plan.block_t + tl.arange(0, plan.block_t)
    columns = tile * plan.block_v + tl.arange(0, plan.block_v)
    inside = rows < num_rows
    slots = tile.to(tl.int64) * num_rows + rows
    logits = _tile_dots(source, rows, columns, num_rows, plan)
    keep = _kept(rows, columns, pairs.labels, num_rows, plan)
    if terms.near_columns is not None:
        near_column = tl.load(terms.near_columns + slots, mask=inside, other=-1)
        keep = keep & (columns[None, :] != near_column[:, None])
    slope = 1.0
    if plan.distance:
        distances = _distances(logits, rows, columns, pairs, num_rows, plan)
        distances = _clean(distances, keep, rows, pairs.near_row, num_rows)
        logits = _h_exp(pairs) * tl.log(distances)
        slope = _h_exp(pairs) / distances
    if pairs.bias is not None:
        bias = tl.load(pairs.bias + columns, mask=columns < plan.num_classes, other=0.0)
        logits += bias[None, :]
    log_normalizer = tl.load(terms.log_normalizer + rows, mask=inside, other=0.0)[:, None]
    mass = tl.load(terms.mass + rows, mask=inside, other=0.0)[:, None]
    smooth = tl.load(terms.smooth + rows, mask=inside, other=0.0)[:, None]
    probs = tl.exp(tl.where(keep, logits - log_normalizer, float("-inf")))
    gradients = tl.where(keep, mass * probs - smooth, 0.0)
    if class_sums_ptr is not None:
        ptrs = class_sums_ptr + block.to(tl.int64) * plan.num_classes + columns
        tl.store(ptrs, tl.sum(gradients, axis=0), mask=columns < plan.num_classes)
    gradients *= slope
    _store_weights(gradients, rows, columns, slots, weights_ptr, stride, sums_ptr, num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def hidden_gradient_kernel(
    weights_ptr, stride, factors_ptr, prototype_ptr, gain_ptr, out_ptr, num_rows, tile_width, plan
):
    """Phase 2 for the rows: out[i] = sum_j f a_ij gain_j w_j, one program per block of out."""
    features = tl.program_id(0) * plan.block_d + tl.arange(0, plan.block_d)
    rows = tl.program_id(1) * plan.block_t + tl.arange(0, plan.block_t)
    inside = rows < num_rows
    weights_ptrs = weights_ptr + rows.to(tl.int64)[:, None] * stride
    inside_features = (features < plan.hidden_size)[None, :]
    sums = tl.zeros((plan.block_t, plan.block_d), tl.float32)
    for start in range(0, plan.num_classes, plan.block_v):
        columns = start + tl.arange(0, plan.block_v)
        existing = columns < plan.num_classes
        mask = inside[:, None] & (columns < stride)[None, :]
        a = tl.load(weights_ptrs + columns[None, :], mask=mask, other=0.0)
        ptrs = prototype_ptr + columns.to(tl.int64)[:, None] * plan.hidden_size + features[None, :]
        w = tl.load(ptrs, mask=existing[:, None] & inside_features, other=0.0)
        if gain_ptr is not None:
            w = w.to(tl.float32) * tl.load(gain_ptr + columns, mask=existing, other=0.0)[:, None]
        w = w.to(a.dtype)
        if plan.upcast:
            a = a.to(tl.float32)
            w = w.to(tl.float32)
        if factors_ptr is not None:
            # Factors span too many orders of magnitude to be folded into 16-bit operands.
            slots = (start // tile_width) * num_rows + rows
            factors = tl.load(factors_ptr + slots, mask=inside, other=0.0)
            sums += factors[:, None] * tl.dot(a, w, input_precision=plan.precision)
        else:
            sums = tl.dot(a, w, sums, input_precision=plan.precision)
    ptrs = out_ptr + rows.to(tl.int64)[:, None] * plan.hidden_size + features[None, :]
    tl.store(ptrs, sums, mask=inside[:, None] & inside_features)


@triton.jit
def _store_sums(ptrs, sums, mask, add):
    tl.store(ptrs, sums + tl.load(ptrs, mask=mask & add, other=0.0), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def prototype_gradient_kernel(
    weights_ptr,
    stride,
    factors_ptr,
    hidden_ptr,
    peaks_ptr,
    out_ptr,
    column_ptr,
    num_rows,
    add,
    plan,
):
    """Phase 2 for the classes: out[j] (+)= sum_i f a_ij x_i, one program per block of out."""
    block = tl.program_id(0)
    tile = tl.program_id(1)
    features = block * plan.block_d + tl.arange(0, plan.block_d)
    columns = tile * plan.block_v + tl.arange(0, plan.block_v)
    # Transposed, so that the operand scaled in registers is the left one of the product.
    sums = tl.zeros((plan.block_d, plan.block_v), tl.float32)
    column_sums = tl.zeros((plan.block_v,), tl.float32)
    for start in range(0, num_rows, plan.block_t):
        rows = start + tl.arange(0, plan.block_t)
        inside = rows < num_rows
        ptrs = weights_ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
        a = tl.load(ptrs, mask=inside[:, None] & (columns < stride)[None, :], other=0.0)
        ptrs = hidden_ptr + rows.to(tl.int64)[None, :] * plan.hidden_size + features[:, None]
        mask = inside[None, :] & (features < plan.hidden_size)[:, None]
        x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        factors = tl.load(factors_ptr + tile.to(tl.int64) * num_rows + rows, inside, other=0.0)
        if column_ptr is not None and block == 0:
            column_sums += tl.sum(a.to(tl.float32) * factors[:, None], axis=0)
        # The largest |f x| of the block goes to 2 ** 14: float16 then keeps full precision down
        # to 2 ** -28 of it.
        peaks = tl.abs(factors) * tl.load(peaks_ptr + rows, mask=inside, other=0.0)
        unit = tl.maximum(tl.max(_without_nan(peaks, 0.0), axis=0), 1e-30) * 2.0**-14
        x = (x * (factors / unit)[None, :]).to(a.dtype)
        if plan.upcast:
            a = a.to(tl.float32)
            x = x.to(tl.float32)
        sums += unit * tl.dot(x, a, input_precision=plan.precision)
    ptrs = out_ptr + columns.to(tl.int64)[None, :] * plan.hidden_size + features[:, None]
    existing = columns < plan.num_classes
    mask = existing[None, :] & (features < plan.hidden_size)[:, None]
    _store_sums(ptrs, sums, mask, add)
    if column_ptr is not None and block == 0:
        _store_sums(column_ptr + columns, column_sums, existing, add)
