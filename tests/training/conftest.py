"""Runs that several tests only read, and runs in processes of their own."""

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from harmonic_sft.training.run import train
from harmonic_sft.training.run_config import load_run_config
from harmonic_sft.training.trainer import HarmonicTrainer

ROOT = Path(__file__).parents[2]
# Runs YAML files one after the other in one or several processes, forked after the imports.
SCRIPT = """
import os, signal, sys
from harmonic_sft.training.run import train
from harmonic_sft.training.run_config import load_run_config
from harmonic_sft.training.trainer import HarmonicTrainer

kill_at, processes, *files = sys.argv[1:]
training_step = HarmonicTrainer.training_step

def killed(self, *arguments):
    loss = training_step(self, *arguments)
    if self.state.global_step == int(kill_at):
        os.kill(os.getpid(), signal.SIGKILL)
    return loss

if int(kill_at) >= 0:
    HarmonicTrainer.training_step = killed
children = []
for rank in range(int(processes)):
    if child := os.fork():
        children.append(child)
        continue
    if int(processes) > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": processes}
    for file in files:
        path, *overrides = file.split("\\n")
        train(load_run_config(path, overrides))
    sys.exit()
sys.exit(max(os.waitpid(child, 0)[1] > 0 for child in children))
"""


@pytest.fixture(scope="session")
def launch():
    """Run configurations with their overrides in a fresh process, or in several.

    `kill_at` kills every process in the middle of the step after that many.
    """

    def start(*commands, processes=1, kill_at=-1):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        words = ["\n".join(map(str, command)) for command in commands]
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(kill_at), str(processes), *words],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode == 0) == (kill_at < 0), done.stderr[-4000:]

    return start


@pytest.fixture
def add_callbacks(monkeypatch):
    """Return a context in which every trainer gets further callbacks."""

    @contextlib.contextmanager
    def context(*callbacks):
        begin = HarmonicTrainer.__init__

        def with_callbacks(self, *args, **kwargs):
            begin(self, *args, **kwargs)
            for callback in callbacks:
                self.add_callback(callback)

        with monkeypatch.context() as patch:
            patch.setattr(HarmonicTrainer, "__init__", with_callbacks)
            yield

    return context


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory, tiny_base, run_settings):
    """Return the results, the folder and the output of a run of 6 steps, which stays as it is."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    settings = run_settings(tiny_base, folder)
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(settings))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        results = train(load_run_config(path))
    assert json.loads((folder / "results" / "train.json").read_text())["final"] == results["final"]
    return results, folder, printed.getvalue()
