"""Triton kernels over hidden states and prototypes: pairs by direct difference, whole rows at once.

Legend: T rows of a chunk, D width, S pairs of a row, V classes. As in `triton_kernels`, every
output element has one writer.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from harmonic_sft.models.head import TINY
from harmonic_sft.ops.geometry import Geometry

MEMBERS, WIDTH = 8, 256  # pairs of one class, and numbers of each, that are loaded together
FEW, MANY = 4, 8  # warps of a program, for rows of up to and above 2048 numbers
# Explicit, because triton 3.9 warns of defaults that a later version will change.
OPTIONS: dict[str, Any] = {"num_stages": 1, "enable_fp_fusion": True}


class Prototypes(NamedTuple):
    """Where prototypes are, and what makes them as they are compared; None = nothing."""

    vectors: Any  # [V, D]
    stride: Any
    inverse: Any  # [V]
    center: Any  # [D]


class Pairs(NamedTuple):
    """The pairs of a chunk."""

    placed: Any  # [T, D]
    columns: Any  # [T, S], -1 where there is none
    slopes: Any  # [T, S]


class Sorted(NamedTuple):
    """Pairs in the order of their columns."""

    keys: Any  # [T S], the columns
    order: Any  # [T S], their places before sorting


class Gradient(NamedTuple):
    """Rows that are written."""

    rows: Any  # [T, D] or [V, D]
    stride: Any


class Shape(NamedTuple):
    """What a kernel is compiled for; every field is a `tl.constexpr`."""

    width: Any  # D
    block: Any  # D, up to a power of 2
    num_pairs: Any  # S
    linear: Any
    members: Any  # pairs of one class that are loaded together
    part: Any  # of the D numbers of each
    tiny: Any  # norms up to which a row has no direction


@triton.jit
def _load_prototype(prototypes, column, dims, inside):
    """A prototype as products compare it."""
    places = prototypes.vectors + column.to(tl.int64) * prototypes.stride + dims
    vector = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    if prototypes.inverse is not None:
        vector *= tl.load(prototypes.inverse + column)
    if prototypes.center is not None:
        vector -= tl.load(prototypes.center + dims, mask=inside, other=0.0)
    return vector


@triton.jit
def split_kernel(values, stride, out, inverse, shape):
    """A row as the sum of two 16-bit terms, one beside the other, and 1 / its norm."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, shape.block)
    inside = dims < shape.width
    vector = tl.load(values + row * stride + dims, mask=inside, other=0.0).to(tl.float32)
    high = vector.to(out.dtype.element_ty)
    low = (vector - high.to(tl.float32)).to(out.dtype.element_ty)
    places = out + row * 2 * shape.width + dims
    tl.store(places, high, mask=inside)
    tl.store(places + shape.width, low, mask=inside)
    if inverse is not None:
        norm = tl.sqrt_rn(tl.sum(vector * vector))
        norm = tl.where(norm <= shape.tiny, float("inf"), norm)
        tl.store(inverse + row, 1.0 / norm)


