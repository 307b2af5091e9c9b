"""Rows of streams in an order that no number of processes, workers or restarts changes."""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import datasets
import numpy as np
import torch

from harmonic_sft.data.files import BadRows
from harmonic_sft.data.keyed_random import permutation, random_bits
from harmonic_sft.data.packing import pack

Row = dict[str, Any]


class Snapshot(TypedDict):
    """Where one logical stream stood before a window: enough to read it again.

    Attributes:
        rows: Rows that the stream had given by then.
        windows: Windows that it had read.
        skipped: Documents and rows of files that it had left out, each counted in the first pass
            alone, and those found while opening the sources not at all.
        sources: Of every source: `epoch`, documents read in it, the library's own state, and the
            last row of a file that was left out.
    """

    rows: int
    windows: int
    skipped: int
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


class _Reader:
    """One source's part in one logical stream, pass after pass."""

    def __init__(
        self,
        documents: datasets.IterableDataset,
        stream: int,
        bad_rows: BadRows,
        start: dict[str, Any] | None,
    ):
        self._fresh = documents
        self._stream = stream
        self._bad_rows = bad_rows
        self._start = start or {"epoch": 0, "number": 0, "documents": None, "last_bad": None}
        self.load(self._start)

    def state(self) -> dict[str, Any]:
        """Return where it stands."""
        # The library knows where it was told to go only once it has read something there.
        documents = self._documents.state_dict() if self._begun else self._loaded
        return {
            "epoch": self.epoch,
            "number": self.number,
            "documents": copy.deepcopy(documents),
            "last_bad": self._last_bad,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to where a reader stood."""
        self.epoch, self.number = state["epoch"], state["number"]
        self._last_bad = state["last_bad"]
        self._loaded, self._begun = state["documents"], False
        # Readers must not share their places, but rows left out have one counter.
        self._documents = copy.deepcopy(self._fresh, {id(self._bad_rows): self._bad_rows})
        if self._loaded is not None:
            self._documents.load_state_dict(copy.deepcopy(self._loaded))
        # Plain iteration would give each worker of a data loader some shards only.
        self._iterator = self._documents.iter(batch_size=1)

    def restart(self) -> None:
        """Begin the next pass, after the documents kept for evaluation."""
        self.load({**self._start, "epoch": self.epoch + 1})

    @property
    def at_start(self) -> bool:
        """Whether this pass has given no document."""
        return self.number == self._start["number"]

    def next(self) -> tuple[Row | None, list[str]]:
        """Return the next document with its number, None at the end of the pass.

        Also the places of rows of files that were left out on the way.
        """
        batch, places = _left_out(self._bad_rows, functools.partial(next, self._iterator, None))
        # Where it goes on in a file, the library reads that again from its beginning.
        found = list(places)
        if self._last_bad in places:
            found = found[found.index(self._last_bad) + 1 :]
        if found:
            self._last_bad = found[-1]
        new = [place for place in found for _ in range(places[place])]
        if batch is None:
            return None, new
        self._begun = True
        # Streams are numbered apart, so that a document's name says where it was read.
        self.number += 1
        document = {name: values[0] for name, values in batch.items()}
        return {**document, "document": (self._stream << 40) + self.number - 1}, new


def _left_out(bad_rows: BadRows, call: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """Return a call's result and all places that it leaves out, also those known already."""
    known, bad_rows.places = bad_rows.places, {}
    try:
        result = call()
    finally:
        found, bad_rows.places = bad_rows.places, known
        for place, (reason, rows) in found.items():
            bad_rows.add(place, reason, rows)
    return result, {place: rows for place, (_, rows) in found.items()}


class LogicalStream:
    """One of a fixed number of streams that a run reads, whatever reads them.

    It reads a window of documents, makes rows of them, shuffles and packs these, gives them, and
    goes on. A window depends on the seed and its place alone.

    Args:
        sources: This stream's part of every source.
        number: Of the stream.
        weights: Of the sources in a mixture; None reads them in turn, each once in a pass.
        make_rows: Of every source, makes rows of documents, which have a `document` number.
        bad_rows: Where they count what makes none.
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
        self._counted: set[str] = set()  # places left out while opening

    def hold_out(self, count: int) -> tuple[list[Row], int, bool]:
        """Keep the first documents from every pass, such as those of the evaluation.

        Returns:
            Their rows, how many there were, and whether documents are left.
        """
        readers, waiting = self._readers(), set(range(len(self.sources)))
        rows: list[Row] = []
        documents, left = 0, False
        for source in itertools.cycle(range(len(readers))):
            if not waiting or left:
                break
            if source not in waiting:
                continue
            if documents == count:
                self._starts = [reader.state() for reader in readers]
            document, _ = readers[source].next()
            if document is None:
                waiting.remove(source)
                continue
            made = self.make_rows[source]([document])
            left = bool(made) and documents == count
            if made and not left:
                rows += made
                documents += 1
        self._counted = set(self.bad_rows.places)
        return rows, documents, left

    def _readers(self) -> list[_Reader]:
        pairs = zip(self.sources, self._starts, strict=True)
        return [_Reader(part, self.number, self.bad_rows, start) for part, start in pairs]

    def rows(self, snapshot: Snapshot | None) -> Iterator[tuple[list[tuple[Row, int]], Place]]:
        """Yield packs of rows with their epochs, without end.

        Args:
            snapshot: Where to begin; None is the beginning.

        Raises:
            ValueError: There is no row in a whole pass.
        """
        readers = self._readers()
        given = windows = skipped = 0
        if snapshot is not None:
            given, windows = snapshot["rows"], snapshot["windows"]
            skipped = snapshot["skipped"]
            for reader, state in zip(readers, snapshot["sources"], strict=True):
                reader.load(state)
        barren = [0] * len(readers)  # ends of each source since the last row
        while min(barren) < 2:
            states = [reader.state() for reader in readers]
            here = Snapshot(rows=given, windows=windows, skipped=skipped, sources=states)
            documents, ended, left_out = self._read(readers, windows)
            rows = []
            for (source, epoch), group in documents.items():
                make = functools.partial(self.make_rows[source], group)
                made, places = _left_out(self.bad_rows, make)
                rows += [(row, epoch) for row in made]
                left_out += [place for place in places if epoch == 0]
            skipped += sum(place not in self._counted for place in left_out)
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
        self, readers: Sequence[_Reader], windows: int
    ) -> tuple[dict[tuple[int, int], list[Row]], set[int], list[str]]:
        """Read a window of documents by (source, epoch).

        Also tell the sources that ended in it, and the rows of files left out in the first pass.
        """
        found: dict[tuple[int, int], list[Row]] = {}
        left_out: list[str] = []
        waiting = set(range(len(readers)))
        turns = self._turns(readers, waiting, windows)
        count = 0
        ended = set()
        while count < self.window and waiting:
            source = next(turns)
            if source not in waiting:
                continue
            reader = readers[source]
            document, places = reader.next()
            left_out += places if reader.epoch == 0 else []
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
        return found, ended, left_out

    def _turns(self, readers: Sequence[_Reader], waiting: set[int], windows: int) -> Iterator[int]:
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
        """Yield items with their `place`, batch after batch of this process and worker."""
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
