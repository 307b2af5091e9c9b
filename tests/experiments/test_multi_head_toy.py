"""The toy language: its facts, its training, and which setting is reported."""

import math

import pytest
import torch

from experiments import multi_head_toy
from experiments.multi_head_toy import (
    BAYES_LOSS,
    SETTINGS,
    TOLERANCE,
    Setting,
    next_token_probs,
    run,
    show,
    train,
)
from experiments.stacked import StackedMLP, seeded_generators
from harmonic_sft.losses import LOSSES
from harmonic_sft.models import build_head


def test_bigrams_go_to_the_partner_class_and_back():
    probs = next_token_probs()
    for token, row in enumerate(probs.tolist()):
        partner = {"A": "B", "B": "A", "C": "D", "D": "C"}["ABCD"[token // 10]]
        following = [next_ for next_, prob in enumerate(row) if prob > 0]
        assert following == [i for i in range(40) if "ABCD"[i // 10] == partner]
    assert (probs > 0).sum() == 400
    torch.testing.assert_close(probs.sum(-1), torch.ones(40))


def test_a_third_feature_makes_eight_classes_of_four_pairs():
    probs = next_token_probs(8)
    for token, row in enumerate(probs.tolist()):
        side = 1 if token // 10 % 2 == 0 else -1
        following = [next_ for next_, prob in enumerate(row) if prob > 0]
        assert following == [10 * (token // 10 + side) + i for i in range(10)]


def test_the_silhouette_is_that_of_the_definition():
    row = multi_head_toy._row(Setting(), 2, [3], num_epochs=20)
    model, _ = train(Setting(), 2, [3], num_epochs=20)
    rows = model.embedding[0].detach().double()
    gaps = [[float((a - b).norm()) for b in rows] for a in rows]
    scores = []
    for token, gap in enumerate(gaps):
        means = [sum(gap[10 * c : 10 * c + 10]) / 10 for c in range(4)]
        own = means.pop(token // 10) * 10 / 9  # without itself
        scores.append((min(means) - own) / max(min(means), own))
    assert row["silhouette"] == [pytest.approx(sum(scores) / 40, abs=2e-5)]


def test_clusters_tighten_where_the_silhouette_rises_for_all_seeds():
    def setting(num_classes, first, last):
        rows = [{"silhouette": first}, {"silhouette": last}]
        return {"num_classes": num_classes, "rows": rows}

    tighter = setting(4, [0.1, 0.2, 0.3], [0.21, 0.3, 0.41])
    unclear = setting(8, [0.1, 0.2, 0.3], [0.3, 0.1, 0.3])
    found = multi_head_toy.compare_silhouettes([tighter, unclear])
    assert [row["verdict"] for row in found] == ["higher", "undecided"]
    assert found[0]["gain"]["mean"] == pytest.approx(0.32 / 3)


def test_the_bayes_loss_is_the_entropy_of_the_next_token():
    entropies = torch.special.entr(next_token_probs().double()).sum(-1)
    torch.testing.assert_close(entropies, torch.full((40,), math.log(10)).double())
    assert math.log(10) == BAYES_LOSS


def test_the_first_loss_is_the_products_mean_over_all_400_bigrams():
    _, losses = train(Setting(), 4, [7], num_epochs=1)
    model = StackedMLP(seeded_generators([7]), vocab_size=40, num_inputs=1, hidden_size=64)
    current, following = next_token_probs().nonzero(as_tuple=True)
    settings = {"num_heads": 4, "inner": {"name": "linear", "bias": False}}
    head = build_head({"name": "multi_head", **settings}, hidden_size=64, vocab_size=40)
    head.initialize_(model.embedding[0].detach())
    hidden_states = model(current.view(1, -1, 1))[0].detach()
    expected = LOSSES["cross_entropy"]()(head, hidden_states, following)
    torch.testing.assert_close(losses[0], expected.mean().detach())


def test_training_reaches_the_bayes_loss():
    _, losses = train(Setting(), 8, [0], num_epochs=400)
    assert BAYES_LOSS - 1e-6 < losses.item() < BAYES_LOSS + TOLERANCE


def fake_row(setting, num_heads, seeds, num_epochs):
    """Misses the Bayes loss where D is 32; explained variance rises where D is 64."""
    percent = num_heads if setting.hidden_size == 64 else -num_heads
    return {
        "num_heads": num_heads,
        "mean_percent": float(percent),
        "percent": [float(percent)] * len(seeds),
        "excess_loss": [0.1 if setting.hidden_size == 32 else 1e-5] * len(seeds),
        "silhouette": [num_heads / 64 + seed / 100 * num_heads for seed in seeds],
    }


@pytest.mark.parametrize(
    ("settings", "chosen", "is_monotone", "shown"),
    [
        (
            SETTINGS,
            1,
            True,
            "4 classes, D = 64, learning rate 0.001, weight decay 0.01: the mean rises",
        ),
        ((Setting(hidden_size=128),), 0, False, "the mean does not always rise"),
        ((Setting(hidden_size=32),), None, None, "of every setting"),
    ],
)
def test_the_first_setting_at_the_bayes_loss_is_reported(
    settings, chosen, is_monotone, shown, monkeypatch, capsys
):
    monkeypatch.setattr(multi_head_toy, "_row", fake_row)
    monkeypatch.setattr(multi_head_toy, "SETTINGS", settings)
    payload = run(num_seeds=2, num_epochs=1)
    assert (payload["chosen"], payload["is_monotone"]) == (chosen, is_monotone)
    show(payload)
    printed = " ".join(capsys.readouterr().out.split())  # long titles are folded
    assert shown in printed
    assert ("blog" in printed) == (chosen is not None)
