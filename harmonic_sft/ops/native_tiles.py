"""The tiles of a chunk in C, where there is a compiler and they are not clearly slower."""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from harmonic_sft.ops import native
from harmonic_sft.ops.chunked import ChunkedTiles
from harmonic_sft.ops.gemm import choose_backend, multiplies_bfloat16, product, trial_seconds
from harmonic_sft.ops.geometry import near_limits
from harmonic_sft.ops.gradients import Gradients
from harmonic_sft.ops.request import Request
from harmonic_sft.ops.rows import TileSums
from harmonic_sft.ops.tiles import near_count, take_near

WIDTH = 384  # classes of a tile
# What products and passes may take of the time of PyTorch's products, which take passes besides. An
# even race must not be decided anew by each process, since results would differ in the last bits.
HANDICAP = 1.5
_FAST: dict[tuple[int, bool], bool] = {}


def serve(request: Request) -> bool:
    """Return whether the C tiles are to do a call: they can, and are wanted or not slow.

    Raises:
        OSError: They are wanted and cannot be compiled.
    """
    hidden_states, dtype = request.hidden_states, request.frame.dtype
    size = hidden_states.shape[1]
    if hidden_states.device.type != "cpu" or dtype != torch.float32 or not size:
        return False
    if request.gemm == "native":
        native.library()
    wanted = request.gemm == "native"
    return wanted or (request.gemm == "auto" and _fast(size, narrow=_narrow(request)))


def _narrow(request: Request) -> bool:
    return request.gradient_dtype == torch.bfloat16


class _Scoring(NamedTuple):
    """What the scores of all tiles of a chunk share.

    Attributes:
        packed: The tokens.
        row: `[P]` or None, added to the scores.
        limits: `[T]`, below which a squared distance has lost digits; None for a linear head.
        excluded: `[S, 2]`, classes and tokens to leave out, in order of classes.
        bounds: Where those of each tile begin, and where the last ones end.
        near: Columns `[T, S]` of near pairs by tile, filled in as they are found.
    """

    packed: native.Packed
    row: Tensor | None
    limits: Tensor | None
    excluded: Tensor
    bounds: list[int]
    near: list[Tensor | None]


