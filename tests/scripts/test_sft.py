"""The entry of accelerate launch: how many threads a single process takes."""

import os
import signal
import subprocess
import sys

import pytest

from scripts.sft import free_threads
from tests.elsewhere import ROOT

LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
TRAINING = """
import os, signal, time
from harmonic_sft_cli import main
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"told") and os._exit(0))
main(["train", "nothing"])
os.write(1, b"ready")
time.sleep(20)
"""


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({"OMP_NUM_THREADS": "1"}, None),
        ({"OMP_NUM_THREADS": "1", "WORLD_SIZE": "1"}, None),
        ({"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}, "1"),
        ({"OMP_NUM_THREADS": "4"}, "4"),
        ({}, None),
    ],
)
def test_a_single_process_is_not_held_to_one_thread(environment, threads):
    free_threads(environment)
    assert environment.get("OMP_NUM_THREADS") == threads


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_run_is_told_when_its_launcher_is_ended():
    """`accelerate launch` passes no SIGTERM on to a single process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_MIXED_PRECISION": "no"}
    words = [sys.executable, "-c", LAUNCHER, TRAINING]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=environment, stdout=pipe, stderr=pipe) as launcher:
        assert launcher.stdout.read(5) == b"ready"
        launcher.send_signal(signal.SIGTERM)
        assert launcher.stdout.read() == b"told"
