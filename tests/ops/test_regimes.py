"""Accuracy in float32 where distances lose their digits, against float64."""

from functools import cache

import pytest
import torch

from harmonic_sft.ops import distance_cross_entropy, distance_cross_entropy_with_metrics
from harmonic_sft.ops.geometry import Geometry, GradientProducts
from tests.ops.baselines import harmonic_float64, harmonic_full_logits, regime
from tests.ops.fused import KINDS, with_metrics_of

REGIMES = [
    "random",
    "p 0.47",
    "p 0.998",
    "captured 3e-1",
    "captured 1.3e-1",
    "captured 1e-1",
    "captured 1e-2",
    "captured 1e-3",
    "mean 5",
    "mean 20",
    "both 1e-3",  # a shared mean five times what is about it, and a wrong prototype
    "sphere p 0.9996",
    "sphere captured 1e-1",
    "sphere mean 20",
]
EXPONENTS = [-0.5, -14.0, -28.0]
TOLERANCE = 3e-6  # of the median token's gradient, to h_exp -28


@cache
def setting(name, num_tokens=64):
    """Tensors of a regime, and whether they are compared on the sphere."""
    return regime(name, num_tokens, 1024)


def truth(name, h_exp, **size):
    """Loss `[N]` and its gradients for the hidden states in float64."""
    hidden_states, prototypes, labels, unit_sphere = setting(name, **size)
    return harmonic_float64(hidden_states, prototypes, labels, h_exp, unit_sphere)[:2]


def measured(name, h_exp, **size):
    hidden_states, prototypes, labels, unit_sphere = setting(name, **size)
    hidden_states = hidden_states.clone().requires_grad_()
    loss = distance_cross_entropy(
        hidden_states,
        prototypes.clone().requires_grad_(),
        labels,
        h_exp=h_exp,
        unit_sphere=unit_sphere,
        impl="chunked",
    )
    loss.sum().backward()
    return loss.detach(), hidden_states.grad


def row_errors(actual, expected):
    return (actual - expected).norm(dim=-1) / expected.norm(dim=-1)


@pytest.mark.parametrize("h_exp", EXPONENTS)
@pytest.mark.parametrize("name", REGIMES)
def test_gradients_keep_their_digits(name, h_exp):
    expected_loss, expected = truth(name, h_exp)
    loss, gradient = measured(name, h_exp)
    assert row_errors(gradient, expected).median() <= TOLERANCE
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize("name", REGIMES)
def test_errors_grow_no_faster_than_the_exponent(name):
    # Of 64 tokens eleven would be counted, whose median is another one with every torch.mm.
    expected_loss, expected = truth(name, -200.0, num_tokens=256)
    _, gradient = measured(name, -200.0, num_tokens=256)
    counted = expected_loss > 1e-30  # of the others, the gradient is below float32
    assert gradient.isfinite().all()
    if counted.any():
        errors = row_errors(gradient[counted], expected[counted])
        assert errors.median() <= TOLERANCE * 200 / 28


@pytest.mark.parametrize("name", REGIMES)
def test_the_steepest_exponents_give_finite_numbers(name):
    for h_exp in (-768.0, -767.5, -2000.0):
        loss, gradient = measured(name, h_exp)
        assert loss.isfinite().all()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("h_exp", [-160.0, -185.0, -200.5])
def test_coefficients_are_no_subnormal_numbers(monkeypatch, h_exp):
    """A CPU takes up to a hundred times as long for a product of such numbers."""
    seen, add = [], GradientProducts.add
    monkeypatch.setattr(
        GradientProducts,
        "add",
        lambda self, worker, tile, coefficients: (
            seen.append(coefficients.clone()) or add(self, worker, tile, coefficients)
        ),
    )
    measured("p 0.47", h_exp)
    found = torch.cat([coefficients.flatten() for coefficients in seen]).abs()
    assert not ((found > 0) & (found < torch.finfo(torch.float32).tiny)).any()
    assert (found > 0).any()


def test_full_logits_are_far_worse_near_a_wrong_prototype():
    hidden_states, prototypes, labels = setting("captured 1e-3")[:3]
    leaf = hidden_states.clone().requires_grad_()
    (harmonic_full_logits(leaf, prototypes, labels) * len(labels)).backward()
    _, expected = truth("captured 1e-3", -14.0)
    assert row_errors(leaf.grad, expected).median() > 1000 * TOLERANCE