class NativeTiles(ChunkedTiles):
    """Tiles in C for the plain loss: no moments, no label smoothing, no bias of classes.

    Args:
        request: What is asked.
        workers: Each takes every `workers.count`-th tile, so that sums keep their order.
    """

    packed: native.Packed  # of the chunk whose weights `score` kept

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scratch = self.parts = torch.empty(0, 0)  # of each worker, for one chunk after another

    def score(
        self, hidden_states: Tensor, labels: Tensor, *, store: bool, moments: bool
    ) -> TileSums:
        """Return the statistics of all tiles; see `ChunkedTiles.score`."""
        assert not moments, "moments are PyTorch's"
        scoring = self._scoring(hidden_states, labels)
        packed = self.packed = scoring.packed
        shape = (len(self.edges), packed.padded)
        best, sums = hidden_states.new_empty(shape), hidden_states.new_empty(shape)
        if store:
            self._reserve(packed.padded)
        tiles = iter(range(len(self.edges)))  # whoever is free takes the next: results are per tile

        def work(_: int) -> None:
            passing = None if store else hidden_states.new_empty(WIDTH, packed.padded)
            for k in tiles:
                weights = self._kept(k) if passing is None else passing
                self._weigh(scoring, k, weights, best[k], sums[k], keep=store)

        self.workers.run(work)
        best, sums = best[:, : packed.count], sums[:, : packed.count]
        unit, log_scale, scale = self.unit(hidden_states), best, torch.ones_like(best)
        if not self.linear:
            scale = best.masked_fill(best == torch.inf, 0)  # nothing was left
            log_scale = torch.log(best / unit.T).mul_(self.request.h_exp)
        return TileSums(unit, log_scale, sums, scale, self._compact(scoring.near), None, None)

    def accumulate(
        self,
        hidden_states: Tensor,
        factors: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        gradients: Gradients,
        chunk: slice,
    ) -> None:
        """Add a chunk's products to the gradients; see `ChunkedTiles.accumulate`."""
        del rows

        def weights(k: int, _: Tensor | None) -> tuple[Tensor, Tensor]:
            return self._kept(k), factors[k]

        self._add(self.packed, hidden_states, weights, gradients, chunk, kept=True)
        del self.packed  # before the next chunk's is made

    def recompute(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        gradients: Gradients,
        chunk: slice,
    ) -> Tensor | None:
        """Add a chunk's products to the gradients; see `ChunkedTiles.recompute`."""
        scoring, unit = self._scoring(hidden_states, labels), self.unit(hidden_states).squeeze(1)
        log_normalizer, mass, _ = rows
        count, h_exp = len(hidden_states), self.request.h_exp

        def weights(k: int, passing: Tensor) -> tuple[Tensor, Tensor]:
            best, sums = passing.new_empty(2, scoring.packed.padded)
            self._weigh(scoring, k, passing, best, sums, keep=True)
            best = best[:count]
            if self.linear:
                return passing, mass * (best - log_normalizer).exp()
            factors = mass * (torch.log(best / unit) * h_exp - log_normalizer).exp()
            return passing, factors * (-2 * h_exp) / best

        self._add(scoring.packed, hidden_states, weights, gradients, chunk, kept=False)
        return self._compact(scoring.near)

    def _add(
        self,
        packed: native.Packed,
        hidden_states: Tensor,
        weights: Callable[[int, Tensor], tuple[Tensor, Tensor]],
        gradients: Gradients,
        chunk: slice,
        *,
        kept: bool,
    ) -> None:
        """Add the products of all tiles; `weights` gives theirs `[W, P]` and their factors `[T]`.

        It may use the memory `[WIDTH, P]` that it is given, unless the weights are `kept`.
        """
        frame, workers = self.request.frame, self.workers.count
        sums = hidden_states.new_zeros(workers, packed.padded) if frame.with_sums else None
        if self.scratch.shape[1] < native.scratch_size(packed, WIDTH):
            self.scratch = hidden_states.new_empty(workers, native.scratch_size(packed, WIDTH))
            self.parts = hidden_states.new_empty(workers, packed.padded, hidden_states.shape[1])
        scratch, parts = self.scratch, None
        if gradients.hidden_states is not None:
            parts = self.parts[:, : packed.padded].zero_()

        def work(worker: int) -> None:
            factors = hidden_states.new_zeros(packed.padded)
            passing = hidden_states.new_empty(0 if kept else WIDTH, packed.padded)
            for k in range(worker, len(self.edges), self.workers.count):
                tile = slice(*self.edges[k])
                found, factors[: packed.count] = weights(k, passing)
                prototypes, columns = gradients.prototypes, gradients.columns
                totals = native.Totals(
                    None if prototypes is None else prototypes[tile],
                    None if parts is None else parts[worker],
                    None if columns is None else columns[tile],
                    None if sums is None else sums[worker],
                )
                native.accumulate_tile(
                    packed,
                    found[: tile.stop - tile.start],
                    (factors, self._gain(k)),
                    frame.tile(tile.start, tile.stop).contiguous(),
                    totals,
                    scratch[worker],
                    add=chunk.start > 0,
                )

        self.workers.run(work)
        if parts is not None and gradients.hidden_states is not None:
            target = gradients.hidden_states[chunk]
            torch.sum(parts[:, : packed.count], 0, out=target)
            if sums is not None:
                total = sums[:, : packed.count].sum(0).unsqueeze(1)
                target.addcmul_(hidden_states, total, value=-1)

    def _scoring(self, hidden_states: Tensor, labels: Tensor) -> _Scoring:
        frame = self.request.frame
        scale = 1.0 if self.linear else -2.0
        packed = native.pack_tokens(hidden_states, scale, narrow=_narrow(self.request))
        excluded, bounds = self._excluded(labels)
        near: list[Tensor | None] = [None] * len(self.edges)
        if self.linear:
            return _Scoring(packed, None, None, excluded, bounds, near)
        squared = torch.linalg.vecdot(hidden_states, hidden_states)
        limits, row = near_limits(frame, squared), None
        if frame.kind != "sphere" or frame.center is not None:
            row = torch.nn.functional.pad(squared, (0, packed.padded - packed.count))
        return _Scoring(packed, row, limits, excluded, bounds, near)

    def _weigh(
        self, scoring: _Scoring, k: int, scores: Tensor, best: Tensor, sums: Tensor, *, keep: bool
    ) -> None:
        """Write what is best of each token `[P]` in tile `k`, the sums `[P]`, and the weights."""
        (start, stop), count = self.edges[k], scoring.packed.count
        scores = scores[: stop - start]
        prototypes = self.request.frame.tile(start, stop).contiguous()
        terms = self._gain(k), self._column(k, prototypes), scoring.row
        pairs = scoring.excluded[scoring.bounds[k] : scoring.bounds[k + 1]], start
        native.score_tile(scoring.packed, prototypes, terms, pairs, scores, best)
        if scoring.limits is not None:
            found = self._near(scores.T[:count], scoring.limits, best[:count], start)
            scoring.near[k] = found
        h_exp = None if self.linear else float(self.request.h_exp)
        native.weigh_tile(scores, best, h_exp, sums, keep=keep)

    def _choose_products(self) -> int:
        return WIDTH

    def _kept(self, k: int) -> Tensor:
        padded = self.packed.padded
        return self._buffer(k, padded).view(-1, padded)

    def _gain(self, k: int) -> Tensor | None:
        return None if self.gain is None else self.gain[slice(*self.edges[k])]

    def _column(self, k: int, prototypes: Tensor) -> Tensor | None:
        """Return what is added to the scores of tile `k`: |w|^2 + eps, and |x|^2 on the sphere."""
        if self.linear:
            return None
        if self.gain is not None:
            return prototypes.new_full((len(prototypes),), 2 + self.request.frame.eps)
        if self.columns is not None:
            return self.columns[slice(*self.edges[k])]
        return prototypes.square().sum(1).add_(self.request.frame.eps)

    def _excluded(self, labels: Tensor) -> tuple[Tensor, list[int]]:
        """Return pairs (class, token) `[S, 2]` of labels `[T, K]`, and where each tile's begin."""
        tokens, slots = torch.nonzero(labels >= 0, as_tuple=True)
        classes, order = labels[tokens, slots].sort(stable=True)
        starts = [start for start, _ in self.edges] + [self.request.num_classes]
        bounds = torch.searchsorted(classes, classes.new_tensor(starts)).tolist()
        return torch.stack([classes, tokens[order]], 1), bounds

    def _near(self, squared: Tensor, limits: Tensor, nearest: Tensor, start: int) -> Tensor | None:
        """Exclude near pairs from scores `[T, W]`, and write what is nearest then."""
        if not bool((nearest < limits).any()):
            return None
        count = near_count(squared, limits.unsqueeze(1))
        columns = take_near(squared, limits.unsqueeze(1), self.request.frame.eps, count)
        torch.amin(squared, 1, out=nearest)
        return torch.where(columns >= 0, columns + start, -1)


