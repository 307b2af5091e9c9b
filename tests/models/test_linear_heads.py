"""Heads of dot products and cosines against plain loops, and Bessel functions of mpmath.

The linear one: test_heads.py.
"""

from fractions import Fraction

import mpmath
import pytest
import torch
from torch import Tensor

from harmonic_sft.losses import CrossEntropyLoss
from harmonic_sft.models import CosineHead, Head, VonMisesFisherHead, build_head
from harmonic_sft.models.linear_heads import DEBYE, log_normalizer

D, V, N = 18, 30, 5
HEADS = {
    "l2": {"name": "l2", "scale": 0.7},
    "l2_fixed": {"name": "l2", "scale": 0.7, "learn_scale": False},
    "spherical": {"name": "power", "power": 1.0},
    "harmax": {"name": "power", "power": -2.0, "eps": 1e-4},
    "cosine": {"name": "cosine", "scale": 7.0},
    "cosine_fixed": {"name": "cosine", "scale": 7.0, "learn_scale": False},
    "vmf": {"name": "vmf", "scale": 7.0},
    "vmf_per_class": {"name": "vmf", "scale": 7.0, "per_class": True},
}


def make(name: str) -> tuple[Head, Tensor, Tensor]:
    torch.manual_seed(0)
    head = build_head(HEADS[name], hidden_size=D, vocab_size=V)
    assert head.settings().items() >= HEADS[name].items()
    with torch.no_grad():
        head.weight.mul_(torch.rand(V, 1) + 0.5)  # cosines are of normalized ones
        if name == "vmf_per_class":
            head.log_scale.add_(torch.randn(V))
    return head, torch.randn(N, D), torch.randint(V, (N,))


def score(name: str, x: Tensor, w: Tensor, kappa: float) -> Tensor:
    """One logit, up to a constant for each row."""
    if name.startswith("l2"):
        return -0.7 * (x - w).square().sum()
    if name in ("spherical", "harmax"):
        power, eps = (1.0, 1e-6) if name == "spherical" else (-2.0, 1e-4)
        return power * torch.log((x @ w) ** 2 + eps)
    constant = float(log_bessel_ratio(kappa, D)) if name == "vmf_per_class" else 0.0
    return kappa * (x @ w) / (x.norm() * w.norm()) + constant


def log_bessel_ratio(kappa: float, size: int) -> mpmath.mpf:
    """Log of C_D(kappa) / C_D(0), whose surface is 2 pi ** (D / 2) / Gamma(D / 2)."""
    order = mpmath.mpf(size) / 2 - 1
    kappa = mpmath.mpf(kappa)
    constant = kappa**order / (2 * mpmath.pi) ** (order + 1) / mpmath.besseli(order, kappa)
    return mpmath.log(constant * 2 * mpmath.pi ** (order + 1) / mpmath.gamma(order + 1))


@pytest.mark.parametrize("name", HEADS)
def test_probabilities_equal_their_definition(name):
    head, states, labels = make(name)
    prototypes = head.weight.detach().double()
    kappas = torch.as_tensor(getattr(head, "scale", 0.0)).double().expand(V).tolist()
    rows = [
        torch.stack([score(name, x, w, k) for w, k in zip(prototypes, kappas, strict=True)])
        for x in states.double()
    ]
    expected = torch.stack(rows).log_softmax(-1)
    actual = head(states).log_softmax(-1)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    losses = -expected.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    fused = CrossEntropyLoss()(head, states, labels)
    torch.testing.assert_close(fused.double(), losses, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [16, 17, 64, 768])
def test_the_constant_equals_that_of_exact_bessel_functions(size):
    kappas = torch.logspace(-3, 4, 29, dtype=torch.float64)
    expected = [float(log_bessel_ratio(kappa, size)) for kappa in kappas.tolist()]
    expected = torch.tensor(expected, dtype=torch.float64)
    actual = log_normalizer(kappas, size)
    assert (actual - expected).abs().max() < 1e-6
    in_float32 = log_normalizer(kappas.float(), size)
    torch.testing.assert_close(in_float32.double(), expected, rtol=1e-5, atol=1e-5)
    assert log_normalizer(torch.zeros(1), size) == 0


@pytest.mark.parametrize("size", [16, 64, 768])
def test_the_gradient_of_the_constant_is_the_ratio_of_bessel_functions(size):
    kappas = torch.logspace(-2, 4, 13, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(log_normalizer(kappas, size).sum(), kappas)
    order = size / 2 - 1
    expected = [
        -float(mpmath.besseli(order + 1, kappa) / mpmath.besseli(order, kappa))
        for kappa in kappas.tolist()
    ]
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-8)


def test_the_polynomials_follow_their_recurrence():
    """u_{k+1} = t^2 (1 - t^2) u_k' / 2 + the integral of (1 - 5 s^2) u_k / 8: DLMF 10.41.9."""
    polynomial = {0: Fraction(1)}  # power of t: coefficient
    for power, (denominator, coefficients) in enumerate(DEBYE, start=1):
        following: dict[int, Fraction] = {}
        for n, c in polynomial.items():
            terms = {n + 1: c * n / 2 + c / 8 / (n + 1), n + 3: -c * n / 2 - 5 * c / 8 / (n + 3)}
            for key, value in terms.items():
                following[key] = following.get(key, Fraction(0)) + value
        polynomial = {key: value for key, value in following.items() if value}
        table = {power + 2 * i: Fraction(c, denominator) for i, c in enumerate(coefficients)}
        assert table == polynomial


def test_settings_have_the_scale_that_was_learned():
    head, _, _ = make("cosine")
    torch.nn.init.constant_(head.log_scale, 2.5)
    assert head.settings() == {"name": "cosine", "scale": 12.1825, "learn_scale": True}


@pytest.mark.parametrize("head_class", [CosineHead, VonMisesFisherHead])
def test_cosines_have_second_derivatives_and_work_under_torch_func(head_class):
    torch.manual_seed(0)
    head = head_class(D, V).double()
    states = torch.randn(N, D, dtype=torch.float64, requires_grad=True)
    if head_class is CosineHead:  # the Bessel functions of the other have one derivative
        assert torch.autograd.gradgradcheck(head, (states,))

    def total(rows):
        return head(rows).square().sum()

    (expected,) = torch.autograd.grad(total(states), states)
    torch.testing.assert_close(torch.func.grad(total)(states.detach()), expected)
    rows = torch.func.vmap(torch.func.grad(lambda row: total(row[None])))(states.detach())
    torch.testing.assert_close(rows, expected)
