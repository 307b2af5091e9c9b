"""Dist heads of other metrics against plain loops in float64; the Euclidean one: test_heads.py."""

import math

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from harmonic_sft.losses import CrossEntropyLoss
from harmonic_sft.models import DistLayer, HarmonicForMaskedLM, build_head

D, V, N = 16, 30, 5
EPS = 1e-6
METRICS = {
    "diagonal": {"metric": "mahalanobis"},
    "low_rank": {"metric": "mahalanobis", "rank": 3},
}
metrics = pytest.mark.parametrize("metric", METRICS)
spheres = pytest.mark.parametrize("unit_sphere", [True, False])


def make(
    metric: str, *, unit_sphere: bool, h_exp: float = -3.0, num_classes: int = V
) -> tuple[DistLayer, Tensor, Tensor]:
    torch.manual_seed(0)
    fields = {"h_exp": h_exp, "unit_sphere": unit_sphere, **METRICS[metric]}
    head = DistLayer(D, num_classes, **fields)
    if head.diagonal is not None:
        torch.nn.init.uniform_(head.diagonal, 0.5, 1.5)
    return head, torch.randn(N, D), torch.randint(num_classes, (N,))


def distance(head: DistLayer, x: Tensor, w: Tensor) -> Tensor:
    """One distance, as the papers write it."""
    if head.unit_sphere:
        x, w = x / x.norm(), w / w.norm()
    matrix = torch.diag(head.diagonal.detach().double() ** 2)
    if head.factor is not None:
        factor = head.factor.detach().double()
        matrix = matrix + factor @ factor.T
    return ((x - w) @ matrix @ (x - w)).sqrt()


@metrics
@spheres
def test_probabilities_are_powers_of_squared_distances(metric, unit_sphere):
    head, states, labels = make(metric, unit_sphere=unit_sphere)
    rows = [
        [(distance(head, x, w) ** 2 + EPS) ** head.h_exp for w in head.weight.detach().double()]
        for x in states.double()
    ]
    expected = torch.tensor(rows, dtype=torch.float64)
    expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(head(states).softmax(-1).double(), expected, rtol=1e-4, atol=1e-9)
    losses = -expected.gather(-1, labels.unsqueeze(-1)).squeeze(-1).log()
    torch.testing.assert_close(head.nll(states, labels).double(), losses, rtol=1e-4, atol=1e-6)


@metrics
@spheres
def test_gradcheck(metric, unit_sphere):
    head, states, labels = make(metric, unit_sphere=unit_sphere, num_classes=4)
    head.double()
    names, parameters = zip(*head.named_parameters(), strict=True)

    def loss(states, *values):
        given = dict(zip(names, values, strict=True))
        logits = torch.func.functional_call(head, given, (states,))
        return torch.nn.functional.cross_entropy(logits, labels, reduction="none")

    inputs = (states.double().requires_grad_(), *parameters)
    assert torch.autograd.gradcheck(loss, inputs, fast_mode=True)


@metrics
@spheres
@pytest.mark.parametrize("case", ["on a prototype", "against one", "far away", "zero"])
def test_losses_and_gradients_are_finite(metric, unit_sphere, case):
    head, states, labels = make(metric, unit_sphere=unit_sphere, h_exp=-12.0)
    weight = head.weight.detach()[labels]
    cases = {
        "on a prototype": weight,
        "against one": -weight,
        "far away": 1e4 * torch.nn.functional.normalize(states, dim=-1),
        "zero": 0 * weight,
    }
    states = cases[case].clone().requires_grad_()
    loss = head.nll(states, labels)
    loss.sum().backward()
    assert loss.isfinite().all()
    for tensor in (states, *head.parameters()):
        assert tensor.grad.isfinite().all()


@spheres
@pytest.mark.parametrize("metric", ["diagonal", "low_rank"])
def test_the_fused_loss_is_that_of_the_dense_logits(metric, unit_sphere):
    head, states, labels = make(metric, unit_sphere=unit_sphere)
    states.requires_grad_()
    found = []
    for loss_fn in (CrossEntropyLoss(), DistLayer.nll):
        head.zero_grad()
        states.grad = None
        loss = loss_fn(head, states, labels)
        loss.sum().backward()
        found.append([loss, states.grad, *(p.grad for p in head.parameters())])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_a_fresh_mahalanobis_head_of_a_diagonal_is_the_euclidean_one():
    torch.manual_seed(1)
    head = DistLayer(D, V, metric="mahalanobis")
    euclidean = DistLayer(D, V)
    euclidean.load_state_dict({"weight": head.weight})
    states = torch.randn(N, D)
    torch.testing.assert_close(head(states), euclidean(states), rtol=1e-4, atol=1e-5)
    low_rank = DistLayer(D, V, metric="mahalanobis", rank=2)
    assert 0 < low_rank.factor.norm() < 1


