"""Peaks against what a step must hold, and ratios against the baseline itself."""

import pytest
import torch

from harmonic_sft.experiments.head_cost import Arm, measure_costs, peak_bytes
from harmonic_sft.losses import CrossEntropyLoss
from harmonic_sft.models import LinearHead, negative_log_likelihood

N, D, V = 64, 16, 3000
MATRIX = 4 * N * V  # bytes of one [N, V]


def arm(loss_fn, rows=N):
    torch.manual_seed(0)
    states = torch.randn(rows, D, requires_grad=True)
    return Arm(LinearHead(D, V), loss_fn, states, torch.randint(V, (rows,)))


def squared_logits(head, hidden_states, labels):
    """Keeps the logits, and in the backward pass makes their gradient and its product."""
    return head(hidden_states).square().sum(-1)


def test_the_peak_counts_what_is_alive_at_once():
    weights = 4 * V * (D + 1)
    peak = peak_bytes(arm(squared_logits))
    assert 3 * MATRIX <= peak <= 4 * MATRIX + 2 * weights
    double = peak_bytes(arm(squared_logits, rows=2 * N))
    assert double - peak == pytest.approx(peak - 2 * weights, rel=0.4)
    measured = arm(squared_logits)
    assert peak_bytes(measured) == peak_bytes(measured)  # old gradients do not count


def test_a_fused_loss_is_seen_to_work_inside_its_operator():
    """Its chunk is [N, V] here, although no such tensor leaves the operator."""
    assert MATRIX <= peak_bytes(arm(CrossEntropyLoss())) < peak_bytes(arm(negative_log_likelihood))


def test_ratios_are_of_the_baseline():
    arms = {"base": arm(CrossEntropyLoss()), "twice": arm(squared_logits, rows=8 * N)}
    costs = measure_costs(arms, baseline="base", rounds=3)
    assert costs["base"].time_ratio == costs["base"].memory_ratio == 1
    assert costs["twice"].memory_ratio == costs["twice"].peak_bytes / costs["base"].peak_bytes
    assert costs["twice"].seconds > 0


def test_steps_leave_the_threads_and_the_weights_as_they_were():
    threads = torch.get_num_threads()
    one = arm(CrossEntropyLoss())
    weight = one.head.weight.detach().clone()
    measure_costs({"one": one}, baseline="one", rounds=1)
    assert torch.get_num_threads() == threads
    assert torch.equal(one.head.weight, weight)
