"""Time and memory of steps that take turns in one process, next to a baseline among them."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from harmonic_sft.models import Head, LossFunction

Step = Callable[[], object]


class HeadStep(NamedTuple):
    """Forward and backward of a head with its loss, without backbone and optimizer.

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

    def __call__(self) -> None:
        """Take the step, put the prototypes back to norm 1, and drop the gradients."""
        self.loss_fn(self.head, self.hidden_states, self.labels).sum().backward()
        self.head.renormalize_()
        self.head.zero_grad()
        self.hidden_states.grad = None


def measure(
    steps: Mapping[str, Step], *, baseline: str, rounds: int, device: torch.device | None = None
) -> dict[str, dict[str, Any]]:
    """Let steps take turns, in changing order, so that a busy machine slows all of them.

    Without a GPU the time is the process's own, of all threads: on a busy machine a step of 2 ms
    may wait ten times as long for its turn.

    Args:
        steps: By name.
        baseline: The name of the one that the others are divided by.
        rounds: Measured calls of each, after one that warms up.
        device: Where they work; None is the CPU.

    Returns:
        By name: `seconds`, their median; `time_ratio`, the median of the ratios to the baseline in
        the same round; `peak_bytes` (see `allocated_peak`) and `memory_ratio`.
    """
    peaks = {name: allocated_peak(step, device) for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    clock = time.perf_counter if _is_gpu(device) else time.process_time
    names = list(steps)
    for index in range(rounds):
        start = index % len(names)
        for name in names[start:] + names[:start]:
            _wait(device)
            began = clock()
            steps[name]()
            _wait(device)
            seconds[name].append(clock() - began)
    return {
        name: {
            "seconds": median(times),
            "time_ratio": median(a / b for a, b in zip(times, seconds[baseline], strict=True)),
            "peak_bytes": peaks[name],
            "memory_ratio": peaks[name] / peaks[baseline],
        }
        for name, times in seconds.items()
    }


def allocated_peak(step: Step, device: torch.device | None = None) -> int:
    """Return the peak of bytes that PyTorch's allocator gets during a step, fused losses and all.

    On the CPU it is taken on one thread: the allocator reports only to the thread that profiles.

    Args:
        step: Called once.
        device: Where it works; None is the CPU.
    """
    if _is_gpu(device):
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler prints two lines per use
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # There is one cycle; torch 2.11 would warn that there may be more.
        with profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profiler:
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


def _wait(device: torch.device | None) -> None:
    if _is_gpu(device):
        torch.cuda.synchronize(device)


def _is_gpu(device: torch.device | None) -> bool:
    return device is not None and device.type == "cuda"
