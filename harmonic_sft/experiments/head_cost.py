"""What a head and its loss cost in a training step, next to a baseline in the same process."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from harmonic_sft.models import Head, LossFunction


class Arm(NamedTuple):
    """A head with its loss on one batch.

    Attributes:
        head: Its parameters get gradients.
        loss_fn: Prepared for the head.
        hidden_states: `[N, D]`, a leaf that gets a gradient, as from a block that trains.
        labels: `[N]`.
    """

    head: Head
    loss_fn: LossFunction
    hidden_states: Tensor
    labels: Tensor

    def step(self) -> None:
        """Forward, backward, prototypes back to norm 1; without backbone and optimizer."""
        self.loss_fn(self.head, self.hidden_states, self.labels).sum().backward()
        self.head.renormalize_()

    def clear(self) -> None:
        """Drop the gradients, as the trainer does between steps."""
        self.head.zero_grad()
        self.hidden_states.grad = None


class Cost(NamedTuple):
    """What one step takes.

    Attributes:
        seconds: Median over the rounds.
        time_ratio: Median over the rounds of the seconds, divided by the baseline's in that round.
        peak_bytes: Of tensors alive at once that the step made, gradients among them.
        memory_ratio: Of the baseline's.
    """

    seconds: float
    time_ratio: float
    peak_bytes: int
    memory_ratio: float


def measure_costs(arms: Mapping[str, Arm], *, baseline: str, rounds: int) -> dict[str, Cost]:
    """Let the arms take turns, in changing order, so that a busy machine slows all of them.

    Args:
        arms: By name.
        baseline: The name of the arm that the others are divided by.
        rounds: Measured steps of each arm, after one to warm up.
    """
    peaks = {name: peak_bytes(arm) for name, arm in arms.items()}  # warms up too
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for index in range(rounds):
        start = index % len(names)
        for name in names[start:] + names[:start]:
            seconds[name].append(_seconds(arms[name]))
    return {
        name: Cost(
            seconds=median(times),
            time_ratio=median(a / b for a, b in zip(times, seconds[baseline], strict=True)),
            peak_bytes=peaks[name],
            memory_ratio=peaks[name] / peaks[baseline],
        )
        for name, times in seconds.items()
    }


def peak_bytes(arm: Arm) -> int:
    """Return the peak of bytes that PyTorch's allocator holds for one step."""
    arm.clear()
    return allocated_peak(arm.step, arm.hidden_states.device)


def allocated_peak(step: Callable[[], None], device: torch.device | None = None) -> int:
    """Return the peak of bytes that PyTorch's allocator gets during a step, fused losses and all.

    On the CPU it is taken on one thread: the allocator reports only to the thread that profiles.

    Args:
        step: Called once.
        device: Where it works; None is the CPU.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler prints two lines per use
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
    finally:
        torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    live = peak = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak


def _seconds(arm: Arm) -> float:
    arm.clear()
    _wait(arm.hidden_states.device)
    start = time.perf_counter()
    arm.step()
    _wait(arm.hidden_states.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