def assert_as_in_float64(hidden_states, prototypes, labels, h_exp, tolerance, **settings):
    """Compare losses and gradients with the reference in float64."""
    found = []
    for impl, dtype in (("chunked", torch.float32), ("reference", torch.float64)):
        leaves = [
            tensor.detach().to(dtype).requires_grad_() for tensor in (hidden_states, prototypes)
        ]
        loss = distance_cross_entropy(*leaves, labels, h_exp=h_exp, impl=impl, **settings)
        found.append([loss, *torch.autograd.grad(loss.sum(), leaves)])
    for actual, expected in zip(*found, strict=True):
        scale = expected.abs().max().item()
        torch.testing.assert_close(
            actual.double(), expected, rtol=tolerance, atol=tolerance * scale
        )


@pytest.mark.parametrize("far", [1e3, 1e4])
def test_a_far_point_of_most_prototypes_spoils_no_others(far):
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.randn(1000, 64, generator=generator)
    prototypes[:700] = 0.01 * prototypes[:700] + far * torch.randn(64, generator=generator)
    labels = torch.arange(33) + 800
    hidden_states = prototypes[labels + 1] + 0.3 * torch.randn(33, 64, generator=generator)
    assert_as_in_float64(hidden_states, prototypes, labels, -12.0, 1e-5, unit_sphere=False)


@pytest.mark.parametrize("h_exp", [-12.0, -100.0])
def test_an_eps_above_all_distances_leaves_the_exponent_its_gradient(h_exp):
    generator = torch.Generator().manual_seed(0)
    vectors = 0.0125 * torch.randn(564, 64, generator=generator)
    labels = torch.randint(500, (64,), generator=generator)
    found = []
    for impl, dtype in (("chunked", torch.float32), ("reference", torch.float64)):
        exponent = torch.tensor(h_exp, dtype=dtype, requires_grad=True)
        states, prototypes = vectors.to(dtype).split([64, 500])
        loss = distance_cross_entropy(
            states, prototypes, labels, h_exp=exponent, eps=1.0, unit_sphere=False, impl=impl
        )
        found.append(torch.autograd.grad(loss.sum(), exponent)[0].item())
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_distances_that_a_norm_swallows_stay_finite():
    """The label's squared distance over a typical one is below all numbers of float32."""
    generator = torch.Generator().manual_seed(0)
    prototypes = 1e9 * torch.randn(40, 16, generator=generator)
    states = prototypes[:2].clone().requires_grad_()
    settings = {"h_exp": -1.0, "eps": 1e-30, "unit_sphere": False}
    loss = distance_cross_entropy(states, prototypes, torch.tensor([0, 5]), **settings)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert states.grad.isfinite().all()


@pytest.mark.parametrize("unit_sphere", [False, True])
def test_many_near_copies_of_one_prototype_stay_accurate(unit_sphere):
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.randn(600, 40, generator=generator)
    shifts = torch.randn(12, 40, generator=generator)
    prototypes[100:112] = prototypes[100] + 0.1 * shifts  # more than a tile hands over
    hidden_states = prototypes[100] + 0.05 * torch.randn(9, 40, generator=generator)
    labels = torch.tensor([100, 101, 105, 111, 5, 599, 99, 112, 110])
    inputs = (hidden_states, prototypes, labels)
    assert_as_in_float64(*inputs, -3.0, 1e-3, unit_sphere=unit_sphere)


@pytest.mark.parametrize("h_exp", [-0.5, -14.0, -14.5])
@pytest.mark.parametrize("unit_sphere", [False, True])
def test_many_near_copies_that_rounding_swallows_stay_finite(unit_sphere, h_exp):
    generator = torch.Generator().manual_seed(0)
    prototypes = 4 * torch.randn(40, 40, generator=generator)
    prototypes[10:30] = prototypes[10] + 1e-5 * torch.randn(20, 40, generator=generator)
    hidden_states = prototypes[10] + 1e-5 * torch.randn(9, 40, generator=generator)
    leaves = [hidden_states.requires_grad_(), prototypes.requires_grad_()]
    labels = torch.arange(9) + 8
    loss = distance_cross_entropy(*leaves, labels, h_exp=h_exp, unit_sphere=unit_sphere)
    loss.sum().backward()
    assert all(found.isfinite().all() for found in (loss, *(leaf.grad for leaf in leaves)))


