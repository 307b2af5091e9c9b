"""Recorded losses of the plan on NeoBERT's fixture: a refactor leaves them as they are.

The weights are the fixture's and the masks come from raw Philox bits, so nothing depends on how a
version of torch draws random numbers. Recorded on CPU in float32: machines differ by rounding.
"""

import json
import shutil
from pathlib import Path

import pytest
from transformers import BertTokenizer

from harmonic_sft.training import load_run_config
from harmonic_sft.training.run import train

FIXTURES = Path(__file__).parents[1] / "fixtures"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture
def published_neobert(tmp_path):
    """The fixture in the layout of the published checkpoint, with a tokenizer of its size."""
    folder = tmp_path / "neobert"
    folder.mkdir()
    vocab = folder / "vocab.txt"
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [first + second for first in letters for second in letters[:4]][:96]
    vocab.write_text("\n".join(SPECIAL + words) + "\n")
    BertTokenizer(vocab=str(vocab)).save_pretrained(folder)
    shutil.copy(FIXTURES / "neobert_tiny" / "config.json", folder)
    shutil.copy(FIXTURES / "neobert_tiny" / "weights.safetensors", folder / "model.safetensors")
    return folder


def test_the_plan_on_the_fixture_gives_the_recorded_losses(make_yaml, published_neobert):
    path = make_yaml(training={"learning_rate": 2e-3, "gradient_accumulation_steps": 2})
    results = train(load_run_config(path, [f"model.base={published_neobert}"]))
    golden = json.loads((FIXTURES / "golden_losses.json").read_text())
    logged = [entry["loss"] for entry in results["history"] if "loss" in entry]
    assert logged == pytest.approx(golden["loss"], rel=1e-4)
    for key, value in golden["final"].items():
        assert results["final"][key] == pytest.approx(value, rel=1e-3), key
