"""Peaks against what a step must hold, and ratios against the baseline itself."""

import pytest
import torch

from experiments.cost import HeadStep, allocated_peak, measure
from harmonic_sft.losses import CrossEntropyLoss
from harmonic_sft.models import LinearHead, negative_log_likelihood

N, D, V = 64, 16, 3000
MATRIX = 4 * N * V  # bytes of one [N, V]


def head_step(loss_fn, rows=N):
    torch.manual_seed(0)
    states = torch.randn(rows, D, requires_grad=True)
    return HeadStep(LinearHead(D, V), loss_fn, states, torch.randint(V, (rows,)))


def squared_logits(head, hidden_states, labels):
    """Keeps the logits, and in the backward pass makes their gradient and its product."""
    return head(hidden_states).square().sum(-1)


def test_the_peak_counts_what_is_alive_at_once():
    weights = 4 * V * (D + 1)
    step = head_step(squared_logits)
    peak = allocated_peak(step)
    assert 3 * MATRIX <= peak <= 4 * MATRIX + 2 * weights
    assert allocated_peak(step) == peak  # no gradient is left of the first
    double = allocated_peak(head_step(squared_logits, rows=2 * N))
    assert double - peak == pytest.approx(peak - 2 * weights, rel=0.4)


def test_a_fused_loss_is_seen_to_work_inside_its_operator():
    """Its chunk is [N, V] here, although no such tensor leaves the operator."""
    plain = allocated_peak(head_step(negative_log_likelihood))
    assert MATRIX <= allocated_peak(head_step(CrossEntropyLoss())) < plain


def test_ratios_are_of_the_baseline_and_nothing_is_changed():
    threads = torch.get_num_threads()
    steps = {"base": head_step(CrossEntropyLoss()), "more": head_step(squared_logits, rows=8 * N)}
    weight = steps["base"].head.weight.detach().clone()
    costs = measure(steps, baseline="base", rounds=3)
    assert costs["base"]["time_ratio"] == costs["base"]["memory_ratio"] == 1
    peaks = costs["more"]["peak_bytes"] / costs["base"]["peak_bytes"]
    assert costs["more"]["memory_ratio"] == peaks
    assert costs["more"]["seconds"] > 0
    assert torch.get_num_threads() == threads
    assert torch.equal(steps["base"].head.weight, weight)
