"""The tiles of a chunk by Triton kernels: what `ChunkedTiles` does in PyTorch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from harmonic_sft.ops import triton_tiles
from harmonic_sft.ops.geometry import near_limits
from harmonic_sft.ops.gradients import Gradients, finish_prototypes
from harmonic_sft.ops.request import Request
from harmonic_sft.ops.rows import TileSums
from harmonic_sft.ops.triton_kernels import RowTerms
from harmonic_sft.ops.triton_tiles import GradientSums, Scores, TileGeometry, TileInputs
from harmonic_sft.ops.workers import Workers

# From here on the vendor's matrix product and a row kernel beat a product with the row's work in
# its epilogue, though every score then goes through memory.
LARGE_HIDDEN_SIZE = 2048
# A tile reports one near pair of a row. More than this many of a row over all tiles (a cluster of
# prototypes that the hidden state sits in) are dropped, since counting them would halt the device;
# hence the narrower notion of near than on the CPU.
NEAR_PER_ROW = 16
NEAR_SHARE = 2.0**-3


@dataclass
class _Kept:
    """What `score` leaves for `accumulate`."""

    inputs: TileInputs
    scores: Scores
    labels: Tensor


class TritonTiles:
    """Works through the tiles of one chunk after another on a GPU, without halting it.

    A center is not subtracted from a copy of the prototypes but enters the row and column terms:
    d2 = |x|^2 + 2 x.c + |w - c|^2 - 2 x.w, for hidden states x less the center c.

    Args:
        request: What is asked.
    """

    def __init__(self, request: Request):
        self.request = request
        frame, dtype = request.frame, request.hidden_states.dtype
        self.narrow = request.gradient_dtype or (dtype if dtype.itemsize == 2 else torch.float32)
        self.operand_dtype = torch.float32
        if dtype.itemsize == 2 and frame.prototypes.dtype == dtype:
            self.operand_dtype = dtype
        self.large = request.hidden_states.shape[1] >= LARGE_HIDDEN_SIZE
        bias = request.class_bias
        self.bias = None if bias is None else bias.float().contiguous()
        self.column = self._columns()
        self.kept: _Kept | None = None
        if frame.kind != "linear" and len(request.hidden_states):
            units = frame.unit(frame.place(request.hidden_states)[0])
            self._unit = units.mean()
        else:
            self._unit = torch.ones((), device=request.hidden_states.device)

    def unit(self, hidden_states: Tensor) -> Tensor:
        """Return the unit of squared distances `[T, 1]`: one for the whole call."""
        return self._unit.expand(len(hidden_states), 1)

    def score(
        self, hidden_states: Tensor, labels: Tensor, *, store: bool, moments: bool
    ) -> TileSums:
        """Return the statistics of all tiles; arguments as in `ChunkedTiles.score`."""
        inputs = self._inputs(hidden_states)
        wanted = self.narrow if store and not self.large else None
        scores = triton_tiles.scores(inputs, labels, store=wanted, moments=moments, argmax=moments)
        self.kept = _Kept(inputs, scores, labels) if store else None
        found = None
        if scores.moments is not None:
            weighted = scores.sums * scores.log_scale.masked_fill(scores.sums == 0, 0)
            first = scores.moments[0] - weighted  # sums of p log p
            found = torch.cat([first[None], scores.moments[1:]])
        scale = scores.min_distance
        if self.request.frame.kind != "linear":
            scale = scale * self._unit
        return TileSums(
            self.unit(hidden_states),
            scores.log_scale,
            scores.sums,
            scale,
            _closest(scores),
            found,
            scores.argmax,
        )

    def accumulate(
        self,
        hidden_states: Tensor,
        factors: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        gradients: Gradients,
        chunk: slice,
    ) -> None:
        """Add a chunk's products to the gradients; arguments as in `ChunkedTiles.accumulate`."""
        kept, self.kept = self.kept, None
        assert kept is not None, "accumulate: expected score with store before"
        if self.large:
            self._add_coefficients(kept, hidden_states, rows, gradients, chunk)
            return
        weights, weight_sums = kept.scores.weights, kept.scores.weight_sums
        assert weights is not None, "score: expected store"
        assert weight_sums is not None, "score: expected store"
        row_sums = (factors * weight_sums).sum(0)
        self._add(hidden_states, weights, factors, row_sums, gradients, chunk)
        if gradients.class_bias is not None:
            weights = weights.float()
            for k in range(len(factors)):
                tile = slice(k * triton_tiles.TILE_WIDTH, (k + 1) * triton_tiles.TILE_WIDTH)
                gradients.class_bias[tile] += factors[k] @ weights[:, tile]

    def recompute(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        gradients: Gradients,
        chunk: slice,
    ) -> Tensor | None:
        """Add a chunk's products from scores made anew; as in `ChunkedTiles.recompute`."""
        inputs = self._inputs(hidden_states)
        scores = triton_tiles.scores(inputs, labels, store=None)  # finds near pairs
        kept = _Kept(inputs, scores, labels)
        self._add_coefficients(kept, hidden_states, rows, gradients, chunk)
        return _closest(scores)

    def finish_prototypes(self, gradients: Gradients) -> None:
        """Turn the accumulated products into the gradient of the prototypes, in place."""
        finish_prototypes(self.request.frame, gradients, Workers(1))

    def _add_coefficients(
        self,
        kept: _Kept,
        hidden_states: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        gradients: Gradients,
        chunk: slice,
    ) -> None:
        normalizer, mass, smoothing = rows
        linear = self.request.frame.kind == "linear"
        # Weights are -2 dL/d(d2) for distances that the kernel has in `unit`.
        slope = torch.ones_like(self._unit) if linear else -2 / self._unit
        terms = RowTerms(
            normalizer.float().contiguous(),
            (mass * slope).float().contiguous(),
            (smoothing * slope).float().contiguous(),
            kept.scores.near_columns,
        )
        dtype = torch.bfloat16 if self.narrow.itemsize == 2 else torch.float32
        weights, row_sums, class_sums = triton_tiles.coefficients(
            kept.inputs,
            kept.labels,
            rows=terms,
            dtype=dtype,
            class_sums=gradients.class_bias is not None,
        )
        if gradients.class_bias is not None and class_sums is not None:
            gradients.class_bias += class_sums / slope
        self._add(hidden_states, weights, None, row_sums.sum(0), gradients, chunk)

    def _add(
        self,
        hidden_states: Tensor,
        weights: Tensor,
        factors: Tensor | None,
        row_sums: Tensor,
        gradients: Gradients,
        chunk: slice,
    ) -> None:
        """Multiply weights `[T, V]` with prototypes and hidden states, and add."""
        frame = self.request.frame
        out = GradientSums(
            None if gradients.hidden_states is None else gradients.hidden_states[chunk],
            gradients.prototypes,
            gradients.columns,
        )
        gain, accumulate = frame.gain, chunk.start > 0
        if self.large:
            _multiply(weights, hidden_states, frame.prototypes, gain, out, accumulate=accumulate)
        else:
            triton_tiles.gradient_sums(
                weights,
                factors,
                hidden_states.to(self.operand_dtype),
                frame.prototypes,
                gain=gain,
                out=out,
                accumulate=accumulate,
            )
        if out.hidden is not None and frame.with_sums:
            shifted = hidden_states if frame.center is None else hidden_states + frame.center
            out.hidden.addcmul_(shifted, row_sums.unsqueeze(1), value=-1)

    def _inputs(self, hidden_states: Tensor) -> TileInputs:
        frame = self.request.frame
        operand = hidden_states.to(self.operand_dtype).contiguous()
        dots = None
        if self.large:
            dots = _dots(operand, frame.prototypes)
        if frame.kind == "linear":
            h_exp: Tensor | float = 1.0
            return TileInputs(operand, frame.prototypes, None, h_exp, self.bias, dots)
        squared = hidden_states.square().sum(1)
        row = squared if frame.center is None else squared + 2 * (hidden_states @ frame.center)
        gain = torch.ones_like(self.column) if frame.gain is None else frame.gain
        geometry = TileGeometry(
            (row / self._unit).contiguous(),
            (self.column / self._unit).contiguous(),
            (-2 / self._unit * gain).contiguous(),
            (NEAR_SHARE * near_limits(frame, squared) / self._unit).contiguous(),
        )
        return TileInputs(operand, frame.prototypes, geometry, self.request.h_exp, self.bias, dots)

    def _columns(self) -> Tensor:
        """Return |w - c|^2 + eps `[V]`, for normalized w on the sphere."""
        frame, size = self.request.frame, self.request.num_classes
        if frame.kind == "linear" or frame.norms is None:
            return torch.zeros(0, device=frame.prototypes.device)
        if frame.center is None:
            squared = torch.ones_like(frame.norms) if frame.kind == "sphere" else frame.norms**2
            return squared + frame.eps
        pieces = [
            frame.tile(start, min(start + 8192, size)).square().sum(1)
            for start in range(0, size, 8192)
        ]
        return torch.cat(pieces) + frame.eps


