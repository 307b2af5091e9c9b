"""Phases and exponent against their definitions."""

import pytest
import torch
from transformers import get_scheduler

from harmonic_sft.training.schedules import h_exp_at, phase_steps


@pytest.mark.parametrize("total", [1, 7, 10, 200, 10_000])
def test_phases_are_whole_steps_that_fill_the_run(total):
    if total == 1:
        with pytest.raises(ValueError, match="schedule: expected at most 1 steps of warmup and"):
            phase_steps(total, warmup_ratio=0.1, decay_ratio=0.2)
        return
    steps = phase_steps(total, warmup_ratio=0.1, decay_ratio=0.2)
    assert sum(steps) == total
    assert min(steps) >= 0
    assert abs(steps.warmup - 0.1 * total) <= 1
    assert abs(steps.decay - 0.2 * total) <= 1
    assert all(isinstance(count, int) for count in steps)


def test_a_ratio_of_zero_is_no_phase():
    assert phase_steps(10, warmup_ratio=0.0, decay_ratio=0.0) == (0, 10, 0)


def test_the_learning_rate_warms_up_stays_and_decays():
    """Our steps through transformers' schedule, against the shape written out."""
    total, peak = 100, 2e-4
    warmup, stable, decay = phase_steps(total, warmup_ratio=0.1, decay_ratio=0.2)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = get_scheduler(
        "warmup_stable_decay",
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=total,
        scheduler_specific_kwargs={"num_decay_steps": decay, "decay_type": "linear"},
    )
    rates = []
    for _ in range(total):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    expected = [peak * i / warmup for i in range(warmup)]
    expected += [peak] * stable
    expected += [peak * (1 - i / decay) for i in range(decay)]
    torch.testing.assert_close(torch.tensor(rates), torch.tensor(expected))


def test_the_exponent_is_linear_and_stateless():
    values = [h_exp_at(step, 8, start=-12.0, end=-4.0) for step in range(10)]
    assert values == [-12, -11, -10, -9, -8, -7, -6, -5, -4, -4]
