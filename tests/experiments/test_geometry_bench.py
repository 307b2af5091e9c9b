"""Arms are trained once, read from the family where settings agree, and compared by seed."""

import shutil

import pytest

from harmonic_sft.experiments import family
from harmonic_sft.experiments.family import configure, finish
from harmonic_sft.experiments.geometry_bench import (
    METRICS,
    Arm,
    Bench,
    add_differences,
    metrics,
    tell,
    tell_decided,
    train_arms,
)


@pytest.fixture
def bench(family_configs, tmp_path):
    return Bench(
        configs=family_configs, family=tmp_path / "family", output=tmp_path / "out", seeds=[42, 43]
    )


def test_arms_differ_in_their_overrides_and_are_trained_once(bench, monkeypatch):
    arms = [
        Arm("short", "dist_harmonic", ("training.max_steps=2",)),
        Arm("shorter", "dist_harmonic", ("training.max_steps=1", "schedule.decay_ratio=0")),
    ]
    seen = []
    found = train_arms(bench, arms, after_fn=lambda run: seen.append(run.output_dir.name))
    assert seen == ["short-42", "shorter-42", "short-43", "shorter-43"]
    assert [one.results["steps"] for one in found["short"]] == [2, 2]
    assert [one.results["steps"] for one in found["shorter"]] == [1, 1]
    assert [one.run.seed for one in found["short"]] == [42, 43]

    def never(run):
        raise AssertionError(run.output_dir)

    monkeypatch.setattr(family, "train", never)
    again = train_arms(bench, arms)
    assert [one.results for one in again["short"]] == [one.results for one in found["short"]]


def test_a_run_of_the_family_is_taken_over_only_with_the_same_settings(bench):
    short = ("training.max_steps=2",)
    file = bench.file("dist_harmonic")
    results = finish(configure(file, 42, bench.family / "dist_harmonic-42", short))
    seen = []
    arms = [
        Arm("same", "dist_harmonic", short),
        Arm("other", "dist_harmonic", (*short, "h_exp.start=-8", "h_exp.end=-8")),
    ]
    one_seed = Bench(
        configs=bench.configs, family=bench.family, output=bench.output, seeds=bench.seeds[:1]
    )
    found = train_arms(one_seed, arms, after_fn=lambda run: seen.append(run.output_dir.name))
    assert found["same"][0].results == results
    assert seen == ["other-42"]
    assert found["other"][0].results["final"] != results["final"]
    shutil.rmtree(bench.output)


def test_a_file_that_is_not_there_is_named(bench):
    with pytest.raises(ValueError, match=r"configs: expected a folder with none\.yaml, got "):
        bench.file("none")
    assert bench.max_steps("dist_harmonic") == 10
    assert bench.finished("dist_harmonic", 42) is None


def row(name, value, losses):
    values = {"mean": sum(losses) / len(losses), "std": 0.0, "values": losses}
    return {"name": name, "value": value, **dict.fromkeys(METRICS, values)}


def test_differences_are_told_with_their_verdicts():
    rows = [row("none", 0, [1.0, 2.0]), row("some", 0.1, [1.5, 2.5]), row("more", 1, [1.0, 3.0])]
    add_differences(rows)
    assert "difference" not in rows[0]
    assert (
        tell(rows[1:], "ece", digits=1) == "some +0.5 +- 0.0 (higher), more +0.5 +- 0.5 (undecided)"
    )
    assert tell_decided(rows[1:], "ece") == "higher at 0.1"
    assert tell_decided(rows[2:], "ece") == "undecided everywhere"
    lower = [rows[0], row("less", 3, [0.5, 1.5]), rows[1]]
    add_differences(lower)
    assert tell_decided(lower[1:], "accuracy") == "lower at 3 and higher at 0.1"


def test_metrics_are_spread_over_the_seeds(bench):
    arm = Arm("short", "linear_ce", ("training.max_steps=2",))
    runs = train_arms(bench, [arm])["short"]
    found = metrics(runs)
    assert set(found) == set(METRICS)
    assert found["ece"]["values"] == [one.results["final"]["ece"] for one in runs]
