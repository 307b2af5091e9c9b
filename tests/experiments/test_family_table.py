"""Differences to the linear head are taken seed by seed, where the seeds are the same."""

import pytest

from experiments.evidence import spread
from experiments.family_table import add_differences, show_family

PLAIN = {"name": "cross_entropy", "label_smoothing": 0.0, "z_loss": 0.0}


def row(name, head, loss, losses, seeds=(1, 2, 3)):
    metrics = {"loss": spread(losses), "post_hoc_loss": spread(losses), "accuracy": spread(losses)}
    metrics |= {"error_cosine": spread(losses), "post_hoc_inverse_temperature": spread(losses)}
    return {
        "name": name,
        "errors": {},
        "seeds": list(seeds),
        "head": {"name": head},
        "loss": loss,
        "metrics": metrics,
        "word_similarity": {"MEN": {"spearman_cosine": spread([2 * loss for loss in losses])}},
    }


@pytest.fixture
def rows():
    return [
        row("smooth", "linear", {**PLAIN, "label_smoothing": 0.1}, [1.0, 2.0, 3.0]),
        row("linear", "linear", PLAIN, [1.0, 2.0, 4.0]),
        row("dist", "dist", {"name": "harmonic"}, [1.5, 2.5, 4.5]),
        row("some", "dist", {"name": "harmonic"}, [1.0, 2.0], seeds=(1, 2)),
        {"name": "failed", "errors": {"seed 1": "ValueError: no"}},
    ]


def test_every_row_with_the_same_seeds_is_compared(rows):
    assert add_differences(rows, "MEN") == "linear"
    assert [row["name"] for row in rows if "difference" in row] == ["smooth", "dist"]
    found = rows[2]["difference"]
    assert found["loss"] == {"mean": 0.5, "standard_error": 0.0, "verdict": "higher"}
    assert found["spearman_cosine"]["mean"] == 1.0
    assert rows[0]["difference"]["loss"]["mean"] == pytest.approx(-1 / 3)
    assert rows[0]["difference"]["loss"]["standard_error"] == pytest.approx(1 / 3)
    assert rows[0]["difference"]["loss"]["verdict"] == "undecided"
    assert "post_hoc_inverse_temperature" not in found


def test_recipes_are_compared_with_their_own_linear_head(rows):
    lora = [
        row(f"lora_{one['name']}", one["head"]["name"], one["loss"], [9.0, 9.0, 9.0])
        for one in rows[1:3]
    ]
    for one in lora:
        one["trains"] = {"peft": {"r": 8}}
    assert add_differences([*rows, *lora], "MEN") == "the linear head that trains the same parts"
    assert [one.get("compared_with") for one in rows] == ["linear"] * 3 + [None] * 2
    assert [one["compared_with"] for one in lora] == ["lora_linear"] * 2
    assert lora[1]["difference"]["loss"]["mean"] == 0
    assert "difference" not in lora[0]


def test_without_a_linear_head_nothing_is_compared(rows):
    others = [rows[0], *rows[2:]]
    assert add_differences(others, "MEN") is None
    assert not any("difference" in row for row in others)


def test_the_table_of_differences_is_printed(rows, capsys):
    name = add_differences(rows, "MEN")
    results = {"folder": "x", "seeds": [1, 2, 3], "rated": "MEN", "rows": rows}
    show_family({**results, "compared_with": name})
    shown = capsys.readouterr().out
    assert "Difference to linear" in shown
    assert shown.index("some (2 of 3 seeds)") < shown.index("Difference to linear")
    show_family({**results, "compared_with": None})
    assert "Difference" not in capsys.readouterr().out
