"""The main job's own file at full size: random weights in the published layout, local text."""

import json

import pytest

from tests.elsewhere import run_python


@pytest.mark.slow
def test_neobert_yaml_trains_three_steps_in_8_gib(tmp_path, minilm_path):
    base, folder = tmp_path / "neobert", tmp_path / "run"
    run_python("scripts/make_neobert.py", base, "--tokenizer", minilm_path)
    overrides = [
        f"model.base={base}",
        "model.revision=null",
        "data.sources=[{path: 'python:docstrings'}]",
        "data.context_length=64",
        "data.eval.documents=1",
        "check_base=false",  # the weights are random
        f"training.output_dir={folder}",
        "training.per_device_train_batch_size=1",
        "training.gradient_accumulation_steps=1",
        "training.max_steps=3",
        "training.save_strategy=no",
        "training.eval_strategy=no",
        "training.logging_steps=1",
        "training.use_cpu=true",
        "schedule={warmup_ratio: 0.34, decay_ratio: 0.33}",
    ]
    run_python("scripts/sft.py", "configs/neobert.yaml", *overrides)
    results = json.loads((folder / "results" / "train.json").read_text())
    assert results["steps"] == 3
    assert results["peak_memory_bytes"] < 8 * 2**30
    assert results["head"]["h_exp"] == -4.0
    # Random features know nothing: the loss is that of a uniform guess, ln(30522) = 10.33.
    assert results["before"]["loss"] == pytest.approx(10.33, abs=0.5)
