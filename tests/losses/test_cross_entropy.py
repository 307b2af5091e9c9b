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
