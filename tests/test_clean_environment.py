"""The environment of a user who has transformers and nothing of ours."""

import importlib.metadata
import json
from pathlib import Path

import pytest

from tests.clean_environment import clean_environment, run_python

MODEL = """
import importlib.util, json, sys
from importlib.metadata import version
import torch
from transformers import BertConfig, BertForMaskedLM
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
model = BertForMaskedLM(BertConfig(vocab_size=120, intermediate_size=64, **sizes))
logits = model(input_ids=torch.arange(6).unsqueeze(0)).logits
found = {name: importlib.util.find_spec(name) is not None for name in sys.argv[1:]}
print(json.dumps({"shape": list(logits.shape), "found": found, "torch": version("torch")}))
"""
ABSENT = ("harmonic_sft", "peft", "datasets", "accelerate", "pytest", "pip", "pandas")


@pytest.mark.slow  # tests/hub loads every repo in such an environment
def test_transformers_works_there_and_our_package_is_absent(tmp_path):
    import torch

    python = clean_environment(tmp_path / "env")
    assert python.is_relative_to(tmp_path)
    present = ("torch", "transformers", "safetensors", "tokenizers", "numpy")
    # From the repository too: -I keeps the working folder out.
    printed = run_python(python, MODEL, *ABSENT, *present, cwd=Path(__file__).parents[1])
    result = json.loads(printed.splitlines()[-1])
    assert result["shape"] == [1, 6, 120]
    assert result["torch"] == torch.__version__
    assert result["found"] == dict.fromkeys(ABSENT, False) | dict.fromkeys(present, True)
    for name in ABSENT:  # and they are here, so the test says something
        importlib.metadata.distribution(name)


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
    assert json.loads(run_python(python, FIND, cwd=tmp_path)) == {
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


def test_what_is_not_installed_is_an_error(site_packages, tmp_path):
    with pytest.raises(ValueError, match=r"packages: expected installed ones, got 'no-such>=1'"):
        clean_environment(tmp_path / "env", ["alpha-one", "no-such>=1"])
    assert not (tmp_path / "env").exists()
    tmp_path.joinpath("full").mkdir()
    with pytest.raises(ValueError, match=r"folder: expected a new one, got '.*full', which exists"):
        clean_environment(tmp_path / "full", ["alpha-one"])
    (site_packages / "gamma-1.0.dist-info" / "RECORD").unlink()
    with pytest.raises(ValueError, match="distribution gamma: expected a RECORD of its files"):
        clean_environment(tmp_path / "env", ["alpha-one"])
    assert not (tmp_path / "env").exists()


def test_a_failing_program_is_an_error(tmp_path, site_packages):
    python = clean_environment(tmp_path / "env", ["gamma"])
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_python(python, "1 / 0", cwd=tmp_path)
