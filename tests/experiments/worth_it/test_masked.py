"""Rows, masks, the last block at some places, factors and gains against plain computations."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoTokenizer

from experiments.worth_it import masked
from experiments.worth_it.masked import (
    ARMS,
    BASES,
    Base,
    Part,
    evaluate,
    finish,
    fit,
    load_base,
    mask_rows,
    read_articles,
    read_rows,
    run_once,
    scale_logits_,
    start_head,
    summarize,
    verdict,
)
from experiments.worth_it.store import Store
from harmonic_sft.eval.statistics import UNDECIDED, t_interval

pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture(scope="module")
def bases(data, small, tiny_base, tmp_path_factory):
    """Both bases after two steps."""
    output = tmp_path_factory.mktemp("bases")
    return {name: load_base(data, output, name, str(tiny_base), 2) for name in BASES}


def test_articles_stand_in_one_part_and_sections_are_documents(data):
    parts = read_articles(data / "text")
    assert {name: len(articles) for name, articles in parts.items()} == {
        "train": 10 + 4,
        "validation": 2,
        "test": 7 + 2,
    }
    assert parts["validation"][1][0].startswith("= T 6 =")
    assert parts["validation"][1][1].startswith("= = S = =")
    whole = [tuple(article) for articles in parts.values() for article in articles]
    assert len(set(whole)) == len(whole)
    assert "<unk>" not in "".join("".join(one) for one in whole)


def test_a_mask_hides_as_many_tokens_of_the_vocabulary_in_each_row(data, tiny_base):
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    rows, vocabulary = read_rows(data / "text", tokenizer)
    assert not torch.isin(torch.tensor(tokenizer.all_special_ids), vocabulary).any()
    ids = rows["train"].input_ids
    hidden, places, labels = mask_rows(ids, vocabulary, 5, tokenizer.mask_token_id)
    assert (hidden == tokenizer.mask_token_id).sum(-1).tolist() == [3] * len(ids)
    assert torch.equal(vocabulary[labels], ids.gather(1, places))
    assert torch.equal(hidden.scatter(1, places, ids.gather(1, places)), ids)
    again = mask_rows(ids[:2], vocabulary, 5, tokenizer.mask_token_id)[1]
    assert torch.equal(again, places[:2])
    assert not torch.equal(mask_rows(ids, vocabulary, 6, 4)[1], places)


def test_the_last_block_at_some_places_is_the_whole_encoder_there(tiny_base):
    model = AutoModel.from_pretrained(tiny_base).eval()
    ids = torch.randint(5, 20, (4, 14))
    places = torch.tensor([[1, 5, 6], [2, 3, 9], [0, 1, 13], [4, 7, 8]])
    with torch.no_grad():
        outputs = model(ids, output_hidden_states=True)
        found = finish(model.encoder.layer[-1], outputs.hidden_states[-2], places)
    expected = torch.cat([outputs.last_hidden_state[row, places[row]] for row in range(4)])
    torch.testing.assert_close(found, expected)


def test_the_base_trains_its_blocks_and_keeps_its_embeddings(bases, tiny_base, data):
    model = AutoModel.from_pretrained(tiny_base)
    _, vocabulary = read_rows(data / "text", AutoTokenizer.from_pretrained(tiny_base))
    for base in bases.values():
        table = model.get_input_embeddings().weight[vocabulary]
        torch.testing.assert_close(base.embeddings, table)
        first = model.encoder.layer[-1].output.dense.weight
        assert not torch.equal(base.block.output.dense.weight, first)
    assert bases["linear"].bias.abs().max() > 0
    assert bases["dist"].bias.abs().max() == 0


@pytest.mark.parametrize("arm", {**ARMS, **masked.BIAS_ARMS})
def test_a_factor_multiplies_the_logits(bases, arm):
    head = start_head(arm, bases["linear"])
    if isinstance(head, masked.BiasedDistLayer):
        torch.nn.init.normal_(head.bias)
    states = torch.randn(5, 32)
    expected = 1.7 * head(states)
    torch.testing.assert_close(scale_logits_(head, 1.7)(states), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arm", ARMS)
def test_only_a_free_scale_starts_at_its_best(monkeypatch, arm):
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(20, 32, generator=generator)
    labels = torch.randint(20, (8, 3), generator=generator)
    states = vectors[labels] + 2 * torch.randn(8, 3, 32, generator=generator)
    places = torch.arange(3).expand(8, 3)
    monkeypatch.setattr(masked, "finish", lambda block, states, places: states.flatten(0, 1))
    part = Part(states, places, labels, torch.zeros(8))
    head = start_head(arm, Base({"train": part}, torch.nn.Identity(), vectors, torch.zeros(20)))
    found = fit(head, states.flatten(0, 1), labels.flatten())
    if arm in masked.HELD:
        assert head.h_exp == ARMS[arm].settings["h_exp"]
    else:
        assert found.factor == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("arm", ["dist -12, bias", "euclid, bias"])
def test_a_log_prior_is_added_to_the_logits_and_learns(bases, arm):
    head = start_head(arm, bases["linear"])
    assert isinstance(head, masked.BiasedDistLayer)
    torch.nn.init.normal_(head.bias)
    states, labels = torch.randn(5, 32), torch.tensor([0, 3, 3, 1, 2])
    distances = torch.cdist(*sides(head, states)).square()
    expected = F.cross_entropy(head.h_exp * (distances + head.eps).log() + head.bias, labels)
    loss = masked._loss(head, states, labels).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    one, other = (torch.autograd.grad(value, head.bias)[0] for value in (loss, expected))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert F.cross_entropy(head(states), labels).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("arm", ["dist -12, prior", "linear, prior"])
def test_a_prior_starts_at_the_share_of_the_log_counts_that_is_best(monkeypatch, arm):
    generator = torch.Generator().manual_seed(0)
    vectors, counts = torch.randn(6, 32, generator=generator), torch.tensor([88, 30, 9, 3, 1, 1])
    labels = torch.arange(6).repeat_interleave(counts).view(44, 3)
    states = 0.3 * vectors[labels] + torch.randn(44, 3, 32, generator=generator)
    monkeypatch.setattr(masked, "finish", lambda block, states, places: states.flatten(0, 1))
    monkeypatch.setattr(masked, "FITTED_TOKENS", 132)
    part = Part(states, torch.arange(3).expand(44, 3), labels, torch.zeros(44))
    base = Base({"train": part}, torch.nn.Identity(), vectors, torch.zeros(6))
    head, without = start_head(arm, base), start_head(masked.WITHOUT[arm], base)
    prior = labels.flatten().bincount(minlength=6).add(1).log()
    share = (head.bias / prior).mean().item()
    torch.testing.assert_close(head.bias.data, share * prior)
    tried = torch.linspace(0, 2, 401)
    with torch.no_grad():
        logits = without(states.flatten(0, 1))
        losses = [F.cross_entropy(logits + one * prior, labels.flatten()) for one in tried]
    assert share == pytest.approx(tried[torch.stack(losses).argmin()].item(), abs=0.006)
    assert 0 < share < 2


def sides(head, states):
    vectors = [states.double(), head.weight.double()]
    return [F.normalize(one, dim=-1) for one in vectors] if head.unit_sphere else vectors


def test_each_half_is_scored_at_the_factor_of_the_other(bases):
    base = bases["linear"]
    head, part = start_head("dist -12", base), base.parts["test"]
    found = evaluate(head, base.block, part)
    with torch.no_grad():
        logits = head(finish(base.block, part.states, part.places)).double()
    labels, odd = part.labels.flatten(), part.articles.repeat_interleave(3) % 2
    losses = torch.empty(len(labels), dtype=torch.float64)
    for half in (0, 1):
        chosen = odd == half
        scaled = found["factors"][half] * logits[chosen]
        losses[chosen] = F.cross_entropy(scaled, labels[chosen], reduction="none")
        other = fit(head, finish(base.block, part.states, part.places)[~chosen], labels[~chosen])
        assert other.factor == pytest.approx(found["factors"][half], abs=1e-5)
    assert found["loss"] == pytest.approx(losses.mean().item(), abs=1e-4)
    assert sum(found["tokens"]) == len(labels)
    weighted = np.average(found["losses"], weights=found["tokens"])
    assert weighted == pytest.approx(found["loss"], abs=1e-5)


def test_without_steps_an_arm_is_what_it_starts_from(bases):
    base = bases["dist"]
    found = run_once(base, "dist -12", 0.0, masked.TUNING_SEED, 0)
    assert found == {
        "h_exp": -12.0,
        **evaluate(start_head("dist -12", base), base.block, base.parts["validation"]),
    }


@pytest.mark.parametrize("arm", ARMS)
def test_steps_move_head_and_block_and_leave_the_base(bases, arm):
    base = bases["linear"]
    before = copy.deepcopy(base.block.state_dict())
    found = run_once(base, arm, 1e-3, 0, 3)
    assert found == run_once(base, arm, 1e-3, 0, 3)
    assert found["loss"] != run_once(base, arm, 1e-3, 1, 3)["loss"]
    assert len(found["losses"]) == 9
    for name, value in base.block.state_dict().items():
        assert torch.equal(value, before[name])
    if arm.startswith("annealed"):
        assert found["h_exp"] == -4.0


def test_gains_are_of_pairs_and_the_primary_one_is_outside_the_family(tmp_path):
    store = Store(tmp_path / "runs.jsonl", masked.KEYS)
    generator = np.random.default_rng(0)
    rates = {"linear": {"linear": 0.3 * 2e-4, "dist -12": 2e-4, "cosine": 2e-4}, "dist": {}}
    rates["dist"] = {"linear": 6e-4, "dist -12": 2e-4}
    tokens = [10, 30, 20, 10, 20]
    for base, arms in rates.items():
        for arm, rate in arms.items():
            for seed in range(3):
                losses = (4 + 0.1 * generator.random(5) + 0.3 * (arm == "dist -12")).tolist()
                row = {"losses": losses, "tokens": tokens, "as_trained": 5.0, "accuracy": 0.3}
                row["loss"] = float(np.average(losses, weights=tokens))
                store.get(lambda row=row: row, base=base, arm=arm, rate=rate, seed=seed)
    rows = {(row["base"], row["arm"]): row for row in summarize(store, rates, 3)}
    assert len(rows) == 6
    runs = [
        [store.rows["linear", arm, rates["linear"][arm], seed] for seed in range(3)]
        for arm in ("linear", "dist -12")
    ]
    expected = t_interval([one["loss"] - other["loss"] for one, other in zip(*runs, strict=True)])
    primary = rows["linear", "dist -12"]
    assert primary["gain"]["mean"] == pytest.approx(expected["mean"])
    assert primary["gain"]["half_width"] == pytest.approx(expected["half_width"])
    assert primary["verdict"] == "not worth it"
    assert "rejected" not in primary
    both = rows["both", "dist -12"]
    means = [rows[base, "dist -12"]["gain"]["mean"] for base in BASES]
    assert both["gain"]["mean"] == pytest.approx(sum(means) / 2)
    assert "rejected" in rows["linear", "cosine"]
    assert rows["linear", "linear"]["edge"]
    assert not primary["edge"]
    del store.rows["linear", "dist -12", 2e-4, 2]
    left = {(row["base"], row["arm"]) for row in summarize(store, rates, 3)}
    assert ("linear", "dist -12") not in left


@pytest.mark.parametrize(
    ("mean", "half_width", "articles", "rejected", "word"),
    [
        (0.03, 0.02, [0.01, 0.05], True, "worth it"),
        (0.03, 0.02, [0.01, 0.05], False, "undecided"),
        (0.03, 0.02, [-0.01, 0.05], True, "undecided"),
        (0.03, 0.04, [0.01, 0.05], True, "undecided"),
        (0.015, 0.01, [0.01, 0.02], True, "undecided"),
        (0.0, 0.01, [-0.01, 0.019], True, "not worth it"),
        (0.0, 0.01, [-0.01, 0.03], True, "undecided"),
        (0.5, None, [0.4, 0.6], True, "undecided"),
    ],
)
def test_both_intervals_must_agree(mean, half_width, articles, rejected, word):
    gain = {"mean": mean, "half_width": half_width}
    assert verdict({"gain": gain, "articles": articles, "rejected": rejected}) == word


@pytest.mark.parametrize(
    ("bias", "gain", "expected"),
    [
        ((0.15, 0.01), (-0.01, 0.01), "the reason"),
        ((0.15, 0.01), (-0.01, 0.02), "a part of it"),
        ((0.02, 0.03), (-0.10, 0.01), UNDECIDED),
        ((0.01, 0.005), (-0.10, 0.01), "not it"),
        ((0.01, 0.01), (-0.10, 0.01), UNDECIDED),
        ((0.15, None), (0.10, None), UNDECIDED),
    ],
)
def test_the_word_for_a_bias_follows_from_both_intervals(bias, gain, expected):
    bias, gain = ({"mean": mean, "half_width": half} for mean, half in (bias, gain))
    assert masked.reason(bias, gain) == expected
