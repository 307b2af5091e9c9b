"""Distillation against its formula in float64 loops."""

import pytest
import torch

from harmonic_sft.losses import CrossEntropyLoss, DistillLoss
from harmonic_sft.models import build_head

N, D, V = 7, 6, 11


@pytest.fixture
def parts():
    torch.manual_seed(0)
    old = build_head({"name": "linear"}, hidden_size=D, vocab_size=V)
    head = build_head({"name": "dist", "h_exp": -3.0}, hidden_size=D, vocab_size=V)
    with torch.no_grad():
        old.weight.mul_(30)
    return old.double(), head.double(), torch.randn(N, D).double(), torch.randint(V, (N,))


def loop(old, head, hidden_states, labels, weight):
    losses = []
    for state, label in zip(hidden_states, labels, strict=True):
        q = old(state[None])[0].softmax(-1)
        p = head(state[None])[0].softmax(-1)
        divergence = sum(q[j] * (q[j].log() - p[j].log()) for j in range(V))
        losses.append(weight * divergence - (1 - weight) * p[label].log())
    return torch.stack(losses)


@pytest.mark.parametrize("progress", [0.0, 0.3, 0.5, 0.9])
def test_the_formula(parts, progress):
    old, head, hidden_states, labels = parts
    loss = DistillLoss(until=0.6).prepare(old)
    loss.anneal(progress)
    weight = max(0.0, 1 - progress / 0.6)
    found = loss(head, hidden_states, labels)
    torch.testing.assert_close(found, loop(old, head, hidden_states, labels, weight))


def test_gradients_go_to_the_new_head_and_not_through_the_teacher(parts):
    old, head, hidden_states, labels = parts
    loss = DistillLoss().prepare(old)
    loss.anneal(0.1)
    hidden_states.requires_grad_()
    wanted = [hidden_states, head.weight]
    found = torch.autograd.grad(loss(head, hidden_states, labels).sum(), wanted)
    detached = hidden_states.detach()
    q = old(detached).softmax(-1).detach()
    target = 0.8 * q + 0.2 * torch.nn.functional.one_hot(labels, V)
    plain = -(target * head(hidden_states).log_softmax(-1)).sum()
    for gradient, expected in zip(found, torch.autograd.grad(plain, wanted), strict=True):
        torch.testing.assert_close(gradient, expected)
    assert not any(p.requires_grad for p in loss.teacher.parameters())


def test_the_teacher_is_a_copy(parts):
    old, head, hidden_states, labels = parts
    loss = DistillLoss().prepare(old)
    before = loss(head, hidden_states, labels)
    with torch.no_grad():
        old.weight.zero_()
    assert torch.equal(loss(head, hidden_states, labels), before)


def test_after_its_share_it_is_the_cross_entropy(parts):
    old, head, hidden_states, labels = parts
    loss = DistillLoss(until=0.5).prepare(old)
    loss.anneal(0.5)
    expected = CrossEntropyLoss()(head, hidden_states, labels)
    assert torch.equal(loss(head, hidden_states, labels), expected)


def test_settings_alone_are_refused(parts):
    _, head, hidden_states, labels = parts
    with pytest.raises(ValueError, match="expected a teacher, got none"):
        DistillLoss()(head, hidden_states, labels)
