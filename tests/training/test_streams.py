"""A streamed run is the same however it is cut into sessions, processes and workers."""

import json
import random
from types import SimpleNamespace

import pytest
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

import harmonic_sft.training.run as run_module
from harmonic_sft.data.files import BadRows
from harmonic_sft.training.callbacks import StoppedError
from harmonic_sft.training.run import train
from harmonic_sft.training.run_config import load_run_config


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


def read(folder):
    results = json.loads((folder / "results" / "train.json").read_text())
    losses = [entry["loss"] for entry in results["history"] if "loss" in entry]
    return losses, results["data"]["rows_left_out"], set(results["data"]["reasons"])


def test_17_steps_a_kill_and_23_steps_are_40_steps(stream_yaml, tmp_path, launch):
    def words(name, processes, *others):
        size = f"training.per_device_train_batch_size={8 // processes}"
        return [stream_yaml(), f"training.output_dir={tmp_path / name}", size, *others]

    workers = "training.dataloader_num_workers=2"
    jobs = [(words("whole", 1), 1, None)]
    for name, processes in (("one", 1), ("two", 2)):  # of two, each reads four of the streams
        jobs.append((words(name, processes, workers), processes, 19))
        jobs.append((words(name, processes, workers, "resume=true"), processes, None))
    launch(*jobs)
    whole, left_out, reasons = read(tmp_path / "whole")
    assert len(whole) == 40
    assert left_out == 24
    assert len(reasons) == 5
    one, *skipped = read(tmp_path / "one")
    assert one == whole
    assert skipped == [left_out, reasons]
    two, *skipped = read(tmp_path / "two")
    assert two == pytest.approx(whole, rel=1e-4)  # sums in another order
    assert skipped == [left_out, reasons]


def test_a_checkpoint_from_the_middle_of_a_step_takes_it_again(stream_yaml, monkeypatch, tmp_path):
    """As transformers saves one after SIGTERM."""
    path = stream_yaml(max_steps=5, enable_jit_checkpoint=True, save_strategy="no")
    whole = train(load_run_config(path, [f"training.output_dir={tmp_path / 'whole'}"]))
    step = JITCheckpointCallback.on_step_begin

    def signalled(self, args, state, control, **kwargs):
        self.jit_manager.is_checkpoint_requested = state.global_step == 3
        step(self, args, state, control, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(JITCheckpointCallback, "on_step_begin", signalled)
        with pytest.raises(StoppedError, match="training: expected 5 steps, got 4"):
            train(load_run_config(path))
    assert not (tmp_path / "run" / "results" / "train.json").exists()
    again = train(load_run_config(path, ["resume=true"]))
    losses = [[e["loss"] for e in run["history"] if "loss" in e] for run in (whole, again)]
    assert losses[0] == losses[1]
    assert again["final"] == whole["final"]


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
    monkeypatch.setattr(run_module, "gather_object", lambda found: other + found)
    assert run_module._data_results(ready) == {
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
