"""Every part on the tiny base, or on results made by hand."""

import pytest
import torch

from harmonic_sft.experiments import family, geometry_runs
from harmonic_sft.experiments.family import configure, finish
from harmonic_sft.experiments.geometry_bench import Bench
from harmonic_sft.experiments.geometry_runs import (
    calibration,
    common_levels,
    loss_curve,
    overhead,
    refresh,
    subwords,
    sweep,
    tokens,
)
from harmonic_sft.results import write_results


@pytest.fixture
def bench(family_configs, tmp_path):
    return Bench(
        configs=family_configs, family=tmp_path / "family", output=tmp_path / "out", seeds=[42]
    )


def by_name(payload):
    return {row["name"]: row for row in payload["rows"]}


def test_overhead_is_read_from_the_benchmark(bench):
    with pytest.raises(ValueError, match=r"overhead: expected the measurement .* Run python scr"):
        overhead(bench)

    def arm(ratio):
        return {"median_seconds": 0.5 * ratio, "median_ratio_to_harmonic": ratio}

    step = {"dist, harmonic": arm(1.0), "rotation of dist, harmonic": arm(1.085)}
    sizes = {"30522": {"step": step}, "50257": {"step": {"dist, knn_label_smoothing": arm(0.99)}}}
    write_results(bench.output, "benchmark_losses", {"steps": 7, "vocab_sizes": sizes})
    payload = overhead(bench)
    assert payload["rounds"] == 7
    assert [row["overhead"] for row in payload["rows"]] == pytest.approx([0, 0.085, -0.01])
    assert payload["finding"] == (
        "a step against dist, harmonic: rotation of dist, harmonic +8.5 % (V = 30,522), "
        "dist, knn_label_smoothing -1.0 % (V = 50,257); medians, no verdict"
    )


def test_calibration_compares_finished_runs_seed_by_seed(family_configs, tmp_path):
    bench = Bench(
        configs=family_configs, family=tmp_path / "family", output=tmp_path, seeds=[42, 43]
    )
    for place, name in enumerate(geometry_runs.CALIBRATED):
        for seed in bench.seeds:
            final = {"ece": 0.1 + 0.01 * place + seed, "post_hoc_ece": 0.05 + seed * place}
            write_results(bench.family / f"{name}-{seed}/results", "train", {"final": final})
    payload = calibration(bench)
    rows = by_name(payload)
    assert rows["dist_wasserstein"]["ece"]["values"] == pytest.approx([42.13, 43.13])
    assert "dist_harmonic" not in rows["dist_harmonic"]["against"]
    found = rows["rotation_wasserstein"]["against"]["dist_harmonic"]
    assert found["ece"]["mean"] == pytest.approx(0.03)
    assert found["ece"]["verdict"] == "higher"
    assert found["post_hoc_ece"]["mean"] == pytest.approx(3 * 42.5)
    assert payload["finding"].startswith("rotation_wasserstein: +4.00 +- 0.00 (higher) points of")
    (bench.family / "rotation_dist-43" / "results" / "train.json").unlink()
    with pytest.raises(ValueError, match=r"finished runs of rotation_dist with seeds \[42, 43\]"):
        calibration(bench)


def test_tokens_are_counted_to_levels_that_every_run_reaches(bench):
    payload = tokens(bench)
    rows = by_name(payload)
    assert set(rows) == set(geometry_runs.COUNTED)
    levels = payload["levels"]
    for row in rows.values():
        (curve,) = row["curves"]
        assert curve["tokens"][0] == 0
        assert len(curve["tokens"]) == 11  # before, and after each tenth of 10 steps
        assert curve["tokens"] == sorted(curve["tokens"])
        assert 500 < curve["tokens"][-1] < 10 * 8 * 24  # 10 steps of 8 rows, without padding
        assert min(curve["losses"]) <= levels[0]
        reached = [found["mean"] for found in row["reached"]]
        assert reached == sorted(reached, reverse=True)  # a higher level comes sooner
    against = rows["rotation_wasserstein"]["reached"][0]["against"]
    assert against["dist_harmonic"]["mean"] == pytest.approx(
        rows["rotation_wasserstein"]["reached"][0]["mean"]
        - rows["dist_harmonic"]["reached"][0]["mean"]
    )
    assert (
        f"tokens to {levels[0]:.2f} nats, against dist_harmonic: linear_ce " in payload["finding"]
    )


