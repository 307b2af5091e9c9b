"""The package's root: what importing it registers, and the names that it gives."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

import harmonic_sft
from harmonic_sft._minimum import MINIMUM
from harmonic_sft.losses.sum import Term
from harmonic_sft.training.run_config import HExpConfig, PeftConfig
from tests.elsewhere import run_python

ANYWHERE = """
import sys
import harmonic_sft
print([name for name in sys.argv[2:] if name in sys.modules])
from transformers import AutoModelForMaskedLM
print(type(AutoModelForMaskedLM.from_pretrained(sys.argv[1])).__module__)
"""
TYPED = """
from typing import assert_type

from harmonic_sft import HarmonicForMaskedLM, HarmonicLoss, HarmonicTrainingArguments
from harmonic_sft import HarmonicTrianer

assert_type(HarmonicForMaskedLM.from_pretrained("folder"), HarmonicForMaskedLM)
HarmonicTrainingArguments("folder", loss=HarmonicLoss())
"""
LATER = (
    "harmonic_sft.losses",
    "harmonic_sft.training",
    "harmonic_sft.data",
    "datasets",
    "pydantic",
)


def test_our_folders_load_after_an_import_of_the_models_alone(tmp_path, tiny_base):
    from harmonic_sft import HarmonicForMaskedLM

    model = HarmonicForMaskedLM.from_base(tiny_base, head={"name": "dist", "h_exp": -12.0})
    model.save_pretrained(tmp_path)
    done = run_python("-c", ANYWHERE, tmp_path, *LATER)
    assert done.stdout.splitlines() == ["[]", "harmonic_sft.models.modeling_harmonic"]


def test_every_public_name_is_there_and_listed():
    assert set(harmonic_sft.__all__) <= set(dir(harmonic_sft))
    for name in harmonic_sft.__all__:
        value = getattr(harmonic_sft, name)
        assert name.isupper() or value.__name__ == name
        assert name.isupper() or value.__module__.startswith("harmonic_sft.")


def test_other_names_are_not():
    with pytest.raises(AttributeError, match=r"^module 'harmonic_sft' has no attribute 'nothing'$"):
        _ = harmonic_sft.nothing


def test_a_type_checker_knows_our_names_and_what_they_take(tmp_path):
    (tmp_path / "program.py").write_text(TYPED)
    root = Path(harmonic_sft.__file__).parents[1]
    options = ("--python", sys.prefix, "--extra-search-path", root, "--output-format", "concise")
    command = [sys.executable, "-m", "ty", "check", "--project", tmp_path, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.findall(r"program\.py:(\d+):", done.stdout)
    assert found == ["5"], done.stdout  # the mistyped name


@pytest.mark.parametrize(
    "section", [*harmonic_sft.LOSSES.values(), Term, HExpConfig, PeftConfig], ids=str
)
def test_type_checkers_know_what_may_be_left_out(section):
    calls = [n for n in ast.walk(ast.parse(inspect.getsource(section))) if isinstance(n, ast.Call)]
    # PEP 681 knows a default by its keyword alone.
    assert not [n for n in calls if ast.unparse(n.func) == "Field" and n.args]


@pytest.mark.parametrize(("name", "version"), [("torch", "2.9.1"), ("transformers", "5.9.0")])
def test_an_import_with_an_older_version_ends_in_one_sentence(name, version, monkeypatch):
    old = ModuleType(name)  # of a notebook: nothing else of it fits the files of a newer
    old.__version__ = version
    monkeypatch.setitem(sys.modules, name, old)
    for module in [key for key in sys.modules if key.startswith("harmonic_sft")]:
        monkeypatch.delitem(sys.modules, module)
    message = f"{name}: expected version {MINIMUM[name]} or newer, got {version}. Run pip install"
    with pytest.raises(ImportError, match=re.escape(message)):
        importlib.import_module("harmonic_sft")
    assert "harmonic_sft.models" not in sys.modules


def test_the_minimum_is_what_pip_installs():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    requirements = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    for name, minimum in MINIMUM.items():
        assert f">={minimum}" in str(requirements[name]).split(",")
