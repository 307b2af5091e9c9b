"""The Euclidean distance head against its definition in float64."""

import pytest
import torch
import torch.nn.functional as F

from harmonic_sft.models import DistLayer
from harmonic_sft.models import head as head_module
from tests.ops.baselines import harmonic_float64

D, V, N = 24, 50, 6


def relative(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


def make(unit_sphere, h_exp=-12.0, size=(N, D, V)):
    torch.manual_seed(0)
    num, dim, vocab = size
    head = DistLayer(dim, vocab, h_exp=h_exp, unit_sphere=unit_sphere)
    hidden_states = torch.randn(num, dim)
    if not unit_sphere:
        with torch.no_grad():
            head.weight.mul_(3.0)
    return head, hidden_states, torch.randint(vocab, (num,))


@pytest.mark.parametrize("unit_sphere", [True, False])
@pytest.mark.parametrize("h_exp", [-12.0, -7.3, -4.0, -28.0])
def test_harmonic_loss_equals_its_definition(unit_sphere, h_exp):
    head, hidden_states, labels = make(unit_sphere, h_exp)
    expected = harmonic_float64(hidden_states, head.weight, labels, h_exp, unit_sphere)[0]
    torch.testing.assert_close(
        head.nll(hidden_states, labels).double(), expected, rtol=1e-4, atol=1e-7
    )
    logits = head(hidden_states)
    assert logits.shape == (N, V)
    torch.testing.assert_close(
        F.cross_entropy(logits.double(), labels, reduction="none"), expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("unit_sphere", "distance", "near_label"),
    [
        (True, 0.3, True),
        (False, 0.3, False),
        (True, 1e-2, False),
        (False, 1e-2, True),
        (True, 1e-3, True),
        (False, 1e-3, False),
    ],
)
def test_loss_and_gradients_hold_next_to_a_prototype(unit_sphere, distance, near_label):
    """Within `distance` of a norm of the right prototype, or of a wrong one."""
    head, hidden_states, labels = make(unit_sphere, size=(8, 768, 500))
    near = labels if near_label else (labels + 1) % 500
    anchors = head.weight.detach()[near]
    offsets = F.normalize(torch.randn_like(anchors), dim=-1) * anchors.norm(dim=-1, keepdim=True)
    hidden_states = (anchors + distance * offsets).requires_grad_()
    loss = head.nll(hidden_states, labels)
    loss.sum().backward()
    expected, *gradients = harmonic_float64(hidden_states, head.weight, labels, -12.0, unit_sphere)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-7)
    if gradients[0].abs().max() > 1e-7:
        assert relative(hidden_states.grad, gradients[0]) < 1e-3
        assert relative(head.weight.grad, gradients[1]) < 1e-3


def test_a_confident_loss_keeps_its_digits():
    """Expanded distances return 0 here; the definition does not."""
    head, _, labels = make(False, size=(8, 768, 500))
    hidden_states = head.weight.detach()[labels] * 1.5
    expected = harmonic_float64(hidden_states, head.weight, labels, -12.0, False)[0]
    assert (expected > 0).all()
    loss = head.nll(hidden_states, labels).double()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)


def test_many_near_pairs_stay_finite(monkeypatch):
    """More than the limit: most prototypes are one, and all hidden states are beside it."""
    seen, near_pairs = [], head_module.near_pairs
    monkeypatch.setattr(
        head_module, "near_pairs", lambda *a: seen.append(near_pairs(*a)) or seen[-1]
    )
    torch.manual_seed(0)
    head = DistLayer(96, V, unit_sphere=False)
    with torch.no_grad():
        head.weight.normal_(std=4.0)
        head.weight[10:40] = head.weight[10] + 1e-5 * torch.randn(30, 96)
    states = (head.weight.detach()[10] + 1e-5 * torch.randn(300, 96)).requires_grad_()
    loss = head.nll(states, torch.randint(V, (300,)))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert states.grad.isfinite().all()
    rows, _, are_all = seen[0]
    assert (len(rows), are_all) == (8 * 300, False)


def test_a_fresh_mahalanobis_head_of_a_diagonal_is_the_euclidean_one():
    torch.manual_seed(1)
    head = DistLayer(D, V, metric="mahalanobis")
    euclidean = DistLayer(D, V)
    euclidean.load_state_dict({"weight": head.weight})
    states = torch.randn(N, D)
    torch.testing.assert_close(head(states), euclidean(states), rtol=1e-4, atol=1e-5)
    low_rank = DistLayer(D, V, metric="mahalanobis", rank=2)
    assert 0 < low_rank.factor.norm() < 1
