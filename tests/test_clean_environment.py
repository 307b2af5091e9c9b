"""The environment of a user who has a few packages and nothing of ours; tests/hub uses it."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.clean_environment import clean_environment


def install(site_packages: Path, name: str, files: dict[str, str], *requires: str) -> None:
    """A distribution as pip leaves it."""
    lines = "".join(f"Requires-Dist: {line}\n" for line in requires)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{lines}"
    info = f"{name.replace('-', '_')}-1.0.dist-info"
    files = {**files, f"{info}/METADATA": metadata, f"{info}/RECORD": ""}
    for path, text in files.items():
        (site_packages / path).parent.mkdir(parents=True, exist_ok=True)
        (site_packages / path).write_text(text)
    record = "".join(f"{path},,\n" for path in [*files, f"../../bin/{name}"])
    (site_packages / info / "RECORD").write_text(record)


@pytest.fixture
def site_packages(tmp_path, monkeypatch):
    """Distributions that share the folder `shared`, with every kind of requirement."""
    folder = tmp_path / "installed"
    install(
        folder,
        "alpha-one",
        {"shared/alpha/__init__.py": "value = 1", "alpha.py": ""},
        "Beta_Two>=0.5",
        "gamma; extra == 'more'",
        "not-there; python_version < '3'",
    )
    install(folder, "beta-two", {"shared/beta/__init__.py": "", "shared/beta/deep/file.py": ""})
    install(folder, "gamma", {"shared/gamma.py": "", "shared/beta/deep/gamma.py": ""})
    install(folder, "editable", {"_editable.pth": str(tmp_path / "source")})
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "editable.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))
    return folder


FIND = """
import importlib.util, json, sys
names = ["alpha", "shared.alpha", "shared.beta.deep.file", "shared.gamma", "shared.beta.deep.gamma"]
def found(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
print(json.dumps({name: found(name) for name in [*names, "editable", "pytest"]}))
"""


@pytest.mark.parametrize("extra", [False, True])
def test_shared_folders_hold_only_what_is_required(site_packages, tmp_path, extra):
    python = clean_environment(tmp_path / "env", ["alpha-one[more]" if extra else "alpha_one"])
    assert json.loads(subprocess.check_output([python, "-I", "-c", FIND])) == {
        "alpha": True,
        "shared.alpha": True,
        "shared.beta.deep.file": True,
        "shared.gamma": extra,
        "shared.beta.deep.gamma": extra,
        "editable": False,
        "pytest": False,
    }
    [alpha] = python.parents[1].glob("lib/python*/site-packages/alpha.py")
    assert alpha.is_symlink()  # not a copy
