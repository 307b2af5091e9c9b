"""The driver of `make faults` counts kills and inputs, and finds ends that differ."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def make_faults(folder, **counts):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options = [f"--{name}={count}" for name, count in counts.items()]
    command = [sys.executable, "-m", "tests.faults", *options, "--folder", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_killed_runs_end_as_uninterrupted_ones(tmp_path):
    assert "     0 lost, or ended with other bits" in make_faults(tmp_path, kills=2, inputs=0)


def test_damaged_inputs_are_fed_to_readers_that_take_them(tmp_path):
    written = make_faults(tmp_path, kills=0, inputs=120)
    assert "     0 tracebacks" in written
    taken = {line[7:].split(",")[0]: int(line.split()[-3]) for line in written.splitlines()[:6]}
    assert taken["archives"] > 0
    assert taken["checkpoint folders"] == 20


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
