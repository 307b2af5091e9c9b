import math
import time

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from harmonic_sft.data.masked_dataset import (
    EpochSampler,
    MaskedRows,
    PaddingCollator,
    PaddingFreeCollator,
)
from harmonic_sft.data.masking import IGNORE_INDEX, RowMasker
from harmonic_sft.data.packing import fill_rate, join_rows, pack

NUM_ROWS = 30
CAPACITY = 40


@pytest.fixture(scope="module")
def table():
    lengths = [3 + (7 * index) % 23 for index in range(NUM_ROWS)]
    return Dataset.from_dict(
        {
            "input_ids": [[1, *range(5 + row, 3 + row + n), 2] for row, n in enumerate(lengths)],
            "source": [0] * NUM_ROWS,
            "document": [row // 2 for row in range(NUM_ROWS)],
            "chunk": [row % 2 for row in range(NUM_ROWS)],
        }
    )


@pytest.fixture(scope="module")
def lengths(table):
    return np.array([len(row) for row in table["input_ids"]])


@pytest.fixture(scope="module")
def masker():
    special = np.zeros(100, dtype=bool)
    special[:5] = True
    return RowMasker(seed=3, probability=0.5, mask_token_id=4, special_tokens=special)


def plain_best_fit_decreasing(lengths, capacity):
    """Look at every pack for every row; packs with equal space were brought there in turn."""
    packs, spaces, since = [], [], []
    for step, row in enumerate(sorted(range(len(lengths)), key=lambda row: -lengths[row])):
        fitting = [number for number, space in enumerate(spaces) if space >= lengths[row]]
        if fitting:
            number = min(fitting, key=lambda number: (spaces[number], since[number]))
        else:
            number = len(packs)
            packs.append([])
            spaces.append(capacity)
            since.append(0)
        packs[number].append(row)
        spaces[number] -= lengths[row]
        since[number] = step
    return sorted(map(sorted, packs))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("largest", [4, 20, 50])
def test_packs_are_those_of_plain_best_fit_decreasing(seed, largest):
    lengths = np.random.default_rng(seed).integers(1, largest + 1, size=120)
    packs = pack(lengths, 50)
    assert [rows.tolist() for rows in packs] == plain_best_fit_decreasing(lengths.tolist(), 50)
    assert all(rows.dtype == np.int64 for rows in packs)
    assert sorted(np.concatenate(packs).tolist()) == list(range(120))
    assert max(lengths[rows].sum() for rows in packs) <= 50


def test_a_pack_by_hand():
    packs = pack(np.array([3, 7, 5, 2, 3, 10]), 10)
    # 10 | 7 | 5, then the first 3 beside 7, the second beside 5, and 2 beside 5 and 3.
    assert [rows.tolist() for rows in packs] == [[0, 1], [2, 3, 4], [5]]
    assert fill_rate(np.array([3, 7, 5, 2, 3, 10]), packs, 10) == 1.0
    assert fill_rate(np.array([3, 4]), pack(np.array([3, 4]), 10), 10) == pytest.approx(0.7)


def test_no_rows_make_no_packs():
    assert pack(np.array([], dtype=np.int64), 10) == []
    assert fill_rate(np.array([], dtype=np.int64), [], 10) == 0.0


@pytest.mark.parametrize("bad", [0, 11])
def test_a_row_that_fits_no_pack_is_refused(bad):
    message = rf"lengths: expected rows of 1 to 10 tokens.*got {bad} in row 1\. Cut the rows"
    with pytest.raises(ValueError, match=message):
        pack(np.array([5, bad, 5]), 10)


def test_many_rows_are_packed_tightly_and_soon():
    """A million take about a second; quadratic time would take hours."""
    draws = np.random.default_rng(0).lognormal(4.6, 0.7, size=200_000)
    lengths = np.clip(draws.astype(np.int64), 3, 1024)
    start = time.perf_counter()
    packs = pack(lengths, 1024)
    assert time.perf_counter() - start < 20
    assert len(packs) <= 1.002 * math.ceil(lengths.sum() / 1024)
    assert fill_rate(lengths, packs, 1024) == pytest.approx(lengths.sum() / len(packs) / 1024)


@pytest.mark.parametrize("epoch", [0, 3])
def test_packed_rows_keep_the_masks_they_have_alone(table, lengths, masker, epoch):
    plan = pack(lengths, CAPACITY)
    alone, packed = MaskedRows(table, masker), MaskedRows(table, masker, packs=plan)
    alone.set_epoch(epoch)
    packed.set_epoch(epoch)
    assert len(packed) == len(plan) < len(alone)
    for index, members in enumerate(plan):
        item, start = packed[index], 0
        assert list(item) == ["input_ids", "labels", "position_ids"]
        for member in members.tolist():
            place = slice(start, start + lengths[member])
            for name, values in alone[member].items():
                np.testing.assert_array_equal(item[name][place], values)
            assert item["position_ids"][place].tolist() == list(range(lengths[member]))
            start = place.stop
        assert {len(values) for values in item.values()} == {start}
        assert {values.dtype for values in item.values()} == {np.dtype(np.int64)}


def test_masks_of_packs_change_with_the_epoch(table, lengths, masker):
    rows = MaskedRows(table, masker, packs=pack(lengths, CAPACITY))
    first = rows[0]["labels"]
    rows.set_epoch(1)
    assert not np.array_equal(rows[0]["labels"], first)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_packs_are_shuffled_and_each_comes_once_in_an_epoch(table, lengths, masker, num_workers):
    rows = MaskedRows(table, masker, packs=pack(lengths, CAPACITY))
    loader = DataLoader(
        rows,
        batch_size=2,
        sampler=EpochSampler(rows, seed=1),
        collate_fn=PaddingFreeCollator(),
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )
    orders = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        expected = [rows[index] for index in EpochSampler(rows, seed=1)]
        seen = torch.cat([batch["input_ids"][0] for batch in loader])
        assert seen.tolist() == np.concatenate([row["input_ids"] for row in expected]).tolist()
        orders.append(list(EpochSampler(rows, seed=1)))
        assert sorted(orders[-1]) == list(range(len(rows)))
    assert orders[0] != orders[1]


def row(*ids, positions=None):
    values = {"input_ids": np.array(ids), "labels": np.array(ids) * 10}
    return values if positions is None else {**values, "position_ids": np.array(positions)}


PACKS = [row(5, 6, 7, positions=[0, 1, 0]), row(8, positions=[0]), row(9, 9, positions=[0, 1])]


def test_padded_packs_have_padding_outside_every_document():
    batch = PaddingCollator(pad_token_id=3, pad_to_multiple_of=4)(PACKS)
    assert list(batch) == ["input_ids", "attention_mask", "labels", "position_ids"]
    assert batch["input_ids"].tolist() == [[5, 6, 7, 3], [8, 3, 3, 3], [9, 9, 3, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]]
    assert batch["labels"][1].tolist() == [80] + [IGNORE_INDEX] * 3


def test_a_batch_without_padding_is_one_row():
    batch = PaddingFreeCollator()(PACKS)
    assert list(batch) == ["input_ids", "labels", "position_ids"]
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 9]]
    assert batch["labels"].tolist() == [[50, 60, 70, 80, 90, 90]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0, 0, 1]]
    assert {values.dtype for values in batch.values()} == {torch.int64}


def test_rows_that_are_not_packed_need_no_padding_either():
    batch = PaddingFreeCollator()([row(5, 6, 7), row(8, 9)])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9]]


def test_joined_rows_stay_as_they_were():
    rows = [row(5, 6), row(7)]
    join_rows(rows)
    assert list(rows[0]) == ["input_ids", "labels"]
