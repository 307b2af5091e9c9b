"""A learned rotation before any head."""

import pytest
import torch
from transformers import BertConfig

from harmonic_sft.models import (
    DistanceLogits,
    HarmonicConfig,
    HarmonicForMaskedLM,
    RotationHead,
)
from tests.head_definitions import cayley

D, V, N = 8, 20, 5


def make(inner=None, *, turned=True):
    torch.manual_seed(0)
    head = RotationHead(D, V, inner=inner)
    if turned:
        with torch.no_grad():
            head.skew.normal_()
    return head, torch.randn(N, D), torch.randint(V, (N,))


@pytest.mark.parametrize("size", [0.0, 1.0, 30.0])
def test_the_matrix_stays_a_rotation_however_far_it_is_trained(size):
    head, _, _ = make()
    with torch.no_grad():
        head.skew.mul_(size)
    matrix = head.rotation.detach().double()
    torch.testing.assert_close(matrix, cayley(head.skew), rtol=0, atol=2e-5)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(D).double(), rtol=0, atol=2e-5)
    assert torch.linalg.det(matrix) > 0.99


@pytest.mark.parametrize("inner", ["linear", "cosine", "dist"])
def test_it_starts_as_the_inner_head(inner):
    head, states, labels = make({"name": inner}, turned=False)
    assert torch.equal(head.rotation, torch.eye(D))
    assert torch.equal(head(states), head.inner(states))
    assert torch.equal(head.nll(states, labels), head.inner.nll(states, labels))


def test_everything_else_is_the_inner_heads():
    head, _, _ = make({"name": "dist", "h_exp": -5.0})
    assert head.weight is head.inner.weight
    assert head.h_exp == -5.0
    head.h_exp = -3.0
    assert head.inner.h_exp == -3.0
    assert head.scaled_by_h_exp
    assert head.settings()["inner"] == head.inner.settings()
    assert isinstance(head.lazy_logits(torch.randn(N, D)), DistanceLogits)


def test_a_missing_rotation_starts_at_the_identity():
    """Where a checkpoint lacks it, transformers takes memory as it is unless the head fills it."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    backbone = BertConfig(vocab_size=V, hidden_size=D, **sizes)
    model = HarmonicForMaskedLM(HarmonicConfig(text_config=backbone, head={"name": "rotation"}))
    weights = model.state_dict()
    del weights["dist_head.skew"]
    used = [torch.full((D, D), 7.0) for _ in range(1000)]
    del used  # so that memory is not full of zeros by chance
    loaded = HarmonicForMaskedLM.from_pretrained(None, config=model.config, state_dict=weights)
    assert torch.equal(loaded.dist_head.rotation, torch.eye(D))
    assert torch.equal(loaded.dist_head.weight, model.dist_head.weight)
