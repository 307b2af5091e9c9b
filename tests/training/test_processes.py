"""Two processes train what one trains."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


def launch(path, folder, *, processes, batch_size):
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)),
        *("--standalone", str(ROOT / "scripts" / "sft.py"), str(path)),
        f"training.output_dir={folder}",
        f"training.per_device_train_batch_size={batch_size}",
        "training.learning_rate=1e-3",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads((folder / "results" / "train.json").read_text())


def test_two_processes_equal_one(make_yaml, tmp_path):
    path = make_yaml()
    one = launch(path, tmp_path / "one", processes=1, batch_size=8)
    two = launch(path, tmp_path / "two", processes=2, batch_size=4)
    losses = [[e["loss"] for e in run["history"] if "loss" in e] for run in (one, two)]
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-4, atol=0)
    for key in ("loss", "accuracy", "tokens", "post_hoc_loss"):
        assert two["before"][key] == pytest.approx(one["before"][key], rel=1e-5)
    heads = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    torch.testing.assert_close(
        heads[1]["dist_head.weight"], heads[0]["dist_head.weight"], rtol=0, atol=1e-4
    )
