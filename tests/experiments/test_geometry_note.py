"""Every part of the note on the tiny base, by its command: results, table, figure."""

from pathlib import Path

import pytest

from experiments import geometry_note, overhead
from experiments.__main__ import main
from experiments.evidence import spread
from experiments.family import FILE, configure, read_family
from experiments.geometry_note import PARTS, add_differences, common_levels, loss_curve
from harmonic_sft.results import read_results
from harmonic_sft.training import load_run_config


@pytest.fixture
def run_part(family_file, family_runs, tmp_path, capsys):
    """Run a part, with one seed unless others are named; return what it found and printed."""

    def run(part, *seeds):
        where = ["--file", str(family_file), "--family", str(family_runs)]
        options = ["--part", part, "--output", str(tmp_path)]
        options += ["--seeds", *map(str, seeds or [42])]
        assert main(["geometry_note", *options, *where]) == 0
        assert (tmp_path / f"{part}.png").stat().st_size > 10_000
        return read_results(tmp_path / f"{part}.json"), capsys.readouterr().out

    return run


def test_a_peak_is_rounded_to_the_nearest_mebibyte():
    row = {"vocab_size": 9, "name": "arm", "seconds": 1.0, "overhead": 0.0, "prepare_seconds": 0.0}
    _, cells = PARTS["overhead"][1]({"rows": [{**row, "peak_bytes": 2 * 2**20 - 1}]})
    assert cells[0][4] == 2


def by_name(payload):
    return {row["name"]: row for row in payload["rows"]}


@pytest.mark.slow
def test_overhead_is_of_whole_steps(run_part, monkeypatch):
    monkeypatch.setattr(geometry_note, "ROUNDS", 2)
    monkeypatch.setattr(
        geometry_note, "VOCAB_SIZES", (100, 200)
    )  # fewer and more than the base has
    payload, printed = run_part("overhead")
    assert [row["name"] for row in payload["rows"]] == 2 * list(overhead.ARMS)
    assert by_name(payload)["dist, harmonic"]["overhead"] == 0
    assert all(row["seconds"] > 0 and row["peak_bytes"] > 0 for row in payload["rows"])
    assert by_name(payload)["dist, knn_label_smoothing"]["prepare_seconds"] > 0
    assert "rotation of dist, harmonic" in printed


@pytest.mark.slow
def test_calibration_compares_rows_of_the_family(run_part, family_runs, tmp_path, monkeypatch):
    names = ("linear_ce", "dist_harmonic", "rotation_dist")
    monkeypatch.setattr(geometry_note, "CALIBRATED", names)
    payload, printed = run_part("calibration")
    rows = by_name(payload)
    assert list(rows) == list(names)
    results = read_results(family_runs / "rotation_dist-42" / "results" / "train.json")
    assert rows["rotation_dist"]["ece"]["values"] == [results["final"]["ece"]]
    against = rows["rotation_dist"]["ece"]["against"]["linear_ce"]["mean"]
    means = [rows[name]["ece"]["mean"] for name in ("rotation_dist", "linear_ce")]
    assert against == pytest.approx(means[0] - means[1])
    assert "linear_ce" not in rows["linear_ce"]["ece"]["against"]
    assert "ECE" in printed
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]  # all are rows themselves


@pytest.mark.slow
def test_tokens_are_counted_to_levels_that_every_run_reaches(run_part, monkeypatch):
    monkeypatch.setattr(geometry_note, "COUNTED", ("linear_ce", "dist_harmonic"))
    payload, printed = run_part("tokens")
    assert list(by_name(payload)) == ["linear_ce", "dist_harmonic"]
    for row in payload["rows"]:
        (curve,) = row["curves"]
        assert curve["tokens"][0] == 0
        assert len(curve["tokens"]) == 4  # before, and after each of 3 steps
        assert min(curve["losses"]) <= payload["levels"][0]
        reached = [found["mean"] for found in row["reached"]]
        assert reached == sorted(reached, reverse=True)  # a higher level comes sooner
    assert f"{payload['levels'][0]:.2f}" in printed


