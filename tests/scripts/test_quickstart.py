"""The quickstart, as a program and as a notebook executed from the first cell to the last."""

import tomllib
from ast import literal_eval
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from scripts import quickstart
from tests.hub_server import HubServer

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "scripts" / "quickstart.ipynb"
TEXTS = "standard_library_docstrings()"


def test_the_program_trains_evaluates_and_fills_a_mask(small_demo, tmp_path, monkeypatch, capsys):
    texts = [f"Return the {word} of the list." for word in ("first", "last", "length")] * 8
    monkeypatch.setattr(quickstart, "standard_library_docstrings", lambda: texts)
    monkeypatch.setattr(quickstart, "BASE", str(small_demo / "base"))
    quickstart.main(["--steps", "2", "--output", str(tmp_path / "run")])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines if "right" in line] == ["before", "after"]
    filled = lines[-1]
    assert len(filled.removeprefix(f"{quickstart.SENTENCE} ").split()) == 5
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_the_metadata_of_the_program_install_this_package():
    lines = Path(quickstart.__file__).read_text().split("# ///")[1].splitlines()[1:]
    script = tomllib.loads("\n".join(line.removeprefix("#") for line in lines))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert script["dependencies"] == [f"{project['name']}[demo]"]
    assert "demo" in project["optional-dependencies"]
    assert script["requires-python"] == project["requires-python"]
    source = script["tool"]["uv"]["sources"][project["name"]]["path"]
    assert (Path(quickstart.__file__).parent / source).resolve() == ROOT


def execute(environment, folder, *, base=None):
    """Execute the notebook, or with a small base and few texts."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    source = notebook.cells[2].source
    assert quickstart.BASE in source
    assert TEXTS in source
    if base is not None:
        source = source.replace(quickstart.BASE, str(base))
        notebook.cells[2].source = source.replace(TEXTS, f"[text[:300] for text in {TEXTS}[:30]]")
    client = NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    client.execute(
        env={
            **environment,
            "QUICKSTART_STEPS": "4",
            "QUICKSTART_REPO": "alice/harmonic-quickstart",
            "TMPDIR": str(folder),
            "OMP_NUM_THREADS": "2",
            "IPYTHONDIR": str(folder),
        }
    )
    return notebook


def outputs_of(notebook):
    """Return what every code cell printed, its value, and whether it drew a picture."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            data = [output.get("data", {}) for output in cell.outputs]
            printed = "".join(one.text for one in cell.outputs if one.get("name") == "stdout")
            value = "".join(one.get("text/plain", "") for one in data)
            found.append((printed, value, any("image/png" in one for one in data)))
    return found


def check_outputs(notebook):
    printed, values, pictures = zip(*outputs_of(notebook), strict=True)
    assert "after: loss" in printed[1]
    assert pictures[2]
    assert literal_eval(values[3]).keys() == {"king", "dog", "paris", "list"}
    guesses = literal_eval(values[5])
    assert len(guesses) == 5
    scores = [score for _, score in guesses]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.slow  # its program runs in every test
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("base", ["small", "real"])
def test_train_look_push_load(tmp_path, small_demo, base):
    with HubServer() as hub:
        base = small_demo / "base" if base == "small" else None
        notebook = execute(hub.environment(tmp_path), tmp_path, base=base)
        files = hub.files("alice/harmonic-quickstart")
    assert {"model.safetensors", "README.md", "modeling_harmonic.py"} <= set(files)
    check_outputs(notebook)
    assert "alice/harmonic-quickstart" in outputs_of(notebook)[4][0]


def test_the_notebook_holds_its_outputs():
    check_outputs(nbformat.read(NOTEBOOK, as_version=4))
