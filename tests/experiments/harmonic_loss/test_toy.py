"""Distance weights end on their points; linear weights grow and cannot fit the center."""

import pytest

from experiments.harmonic_loss.toy import run, train


def test_harmonic_weights_stop_at_the_points():
    row = train("five", "dist", num_seeds=2, num_steps=1500)
    assert row["accuracy"] == [1.0, 1.0]
    assert max(row["distance"]) < 0.01
    assert max(map(abs, row["growth"])) < 0.001


def test_linear_weights_grow_and_miss_the_center():
    row = train("five", "linear", num_seeds=2, num_steps=1500)
    assert row["accuracy"] == [0.8, 0.8]
    assert min(row["growth"]) > 0.01


def test_both_sets_and_heads_are_trained():
    rows = run(num_seeds=2, num_steps=20)["rows"]
    assert [(row["points"], row["head"]) for row in rows] == [
        ("two", "linear"),
        ("two", "dist"),
        ("five", "linear"),
        ("five", "dist"),
    ]
    for row in rows:
        assert len(row["steps"]) == len(row["norms"]) == 20
        assert row["norms"][0] == pytest.approx(0.55, abs=0.25)
