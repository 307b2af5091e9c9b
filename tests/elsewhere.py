"""A machine where this package is not installed: one process that forks for every program."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.clean_environment import clean_environment

ROOT = Path(__file__).parents[1]
# Importing torch and transformers takes seconds, a fork none. No program here has a thread yet.
SERVER = """
import gc, json, os, sys, traceback
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline
from transformers.models.auto import modeling_auto
from importlib.util import find_spec

assert find_spec("harmonic_sft") is None
gc.freeze()
for line in sys.stdin:
    code, arguments, folder, output = json.loads(line)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.chdir(folder)
            written = os.open(output, os.O_WRONLY | os.O_CREAT)
            os.dup2(written, 1)
            os.dup2(written, 2)
            sys.argv = ["-c", *arguments]
            exec(code, {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    sys.stdout.write(json.dumps(status) + "\\n")
    sys.stdout.flush()
"""


def run_python(*words: object, status: int = 0, **variables: str) -> subprocess.CompletedProcess:
    """Run a program with this repository and further variables, which must end with a status."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr[-4000:]
    return done


class Worker:
    """A process that answers each line of JSON with another."""

    def __init__(self, command: list[str | Path], environment: dict[str, str]):
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment
        )

    def send(self, job: object):
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


class Client(Worker):
    """A process with this package that talks to a test server."""

    def __init__(self, environment: dict[str, str]):
        super().__init__([sys.executable, ROOT / "tests" / "hub" / "commands.py"], environment)

    def __call__(self, *arguments: object) -> dict:
        return self.send([str(word) for word in arguments])

    def succeeds(self, *arguments: object) -> None:
        """Run a command, which must succeed."""
        done = self(*arguments)
        assert done["status"] == 0, done["err"]

    def program(self, code: str) -> str:
        """Run a program, which must succeed, and return what it wrote."""
        done = self.send(code)
        assert done["status"] == 0, done["err"]
        return done["out"]


class Elsewhere(Worker):
    """Runs programs with a few packages, by default sentence-transformers, without this package.

    Args:
        folder: A new one, for its virtual environment.
        environment: Variables of the process; the Hub's are read once, when it starts.
        packages: Distributions beside torch, transformers and safetensors.
    """

    def __init__(
        self,
        folder: Path,
        environment: dict[str, str],
        packages: tuple[str, ...] = ("sentence-transformers",),
    ):
        packages = ("torch", "transformers", "safetensors", *packages)
        python = clean_environment(folder / "venv", packages)
        self.folder, self.count = folder, 0
        super().__init__([python, "-I", "-W", "ignore", "-c", SERVER], environment)

    def __call__(self, code: str, *arguments: object, cwd: Path | None = None) -> str:
        """Run a program and return what it wrote; it must succeed."""
        self.count += 1
        output = self.folder / f"output-{self.count}"
        words = [str(word) for word in arguments]
        status = self.send([code, words, str(cwd or self.folder), str(output)])
        assert status == 0, output.read_text()
        return output.read_text()
