"""Rows, wrong labels, read-outs and verdicts against plain computations; three steps of all."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from transformers import AutoModel, AutoTokenizer

from experiments.worth_it import classes
from experiments.worth_it.classes import (
    ARMS,
    NOISY,
    PRIMARY,
    REGIMES,
    Cell,
    batches,
    draw_rows,
    encode,
    encode_all,
    fit_inverse_temperature,
    load_parts,
    make_head,
    measure,
    noise_cost,
    read_parts,
    run_once,
    verdict,
)
from experiments.worth_it.store import Store

pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture(scope="module")
def task(data, small, tiny_base, tmp_path_factory):
    """The parts of the miniature and the last block of the tiny encoder."""
    folder = tmp_path_factory.mktemp("states")
    return load_parts(data / "probing", "banking77", folder, str(tiny_base))


@pytest.mark.parametrize("name", ["banking77", "sst2"])
def test_no_part_shares_rows_and_the_unknown_are_marked(data, name):
    parts = read_parts(data / "probing", name)
    texts = {part: {text for text, _ in rows} for part, rows in parts.items()}
    assert not texts["train"] & texts["test"]
    assert all(label >= 0 for _, label in parts["train"])
    for part in ("validation", "test"):
        known = {label for _, label in parts[part] if label >= 0}
        assert known <= set(range(3 if name == "banking77" else 2))
        assert any(label == -1 for _, label in parts[part])
    assert sum(label >= 0 for _, label in parts["validation"]) == 6


def test_the_copied_block_continues_from_the_frozen_ones(task, data, tiny_base):
    parts, block = task
    rows = parts["test"]
    chosen = torch.tensor([3, 0, 5])
    torch.testing.assert_close(encode(block, rows, chosen), rows.pooled[chosen])
    torch.testing.assert_close(encode_all(block, rows, chosen), rows.pooled[chosen])
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    text, _ = read_parts(data / "probing", "banking77")["test"][3]
    with torch.no_grad():
        model = AutoModel.from_pretrained(tiny_base).eval()
        alone = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
    torch.testing.assert_close(rows.pooled[3], alone)


def test_a_seed_draws_the_same_rows_with_their_share_of_wrong_labels():
    labels = torch.arange(4).repeat(500)
    rows, clean = draw_rows(labels, Cell("banking77", 0, 0.0), 3)
    again, noisy = draw_rows(labels, Cell("banking77", 0, 0.3), 3)
    assert torch.equal(rows, again)
    assert torch.equal(clean, labels[rows])
    assert (noisy != clean).double().mean().item() == pytest.approx(0.3, abs=0.04)
    few, given = draw_rows(labels, Cell("banking77", 5, 0.0), 3)
    assert given.bincount().tolist() == [5, 5, 5, 5]
    assert len(set(few.tolist())) == 20


def test_every_row_stands_in_a_batch_before_one_comes_again():
    lengths = torch.randint(3, 30, (50,))
    regime = REGIMES["head"]._replace(num_steps=9, batch_rows=10)
    found = torch.cat(batches(lengths, regime, 0)[:5])
    assert sorted(found.tolist()) == list(range(50))
    assert len(batches(lengths, regime, 0)) == 9


def test_the_fitted_temperature_has_the_lowest_loss():
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(200, 4, generator=generator)
    labels = torch.distributions.Categorical(logits=0.3 * logits).sample()
    factor = fit_inverse_temperature(logits, labels)
    losses = {
        one: torch.nn.functional.cross_entropy(one * logits, labels).item()
        for one in (0.98 * factor, factor, 1.02 * factor)
    }
    assert min(losses, key=losses.get) == factor


def test_read_outs_of_the_frozen_encoder_are_class_means_and_neighbors():
    generator = torch.Generator().manual_seed(0)
    bank, bank_labels = torch.randn(30, 6, generator=generator), torch.arange(30) % 3
    features = torch.randn(20, 6, generator=generator)
    labels = torch.tensor([0, 1, 2, -1] * 5)
    found = measure(None, features, labels, (bank, bank_labels), 1.0)
    right, nearest = 0, []
    for feature, label in zip(features, labels, strict=True):
        cosines = [(feature @ row / feature.norm() / row.norm()).item() for row in bank]
        nearest.append(max(cosines))
        right += label >= 0 and bank_labels[cosines.index(max(cosines))] == label
    assert found["accuracy"]["nearest"] == pytest.approx(int(right) / 15)
    expected = roc_auc_score((labels >= 0).numpy(), nearest)
    assert found["auroc"]["nearest"] == pytest.approx(expected)
    assert "loss" not in found


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("name", REGIMES)
def test_three_steps_of_every_arm(task, arm, name):
    regime = REGIMES[name]._replace(num_steps=3)
    found = run_once(*task, PRIMARY, regime, arm, 1e-3, 0)
    again = run_once(*task, PRIMARY, regime, arm, 1e-3, 0)
    assert found == again
    assert min(found["test"]["accuracy"].values()) >= 0
    assert ("head" in found["test"]["accuracy"]) == (arm != "frozen")


def test_the_control_starts_with_the_logits_of_the_cosine_head():
    """For a row of average length, up to the lengths of the means, which the cosine divides by."""
    torch.manual_seed(0)
    features, labels = torch.randn(60, 8), torch.arange(60) % 4
    head = make_head(classes.CONTROL, features, labels, 4, 0)
    means = torch.stack([F.normalize(features[labels == c], dim=-1).mean(0) for c in range(4)])
    row = F.normalize(torch.randn(8), dim=-1)
    average = row * features.norm(dim=-1).mean()
    torch.testing.assert_close(head(average[None])[0], classes.COSINE_SCALE * means @ row)


def test_the_tuning_seed_never_sees_the_test_part(task):
    regime = REGIMES["head"]._replace(num_steps=1)
    assert "test" not in run_once(*task, PRIMARY, regime, "linear", 1e-3, classes.TUNING_SEED)


@pytest.mark.parametrize(
    ("mean", "high", "word"),
    [
        (0.02, 0.039, "worth it"),
        (0.02, 0.041, "undecided"),
        (0.0, 0.009, "not worth it"),
        (0.005, 0.009, "not worth it"),
        (0.008, 0.015, "undecided"),
        (0.5, None, "undecided"),
    ],
)
def test_the_words_are_those_of_the_protocol(mean, high, word):
    half_width = None if high is None else high - mean
    assert verdict({"mean": mean, "half_width": half_width}, 0.01) == word


def test_a_gain_that_holm_does_not_reject_is_undecided():
    path = Path(__file__).parents[3] / "docs" / "worth_it" / "classes.jsonl"
    store = Store(path, classes.KEYS, deadline=0)  # nothing is trained
    cells = classes.CELLS["block"]
    rates = classes.run_cells(store, path.parent, REGIMES["block"], cells, 5, "")
    rows = classes.summarize(store, REGIMES["block"], rates, 5)
    words = {(row["cell"], row["arm"]): row["gain_verdict"] for row in rows}
    few = classes.cell_name(Cell("banking77", 5, 0.0))
    assert words[few, "cosine"] == words[few, "annealed"] == "undecided"
    primary = classes.cell_name(PRIMARY)
    assert words[primary, "dist -12"] == words[primary, "cosine"] == "worth it"
    assert all(row.get("rejected", True) for row in rows if row["gain_verdict"] == "worth it")


def test_the_cost_of_noise_is_a_difference_of_differences():
    accuracies = {
        (PRIMARY, "linear"): [0.9, 0.91],
        (NOISY, "linear"): [0.8, 0.81],
        (PRIMARY, "dist -12"): [0.9, 0.9],
        (NOISY, "dist -12"): [0.7, 0.71],
    }
    rows = [
        {
            "cell": classes.cell_name(cell),
            "rates_of": "one",
            "arm": arm,
            "own": values,
        }
        for (cell, arm), values in accuracies.items()
    ]
    (found,) = noise_cost(rows)
    assert found["more"]["mean"] == pytest.approx(0.095)  # of 0.1 and 0.09
    assert found["linear_lost"]["mean"] == pytest.approx(0.1)
    assert math.isclose(found["lost"]["mean"], 0.195)
    assert found["verdict"] == "confirmed"
