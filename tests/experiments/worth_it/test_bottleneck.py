"""The probe against autograd and least squares."""

import pytest
import torch
import torch.nn.functional as F

from experiments.worth_it.bottleneck import HEADS, jacobian, probe, synthetic_row
from harmonic_sft.models import build_head


@pytest.mark.parametrize("name", HEADS)
def test_differences_give_the_jacobian_of_autograd(name):
    settings, norm = HEADS[name]
    torch.manual_seed(0)
    head = build_head(settings, hidden_size=8, vocab_size=20).double()
    state = norm * F.normalize(torch.randn(8, dtype=torch.float64), dim=-1)
    exact = torch.autograd.functional.jacobian(lambda x: head(x.unsqueeze(0))[0], state)
    torch.testing.assert_close(jacobian(head, state), exact - exact.mean(0), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_share_and_alignment_are_those_of_least_squares(name):
    settings, norm = HEADS[name]
    torch.manual_seed(1)
    head = build_head(settings, hidden_size=8, vocab_size=20)
    states = norm * F.normalize(torch.randn(3, 8), dim=-1)
    labels = torch.tensor([0, 5, 9])
    found = probe(head, states, labels)
    shares, alignments = [], []
    for state, label in zip(states.double(), labels, strict=True):
        slopes = jacobian(head.double(), state)
        gradient = head(state.unsqueeze(0))[0].detach().softmax(-1)
        gradient[label] -= 1
        solved = torch.linalg.lstsq(slopes, gradient, driver="gelsd", rcond=1e-6).solution
        shares.append((slopes @ solved).norm() / gradient.norm())
        alignments.append(F.cosine_similarity(slopes @ slopes.T @ gradient, gradient, dim=0))
    assert found["share"] == pytest.approx(torch.stack(shares).mean().item(), abs=1e-5)
    assert found["alignment"] == pytest.approx(torch.stack(alignments).mean().item(), abs=1e-5)
    head.float()
    assert found["loss"] == pytest.approx(head.nll(states, labels).mean().item(), abs=1e-4)


def test_nothing_is_lost_where_a_linear_head_has_more_columns_than_classes():
    torch.manual_seed(0)
    head = build_head(HEADS["linear"][0], hidden_size=16, vocab_size=6)
    found = probe(head, torch.randn(2, 16), torch.tensor([0, 3]))
    assert found["share"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("name", ["linear", "dist -12"])
def test_states_have_the_loss_that_was_asked_for(name):
    assert synthetic_row(name, 16, 2.0, 0, num_classes=50)["loss"] == pytest.approx(2.0, abs=1e-3)
