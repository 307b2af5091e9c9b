"""Modular addition: its examples, its training, and when a seed counts as having grokked."""

from itertools import chain
from statistics import fmean

import pytest
import torch

from experiments import multi_head_modular_addition as experiment
from experiments.multi_head_modular_addition import (
    NUM_HEADS,
    draw_examples,
    evaluated_epochs,
    first_stable_epoch,
    run,
    show,
    token_losses,
    train,
)
from experiments.stacked import StackedMLP, seeded_generators


def test_labels_are_sums_modulo_31_and_seeds_have_examples_of_their_own():
    pairs, labels = draw_examples(seeded_generators([0, 1]))
    assert pairs.shape == (2, 1000, 2)
    for pair, label in zip(pairs.flatten(0, 1).tolist(), labels.flatten().tolist(), strict=True):
        assert label == sum(pair) % 31
    assert pairs.unique().tolist() == list(range(31))
    assert torch.equal(pairs[1], draw_examples(seeded_generators([1]))[0][0])
    assert not torch.equal(pairs[0], pairs[1])


def test_over_half_of_the_test_examples_are_trained_on():
    """Drawn with replacement: 1 - (1 - 1 / 961) ** 800 = 56.5 %."""
    pairs, _ = draw_examples(seeded_generators(range(20)))
    shares = []
    for one in pairs.tolist():
        training = {tuple(pair) for pair in one[:800]}
        shares.append(fmean(tuple(pair) in training for pair in one[800:]))
    assert fmean(shares) == pytest.approx(1 - (1 - 1 / 961) ** 800, abs=0.02)


def test_seeds_trained_together_are_those_trained_alone():
    together, accuracies = train(2, [0, 1], num_epochs=3)
    for seed in range(2):
        alone, accuracy = train(2, [seed], num_epochs=3)
        torch.testing.assert_close(accuracies[..., seed], accuracy[..., 0])
        for name, parameter in together.named_parameters():
            expected = alone.get_parameter(name)[0]
            torch.testing.assert_close(parameter[seed], expected, rtol=1e-4, atol=1e-5)


def test_every_number_of_heads_sees_the_same_batches(monkeypatch):
    seen: list[list[int]] = []

    def keep(model, pairs, labels, num_heads):
        seen.append(labels.flatten().tolist())
        return token_losses(model, pairs, labels, num_heads)

    monkeypatch.setattr(experiment, "token_losses", keep)
    train(1, [0], num_epochs=2)
    train(8, [0], num_epochs=2)
    assert len(seen) == 100
    assert seen[:50] == seen[50:]
    first, second = list(chain(*seen[:25])), list(chain(*seen[25:50]))
    assert sorted(first) == sorted(second)
    assert first != second


@pytest.mark.parametrize(
    ("num_epochs", "expected"), [(3, [3]), (5, [5]), (12, [5, 10, 12]), (15, [5, 10, 15])]
)
def test_every_fifth_epoch_and_the_last_are_evaluated(num_epochs, expected):
    assert evaluated_epochs(num_epochs) == expected


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ([0.95] * 5, 5),
        ([0.95] * 4, None),
        ([0.95] * 4 + [0.9] + [0.95] * 5, 30),
        ([0.1, 0.2] + [0.91] * 5 + [0.0], 15),
        ([], None),
    ],
)
def test_an_epoch_counts_once_accuracy_stays_above_for_20_epochs(accuracies, expected):
    assert first_stable_epoch(accuracies) == expected


def test_runs_of_all_heads_are_compared_seed_by_seed(monkeypatch, capsys):
    """One head arrives at epochs 30, 40 and never; two heads at 25, never and 50; others never."""
    arrivals = {1: [30, 40, None], 2: [25, None, 50]}

    def fake_train(num_heads, seeds, num_epochs):
        accuracies = torch.zeros(len(evaluated_epochs(num_epochs)), 2, len(seeds))
        for seed, epoch in enumerate(arrivals.get(num_heads, [None] * 3)):
            if epoch is not None:
                accuracies[epoch // 5 - 1 :, :, seed] = 1.0
        sizes = {"vocab_size": 31, "num_inputs": 2, "hidden_size": 16}
        return StackedMLP(seeded_generators(seeds), **sizes), accuracies

    monkeypatch.setattr(experiment, "train", fake_train)
    payload = run(num_seeds=3, num_epochs=100)
    assert [row["num_heads"] for row in payload["rows"]] == list(NUM_HEADS)
    assert [row["num_earlier"] for row in payload["rows"]] == [0, 2, 0, 0]
    assert [row["median_test_epoch"] for row in payload["rows"]] == [40, 50, None, None]
    assert payload["rows"][1]["train_epochs"] == [25, None, 50]
    assert payload["rows"][0]["curves"]["test"][-1] == pytest.approx(2 / 3, abs=1e-4)
    show(payload)
    assert "3 seeds of 100 epochs" in capsys.readouterr().out
