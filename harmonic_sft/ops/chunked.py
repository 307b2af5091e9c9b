"""The tiles of a chunk in plain PyTorch: scores first, then the products of the gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harmonic_sft.ops.gemm import Gemm, allocate, choose_backend, product
from harmonic_sft.ops.geometry import NEAR, Frame
from harmonic_sft.ops.request import Request
from harmonic_sft.ops.rows import TileSums
from harmonic_sft.ops.tiles import (
    TileStatistics,
    distance_coefficients,
    distance_statistics,
    exclude_,
    linear_coefficients,
    linear_statistics,
    take_near,
)
from harmonic_sft.ops.workers import Workers


@dataclass
class Gradients:
    """What is accumulated over the chunks; None where nobody needs it.

    Attributes:
        hidden_states: `[N, D]`.
        prototypes: `[V, D]`, before `finish_prototypes`.
        columns: `[V]`, sums of the weights of each class.
        class_bias: `[V]`.
        scaled: Whether `prototypes` is already divided by the prototypes' norms.
    """

    hidden_states: Tensor | None
    prototypes: Tensor | None
    columns: Tensor | None
    class_bias: Tensor | None
    scaled: bool = False


@dataclass
class ChunkedTiles:
    """Works through the tiles of one chunk after another.

    Args:
        request: What is asked.
        workers: Each takes every `workers.count`-th tile, so that sums keep their order.
    """

    request: Request
    workers: Workers
    gemm: Gemm = field(init=False)
    edges: Sequence[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        frame = request.frame
        self.on_cpu = request.hidden_states.device.type == "cpu"
        # Small tiles stay in the cache of a core; an accelerator wants large ones.
        width = 512 if self.on_cpu else 8192
        starts = range(0, request.num_classes, width)
        self.edges = [(start, min(start + width, request.num_classes)) for start in starts]
        hidden_size = request.hidden_states.shape[1]
        wanted = request.gemm if self.on_cpu else "mm"
        self.gemm = product(choose_backend(wanted, frame.dtype, hidden_size))
        self.gain = frame.gain if frame.center is None else None
        self.columns = None  # [V], |w|^2 + eps
        if frame.kind == "euclidean" and frame.center is None and frame.norms is not None:
            self.columns = frame.norms.square().add_(frame.eps)
        self.buffers: list[Tensor] = []

    def score(
        self, hidden_states: Tensor, labels: Tensor, *, store: bool, moments: bool
    ) -> TileSums:
        """Return the statistics of all tiles; with `store`, keep the weights for `accumulate`.

        Args:
            hidden_states: `[T, D]`, in the frame.
            labels: `[T, K]`, columns to leave out, or -1.
            store: Keep weights, `[T, V]` in all.
            moments: Also sum moments and find the best columns.
        """
        count, rows = len(self.edges), len(hidden_states)
        if store:
            self._reserve(rows)
        limits, operand, row, unit = self._prepare(hidden_states)
        shape = (count, rows)
        log_scale = hidden_states.new_empty(shape)
        sums, scale = torch.empty_like(log_scale), torch.ones_like(log_scale)
        found = hidden_states.new_empty(4, *shape) if moments else None
        best = labels.new_empty(shape) if moments else None
        near: list[Tensor | None] = [None] * count

        def work(worker: int) -> None:
            for k in range(worker, count, self.workers.count):
                start = self.edges[k][0]
                scores = self._scores(operand, row, k)
                exclude_(scores, labels - start, self._fill)
                near[k] = self._take_near(scores, limits, start)
                out = self._buffer(k, rows) if store else None
                tile = self._statistics(scores, unit, k, moments, out)
                log_scale[k], sums[k], scale[k] = tile.log_scale, tile.sums, tile.scale
                if found is not None and tile.moments is not None:
                    found[:, k] = tile.moments
                if best is not None and tile.best is not None:
                    best[k] = tile.best + start

        self.workers.run(work)
        return TileSums(unit, log_scale, sums, scale, self._compact(near), found, best)

    def accumulate(
        self,
        hidden_states: Tensor,
        factors: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        gradients: Gradients,
        chunk: slice,
    ) -> None:
        """Add a chunk's products to the gradients, from the weights that `score` kept.

        Args:
            hidden_states: `[T, D]`, in the frame.
            factors: `[tiles, T]`, what makes the weights coefficients.
            rows: As in `recompute`; the kept weights do without.
            gradients: Accumulated in place.
            chunk: The tokens.
        """
        del rows
        count = len(hidden_states)

        def coefficients(k: int) -> Tensor:
            weights = self._buffer(k, count).mul_(factors[k].unsqueeze(1))
            if gradients.class_bias is not None:
                gradients.class_bias[slice(*self.edges[k])] += weights.sum(0)
            return weights if self.gain is None else weights.mul_(self.gain[slice(*self.edges[k])])

        self._products(hidden_states, coefficients, gradients, chunk)

    def recompute(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        gradients: Gradients,
        chunk: slice,
    ) -> Tensor | None:
        """Add a chunk's products to the gradients, from scores made anew; return near columns.

        Args:
            hidden_states: `[T, D]`, in the frame.
            labels: `[T, K]`, columns to leave out, or -1.
            rows: Log-normalizer, mass and smoothing `[T]`: dL/dlogit = mass * p - smoothing.
            gradients: Accumulated in place.
            chunk: The tokens.
        """
        limits, operand, row, unit = self._prepare(hidden_states)
        near: list[Tensor | None] = [None] * len(self.edges)

        def coefficients(k: int) -> Tensor:
            start, stop = self.edges[k]
            scores = self._scores(operand, row, k)
            exclude_(scores, labels - start, self._fill)
            near[k] = self._take_near(scores, limits, start)
            excluded = scores == self._fill if self._leaves_rest else None
            if self.request.frame.kind == "linear":
                weights = gradient = linear_coefficients(scores, self._bias(k), rows)
            else:
                weights, gradient = distance_coefficients(
                    scores, unit, self.request.h_exp, self._bias(k), rows
                )
            if excluded is not None:
                gradient.masked_fill_(excluded, 0)
            if gradients.class_bias is not None:
                gradients.class_bias[start:stop] += gradient.sum(0)
            return weights if self.gain is None else weights.mul_(self.gain[start:stop])

        self._products(hidden_states, coefficients, gradients, chunk)
        return self._compact(near)

    def finish_prototypes(self, gradients: Gradients) -> None:
        """Turn the accumulated products into the gradient of the prototypes, in place."""
        finish_prototypes(self.request.frame, gradients, self.edges, self.workers)

    def unit(self, hidden_states: Tensor) -> Tensor:
        """Return the unit of squared distances `[T, 1]`."""
        return self.request.frame.unit(hidden_states)

    @property
    def _leaves_rest(self) -> bool:
        """Whether excluded pairs keep the smoothing, having no infinite distance to divide by."""
        linear = self.request.frame.kind == "linear"
        return self.request.label_smoothing > 0 and (linear or self.request.class_bias is not None)

    @property
    def _fill(self) -> float:
        return -torch.inf if self.request.frame.kind == "linear" else torch.inf

    def _prepare(
        self, hidden_states: Tensor
    ) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor]:
        """Return near limits `[T]`, left operand `[T, D]`, row terms and units `[T, 1]`."""
        frame = self.request.frame
        unit = self.unit(hidden_states)
        if frame.kind == "linear":
            return None, hidden_states, None, unit
        squared = hidden_states.square().sum(1)
        limits = near_limits(frame, squared)
        row = squared.unsqueeze(1) if self.gain is None else None
        return limits, hidden_states * -2, row, unit

    def _scores(self, operand: Tensor, row: Tensor | None, k: int) -> Tensor:
        """Return squared distances with eps, or dot products, of tile `k`: `[T, W]`."""
        start, stop = self.edges[k]
        frame = self.request.frame
        tile = frame.tile(start, stop)
        if frame.kind == "linear":
            return self.gemm(operand, tile, None)
        if self.gain is not None:
            dots = self.gemm(operand, tile, None)
            both = dots.new_tensor(2 + frame.eps)  # |x|^2 + |w|^2 + eps
            return torch.addcmul(both, dots, self.gain[start:stop], out=dots)
        if self.columns is not None:
            columns = self.columns[start:stop]
        else:
            columns = tile.square().sum(1).add_(frame.eps)
        scores = self.gemm(operand, tile, columns)
        return scores if row is None else scores.add_(row)

    def _statistics(
        self, scores: Tensor, unit: Tensor, k: int, moments: bool, out: Tensor | None
    ) -> TileStatistics:
        if self.request.frame.kind == "linear":
            return linear_statistics(scores, self._bias(k), moments, out)
        h_exp, bias = self.request.h_exp, self._bias(k)
        return distance_statistics(scores, unit, h_exp, bias=bias, moments=moments, out=out)

    def _products(
        self,
        hidden_states: Tensor,
        coefficients: Callable[[int], Tensor],
        gradients: Gradients,
        chunk: slice,
    ) -> None:
        frame = self.request.frame
        sums = hidden_states.new_zeros(self.workers.count, len(hidden_states), 1)
        parts = None
        if gradients.hidden_states is not None:
            parts = hidden_states.new_zeros(self.workers.count, *hidden_states.shape)
        dtype = self.request.gradient_dtype or frame.dtype
        operand = hidden_states.to(dtype).T
        first = chunk.start == 0

        def work(worker: int) -> None:
            for k in range(worker, len(self.edges), self.workers.count):
                start, stop = self.edges[k]
                weights = coefficients(k).to(dtype)
                if frame.with_sums:
                    sums[worker] += weights.sum(1, keepdim=True, dtype=frame.dtype)
                    if gradients.columns is not None:
                        gradients.columns[start:stop] += weights.sum(0, dtype=frame.dtype)
                if parts is not None:
                    tile = frame.tile(start, stop).to(dtype)
                    parts[worker] += self.gemm(weights, tile.T, None)
                if gradients.prototypes is not None:
                    found = self.gemm(weights.T, operand, None)
                    target = gradients.prototypes[start:stop]
                    target.copy_(found) if first else target.add_(found)

        self.workers.run(work)
        if parts is not None and gradients.hidden_states is not None:
            total = parts.sum(0)
            if frame.with_sums:
                total -= hidden_states * sums.sum(0)
            gradients.hidden_states[chunk] = total

    def _bias(self, k: int) -> Tensor | None:
        bias = self.request.class_bias
        return None if bias is None else bias[slice(*self.edges[k])].to(self.request.frame.dtype)

    def _take_near(self, scores: Tensor, limits: Tensor | None, start: int) -> Tensor | None:
        if limits is None:
            return None
        columns = take_near(scores, limits, self.request.frame.eps, always=not self.on_cpu)
        return None if columns is None else torch.where(columns >= 0, columns + start, -1)

    def _reserve(self, rows: int) -> None:
        if not self.buffers or len(self.buffers[0]) < rows * self.edges[0][1]:
            widths = [stop - start for start, stop in self.edges]
            like = self.request.hidden_states
            memory = allocate(
                rows * self.request.num_classes, dtype=self.request.frame.dtype, device=like.device
            )
            self.buffers = list(memory.split([rows * width for width in widths]))

    def _buffer(self, k: int, rows: int) -> Tensor:
        width = self.edges[k][1] - self.edges[k][0]
        return self.buffers[k][: rows * width].view(rows, width)

    def _compact(self, near: list[Tensor | None]) -> Tensor | None:
        """Join the tiles' near columns, valid ones first, without needless slots."""
        found = [columns for columns in near if columns is not None]
        if not found:
            return None
        joined = torch.cat(found, 1)  # [T, S]
        if not self.on_cpu:
            return joined
        width = int((joined >= 0).sum(1).max())
        return joined.sort(1, descending=True).values[:, :width]


