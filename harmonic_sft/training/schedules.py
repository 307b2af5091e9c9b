"""Schedules as pure functions of the optimizer step: learning-rate phases and the exponent."""

from typing import NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_wsd_schedule

from harmonic_sft.training.run_config import ScheduleConfig


class PhaseSteps(NamedTuple):
    """Optimizer steps of the three phases of a warmup-stable-decay schedule."""

    warmup: int
    stable: int
    decay: int


def phase_steps(total: int, *, warmup_ratio: float, decay_ratio: float) -> PhaseSteps:
    """Split a run into warmup, stable and decay, rounded to whole steps.

    Args:
        total: Optimizer steps of the run.
        warmup_ratio: Share of them that warms up.
        decay_ratio: Share of them that decays; with `warmup_ratio` at most 1.

    Returns:
        At least one step of each phase whose ratio is above 0; a run of one step decays.
    """
    warmup = max(round(total * warmup_ratio), int(warmup_ratio > 0))
    decay = max(round(total * decay_ratio), int(decay_ratio > 0))
    if warmup + decay > total:  # both were rounded up: the longer phase gives way
        if warmup >= decay:
            warmup = total - decay
        else:
            decay = total - warmup
    return PhaseSteps(warmup, total - warmup - decay, decay)


def phase_schedule(
    optimizer: Optimizer, schedule: ScheduleConfig, total: int, *, warmup_steps: int | None = None
) -> LambdaLR:
    """Return the schedule of the learning rate, the ratios turned into whole steps.

    `warmup_steps` stand in place of their ratio; the decay then takes what is left at most.
    """
    steps = phase_steps(total, warmup_ratio=schedule.warmup_ratio, decay_ratio=schedule.decay_ratio)
    warmup = steps.warmup if warmup_steps is None else min(warmup_steps, total)
    return get_wsd_schedule(
        optimizer,
        num_warmup_steps=warmup,
        num_decay_steps=min(steps.decay, total - warmup),
        num_training_steps=total,
        decay_type=schedule.decay,
    )


def h_exp_at(step: int, total: int, *, start: float, end: float) -> float:
    """Return the exponent after `step` of `total` optimizer steps, linear from start to end."""
    return start + (end - start) * min(step / total, 1.0)
