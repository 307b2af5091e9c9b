"""Recorded losses of the plan on NeoBERT's fixture: a refactor leaves them as they are.

The weights are the fixture's and the masks come from raw Philox bits, so nothing depends on how a
version of torch draws random numbers. Recorded on CPU in float32: machines differ by rounding.
"""

import json
import shutil
from pathlib import Path

import pytest
from transformers import BertTokenizer

from tests.conftest import SPECIAL, WORDS
from tests.training.conftest import logged, start

FIXTURES = Path(__file__).parents[1] / "fixtures"


BFLOAT16 = {"dtype": "bfloat16", "unfreeze": {"last_blocks": 1, "dtype": "bfloat16"}}
RUNS = {  # of `loss` and `final` in the file, and how far machines may differ
    "float32": ({}, {"gradient_accumulation_steps": 2}, 1e-4),
    "bfloat16": (
        BFLOAT16,
        {"gradient_accumulation_steps": 8, "per_device_train_batch_size": 1},
        1e-2,
    ),
}


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", RUNS)
def test_the_plan_on_the_fixture_gives_the_recorded_losses(make_yaml, tmp_path, name):
    """In the layout of the published checkpoint, with a tokenizer of its size."""
    folder, fixture = tmp_path / "neobert", FIXTURES / "neobert_tiny"
    vocabulary = {word: index for index, word in enumerate(SPECIAL + WORDS[:96])}
    BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    shutil.copy(fixture / "config.json", folder)
    shutil.copy(fixture / "weights.safetensors", folder / "model.safetensors")
    model, training, tolerance = RUNS[name]
    path = make_yaml(
        model={"base": str(folder), **model},
        training={"learning_rate": 2e-3, **training},
    )
    results = start(path)
    golden = json.loads((FIXTURES / "golden_losses.json").read_text())
    golden = golden.get(name, golden)
    assert logged(results["history"]) == pytest.approx(golden["loss"], rel=tolerance)
    for key in ("loss", "accuracy", "post_hoc_loss", "tokens"):
        expected = pytest.approx(golden["final"][key], rel=10 * tolerance, abs=2 * tolerance)
        assert results["final"][key] == expected, key
