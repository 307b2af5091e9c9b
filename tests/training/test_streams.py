"""A streamed run is the same however it is cut into sessions, processes and workers."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harmonic_sft.data.files import BadRows
from harmonic_sft.training import load_run_config, run
from harmonic_sft.training.run import train

ROOT = Path(__file__).parents[2]
KILLED = """
import os, signal, sys
from harmonic_sft_cli import main
from harmonic_sft.training.trainer import HarmonicTrainer
training_step = HarmonicTrainer.training_step
def killed(self, *arguments):
    loss = training_step(self, *arguments)
    if self.state.global_step == 19:
        os.kill(os.getpid(), signal.SIGKILL)  # in the middle of step 20
    return loss
HarmonicTrainer.training_step = killed
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory, text_file):
    """The text in eight files of uneven lengths, some documents longer than a row, some bad."""
    folder = tmp_path_factory.mktemp("shards")
    lines = text_file.read_text().splitlines()
    generator = random.Random(1)
    files = [[] for _ in range(8)]
    for index, line in enumerate(lines):
        files[generator.choice((0, 1, 1, *range(1, 8)))].append(
            {"text": line * (1 + 2 * (index % 7 == 0))}
        )
    for number, rows in enumerate(files):
        good = [json.dumps(row) for row in rows]
        lines = [*good[:5], "{cut", '{"text": " "}', *good[5:], '{"text": null}']
        text = "".join(f"{line}\n" for line in lines)
        (folder / f"{number}.jsonl").write_text(text)
    return folder


@pytest.fixture
def stream_yaml(make_yaml, shards):
    def make(**training):
        return make_yaml(
            data={
                "sources": [{"path": f"{shards}/*.jsonl", "streaming": True}],
                "window": 16,
                "packing": True,
                "on_bad_row": "skip",
            },
            training={"max_steps": 40, "save_steps": 17, "learning_rate": 1e-3, **training},
        )

    return make


def launch(path, folder, *words, script=ROOT / "scripts" / "sft.py", processes=1, status=0):
    run_words = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--standalone"]
    command = [sys.executable, *run_words, str(script), str(path), *words]
    command.append(f"training.output_dir={folder}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (status == 0), done.stderr[-4000:]
    if status:
        return None
    results = json.loads((folder / "results" / "train.json").read_text())
    losses = [entry["loss"] for entry in results["history"] if "loss" in entry]
    return losses, results["data"]["rows_left_out"], set(results["data"]["reasons"])


@pytest.fixture
def killed_script(tmp_path):
    path = tmp_path / "killed.py"
    path.write_text(KILLED)
    return path


def test_17_steps_a_kill_and_23_steps_are_40_steps(stream_yaml, tmp_path, killed_script):
    whole, left_out, reasons = launch(stream_yaml(), tmp_path / "whole")
    assert len(whole) == 40
    assert left_out == 24
    assert len(reasons) == 5
    # Each of two processes reads four of the streams.
    for processes, workers in ((1, 0), (1, 2), (2, 2)):
        words = [
            f"training.dataloader_num_workers={workers}",
            f"training.per_device_train_batch_size={8 // processes}",
        ]
        folder = tmp_path / f"cut {processes} {workers}"
        killed = {"script": killed_script, "status": 1}
        launch(stream_yaml(), folder, *words, **killed, processes=processes)
        assert not (folder / "checkpoint-34").exists()
        resumed, *skipped = launch(
            stream_yaml(), folder, *words, "resume=true", processes=processes
        )
        assert skipped == [left_out, reasons]
        if processes == 1:
            assert resumed == whole
        else:  # sums in another order
            torch.testing.assert_close(
                torch.tensor(resumed), torch.tensor(whole), rtol=1e-4, atol=0
            )


def test_rows_left_out_are_counted_over_all_processes(monkeypatch):
    def snapshot(skipped, *reasons):
        return {"skipped": skipped, "reasons": list(reasons)}

    ready = SimpleNamespace(
        left_out=1,
        data=SimpleNamespace(bad_rows=BadRows({"a": ("cut", 1)}), fill_rate=None),
        trainer=SimpleNamespace(
            stream_state={"streams": {"0": snapshot(2, "b: cut"), "3": snapshot(1)}},
            skipped={0: 5},  # in the window begun last
        ),
    )
    other = [("3", 4, ["d: cut"]), ("0", 2, ["b: cut"]), ("1", 10, ["c: cut"])]
    monkeypatch.setattr(run, "gather_object", lambda found: other + found)
    assert run._data_results(ready) == {
        "rows_left_out": 1 + 5 + 10 + 4,
        "reasons": ["a: cut", "b: cut", "c: cut", "d: cut"],
        "fill_rate": None,
        "unscored_tokens_left_out": None,
    }


def test_a_checkpoint_of_an_earlier_version_says_so(stream_yaml, tmp_path):
    path = stream_yaml(max_steps=4, save_steps=2)
    train(load_run_config(path))
    run = tmp_path / "run"
    (run / "results" / "train.json").unlink()
    state = run / "checkpoint-2" / "stream_state_0.json"
    for name in ("checkpoint-4",):
        for file in (run / name).iterdir():
            file.unlink()
        (run / name).rmdir()
    fields = json.loads(state.read_text())
    for snapshot in fields["streams"].values():
        snapshot.pop("reasons")
    state.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"resume: expected stream_state_0.json .*, got another"):
        train(load_run_config(path, ["resume=true"]))
    state.unlink()
    with pytest.raises(ValueError, match=r"resume: expected stream_state_0.json .*, got none"):
        train(load_run_config(path, ["resume=true"]))


def test_the_share_of_waiting_for_data_is_reported(stream_yaml):
    results = train(load_run_config(stream_yaml(max_steps=3)))
    assert 0 < results["data_wait_share"] < 1