def _closest(scores: Scores) -> Tensor | None:
    """Return the columns of near pairs `[T, S]`, -1 where there is none."""
    if scores.near_columns is None:
        return None
    columns = scores.near_columns.T.long()  # [T, tiles], -1 = none
    return columns.topk(min(NEAR_PER_ROW, columns.shape[1]), dim=1).values


def _dots(hidden_states: Tensor, prototypes: Tensor) -> Tensor:
    """Return hidden_states @ prototypes.T `[T, V]` in float32."""
    narrow = hidden_states.dtype == prototypes.dtype and hidden_states.dtype.itemsize == 2
    if narrow and hidden_states.device.type == "cuda":
        return torch.mm(hidden_states, prototypes.T, out_dtype=torch.float32)
    return hidden_states.float() @ prototypes.float().T


def _multiply(
    weights: Tensor,
    hidden_states: Tensor,
    prototypes: Tensor,
    gain: Tensor | None,
    out: GradientSums,
    *,
    accumulate: bool,
) -> None:
    """Do what `gradient_sums` does, by the vendor's matrix product."""
    dtype = weights.dtype
    if out.prototypes is not None:
        found = weights.T @ hidden_states.to(dtype)
        out.prototypes.add_(found) if accumulate else out.prototypes.copy_(found)
        if out.columns is not None:
            out.columns.add_(weights.sum(0, dtype=torch.float32))
    if out.hidden is not None:
        scaled = prototypes if gain is None else prototypes * gain.unsqueeze(1)
        out.hidden.copy_(weights @ scaled.to(dtype))
