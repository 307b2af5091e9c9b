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


KILLED_AT_A_BAR = """
import os, signal, sys
from pathlib import Path
import torch
from tqdm import tqdm
from tests.faults.kills import World, take

torch.set_num_threads(1)
folder = Path(sys.argv[1])
(folder / "tmp").mkdir()
world = World(folder)
if not (child := os.fork()):
    tqdm.get_lock().acquire()
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(child, 0)
status, _ = take([str(world.yaml_of("table", folder / "run"))], world, folder / "log")
sys.exit(1 if status is None else status)
"""


@pytest.mark.slow
def test_a_session_that_is_killed_at_a_progress_bar_stops_no_other(tmp_path):
    """A lock that processes share stays locked when its holder is killed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLED_AT_A_BAR, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