@pytest.mark.parametrize("unit_sphere", [False, True])
def test_identical_prototypes_share_their_probability(unit_sphere):
    prototypes = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    prototypes[3] = prototypes[4]
    hidden_states = prototypes[[3, 3, 4, 1]] + 0.01
    labels = torch.tensor([3, 4, 3, 4])
    inputs = (hidden_states, prototypes, labels)
    assert_as_in_float64(*inputs, -14.0, 1e-4, unit_sphere=unit_sphere)
    loss, metrics = distance_cross_entropy_with_metrics(
        *inputs, h_exp=-14.0, unit_sphere=unit_sphere
    )
    assert loss[:3] == pytest.approx(0.6931472, rel=1e-5)
    assert metrics.entropy[:3] == pytest.approx(0.6931472, rel=1e-5)
    assert metrics.predictions.tolist()[3] == 1
    assert all(choice in (3, 4) for choice in metrics.predictions.tolist()[:3])


@pytest.mark.parametrize(("masked", "learned"), [((2,), False), ((2, 5, 512), True)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_of_minus_infinity_masks_a_class(kind, masked, learned):
    generator = torch.Generator().manual_seed(0)
    hidden_states = torch.randn(6, 5, generator=generator, dtype=torch.float64).requires_grad_()
    prototypes = torch.randn(513, 5, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        hidden_states[0] = prototypes[2] + 0.01  # near what is masked
    prototypes.requires_grad_()
    labels = torch.tensor([1, 3, 4, 6, 511, 100])
    bias = torch.zeros(513, dtype=torch.float64)
    bias[list(masked)] = -torch.inf
    bias.requires_grad_(learned)
    leaves = [hidden_states, prototypes, *([bias] if learned else [])]
    loss, metrics = with_metrics_of(kind, hidden_states, prototypes, labels, class_bias=bias)
    found = torch.autograd.grad(loss.sum(), leaves)

    kept = torch.tensor([index for index in range(513) if index not in masked])
    expected, expected_metrics = with_metrics_of(
        kind, hidden_states, prototypes[kept], torch.searchsorted(kept, labels)
    )
    for actual, wanted in zip(found, torch.autograd.grad(expected.sum(), leaves[:2]), strict=False):
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-9)
    assert all((gradient[list(masked)] == 0).all() for gradient in found[1:])
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(metrics[:3], expected_metrics[:3])
    torch.testing.assert_close(metrics.predictions, kept[expected_metrics.predictions])


@pytest.mark.parametrize("unit_sphere", [False, True])
def test_frozen_prototypes_that_change_give_another_loss(unit_sphere):
    prototypes = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    inputs = (prototypes[:3] + 0.5, prototypes, torch.tensor([0, 1, 5]))
    for _ in range(3):
        loss, expected = (
            distance_cross_entropy(*inputs, h_exp=-3.0, unit_sphere=unit_sphere, impl=impl)
            for impl in ("chunked", "reference")
        )
        torch.testing.assert_close(loss, expected)
        prototypes.data.mul_(1.5)  # which no version counter sees
        prototypes[5] *= 1.5


@pytest.mark.parametrize("kind", ["euclidean", "sphere"])
@pytest.mark.parametrize("shift", [0.0, 2.0, 9.0])
def test_without_a_look_a_mean_that_does_not_dominate_is_zero(kind, shift):
    """As on a GPU, in float32."""
    prototypes = torch.randn(300, 16, generator=torch.Generator().manual_seed(0)) + shift
    looked, asked = (
        Geometry(kind, prototypes, 1e-6, torch.float32, centered=one) for one in (None, True)
    )
    states = prototypes[:4] + 0.1
    assert (looked.center is not None) == (shift == 9)
    for one, other in zip(looked.direct(states), asked.direct(states), strict=True):
        assert one is other is None or torch.equal(one, other)
    assert torch.equal(looked.place(states), asked.place(states))
    assert torch.equal(looked.spread, asked.spread)
