"""Checkpoints: damage is found and said, and the newest whole one continues the run."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForMaskedLM, BertConfig, TrainerCallback

from harmonic_sft.config import to_yaml
from harmonic_sft.hub import read_trained
from harmonic_sft.models import HarmonicConfig, HarmonicForMaskedLM
from harmonic_sft.models.partial_checkpoint import RESUME_FILE
from harmonic_sft.training.adapters import load_part_
from harmonic_sft.training.checkpoints import (
    MANIFEST_NAME,
    check_continues,
    check_undamaged,
    find_damage,
    last_checkpoint,
    rotate,
    same_accumulation,
    save_trained,
    write_manifest,
)
from harmonic_sft.training.evaluation import evaluate_folder, explain_folder
from harmonic_sft.training.loading import check_base_config
from harmonic_sft.training.output_folder import read_run
from harmonic_sft.training.run import train
from harmonic_sft.training.run_config import load_run_config
from tests.conftest import write_run
from tests.saved_models import change_json, change_weights
from tests.training.conftest import logged, start, weights_in


@pytest.fixture
def stopped_run(run_copy):
    """A copy of the finished run as if it had been killed after its checkpoint of step 6."""
    (run_copy / "results" / "train.json").unlink()
    moved = {"training": {"output_dir": str(run_copy)}}
    write_run(run_copy / "run.yaml", read_run(run_copy), moved)
    return run_copy


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_every_damaged_file_of_a_checkpoint_is_found(finished_run, tmp_path, damage):
    whole = finished_run / "checkpoint-6"
    assert find_damage(whole) is None
    names = {path.name for path in whole.iterdir()}
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors"} < names
    for name in names:
        run = tmp_path / name
        shutil.copytree(finished_run / "checkpoint-3", run / "checkpoint-3")
        checkpoint = shutil.copytree(whole, run / "checkpoint-6")
        damage(checkpoint / name)
        assert name in find_damage(checkpoint)
        assert last_checkpoint(run).name == "checkpoint-3"


def test_a_run_continues_from_the_newest_whole_checkpoint(
    stopped_run, finished_run, finished_results, caplog
):
    """A missing random state stops neither PyTorch nor transformers; what is there cannot be
    written over.
    """
    caplog.set_level("INFO")
    path = stopped_run / "checkpoint-6" / "rng_state.pth"
    path.unlink()
    path.symlink_to(path.name)
    again = start(stopped_run / "run.yaml", "resume=true")
    said = f"Skipped {stopped_run}/checkpoint-6: rng_state.pth is missing"
    assert caplog.text.count(said) == 1
    assert f"Continuing from {stopped_run}/checkpoint-3" in caplog.text
    assert again["final"] == finished_results["final"]
    assert weights_in(stopped_run) == weights_in(finished_run)
    assert find_damage(stopped_run / "checkpoint-6") is None  # it was saved again


def test_a_run_stopped_after_its_last_step_ends_like_a_whole_one(
    stopped_run, finished_run, finished_results
):
    """Nothing is left but to evaluate."""
    (stopped_run / "model.safetensors").unlink()
    again = start(stopped_run / "run.yaml", "resume=true")
    assert again["steps"] == 6
    assert again["final"] == finished_results["final"]
    assert weights_in(stopped_run) == weights_in(finished_run)


def test_a_run_without_a_whole_checkpoint_starts_again_and_says_so(
    stopped_run, finished_results, caplog
):
    for step in (3, 6):
        cut(stopped_run / f"checkpoint-{step}" / "optimizer.pt")
    again = start(stopped_run / "run.yaml", "resume=true")
    assert "No checkpoint is whole: the run starts again from its first step." in caplog.text
    assert again["final"] == finished_results["final"]


def test_a_damaged_checkpoint_that_is_named_is_refused(stopped_run):
    checkpoint = stopped_run / "checkpoint-3"
    check_undamaged(checkpoint)
    flip(checkpoint / "optimizer.pt")
    message = r"expected '.*checkpoint-3' as it was saved, got a damaged one: optimizer.pt has"
    with pytest.raises(ValueError, match=message):
        check_undamaged(checkpoint)
    with pytest.raises(ValueError, match=r"got a damaged one: it is missing. Use another one"):
        check_undamaged(stopped_run / "checkpoint-4")


def test_checkpoints_of_an_earlier_version_are_taken_if_nothing_is_missing(stopped_run):
    """They have no manifest, and no sum of losses."""
    for step in (3, 6):
        for name in (MANIFEST_NAME, "running_loss_0.json"):
            (stopped_run / f"checkpoint-{step}" / name).unlink()
    assert last_checkpoint(stopped_run).name == "checkpoint-6"
    (stopped_run / "checkpoint-6" / "scheduler.pt").unlink()
    assert last_checkpoint(stopped_run).name == "checkpoint-3"
    (stopped_run / "checkpoint-3" / "trainer_state.json").write_text('{"global_')
    assert last_checkpoint(stopped_run) is None
    assert last_checkpoint(stopped_run / "nowhere") is None


def test_a_checkpoint_whose_manifest_was_not_written_is_none(stopped_run, finished_results, caplog):
    """Also where it is the only one: the kill came between its last file and the manifest."""
    shutil.rmtree(stopped_run / "checkpoint-3")
    (stopped_run / "checkpoint-6" / MANIFEST_NAME).unlink()
    assert find_damage(stopped_run / "checkpoint-6", is_best=True).startswith("it has no manifest")
    again = start(stopped_run / "run.yaml", "resume=true")
    assert "No checkpoint is whole" in caplog.text
    assert again["final"] == finished_results["final"]


def test_rotation_goes_by_the_step_and_not_by_the_clock(tmp_path):
    for step in (9, 10, 100, 200):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        write_manifest(folder, rows_per_step=8)
        os.utime(folder, (1e9 - step, 1e9 - step))  # the clock was set back after every one
    saved, best = tmp_path / "checkpoint-200", tmp_path / "checkpoint-9"
    for keep in (None, 0, -1):
        rotate(tmp_path, keep=keep, protected=[saved])
    (tmp_path / "checkpoint-10-best").mkdir()  # a copy
    assert len(list(tmp_path.iterdir())) == 5
    rotate(tmp_path, keep=3, protected=[saved, best])
    kept = {path.name.removeprefix("checkpoint-") for path in tmp_path.iterdir()}
    assert kept == {"9", "10-best", "100", "200"}


def test_half_saved_checkpoints_go_before_whole_ones(tmp_path):
    for step in (5, 10, 500):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if step < 500:
            (tmp_path / f"checkpoint-{step}" / "manifest.json").touch()
    rotate(tmp_path, keep=2, protected=[tmp_path / "checkpoint-10"])
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-5", "checkpoint-10"}


def test_a_run_whose_clock_is_set_back_keeps_its_newest_checkpoints(
    make_yaml, tmp_path, add_callbacks
):
    class SetBack(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            os.utime(folder, (1e9 - 100 * state.global_step,) * 2)

    with add_callbacks(SetBack()):
        start(make_yaml(training={"save_steps": 1, "save_total_limit": 2}))
    kept = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert kept == ["checkpoint-5", "checkpoint-6"]


def arguments(rows, processes, accumulation, *, drop_last=False):
    sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
    return SimpleNamespace(world_size=processes, dataloader_drop_last=drop_last, **sizes)


def test_the_effective_batch_of_a_checkpoint_is_kept_or_refused_with_the_numbers(tmp_path, caplog):
    assert same_accumulation(tmp_path, arguments(8, 2, 3)) == 3  # of an earlier version
    assert "does not say how many rows a step had; it has 48 now" in caplog.text
    caplog.clear()
    write_manifest(tmp_path, rows_per_step=16)
    assert same_accumulation(tmp_path, arguments(8, 2, 1)) == 1
    assert not caplog.records
    assert same_accumulation(tmp_path, arguments(8, 1, 1)) == 2
    said = "16 rows per optimizer step as before: 1 processes with 8 rows each accumulate over 2"
    assert said in caplog.text
    message = (
        r"resume: expected 16 rows per optimizer step .*, got a multiple of 24: 3 processes with 8 "
        r"rows each. Start as many processes as before, or set training.per_device_train_batch_size"
    )
    with pytest.raises(ValueError, match=message):
        same_accumulation(tmp_path, arguments(8, 3, 1))


def test_rows_that_are_left_out_at_an_epochs_end_are_the_same_after_a_resume(tmp_path):
    write_manifest(tmp_path, rows_per_step=16, rows_at_once=8)
    assert same_accumulation(tmp_path, arguments(4, 2, 2, drop_last=True)) == 2
    assert same_accumulation(tmp_path, arguments(16, 1, 1)) == 1
    with pytest.raises(ValueError, match=r"expected 8 rows at once, .* got 16\. Use the old"):
        same_accumulation(tmp_path, arguments(16, 1, 1, drop_last=True))


def test_half_the_rows_at_once_accumulate_twice_after_a_resume(stopped_run, caplog):
    """As on half as many processes."""
    shutil.rmtree(stopped_run / "checkpoint-6")
    before = json.loads((stopped_run / "trainer_state.json").read_text())["log_history"]
    words = ["resume=true", "training.per_device_train_batch_size=4"]
    again = start(stopped_run / "run.yaml", *words)
    assert "4 rows each accumulate over 2 micro-batches" in caplog.text
    assert logged(again["history"]) == pytest.approx(logged(before), rel=1e-5)


def test_a_micro_batch_whose_labels_are_the_negatives_keeps_its_size(make_yaml):
    terms = [{"loss": {"name": "harmonic"}}, {"loss": {"name": "info_nce"}}]
    path = make_yaml(loss={"name": "sum", "terms": terms}, training={"max_steps": 2})
    start(path, "training.save_steps=1")
    shutil.rmtree(path.parent / "run" / "results")
    halved = ["training.per_device_train_batch_size=4", "training.gradient_accumulation_steps=2"]
    with pytest.raises(ValueError, match=r"values for training\.per_device_train_batch_size"):
        start(path.parent / "run" / "run.yaml", "resume=true", *halved)
    accumulated = "training.gradient_accumulation_steps=2"  # what the checkpoint says holds
    assert start(path.parent / "run" / "run.yaml", "resume=true", accumulated)["steps"] == 2


def test_workers_and_evaluated_rows_may_change_when_a_run_is_resumed(stopped_run, finished_results):
    shutil.rmtree(stopped_run / "checkpoint-6")
    words = ["training.dataloader_num_workers=1", "training.per_device_eval_batch_size=3"]
    again = start(stopped_run / "run.yaml", "resume=true", *words)
    assert again["final"] == pytest.approx(finished_results["final"], rel=1e-5)


BLOCK = {"dtype": "bfloat16", "unfreeze": {"last_blocks": 1, "dtype": "bfloat16"}, "dropout": 0.2}
LORA = {"r": 2, "lora_dropout": 0.2, "target_modules": ["query"]}
BEST = {
    "learning_rate": 1.0,  # training goes wrong on purpose: the last checkpoint is not the best
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "post_hoc_loss",
}
PARTS = {
    "LoRA and a bfloat16 block": {"peft": LORA, "model": BLOCK},
    "the best model": {"training": BEST},
}


@pytest.mark.parametrize("sections", PARTS.values(), ids=PARTS)
def test_a_run_that_saves_only_what_trains_ends_with_the_same_bits(
    make_yaml, tmp_path, sections, interrupt
):
    """Killed and resumed as a run that saves whole models and is left alone."""
    training = {"save_steps": 2, **sections.get("training", {})}
    path = make_yaml(**{**sections, "training": training})
    whole = start(path, f"training.output_dir={tmp_path / 'whole'}")
    words = [f"training.output_dir={tmp_path / 'cut'}", "save=trainable"]
    interrupt(5, path, *words)
    again = start(path, *words, "resume=true")
    assert again["final"] == whole["final"]
    files, saved = (
        {p.name: p.read_bytes() for p in (tmp_path / name).glob("*.*") if p.name != "run.yaml"}
        for name in ("whole", "cut")
    )
    del files["trainer_state.json"], saved["trainer_state.json"]  # these have times
    assert saved == files
    assert "model.safetensors" in files
    if "training" in sections:
        state = json.loads((tmp_path / "cut" / "trainer_state.json").read_text())
        assert state["best_global_step"] < 6


@pytest.fixture(scope="module")
def best_results(tmp_path_factory, tiny_base, run_settings):
    """The file of a run whose best checkpoint is that of step 4, and its results."""
    folder = tmp_path_factory.mktemp("best") / "run"
    training = {**BEST, "save_steps": 2, "max_steps": 8}
    settings = run_settings(tiny_base, folder)
    path = write_run(folder.with_suffix(".yaml"), settings, {"training": training})
    return path, start(path)


@pytest.fixture
def moved_run(best_results, tmp_path):
    """Such a run as if it had been killed after step 6 and moved.

    Its folder, how it continues, and the metrics that it has to end with.
    """
    path, results = best_results
    folder = shutil.copytree(path.with_suffix(""), tmp_path / "moved")
    (folder / "results" / "train.json").unlink()
    shutil.rmtree(folder / "checkpoint-8")
    run = load_run_config(path, [f"training.output_dir={folder}", "resume=true"])
    return folder, run, results["final"]


def test_a_moved_run_finds_its_best_checkpoint_where_it_is_now(moved_run):
    folder, run, final = moved_run
    assert train(run)["final"] == final
    state = json.loads((folder / "checkpoint-8" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(folder / "checkpoint-4")
    assert read_run(folder)["training"]["output_dir"] == str(folder)


def test_a_run_without_its_best_checkpoint_is_refused_and_may_continue_before_it(moved_run):
    folder, run, final = moved_run
    shutil.rmtree(folder / "checkpoint-4")
    message = r"'.*/moved/checkpoint-4', the best one, as it was saved, .*: it is missing. Restore"
    with pytest.raises(ValueError, match=message):
        train(run)
    shutil.rmtree(folder / "checkpoint-6")
    assert train(run)["final"] == final


def test_a_best_checkpoint_of_an_earlier_version_is_taken(moved_run):
    """It has no manifest, and those after it have one."""
    folder, run, final = moved_run
    for name in (MANIFEST_NAME, "running_loss_0.json"):
        for path in folder.glob(f"checkpoint-*/{name}"):
            path.unlink()
    assert train(run)["final"] == final
    assert (folder / "checkpoint-8" / MANIFEST_NAME).is_file()


@pytest.fixture(scope="module")
def trainable_run(tmp_path_factory, tiny_base, run_settings):
    """The folder of a run that saved only what trains; beside it is its file."""
    folder = tmp_path_factory.mktemp("trainable") / "run"
    settings = run_settings(tiny_base, folder)
    start(write_run(folder.with_suffix(".yaml"), settings, {"save": "trainable"}))
    return folder


def test_such_a_checkpoint_holds_the_trained_tensors_and_nothing_else(trainable_run):
    final = load_file(trainable_run / "model.safetensors")
    folder = trainable_run / "checkpoint-6"
    saved = load_file(folder / RESUME_FILE)
    trained = {name for name in final if ".layer.2." in name or name == "dist_head.weight"}
    expected = {name: final[name] for name in trained}
    torch.testing.assert_close(saved, expected, rtol=0, atol=0)
    size = sum(final[name].nbytes for name in trained)
    assert size < (folder / RESUME_FILE).stat().st_size < size + 4096  # names and shapes
    left = {"config.json", MANIFEST_NAME, "optimizer.pt", "rng_state.pth", "scheduler.pt"}
    left |= {"running_loss_0.json", "trainer_state.json", RESUME_FILE}
    assert {p.name for p in folder.iterdir()} == left


def test_such_a_checkpoint_is_not_taken_for_a_model(make_yaml, trainable_run):
    run, name = trainable_run, "checkpoint-6"
    message = "expected a model, got a checkpoint that holds only what trains .*resume=true"
    for model_class in (AutoModel, AutoModelForMaskedLM, HarmonicForMaskedLM):
        with pytest.raises(ValueError, match=message):
            model_class.from_pretrained(run / name)
    with pytest.raises(ValueError, match=message):
        AutoModelForMaskedLM.from_pretrained(run, subfolder=name)
    words = [f"model.base={run / name}", "head.init=base_head"]
    with pytest.raises(ValueError, match=message):
        start(make_yaml(), *words)
    with pytest.raises(ValueError, match=message):
        read_trained(run / name)
    with pytest.raises(ValueError, match=message):
        evaluate_folder(run / name)
    with pytest.raises(ValueError, match=message):
        explain_folder(run / name, "return a [MASK]")
    AutoModelForMaskedLM.from_pretrained(run)


@pytest.mark.parametrize("sections", [{}, {"save": "trainable"}, {"peft": LORA}], ids=str)
def test_another_base_than_a_checkpoint_was_trained_on_is_refused(
    make_yaml, tmp_path, tiny_base, interrupt, sections
):
    base = shutil.copytree(tiny_base, tmp_path / "base")
    path = make_yaml(model={"base": str(base)}, **sections)
    interrupt(4, path)
    name = "bert.encoder.layer.0.output.dense.bias"
    change_weights(base / "model.safetensors", lambda weights: weights[name][0].add_(1e-6))
    message = "resume: expected the frozen weights that .*checkpoint-3' was trained on, .*got other"
    with pytest.raises(ValueError, match=message):
        start(path, "resume=true")


@pytest.mark.parametrize("save", ["full", "trainable"])
def test_a_resumed_run_may_save_in_the_other_way(
    make_yaml, finished_run, trainable_run, tmp_path, save
):
    """Files that a checkpoint of the same step had before are not mixed with its own."""
    other = trainable_run if save == "full" else finished_run
    folder = shutil.copytree(other, tmp_path / "run")
    (folder / "run.yaml").write_text(to_yaml(load_run_config(make_yaml())))
    (folder / "results" / "train.json").unlink()
    (folder / "checkpoint-6" / "rng_state.pth").unlink()
    start(make_yaml(), f"save={save}", "resume=true")
    name = "model.safetensors" if save == "full" else RESUME_FILE
    assert [p.name for p in (folder / "checkpoint-6").glob("*.safetensors")] == [name]
    assert weights_in(folder) == weights_in(finished_run)


def test_buffers_are_saved_with_what_trains_and_other_tensors_are_refused(tiny_base, tmp_path):
    def build():
        model = HarmonicForMaskedLM.from_base(tiny_base, head={"name": "dist", "h_exp": -4.0})
        model.model.requires_grad_(False)
        model.model.register_buffer("seen", torch.zeros(2))
        return model

    model, again = build(), build()
    model.model.seen += 3
    save_trained(model, tmp_path)
    load_part_(again, tmp_path)
    assert again.model.seen.tolist() == [3, 3]
    again.model.backbone.embeddings.requires_grad_(True)
    message = "expected the tensors that this run trains, .* such as 'model.backbone.embeddings"
    with pytest.raises(ValueError, match=message):
        load_part_(again, tmp_path)


def test_packed_weights_cannot_be_compared_and_are_saved(make_yaml):
    config = BertConfig(quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    run = load_run_config(make_yaml(), ["save=trainable"])
    with pytest.raises(ValueError, match="save: expected 'full' on a base quantized by bitsandb"):
        check_base_config(run, config)


def test_another_commit_of_the_base_is_refused(run_copy):
    """A branch that was not pinned has moved on; a base without a commit is not compared."""
    config = HarmonicConfig.from_pretrained(run_copy)
    check_continues(run_copy, config, rows_sha256=None)
    change_json(run_copy / "config.json", base_revision=40 * "a")
    check_continues(run_copy, config, rows_sha256=None)
    config.base_revision = 40 * "b"
    with pytest.raises(ValueError, match=f"expected the base at commit {40 * 'a'}, got {40 * 'b'}"):
        check_continues(run_copy, config, rows_sha256=None)
