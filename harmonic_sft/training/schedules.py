"""The learning rate: warmup, stable and decay by shares of a run."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_wsd_schedule

from harmonic_sft.training.run_config import ScheduleConfig


def phase_steps(total: int, *, warmup_ratio: float, decay_ratio: float) -> tuple[int, int]:
    """Return how many steps of a run warm up and how many decay, rounded to whole steps.

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
    return warmup, decay


def phase_schedule(
    optimizer: Optimizer, schedule: ScheduleConfig, total: int, *, warmup_steps: int = 0
) -> LambdaLR:
    """Return the schedule of the learning rate, the ratios turned into whole steps.

    `warmup_steps` above 0 stand in place of their ratio; the decay then takes what is left at most.
    """
    warmup, decay = phase_steps(
        total, warmup_ratio=schedule.warmup_ratio, decay_ratio=schedule.decay_ratio
    )
    warmup = min(warmup_steps, total) or warmup
    return get_wsd_schedule(
        optimizer,
        num_warmup_steps=warmup,
        num_decay_steps=min(decay, total - warmup),
        num_training_steps=total,
        decay_type=schedule.decay,
    )
