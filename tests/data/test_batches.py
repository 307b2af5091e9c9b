import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from datasets import Dataset
from torch.utils.data import DataLoader

from harmonic_sft.data.masked_dataset import (
    EpochSampler,
    MaskedRows,
    PaddingCollator,
)
from harmonic_sft.data.masking import EVAL_EPOCH, IGNORE_INDEX, RowMasker

# Python 3.12 and later warn when a process with threads forks, as the workers' loader does.
pytestmark = pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")

NUM_ROWS = 24
COLLATOR = PaddingCollator(pad_token_id=0)


@pytest.fixture
def table():
    lengths = [20 + index % 7 for index in range(NUM_ROWS)]
    return Dataset.from_dict(
        {
            "input_ids": [
                [1, *range(5 + index, 5 + index + length), 2]
                for index, length in enumerate(lengths)
            ],
            "source": [0] * NUM_ROWS,
            "document": [index // 2 for index in range(NUM_ROWS)],
            "chunk": [index % 2 for index in range(NUM_ROWS)],
        }
    )


@pytest.fixture
def masker():
    special = np.zeros(100, dtype=bool)
    special[:5] = True
    return RowMasker(seed=3, probability=0.5, mask_token_id=4, special_tokens=special)


def shuffled_loader(rows, batch_size=2, num_workers=0, process=0, num_processes=1):
    """What the Trainer makes of a training set."""
    loader = DataLoader(
        rows,
        batch_size=batch_size,
        sampler=EpochSampler(rows, seed=3),
        collate_fn=COLLATOR,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )
    return prepare_data_loader(
        loader,
        num_processes=num_processes,
        process_index=process,
        put_on_device=False,
        use_seedable_sampler=True,
    )


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


def epochs(rows, num_epochs=2, **settings):
    loader = shuffled_loader(rows, **settings)
    result = []
    for epoch in range(num_epochs):
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


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_that_outlive_an_epoch_give_the_same_masks(expected, table, masker, num_workers):
    assert epochs(MaskedRows(table, masker), num_workers=num_workers) == expected


@pytest.mark.parametrize("batch_size", [1, 4, 24])
def test_batch_size_changes_no_mask(expected, table, masker, batch_size):
    assert epochs(MaskedRows(table, masker), batch_size=batch_size) == expected


def test_two_processes_share_the_rows_of_one(expected, table, masker):
    parts = [
        epochs(MaskedRows(table, masker), process=process, num_processes=2) for process in (0, 1)
    ]
    for epoch in range(2):
        together = [
            row
            for start in range(0, NUM_ROWS // 2, 2)
            for part in parts
            for row in part[epoch][start : start + 2]
        ]
        assert together == expected[epoch]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_run_resumed_in_mid_epoch_goes_on_with_the_same_rows(
    table, masker, num_workers, num_processes
):
    settings = {"num_processes": num_processes, "process": num_processes - 1}
    whole = epochs(MaskedRows(table, masker), **settings)[1]
    loader = shuffled_loader(MaskedRows(table, masker), num_workers=num_workers, **settings)
    resumed = skip_first_batches(loader, 3)
    resumed.set_epoch(1)
    assert examples(resumed) == whole[6:]


def test_evaluation_masks_stay_whatever_epoch_is_set(table, masker):
    rows = MaskedRows(table, masker, fixed_epoch=EVAL_EPOCH)
    loader = prepare_data_loader(
        DataLoader(rows, batch_size=4, collate_fn=COLLATOR), put_on_device=False
    )
    first, second = examples(loader), examples(loader)
    assert first == second
    assert rows.epoch == EVAL_EPOCH


@pytest.mark.parametrize(("multiple", "width"), [(None, 5), (1, 5), (4, 8), (5, 5)])
def test_collator_pads_on_the_right(multiple, width):
    rows = [
        {"input_ids": np.arange(1, 1 + length), "labels": np.arange(length)} for length in (3, 5)
    ]
    batch = PaddingCollator(pad_token_id=9, pad_to_multiple_of=multiple)(rows)
    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    for values in batch.values():
        assert values.shape == (2, width)
        assert values.dtype == torch.int64
    assert batch["input_ids"][0].tolist() == [1, 2, 3] + [9] * (width - 3)
    assert batch["attention_mask"].sum(1).tolist() == [3, 5]
    assert batch["labels"][0].tolist() == [0, 1, 2] + [IGNORE_INDEX] * (width - 3)
