"""The tiles of a chunk in plain PyTorch: scores first, then the products of the gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harmonic_sft.ops.gemm import (
    AccumulatedGemm,
    Gemm,
    StoredGemm,
    accumulated_product,
    choose_backend,
    multiplies_bfloat16,
    product,
    stored_product,
)
from harmonic_sft.ops.geometry import near_limits
from harmonic_sft.ops.gradients import Gradients, finish_prototypes
from harmonic_sft.ops.request import Request
from harmonic_sft.ops.rows import TileSums
from harmonic_sft.ops.tiles import (
    Exclusion,
    TileArrays,
    build_exclusion,
    distance_coefficients,
    distance_statistics,
    distance_weights,
    linear_coefficients,
    linear_statistics,
    near_count,
    take_near,
)
from harmonic_sft.ops.workers import Workers

UNIT = 2.0**-21  # norms this close to 1 are 1: a product loses as much by rounding


@dataclass(frozen=True)
class _Chunk:
    """What all tiles of one chunk share.

    Attributes:
        limits: `[T]`, below which a squared distance has lost digits; None for a linear head.
        operand: `[T, D]`, what multiplies the prototypes.
        row: `[T, 1]` or None, added to the scores.
        unit: `[T, 1]`, of squared distances.
        exclusion: Of the labels.
        near: Columns `[T, S]` of near pairs by tile, filled in as they are found.
    """

    limits: Tensor | None
    operand: Tensor
    row: Tensor | None
    unit: Tensor
    exclusion: Exclusion
    near: list[Tensor | None]


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
    add_gemm: AccumulatedGemm = field(init=False)
    store_gemm: StoredGemm = field(init=False)
    edges: Sequence[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        frame = request.frame
        self.on_cpu = request.hidden_states.device.type == "cpu"
        self.linear = frame.kind == "linear"
        # Kept weights are p, over distances p / d2. A floor under p, and the gradient of a bias of
        # distances, p itself, can only be made of the scores.
        biased = request.learns_bias and not self.linear
        self.keeps_scores = request.label_smoothing > 0 or biased
        narrow = request.gradient_dtype if not self.on_cpu or multiplies_bfloat16() else None
        self.gradient_dtype = narrow or frame.dtype
        width = self._choose_products()
        starts = range(0, request.num_classes, width)
        self.edges = [(start, min(start + width, request.num_classes)) for start in starts]
        self.gain = frame.gain if frame.center is None else None
        self.columns = None  # [V], |w|^2 + eps, and |x|^2 on the sphere
        if frame.center is None and frame.norms is not None:
            if frame.kind == "euclidean":
                self.columns = frame.norms.square().add_(frame.eps)
            elif self.on_cpu and bool(((frame.norms - 1).abs() < UNIT).all()):
                # As training keeps them; the products need no scaling then.
                self.gain, self.columns = None, torch.full_like(frame.norms, 2 + frame.eps)
        self.buffers: list[Tensor] = []

    def score(
        self, hidden_states: Tensor, labels: Tensor, *, store: bool, moments: bool
    ) -> TileSums:
        """Return the statistics of all tiles; with `store`, keep the weights for `accumulate`.

        Args:
            hidden_states: `[T, D]`, in the frame.
            labels: `[T, K]`, columns to leave out, or -1.
            store: Keep weights, `[T, V]` in all, or the scores (`keeps_scores`).
            moments: Also sum moments and find the best columns.
        """
        if store:
            self._reserve(len(hidden_states))
        chunk = self._prepare(hidden_states, labels)
        arrays = self._arrays(hidden_states, labels, moments)
        by_logits = moments or self.request.class_bias is not None

        tiles = iter(range(len(self.edges)))  # whoever is free takes the next: results are per tile

        def work(_: int) -> None:
            for k in tiles:
                out = self._buffer(k, len(hidden_states)) if store else None
                rows = arrays.tile(k)
                scores = self._scores(chunk, k)
                chunk.exclusion.apply_(scores, k)
                nearest = rows.scale
                if not self.linear:
                    self._take_near(chunk, scores, k, nearest)
                if out is not None and self.keeps_scores:
                    out.copy_(scores)
                    out = None
                if self.linear:
                    linear_statistics(scores, self._bias(k), rows, out)
                elif by_logits:
                    h_exp = self.request.h_exp
                    distance_statistics(scores, chunk.unit, h_exp, self._bias(k), rows, out)
                else:
                    distance_weights(scores, self.request.h_exp, nearest, rows.sums, out)

        self.workers.run(work)
        if self.linear or by_logits:
            arrays.scale.fill_(1)
        else:
            torch.log(arrays.scale / chunk.unit.T, out=arrays.log_scale)
            arrays.log_scale.mul_(self.request.h_exp)
            arrays.log_scale.masked_fill_(arrays.scale == 0, -torch.inf)  # nothing was left
        if arrays.best is not None:
            starts = [[start] for start, _ in self.edges]
            arrays.best.add_(torch.tensor(starts, device=arrays.best.device))
        moments_first = None if arrays.moments is None else arrays.moments.transpose(0, 1)
        return TileSums(
            chunk.unit,
            arrays.log_scale,
            arrays.sums,
            arrays.scale,
            self._compact(chunk.near),
            moments_first,
            arrays.best,
        )

    def accumulate(
        self,
        hidden_states: Tensor,
        factors: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        gradients: Gradients,
        chunk: slice,
    ) -> None:
        """Add a chunk's products to the gradients, from the weights or scores that `score` kept.

        Args:
            hidden_states: `[T, D]`, in the frame.
            factors: `[tiles, T]`, what makes the weights coefficients.
            rows: As in `recompute`, for scores that were kept.
            gradients: Accumulated in place.
            chunk: The tokens.
        """
        count, unit = len(hidden_states), self.unit(hidden_states)

        def coefficients(k: int) -> Tensor:
            kept = self._buffer(k, count)
            if self.keeps_scores:
                return self._coefficients(kept, unit, k, rows, gradients)
            weights = kept.mul_(factors[k].unsqueeze(1))
            if gradients.class_bias is not None:
                gradients.class_bias[slice(*self.edges[k])].add_(weights.sum(0))
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
        shared = self._prepare(hidden_states, labels)

        def coefficients(k: int) -> Tensor:
            scores = self._scores(shared, k)
            shared.exclusion.apply_(scores, k)
            if not self.linear:
                self._take_near(shared, scores, k, scores.new_empty(len(scores)))
            return self._coefficients(scores, shared.unit, k, rows, gradients)

        self._products(hidden_states, coefficients, gradients, chunk)
        return self._compact(shared.near)

    def finish_prototypes(self, gradients: Gradients) -> None:
        """Turn the accumulated products into the gradient of the prototypes, in place."""
        self.buffers = []  # before more memory is taken
        finish_prototypes(self.request.frame, gradients, self.workers)

    def unit(self, hidden_states: Tensor) -> Tensor:
        """Return the unit of squared distances `[T, 1]`."""
        return self.request.frame.unit(hidden_states)

    def _coefficients(
        self,
        scores: Tensor,
        unit: Tensor,
        k: int,
        rows: tuple[Tensor, Tensor, Tensor],
        gradients: Gradients,
    ) -> Tensor:
        """Return what multiplies tile `k` `[T, W]`; add to the gradient of the class bias."""
        tile, bias = slice(*self.edges[k]), self._bias(k)
        excluded = scores == self._fill if self._leaves_rest else None
        if self.linear:
            weights = gradient = linear_coefficients(scores, bias, rows)
        else:
            weights, gradient = distance_coefficients(scores, unit, self.request.h_exp, bias, rows)
        if excluded is not None:
            gradient.masked_fill_(excluded, 0)
        if gradients.class_bias is not None:
            gradients.class_bias[tile].add_(gradient.sum(0))
        return weights if self.gain is None else weights.mul_(self.gain[tile])

    def _choose_products(self) -> int:
        """Choose the matrix products, and return how many classes a tile has."""
        request = self.request
        wanted = "auto" if request.gemm == "native" else request.gemm
        size = request.hidden_states.shape[1]
        backend = choose_backend(wanted if self.on_cpu else "mm", request.frame.dtype, size)
        self.gemm, self.add_gemm = product(backend), accumulated_product(backend)
        self.store_gemm = stored_product(backend)
        # Small tiles stay in the cache of a core; an accelerator wants large ones. MKL adds a
        # product in place, so that wider ones cost it no memory.
        return (768 if backend == "mm" else 384) if self.on_cpu else 8192

    @property
    def _leaves_rest(self) -> bool:
        """Whether excluded pairs keep the smoothing, having no infinite distance to divide by."""
        biased = self.request.class_bias is not None
        return self.request.label_smoothing > 0 and (self.linear or biased)

    @property
    def _fill(self) -> float:
        return -torch.inf if self.linear else torch.inf

    def _prepare(self, hidden_states: Tensor, labels: Tensor) -> _Chunk:
        exclusion = build_exclusion(labels, self.edges, self._fill, hidden_states.dtype)
        near: list[Tensor | None] = [None] * len(self.edges)
        unit = self.unit(hidden_states)
        if self.linear:
            return _Chunk(None, hidden_states, None, unit, exclusion, near)
        squared = torch.linalg.vecdot(hidden_states, hidden_states)
        limits = near_limits(self.request.frame, squared)
        on_sphere = self.request.frame.kind == "sphere" and self.request.frame.center is None
        row = None if on_sphere else squared.unsqueeze(1)
        return _Chunk(limits, hidden_states * -2, row, unit, exclusion, near)

    def _arrays(self, hidden_states: Tensor, labels: Tensor, moments: bool) -> TileArrays:
        shape = (len(self.edges), len(hidden_states))
        return TileArrays(
            hidden_states.new_empty(shape),
            hidden_states.new_empty(shape),
            hidden_states.new_empty(shape),
            hidden_states.new_zeros(shape[0], 4, shape[1]) if moments else None,
            labels.new_empty(shape) if moments else None,
        )

    def _scores(self, chunk: _Chunk, k: int) -> Tensor:
        """Return squared distances with eps, or dot products, of tile `k`: `[T, W]`."""
        start, stop = self.edges[k]
        frame = self.request.frame
        tile = frame.tile(start, stop)
        if self.linear:
            return self.gemm(chunk.operand, tile, None)
        if self.gain is not None:
            dots = self.gemm(chunk.operand, tile, None)
            both = dots.new_tensor(2 + frame.eps)  # |x|^2 + |w|^2 + eps
            return torch.addcmul(both, dots, self.gain[start:stop], out=dots)
        if self.columns is not None:
            columns = self.columns[start:stop]
        else:
            columns = tile.square().sum(1).add_(frame.eps)
        scores = self.gemm(chunk.operand, tile, columns)
        return scores if chunk.row is None else scores.add_(chunk.row)

    def _take_near(self, chunk: _Chunk, squared: Tensor, k: int, nearest: Tensor) -> None:
        """Exclude near pairs from a tile, and write what is nearest then to `nearest` `[T]`."""
        assert chunk.limits is not None, "a linear head has no near pairs"
        torch.amin(squared, 1, out=nearest)
        limits, count = chunk.limits.unsqueeze(1), 2
        if self.on_cpu:  # elsewhere a look at the values would halt the device
            count = 0
            if bool((nearest < chunk.limits).any()):
                count = near_count(squared, limits)
        if count:
            columns = take_near(squared, limits, self.request.frame.eps, count)
            chunk.near[k] = torch.where(columns >= 0, columns + self.edges[k][0], -1)
            torch.amin(squared, 1, out=nearest)
        width, excluded = squared.shape[1], chunk.exclusion.columns.shape[2]
        if width <= excluded + count:  # a row may have nothing left
            nearest.masked_fill_(nearest == torch.inf, 0)

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
            parts = [torch.zeros_like(hidden_states) for _ in range(self.workers.count)]
        dtype = self.gradient_dtype
        operand = hidden_states.to(dtype).T
        first = chunk.start == 0

        def work(worker: int) -> None:
            for k in range(worker, len(self.edges), self.workers.count):
                start, stop = self.edges[k]
                weights = coefficients(k).to(dtype)
                if frame.with_sums:
                    sums[worker].add_(weights.sum(1, keepdim=True, dtype=frame.dtype))
                    if gradients.columns is not None:
                        gradients.columns[start:stop].add_(weights.sum(0, dtype=frame.dtype))
                if parts is not None:
                    tile = frame.tile(start, stop).to(dtype)
                    parts[worker] = self.add_gemm(parts[worker], weights, tile.T)
                if gradients.prototypes is not None:
                    target = gradients.prototypes[start:stop]
                    self.store_gemm(target, weights.T, operand, not first)

        self.workers.run(work)
        if parts is not None and gradients.hidden_states is not None:
            total = sum(parts[1:], parts[0])
            if frame.with_sums:
                total -= hidden_states * sums.sum(0)
            gradients.hidden_states[chunk] = total

    def _bias(self, k: int) -> Tensor | None:
        bias = self.request.class_bias
        return None if bias is None else bias[slice(*self.edges[k])].to(self.request.frame.dtype)

    def _reserve(self, rows: int) -> None:
        if not self.buffers or len(self.buffers[0]) < rows * self.edges[0][1]:
            widths = [stop - start for start, stop in self.edges]
            like = self.request.hidden_states
            memory = like.new_empty(rows * self.request.num_classes, dtype=self.request.frame.dtype)
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