@pytest.mark.slow
def test_neighbors_are_followed_at_every_refresh(run_part, tmp_path):
    payload, printed = run_part("refresh")
    assert [row["refresh_every"] for row in payload["rows"]] == [None, 1]
    for row in payload["rows"]:
        assert row["steps"] == [0, 1, 2, 3]
        for kind in ("all", "weighted"):
            means = [found["mean"] for found in row["kept"][kind]]
            assert means[0] == 1
            assert all(0 < mean <= 1 for mean in means)
    assert "difference" not in payload["rows"][0]
    assert "kept" in printed
    assert not list(tmp_path.rglob("checkpoint-*"))  # measured and deleted
    assert run_part("refresh")[0]["rows"] == payload["rows"]


@pytest.mark.slow
def test_the_sweep_takes_every_weight_and_the_plain_arm(run_part, monkeypatch, tmp_path):
    monkeypatch.setattr(geometry_note, "EPSILONS", (0.1,))
    monkeypatch.setattr(geometry_note, "LAMBDAS", (1.0,))
    payload, printed = run_part("sweep")
    assert [(row["name"], row["knob"], row["value"]) for row in payload["rows"]] == [
        ("dist_harmonic", None, 0.0),
        ("epsilon_0.1", "epsilon", 0.1),
        ("lambda_1", "lambda", 1.0),
    ]
    assert len({row["post_hoc_loss"]["mean"] for row in payload["rows"]}) == 3  # all are used
    trained = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert trained == {"lambda_1-42"}  # epsilon 0.1 is a row of the family
    assert "lambda_1" in printed


def test_subwords_are_described_before_and_after_training(run_part):
    payload, printed = run_part("subwords")
    for when in ("before", "after"):
        tokens = {kind: found["tokens"] for kind, found in payload[when].items()}
        assert tokens == {"word": 104, "special": 5}
    assert 0 < payload["kept"]["mean"] < 1
    assert "word, before training" in printed
    assert payload["seeds"] == [42]


@pytest.mark.slow
def test_subwords_are_of_every_seed(run_part):
    payload, printed = run_part("subwords", 42, 43)
    assert payload["seeds"] == [42, 43]
    before, after = (payload[when]["word"]["neighbors"]["word"] for when in ("before", "after"))
    assert before["values"][0] == before["values"][1]  # what training began with
    for found in (payload["kept"], after):
        assert found["seeds"] == 2
        assert found["values"][0] != found["values"][1]
        assert found["mean"] == pytest.approx(sum(found["values"]) / 2)
    assert f"{100 * after['mean']:.1f} ± {100 * after['half_width']:.1f}" in printed


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


def test_a_table_of_metrics_marks_what_is_decided():
    def row(name, losses):
        return {"name": name, **dict.fromkeys(geometry_note.COMPARED, spread(losses))}

    rows = [row("none", [0.0, 1.0]), row("some", [1.5, 2.502]), row("more", [0.0, 2.0])]
    add_differences(rows)
    _, cells = PARTS["sweep"][1]({"rows": rows})
    assert [line[1] for line in cells] == [
        "0.500 ± 6.353",
        "2.001 ± 6.366 (higher)",
        "1.000 ± 12.706",
    ]


@pytest.mark.parametrize("name", ["wikitext103_bert", "gpt2_medium_wikitext103"])
def test_files_of_the_notes_own_size_are_its_row_on_another_base(name):
    path = Path(__file__).parents[2] / "configs" / "geometry" / f"{name}.yaml"
    assert path.read_text().startswith("# NOT RUN")
    run = load_run_config(path)
    row = configure(read_family(FILE, "family"), "rotation_wasserstein", 42, Path("runs/x"))
    head = run.head_settings()
    if name == "wikitext103_bert":  # whose base has layers before its output layer
        assert head["name"] == "transform"
        head = head["inner"]
    assert head == row.head_settings()
    assert (run.head.init, run.head.tie) == (row.head.init, row.head.tie)
    assert (run.h_exp, run.loss) == (row.h_exp, row.loss)
