"""Two processes train what one trains."""

import json
import signal

import pytest
from safetensors.torch import load_file

from harmonic_sft.training.run import train
from harmonic_sft.training.run_config import load_run_config

HEAD = ("dist_head.weight", "bert.embeddings.word_embeddings.weight")  # where the first starts
DTYPES = {"float32": [], "bfloat16": ["model.dtype=bfloat16", "model.unfreeze.dtype=bfloat16"]}


def test_two_processes_equal_one(make_yaml, tmp_path, launch, tiny_base):
    """In float32, and with 16-bit weights, whose gradients we average ourselves.

    An epoch has 17 rows: in its last step one process has a single row and the other one none.
    """
    path = make_yaml(
        data={"eval": {"documents": 106}},
        training={"learning_rate": 1e-3, "gradient_accumulation_steps": 2, "max_steps": 4},
    )

    def commands(processes):
        size = f"training.per_device_train_batch_size={4 // processes}"
        for name, words in DTYPES.items():
            yield [*words, size, f"training.output_dir={tmp_path / name}{processes}"]

    for command in commands(1):
        train(load_run_config(path, command))
    launch(*(([path, *command], 2, None) for command in commands(2)))
    start = load_file(tiny_base / "model.safetensors")
    for name, tolerance in (("float32", 1e-5), ("bfloat16", 1e-2)):
        folders = [tmp_path / f"{name}{processes}" for processes in (1, 2)]
        one, two = [json.loads((f / "results" / "train.json").read_text()) for f in folders]
        for key, rel in (("loss", 10 * tolerance), ("num_input_tokens_seen", 0)):
            logged = [[e[key] for e in run["history"] if "loss" in e] for run in (one, two)]
            assert logged[1] == pytest.approx(logged[0], rel=rel)
        for key in ("loss", "tokens", "post_hoc_loss"):
            assert two["before"][key] == pytest.approx(one["before"][key], rel=tolerance)
        first, second = (load_file(folder / "model.safetensors") for folder in folders)
        block = [key for key in first if ".layer.2." in key and key.endswith("dense.weight")]
        for key in (*block, "dist_head.weight"):
            before = start[key.replace("model.backbone", "bert").replace(*HEAD)]
            moved = (first[key] - before).float().norm()
            assert (second[key] - first[key]).float().norm() < 2 * tolerance * moved, key


@pytest.mark.slow
def test_a_sigterm_to_one_of_two_processes_ends_both_and_one_continues(
    make_yaml, tmp_path, launch, caplog
):
    """After the same step; the process that continues keeps the effective batch."""
    path = make_yaml(
        training={"per_device_train_batch_size": 4, "learning_rate": 1e-3, "save_strategy": "no"}
    )
    alone = ["training.per_device_train_batch_size=8", f"training.output_dir={tmp_path / 'alone'}"]
    whole = train(load_run_config(path, alone))
    launch(([path], 2, 2, signal.SIGTERM))
    assert [p.name for p in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-4"]
    again = train(load_run_config(path, ["resume=true"]))
    assert "1 processes with 4 rows each accumulate over 2 micro-batches" in caplog.text
    logged = [[e["loss"] for e in run["history"] if "loss" in e] for run in (whole, again)]
    assert logged[1] == pytest.approx(logged[0], rel=1e-4)
