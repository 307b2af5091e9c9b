"""What the Makefile and continuous integration run, with programs that do nothing."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BROWSERS = [[], ["chromium"], ["google-chrome"]]


@pytest.fixture
def programs(tmp_path):
    """A folder with bash and what the scripts need of it, and no browser."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "dirname", "sh"):
        (folder / name).symlink_to(str(shutil.which(name)))
    return folder


def pretend(path):
    path.write_text('#!/bin/sh\necho "ran ${0##*/} $*"\n')
    path.chmod(0o755)


def make(*arguments, **options):
    command = [str(shutil.which("make")), "--no-print-directory", "--file", str(ROOT / "Makefile")]
    command += arguments
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize("browsers", BROWSERS)
def test_either_browser_will_do(browsers, programs, tmp_path):
    for name in browsers:
        pretend(programs / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    pretend(tmp_path / ".venv" / "bin" / "python")
    environment = {"PATH": str(programs), "OMP_NUM_THREADS": "1"}
    options = ["--old-file", ".venv/.installed", "test-browser"]
    done = make(*options, cwd=tmp_path, env=environment)
    assert ("ran python -m pytest -m browser" in done.stdout) == bool(browsers)
    assert ("browser: expected Chromium, got none." in done.stderr) == (not browsers)
    assert (done.returncode == 0) == bool(browsers)


@pytest.mark.parametrize("browsers", BROWSERS)
def test_continuous_integration_tests_the_browser_or_says_that_it_does_not(
    browsers, programs, tmp_path
):
    for name in ("make", *browsers):
        pretend(programs / name)
    (tmp_path / ".ci").mkdir()
    script = shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    command = [str(programs / "bash"), script]
    printed = subprocess.check_output(command, text=True, env={"PATH": str(programs)}).splitlines()
    assert printed[:2] == ["ran make check", "ran make test"]
    (last,) = printed[2:]
    assert last.startswith("ran make test-browser" if browsers else "Left out: make test-browser")
