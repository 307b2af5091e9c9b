"""Every experiment has its name, and errors are one line."""

import pytest
from matplotlib.image import imread
from torch import Tensor

from experiments.__main__ import EXPERIMENTS, main
from harmonic_sft.results import read_results


@pytest.mark.slow
@pytest.mark.parametrize("name", ["multi_head_toy", "multi_head_modular_addition"])
def test_small_models_run_three_epochs_by_their_command(name, tmp_path, capsys):
    assert main([name, "--seeds", "2", "--epochs", "3", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out
    payload = read_results(tmp_path / f"{name}.json")
    assert payload["experiment"] == name
    assert (payload["num_seeds"], payload["num_epochs"]) == (2, 3)
    groups = payload.get("settings", [payload])
    for rows in (group["rows"] for group in groups):
        assert rows[0]["num_heads"] == 1
        assert all(len(row["percent"]) == 2 for row in rows)
    assert payload["environment"]["versions"]["torch"]
    assert imread(tmp_path / f"{name}.png").shape[:2] > (400, 1000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "experiment: expected one of ['family', 'causal_family', "),
        (["grokking"], "'draw'], got 'grokking'"),
        (["decoder_cost", "--length", "1"], "length: expected at least 4, got 1"),
        (["decoder_cost", "--hidden-size", "32"], "hidden_size: expected at least 64, got 32"),
        (["draw", "family", "none.json", "x.png"], "results: expected an existing JSON file"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ["multi_head_toy", "--seeds", "0"],
        ["multi_head_toy", "--epochs", "0"],
        ["harmonic_loss", "--figure=2", "--workers", "0"],
        ["harmonic_loss", "--figure=2", "--epochs", "0"],
        ["gpt2_small", "--small", "--seeds", "0"],
        ["kitsunp", "--seeds", "0"],
        ["small_gpt", "--data", ".", "--steps", "0"],
        ["worth_it", ".", "--part", "bottleneck", "--seeds", "0"],
        ["decoder_cost", "--rounds", "0"],
    ],
)
def test_counts_below_one_are_refused(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(arguments)
    error = f"argument {arguments[-2]}: expected at least 1, got 0"
    assert capsys.readouterr().err.splitlines()[-1].endswith(error)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [["kitsunp"], ["decoder_cost"], ["multi_head_toy"], ["harmonic_loss", "--figure=1"]],
)
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(arguments, monkeypatch, capsys):
    monkeypatch.setattr(Tensor, "backward", lambda *_: pytest.fail("it works"))
    assert main([*arguments, "--output", "/dev/null/out"]) == 1
    expected = "error: output: expected a folder for files, got '/dev/null/out': Not a directory\n"
    assert capsys.readouterr().err == expected


def test_an_interrupted_experiment_is_one_line(monkeypatch, capsys):
    def interrupted(name, arguments):
        raise KeyboardInterrupt

    monkeypatch.setitem(EXPERIMENTS, "kitsunp", interrupted)
    assert main(["kitsunp"]) == 130
    assert capsys.readouterr().err == "\nInterrupted.\n"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_name_has_help(name, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert f"python -m experiments {name}" in shown
    assert "Raises" not in shown


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_names_the_experiments(word, capsys):
    assert main([word]) == 0
    assert "python -m experiments NAME" in (text := capsys.readouterr().out)
    assert "harmonic_loss" in text
