"""Every YAML file of the repository is a run that can be read, and its header says how."""

from pathlib import Path

import pytest

from harmonic_sft.training import load_run_config

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_file_can_be_read_and_names_itself(path):
    load_run_config(path)
    header = path.read_text().split("model:")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    assert str(path.relative_to(ROOT)) in header
    assert "Hardware:" in header
