"""Every run file of the repository can be read, and its header says how to start it."""

from pathlib import Path

import pytest

from harmonic_sft.training import load_run_config

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "accelerate"
)
BASES = sorted((ROOT / "experiments").glob("*_base.yaml"))


@pytest.mark.parametrize("path", FILES + BASES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_file_can_be_read_and_names_itself(path):
    load_run_config(path)
    header = path.read_text().split("model:")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    assert str(path.relative_to(ROOT)) in header
    assert "Hardware:" in header


def test_there_are_at_most_twenty_files():
    assert 0 < len(FILES) <= 20
