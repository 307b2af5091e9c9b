"""A machine where this package is not installed: one process that forks for every program."""

import json
import subprocess
from pathlib import Path

from tests.clean_environment import clean_environment

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


class Elsewhere:
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
        self.process = subprocess.Popen(
            [python, "-I", "-W", "ignore", "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __call__(self, code: str, *arguments: object, cwd: Path | None = None) -> str:
        """Run a program and return what it wrote; it must succeed."""
        self.count += 1
        output = self.folder / f"output-{self.count}"
        job = [code, [str(word) for word in arguments], str(cwd or self.folder), str(output)]
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        status = json.loads(self.process.stdout.readline())
        assert status == 0, output.read_text()
        return output.read_text()

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