@metrics
def test_logits_are_float32_under_autocast_and_in_16_bits(metric):
    head, states, _ = make(metric, unit_sphere=True)
    expected = head(states)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(head(states), expected, rtol=0, atol=0)
    head.to(torch.bfloat16)
    assert {p.dtype for p in head.parameters()} == {torch.float32}
    assert head(states.bfloat16()).dtype == torch.float32
    assert head.double()(states.double()).dtype == torch.float64


@metrics
def test_settings_rebuild_the_head_and_name_no_foreign_field(metric):
    head, _, _ = make(metric, unit_sphere=False)
    settings = head.settings()
    assert settings["metric"] == METRICS[metric]["metric"]
    assert ("rank" in settings) == (settings["metric"] == "mahalanobis")
    assert build_head(settings, hidden_size=D, vocab_size=V).settings() == settings
    assert "metric" not in DistLayer(D, V).settings()


@metrics
def test_a_head_of_meta_tensors_is_cheap_to_check(metric):
    with torch.device("meta"):
        head = DistLayer(2_882_880, 2, learn_h_exp=True, **METRICS[metric])
    assert head.weight.is_meta
    assert head.settings()["h_exp"] == -12.0


REMOVED = {
    "cosine": "unit_sphere: true and twice the h_exp",
    "lp": "euclidean or mahalanobis$",
    "chebyshev": "euclidean or mahalanobis$",
    "bray_curtis": "euclidean or mahalanobis$",
}


@pytest.mark.parametrize(("metric", "replacement"), REMOVED.items())
def test_a_metric_that_is_gone_names_its_replacement(metric, replacement):
    with pytest.raises(ValueError, match=f"^metric: .*removed. Use metric: .*{replacement}"):
        DistLayer(D, V, metric=metric)


BAD = {
    "unknown": ({"metric": "manhattan"}, "metric: expected one of .* got 'manhattan'"),
    "rank of another": ({"rank": 2}, "rank: expected nothing for metric euclidean, got 2"),
    "large rank": ({"metric": "mahalanobis", "rank": D + 1}, f"rank: expected .* 0 to {D}"),
}


@pytest.mark.parametrize(("fields", "message"), BAD.values(), ids=BAD)
def test_a_bad_metric_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DistLayer(D, V, **fields)


def test_the_cosine_metric_was_the_sphere_at_twice_the_exponent():
    torch.manual_seed(0)
    head, states = DistLayer(D, V, h_exp=-6.0), torch.randn(N, D, dtype=torch.float64)
    cosines = torch.nn.functional.cosine_similarity(
        states.unsqueeze(1), head.weight.double().unsqueeze(0), dim=-1
    )
    expected = (-3.0 * (1 - cosines).square().log()).softmax(-1)
    torch.testing.assert_close(head(states).softmax(-1), expected, rtol=1e-4, atol=0)


@metrics
def test_logits_are_proportional_to_a_learned_exponent(metric):
    head = DistLayer(D, V, h_exp=-2.0, learn_h_exp=True, **METRICS[metric])
    states = torch.randn(N, D)
    logits = head(states)
    head.h_exp = -6.0
    torch.testing.assert_close(head(states), 3 * logits, rtol=1e-5, atol=1e-5)
    head(states).square().sum().backward()
    assert math.isfinite(head.log_steepness.grad.item())
    assert head.log_steepness.grad != 0


@metrics
def test_a_saved_model_keeps_its_metric(metric, tmp_path):
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    base = BertForMaskedLM(BertConfig(vocab_size=V, hidden_size=D, **sizes))
    base.save_pretrained(tmp_path / "base")
    head = {"name": "dist", **METRICS[metric]}
    model = HarmonicForMaskedLM.from_base(str(tmp_path / "base"), head=head)
    if model.dist_head.diagonal is not None:
        torch.nn.init.uniform_(model.dist_head.diagonal, 0.5, 1.5)
    model.save_pretrained(tmp_path / "saved")
    again = HarmonicForMaskedLM.from_pretrained(tmp_path / "saved")
    assert again.dist_head.settings() == model.dist_head.settings()
    inputs = {"input_ids": torch.arange(2, 12).view(2, 5), "attention_mask": torch.ones(2, 5)}
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)
