import pytest
import torch

from harmonic_sft.losses.few_classes import logits_at, points_at, top_classes
from harmonic_sft.models import AffineForm, DistanceForm, build_head
from tests.head_variants import VARIANTS, D, V

BUILT = {
    name: build_head(settings, hidden_size=D, vocab_size=V) for name, settings in VARIANTS.items()
}
HEADS = [
    name
    for name, head in BUILT.items()
    if isinstance(head.form(torch.zeros(1, D)), AffineForm | DistanceForm)
]


def problem(name):
    torch.manual_seed(0)
    head = build_head(VARIANTS[name], hidden_size=D, vocab_size=V)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    head = head.double()
    return head, torch.randn(5, D, dtype=torch.float64, requires_grad=True)


def test_most_heads_are_served():
    assert {"linear", "dist", "dist off the sphere", "cosine", "l2", "rotation"} <= set(HEADS)


@pytest.mark.parametrize("name", HEADS)
def test_the_top_classes_are_those_of_the_logits(name):
    head, states = problem(name)
    found = top_classes(head.form(states), 4)
    assert torch.equal(found, head(states).topk(4).indices)


@pytest.mark.parametrize("name", HEADS)
def test_single_logits_and_their_gradients_are_those_of_all(name):
    head, states = problem(name)
    columns = torch.randint(V, (5, 3))
    inputs, upstream = [states, *head.parameters()], torch.randn(5, 3)
    pairs = []
    form = head.form(states)
    few = logits_at(form, points_at(form, columns), columns)
    for logits in (few, head(states).gather(-1, columns)):
        total = (logits * upstream).sum()
        pairs.append([logits, *torch.autograd.grad(total, inputs, allow_unused=True)])
    for mine, expected in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, expected)
