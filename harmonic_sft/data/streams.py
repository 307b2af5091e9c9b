"""Rows of streams in an order that no number of processes, workers or restarts changes."""

import copy
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

import datasets
import numpy as np
import torch

from harmonic_sft.data.bad_rows import SHOWN_REASONS, BadRows
from harmonic_sft.data.batches import pack
from harmonic_sft.data.files import BAD, Row
from harmonic_sft.data.heldout import Duplicates, HeldOut, Kind
from harmonic_sft.data.keyed_random import permutation, random_bits
from harmonic_sft.data.row_maker import TRACES, RowMaker
from harmonic_sft.data.sources import STREAM_BITS, numbered_rows

logger = logging.getLogger(__name__)

Members = list[tuple[Row, int]]  # rows of one item, each with its epoch


class DataError(ValueError):
    """What is wrong with the data, in one line, whatever process has found it."""

    def __init__(self, message: str):
        # torch wraps a worker's error in a text that ends in the traceback's last line.
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].strip())


class Snapshot(TypedDict):
    """Where one logical stream stood before a window: enough to read it again."""

    rows: int  # given before the window
    windows: int  # read before it
    sources: list[dict[str, Any]]  # for each its `epoch`, documents read in it, the library's state
    # What was left out up to the window's end, in the first pass alone, and without the bad rows
    # that `hold_out` counts.
    skipped: int
    reasons: list[str]  # the first few, blank rows apart
    duplicates: Duplicates


class StreamState(TypedDict):
    """Where a run stood: rows used by all processes, and a snapshot of every stream by number."""

    rows: int
    streams: dict[str, Snapshot]


class Place(NamedTuple):
    """Which row of which logical stream, and the window it came from."""

    stream: int
    row: int
    snapshot: Snapshot


