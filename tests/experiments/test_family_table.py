"""Differences to the linear head, seed by seed where the seeds are the same; the start of runs."""

import pytest

from experiments.evidence import spread
from experiments.family_table import add_differences, measure_start, show_family

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
        row("dist", "dist", {"name": "harmonic"}, [1.5, 2.5, 4.53]),
        row("some", "dist", {"name": "harmonic"}, [1.0, 2.0], seeds=(1, 2)),
        {"name": "failed", "errors": {"seed 1": "ValueError: no"}},
    ]


def test_every_row_with_the_same_seeds_is_compared(rows):
    assert add_differences(rows, "MEN") == "linear"
    assert [row["name"] for row in rows if "difference" in row] == ["smooth", "dist"]
    found = rows[2]["difference"]
    assert found["loss"]["mean"] == pytest.approx(0.51)
    assert found["loss"]["half_width"] == pytest.approx(4.303 * 0.01, rel=1e-3)
    assert found["loss"]["verdict"] == "higher"
    assert found["spearman_cosine"]["mean"] == pytest.approx(1.02)
    assert rows[0]["difference"]["loss"]["mean"] == pytest.approx(-1 / 3)
    assert rows[0]["difference"]["loss"]["half_width"] == pytest.approx(4.303 / 3, rel=1e-3)
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
    del rows[2]["metrics"]["error_cosine"]  # one of its runs is never wrong
    name = add_differences(rows, "MEN")
    results = {"seeds": [1, 2, 3], "rated": "MEN", "rows": rows}
    show_family("x", {**results, "compared_with": name})
    shown = capsys.readouterr().out
    assert "Difference to linear" in shown
    assert shown.index("some (2 of 3 seeds)") < shown.index("Difference to linear")
    show_family("x", {**results, "compared_with": None})
    assert "Difference" not in capsys.readouterr().out


def run(losses, *, old=3.0, swapped=None):
    swap = {"old_head": {"loss": old}}
    if swapped is not None:
        swap["swapped"] = {"loss": swapped}
    history = [
        {"eval_loss": loss, "num_input_tokens_seen": 100 * step} if step else {"eval_loss": loss}
        for step, loss in enumerate(losses)
    ]
    history.insert(1, {"loss": 9.9, "num_input_tokens_seen": 50})  # a training loss
    before, final = {"loss": losses[0]}, {"loss": losses[-1]}
    return {"swap": swap, "before": before, "final": final, "history": history}


def test_tokens_to_the_old_heads_loss_are_linear_between_evaluations():
    found = measure_start([run([5, 4, 2, 1], swapped=8.0), run([5, 3.5, 3, 1], swapped=10.0)])
    assert found["tokens"]["values"] == [150, 200]
    means = [found[key]["mean"] for key in ("old_head", "swapped", "before", "first", "after")]
    assert means == [3.0, 9.0, 5.0, 3.75, 1.0]


def test_what_never_arrives_or_was_hardly_evaluated_has_no_count():
    assert measure_start([run([5, 4, 2, 1]), run([5, 4.5, 4, 3.5])])["tokens"] is None
    assert measure_start([run([5, 1])])["tokens"] is None
    assert measure_start([run([5, 1]), run([5])])["first"] is None
    assert measure_start([run([3, 1], old=3.0)])["tokens"]["mean"] == 0
    assert measure_start([run([5, 4, 2, 1])])["swapped"] is None
    assert measure_start([run([5, 1]), {"before": {}, "final": {}, "history": []}]) is None


def test_the_start_is_printed_where_there_is_one(rows, capsys):
    rows[2]["start"] = measure_start([run([5, 4, 2, 1], swapped=7.0)])
    results = {"seeds": [1, 2, 3], "rated": None, "rows": rows, "compared_with": None}
    show_family("x", results)
    shown = capsys.readouterr().out
    assert shown.count("The start") == 1
    assert "150" in shown
    assert "7.00" in shown
