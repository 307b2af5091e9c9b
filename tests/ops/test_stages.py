"""The stages of transport and mixtures against dense logits; distillation: tests/losses."""

import pytest
import torch

from harmonic_sft.models import DistanceLogits, build_head
from harmonic_sft.ops import chunked_loss
from tests.head_variants import VARIANTS, D, V
from tests.ops.baselines import transport
from tests.ops.fused import assert_same, make_chunks_small

MIXTURES = [name for name in VARIANTS if "multi_head" in name]
HEADS = [name for name in VARIANTS if name not in MIXTURES and not name.startswith("power")]
MIX = (0.7, 0.3)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    make_chunks_small(monkeypatch, 4)


def transport_loss(form, ground, labels):
    second = (ground, None, None)
    return chunked_loss(form, labels, stage="transport", second=second, mix=MIX).loss


def problem(name, dtype=torch.float64):
    torch.manual_seed(0)
    head = build_head(VARIANTS[name], hidden_size=D, vocab_size=V).to(dtype)
    states, labels = torch.randn(9, D, dtype=dtype), torch.randint(V, (9,))
    states[0] = head.prototypes[labels[0]].detach()  # at d = 0
    states[1] = head.prototypes[(labels[1] + 1) % V].detach() + 1e-3  # near another one
    return head, states.requires_grad_(), labels


def plain(head, states, labels, ground):
    nll = -head(states).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return MIX[0] * nll + MIX[1] * transport(head, states, labels, ground)


@pytest.mark.parametrize(
    ("name", "moving", "uniform"),
    [
        *((name, True, index % 2 == 0) for index, name in enumerate(HEADS)),
        *((name, False, True) for name in ("linear", "dist", "cosine")),
    ],
)
def test_losses_and_gradients_are_those_of_dense_logits(name, moving, uniform):
    head, states, labels = problem(name)
    upstream = None if uniform else torch.rand(9)
    ground = head.prototypes if moving else head.prototypes.detach()
    found = transport_loss(head.lazy_logits(states), ground, labels)
    expected = plain(head, states, labels, ground)
    assert_same(found, expected, [states, *head.parameters()], upstream)


@pytest.mark.parametrize("name", ["linear", "dist", "dist off the sphere"])
def test_float32_is_as_good_as_dense_logits(name):
    exact, double, labels = problem(name)
    head, _, _ = problem(name, torch.float32)
    states = double.detach().float().requires_grad_()
    expected = plain(exact, double, labels, exact.prototypes)
    found = transport_loss(head.lazy_logits(states), head.prototypes, labels)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    gradients = torch.autograd.grad(found.sum(), [states, head.weight])
    for mine, good in zip(
        gradients, torch.autograd.grad(expected.sum(), [double, exact.weight]), strict=True
    ):
        scale = good.abs().max().item()
        torch.testing.assert_close(mine.double(), good, rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("gap", [1e-5, 1e-2])
def test_more_near_pairs_than_there_is_room_for(gap):
    """The closest pairs are exact, the others are not below 0."""
    torch.manual_seed(0)
    weight = 4 * torch.randn(40, 40)  # whose mean does not dominate: no center is subtracted
    weight[10:30] = weight[10] + gap * torch.randn(20, 40)  # more than a tile hands over
    states, labels, found = weight[10:19].clone(), torch.arange(9), []
    for dtype in (torch.float32, torch.float64):
        points = weight.to(dtype)
        form = DistanceLogits(states.to(dtype), points, -2.0, unit_sphere=False, eps=1e-6)
        found.append(transport_loss(form, points, labels).double())
    assert found[0].isfinite().all()
    if gap > 1e-3:  # else rounding swallows what is not among the closest
        torch.testing.assert_close(*found, rtol=1e-4, atol=0)


def test_what_needs_no_gradient_gets_none():
    head, states, labels = problem("linear")
    head.bias.requires_grad_(False)
    form = head.lazy_logits(states.detach())
    ground = head.prototypes.detach().requires_grad_()
    transport_loss(form, ground, labels).sum().backward()
    assert head.bias.grad is None
    assert head.weight.grad.abs().sum() > 0
    assert ground.grad.abs().sum() > 0
    with torch.no_grad():
        assert not transport_loss(form, ground, labels).requires_grad


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_is_that_of_dense_logits(name, uniform):
    head, states, labels = problem(name)
    upstream = None if uniform else torch.rand(9)
    found = chunked_loss(head.lazy_logits(states), labels).loss
    assert_same(found, head.nll(states, labels), [states, *head.parameters()], upstream)
