"""The command line: exit codes, one-line errors, entry points, and what is imported when."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harmonic_sft_cli import main

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "configs" / "demo.yaml"
NO_TORCH = """
import sys
import harmonic_sft_cli
try:
    harmonic_sft_cli.main(["train", "--help"])
finally:
    sys.stderr.write(" ".join({"torch", "transformers", "yaml", "harmonic_sft"} & set(sys.modules)))
"""
MISTYPED = """
import sys, time
import harmonic_sft
begin = time.process_time()
from harmonic_sft_cli import main
for override in ("modle.base=x", "data.mask.probabilty=0.1", "head.epss=1", "loss.impll=fused"):
    assert main(["train", sys.argv[1], override]) == 1
print(time.process_time() - begin)
print([name for name in sys.argv[2:] if name in sys.modules])
"""
HEAVY = ("datasets", "pandas", "peft", "transformers.training_args", "transformers.trainer")


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment
    )


def test_help_names_the_commands_and_imports_no_torch():
    done = run_python("-c", NO_TORCH)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--dry-run" in done.stdout
    done = run_python("-m", "harmonic_sft_cli", "--help")
    for command in ("train", "data", "eval", "compare", "push", "export"):
        assert f"\n    {command} " in done.stdout


def test_a_mistyped_key_of_ours_costs_less_than_a_second_and_no_heavy_import():
    done = run_python("-c", MISTYPED, str(DEMO), *HEAVY)
    places = ["modle", "data.mask.probabilty", "head.epss", "loss.impll"]
    starts = [line.split(" one of the known")[0] for line in done.stderr.splitlines()]
    assert starts == [f"error: {place}: expected" for place in places]
    seconds, imported = done.stdout.splitlines()
    assert imported == "[]"
    assert float(seconds) < 1


def test_bad_input_is_one_line_and_status_one(tmp_path, capsys):
    cases = {
        ("train", str(tmp_path / "no.yaml")): "error: config file: expected an existing file",
        ("data", str(DEMO), "training.max_stepz=3"): "error: training.max_stepz: expected one of",
        ("compare", str(tmp_path), "a=b"): "error: compare: expected a finished run, got no",
        ("eval", str(tmp_path)): "error: eval: expected a folder with a trained model",
    }
    for arguments, message in cases.items():
        assert main(arguments) == 1
        error = capsys.readouterr().err
        assert error.startswith(message)
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["push", "run", "--repo-id", "me/x", "a=b"], "push: expected no key=value pairs, got a="),
        (
            ["export", "run", "--to", "linear", "a=b"],
            "export: expected no key=value",
        ),
        (
            ["compare", "run", "--figure", "x.png", "a=b"],
            "compare: expected no key=value",
        ),
        (["train", "x.yaml", "--dry-runn"], "unrecognized arguments: --dry-runn"),
        (["train", "x.yaml", "--dry-run", "a"], "unrecognized arguments: a"),
        (["reproduce", "family"], "invalid choice: 'reproduce'"),
    ],
)
def test_arguments_that_a_command_does_not_take_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_overrides_may_stand_after_an_option(capsys):
    assert main(["train", str(DEMO), "hub.push=true", "--dry-run", "hub.repo_idd=me/x"]) == 1
    assert "hub.repo_idd: expected one of the known keys" in capsys.readouterr().err


@pytest.mark.parametrize("error", ["StoppedError", "PushError", "RuntimeError"])
def test_errors_of_ours_are_one_line_and_others_are_bugs(error, monkeypatch, capsys):
    from harmonic_sft.hub import PushError
    from harmonic_sft.training.callbacks import StoppedError

    errors = {"StoppedError": StoppedError, "PushError": PushError, "RuntimeError": RuntimeError}

    def stopped(*_):
        raise errors[error]("no more")

    monkeypatch.setattr("harmonic_sft.training.run_config.load_run_config", stopped)
    monkeypatch.setenv("RANK", "1")
    if error == "RuntimeError":
        with pytest.raises(RuntimeError, match="no more"):
            main(["train", "x.yaml"])
    else:
        assert main(["train", "x.yaml"]) == 1
        assert capsys.readouterr().err == "error in process 1: no more\n"


def test_an_interrupted_run_says_how_to_continue(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("harmonic_sft.training.run_config.load_run_config", interrupted)
    assert main(["train", "x.yaml"]) == 130
    assert "Interrupted. Add resume=true to continue." in capsys.readouterr().err
    assert main(["data", "x.yaml"]) == 130
    assert "resume" not in capsys.readouterr().err


def test_the_main_job_has_a_dry_run(capsys, tmp_path, monkeypatch):
    """--dry-run of the recipe itself needs neither the Hub nor a GPU."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(ROOT / "configs" / "neobert.yaml"), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "block 27, trained" in printed
    assert "7,079,424" in printed
    assert "23,440,896" in printed
    assert not list(tmp_path.iterdir())


def test_scripts_sft_runs_under_accelerate_launch():
    launch = ["-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    done = run_python(*launch, str(ROOT / "scripts" / "sft.py"), str(DEMO), "training.max_stepz=3")
    assert done.returncode == 1
    assert "training.max_stepz: expected one of the known keys" in done.stderr
    assert "Did you mean 'max_steps'?" in done.stderr
