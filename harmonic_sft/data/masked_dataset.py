"""Torch data sets of masked rows, the order they are read in, and their padded batches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import datasets
import numpy as np
import torch
from torch import Tensor

from harmonic_sft.data.keyed_random import permutation
from harmonic_sft.data.masking import IGNORE_INDEX
from harmonic_sft.data.next_tokens import RowLabels
from harmonic_sft.data.packing import join_rows


class MaskedRows(torch.utils.data.Dataset):
    """Rows of a table, or packs of them, masked anew in every epoch.

    Args:
        rows: Columns `input_ids`, `source`, `document` and `chunk`, and what else `masker` reads.
        masker: Makes `input_ids` and `labels` of a row and an epoch.
        packs: Numbers of the rows of each pack; an item is then a pack instead of a row. Every row
            is masked by its own name, so the masks are those of the same rows unpacked.
        fixed_epoch: Mask every pass as this epoch, for evaluations that can be compared. accelerate
            numbers the passes over evaluation sets too; the number is then ignored.
    """

    def __init__(
        self,
        rows: datasets.Dataset,
        masker: RowLabels,
        *,
        packs: Sequence[np.ndarray] | None = None,
        fixed_epoch: int | None = None,
    ) -> None:
        self.rows = rows.with_format("numpy")
        self.masker = masker
        self.packs = packs
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
        """Number of rows, or of packs."""
        return len(self.rows if self.packs is None else self.packs)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return `input_ids` and `labels`, both `[T]` int64, of one row.

        Those of a pack are its rows' one after the other, with `position_ids` `[T]` that start
        anew at 0 in each.
        """
        epoch = self.epoch
        if self.packs is None:
            return self.masker(self.rows[int(index)], epoch)
        members = self.packs[int(index)]
        return join_rows([self.masker(self.rows[int(member)], epoch) for member in members])


class EpochRows(Protocol):
    """Rows that know the epoch they are read in."""

    @property
    def epoch(self) -> int:
        """The epoch now."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Go to another epoch."""

    def __len__(self) -> int:
        """Number of rows."""
        ...


class EpochSampler(torch.utils.data.Sampler[int]):
    """Shuffle the rows by (seed, epoch) alone, and keep the order and the masks in one epoch.

    accelerate 1.15 hands the epoch to the sampler *or* to the data set, which of the two depending
    on the number of processes and on whether the run was resumed in mid-epoch
    (`DataLoaderShard.set_epoch`). The sampler has no epoch of its own and passes on the one it is
    given, so either way both see it.

    Args:
        rows: Owns the epoch; the items shuffled are its rows or packs.
        seed: Seed of the order.
    """

    def __init__(self, rows: EpochRows, *, seed: int) -> None:
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


@dataclass(frozen=True, kw_only=True)
class PaddingCollator:
    """Pad rows or packs on the right to the longest one.

    Args:
        pad_token_id: Fills `input_ids`; `labels` are filled with `IGNORE_INDEX`.
        pad_to_multiple_of: Round the length up to a multiple of this.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None

    def __call__(self, rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Tensor]:
        """Make one batch.

        Args:
            rows: `input_ids` and `labels`, both `[T]`, of each row, and `position_ids` of packs.

        Returns:
            `input_ids`, `attention_mask`, `labels` and for packs `position_ids`, all `[B, T]`
            int64. Padding has position 0: each such token is a document of its own.
        """
        longest = max(len(row["input_ids"]) for row in rows)
        multiple = self.pad_to_multiple_of or 1
        shape = (len(rows), -(-longest // multiple) * multiple)  # [B, T]
        fillers = {"input_ids": self.pad_token_id, "attention_mask": 0, "labels": IGNORE_INDEX}
        if "position_ids" in rows[0]:
            fillers["position_ids"] = 0
        batch = {name: np.full(shape, filler, dtype=np.int64) for name, filler in fillers.items()}
        for index, row in enumerate(rows):
            length = len(row["input_ids"])
            for name, values in batch.items():
                values[index, :length] = 1 if name == "attention_mask" else row[name]
        return {name: torch.from_numpy(values) for name, values in batch.items()}


class PaddingFreeCollator:
    """Put all rows or packs of a batch into a single row without padding.

    The model tells the documents apart by their positions.
    """

    def __call__(self, rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Tensor]:
        """Make one batch.

        Args:
            rows: `input_ids` and `labels`, both `[T]`, of each row, and `position_ids` of packs.

        Returns:
            `input_ids`, `labels` and `position_ids`, all `[1, T]` int64, T being the sum of the
            lengths. The positions start anew at 0 in every document.
        """
        return {name: torch.from_numpy(values)[None] for name, values in join_rows(rows).items()}
