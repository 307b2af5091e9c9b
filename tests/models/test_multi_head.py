"""The mean of several softmaxes against plain loops in float64."""

import pytest
import torch

from harmonic_sft.models import MultiHead
from tests.head_definitions import definition, slices

D, V, N = 24, 30, 5
INNER = {
    "linear": {"name": "linear"},
    "cosine": {"name": "cosine", "scale": 9.0},
    "sphere": {"name": "dist", "h_exp": -7.0},
    "euclid": {"name": "dist", "h_exp": -4.0, "unit_sphere": False},
}


def make(inner, num_heads, **changes):
    torch.manual_seed(0)
    head = MultiHead(D, V, num_heads=num_heads, inner={**INNER[inner], **changes})
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim():
                parameter.normal_()
    return head, torch.randn(N, D), torch.randint(V, (N,))


def exact_losses(head, states, labels):
    """-log of the mean of the label's probabilities, slice by slice, exact also where it is 0."""
    losses = []
    for state, label in zip(states.double(), labels.tolist(), strict=True):
        missed = []
        for cut in slices(head, state, head.weight.detach().double()):
            scores = definition(head.inner, *cut)
            others = torch.cat([scores[:label], scores[label + 1 :]])
            odds = torch.exp(others - scores[label]).sum()
            missed.append(odds / (1 + odds))  # 1 - p_y
        losses.append(-torch.log1p(-torch.stack(missed).mean()))
    return torch.stack(losses)


@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize("inner", INNER)
def test_a_confident_loss_keeps_its_digits(inner, num_heads):
    head, _, labels = make(inner, num_heads, **({"scale": 60.0} if inner == "cosine" else {}))
    states = head.weight.detach()[labels] * (1.6 * num_heads if inner == "linear" else 1.0) + 1e-2
    losses = exact_losses(head, states, labels)
    assert 0 < losses.min() < 1e-7  # what a sum of probabilities near 1 rounds away
    torch.testing.assert_close(head.nll(states, labels).double(), losses, rtol=2e-3, atol=0)


def test_a_hopeless_loss_stays_finite():
    head, states, labels = make("linear", 3)
    states = (1e4 * states).requires_grad_()
    loss = head.nll(states, labels)
    loss.sum().backward()
    assert loss.max() > 1e3
    assert loss.isfinite().all()
    assert states.grad.isfinite().all()
    assert states.grad.abs().max() > 0


def test_prototypes_tied_in_16_bits_are_normalized_in_float32():
    head, states, _ = make("cosine", 3)
    weight = head.weight.detach().bfloat16()
    head.inner.weight = torch.nn.Parameter(weight)
    found = head(states)
    head.inner.weight = torch.nn.Parameter(weight.float())
    torch.testing.assert_close(found, head(states))


def test_the_exponent_is_that_of_all_slices():
    head, states, labels = make("sphere", 3)
    assert head.h_exp == -7.0
    head.h_exp = -2.5
    assert {part.h_exp for part in head.lazy_logits(states).parts} == {-2.5}
    losses = exact_losses(head, states, labels)
    torch.testing.assert_close(head.nll(states, labels).double(), losses, rtol=1e-4, atol=1e-6)
    assert not head.scaled_by_h_exp
    assert make("sphere", 1)[0].scaled_by_h_exp
