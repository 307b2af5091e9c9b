"""The CPU counts what the model would find; out of memory a step is repeated in a cheaper way."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import BatchSampler

from harmonic_sft.data.batches import EpochSampler, MaskedRows
from harmonic_sft.data.masking import NextTokenLabels
from harmonic_sft.models import HarmonicForMaskedLM
from harmonic_sft.training.batches import (
    CountingCollator,
    MemoryFallback,
    examples_of_step,
    head_inputs,
    last_batch_rows,
)
from harmonic_sft.training.callbacks import StoppedError
from harmonic_sft.training.trainer import HarmonicTrainer
from tests.training.conftest import losses, prepared, trained

BATCH = {
    "input_ids": torch.ones(2, 4, dtype=torch.int64),
    "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
    "labels": torch.tensor([[-100, 3, 4, -100], [5, -100, -100, 6]]),
}


def count(batch, *, causal=False, num_classes=10):
    return CountingCollator(collator=dict, num_classes=num_classes, causal=causal)(batch)


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


class Copies(TorchFunctionMode):
    """Notes what copies to the host: on a CPU it is no operation."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in ("cpu", "numpy", "tolist"):
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "plain labels"])
def test_a_micro_batch_waits_for_nothing(make_yaml, monkeypatch, counted):
    """But what transformers' body looks at by itself; plain labels are looked at."""
    body, whole = Waits(), Waits()
    training_step, track = HarmonicTrainer.training_step, HarmonicTrainer._track_num_input_tokens

    def counted_step(self, model, inputs, num_items_in_batch=None):
        if not counted:
            del inputs["label_positions"]
        with body, Copies(body.seen):
            head_inputs(model, inputs)
        with whole, Copies(whole.seen):
            return training_step(self, model, inputs, num_items_in_batch)

    def counted_track(self, inputs):
        with whole:
            track(self, inputs)

    monkeypatch.setattr(HarmonicTrainer, "training_step", counted_step)
    monkeypatch.setattr(HarmonicTrainer, "_track_num_input_tokens", counted_track)
    trainer = prepared(make_yaml(training={"max_steps": 2}))
    trainer.train()
    assert (whole.seen == body.seen) == counted, whole.seen
    assert trainer.state.num_input_tokens_seen > 0


def last_batch(process, num_rows, *, num_classes, **columns):
    """A batch of 2 rows on each of 2 processes, of which only `num_rows` are no repetition."""
    collator = CountingCollator(collator=dict, num_classes=num_classes, causal=False)
    batch = collator({"input_ids": torch.ones(2, 3), **columns})
    collator.take_out_repeated_(batch, num_rows=num_rows, size=2, process=process)
    return batch


def test_numbers_that_fill_up_the_last_processes_have_no_weight():
    for weights in ({}, {"label_weights": torch.full((2,), 3.0)}):
        batch = last_batch(1, 3, num_classes=None, labels=torch.ones(2, 4), **weights)
        assert batch["num_tokens"] == 3
        assert batch["labels"].eq(-100).all(1).tolist() == [False, True]
        assert batch["label_weights"][0].eq(3.0 if weights else 1.0).all()
        assert batch["label_weights"][1].eq(0).all()


@pytest.mark.parametrize(
    ("num_rows", "scored"), [(1, [1, 0, 0, 0]), (2, [1, 1, 0, 0]), (3, [1, 1, 1, 0])]
)
def test_rows_that_fill_up_the_last_processes_are_not_scored(num_rows, scored):
    for process in (0, 1):
        batch = last_batch(process, num_rows, num_classes=10, labels=torch.ones(2, 3).long())
        own = scored[2 * process : 2 * process + 2]
        assert (batch["labels"] != -100).all(1).tolist() == [bool(one) for one in own]
        assert batch["num_tokens"] == len(batch["label_positions"]) == 3 * sum(own)


@pytest.mark.parametrize(
    ("num_rows", "drop_last", "expected"), [(11, False, 3), (12, False, 0), (11, True, 0)]
)
def test_rows_of_the_last_batch_of_all_processes_are_counted(num_rows, drop_last, expected):
    sizes = {"per_device_train_batch_size": 2, "world_size": 2}
    args = SimpleNamespace(dataloader_drop_last=drop_last, **sizes)
    sampler = BatchSampler(range(num_rows), 2, drop_last=drop_last)
    loader = SimpleNamespace(batch_sampler=BatchSamplerShard(sampler, 2, 0))
    assert last_batch_rows(loader, args) == expected
    assert last_batch_rows(SimpleNamespace(batch_sampler=sampler), args) == 0  # one process


