"""Documents of one source in one logical stream, pass after pass, from any place."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import datasets

from harmonic_sft.data.files import BadRows, one_line

STREAM_BITS = 40  # a document's number stands below that of its logical stream

Row = dict[str, Any]
T = TypeVar("T")


class StreamReader:
    """One source's part in one logical stream, pass after pass."""

    def __init__(
        self,
        documents: datasets.IterableDataset,
        name: str,
        stream: int,
        bad_rows: BadRows,
        start: dict[str, Any] | None,
    ):
        self._fresh = documents
        self._name = name
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

    def next(self) -> tuple[Row | None, BadRows]:
        """Return the next document with its number, None at the end of the pass.

        Also the rows of files that were left out on the way.

        Raises:
            ValueError: It cannot be read.
        """
        number = (self._stream << STREAM_BITS) + self.number
        try:
            batch, skipped = left_out(self._bad_rows, self._take)
        # Files, the network and parsers fail in dozens of ways, and none of them says where.
        except Exception as error:
            if str(error).startswith(self._name):
                raise
            raise ValueError(
                f"{self._name}: expected readable rows, got {type(error).__name__} "
                f"({one_line(error)}) in {document_name(number)}, counted from 0"
            ) from error
        # Where it goes on in a file, the library reads that again from its beginning.
        found = list(skipped.places)
        if self._last_bad in skipped.places:
            for place in found[: found.index(self._last_bad) + 1]:
                del skipped.places[place]
        if found:
            self._last_bad = found[-1]
        if batch is None:
            return None, skipped
        self._begun = True
        self.number += 1
        document = {name: values[0] for name, values in batch.items()}
        return {**document, "document": number}, skipped

    def _take(self) -> Row | None:
        return next(self._iterator, None)


def document_name(number: int) -> str:
    """Spell out a document's number: its place in a pass over its logical stream, or in a table."""
    stream, document = divmod(number, 1 << STREAM_BITS)
    return f"document {document}" + (f" of logical stream {stream}" if stream else "")


def left_out(bad_rows: BadRows, call: Callable[[], T]) -> tuple[T, BadRows]:
    """Return a call's result and what it leaves out, which the counter forgets."""
    known = bad_rows.places, bad_rows.blank
    bad_rows.places, bad_rows.blank = {}, 0
    try:
        result = call()
        return result, BadRows(bad_rows.places, bad_rows.blank)
    finally:
        bad_rows.places, bad_rows.blank = known
