"""A folder of YAML files is trained, compared and gone on with; what fails is a row of its own."""

import json
import logging
from pathlib import Path

import pytest
import yaml
from matplotlib.image import imread

from harmonic_sft.experiments import family
from harmonic_sft.experiments.evidence import spread
from harmonic_sft.experiments.family import BASELINE, compare_family, config_files
from harmonic_sft.results import read_results
from harmonic_sft.training import load_run_config
from harmonic_sft_cli import main

ROOT = Path(__file__).parents[2]
FAMILY = sorted((ROOT / "configs").glob("family*/*.yaml"))
BASELINE_FILE = ROOT / "configs" / "family" / "linear_ce.yaml"
LINEAR = {"head": {"name": "linear"}, "h_exp": None, "loss": {"name": "cross_entropy"}}
RATINGS = "word1\tword2\tscore\naa\tab\t5\naa\tba\t3\nbb\tzd\t2\ncc\tdd\t1\nnot one\taa\t9\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_base, run_settings):
    """Two files of two steps each, and ratings of a few words."""
    folder = tmp_path_factory.mktemp("family")
    for name, sections in {"dist_harmonic": {}, "linear_ce": LINEAR}.items():
        settings = {**run_settings(tiny_base, folder / "unused"), **sections}
        settings = {key: value for key, value in settings.items() if value is not None}
        settings["training"] = {
            **settings["training"],
            "max_steps": 2,
            "save_strategy": "no",
        }
        settings["schedule"] = {"warmup_ratio": 0.5, "decay_ratio": 0.5}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings))
    (folder / "ratings").mkdir()
    (folder / "ratings" / "tiny.tsv").write_text(RATINGS)
    return folder


@pytest.fixture(scope="module")
def results(folder):
    options = {"seeds": [42, 43], "wordsim": folder / "ratings", "rounds": 2}
    return compare_family(
        folder, output_dir=folder / "out", figure=folder / "family.png", **options
    )


def test_rows_hold_mean_and_spread_over_seeds(folder, results):
    assert read_results(folder / "out" / "results" / "family.json") == results
    rows = {row["name"]: row for row in results["rows"]}
    assert set(rows) == {"dist_harmonic", "linear_ce"}
    losses = [row["metrics"]["post_hoc_loss"]["mean"] for row in results["rows"]]
    assert losses == sorted(losses)
    for name, row in rows.items():
        assert row["seeds"] == [42, 43]
        assert row["steps"] == 2
        assert row["errors"] == {}
        paths = [folder / "out" / f"{name}-{seed}" / "results" / "train.json" for seed in (42, 43)]
        runs = [read_results(path) for path in paths]
        for key in ("loss", "accuracy", "error_cosine", "post_hoc_loss", "post_hoc_ece"):
            assert row["metrics"][key] == spread([run["final"][key] for run in runs])
        assert [run["config"]["training"]["seed"] for run in runs] == [42, 43]
        tiny = row["word_similarity"]["tiny"]
        assert (tiny["pairs"]["mean"], tiny["covered"]["mean"]) == (5, 4)
        assert -1 <= tiny["spearman_cosine"]["mean"] <= 1
        assert row["cost"]["time_ratio"] > 0
        assert row["cost"]["peak_bytes"] > 4 * 109 * 32  # the gradient of the prototypes, at least
    assert rows["linear_ce"]["cost"]["memory_ratio"] == pytest.approx(1, rel=0.05)
    assert imread(folder / "family.png").shape[:2] > (200, 1000)


def test_finished_runs_are_not_trained_again(folder, results, monkeypatch, capsys):
    def never(run):
        raise AssertionError(run.output_dir)

    monkeypatch.setattr(family, "train", never)
    arguments = ["compare", str(folder), "--output", str(folder / "out"), "--seeds", "42", "43"]
    assert main([*arguments, "--wordsim", str(folder / "ratings")]) == 0
    again = read_results(folder / "out" / "results" / "family.json")
    for new, old in zip(again["rows"], results["rows"], strict=True):
        assert {**new, "cost": None} == {**old, "cost": None}
    printed = capsys.readouterr().out
    assert "2 seeds" in printed
    assert "Spearman cosine" in printed
    assert " +- " in printed