def test_a_bad_step_names_no_row_that_an_epoch_leaves_out():
    names = {"source": [0] * 10, "document": list(range(10)), "chunk": [0] * 10}
    table = Dataset.from_dict({"input_ids": [[1]] * 10, **names})
    rows = MaskedRows(table, NextTokenLabels(seed=0, special_tokens=np.zeros(2, dtype=bool)))
    sizes = {"per_device_train_batch_size": 4, "world_size": 1, "gradient_accumulation_steps": 3}
    args = SimpleNamespace(seed=0, dataloader_drop_last=True, **sizes)
    read = list(EpochSampler(rows, seed=0))[:8]
    assert [named["row"] for named in examples_of_step(rows, args, step=1)] == read


def test_an_error_of_a_users_collator_names_the_columns_it_was_given():
    def collate(rows):
        raise ValueError("Unable to create tensor")

    collator = CountingCollator(collator=collate, num_classes=5, causal=False)
    with pytest.raises(ValueError, match="Unable to create tensor") as caught:
        collator([{"text": "a", "input_ids": [1]}])
    with pytest.raises(ValueError, match="Unable to create tensor"):
        collator({"text": "a"})  # a row alone
    assert "with the columns ['text', 'input_ids']. Take out" in caught.value.__notes__[0]


def with_memory_for(rows, *, checkpointing):
    """Pretend that the device runs out of memory above some batch size."""
    original = HarmonicTrainer.compute_loss

    def compute_loss(self, model, inputs, **kwargs):
        loss = original(self, model, inputs, **kwargs)
        if len(inputs["input_ids"]) > rows or checkpointing > self._memory.checkpoints_blocks:
            loss.backward()  # leaves its gradients behind, as a real failure may
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return loss

    return compute_loss


def test_out_of_memory_falls_back_at_the_same_effective_batch(make_yaml, monkeypatch, caplog):
    path = make_yaml(
        training={"gradient_accumulation_steps": 2, "learning_rate": 1e-3, "max_steps": 2}
    )
    expected = losses(trained(path))
    changes = ["checkpointing turned on", "4 at a time", "2 at a time", "1 at a time"]
    monkeypatch.setattr(HarmonicTrainer, "compute_loss", with_memory_for(1, checkpointing=True))
    assert losses(trained(path)) == pytest.approx(expected, rel=1e-5)
    said = [r.getMessage() for r in caplog.records if "Out of memory" in r.getMessage()]
    assert all(part in message for part, message in zip(changes, said, strict=True))


def test_out_of_memory_is_an_error_when_nothing_is_left_or_allowed(make_yaml, monkeypatch):
    monkeypatch.setattr(HarmonicTrainer, "compute_loss", with_memory_for(0, checkpointing=False))
    with pytest.raises(StoppedError, match="one row at a time with gradient checkpointing"):
        trained(make_yaml())
    with pytest.raises(torch.OutOfMemoryError):
        trained(make_yaml(), "oom_fallback=false")


def test_the_step_is_repeated_with_the_same_dropout(make_yaml, monkeypatch):
    """Memory runs out in the second micro-batch of a step, whose first is repeated too."""
    path = make_yaml(
        model={"dropout": 0.2},
        training={
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-3,
            "max_steps": 3,
        },
    )
    expected = trained(path)
    original, calls = HarmonicTrainer.compute_loss, []

    def compute_loss(self, model, inputs, **kwargs):
        loss = original(self, model, inputs, **kwargs)
        calls.append(len(inputs["input_ids"]))
        if len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return loss

    monkeypatch.setattr(HarmonicTrainer, "compute_loss", compute_loss)
    fallen = trained(path)
    assert len(calls) == 6 + 2
    assert losses(fallen) == pytest.approx(losses(expected), rel=1e-6)
    head, same = (run.model.dist_head.weight for run in (fallen, expected))
    torch.testing.assert_close(head, same, rtol=0, atol=1e-6)


def test_a_body_without_checkpointing_falls_back_to_smaller_batches(make_yaml, monkeypatch, caplog):
    def enable(model):
        raise ValueError("not compatible with gradient checkpointing")

    path = make_yaml(training={"max_steps": 1})
    expected = losses(trained(path))
    monkeypatch.setattr(HarmonicForMaskedLM, "gradient_checkpointing_enable", enable)
    monkeypatch.setattr(HarmonicTrainer, "compute_loss", with_memory_for(4, checkpointing=False))
    assert losses(trained(path)) == pytest.approx(expected, rel=1e-5)
    assert "4 at a time" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        # What other libraries than PyTorch's allocator say, an AcceleratorError of newer versions.
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_several_processes_stop_where_one_runs_out_of_memory(error):
    args = SimpleNamespace(gradient_checkpointing=False, oom_fallback=True, world_size=2)
    model = SimpleNamespace(gradient_checkpointing_enable=lambda: None, zero_grad=lambda: None)

    def backward(batch):
        raise error

    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.int64)}
    with pytest.raises(StoppedError, match="oom_fallback works on a single process only"):
        MemoryFallback(args, model).run(backward, batch, step=1, is_sum=True)
