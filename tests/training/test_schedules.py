"""Phases and exponent against their definitions."""

import pytest
import torch
from transformers import TrainerState

from harmonic_sft.training.callbacks import HeadCallback
from harmonic_sft.training.run_config import HExpConfig, ScheduleConfig
from harmonic_sft.training.schedules import phase_schedule, phase_steps


@pytest.mark.parametrize("share", [1.0, 0.6, 0.0])
def test_phases_are_whole_steps_that_fill_the_run(share):
    """Also where both ratios add up to 1 and both would round up."""
    for total in (*range(1, 200), 10_000):
        for twentieths in range(21):
            warmup, decay = share * twentieths / 20, share * (1 - twentieths / 20)
            warming, decaying = phase_steps(total, warmup_ratio=warmup, decay_ratio=decay)
            assert min(warming, decaying, total - warming - decaying) >= 0
            assert abs(warming - warmup * total) <= 1
            assert abs(decaying - decay * total) <= 1
            assert total == 1 or (warming > 0) == (warmup > 0)
            assert (decaying > 0) == (decay > 0)


def test_the_exponent_is_linear_and_stateless():
    callback = HeadCallback(HExpConfig(start=-12.0, end=-4.0))
    values = [callback.h_exp_of(step, TrainerState(max_steps=8)) for step in range(10)]
    assert values == [-12, -11, -10, -9, -8, -7, -6, -5, -4, -4]


def test_a_warmup_that_leaves_less_than_the_decay_wins():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = phase_schedule(optimizer, ScheduleConfig(decay_ratio=0.2), 10, warmup_steps=9)
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([step / 9 for step in range(10)])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-6)
