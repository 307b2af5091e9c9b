"""Heads of dot products against plain loops in float64; the linear one: test_heads.py."""

import pytest
import torch
from torch import Tensor

from harmonic_sft.losses import CrossEntropyLoss
from harmonic_sft.models import Head, L2Head, PowerHead, build_head

D, V, N = 12, 30, 5
HEADS = {
    "l2": {"name": "l2", "scale": 0.7},
    "l2_fixed": {"name": "l2", "scale": 0.7, "learn_scale": False},
    "spherical": {"name": "power", "power": 1.0},
    "harmax": {"name": "power", "power": -2.0, "eps": 1e-4},
}
heads = pytest.mark.parametrize("name", HEADS)


def make(name: str, num_classes: int = V) -> tuple[Head, Tensor, Tensor]:
    torch.manual_seed(0)
    head = build_head(HEADS[name], hidden_size=D, vocab_size=num_classes)
    return head, torch.randn(N, D), torch.randint(num_classes, (N,))


def weight_of(name: str, x: Tensor, w: Tensor) -> Tensor:
    """One probability before it is normalized."""
    if name.startswith("l2"):
        return torch.exp(-0.7 * (x - w).square().sum())
    power, eps = (1.0, 1e-6) if name == "spherical" else (-2.0, 1e-4)
    return ((x @ w) ** 2 + eps) ** power


@heads
def test_probabilities_equal_their_definition(name):
    head, states, labels = make(name)
    prototypes = head.weight.detach().double()
    rows = [[weight_of(name, x, w) for w in prototypes] for x in states.double()]
    expected = torch.tensor(rows, dtype=torch.float64)
    expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(head(states).softmax(-1).double(), expected, rtol=1e-4, atol=1e-9)
    losses = -expected.gather(-1, labels.unsqueeze(-1)).squeeze(-1).log()
    actual = CrossEntropyLoss()(head, states, labels)
    torch.testing.assert_close(actual.double(), losses, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("power", [1.0, -2.0])
def test_the_sign_of_the_dot_product_is_lost(power):
    head = PowerHead(D, V, power=power)
    states = torch.randn(N, D)
    torch.testing.assert_close(head(-states), head(states), rtol=0, atol=0)


def test_below_zero_the_most_orthogonal_class_wins():
    head = PowerHead(D, D, power=-1.0)
    with torch.no_grad():
        head.weight.copy_(torch.eye(D))
    states = torch.ones(1, D)
    states[0, 4] = 0
    assert head(states).argmax() == 4


def test_bad_settings_are_refused():
    for power in (0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"power: expected a number other than 0, got {power}"):
            PowerHead(D, V, power=power)
    for eps in (0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"eps: expected a number above 0, got {eps}"):
            PowerHead(D, V, eps=eps)
    with pytest.raises(ValueError, match="scale: expected a number above 0, got -1"):
        L2Head(D, V, scale=-1.0)
