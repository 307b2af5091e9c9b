"""Rows of streams in an order that no number of processes, workers or restarts changes."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import datasets
import numpy as np
import torch

from harmonic_sft.data.files import SHOWN_REASONS, BadRows
from harmonic_sft.data.keyed_random import permutation, random_bits
from harmonic_sft.data.packing import pack
from harmonic_sft.data.stream_reader import Row, StreamReader, left_out


class DataError(ValueError):
    """What is wrong with the data, in one line, whatever process has found it."""

    def __init__(self, message: str):
        # torch hands on what a worker raises as a text that ends in the traceback's last line.
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].strip())


class Snapshot(TypedDict):
    """Where one logical stream stood before a window: enough to read it again.

    Attributes:
        rows: Rows that the stream had given by then.
        windows: Windows that it had read.
        skipped: Documents and rows of files that it had left out, each counted in the first pass
            alone, and those found while opening the sources not at all.
        reasons: The first of these that were not blank, those of the window included.
        sources: Of every source: `epoch`, documents read in it, the library's own state, and the
            last row of a file that was left out.
    """

    rows: int
    windows: int
    skipped: int
    reasons: list[str]
    sources: list[dict[str, Any]]


class StreamState(TypedDict):
    """Where a run stood: rows used by all processes, and a snapshot of every stream by number."""

    rows: int
    streams: dict[str, Snapshot]


class Place(NamedTuple):
    """Which row of which logical stream, what that has left out, and the window it came from."""

    stream: int
    row: int
    skipped: int
    snapshot: Snapshot


class LogicalStream:
    """One of a fixed number of streams that a run reads, whatever reads them.

    It reads a window of documents, makes rows of them, shuffles and packs these, gives them, and
    goes on. A window depends on the seed and its place alone.

    Args:
        sources: This stream's part of every source.
        number: Of the stream.
        weights: Of the sources in a mixture; None reads them in turn, each once in a pass.
        make_rows: Of every source, makes rows of documents, which have a `document` number.
        bad_rows: Where they count what makes none, and `hold_out` too.
        window: Documents.
        seed: Of shuffling and mixing.
        capacity: Of a packed row, in tokens; None keeps rows as they are.
    """

    def __init__(
        self,
        sources: Sequence[datasets.IterableDataset],
        number: int,
        *,
        weights: Sequence[float] | None,
        make_rows: Sequence[Callable[[Sequence[Row]], list[Row]]],
        bad_rows: BadRows,
        window: int,
        seed: int,
        capacity: int | None,
    ):
        self.sources, self.number, self.weights = sources, number, weights
        self.make_rows, self.bad_rows = make_rows, bad_rows
        self.window, self.seed, self.capacity = window, seed, capacity
        self._starts: list[dict[str, Any] | None] = [None] * len(sources)

    def hold_out(self, count: int) -> tuple[list[Row], int, bool]:
        """Keep the first documents from every pass, such as those of the evaluation.

        Returns:
            Their rows, how many there were, and whether documents are left.
        """
        readers, waiting = self._readers(), set(range(len(self.sources)))
        rows: list[Row] = []
        documents, left = 0, False
        before, ahead = BadRows(), BadRows()
        starts: list[dict[str, Any] | None] | None = None
        for source in itertools.cycle(range(len(readers))):
            if not waiting or left:
                break
            if source not in waiting:
                continue
            if documents == count and starts is None:
                starts = [reader.state() for reader in readers]
            found = before if starts is None else ahead
            document, unread = readers[source].next()
            found.merge(unread)
            if document is None:
                waiting.remove(source)
                continue
            make = functools.partial(self.make_rows[source], [document])
            made, unused = left_out(self.bad_rows, make)
            found.merge(unused)
            left = bool(made) and documents == count
            if made and not left:
                rows += made
                documents += 1
        self._starts = self._starts if starts is None else starts
        self.bad_rows.merge(before)
        if not left:  # else training finds these again
            self.bad_rows.merge(ahead)
        return rows, documents, left

    def _readers(self) -> list[StreamReader]:
        return [
            StreamReader(part, f"data.sources[{source}]", self.number, self.bad_rows, start)
            for source, (part, start) in enumerate(zip(self.sources, self._starts, strict=True))
        ]

    def rows(self, snapshot: Snapshot | None) -> Iterator[tuple[list[tuple[Row, int]], Place]]:
        """Yield packs of rows with their epochs, without end.

        Args:
            snapshot: Where to begin; None is the beginning.

        Raises:
            ValueError: There is no row in a whole pass.
        """
        readers = self._readers()
        given = windows = skipped = 0
        reasons: list[str] = []
        if snapshot is not None:
            given, windows = snapshot["rows"], snapshot["windows"]
            skipped, reasons = snapshot["skipped"], snapshot["reasons"]
            for reader, state in zip(readers, snapshot["sources"], strict=True):
                reader.load(state)
        barren = [0] * len(readers)  # ends of each source since the last row
        while min(barren) < 2:
            states = [reader.state() for reader in readers]
            documents, ended, skips = self._read(readers, windows)
            rows = []
            for (source, epoch), group in documents.items():
                make = functools.partial(self.make_rows[source], group)
                made, unused = left_out(self.bad_rows, make)
                rows += [(row, epoch) for row in made]
                if epoch == 0:
                    skips.merge(unused)
            reasons = list(dict.fromkeys(reasons + skips.first))[:SHOWN_REASONS]
            here = Snapshot(
                rows=given, windows=windows, skipped=skipped, reasons=reasons, sources=states
            )
            skipped += skips.total
            barren = [0 if rows else n + (i in ended) for i, n in enumerate(barren)]
            for members in self._arrange(rows, windows):
                yield members, Place(self.number, given, skipped, here)
                given += 1
            windows += 1
        raise ValueError(
            "data.sources: expected more documents than the evaluation split takes, got none "
            "after it. Lower data.eval.documents"
        )

    def _read(
        self, readers: Sequence[StreamReader], windows: int
    ) -> tuple[dict[tuple[int, int], list[Row]], set[int], BadRows]:
        """Read a window of documents by (source, epoch).

        Also tell the sources that ended in it, and the rows of files left out in the first pass.
        """
        found: dict[tuple[int, int], list[Row]] = {}
        skips = BadRows()
        waiting = set(range(len(readers)))
        turns = self._turns(readers, waiting, windows)
        count = 0
        ended = set()
        while count < self.window and waiting:
            source = next(turns)
            if source not in waiting:
                continue
            reader = readers[source]
            document, unread = reader.next()
            if reader.epoch == 0:
                skips.merge(unread)
            if document is not None:
                found.setdefault((source, reader.epoch), []).append(document)
                count += 1
                continue
            ended.add(source)
            if self.weights is None or reader.at_start:
                waiting.remove(source)
            else:
                reader.restart()
        if not waiting:
            for reader in readers:
                reader.restart()
        return found, ended, skips

    def _turns(
        self, readers: Sequence[StreamReader], waiting: set[int], windows: int
    ) -> Iterator[int]:
        """Yield whose turn it is: one after another, or at random by weight."""
        while self.weights is None:
            yield min(waiting, key=lambda source: (readers[source].number, source))
        bounds = np.cumsum(self.weights) / np.sum(self.weights)  # [sources]
        for draw in itertools.count():
            bits = random_bits("mixture", (self.seed, self.number, windows, draw), 256)
            shares = bits.astype(np.float64) / 2.0**64
            yield from map(int, np.searchsorted(bounds[:-1], shares, side="right"))

    def _arrange(
        self, rows: Sequence[tuple[Row, int]], windows: int
    ) -> Iterator[list[tuple[Row, int]]]:
        """Pack and shuffle the rows of a window."""
        packs = [np.array([index]) for index in range(len(rows))]
        if self.capacity is not None and rows:
            packs = pack(np.array([len(row["input_ids"]) for row, _ in rows]), self.capacity)
        for index in permutation("window", (self.seed, self.number, windows), len(packs)):
            yield [rows[member] for member in packs[index]]


class StreamedRows(torch.utils.data.IterableDataset):
    """Rows of logical streams in turn: row i of a run is row i // S of stream i % S.

    Every process and worker reads only the streams that hold rows of its own batches.

    Args:
        streams: S of them.
        finish: Makes an item of a pack: a list of rows with their epochs.
    """

    def __init__(
        self,
        streams: Sequence[LogicalStream],
        finish: Callable[[list[tuple[Row, int]]], dict[str, Any]],
    ):
        self.streams = streams
        self.finish = finish
        self.state = StreamState(rows=0, streams={})
        self.share(process_index=0, num_processes=1, batch_size=1)

    def share(self, *, process_index: int, num_processes: int, batch_size: int) -> None:
        """Say which batches this process takes: every `num_processes`-th."""
        self.process_index, self.num_processes = process_index, num_processes
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield items with their `place`, batch after batch of this process and worker.

        Raises:
            DataError: A document cannot be read or used.
        """
        try:
            yield from self._items()
        except ValueError as error:
            raise DataError(str(error)) from error

    def _items(self) -> Iterator[dict[str, Any]]:
        worker = torch.utils.data.get_worker_info()
        index, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        readers: dict[int, Iterator[tuple[list[tuple[Row, int]], Place]]] = {}
        for batch in itertools.count(index, count):
            start = (batch * self.num_processes + self.process_index) * self.batch_size
            for row in range(
                self.state["rows"] + start, self.state["rows"] + start + self.batch_size
            ):
                stream, wanted = row % len(self.streams), row // len(self.streams)
                if stream not in readers:
                    snapshot = self.state["streams"].get(str(self.streams[stream].number))
                    readers[stream] = self.streams[stream].rows(snapshot)
                members, place = next(readers[stream])
                while place.row < wanted:
                    members, place = next(readers[stream])
                yield {**self.finish(members), "place": place}


def advance(state: StreamState, places: Sequence[Place], num_rows: int) -> StreamState:
    """Return the state after rows were used.

    Args:
        state: Before them.
        places: Of rows used by this process.
        num_rows: Rows used by all processes.
    """
    streams = dict(state["streams"])
    for place in places:
        streams[str(place.stream)] = place.snapshot
    return StreamState(rows=state["rows"] + num_rows, streams=streams)


def merge(states: Sequence[StreamState]) -> StreamState:
    """Join what the processes of a run know: of every stream the latest window."""
    streams: dict[str, Snapshot] = {}
    for state in states:
        for number, snapshot in state["streams"].items():
            if number not in streams or snapshot["rows"] > streams[number]["rows"]:
                streams[number] = snapshot
    return StreamState(rows=max(state["rows"] for state in states), streams=streams)


class PlacedCollator:
    """Keep the rows' places beside the batch that a collator makes of them, as `places`."""

    def __init__(self, collator: Callable[[list[dict[str, Any]]], dict[str, Any]]):
        self.collator = collator

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Make one batch."""
        plain = [{key: row[key] for key in row if key != "place"} for row in rows]
        return {**self.collator(plain), "places": [row["place"] for row in rows]}
