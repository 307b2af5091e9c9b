"""Where the streams of a training run stand: their loader, and their part of a checkpoint."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from harmonic_sft.data.streams import (
    StreamedRows,
    StreamState,
    advance,
    collate_placed,
    merge,
)
from harmonic_sft.training.arguments import HarmonicTrainingArguments

STREAM_FILES = "stream_state_{}.json"  # of a process


class StreamPlace:
    """Follows which rows of the streams were used, so that a resumed run takes the next ones."""

    def __init__(self, rows: StreamedRows, args: HarmonicTrainingArguments):
        self._rows, self._args = rows, args
        self.state = StreamState(rows=0, streams={})  # of the rows that this process has read
        self.examples: list[dict[str, int]] = []  # rows of this process in the step at work

    def loader(self, collator: Callable[[Any], dict[str, Any]], batch_size: int) -> DataLoader:
        """Read this process's own share; accelerate would read all of it in every process."""
        args = self._args
        self._rows.share(
            process_index=args.process_index, num_processes=args.world_size, batch_size=batch_size
        )
        return DataLoader(
            self._rows,
            batch_size=batch_size,
            collate_fn=partial(collate_placed, collator),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            prefetch_factor=args.dataloader_prefetch_factor,
            # transformers 5.10 has no such argument.
            multiprocessing_context=vars(args).get("dataloader_multiprocessing_context"),
            # Drawn now: a resumed run restores the random numbers before it begins to read.
            generator=torch.Generator().manual_seed(int(torch.randint(2**62, ()))),
        )

    def take(self, batches: Sequence[dict[str, Any]]) -> None:
        """Remove the places of the rows from the batches of a step, and note them."""
        places = [place for batch in batches for place in batch.pop("places")]
        self.examples = [{"stream": place.stream, "row": place.row} for place in places]
        self.state = advance(self.state, places, len(places) * self._args.world_size)

    def save(self, checkpoint: Path) -> None:
        """Write the state of this process."""
        path = checkpoint / STREAM_FILES.format(self._args.process_index)
        path.write_text(json.dumps(self.state))

    def load(self, checkpoint: Path | None) -> None:
        """Continue where the run of a checkpoint stood; without one, start at the first row."""
        paths = [] if checkpoint is None else sorted(checkpoint.glob(STREAM_FILES.format("*")))
        states: list[Any] = [json.loads(path.read_text()) for path in paths]
        for state in states:
            places = state["streams"].values()
            if "left_out" in state or any("duplicates" not in place for place in places):
                raise ValueError(
                    f"resume: expected a stream's place as this version writes it, got "
                    f"{str(checkpoint)!r} of an earlier one. Give it as the model of a new run"
                )
        self._rows.state = self.state = merge(states)
