"""The fitted exponent is what a fine grid finds, and nothing else is changed."""

import math

import pytest
import torch

from harmonic_sft.models import HarmonicForCausalLM
from harmonic_sft.training.head_swap import first_batches, fit_h_exp
from tests.decoders import V, save_decoder

ROWS = torch.randint(3, V, (16, 40), generator=torch.Generator().manual_seed(0))
TRUTH = -9.0  # the exponent that the labels are drawn at
BATCH = {"input_ids": ROWS, "attention_mask": torch.ones_like(ROWS), "labels": ROWS.clone()}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = save_decoder("llama", tmp_path_factory.mktemp("base"))
    model = make(folder, h_exp=TRUTH)
    with torch.no_grad():
        probs = model(input_ids=ROWS).logits[:, :-1].softmax(-1)
    drawn = probs.flatten(0, 1).multinomial(1, generator=torch.Generator().manual_seed(1))
    BATCH["labels"][:, 1:] = drawn.view(16, 39)
    return folder


def make(base, **head):
    return HarmonicForCausalLM.from_base(str(base), head={"name": "dist", **head})


@torch.no_grad()
def loss_of(model, fit=None):
    if fit is not None:
        model.dist_head.weight.mul_(fit["scale"])
        model.h_exp = fit["h_exp"]
    return model(**BATCH).loss.item()


@pytest.mark.parametrize("is_inner", [False, True])
def test_the_exponent_is_the_best_of_a_fine_grid(base, is_inner):
    head = {"name": "dist", "h_exp": -30.0, "learn_h_exp": not is_inner}
    head = {"name": "rotation", "inner": head} if is_inner else head
    model = HarmonicForCausalLM.from_base(str(base), head=head)
    before, random_state = loss_of(model), torch.get_rng_state()
    fit = fit_h_exp(model, [BATCH])
    assert torch.equal(torch.get_rng_state(), random_state)
    assert loss_of(model) == before
    assert fit["tokens"] == 16 * 39
    assert fit["scale"] == 1
    assert fit["h_exp"] == pytest.approx(TRUTH, rel=0.2)
    after = loss_of(model, fit)
    assert after == pytest.approx(fit["loss"], rel=1e-4)
    assert after < before
    for factor in (0.5, 0.8, 0.95, 1.05, 1.2, 2.0):
        model.h_exp = fit["h_exp"] * factor
        assert loss_of(model) >= after - 1e-5, factor


@pytest.mark.parametrize("is_inner", [False, True])
def test_off_the_sphere_the_length_of_the_prototypes_too(base, is_inner):
    head = {"name": "dist", "unit_sphere": False}
    head = {"name": "rotation", "inner": head} if is_inner else head
    model = HarmonicForCausalLM.from_base(str(base), head=head)
    weight = model.dist_head.weight.detach().clone()
    fit = fit_h_exp(model, [BATCH])
    assert fit["scale"] != 1
    assert torch.equal(model.dist_head.weight, weight)
    best = loss_of(model, fit)
    for factor in (0.7, 1.4):
        with torch.no_grad():
            model.dist_head.weight.copy_(weight * fit["scale"] * factor)
        assert loss_of(model) > best - 1e-4, factor


def test_tied_prototypes_keep_their_length(base):
    head = {"name": "dist", "unit_sphere": False}
    model = HarmonicForCausalLM.from_base(str(base), head=head, tie=True)
    before = loss_of(model)
    fit = fit_h_exp(model, [BATCH])
    assert fit["scale"] == 1
    assert loss_of(model, fit) < before


def test_rows_without_labels_are_an_error(base):
    empty = {**BATCH, "labels": torch.full_like(ROWS, -100)}
    with pytest.raises(ValueError, match="expected labelled tokens, got none"):
        fit_h_exp(make(base), [empty])


def test_a_fit_that_makes_all_classes_alike_is_refused(base):
    """The label is always the prototype farthest away."""
    model = make(base)
    with torch.no_grad():
        farthest = model(input_ids=ROWS).logits.argmin(-1)
    labels = torch.cat([ROWS[:, :1], farthest[:, :-1]], 1)
    with pytest.raises(ValueError, match=r"got a best h_exp of -0.0156, at which all are alike"):
        fit_h_exp(model, [{**BATCH, "labels": labels}])


def test_a_table_is_sampled_evenly():
    rows = [{"x": torch.tensor(index)} for index in range(5000)]

    def collate(items):
        return {"x": torch.stack([item["x"] for item in items])}

    batches = list(first_batches(rows, collate, 100, torch.device("cpu")))
    places = torch.cat([batch["x"] for batch in batches])
    assert len(places) == 1024
    assert places.max() > 4900
    assert places.diff().max() <= math.ceil(5000 / 1024)
