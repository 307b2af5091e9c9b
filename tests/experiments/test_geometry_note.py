"""Every part by its command: results file, table, line, figure, refusals."""

import logging
import re
from pathlib import Path

import pytest
from matplotlib.image import imread

from harmonic_sft.experiments.geometry_note import PARTS, reproduce_part
from harmonic_sft.results import read_results, write_results
from harmonic_sft.training import load_run_config
from harmonic_sft_cli import main
from tests.experiments.note_payloads import PAYLOADS

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs" / "geometry").glob("*.yaml"))


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("overhead", ["30,522", "rotation of dist, harmonic", "0.500", "+8.5"]),
        ("calibration", ["5.50 +- 0.71", "+3.00 +- 0.00 (higher)", "ECE, % - dist_harmonic"]),
        ("tokens", ["3.50 nats", "1600 +- 141"]),
        ("refresh", ["0.610 +- 0.014 (higher)", "90.0 +- 0.0", "55.0 +- 7.1", "0.510 +- 0.014"]),
        ("subwords", ["word, before training", "22,698", "70.0", "4.1", "60.0"]),
        ("sweep", ["epsilon_0.1", "0.410 +- 0.014 (lower)", "61.00 +- 1.41 (higher)"]),
    ],
)
def test_every_part_writes_shows_tells_and_draws(
    name, cells, tmp_path, monkeypatch, capsys, caplog
):
    caplog.set_level(logging.INFO, "harmonic_sft")
    benches = []

    def run(bench):
        benches.append(bench)
        return PAYLOADS[name]

    monkeypatch.setitem(PARTS, name, PARTS[name]._replace(run=run))
    path = reproduce_part(name, tmp_path / "new", family=tmp_path, num_seeds=2)
    payload = read_results(path)
    assert payload["experiment"] == f"geometry_note, {name}"
    assert payload["environment"]["versions"]["torch"]
    assert benches[0].seeds == payload["seeds"] == [42, 43]
    assert (benches[0].family, benches[0].output) == (tmp_path, tmp_path / "new")
    printed = capsys.readouterr().out
    for cell in cells:
        assert cell in printed
    assert f"The note: {PARTS[name].asked}." in caplog.text
    assert f"Measured: what {name} found." in caplog.text
    assert imread(tmp_path / "new" / f"{name}.png").shape[:2] > (300, 800)


def test_the_command_reads_the_runs_of_a_family(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("linear_ce", "dist_harmonic", "rotation_dist", "dist_wasserstein"):
        final = {"final": {"ece": 0.02, "post_hoc_ece": 0.01}}
        write_results(f"mine/{name}-42/results", "train", final)
    command = ["reproduce", "geometry_note", "--part", "calibration", "--seeds", "1"]
    assert main([*command, "--family", "mine"]) == 1
    assert "family: expected finished runs of rotation_wasserstein" in capsys.readouterr().err
    write_results("mine/rotation_wasserstein-42/results", "train", final)
    assert main([*command, "--family", "mine"]) == 0
    assert (tmp_path / "runs" / "geometry_note" / "calibration.json").is_file()
    assert main(command) == 1  # runs/family is the default
    assert "got 0 in 'runs/family'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["geometry_note"], "part: expected one of ['overhead', 'calibration', 'tokens', "),
        (["geometry_note", "--part", "sweep", "--seeds", "0"], "seeds: expected at least 1, got 0"),
        (["geometry_note", "--part", "sweep"], "configs: expected a folder with dist_harmonic.ya"),
        (["geometry_note", "--epochs", "3"], "--epochs: expected nothing for geometry_note, got"),
        (["multi_head_toy", "--part", "sweep"], "--part: expected nothing for multi_head_toy, got"),
        (["multi_head_toy", "--family", "x"], "--family: expected nothing for multi_head_toy"),
    ],
)
def test_what_cannot_run_is_refused(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *arguments]) == 1
    assert re.search(re.escape(message), capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_files_of_the_notes_own_size_say_that_nobody_has_run_them(path):
    header = path.read_text().split("model:")[0]
    assert header.startswith("# NOT RUN")
    assert f"accelerate launch scripts/sft.py configs/geometry/{path.name}\n" in header
    run = load_run_config(path)
    family = load_run_config(ROOT / "configs" / "family" / "rotation_wasserstein.yaml")
    assert (run.head, run.h_exp, run.loss) == (family.head, family.h_exp, family.loss)
