"""A family is trained, compared and continued; a run that fails is a row without metrics."""

from pathlib import Path

import pytest
import yaml

from experiments import family
from experiments.__main__ import main
from experiments.evidence import spread
from experiments.family import FILE, configure, read_family
from harmonic_sft.results import read_results

RATINGS = "word1\tword2\tscore\naa\tab\t5\naa\tba\t3\nbb\tzd\t2\ncc\tdd\t1\nnot one\taa\t9\n"


@pytest.fixture(scope="module")
def command(family_file, family_runs):
    (family_file.parent / "tiny.tsv").write_text(RATINGS)
    rows = ["--rows", "dist_harmonic", "linear_ce", "--seeds", "42", "43"]
    where = ["--output", str(family_runs), "--wordsim", str(family_file.parent)]
    return ["family", str(family_file), *rows, *where]


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    monkeypatch.setattr(family, "ROUNDS", 2)


@pytest.mark.slow
def test_rows_hold_mean_and_spread_over_seeds(command, family_runs, capsys):
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "family, 2 seeds" in printed
    assert "Spearman cosine" in printed
    assert "Difference to linear_ce" in printed
    results = read_results(family_runs / "family.json")
    rows = {row["name"]: row for row in results["rows"]}
    losses = [row["metrics"]["post_hoc_loss"]["mean"] for row in results["rows"]]
    assert losses == sorted(losses)
    for name, row in rows.items():
        assert (row["seeds"], row["steps"], row["errors"]) == ([42, 43], 3, {})
        paths = [family_runs / f"{name}-{seed}" / "results" / "train.json" for seed in (42, 43)]
        runs = [read_results(path) for path in paths]
        for key in ("loss", "accuracy", "error_cosine", "post_hoc_loss", "post_hoc_ece"):
            assert row["metrics"][key] == spread([run["final"][key] for run in runs])
        assert [run["config"]["training"]["seed"] for run in runs] == [42, 43]
        tiny = row["word_similarity"]["tiny"]
        assert (tiny["pairs"]["mean"], tiny["covered"]["mean"]) == (5, 4)
        assert row["cost"]["time_ratio"] > 0
        assert row["cost"]["peak_bytes"] > 4 * 109 * 32  # the gradient of the prototypes, at least
    assert rows["linear_ce"]["cost"]["memory_ratio"] == pytest.approx(1, rel=0.05)
    assert (family_runs / "family.png").stat().st_size > 10_000

    written = [path.stat().st_mtime_ns for path in sorted(family_runs.glob("*/results/train.json"))]
    assert main(command) == 0  # nothing is trained again
    again = read_results(family_runs / "family.json")
    assert [{**row, "cost": None} for row in again["rows"]] == [
        {**row, "cost": None} for row in results["rows"]
    ]
    assert written == [
        path.stat().st_mtime_ns for path in sorted(family_runs.glob("*/results/train.json"))
    ]


@pytest.mark.slow
def test_a_run_that_fails_is_a_row_and_the_others_continue(family_file, tmp_path, capsys):
    base = str(family_file.parent / "base.yaml")
    linear = read_family(family_file, "family").rows["linear_ce"]
    rows = {
        "linear_ce": linear,
        "mistyped": {"loss.name": "cross_entropi"},
        "diverging": {**linear, "training.learning_rate": 1e38},
    }
    path = tmp_path / "family.yaml"
    path.write_text(yaml.safe_dump({"family": {"base": base, "rows": rows}}))
    assert main(["family", str(path), "--seeds", "7", "--output", str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert "expected every run to finish, got errors in ['diverging', 'mistyped']" in captured.err
    assert captured.out.count("failed") == 2
    found = {row["name"]: row for row in read_results(tmp_path / "out" / "family.json")["rows"]}
    assert "expected a finite number, got nan" in found["diverging"]["errors"]["seed 7"]
    assert "cross_entropi" in found["mistyped"]["errors"]["seed 7"]
    assert "metrics" not in found["mistyped"]
    assert found["linear_ce"]["metrics"]["loss"]["half_width"] is None


def test_what_cannot_be_compared_is_refused(family_file, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"expected a section 'mine', got \['family'\]"):
        read_family(family_file, "mine")
    with pytest.raises(ValueError, match=r"rows: expected some of .*'linear_ce'.*, got 'dist'"):
        read_family(family_file, "family", ["dist"])
    assert main(["family", str(family_file), "--wordsim", str(tmp_path)]) == 1
    assert "wordsim: expected a folder with TSV files" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "count"), [("family", 25), ("causal_family", 8)])
def test_rows_of_a_family_differ_in_head_exponent_loss_and_what_trains_alone(name, count):
    found = read_family(FILE, name)
    assert len(found.rows) == count
    runs = [configure(found, row, 42, Path("runs/x")) for row in found.rows]
    for run in runs:
        assert run.data == runs[0].data
        assert run.schedule == runs[0].schedule
        rate = {"learning_rate": 0} if run.model.unfreeze.patterns else {}
        assert {**run.training, **rate} == {**runs[0].training, **rate}
        if name == "family":
            assert run.model == runs[0].model
            assert run.head.init == "input_embeddings"
