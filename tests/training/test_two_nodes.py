"""torchrun over two nodes of one process each, both on loopback."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harmonic_sft.training.run import train
from harmonic_sft.training.run_config import load_run_config

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_nodes_train_what_one_process_trains(make_yaml, tmp_path):
    path = make_yaml(training={"learning_rate": 1e-3, "max_steps": 3})
    one = train(
        load_run_config(
            path,
            [
                f"training.output_dir={tmp_path / 'one'}",
                "training.per_device_train_batch_size=4",
            ],
        )
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        str(path),
        f"training.output_dir={tmp_path / 'two'}",
        "training.per_device_train_batch_size=2",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    nodes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"),
                *("--nnodes=2", f"--node-rank={rank}", "--master-addr=127.0.0.1"),
                *(f"--master-port={port}", str(ROOT / "scripts" / "sft.py"), *words),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    written = [node.communicate()[0] for node in nodes]
    for node, text in zip(nodes, written, strict=True):
        assert node.returncode == 0, text[-4000:]
    two = json.loads((tmp_path / "two" / "results" / "train.json").read_text())
    assert two["final"]["loss"] == pytest.approx(one["final"]["loss"], rel=1e-5)
    logged = [[e["loss"] for e in run["history"] if "loss" in e] for run in (one, two)]
    assert logged[1] == pytest.approx(logged[0], rel=1e-4)
    assert len(logged[0]) == 3
