"""Torch data sets of masked rows, the order they are read in, and their padded batches."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import datasets
import numpy as np
import torch
from torch import Tensor

from harmonic_sft.data.keyed_random import permutation
from harmonic_sft.data.masking import IGNORE_INDEX, RowMasker


class MaskedRows(torch.utils.data.Dataset):
    """Rows of a table, masked anew in every epoch.

    Args:
        rows: Columns `input_ids`, `source`, `document` and `chunk`.
        masker: Makes `input_ids` and `labels` of a row and an epoch.
        fixed_epoch: Mask every pass as this epoch, for evaluations that can be compared. accelerate
            numbers the passes over evaluation sets too; the number is then ignored.
    """

    def __init__(
        self, rows: datasets.Dataset, masker: RowMasker, *, fixed_epoch: int | None = None
    ) -> None:
        self.rows = rows.with_format("numpy")
        self.masker = masker
        self.fixed_epoch = fixed_epoch
        # In shared memory, so that workers that outlive an epoch see the next one's number.
        self._epoch = torch.tensor(fixed_epoch or 0).share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch whose masks are given out now."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Give out the masks of this epoch from now on, unless the epoch is fixed."""
        if self.fixed_epoch is None:
            self._epoch.fill_(epoch)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return `input_ids` and `labels`, both `[T]` int64, of one row."""
        return self.masker(self.rows[int(index)], self.epoch)


class EpochSampler(torch.utils.data.Sampler[int]):
    """Shuffle the rows by (seed, epoch) alone, and keep the order and the masks in one epoch.

    accelerate 1.15 hands the epoch to the sampler *or* to the data set, which of the two depending
    on the number of processes and on whether the run was resumed in mid-epoch
    (`DataLoaderShard.set_epoch`). The sampler has no epoch of its own and passes on the one it is
    given, so either way both see it.

    Args:
        rows: Owns the epoch.
        seed: Seed of the order.
    """

    def __init__(self, rows: MaskedRows, *, seed: int) -> None:
        self.rows = rows
        self.seed = seed

    def set_epoch(self, epoch: int) -> None:
        """Order the rows as in this epoch from the next pass on."""
        self.rows.set_epoch(epoch)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def __iter__(self) -> Iterator[int]:
        """Yield every row's index once."""
        yield from map(int, permutation("row order", (self.seed, self.rows.epoch), len(self)))


class StreamedMaskedRows(torch.utils.data.IterableDataset):
    """Rows of a stream, pass after pass without end, every pass masked as an epoch of its own.

    The epoch is counted here, not by the training loop: a run that skips to where it stopped then
    meets the same rows and masks, also when it had begun the stream anew before.

    Args:
        rows: Columns `input_ids`, `source`, `document` and `chunk`.
        masker: Makes `input_ids` and `labels` of a row and an epoch.
    """

    def __init__(self, rows: datasets.IterableDataset, masker: RowMasker) -> None:
        self.rows = rows
        self.masker = masker

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield `input_ids` and `labels`, both `[T]` int64.

        Raises:
            ValueError: More than one worker, or no row in the stream.
        """
        worker = torch.utils.data.get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ValueError(
                "training.dataloader_num_workers: expected 0 or 1 for a stream, "
                f"got {worker.num_workers}. Several workers would change the order of the rows."
            )
        for epoch in itertools.count():
            row = None
            for row in self.rows:
                yield self.masker(row, epoch)
            if row is None:
                raise ValueError(
                    "data.sources: expected more documents than the evaluation split takes, "
                    "got none after it. Lower data.eval.documents."
                )


@dataclass(frozen=True, kw_only=True)
class PaddingCollator:
    """Pad rows on the right to the longest one.

    Args:
        pad_token_id: Fills `input_ids`; `labels` are filled with `IGNORE_INDEX`.
        pad_to_multiple_of: Round the length up to a multiple of this.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None

    def __call__(self, rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Tensor]:
        """Make one batch.

        Args:
            rows: `input_ids` and `labels`, both `[T]`, of each row.

        Returns:
            `input_ids`, `attention_mask` and `labels`, all `[B, T]` int64.
        """
        longest = max(len(row["input_ids"]) for row in rows)
        multiple = self.pad_to_multiple_of or 1
        shape = (len(rows), -(-longest // multiple) * multiple)  # [B, T]
        input_ids = np.full(shape, self.pad_token_id, dtype=np.int64)
        attention_mask = np.zeros(shape, dtype=np.int64)
        labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        for index, row in enumerate(rows):
            length = len(row["input_ids"])
            input_ids[index, :length] = row["input_ids"]
            attention_mask[index, :length] = 1
            labels[index, :length] = row["labels"]
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        return {name: torch.from_numpy(values) for name, values in batch.items()}
