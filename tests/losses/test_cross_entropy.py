import pytest
import torch

from harmonic_sft.losses import CrossEntropyLoss
from harmonic_sft.models import HEADS, build_head


@pytest.mark.parametrize("name", HEADS)
def test_it_is_the_negative_log_probability_of_the_label(name):
    head = build_head({"name": name}, hidden_size=16, vocab_size=40)
    states, labels = torch.randn(5, 16), torch.randint(40, (5,))
    probabilities = head(states).double().softmax(-1)
    expected = torch.stack([-torch.log(p[y]) for p, y in zip(probabilities, labels, strict=True)])
    loss = CrossEntropyLoss().prepare(head)(head, states, labels)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "dist"},
        {"name": "dist", "unit_sphere": False, "h_exp": -3.5, "eps": 1e-3},
        {"name": "linear"},
        {"name": "linear", "bias": False},
    ],
)
def test_training_agrees_with_the_loss_that_is_published_with_the_head(settings):
    head = build_head(settings, hidden_size=16, vocab_size=900)
    torch.manual_seed(0)
    states, labels = torch.randn(30, 16, requires_grad=True), torch.randint(900, (30,))
    parameters = [states, *head.parameters()]
    losses = CrossEntropyLoss().prepare(head)(head, states, labels), head.nll(states, labels)
    found = [[loss, *torch.autograd.grad(loss.sum(), parameters)] for loss in losses]
    for fused, plain in zip(*found, strict=True):
        scale = plain.abs().max().item()
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=2e-5 * scale)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_the_implementation_can_be_chosen(impl):
    torch.manual_seed(0)
    head = build_head({"name": "dist"}, hidden_size=16, vocab_size=40)
    states, labels = torch.randn(5, 16), torch.randint(40, (5,))
    chosen = CrossEntropyLoss(impl=impl)(head, states, labels)
    torch.testing.assert_close(chosen, head.nll(states, labels), rtol=1e-5, atol=1e-6)


def test_an_unknown_implementation_is_refused():
    head = build_head({"name": "dist"}, hidden_size=16, vocab_size=40)
    with pytest.raises(ValueError, match="impl"):
        CrossEntropyLoss(impl="cuda")(head, torch.randn(5, 16), torch.randint(40, (5,)))