def test_a_run_that_fails_is_a_row_and_the_others_go_on(folder, tmp_path, capsys, caplog):
    copy = tmp_path / "copy"
    copy.mkdir()
    good = (folder / "linear_ce.yaml").read_text()
    (copy / "linear_ce.yaml").write_text(good)
    (copy / "mistyped.yaml").write_text(good.replace("cross_entropy", "cross_entropi"))
    diverging = yaml.safe_load(good)
    diverging["training"]["learning_rate"] = 1e38
    (copy / "diverging.yaml").write_text(yaml.safe_dump(diverging))
    caplog.set_level(logging.INFO, "harmonic_sft")
    output = tmp_path / "out"
    arguments = ["compare", str(copy), "--output", str(output), "--seeds", "7"]
    assert main([*arguments, "--figure", str(tmp_path / "family.png")]) == 1
    captured = capsys.readouterr()
    assert "expected every run to finish, got errors in ['diverging', 'mistyped']" in captured.err
    rows = {row["name"]: row for row in read_results(output / "results" / "family.json")["rows"]}
    assert "expected a finite number, got nan" in rows["diverging"]["errors"]["seed 7"]
    assert "cross_entropi" in rows["mistyped"]["errors"]["seed 7"]
    assert "metrics" not in rows["mistyped"]
    assert rows["linear_ce"]["metrics"]["loss"]["std"] is None
    assert "2 of 3: linear_ce, seed 7" in caplog.text
    assert captured.out.count("failed") == 2
    assert (tmp_path / "family.png").is_file()


def test_a_cost_that_cannot_be_measured_is_an_error_of_its_row(folder, results, monkeypatch):
    arm = family._arm

    def broken(model, run, batch):
        made = arm(model, run, batch)
        if run.head.name == "linear":
            return made._replace(labels=made.labels[:-1])
        return made

    monkeypatch.setattr(family, "_arm", broken)
    with pytest.raises(ValueError, match=r"got errors in \['linear_ce'\]"):
        compare_family(folder, output_dir=folder / "out", seeds=[42, 43], rounds=1)
    rows = read_results(folder / "out" / "results" / "family.json")["rows"]
    rows = {row["name"]: row for row in rows}
    assert set(rows["linear_ce"]["errors"]) == {"cost"}
    assert "cost" not in rows["linear_ce"]
    assert rows["dist_harmonic"]["cost"]["time_ratio"] > 0


def test_what_cannot_be_compared_is_refused(folder, tmp_path, capsys):
    with pytest.raises(ValueError, match="compare: expected a folder with YAML files"):
        compare_family(tmp_path, output_dir=tmp_path)
    with pytest.raises(ValueError, match="wordsim: expected a folder with TSV files"):
        compare_family(folder, output_dir=tmp_path / "out", wordsim=tmp_path)
    assert not (tmp_path / "out").exists()
    assert main(["compare", str(tmp_path), "--seeds", "1"]) == 1
    assert "--seeds: expected with one folder of YAML files" in capsys.readouterr().err
    (tmp_path / "run.yaml").write_text("{}")
    assert config_files(tmp_path) == []


def test_spread_is_the_standard_deviation_of_a_sample():
    found = spread([1.0, 2.0, 6.0])
    assert found["mean"] == pytest.approx(3.0)
    assert found["std"] == pytest.approx(7**0.5)
    assert spread([4.0])["std"] is None
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("path", FAMILY, ids=lambda path: path.stem)
def test_every_file_of_the_family_is_complete_and_fair(path):
    """They differ in nothing but head, exponent and loss, and each names its source."""
    run, baseline = load_run_config(path), load_run_config(BASELINE_FILE)
    assert run.model == baseline.model
    assert run.data == baseline.data
    assert run.schedule == baseline.schedule
    assert {**run.training, "output_dir": ""} == {**baseline.training, "output_dir": ""}
    assert run.head.init == "input_embeddings"
    header = path.read_text().split("model:")[0]
    assert "\n# Source: " in header
    assert f"harmonic-sft train configs/{path.parent.name}/{path.name}\n" in header


def test_the_baseline_of_costs_has_a_name_no_file_can_have():
    assert BASELINE not in {path.stem for path in FAMILY}
    assert len(FAMILY) == 27