def test_levels_lie_between_the_worst_end_and_the_lowest_start():
    curves = [[8.0, 4.0, 3.001], [9.0, 2.0, 2.5], [7.0, 3.0, 2.9]]
    assert common_levels(curves) == pytest.approx([3.01, 4.01, 5.01])
    assert common_levels([[5.0, 4.0], [3.5, 2.0]]) == [4.0]  # one starts below what others reach


def test_a_curve_has_the_evaluations_alone_and_none_twice():
    history = [
        {"step": 0, "eval_post_hoc_loss": 5.0},
        {"step": 2, "loss": 4.0, "num_input_tokens_seen": 100},
        {"step": 2, "eval_post_hoc_loss": 3.0, "num_input_tokens_seen": 100},
        {"step": 2, "eval_post_hoc_loss": 3.0, "num_input_tokens_seen": 100},
    ]
    assert loss_curve(history) == {"tokens": [0, 100], "losses": [5.0, 3.0]}


def test_neighbors_are_followed_at_every_refresh(bench, monkeypatch):
    payload = refresh(bench)
    rows = by_name(payload)
    assert [row["refresh_every"] for row in payload["rows"]] == [None, 5, 2, 1]
    assert rows["refresh_never"]["steps"] == list(range(11))
    assert rows["refresh_5"]["steps"] == [0, 5, 10]
    for row in rows.values():
        for kind in ("all", "weighted"):
            means = [found["mean"] for found in row["kept"][kind]]
            assert means[0] == 1
            assert all(0 <= mean <= 1 for mean in means)
    kept = {kind: found[-1]["mean"] for kind, found in rows["refresh_never"]["kept"].items()}
    assert kept["weighted"] < 1
    assert kept["weighted"] != kept["all"]
    assert "post_hoc_loss" in rows["refresh_1"]["difference"]
    assert "difference" not in rows["refresh_never"]
    assert not list(bench.output.rglob("checkpoint-*"))  # measured and deleted

    def never(run):
        raise AssertionError(run.output_dir)

    monkeypatch.setattr(family, "train", never)
    assert refresh(bench) == payload


def test_the_sweep_takes_every_weight_and_the_plain_arm(bench, monkeypatch):
    monkeypatch.setattr(geometry_runs, "EPSILONS", (0.4,))
    monkeypatch.setattr(geometry_runs, "LAMBDAS", (1.0,))
    payload = sweep(bench)
    named = [(row["name"], row["knob"], row["value"]) for row in payload["rows"]]
    assert named == [
        ("dist_harmonic", None, 0.0),
        ("epsilon_0.4", "epsilon", 0.4),
        ("lambda_1", "lambda", 1.0),
    ]
    losses = {row["post_hoc_loss"]["mean"] for row in payload["rows"]}
    assert len(losses) == 3  # each weight was really used
    assert "lambda: ece undecided everywhere" in payload["finding"]  # one seed


def test_subwords_are_described_before_and_after_training(bench):
    payload = subwords(bench)
    assert (payload["after"], payload["kept"]) == (None, None)
    assert payload["finding"].startswith("before training, ")
    assert {kind: found["tokens"] for kind, found in payload["before"].items()} == {
        "word": 104,
        "special": 5,
    }
    finish(configure(bench.file("dist_harmonic"), 42, bench.family / "dist_harmonic-42"))
    torch.manual_seed(1)  # what is drawn outside plays no part
    again = subwords(bench)
    assert again["before"] == payload["before"]
    assert again["after"]["word"]["tokens"] == 104
    assert 0 < again["kept"] < 1
    assert again["finding"].startswith("after training, ")