@triton.jit
def score_kernel(prototypes, placed, inverse, columns, eps, out, shape):
    """The dot product or squared distance of one pair."""
    pair = tl.program_id(0)
    dims = tl.arange(0, shape.block)
    column = tl.load(columns + pair)
    inside = dims < tl.where(column >= 0, shape.width, 0)
    row = (pair // shape.num_pairs).to(tl.int64)
    state = tl.load(placed + row * shape.width + dims, mask=inside, other=0.0)
    vector = _load_prototype(prototypes, tl.maximum(column, 0), dims, inside)
    if not shape.linear:
        vector = tl.where(inside, state - vector, 0.0)
        state = vector
    score = tl.sum(state * vector)
    if not shape.linear:
        score += eps
        if inverse is not None:  # a right angle to what has no direction
            own, other = tl.load(inverse + row), tl.load(prototypes.inverse + tl.maximum(column, 0))
            score += (own == 0.0).to(tl.float32) + (other == 0.0).to(tl.float32)
    tl.store(out + pair, score)


@triton.jit
def pull_kernel(prototypes, pairs, inverse, total, out, shape):
    """Add a row's pairs to its gradient, and complete it: on the sphere it is made tangent."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, shape.block)
    inside = dims < shape.width
    state = tl.load(pairs.placed + row * shape.width + dims, mask=inside, other=0.0)
    gradient = tl.load(total + row * shape.width + dims, mask=inside, other=0.0)
    for slot in range(shape.num_pairs):
        pair = row * shape.num_pairs + slot
        column = tl.load(pairs.columns + pair)
        there = dims < tl.where(column >= 0, shape.width, 0)
        vector = _load_prototype(prototypes, tl.maximum(column, 0), dims, there)
        if not shape.linear:
            vector -= state
        gradient += tl.where(there, tl.load(pairs.slopes + pair) * vector, 0.0)
    if inverse is not None:
        unit = state
        if prototypes.center is not None:
            unit += tl.load(prototypes.center + dims, mask=inside, other=0.0)
        gradient -= unit * tl.sum(unit * gradient)
        gradient *= tl.load(inverse + row)
    gradient = gradient.to(out.rows.dtype.element_ty)
    tl.store(out.rows + row * out.stride + dims, gradient, mask=inside)


@triton.jit(do_not_specialize=["num_pairs"])
def push_kernel(prototypes, pairs, listed, scale, out, num_pairs, shape):
    """Add all pairs of one class to its gradient; `num_pairs` is that of the chunk."""
    first = tl.program_id(0)
    key = tl.load(listed.keys + first)
    before = tl.load(listed.keys + first - 1, mask=first > 0, other=-1)
    if key != before:  # the first pair of a class; never -1, which sorts first
        dims = tl.program_id(1) * shape.part + tl.arange(0, shape.part)
        inside = dims < shape.width
        vector = _load_prototype(prototypes, key, dims, inside)
        gradient = tl.zeros((shape.part,), tl.float32)
        at = first
        following = key
        while following == key:
            places = at + tl.arange(0, shape.members)
            same = tl.load(listed.keys + places, mask=places < num_pairs, other=-1) == key
            pair = tl.load(listed.order + places, mask=same, other=0)
            slope = tl.load(pairs.slopes + pair, mask=same, other=0.0)
            rows = (pair // shape.num_pairs)[:, None]
            ptrs = pairs.placed + rows * shape.width + dims[None, :]
            state = tl.load(ptrs, mask=same[:, None] & inside[None, :], other=0.0)
            if not shape.linear:
                state -= vector[None, :]
            gradient += tl.sum(slope[:, None] * state, axis=0)
            at += shape.members
            following = tl.load(listed.keys + at, mask=at < num_pairs, other=-1)
        if scale is not None:
            gradient *= tl.load(scale + key)
        ptrs = out.rows + key.to(tl.int64) * out.stride + dims
        tl.store(ptrs, tl.load(ptrs, mask=inside) + gradient, mask=inside)


@triton.jit
def complete_kernel(prototypes, column_sums, out, shape):
    """Complete a prototype's gradient: see `GradientProducts.complete`."""
    row = tl.program_id(0)
    dims = tl.arange(0, shape.block)
    inside = dims < shape.width
    ptrs = out.rows + row.to(tl.int64) * out.stride + dims
    gradient = tl.load(ptrs, mask=inside, other=0.0)
    if column_sums is not None:
        vector = _load_prototype(prototypes, row, dims, inside)
        gradient -= vector * tl.load(column_sums + row)
    if prototypes.inverse is not None:
        places = prototypes.vectors + row.to(tl.int64) * prototypes.stride + dims
        raw = tl.load(places, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(prototypes.inverse + row)
        gradient -= raw * (tl.sum(gradient * raw) * inverse * inverse)
        if prototypes.center is not None:
            gradient *= inverse
    tl.store(ptrs, gradient, mask=inside)


class Rows:
    """Launches the kernels for the geometry of a call."""

    def __init__(self, geometry: Geometry):
        self.geometry = geometry
        values = geometry.prototypes
        values = values if values.stride(1) == 1 else values.contiguous()
        self.prototypes = Prototypes(values, values.stride(0), geometry.inverse, geometry.center)

    def split(self, classes: slice, dtype: torch.dtype) -> Tensor:
        """Return prototypes in two terms, `[W, 2 D]`; on the sphere also write 1 / their norms."""
        values, inverse = self.prototypes.vectors[classes], self.prototypes.inverse
        inverse = None if inverse is None else inverse[classes]
        out = values.new_empty(len(values), 2 * values.shape[1], dtype=dtype)
        shape, options = self._shape()
        split_kernel[(len(values),)](values, values.stride(0), out, inverse, shape, **options)
        return out

    def scores(self, placed: Tensor, inverse: Tensor | None, columns: Tensor) -> Tensor:
        """Return dot products or squared distances `[T, S]` of pairs, eps included."""
        out = placed.new_empty(columns.shape)
        shape, options = self._shape(columns.shape[1])
        given = placed.contiguous(), inverse, columns.contiguous(), self.geometry.eps
        score_kernel[(out.numel(),)](self.prototypes, *given, out, shape, **options)
        return out

    def pull(self, pairs: Pairs, inverse: Tensor | None, total: Tensor, out: Tensor) -> None:
        """Write the hidden states' gradient `[T, D]`, of `total` `[T, D]` and the pairs."""
        shape, options = self._shape(pairs.columns.shape[1])
        target = Gradient(out, out.stride(0))
        pull_kernel[(len(out),)](self.prototypes, pairs, inverse, total, target, shape, **options)

    def push(self, pairs: Pairs, out: Tensor) -> None:
        """Add the pairs' part to the prototypes' gradient `[V, D]`."""
        listed = Sorted(*pairs.columns.flatten().int().sort(stable=True))
        shape, options = self._shape(pairs.columns.shape[1])
        count, options["num_warps"] = len(listed.keys), FEW
        grid = (count, triton.cdiv(out.shape[1], WIDTH))
        target, scale = Gradient(out, out.stride(0)), self.geometry.scale
        push_kernel[grid](self.prototypes, pairs, listed, scale, target, count, shape, **options)

    def complete(self, column_sums: Tensor | None, out: Tensor) -> None:
        """Complete the prototypes' gradient `[V, D]`."""
        shape, options = self._shape()
        target = Gradient(out, out.stride(0))
        complete_kernel[(len(out),)](self.prototypes, column_sums, target, shape, **options)

    def _shape(self, num_pairs: int = 1) -> tuple[Shape, dict[str, Any]]:
        width = self.geometry.prototypes.shape[1]
        block = triton.next_power_of_2(width)
        values = (width, block, num_pairs, self.geometry.linear, MEMBERS, WIDTH, TINY)
        warps = FEW if block <= 2048 else MANY
        return Shape(*map(tl.constexpr, values)), OPTIONS | {"num_warps": warps}
