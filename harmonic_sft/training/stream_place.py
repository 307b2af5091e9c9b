"""Where the streams of a training run stand: their loader, and their part of a checkpoint."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from harmonic_sft.data.streams import (
    PlacedCollator,
    StreamedRows,
    StreamState,
    advance,
    merge,
)
from harmonic_sft.training.arguments import HarmonicTrainingArguments

STREAM_FILES = "stream_state_{}.json"  # of a process


class StreamPlace:
    """Follows which rows of the streams were used, so that a resumed run takes the next ones."""

    def __init__(self, rows: StreamedRows, args: HarmonicTrainingArguments):
        self._rows, self._args = rows, args
        self._state = StreamState(rows=0, streams={})
        self.examples: list[dict[str, int]] = []  # rows of this process in the step at work
        # Of logical streams so far: bad rows, exact and near duplicates.
        self._left_out: dict[int, tuple[int, ...]] = {}

    def loader(self, collator: Callable[[Any], dict[str, Any]], batch_size: int) -> DataLoader:
        """Read this process's own share; accelerate would read all of it in every process."""
        args = self._args
        self._rows.share(
            process_index=args.process_index, num_processes=args.world_size, batch_size=batch_size
        )
        return DataLoader(
            self._rows,
            batch_size=batch_size,
            collate_fn=PlacedCollator(collator),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            prefetch_factor=args.dataloader_prefetch_factor,
            # Drawn now: a resumed run restores the random numbers before it begins to read.
            generator=torch.Generator().manual_seed(int(torch.randint(2**62, ()))),
        )

    def take(self, batches: Sequence[dict[str, Any]]) -> None:
        """Take the places of their rows out of the batches of a step, and note them."""
        places = [place for batch in batches for place in batch.pop("places")]
        self.examples = [{"stream": place.stream, "row": place.row} for place in places]
        self._left_out |= {p.stream: (p.skipped, *p.duplicates) for p in places}
        self._state = advance(self._state, places, len(places) * self._args.world_size)

    def left_out(self) -> list[tuple[str, tuple[int, ...], list[str]]]:
        """Return what every stream left out so far.

        Returns:
            The stream; its bad rows, exact and near duplicates; the first reasons of bad rows.
        """
        found = []
        for stream, known in self._state["streams"].items():
            counts = (known["skipped"], *known["duplicates"])
            counts = max(counts, self._left_out.get(int(stream), counts))
            found.append((stream, counts, known["reasons"]))
        return found

    def save(self, checkpoint: Path) -> None:
        """Write what this process knows."""
        path = checkpoint / STREAM_FILES.format(self._args.process_index)
        path.write_text(json.dumps({**self._state, "left_out": self._left_out}))

    def load(self, checkpoint: Path) -> None:
        """Continue where the run of a checkpoint stood."""
        paths = sorted(checkpoint.glob(STREAM_FILES.format("*")))
        states: list[Any] = [json.loads(path.read_text()) for path in paths]
        self._rows.state = self._state = merge(states)
        for state in states:
            known = {int(stream): tuple(counts) for stream, counts in state["left_out"].items()}
            self._left_out |= {s: max(self._left_out.get(s, c), c) for s, c in known.items()}