class SourceReader:
    """One source's part in one logical stream, pass after pass, from any place."""

    def __init__(
        self,
        documents: datasets.IterableDataset,
        name: str,
        stream: int,
        start: Mapping[str, Any] | None,
    ):
        self._source, self._name, self._stream = documents, name, stream
        self.start = start or {"epoch": 0, "number": 0, "documents": None}
        self.load(self.start)

    def state(self) -> dict[str, Any]:
        """Return the position to continue from."""
        # Before the first row, state_dict() does not return the state that was loaded.
        documents = self._documents.state_dict() if self._has_read else self._loaded
        return {"epoch": self.epoch, "number": self.number, "documents": documents}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to where a reader stood when it gave this `state`."""
        self.epoch, self.number = state["epoch"], state["number"]
        self._loaded, self._has_read = state["documents"], False
        self._documents = copy.deepcopy(self._source)  # readers must not share their places
        self._documents.load_state_dict(self._loaded)
        # Plain iteration would give each worker of a data loader some shards only.
        batches = self._documents.iter(batch_size=1)
        rows = ({key: batch[key][0] for key in batch} for batch in batches)
        self._rows = numbered_rows(rows, self._name, (self._stream << STREAM_BITS) + self.number)

    def restart(self) -> None:
        """Begin the next pass, after the documents kept for evaluation."""
        self.load({**self.start, "epoch": self.epoch + 1})

    def next(self) -> tuple[list[Row], bool]:
        """Read up to and including the next row that is not bad, a document.

        Returns:
            The bad rows and the document, and whether there was one; if not, the pass has ended.
        """
        rows: list[Row] = []
        for row in self._rows:
            self._has_read = True
            rows.append(row)
            if BAD not in row:
                self.number += 1
                return rows, True
        return rows, False


@dataclass(kw_only=True, eq=False)
class LogicalStream:
    """One of a run's streams, whose number does not change with processes or workers.

    It reads a window of documents, makes rows of them, packs and shuffles the rows, yields them,
    and reads the next window. A window depends on the seed and its place alone.
    """

    sources: Sequence[datasets.IterableDataset]  # this stream's part of every source
    number: int
    weights: Sequence[float] | None  # of the sources; None reads them in turn, each once in a pass
    make_rows: Sequence[RowMaker]  # for every source
    window: int  # documents
    seed: int  # decides how rows are shuffled and sources mixed
    capacity: int | None  # longest packed row, in tokens; None keeps rows as they are
    bad_rows: BadRows = field(default_factory=BadRows)  # found by `hold_out`, not read again
    held_out: HeldOut = field(default_factory=HeldOut)  # copies of these are left out as they pass

    def __post_init__(self) -> None:
        self._starts: list[dict[str, Any] | None] = [None] * len(self.sources)

    def hold_out(self, count: int) -> tuple[list[Row], int, bool]:
        """Take the first `count` documents that make rows, and let every pass begin after them.

        Returns:
            Their rows, how many documents there were, and whether others are left to train on.
        """
        readers, waiting = self._readers(), deque(range(len(self.sources)))
        rows: list[Row] = []
        documents, is_left = 0, False
        starts: list[dict[str, Any] | None] | None = None
        later_bad_rows = BadRows()  # after the place where training starts
        while waiting and not is_left:
            source = waiting.popleft()
            if documents == count and starts is None:
                starts = [reader.state() for reader in readers]
            documents_read, is_document = readers[source].next()
            if is_document:
                waiting.append(source)
            elif starts is None:
                logger.warning(
                    "%s has no document left to train on in stream %d: the evaluation takes all. "
                    "Lower data.eval.documents.",
                    self.make_rows[source].name,
                    self.number,
                )
            new_rows, bad_rows = self.make_rows[source](documents_read)
            (self.bad_rows if starts is None else later_bad_rows).merge(bad_rows)
            is_left = bool(new_rows) and documents == count
            if not is_left:
                rows += new_rows
                documents += bool(new_rows)
        self._starts = starts or self._starts
        if not is_left:  # else training reads and counts these
            self.bad_rows.merge(later_bad_rows)
        return rows, documents, is_left

    def _readers(self) -> list[SourceReader]:
        return [
            SourceReader(part, maker.name, self.number, start)
            for part, maker, start in zip(self.sources, self.make_rows, self._starts, strict=True)
        ]

    def rows(self, snapshot: Snapshot | None) -> Iterator[tuple[Members, Place]]:
        """Yield packs of rows with their epochs, without end, from a snapshot or the beginning.

        Raises:
            ValueError: There is no row in a whole pass.
        """
        readers = self._readers()
        states = [reader.state() for reader in readers]
        current = snapshot or Snapshot(
            rows=0, windows=0, sources=states, skipped=0, reasons=[], duplicates=Duplicates()
        )
        for reader, state in zip(readers, current["sources"], strict=True):
            reader.load(state)
        num_rows, windows = current["rows"], current["windows"]
        empty_passes = [0] * len(readers)  # how often each source ended since the last row
        is_counted = snapshot is not None  # a snapshot has counted what its window leaves out
        while min(empty_passes) < 2:
            states = [reader.state() for reader in readers]
            documents, ended = self._read(readers, windows)
            rows: Members = []
            bad_rows = BadRows()
            kinds: list[Kind | None] = []
            for (source, epoch), group in documents.items():
                new_rows, new_bad_rows = self.make_rows[source](group)
                kept, new_kinds = self._without_duplicates(new_rows)
                rows += [(row, epoch) for row in kept]
                if epoch == 0 and not is_counted:
                    bad_rows.merge(new_bad_rows)
                    kinds += new_kinds
            is_counted = False
            current = Snapshot(
                rows=num_rows,
                windows=windows,
                sources=states,
                skipped=current["skipped"] + bad_rows.total,
                reasons=list(dict.fromkeys(current["reasons"] + bad_rows.first))[:SHOWN_REASONS],
                duplicates=Duplicates(*current["duplicates"]).plus(kinds),
            )
            empty_passes = [0 if rows else n + (i in ended) for i, n in enumerate(empty_passes)]
            for members in self._arrange(rows, windows):
                yield members, Place(self.number, num_rows, current)
                num_rows += 1
            windows += 1
        if not any(reader.start["number"] for reader in readers):
            names = ", ".join(maker.name for maker in self.make_rows)
            why = "".join(f". {reason}" for reason in current["reasons"][:1])
            raise ValueError(
                f"{names}: expected documents with text, got only blank or bad ones{why}"
            )
        raise ValueError(
            "data.sources: expected more documents than the evaluation split takes, got none "
            "after it. Lower data.eval.documents"
        )

    def _without_duplicates(self, rows: Sequence[Row]) -> tuple[list[Row], list[Kind | None]]:
        """Leave out copies of held-out documents, and the `TRACES` of all other rows."""
        kept: list[Row] = []
        kinds: list[Kind | None] = [None]
        for row in rows:
            if "fingerprint" in row:  # only the first row of a document has one
                kinds.append(self.held_out.kind_of(row["fingerprint"], row["words"]))
            if not self.held_out.drops(kinds[-1]):
                kept.append({key: row[key] for key in row if key not in TRACES})
        return kept, kinds

    def _read(
        self, readers: Sequence[SourceReader], windows: int
    ) -> tuple[dict[tuple[int, int], list[Row]], set[int]]:
        """Return a window of documents by (source, epoch), and the sources that ended in it."""
        documents: dict[tuple[int, int], list[Row]] = {}
        waiting, ended = set(range(len(readers))), set()
        turns = self._turns(readers, waiting, windows)
        count = 0
        while count < self.window and waiting:
            source = next(turns)
            if source not in waiting:
                continue
            reader = readers[source]
            while True:
                rows, is_document = reader.next()
                if rows:
                    documents.setdefault((source, reader.epoch), []).extend(rows)
                count += is_document
                if is_document:
                    break
                ended.add(source)
                gave_none = reader.number == reader.start["number"]
                if self.weights is None or gave_none:
                    waiting.remove(source)
                    break
                reader.restart()  # the turn is still this source's
        if not waiting:
            for reader in readers:
                reader.restart()
        return documents, ended

    def _turns(
        self, readers: Sequence[SourceReader], waiting: set[int], windows: int
    ) -> Iterator[int]:
        """Yield whose turn it is: one after another, or at random by weight."""
        while self.weights is None:
            yield min(waiting, key=lambda source: (readers[source].number, source))
        bounds = np.cumsum(self.weights) / np.sum(self.weights)  # [sources]
        for draw in itertools.count():
            bits = random_bits("mixture", (self.seed, self.number, windows, draw), 256)
            shares = bits.astype(np.float64) / 2.0**64
            yield from map(int, np.searchsorted(bounds[:-1], shares, side="right"))

    def _arrange(self, rows: Members, windows: int) -> Iterator[Members]:
        """Pack and shuffle the rows of a window."""
        packs = [np.array([index]) for index in range(len(rows))]
        if self.capacity is not None and rows:
            packs = pack(np.array([len(row["input_ids"]) for row, _ in rows]), self.capacity)
        for index in permutation("window", (self.seed, self.number, windows), len(packs)):
            yield [rows[member] for member in packs[index]]


class StreamedRows(torch.utils.data.IterableDataset):
    """Rows of S logical streams in turn: row i of a run is row i // S of stream i % S.

    Every process and worker reads only the streams that hold rows of its own batches. `finish`
    turns the rows of a pack into an item.
    """

    def __init__(
        self, streams: Sequence[LogicalStream], finish: Callable[[Members], dict[str, Any]]
    ):
        self.streams, self.finish = streams, finish
        self.state = StreamState(rows=0, streams={})
        self.share(process_index=0, num_processes=1, batch_size=1)

    def share(self, *, process_index: int, num_processes: int, batch_size: int) -> None:
        """Say which batches this process takes: every `num_processes`-th."""
        self.process_index, self.num_processes = process_index, num_processes
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield items with their `place`, batch after batch of this process and worker."""
        try:
            yield from self._items()
        except ValueError as error:
            raise DataError(str(error)) from error

    def _items(self) -> Iterator[dict[str, Any]]:
        worker = torch.utils.data.get_worker_info()
        index, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        readers: dict[int, Iterator[tuple[Members, Place]]] = {}
        for batch in itertools.count(index, count):
            number = batch * self.num_processes + self.process_index
            start = self.state["rows"] + number * self.batch_size
            for row in range(start, start + self.batch_size):
                stream, wanted = row % len(self.streams), row // len(self.streams)
                if stream not in readers:
                    snapshot = self.state["streams"].get(str(self.streams[stream].number))
                    readers[stream] = self.streams[stream].rows(snapshot)
                members, place = next(item for item in readers[stream] if item[1].row >= wanted)
                yield {**self.finish(members), "place": place}


def advance(state: StreamState, places: Sequence[Place], num_rows: int) -> StreamState:
    """Return the state after all processes used `num_rows` rows, this one those at `places`."""
    used = {str(place.stream): place.snapshot for place in places}
    return StreamState(rows=state["rows"] + num_rows, streams={**state["streams"], **used})


def merge(states: Sequence[StreamState]) -> StreamState:
    """Join the states of a run's processes; every stream keeps its latest window."""
    known = [item for state in states for item in state["streams"].items()]
    streams = dict(sorted(known, key=lambda item: item[1]["rows"]))  # the latest one stays
    return StreamState(rows=max((state["rows"] for state in states), default=0), streams=streams)


def collate_placed(
    collator: Callable[[list[dict[str, Any]]], dict[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Make a batch of rows by a collator, and keep their places beside it as `places`."""
    plain = [{key: row[key] for key in row if key != "place"} for row in rows]
    return {**collator(plain), "places": [row["place"] for row in rows]}
