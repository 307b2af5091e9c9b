"""Checkpoints: damage is found and said, and the newest whole one continues the run."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from transformers import TrainerCallback

from harmonic_sft.training.checkpoints import (
    MANIFEST_NAME,
    check_whole,
    find_damage,
    last_checkpoint,
    rotate,
    same_accumulation,
    write_manifest,
)
from harmonic_sft.training.run import train
from harmonic_sft.training.run_config import load_run_config


@pytest.fixture
def stopped_run(finished_run, tmp_path):
    """A copy of the finished run as if it had been killed after its checkpoint of step 6."""
    folder = shutil.copytree(finished_run[1], tmp_path / "copy")
    (folder / "results" / "train.json").unlink()
    settings = yaml.safe_load((folder / "run.yaml").read_text())
    settings["training"]["output_dir"] = str(folder)
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return folder


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def remove(path):
    path.unlink()


class SetBack(TrainerCallback):
    """Sets the clock back after every checkpoint."""

    def on_save(self, args, state, control, **kwargs):
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        os.utime(folder, (1e9 - 100 * state.global_step,) * 2)


@pytest.mark.parametrize("damage", [flip, cut, remove])
def test_every_damaged_file_of_a_checkpoint_is_found(finished_run, tmp_path, damage):
    whole = finished_run[1] / "checkpoint-6"
    assert find_damage(whole) is None
    names = [path.name for path in whole.iterdir()]
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors"} < set(names)
    for name in names:
        run = tmp_path / name
        shutil.copytree(finished_run[1] / "checkpoint-3", run / "checkpoint-3")
        checkpoint = shutil.copytree(whole, run / "checkpoint-6")
        damage(checkpoint / name)
        assert name in find_damage(checkpoint)
        assert last_checkpoint(run).name == "checkpoint-3"


def test_a_run_continues_from_the_newest_whole_checkpoint(stopped_run, finished_run, caplog):
    """A missing random state stops neither PyTorch nor transformers."""
    caplog.set_level("INFO")
    (stopped_run / "checkpoint-6" / "rng_state.pth").unlink()
    again = train(load_run_config(stopped_run / "run.yaml", ["resume=true"]))
    assert f"Skipped {stopped_run}/checkpoint-6: rng_state.pth is missing" in caplog.text
    assert f"Continuing from {stopped_run}/checkpoint-3" in caplog.text
    assert again["final"] == finished_run[0]["final"]
    weights = [f / "model.safetensors" for f in (stopped_run, finished_run[1])]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert find_damage(stopped_run / "checkpoint-6") is None  # it was saved again


def test_a_run_without_a_whole_checkpoint_starts_again_and_says_so(
    stopped_run, finished_run, caplog
):
    for step in (3, 6):
        cut(stopped_run / f"checkpoint-{step}" / "optimizer.pt")
    again = train(load_run_config(stopped_run / "run.yaml", ["resume=true"]))
    assert "No checkpoint is whole: the run starts again from its first step." in caplog.text
    assert again["final"] == finished_run[0]["final"]


def test_a_damaged_checkpoint_that_is_named_is_refused(stopped_run):
    checkpoint = stopped_run / "checkpoint-3"
    check_whole(checkpoint)
    flip(checkpoint / "optimizer.pt")
    message = r"expected '.*checkpoint-3' as it was saved, got a damaged one: optimizer.pt has"
    with pytest.raises(ValueError, match=message):
        check_whole(checkpoint)


def test_checkpoints_of_an_earlier_version_are_taken_if_nothing_is_missing(stopped_run):
    """They have no manifest."""
    for step in (3, 6):
        (stopped_run / f"checkpoint-{step}" / MANIFEST_NAME).unlink()
    assert last_checkpoint(stopped_run).name == "checkpoint-6"
    (stopped_run / "checkpoint-6" / "scheduler.pt").unlink()
    assert last_checkpoint(stopped_run).name == "checkpoint-3"
    (stopped_run / "checkpoint-3" / "trainer_state.json").write_text('{"global_')
    assert last_checkpoint(stopped_run) is None
    assert last_checkpoint(stopped_run / "nowhere") is None


def test_rotation_goes_by_the_step_and_not_by_the_clock(tmp_path):
    for step in (9, 10, 100, 200):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        write_manifest(folder, rows_per_step=8)
        os.utime(folder, (1e9 - step, 1e9 - step))  # the clock was set back after every one
    saved, best = tmp_path / "checkpoint-200", tmp_path / "checkpoint-9"
    rotate(tmp_path, keep=None, protected=[saved])
    assert len(list(tmp_path.iterdir())) == 4
    rotate(tmp_path, keep=3, protected=[saved, best])
    assert {path.name for path in tmp_path.iterdir()} == {
        "checkpoint-9",
        "checkpoint-100",
        "checkpoint-200",
    }
    rotate(tmp_path, keep=1, protected=[saved, best])
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-9", "checkpoint-200"}


def test_a_run_whose_clock_is_set_back_keeps_its_newest_checkpoints(
    make_yaml, tmp_path, add_callbacks
):
    with add_callbacks(SetBack()):
        train(load_run_config(make_yaml(training={"save_steps": 1, "save_total_limit": 2})))
    kept = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert kept == ["checkpoint-5", "checkpoint-6"]


def arguments(rows, processes, accumulation):
    return SimpleNamespace(
        per_device_train_batch_size=rows,
        world_size=processes,
        gradient_accumulation_steps=accumulation,
    )


def test_the_effective_batch_of_a_checkpoint_is_kept_or_refused_with_the_numbers(tmp_path, caplog):
    assert same_accumulation(tmp_path, arguments(8, 2, 3)) == 3  # of an earlier version
    write_manifest(tmp_path, rows_per_step=16)
    assert same_accumulation(tmp_path, arguments(8, 2, 1)) == 1
    assert not caplog.records
    assert same_accumulation(tmp_path, arguments(8, 1, 1)) == 2
    assert (
        "16 rows per optimizer step as before: 1 processes with 8 rows each accumulate over 2"
        in (caplog.text)
    )
    message = (
        r"resume: expected 16 rows per optimizer step .*, got a multiple of 24: 3 processes with 8 "
        r"rows each. Start as many processes as before, or set training.per_device_train_batch_size"
    )
    with pytest.raises(ValueError, match=message):
        same_accumulation(tmp_path, arguments(8, 3, 1))


def test_half_the_rows_at_once_accumulate_twice_after_a_resume(stopped_run, caplog):
    """As on half as many processes."""
    shutil.rmtree(stopped_run / "checkpoint-6")
    before = json.loads((stopped_run / "trainer_state.json").read_text())["log_history"]
    words = ["resume=true", "training.per_device_train_batch_size=4"]
    again = train(load_run_config(stopped_run / "run.yaml", words))
    assert "4 rows each accumulate over 2 micro-batches" in caplog.text
    rows = [[r["loss"] for r in run if "loss" in r] for run in (before, again["history"])]
    assert rows[1] == pytest.approx(rows[0], rel=1e-4)
