"""The command line: exit codes, one-line errors, entry points."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harmonic_sft.cli import main

ROOT = Path(__file__).parents[1]


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("train", "eval", "compare"))


def test_bad_input_is_one_line_and_status_one(tmp_path, capsys):
    assert main(["train", str(tmp_path / "none.yaml")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: config file: expected an existing file")
    assert error.count("\n") == 1
    assert main(["compare", str(tmp_path)]) == 1
    assert "compare: expected a finished run" in capsys.readouterr().err
    assert main(["eval", str(tmp_path)]) == 1
    assert "eval: expected a folder with a trained model" in capsys.readouterr().err


def test_an_interrupted_run_says_how_to_go_on(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("harmonic_sft.cli.load_run_config", interrupted)
    assert main(["train", "x.yaml"]) == 130
    assert "resume=true goes on" in capsys.readouterr().err


def test_the_main_job_has_a_dry_run(capsys, tmp_path, monkeypatch):
    """--dry-run of the plan itself needs neither the Hub nor a GPU."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(ROOT / "configs" / "neobert.yaml"), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "block 27, trained" in printed
    assert "7,079,424" in printed
    assert "23,440,896" in printed
    assert not list(tmp_path.iterdir())


def test_scripts_sft_runs_under_accelerate_launch(tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += [str(ROOT / "scripts" / "sft.py"), str(ROOT / "configs" / "neobert.yaml")]
    run = subprocess.run(
        [*command, "training.max_stepz=3"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 1
    assert "training.max_stepz: expected one of the known keys" in run.stderr
    assert "Did you mean 'max_steps'?" in run.stderr
