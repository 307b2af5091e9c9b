"""Torch data sets of rows and packs, the order they are read in, and their batches."""

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import datasets
import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from harmonic_sft.data.keyed_random import permutation
from harmonic_sft.data.masking import IGNORE_INDEX, ClassLabels, RowLabels

Collator = Callable[[Sequence[Mapping[str, np.ndarray]]], dict[str, Tensor]]


class MaskedRows(torch.utils.data.Dataset):
    """Rows of a table, or packs of them, masked again in every epoch or labeled.

    Args:
        rows: Columns `input_ids`, `source`, `document` and `chunk`, and what else `masker` reads.
        masker: Makes `input_ids` and `labels` of a row and an epoch.
        packs: The row numbers of each pack; an item is then a pack instead of a row. Every row is
            masked by its own (source, document, chunk), so its masks are the same without packing.
        fixed_epoch: Mask every pass as this epoch, so that evaluations are comparable. The numbers
            that accelerate gives to passes over evaluation sets are then ignored.
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
        self._table = rows.with_format("arrow")  # reads one row five times as fast
        self.masker, self.packs, self.fixed_epoch = masker, packs, fixed_epoch
        self._epoch = torch.tensor(fixed_epoch or 0)
        if fixed_epoch is None:  # so that persistent workers see the next epoch's number
            self._epoch.share_memory_()

    @property
    def class_names(self) -> list[str] | None:
        """The classes of labeled rows, in the order of their numbers."""
        return list(self.masker.names) if isinstance(self.masker, ClassLabels) else None

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
        """Return `input_ids` and `labels`, both `[T]` int64, of a row or a joined pack."""
        if self.packs is None:
            return self._masked(index)
        return join_rows([self._masked(member) for member in self.packs[int(index)]])

    def _masked(self, index: int) -> dict[str, np.ndarray]:
        table = self._table[int(index)]
        values = {name: table[name][0] for name in table.column_names}
        row = {
            name: value.values.to_numpy(zero_copy_only=False)
            if isinstance(value, pa.ListScalar)
            else value.as_py()
            for name, value in values.items()
        }
        return self.masker(row, self.epoch)


class EpochSampler(torch.utils.data.Sampler[int]):
    """Shuffle the rows by (seed, epoch) alone, and keep order and masks at the same epoch.

    accelerate 1.15 hands the epoch to the sampler *or* to the data set
    (`DataLoaderShard.set_epoch`). The sampler passes it on, so either way both see it.
    """

    def __init__(self, rows: MaskedRows, *, seed: int) -> None:
        self.rows, self.seed = rows, seed

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
    """Pad rows or packs on the right, to the longest one or a multiple of `pad_to_multiple_of`."""

    pad_token_id: int
    pad_to_multiple_of: int | None = None

    def __call__(self, rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Tensor]:
        """Make one batch.

        Args:
            rows: Each with `input_ids` `[T]` and `labels`, `[T]` or one class `[]`; packs also with
                `position_ids` `[T]`. `label_weights`, if there are any, have the shape of `labels`.

        Returns:
            `input_ids`, `attention_mask`, `labels` and for packs `position_ids`, all `[B, T]`
            int64, and the float32 `label_weights`. With one class per row, `labels` and
            `label_weights` are `[B]`. Padding has position 0: each such token is a document.
        """
        fillers = {"input_ids": self.pad_token_id, "attention_mask": 0}
        fillers |= {"labels": IGNORE_INDEX, "position_ids": 0, "label_weights": 0}
        # A user's own rows may hold tensors or lists, and an attention mask.
        arrays = ({name: np.asarray(row[name]) for name in fillers if name in row} for row in rows)
        rows = [{"attention_mask": np.ones_like(row["input_ids"]), **row} for row in arrays]
        longest = max(len(row["input_ids"]) for row in rows)
        more = -longest % (self.pad_to_multiple_of or 1)
        batch = {}
        for name in [name for name in fillers if name in rows[0]]:
            columns = [torch.from_numpy(row[name]) for row in rows]
            if columns[0].ndim == 0:  # one value per row
                batch[name] = torch.stack(columns)  # [B]
                continue
            padded = pad_sequence(columns, batch_first=True, padding_value=fillers[name])
            batch[name] = F.pad(padded, (0, more), value=fillers[name])  # [B, T]
        return batch


def collate_padding_free(rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Tensor]:
    """Put all rows or packs of a batch into a single row without padding, `[1, T]`.

    The model tells the documents apart by their positions, see `join_rows`.
    """
    return {name: torch.from_numpy(values)[None] for name, values in join_rows(rows).items()}


def join_rows(rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Make one row of several, with `position_ids` `[T]` that start again at 0 in each.

    Rows that have positions already, as packs do, keep them.
    """
    joined = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    if "position_ids" not in joined:
        positions = [np.arange(len(row["input_ids"]), dtype=np.int64) for row in rows]
        joined["position_ids"] = np.concatenate(positions)
    return joined


def pack(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Put rows into packs by best-fit decreasing, every row whole and in one pack.

    Rows are placed from the longest to the shortest, each where it leaves the least space. Ties
    go to the first row, and to the pack that was first to become so full.

    Args:
        lengths: `[R]`, tokens of every row, integers from 1 to `capacity`.
        capacity: Most tokens of a pack.

    Returns:
        The rows' numbers in each pack, int64 and ascending. Packs are sorted by their first row, so
        that neighboring rows stay near each other and lengths are mixed.

    Source:
        Ding et al. 2024, Fewer Truncations Improve Language Modeling, arXiv:2404.10830. There rows
        that are too long for a pack are cut first; here they are refused.
    """
    assert ((lengths >= 1) & (lengths <= capacity)).all(), "a row is empty or longer than a pack"
    packs: list[list[int]] = []
    by_space: defaultdict[int, deque[int]] = defaultdict(deque)
    spaces: list[int] = []  # sorted; the keys of `by_space` that hold a pack
    order = np.argsort(-lengths, kind="stable")
    for row, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        place = bisect_left(spaces, length)
        if place < len(spaces):
            space = spaces[place]
            number = by_space[space].popleft()
            packs[number].append(row)
            if not by_space[space]:
                del spaces[place]
        else:
            space, number = capacity, len(packs)
            packs.append([row])
        left = space - length
        if left:
            if not by_space[left]:
                insort(spaces, left)
            by_space[left].append(number)
    return sorted((np.sort(np.array(rows, dtype=np.int64)) for rows in packs), key=lambda p: p[0])


def fill_rate(lengths: np.ndarray, packs: Sequence[np.ndarray], capacity: int) -> float:
    """Return the share of the packs' capacity that tokens fill, from 0 to 1."""
    return float(lengths.sum()) / (len(packs) * capacity)
