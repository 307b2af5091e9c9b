"""The tiles of a chunk in C, where there is a compiler and they are not clearly slower."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from harmonic_sft.ops import native
from harmonic_sft.ops.chunked import ChunkedTiles
from harmonic_sft.ops.gemm import multiplies_bfloat16, native_is_fast
from harmonic_sft.ops.geometry import near_limits
from harmonic_sft.ops.gradients import Gradients
from harmonic_sft.ops.request import Request
from harmonic_sft.ops.rows import TileSums
from harmonic_sft.ops.tiles import near_count, take_near

WIDTH = 384  # classes of a tile


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
    return wanted or (request.gemm == "auto" and native_is_fast(size, narrow=_narrow(request)))


def _narrow(request: Request) -> bool:
    """Return whether gradient products are of bfloat16: as wanted, where it saves anything."""
    return request.gradient_dtype == torch.bfloat16 and multiplies_bfloat16()


class _Scoring(NamedTuple):
    """What the scores of all tiles of a chunk share.

    Attributes:
        packed: The tokens.
        logits: Of all classes, where scores are kept or made anew; None where weights are.
        row: `[P]` or None, added to the scores.
        limits: `[T]`, below which a squared distance has lost digits; None for a linear head.
        excluded: `[S, 2]`, classes and tokens to leave out, in order of classes.
        bounds: `[tiles + 1]`, where those of each tile begin, and where the last ones end.
        near: Columns `[T, S]` of near pairs by tile, filled in as they are found.
    """

    packed: native.Packed
    logits: native.Logits | None
    row: Tensor | None
    limits: Tensor | None
    excluded: Tensor
    bounds: Tensor
    near: list[Tensor | None]


class _Tiles(NamedTuple):
    """Tiles `first` to `stop`; `following` `[1]` is the next, counted from `first`."""

    first: int
    stop: int
    following: Tensor


class _Weights(NamedTuple):
    """Weights of the classes `classes` of which every `step`-th tile from `first` on is meant.

    Attributes:
        classes: V' of them.
        weights: `[V', P]`, or more rows; or scores.
        factors: What makes them coefficients.
        first: Counted from the first of the classes.
        step: To the next tile.
    """

    classes: slice
    weights: Tensor
    factors: native.Factors
    first: int = 0
    step: int = 1


class NativeTiles(ChunkedTiles):
    """Tiles in C.

    Args:
        request: What is asked.
        workers: Each adds up the products of every `workers.count`-th tile, so that sums keep their
            order.
    """

    scoring: _Scoring  # of the chunk that is scored and not yet accumulated

    def __post_init__(self) -> None:
        super().__post_init__()
        # Of each worker, and of the tiles; for one chunk after another.
        self.scratch = self.parts = self.memory = torch.empty(0, 0)
        frame, bias = self.request.frame, self.request.class_bias
        as_they_are = frame.center is None and frame.prototypes.dtype == frame.dtype
        # Then one call serves all tiles, otherwise each is made before its own.
        self.in_place = as_they_are and frame.prototypes.is_contiguous()
        if self.gain is not None:
            self.columns = torch.full_like(self.gain, 2 + frame.eps)
        self.bias = None if bias is None else bias.to(frame.dtype).contiguous()
        if self.linear:
            self.columns, self.bias = self.bias, None

    def score(
        self, hidden_states: Tensor, labels: Tensor, *, store: bool, moments: bool
    ) -> TileSums:
        """Return the statistics of all tiles; see `ChunkedTiles.score`."""
        by_logits = moments or self.keeps_scores or self.bias is not None
        scoring = self.scoring = self._scoring(hidden_states, labels, by_logits=by_logits)
        packed = scoring.packed
        tiles, padded = len(self.edges), packed.padded
        best, sums = hidden_states.new_empty(2, tiles, padded)
        described = columns = None
        if by_logits:
            described = hidden_states.new_empty(tiles, 4, padded)
            columns = labels.new_empty(tiles, padded, dtype=torch.int32)
        if store:
            self._reserve(padded)
        calls = self._calls()  # whoever is free takes the next: results are per tile

        def work(_: int) -> None:
            scores = self.memory if store else hidden_states.new_empty(WIDTH, padded)
            for call in calls:
                part = slice(call.first, call.stop)
                parts = (_part(values, part) for values in (described, columns))
                found = native.Found(scores, best[part], sums[part], *parts)
                self._weigh(scoring, call, found, keep=store)

        self.workers.run(work)
        scored = packed._replace(across=packed.across[:0].clone())  # this chunk is
        self.scoring = scoring._replace(packed=scored)
        best, sums = best[:, : packed.count], sums[:, : packed.count]
        unit, log_scale, scale = self.unit(hidden_states), best, torch.ones_like(best)
        if not (self.linear or by_logits):
            scale = best.masked_fill(best == torch.inf, 0)  # nothing was left
            log_scale = torch.log(best / unit.T).mul_(self.request.h_exp)
        if described is not None and columns is not None:
            described = described[:, :, : packed.count].transpose(0, 1)
            starts = labels.new_tensor([[start] for start, _ in self.edges])
            columns = columns[:, : packed.count] + starts
        near = self._compact(scoring.near)
        return TileSums(unit, log_scale, sums, scale, near, described, columns)

    def accumulate(
        self,
        hidden_states: Tensor,
        factors: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        gradients: Gradients,
        chunk: slice,
    ) -> None:
        """Add a chunk's products to the gradients; see `ChunkedTiles.accumulate`."""
        scoring, num_classes = self.scoring, self.request.num_classes
        packed, from_scores = scoring.packed, scoring.logits is not None
        of_tokens = self._padded(torch.stack(rows) if from_scores else factors, packed)

        def kept(worker: int) -> Iterator[_Weights]:
            if self.in_place:
                classes, step = slice(0, num_classes), self.workers.count
                every = self._factors(scoring, of_tokens, classes)
                yield _Weights(classes, self._kept(classes, packed), every, worker, step)
                return
            for k in range(worker, len(self.edges), self.workers.count):
                tile = slice(*self.edges[k])
                mine = of_tokens if from_scores else of_tokens[k : k + 1]
                yield _Weights(tile, self._kept(tile, packed), self._factors(scoring, mine, tile))

        self._add(packed, hidden_states, kept, gradients, chunk)
        del self.scoring  # before the next chunk's is made

    def recompute(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        gradients: Gradients,
        chunk: slice,
    ) -> Tensor | None:
        """Add a chunk's products to the gradients; see `ChunkedTiles.recompute`."""
        scoring = self._scoring(hidden_states, labels, by_logits=True)
        packed = scoring.packed
        of_tokens = self._padded(torch.stack(rows), packed)

        def made(worker: int) -> Iterator[_Weights]:
            scores = hidden_states.new_empty(WIDTH, packed.padded)
            found = native.Found(scores, *hidden_states.new_empty(2, 1, packed.padded))
            for k in range(worker, len(self.edges), self.workers.count):
                self._weigh(scoring, _Tiles(k, k + 1, labels.new_zeros(1)), found, keep=False)
                tile = slice(*self.edges[k])
                yield _Weights(tile, scores, self._factors(scoring, of_tokens, tile))

        self._add(packed, hidden_states, made, gradients, chunk)
        return self._compact(scoring.near)

    def finish_prototypes(self, gradients: Gradients) -> None:
        """Turn the accumulated products into the gradient of the prototypes, in place."""
        self.scratch = self.parts = self.memory = torch.empty(0, 0)  # before more is taken
        super().finish_prototypes(gradients)

    def _add(
        self,
        packed: native.Packed,
        hidden_states: Tensor,
        weights: Callable[[int], Iterator[_Weights]],
        gradients: Gradients,
        chunk: slice,
    ) -> None:
        """Add the products of all tiles; `weights` gives those of a worker, one after another."""
        frame, workers = self.request.frame, self.workers.count
        sums = hidden_states.new_zeros(workers, packed.padded) if frame.with_sums else None
        if self.scratch.shape[1] < native.scratch_size(packed, WIDTH):
            self.scratch = hidden_states.new_empty(workers, native.scratch_size(packed, WIDTH))
            self.parts = hidden_states.new_empty(workers, packed.padded, hidden_states.shape[1])
        scratch, parts = self.scratch, None
        if gradients.hidden_states is not None:
            parts = self.parts[:, : packed.padded].zero_()

        def work(worker: int) -> None:
            for those in weights(worker):
                classes = those.classes
                totals = native.Totals(
                    _part(gradients.prototypes, classes),
                    None if parts is None else parts[worker],
                    _part(gradients.columns, classes),
                    None if sums is None else sums[worker],
                    _part(gradients.class_bias, classes),
                )
                native.accumulate_tiles(
                    *(packed, those.weights, those.factors),
                    frame.tile(classes.start, classes.stop).contiguous(),
                    *(totals, scratch[worker]),
                    tiles=(WIDTH, those.first, those.step),
                    add=chunk.start > 0,
                )

        self.workers.run(work)
        if parts is not None and gradients.hidden_states is not None:
            target = gradients.hidden_states[chunk]
            torch.sum(parts[:, : packed.count], 0, out=target)
            if sums is not None:
                total = sums[:, : packed.count].sum(0).unsqueeze(1)
                target.addcmul_(hidden_states, total, value=-1)

    def _scoring(self, hidden_states: Tensor, labels: Tensor, *, by_logits: bool) -> _Scoring:
        frame = self.request.frame
        scale = 1.0 if self.linear else -2.0
        packed = native.pack_tokens(hidden_states, scale, narrow=_narrow(self.request))
        excluded, bounds = self._excluded(labels)
        near: list[Tensor | None] = [None] * len(self.edges)
        logits = row = limits = None
        if self.linear:
            logits = native.Logits(None, None, 1.0) if by_logits else None
            return _Scoring(packed, logits, row, limits, excluded, bounds, near)
        if by_logits:
            unit = self._padded(self.unit(hidden_states).squeeze(1), packed)
            logits = native.Logits(unit, self.bias, float(self.request.h_exp))
        squared = torch.linalg.vecdot(hidden_states, hidden_states)
        limits = near_limits(frame, squared)
        if frame.kind != "sphere" or frame.center is not None:
            row = self._padded(squared, packed)
        return _Scoring(packed, logits, row, limits, excluded, bounds, near)

    def _calls(self) -> Iterator[_Tiles]:
        """Return what each call of C scores, for whichever thread asks."""
        following, count = torch.zeros(1, dtype=torch.int64, device="cpu"), len(self.edges)
        if self.in_place:
            return iter([_Tiles(0, count, following)] * self.workers.count)
        return iter([_Tiles(k, k + 1, following.clone()) for k in range(count)])

    def _weigh(self, scoring: _Scoring, tiles: _Tiles, found: native.Found, *, keep: bool) -> None:
        """Write what is best of each token in each tile, the sums, and what is kept.

        Args:
            scoring: Of the chunk.
            tiles: Which are meant.
            found: Of these tiles, but for the scores: of all, or of one if they are not kept.
            keep: Whether the scores, or their weights, stay in `memory` for `accumulate`.
        """
        packed = scoring.packed
        classes = slice(self.edges[tiles.first][0], self.edges[tiles.stop - 1][1])
        prototypes = self.request.frame.tile(classes.start, classes.stop).contiguous()
        terms = native.Terms(
            prototypes,
            _part(self.gain, classes),
            self._column(classes, prototypes),
            scoring.row,
            scoring.limits,
            scoring.excluded,
            scoring.bounds[tiles.first : tiles.stop + 1],
            classes.start,
        )
        if keep:
            found = found._replace(scores=self._kept(classes, packed))
        rule = self._rule(scoring, classes)
        while True:
            k = native.weigh_tiles(
                packed, terms, rule, tiles.following, found, width=WIDTH, keep=keep
            )
            if k < 0:
                return
            assert scoring.limits is not None, "no limit, no near pair"
            tile = slice(*self.edges[tiles.first + k])
            scores = self._kept(tile, packed) if keep else found.scores[: tile.stop - tile.start]
            mine = found.tile(scores, k)
            near = self._near(scores, scoring.limits, mine.best, packed.count, tile.start)
            scoring.near[tiles.first + k] = near
            native.weigh_tile(mine, self._rule(scoring, tile), keep=keep)

    def _rule(self, scoring: _Scoring, classes: slice) -> native.Rule:
        """Return what makes weights of the scores of `classes`."""
        if scoring.logits is not None:
            return scoring.logits.part(classes)
        return None if self.linear else float(self.request.h_exp)

    def _factors(self, scoring: _Scoring, of_tokens: Tensor, classes: slice) -> native.Factors:
        logits = None if scoring.logits is None else scoring.logits.part(classes)
        return native.Factors(of_tokens, _part(self.gain, classes), logits)

    def _choose_products(self) -> int:
        return WIDTH

    def _reserve(self, rows: int) -> None:
        if self.memory.numel() < rows * self.request.num_classes:
            self.memory = self.request.hidden_states.new_empty(
                rows * self.request.num_classes, dtype=torch.float32
            )

    def _kept(self, classes: slice, packed: native.Packed) -> Tensor:
        """Return where the scores of `classes` are kept: `[V', P]`."""
        padded = packed.padded
        return self.memory[classes.start * padded : classes.stop * padded].view(-1, padded)

    def _padded(self, values: Tensor, packed: native.Packed) -> Tensor:
        """Return `[..., T]` with zeros up to `[..., P]`."""
        return torch.nn.functional.pad(values, (0, packed.padded - packed.count))

    def _column(self, classes: slice, prototypes: Tensor) -> Tensor | None:
        """Return what is added to the scores of `classes`: |w|^2 + eps, and |x|^2 on the sphere.

        Of a linear head it is the bias.
        """
        if self.linear or self.columns is not None:
            return _part(self.columns, classes)
        return prototypes.square().sum(1).add_(self.request.frame.eps)

    def _excluded(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return pairs (class, token) `[S, 2]` of labels `[T, K]`, and where each tile's begin."""
        tokens, slots = torch.nonzero(labels >= 0, as_tuple=True)
        classes, order = labels[tokens, slots].sort(stable=True)
        starts = [start for start, _ in self.edges] + [self.request.num_classes]
        bounds = torch.searchsorted(classes, classes.new_tensor(starts))
        return torch.stack([classes, tokens[order]], 1), bounds

    def _near(
        self, scores: Tensor, limits: Tensor, best: Tensor, count: int, start: int
    ) -> Tensor | None:
        """Exclude near pairs from a tile's scores `[W, P]`, and write what is best `[P]` then."""
        squared, limits = scores.T[:count], limits.unsqueeze(1)
        found = near_count(squared, limits)
        columns = take_near(squared, limits, self.request.frame.eps, found)
        torch.amin(squared, 1, out=best[:count])
        return torch.where(columns >= 0, columns + start, -1)


def _part(values: Tensor | None, rows: slice) -> Tensor | None:
    return None if values is None else values[rows]