def _fast(hidden_size: int, *, narrow: bool) -> bool:
    """Return whether the C tiles are taken: not where they are clearly slower. Tried once."""
    size = min(max(hidden_size, 512), 1024)  # elsewhere a trial is mostly calls, or takes a second
    key = (size - 1).bit_length(), narrow
    if key not in _FAST:
        try:
            native.library()
        except OSError:
            _FAST[key] = False
        else:
            # Turn by turn: what slows one down for a while slows the other down.
            turns = [(_trial(size, narrow=narrow), _peer(size, narrow=narrow)) for _ in range(3)]
            own, theirs = map(min, zip(*turns, strict=True))
            _FAST[key] = own < HANDICAP * theirs
    return _FAST[key]


def _peer(hidden_size: int, *, narrow: bool) -> float:
    """Return the seconds of PyTorch's three products: two of them in bfloat16, if `narrow`."""
    if narrow and not multiplies_bfloat16():
        return math.inf
    gemm = product(choose_backend("auto", torch.float32, hidden_size))
    seconds = trial_seconds(gemm, torch.float32, hidden_size)
    if not narrow:
        return seconds
    return (seconds + 2 * trial_seconds(gemm, torch.bfloat16, hidden_size)) / 3


def _trial(hidden_size: int, *, narrow: bool) -> float:
    """Return the seconds of products and passes of the tile of `trial_seconds`, best of four."""
    # Of a dtype and device of their own, whatever the defaults are.
    prototypes = torch.zeros(512, hidden_size, dtype=torch.float32, device="cpu")
    tokens, totals = prototypes[:192], torch.zeros_like(prototypes)
    column = prototypes.new_ones(512)
    nobody = torch.zeros(0, 2, dtype=torch.int64, device="cpu")
    best = math.inf
    for _ in range(4):
        start = time.perf_counter()
        packed = native.pack_tokens(tokens, -2.0, narrow=narrow)
        scores = tokens.new_empty(512, packed.padded)
        nearest, sums, factor = tokens.new_ones(3, packed.padded)
        native.score_tile(packed, prototypes, (None, column, None), (nobody, 0), scores, nearest)
        native.weigh_tile(scores, nearest, -14.0, sums, keep=True)
        found = tokens.new_zeros(packed.padded, hidden_size)
        all_totals = native.Totals(totals, found, None, None)
        scratch = tokens.new_empty(native.scratch_size(packed, 512))
        native.accumulate_tile(
            packed, scores, (factor, None), prototypes, all_totals, scratch, add=True
        )
        best = min(best, time.perf_counter() - start)
    return best
