"""Phases and exponent against their definitions."""

import pytest
import torch
from transformers import get_scheduler

from harmonic_sft.training.schedules import h_exp_at, phase_steps


@pytest.mark.parametrize(("warmup", "decay"), [(0.1, 0.2), (0.0, 0.0), (0.5, 0.0), (0.3, 0.3)])
def test_phases_are_whole_steps_that_fill_the_run(warmup, decay):
    for total in (2, 7, 10, 200, 10_000):
        steps = phase_steps(total, warmup_ratio=warmup, decay_ratio=decay)
        assert sum(steps) == total
        assert min(steps) >= 0
        assert abs(steps.warmup - warmup * total) <= 1
        assert abs(steps.decay - decay * total) <= 1
        assert all(isinstance(count, int) for count in steps)


def test_ratios_that_add_up_to_one_fit_every_run():
    for total in range(1, 200):
        for twentieths in range(21):
            warmup, decay = twentieths / 20, 1 - twentieths / 20
            steps = phase_steps(total, warmup_ratio=warmup, decay_ratio=decay)
            assert sum(steps) == total
            assert min(steps) >= 0
            assert abs(steps.warmup - warmup * total) <= 1
            assert total == 1 or (steps.warmup > 0) == (warmup > 0)
            assert (steps.decay > 0) == (decay > 0)


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
