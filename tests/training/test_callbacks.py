"""Progress bars that say what they count, and the end after a signal."""

import os
import re
import signal

import pytest
from transformers import TrainerCallback

from harmonic_sft.training.run import train
from harmonic_sft.training.run_config import load_run_config
from tests.training.conftest import trained


def test_progress_bars_are_labeled_and_the_end_says_what_to_type(make_yaml, capsys, caplog):
    caplog.set_level("INFO")
    path = make_yaml(training={"disable_tqdm": False, "max_steps": 2})
    train(load_run_config(path))
    shown = capsys.readouterr().err
    bars = {line.strip() for line in re.findall(r"([A-Z][\w ]*|):? +\d+%\|", shown)}
    assert {"Training", "Evaluating"} <= bars
    assert "" not in bars
    folder = path.parent / "run"
    code = caplog.messages[-1].splitlines()[0].removeprefix("Load:").strip()
    found = {}
    exec(code, found)  # what is printed can be typed
    assert type(found["model"]).__name__ == "HarmonicForMaskedLM"
    assert f"harmonic-sft eval {folder} data=FILE" in caplog.messages[-1]
    assert f"harmonic-sft push {folder} --repo-id OWNER/NAME" in caplog.messages[-1]


class Terminate(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_sigterm_costs_no_step(finished_run, make_yaml, tmp_path, add_callbacks, caplog):
    """The step at work is saved, the exit status is that of shells, and the end is the same."""
    caplog.set_level("INFO")
    path, handler = make_yaml(training={"save_strategy": "no"}), signal.getsignal(signal.SIGTERM)
    with add_callbacks(Terminate()), pytest.raises(SystemExit) as caught:
        train(load_run_config(path))
    assert caught.value.code == 143
    assert "SIGTERM: training ends with a checkpoint of step 4." in caplog.text
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not (tmp_path / "run" / "results" / "train.json").exists()
    again = train(load_run_config(path, ["resume=true"]))
    assert "checkpoint-4" in caplog.text
    assert again["final"] == finished_run[0]["final"]
    folders = (tmp_path / "run", finished_run[1])
    assert len({(folder / "model.safetensors").read_bytes() for folder in folders}) == 1


def test_a_sigterm_is_left_alone_on_request(make_yaml, add_callbacks):
    handler, seen = signal.getsignal(signal.SIGTERM), []

    class Look(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            seen.append(signal.getsignal(signal.SIGTERM))

    with add_callbacks(Look()):
        trained(make_yaml(training={"enable_jit_checkpoint": False, "max_steps": 1}))
    assert seen == [handler]
