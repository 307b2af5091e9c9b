"""torchrun over two nodes of one process each, both on loopback."""

import json

import pytest

from tests.elsewhere import ROOT
from tests.training.conftest import logged, start
from tests.training.processes import free_port, run_together

# A network drive is waited for.
IMPATIENT = """
import sys
from harmonic_sft.training import output_folder
from harmonic_sft_cli import main

output_folder.SYNC_SECONDS = 1
sys.exit(main(["train", *sys.argv[1:]]))
"""


def run_nodes(program, words, folders):
    """Run a program on a node in each folder; return exit statuses and what they wrote."""
    launch = ("-m", "torch.distributed.run", "--nproc-per-node=1", "--nnodes=2")
    place = ("--master-addr=127.0.0.1", f"--master-port={free_port()}", program, *words)
    nodes = [((*launch, f"--node-rank={k}", *place), {}, folders[k]) for k in range(2)]
    return zip(*run_together(*nodes), strict=True)


@pytest.mark.slow
def test_two_nodes_train_what_one_process_trains(make_yaml, tmp_path):
    path = make_yaml(training={"learning_rate": 1e-3, "max_steps": 3})
    folder, rows = "training.output_dir", "training.per_device_train_batch_size"
    one = start(path, f"{folder}={tmp_path / 'one'}", f"{rows}=4")
    words = [path, f"{folder}={tmp_path / 'two'}", f"{rows}=2"]
    codes, written = run_nodes(ROOT / "scripts" / "sft.py", words, [ROOT, ROOT])
    assert codes == (0, 0), "".join(text[-4000:] for text in written)
    two = json.loads((tmp_path / "two" / "results" / "train.json").read_text())
    assert two["final"]["loss"] == pytest.approx(one["final"]["loss"], rel=1e-5)
    expected = logged(one["history"])
    assert logged(two["history"]) == pytest.approx(expected, rel=1e-5)
    assert len(expected) == 3


@pytest.mark.slow
def test_nodes_with_a_folder_each_are_refused(make_yaml, tmp_path):
    program = tmp_path / "impatient.py"
    program.write_text(IMPATIENT)
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    words = [make_yaml(), "training.output_dir=run", "training.max_steps=2"]
    codes, written = run_nodes(program, words, folders)
    assert 0 not in codes
    message = "output_dir: expected one folder that all nodes share, got 'run', in which processes"
    for text in written:
        assert f"{message} [1] do not see the run" in text, text[-4000:]
    assert not (folders[0] / "run" / "results").exists()
