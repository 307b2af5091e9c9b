"""Quantized bodies, in a process of their own, which finds the packages they need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / ".venv" / "quantized"


@pytest.mark.skipif(sys.platform != "linux", reason="bitsandbytes has no wheel")
def test_quantized_bodies():
    assert PACKAGES.is_dir(), "make test installs them"
    path = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/training/quantized_bodies.py"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "25 passed, 2 skipped" in done.stdout
