"""Out of memory: the step is repeated in a cheaper way, with the same result."""

from types import SimpleNamespace

import pytest
import torch

from harmonic_sft.models import HarmonicForMaskedLM
from harmonic_sft.training.callbacks import StoppedError
from harmonic_sft.training.memory_fallback import MemoryFallback
from harmonic_sft.training.trainer import HarmonicTrainer
from tests.training.conftest import losses, trained


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
