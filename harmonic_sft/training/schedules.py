"""Schedules as pure functions of the optimizer step: learning-rate phases and the exponent."""

from typing import NamedTuple


class PhaseSteps(NamedTuple):
    """Optimizer steps of the three phases of a warmup-stable-decay schedule."""

    warmup: int
    stable: int
    decay: int


def phase_steps(total: int, *, warmup_ratio: float, decay_ratio: float) -> PhaseSteps:
    """Split a run into warmup, stable and decay, rounded to whole steps.

    Args:
        total: Optimizer steps of the run.
        warmup_ratio: Share of them that warms up; at least one step if above 0.
        decay_ratio: Share of them that decays; at least one step if above 0.

    Raises:
        ValueError: The phases do not fit into the run.
    """
    warmup = max(round(total * warmup_ratio), int(warmup_ratio > 0))
    decay = max(round(total * decay_ratio), int(decay_ratio > 0))
    if warmup + decay > total:
        raise ValueError(
            f"schedule: expected at most {total} steps of warmup and decay, "
            f"got {warmup} + {decay}. Lower warmup_ratio or decay_ratio, or train longer"
        )
    return PhaseSteps(warmup, total - warmup - decay, decay)


def h_exp_at(step: int, total: int, *, start: float, end: float) -> float:
    """Return the exponent after `step` of `total` optimizer steps, linear from start to end."""
    return start + (end - start) * min(step / total, 1.0)
