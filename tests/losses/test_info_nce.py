import math

import pytest
import torch

from harmonic_sft.losses import InfoNCELoss
from harmonic_sft.models import build_head
from tests.head_variants import D, V, moved_head

REFUSED = ("power", "multi_head", "multi_head of cosine", "rotation of multi_head")


def problem():
    states = torch.randn(6, D, dtype=torch.float64, requires_grad=True)
    return states, torch.tensor([3, 7, 3, 0, 9, 7])


def by_loops(states, prototypes, labels, scale):
    losses = []
    for state, y in zip(states.tolist(), labels, strict=True):
        shares = {}
        for j in set(labels):  # each of the batch's labels once, all others never
            point = prototypes[j].tolist()
            dot = sum(a * b for a, b in zip(state, point, strict=True))
            shares[j] = math.exp(scale * dot / math.hypot(*state) / math.hypot(*point))
        losses.append(-math.log(shares[y] / sum(shares.values())))
    return torch.tensor(losses, dtype=torch.float64)


@pytest.mark.parametrize(
    "name", ["linear", "dist", "dist off the sphere", "cosine", "vmf", "l2", "rotation"]
)
def test_the_label_is_contrasted_with_the_other_labels_of_the_batch(name):
    head = moved_head(name, dtype=torch.float64)
    states, labels = problem()
    found = InfoNCELoss(scale=3.0).prepare(head)(head, states, labels)
    turned = head.mapped(states) if name == "rotation" else states
    expected = by_loops(turned, head.prototypes, labels.tolist(), 3.0)
    torch.testing.assert_close(found.detach(), expected)


def test_no_other_prototype_gets_a_gradient():
    head = moved_head("dist", dtype=torch.float64)
    states, labels = problem()
    InfoNCELoss().prepare(head)(head, states, labels).sum().backward()
    touched = head.weight.grad.abs().sum(-1).nonzero().flatten().tolist()
    assert touched == sorted(set(labels.tolist()))


def test_a_batch_of_one_label_has_nothing_to_contrast():
    head = moved_head("dist", dtype=torch.float64)
    states, _ = problem()
    losses = InfoNCELoss().prepare(head)(head, states, torch.full((6,), 4))
    torch.testing.assert_close(losses, torch.zeros_like(losses))


@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_do_not_compare_whole_vectors_are_refused(name):
    with pytest.raises(ValueError, match="loss info_nce: expected a head of dot products"):
        InfoNCELoss().prepare(moved_head(name))
    with pytest.raises(ValueError, match="loss info_nce: expected a head of dot products"):
        InfoNCELoss()(moved_head(name), torch.randn(2, D), torch.arange(2))


@pytest.mark.parametrize("num_tokens", [0, 4])
@pytest.mark.parametrize("name", ["linear", "dist"])
def test_every_weight_has_a_gradient_that_other_processes_wait_for(name, num_tokens):
    """Of a process without a token, and of a bias or an exponent, which take no part."""
    settings = {"linear": {"name": "linear"}, "dist": {"name": "dist", "learn_h_exp": True}}
    head = build_head(settings[name], hidden_size=D, vocab_size=V)
    states = torch.randn(num_tokens, D, requires_grad=True)
    InfoNCELoss()(head, states, torch.arange(num_tokens)).sum().backward()
    gradients = {name: weight.grad for name, weight in head.named_parameters()}
    assert len(gradients) == 2
    assert all(gradient is not None for gradient in gradients.values())
