"""Progress bars that say what they count."""

import re

import pytest

from harmonic_sft.training.run import train
from harmonic_sft.training.run_config import load_run_config


@pytest.mark.parametrize("disable", [False, True])
def test_progress_bars_are_labeled(make_yaml, capsys, caplog, disable):
    caplog.set_level("INFO")
    path = make_yaml(training={"disable_tqdm": disable, "max_steps": 2})
    train(load_run_config(path))
    shown = capsys.readouterr().err
    bars = {line.strip() for line in re.findall(r"([A-Z][\w ]*|):? +\d+%\|", shown)}
    assert {"Training", "Evaluating"} <= bars if not disable else "Training" not in bars
    assert "" not in bars
    folder = path.parent / "run"
    assert [line.split()[0] for line in caplog.messages[-1].splitlines()] == [
        "Load:",
        "Evaluate:",
        "Publish:",
    ]
    code = caplog.messages[-1].splitlines()[0].removeprefix("Load:").strip()
    found = {}
    exec(code, found)  # what is printed can be typed
    assert type(found["model"]).__name__ == "HarmonicForMaskedLM"
    assert f"harmonic-sft eval {folder} data=FILE" in caplog.messages[-1]
    assert f"harmonic-sft push {folder} --repo-id OWNER/NAME" in caplog.messages[-1]