def near_limits(frame: Frame, squared_norms: Tensor) -> Tensor:
    """Return the squared distances `[T]` below which expansion has lost digits.

    Near means |w| close to |x|, so that |x|^2 + |w|^2 is at most 2.6 |x|^2.
    """
    return squared_norms * (2.6 * NEAR) + frame.eps


def finish_prototypes(
    frame: Frame, gradients: Gradients, edges: Sequence[tuple[int, int]], workers: Workers
) -> None:
    """Turn the accumulated products into the gradient of the prototypes, in place.

    Args:
        frame: Its prototypes complete the distances' gradient; on the sphere it is made tangent.
        gradients: Of all chunks.
        edges: Of the tiles.
        workers: Share the tiles.
    """
    target = gradients.prototypes
    if target is None or frame.kind == "linear":
        return

    def work(worker: int) -> None:
        for start, stop in edges[worker :: workers.count]:
            tile = target[start:stop]
            if gradients.columns is not None:
                columns = gradients.columns[start:stop].unsqueeze(1)
                tile.addcmul_(frame.tile(start, stop), columns, value=-1)
            if frame.kind == "sphere" and frame.norms is not None:
                raw = frame.prototypes[start:stop].to(frame.dtype)
                inverse = 1 / frame.norms[start:stop].unsqueeze(1)
                radial = torch.linalg.vecdot(tile, raw).unsqueeze(1) * inverse.square()
                tile.addcmul_(raw, radial, value=-1)
                if not gradients.scaled:
                    tile.mul_(inverse)

    workers.run(work)
