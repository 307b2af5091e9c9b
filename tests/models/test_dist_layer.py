"""Dist heads of the Mahalanobis metric; the Euclidean one: test_heads.py."""

import math

import pytest
import torch

from harmonic_sft.models import DistLayer

D, V, N = 16, 30, 5


def test_a_fresh_mahalanobis_head_of_a_diagonal_is_the_euclidean_one():
    torch.manual_seed(1)
    head = DistLayer(D, V, metric="mahalanobis")
    euclidean = DistLayer(D, V)
    euclidean.load_state_dict({"weight": head.weight})
    states = torch.randn(N, D)
    torch.testing.assert_close(head(states), euclidean(states), rtol=1e-4, atol=1e-5)
    low_rank = DistLayer(D, V, metric="mahalanobis", rank=2)
    assert 0 < low_rank.factor.norm() < 1


@pytest.mark.parametrize("rank", [0, 3])
def test_logits_are_proportional_to_a_learned_exponent(rank):
    head = DistLayer(D, V, h_exp=-2.0, learn_h_exp=True, metric="mahalanobis", rank=rank)
    states = torch.randn(N, D)
    logits = head(states)
    head.h_exp = -6.0
    torch.testing.assert_close(head(states), 3 * logits, rtol=1e-5, atol=1e-5)
    head(states).square().sum().backward()
    assert math.isfinite(head.log_steepness.grad.item())
    assert head.log_steepness.grad != 0
