import math

import pytest
import torch

from harmonic_sft.losses import CosFaceLoss, CrossEntropyLoss
from harmonic_sft.models import CosineHead, build_head

V, D = 20, 6


def problem(*, learn_scale=True):
    torch.manual_seed(0)
    head = CosineHead(D, V, scale=9.0, learn_scale=learn_scale).double()
    states = 5 * torch.randn(8, D, dtype=torch.float64)
    labels = torch.randint(V, (8,))
    return head, states.requires_grad_(), labels


def by_loops(head, states, labels, margin):
    scale, losses = float(torch.as_tensor(head.scale).detach()), []
    for state, y in zip(states.tolist(), labels.tolist(), strict=True):
        logits = []
        for j, point in enumerate(head.weight.tolist()):
            dot = sum(a * b for a, b in zip(state, point, strict=True))
            cosine = dot / math.hypot(*state) / math.hypot(*point)
            logits.append(scale * (cosine - margin * (j == y)))
        total = sum(math.exp(z) for z in logits)
        losses.append(-math.log(math.exp(logits[y]) / total))
    return torch.tensor(losses, dtype=torch.float64)


@pytest.mark.parametrize("margin", [0.1, 0.5, 1.5])
@pytest.mark.parametrize("learn_scale", [True, False])
def test_the_margin_is_taken_from_the_cosine_of_the_label(margin, learn_scale):
    head, states, labels = problem(learn_scale=learn_scale)
    found = CosFaceLoss(margin=margin).prepare(head)(head, states, labels)
    torch.testing.assert_close(found.detach(), by_loops(head, states, labels, margin))


def test_without_a_margin_it_is_the_cross_entropy():
    head, states, labels = problem()
    found = CosFaceLoss(margin=0.0)(head, states, labels)
    torch.testing.assert_close(found, CrossEntropyLoss()(head, states, labels))


def test_only_a_cosine_head_has_the_angles():
    head = build_head({"name": "dist"}, hidden_size=D, vocab_size=V)
    with pytest.raises(ValueError, match="loss cosface: expected a cosine head, got dist"):
        CosFaceLoss().prepare(head)
