"""Heads of dot products against plain loops in float64; the linear one: test_heads.py."""

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from harmonic_sft.losses import CrossEntropyLoss
from harmonic_sft.models import HarmonicForMaskedLM, Head, L2Head, PowerHead, build_head

D, V, N = 12, 30, 5
HEADS = {
    "l2": {"name": "l2", "scale": 0.7},
    "l2_fixed": {"name": "l2", "scale": 0.7, "learn_scale": False},
    "spherical": {"name": "power", "power": 1.0},
    "harmax": {"name": "power", "power": -2.0, "eps": 1e-4},
}
heads = pytest.mark.parametrize("name", HEADS)


def make(name: str, num_classes: int = V) -> tuple[Head, Tensor, Tensor]:
    torch.manual_seed(0)
    head = build_head(HEADS[name], hidden_size=D, vocab_size=num_classes)
    return head, torch.randn(N, D), torch.randint(num_classes, (N,))


def weight_of(name: str, x: Tensor, w: Tensor) -> Tensor:
    """One probability before it is normalized."""
    if name.startswith("l2"):
        return torch.exp(-0.7 * (x - w).square().sum())
    power, eps = (1.0, 1e-6) if name == "spherical" else (-2.0, 1e-4)
    return ((x @ w) ** 2 + eps) ** power


@heads
def test_probabilities_equal_their_definition(name):
    head, states, labels = make(name)
    prototypes = head.weight.detach().double()
    rows = [[weight_of(name, x, w) for w in prototypes] for x in states.double()]
    expected = torch.tensor(rows, dtype=torch.float64)
    expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(head(states).softmax(-1).double(), expected, rtol=1e-4, atol=1e-9)
    losses = -expected.gather(-1, labels.unsqueeze(-1)).squeeze(-1).log()
    actual = CrossEntropyLoss()(head, states, labels)
    torch.testing.assert_close(actual.double(), losses, rtol=1e-4, atol=1e-5)


@heads
def test_gradcheck(name):
    head, states, labels = make(name, num_classes=4)
    head.double()
    names, parameters = zip(*head.named_parameters(), strict=True)

    def loss(states, *values):
        given = dict(zip(names, values, strict=True))
        logits = torch.func.functional_call(head, given, (states,))
        return torch.nn.functional.cross_entropy(logits, labels, reduction="none")

    inputs = (states.double().requires_grad_(), *parameters)
    assert torch.autograd.gradcheck(loss, inputs, fast_mode=True)


@heads
def test_fused_gradients_are_those_of_the_dense_logits(name):
    head, states, labels = make(name)
    states.requires_grad_()
    inputs = (states, *head.parameters())
    dense = torch.autograd.grad(head.nll(states, labels).sum(), inputs)
    fused = torch.autograd.grad(CrossEntropyLoss()(head, states, labels).sum(), inputs)
    torch.testing.assert_close(fused, dense, rtol=1e-4, atol=1e-5)


@heads
@pytest.mark.parametrize("norm", [0.0, 1.0, 1e4])
def test_losses_and_gradients_are_finite(name, norm):
    """At 0 every dot product is 0; at 1 a distance is."""
    head, _, labels = make(name)
    states = (norm * head.weight.detach()[labels]).requires_grad_()
    loss = head.nll(states, labels)
    loss.sum().backward()
    assert loss.isfinite().all()
    for tensor in (states, *head.parameters()):
        assert tensor.grad.isfinite().all()


@heads
def test_logits_are_float32_under_autocast_and_in_16_bits(name):
    head, states, _ = make(name)
    expected = head(states)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(head(states), expected, rtol=0, atol=0)
    head.to(torch.bfloat16)
    assert {p.dtype for p in head.parameters()} == {torch.float32}
    assert head(states.bfloat16()).dtype == torch.float32
    assert head.double()(states.double()).dtype == torch.float64


@pytest.mark.parametrize("power", [1.0, -2.0])
def test_the_sign_of_the_dot_product_is_lost(power):
    head = PowerHead(D, V, power=power)
    states = torch.randn(N, D)
    torch.testing.assert_close(head(-states), head(states), rtol=0, atol=0)


def test_below_zero_the_most_orthogonal_class_wins():
    head = PowerHead(D, D, power=-1.0)
    with torch.no_grad():
        head.weight.copy_(torch.eye(D))
    states = torch.ones(1, D)
    states[0, 4] = 0
    assert head(states).argmax() == 4


def test_the_prototypes_of_distances_keep_their_norms():
    embeddings = 3 * torch.randn(V, D)
    head = L2Head(D, V).initialize_(embeddings)
    head.renormalize_()
    assert torch.equal(head.weight, embeddings)
    assert torch.equal(head.prototypes, embeddings)


@heads
def test_settings_rebuild_the_head(name):
    head, _, _ = make(name)
    assert head.settings() == {**_defaults(name), **HEADS[name]}
    again = build_head(head.settings(), hidden_size=D, vocab_size=V)
    assert again.settings() == head.settings()


def _defaults(name: str) -> dict:
    return {"learn_scale": True} if name.startswith("l2") else {"eps": 1e-6}


@heads
def test_a_head_of_meta_tensors_is_cheap_to_check(name):
    with torch.device("meta"):
        head = build_head(HEADS[name], hidden_size=2_882_880, vocab_size=2)
    assert head.settings() == {**_defaults(name), **HEADS[name]}


def test_bad_settings_are_refused():
    for power in (0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"power: expected a number other than 0, got {power}"):
            PowerHead(D, V, power=power)
    for eps in (0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"eps: expected a number above 0, got {eps}"):
            PowerHead(D, V, eps=eps)
    with pytest.raises(ValueError, match="scale: expected a number above 0, got -1"):
        L2Head(D, V, scale=-1.0)


@heads
def test_a_saved_model_keeps_its_head(name, tmp_path):
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    base = BertForMaskedLM(BertConfig(vocab_size=V, hidden_size=D, **sizes))
    base.save_pretrained(tmp_path / "base")
    model = HarmonicForMaskedLM.from_base(str(tmp_path / "base"), head=HEADS[name])
    model.save_pretrained(tmp_path / "saved")
    again = HarmonicForMaskedLM.from_pretrained(tmp_path / "saved")
    assert again.dist_head.settings() == model.dist_head.settings()
    inputs = {"input_ids": torch.arange(2, 12).view(2, 5), "attention_mask": torch.ones(2, 5)}
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)
