"""The driver of `make faults` counts kills, and finds ends that differ."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_killed_runs_end_as_uninterrupted_ones(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = ["-m", "tests.faults", "--kills", "2", "--inputs", "0", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "     0 lost, or ended with other bits" in done.stdout
