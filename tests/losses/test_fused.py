import pytest
import torch

from harmonic_sft.losses.fused import form_cross_entropy
from harmonic_sft.models import build_head
from harmonic_sft.ops import LossOptions
from tests.head_variants import VARIANTS, D, V

WITH_FORM = [
    name
    for name, settings in VARIANTS.items()
    if build_head(settings, hidden_size=D, vocab_size=V).form(torch.zeros(1, D)) is not None
]


def test_most_heads_have_a_form():
    assert {"linear", "dist", "cosine", "rotation", "multi_head of dist"} <= set(WITH_FORM)


@pytest.mark.parametrize("name", WITH_FORM)
def test_it_is_the_cross_entropy_of_the_logits(name):
    torch.manual_seed(0)
    head = build_head(VARIANTS[name], hidden_size=D, vocab_size=V)
    states, labels = torch.randn(9, D), torch.randint(V, (9,))
    expected = -head(states).double().log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    found = form_cross_entropy(head.form(states), labels)
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)


def test_options_of_a_mixture_are_refused():
    head = build_head({"name": "multi_head"}, hidden_size=D, vocab_size=V)
    states, labels = torch.randn(2, D), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="options: expected none for a mixture"):
        form_cross_entropy(head.form(states), labels, options=LossOptions(z_loss=0.1))
