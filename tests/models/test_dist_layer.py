"""Dist heads of other metrics against plain loops in float64; the Euclidean one: test_heads.py."""

import math

import pytest
import torch
from torch import Tensor

from harmonic_sft.models import DistLayer

D, V, N = 16, 30, 5
EPS = 1e-6
METRICS = {
    "diagonal": {"metric": "mahalanobis"},
    "low_rank": {"metric": "mahalanobis", "rank": 3},
}
metrics = pytest.mark.parametrize("metric", METRICS)


def distance(head: DistLayer, x: Tensor, w: Tensor) -> Tensor:
    """One distance, as the papers write it."""
    if head.unit_sphere:
        x, w = x / x.norm(), w / w.norm()
    matrix = torch.diag(head.diagonal.detach().double() ** 2)
    if head.factor is not None:
        factor = head.factor.detach().double()
        matrix = matrix + factor @ factor.T
    return ((x - w) @ matrix @ (x - w)).sqrt()


@metrics
@pytest.mark.parametrize("unit_sphere", [True, False])
def test_probabilities_are_powers_of_squared_distances(metric, unit_sphere):
    torch.manual_seed(0)
    head = DistLayer(D, V, h_exp=-3.0, unit_sphere=unit_sphere, **METRICS[metric])
    torch.nn.init.uniform_(head.diagonal, 0.5, 1.5)
    states, labels = torch.randn(N, D), torch.randint(V, (N,))
    rows = [
        [(distance(head, x, w) ** 2 + EPS) ** head.h_exp for w in head.weight.detach().double()]
        for x in states.double()
    ]
    expected = torch.tensor(rows, dtype=torch.float64)
    expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(head(states).softmax(-1).double(), expected, rtol=1e-4, atol=1e-9)
    losses = -expected.gather(-1, labels.unsqueeze(-1)).squeeze(-1).log()
    torch.testing.assert_close(head.nll(states, labels).double(), losses, rtol=1e-4, atol=1e-6)


def test_a_fresh_mahalanobis_head_of_a_diagonal_is_the_euclidean_one():
    torch.manual_seed(1)
    head = DistLayer(D, V, metric="mahalanobis")
    euclidean = DistLayer(D, V)
    euclidean.load_state_dict({"weight": head.weight})
    states = torch.randn(N, D)
    torch.testing.assert_close(head(states), euclidean(states), rtol=1e-4, atol=1e-5)
    low_rank = DistLayer(D, V, metric="mahalanobis", rank=2)
    assert 0 < low_rank.factor.norm() < 1


@metrics
def test_logits_are_proportional_to_a_learned_exponent(metric):
    head = DistLayer(D, V, h_exp=-2.0, learn_h_exp=True, **METRICS[metric])
    states = torch.randn(N, D)
    logits = head(states)
    head.h_exp = -6.0
    torch.testing.assert_close(head(states), 3 * logits, rtol=1e-5, atol=1e-5)
    head(states).square().sum().backward()
    assert math.isfinite(head.log_steepness.grad.item())
    assert head.log_steepness.grad != 0
