"""The scales of heads of cosines, and their constant against Bessel functions of mpmath."""

from fractions import Fraction

import mpmath
import pytest
import torch

from harmonic_sft.models import CosineHead, VonMisesFisherHead
from harmonic_sft.models.linear_heads import DEBYE, log_normalizer
from tests.head_definitions import log_bessel_ratio

D, V, N = 18, 30, 5


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
    head = CosineHead(D, V)
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
