import math

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from torch.utils.data import DataLoader

from harmonic_sft.data.batches import (
    EpochSampler,
    MaskedRows,
    PaddingCollator,
    collate_padding_free,
    fill_rate,
    pack,
)
from harmonic_sft.data.masking import EVAL_EPOCH, IGNORE_INDEX, RowMasker
from harmonic_sft.data.sections import MaskConfig

# Python 3.12 and later warn when a process with threads forks, as the workers' loader does.
pytestmark = pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")

NUM_ROWS = 24
CAPACITY = 60
COLLATOR = PaddingCollator(pad_token_id=0)


@pytest.fixture
def table():
    return Dataset.from_dict(
        {
            "input_ids": [[1, *range(5 + i, 25 + i + i % 7), 2] for i in range(NUM_ROWS)],
            "source": [0] * NUM_ROWS,
            "document": [i // 2 for i in range(NUM_ROWS)],
            "chunk": [i % 2 for i in range(NUM_ROWS)],
        }
    )


@pytest.fixture
def masker():
    config = MaskConfig(probability=0.5)
    return RowMasker(config=config, seed=3, mask_token_id=4, special_tokens=np.arange(100) < 5)


def examples(loader):
    """Every row as (masked ids, labels) without its padding, in order."""
    return [
        (tuple(input_ids[kept > 0].tolist()), tuple(labels[kept > 0].tolist()))
        for batch in loader
        for input_ids, kept, labels in zip(*batch.values(), strict=True)
    ]


def unmask(example):
    """The row as it was before masking, and its labels."""
    return tuple(
        old if label == IGNORE_INDEX else label for old, label in zip(*example, strict=True)
    ), example[1]


def epochs(rows, batch_size=2, num_workers=0):
    """Two epochs of what the Trainer makes of a training set."""
    sampler = EpochSampler(rows, seed=3)
    workers = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    loader = DataLoader(rows, batch_size, sampler=sampler, collate_fn=COLLATOR, **workers)
    loader = prepare_data_loader(loader, put_on_device=False, use_seedable_sampler=True)
    result = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        result.append(examples(loader))
    return result


@pytest.fixture
def expected(table, masker):
    return epochs(MaskedRows(table, masker))


def test_each_epoch_has_its_own_order_and_masks(expected, table):
    first, second = (dict(map(unmask, epoch)) for epoch in expected)
    assert set(first) == set(second) == set(map(tuple, table["input_ids"]))
    assert list(first) != list(second)
    assert all(first[row] != second[row] for row in first)


@pytest.mark.parametrize("settings", [{"num_workers": 2}, {"batch_size": 24}])
def test_workers_that_outlive_an_epoch_and_other_batches_change_no_mask(
    expected, table, masker, settings
):
    assert epochs(MaskedRows(table, masker), **settings) == expected


def test_rows_are_read_without_the_slow_formats_of_the_library(
    expected, table, masker, monkeypatch
):
    monkeypatch.delattr("datasets.formatting.NumpyFormatter.format_row")
    assert epochs(MaskedRows(table, masker)) == expected


def test_evaluation_masks_stay_whatever_epoch_is_set(table, masker):
    rows = MaskedRows(table, masker, fixed_epoch=EVAL_EPOCH)
    loader = prepare_data_loader(
        DataLoader(rows, batch_size=4, collate_fn=COLLATOR), put_on_device=False
    )
    first, second = examples(loader), examples(loader)
    assert first == second
    assert rows.epoch == EVAL_EPOCH


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


@pytest.mark.parametrize(("seed", "largest"), [(0, 4), (2, 50)])
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
    assert pack(np.array([], dtype=np.int64), 10) == []


def test_many_rows_are_packed_tightly():
    """In quadratic time these would take a quarter of an hour."""
    draws = np.random.default_rng(0).lognormal(4.6, 0.7, size=100_000)
    lengths = np.clip(draws.astype(np.int64), 3, 1024)
    packs = pack(lengths, 1024)
    assert len(packs) <= 1.002 * math.ceil(lengths.sum() / 1024)
    assert fill_rate(lengths, packs, 1024) == pytest.approx(lengths.sum() / len(packs) / 1024)


def test_packed_rows_keep_the_masks_they_have_alone(table, masker):
    lengths = np.array([len(row) for row in table["input_ids"]])
    plan = pack(lengths, CAPACITY)
    alone, packed = MaskedRows(table, masker), MaskedRows(table, masker, packs=plan)
    alone.set_epoch(3)
    packed.set_epoch(3)
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


def row(*ids, positions=None):
    values = {"input_ids": np.array(ids), "labels": np.array(ids) * 10}
    return values if positions is None else {**values, "position_ids": np.array(positions)}


PACKS = [row(5, 6, 7, positions=[0, 1, 0]), row(8, positions=[0]), row(9, 9, positions=[0, 1])]


@pytest.mark.parametrize(("multiple", "more"), [(None, 0), (4, 1)])
def test_padding_stands_on_the_right_outside_every_document(multiple, more):
    batch = PaddingCollator(pad_token_id=3, pad_to_multiple_of=multiple)(PACKS)
    expected = {
        "input_ids": ([[5, 6, 7], [8, 3, 3], [9, 9, 3]], 3),
        "attention_mask": ([[1, 1, 1], [1, 0, 0], [1, 1, 0]], 0),
        "labels": ([[50, 60, 70], [80, -100, -100], [90, 90, -100]], IGNORE_INDEX),
        "position_ids": ([[0, 1, 0], [0, 0, 0], [0, 1, 0]], 0),
    }
    assert list(batch) == list(expected)
    for name, (rows, filler) in expected.items():
        assert batch[name].tolist() == [row + [filler] * more for row in rows]
        assert batch[name].dtype == torch.int64


def test_a_batch_without_padding_is_one_row():
    batch = collate_padding_free(PACKS)
    assert list(batch) == ["input_ids", "labels", "position_ids"]
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 9]]
    assert batch["labels"].tolist() == [[50, 60, 70, 80, 90, 90]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0, 0, 1]]
    assert {values.dtype for values in batch.values()} == {torch.int64}


def test_classes_of_rows_are_a_column():
    rows = [{"input_ids": np.arange(2 + n), "labels": np.array(n)} for n in range(3)]
    batch = PaddingCollator(pad_token_id=9)(rows)
    assert batch["labels"].tolist() == [0, 1, 2]
    assert batch["input_ids"].tolist() == [[0, 1, 9, 9], [0, 1, 2, 9], [0, 1, 2, 3]]
