"""What the CPU counts is what the model would find, and no device is waited for."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harmonic_sft.training.batches import (
    CountingCollator,
    head_inputs,
    take_out_repeated_,
)
from harmonic_sft.training.run import prepare
from harmonic_sft.training.run_config import load_run_config
from harmonic_sft.training.trainer import HarmonicTrainer

ROWS = [[-100, 3, 4, -100], [5, -100, -100, 6]]
BATCH = {
    "input_ids": torch.ones(2, 4, dtype=torch.int64),
    "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
    "labels": torch.tensor(ROWS),
}


def count(batch, *, causal=False, num_classes=10):
    collator = CountingCollator(
        collator=lambda rows: dict(batch), num_classes=num_classes, causal=causal
    )
    return collator([])


@pytest.mark.parametrize(("causal", "positions"), [(False, [1, 2, 4, 7]), (True, [1, 2, 7])])
def test_labels_and_tokens_are_counted(causal, positions):
    batch = count(BATCH, causal=causal)
    assert batch["label_positions"].tolist() == positions
    assert batch["num_tokens"] == 7
    without_padding = {key: BATCH[key] for key in ("input_ids", "labels")}
    assert count(without_padding)["num_tokens"] == 8


def test_a_label_that_is_no_class_is_refused():
    with pytest.raises(ValueError, match="labels: expected values from 0 to 5 or -100, got 3 to 6"):
        count(BATCH, num_classes=6)


class Waits(TorchDispatchMode):
    """Notes the operations that would wait for a GPU: values and shapes that depend on values."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = args[1] if name in ("index", "index_put", "_unsafe_index") else []
        if any(mask is not None and mask.dtype == torch.bool for mask in masks):
            self.seen.append(f"{name} by a mask")
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "plain labels"])
def test_a_micro_batch_waits_for_nothing(make_yaml, monkeypatch, counted):
    """But what transformers' body looks at by itself; plain labels are looked at."""
    body, whole = Waits(), Waits()
    training_step, track = HarmonicTrainer.training_step, HarmonicTrainer._track_num_input_tokens

    def counted_step(self, model, inputs, num_items_in_batch=None):
        if not counted:
            del inputs["label_positions"]
        with body:
            head_inputs(model, inputs)
        with whole:
            return training_step(self, model, inputs, num_items_in_batch)

    def counted_track(self, inputs):
        with whole:
            track(self, inputs)

    monkeypatch.setattr(HarmonicTrainer, "training_step", counted_step)
    monkeypatch.setattr(HarmonicTrainer, "_track_num_input_tokens", counted_track)
    trainer = prepare(load_run_config(make_yaml(training={"max_steps": 2}))).trainer
    trainer.train()
    assert (whole.seen == body.seen) == counted, whole.seen
    assert trainer.state.num_input_tokens_seen > 0


def test_numbers_that_fill_up_the_last_processes_have_no_weight():
    args = SimpleNamespace(
        dataloader_drop_last=False,
        per_device_train_batch_size=2,
        world_size=2,
        process_index=1,
        gradient_accumulation_steps=1,
    )
    collator = CountingCollator(collator=dict, num_classes=None, causal=False)
    for weights in ({}, {"label_weights": torch.full((2,), 3.0)}):
        rows = {"input_ids": torch.ones(2, 3), "labels": torch.ones(2, 4), **weights}
        batch = collator(rows)
        take_out_repeated_([batch], args, collator, num_rows=7, step=1)  # rows 6 and 0 again
        assert batch["num_tokens"] == 3
        assert batch["labels"].eq(-100).all(1).tolist() == [False, True]
        assert batch["label_weights"][0].eq(3.0 if weights else 1.0).all()
        assert batch["label_weights"][1].eq(0).all()


def batches_of(process, num_rows, *, processes=2, rows=2, accumulation=2, drop_last=False, step):
    """Return which rows of a step a process scores, and its tokens and labels, by batch."""
    args = SimpleNamespace(
        dataloader_drop_last=drop_last,
        per_device_train_batch_size=rows,
        world_size=processes,
        process_index=process,
        gradient_accumulation_steps=accumulation,
    )
    collator = CountingCollator(collator=dict, num_classes=10, causal=False)
    batches = [
        collator({"input_ids": torch.ones(rows, 3), "labels": torch.ones(rows, 3).long()})
        for _ in range(accumulation)
    ]
    take_out_repeated_(batches, args, collator, num_rows=num_rows, step=step)
    return [(b["labels"] != -100).any(1).tolist() for b in batches], [
        (b["num_tokens"], len(b["label_positions"])) for b in batches
    ]


def test_rows_that_fill_up_the_last_processes_are_not_scored():
    """11 rows: 8 in the first step of an epoch, and 2 + 1 in the second."""
    for step in (0, 2):
        for process in (0, 1):
            assert batches_of(process, 11, step=step)[0] == [[True, True]] * 2
    for step in range(4):  # one step an epoch, without such rows
        kept, counts = batches_of(1, 11, drop_last=True, step=step)
        assert kept == [[True, True]] * 2
        assert counts == [(6, 6)] * 2
    for step in (1, 3):
        kept, counts = batches_of(0, 11, step=step)
        assert kept == [[True, True], [False, False]]
        assert counts == [(6, 6), (0, 0)]
        kept, counts = batches_of(1, 11, step=step)
        assert kept == [[True, False], [False, False]]
        assert counts == [(3, 3), (0, 0)]
