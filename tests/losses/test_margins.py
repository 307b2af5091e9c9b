"""ArcFace and CosFace against loops over tokens and classes."""

import math

import pytest
import torch

from harmonic_sft.losses import ArcFaceLoss, CosFaceLoss
from harmonic_sft.models import CosineHead, DistLayer, TransformHead

V, D = 20, 6


def problem(*, learn_scale=True):
    torch.manual_seed(0)
    head = CosineHead(D, V, scale=9.0, learn_scale=learn_scale).double()
    states = 5 * torch.randn(8, D, dtype=torch.float64)
    labels = torch.randint(V, (8,))
    states[0] = -head.weight[labels[0]]  # theta = pi: beyond the guard of arcface
    return head, states.requires_grad_(), labels


def moved(loss_class, cosine, margin):
    if loss_class is CosFaceLoss:
        return cosine - margin
    angle = math.acos(cosine) + margin
    return math.cos(angle) if angle < math.pi else cosine - margin * math.sin(margin)


def by_loops(loss_class, head, states, labels, margin):
    scale, losses = float(torch.as_tensor(head.scale).detach()), []
    for state, y in zip(states.tolist(), labels.tolist(), strict=True):
        logits = []
        for j, point in enumerate(head.weight.tolist()):
            dot = sum(a * b for a, b in zip(state, point, strict=True))
            cosine = dot / math.hypot(*state) / math.hypot(*point)
            cosine = max(-1.0, min(1.0, cosine))
            logits.append(scale * (moved(loss_class, cosine, margin) if j == y else cosine))
        total = sum(math.exp(z) for z in logits)
        losses.append(-math.log(math.exp(logits[y]) / total))
    return torch.tensor(losses, dtype=torch.float64)


def test_a_head_without_angles_is_refused():
    states, labels = torch.randn(2, 4), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="loss arcface: expected a cosine head, got dist"):
        ArcFaceLoss()(DistLayer(4, 3), states, labels)


@pytest.mark.parametrize("loss_class", [ArcFaceLoss, CosFaceLoss])
def test_a_margin_is_for_a_cosine_head_behind_other_layers_too(loss_class):
    torch.manual_seed(0)
    head = TransformHead(D, V, inner={"name": "cosine", "scale": 9.0}).double()
    states, labels = torch.randn(8, D, dtype=torch.float64), torch.randint(V, (8,))
    expected = loss_class(margin=0.3)(head.inner, head.mapped(states), labels)
    torch.testing.assert_close(loss_class(margin=0.3)(head, states, labels), expected)


@pytest.mark.parametrize("loss_class", [ArcFaceLoss, CosFaceLoss])
@pytest.mark.parametrize(
    ("margin", "learn_scale"), [(0.0, True), (0.1, True), (0.5, False), (1.5, True)]
)
def test_the_margin_moves_the_label_alone(loss_class, margin, learn_scale):
    head, states, labels = problem(learn_scale=learn_scale)
    found = loss_class(margin=margin).prepare(head)(head, states, labels).detach()
    expected = by_loops(loss_class, head, states, labels, margin)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(found[1:], expected[1:])
