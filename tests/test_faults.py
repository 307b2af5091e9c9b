"""The driver of `make faults` counts kills and inputs, and finds ends that differ."""

import pytest

from tests.elsewhere import run_python


def make_faults(folder, **counts):
    options = [f"--{name}={count}" for name, count in counts.items()]
    words = ("-m", "tests.faults", *options, "--folder", folder)
    return run_python(*words).stdout


@pytest.mark.slow
def test_killed_runs_end_as_uninterrupted_ones(tmp_path):
    assert "     0 lost, or ended with other bits" in make_faults(tmp_path, kills=2, inputs=0)


@pytest.mark.slow
def test_damaged_inputs_are_fed_to_readers_that_take_them(tmp_path):
    written = make_faults(tmp_path, kills=0, inputs=60)
    assert "     0 tracebacks" in written
    taken = {line[7:].split(",")[0]: int(line.split()[-3]) for line in written.splitlines()[:6]}
    assert taken["archives"] > 0
    assert taken["checkpoint folders"] == 10


KILLED_AT_A_BAR = """
import os, signal, sys
from pathlib import Path
from tqdm import tqdm
from tests.faults.kills import World, take

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
    run_python("-c", KILLED_AT_A_BAR, tmp_path)
