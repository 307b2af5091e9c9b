"""Every experiment by its command: results file, table, figure, refusals."""

import re

import pytest
from matplotlib.image import imread

from harmonic_sft.experiments import EXPERIMENTS, reproduce
from harmonic_sft.results import read_results
from harmonic_sft_cli import main


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs_three_epochs_by_its_command(name, tmp_path, capsys):
    command = ["reproduce", name, "--seeds", "2", "--epochs", "3", "--output", str(tmp_path)]
    assert main(command) == 0
    path = tmp_path / f"{name}.json"
    assert str(path) in capsys.readouterr().out
    payload = read_results(path)
    assert payload["experiment"] == name
    assert (payload["num_seeds"], payload["num_epochs"]) == (2, 3)
    assert payload["environment"]["versions"]["torch"]
    assert imread(path.with_suffix(".png")).shape[:2] > (400, 1000)


def test_results_go_to_a_folder_of_runs_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "multi_head_modular_addition"
    assert main(["reproduce", name, "--seeds", "1", "--epochs", "1"]) == 0
    assert (tmp_path / "runs" / name / f"{name}.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "grokking"}, "experiment: expected one of ['multi_head_modular_addition', "),
        ({"name": "multi_head_toy", "num_seeds": 0}, "seeds: expected at least 1, got 0"),
        ({"name": "multi_head_toy", "num_epochs": -1}, "epochs: expected at least 1, got -1"),
    ],
)
def test_what_cannot_run_is_refused_before_it_starts(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        reproduce(output=tmp_path / "new", **arguments)
    assert not (tmp_path / "new").exists()


def test_bad_numbers_are_one_line_on_the_command_line(capsys):
    assert main(["reproduce", "multi_head_toy", "--seeds", "0"]) == 1
    assert capsys.readouterr().err == "error: seeds: expected at least 1, got 0\n"
