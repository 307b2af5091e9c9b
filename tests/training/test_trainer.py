"""The Trainer: what must be equal is equal, and what goes wrong is told."""

import json
import math

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback, default_data_collator

from harmonic_sft.training import resumable_trainer
from harmonic_sft.training.callbacks import StoppedError
from harmonic_sft.training.checkpoints import load_running_loss
from harmonic_sft.training.trainer import HarmonicTrainer
from tests.training.conftest import logged, losses, prepared, start, trained, weights_in


def test_accumulation_equals_a_big_batch(make_yaml):
    runs = []
    for size, accumulation in [(8, 1), (2, 4)]:
        path = make_yaml(
            training={
                "per_device_train_batch_size": size,
                "gradient_accumulation_steps": accumulation,
                # Warmed up from 1e-3: Adam amplifies rounding where gradients are about 0.
                "learning_rate": 1e-3,
                "max_steps": 3,
            }
        )
        trainer = trained(path)
        runs.append((torch.tensor(losses(trainer)), trainer.model.dist_head.weight.detach()))
    (values, head), (expected, same) = runs
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head, same, rtol=0, atol=1e-4)


def test_the_same_run_twice_is_the_same_to_the_bit(
    finished_run, finished_results, make_yaml, tmp_path
):
    assert start(make_yaml())["final"] == finished_results["final"]
    for name in ("", "checkpoint-3"):
        assert weights_in(finished_run / name) == weights_in(tmp_path / "run" / name)


def test_only_the_last_block_and_the_head_move_and_prototypes_keep_norm_one(make_yaml):
    worst = []

    class Norms(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            norms = kwargs["model"].dist_head.weight.double().norm(dim=-1)
            worst.append((norms - 1).abs().max().item())

    path = make_yaml(training={"gradient_accumulation_steps": 2, "max_grad_norm": 0.1})
    trainer = prepared(path)
    trainer.add_callback(Norms())
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert len(worst) == 6
    assert max(worst) < 1e-6
    assert (trainer.model.dist_head.weight - before["dist_head.weight"]).norm() > 0.1
    moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    expected = {n for n in before if ".layer.2." in n or n == "dist_head.weight"}
    # A key's bias shifts all scores of a query alike: softmax gives it no gradient.
    assert expected - moved <= {"model.backbone.encoder.layer.2.attention.self.key.bias"}
    assert moved <= expected


BFLOAT16 = {"dtype": "bfloat16", "unfreeze": {"last_blocks": 1, "dtype": "bfloat16"}}
KNN = {"name": "knn_label_smoothing", "num_neighbors": 4}
LORA = {"r": 4, "lora_dropout": 0.2, "target_modules": ["query", "output.dense"]}
TERMS = [
    {"loss": {**KNN, "refresh_every": 3}},
    {"weight": 0.5, "loss": {"name": "wasserstein", "ground": "fixed"}},
]
RESUMED = {
    "LoRA beside a bfloat16 block with masters": {"model": BFLOAT16, "peft": LORA},
    "neighbors found again, and a fixed ground": {"loss": {"name": "sum", "terms": TERMS}},
    "a stream with dropout": {"model": {"dropout": 0.2}, "data": {"window": 16, "packing": True}},
}


@pytest.mark.parametrize("sections", RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_equals_an_uninterrupted_one(
    make_yaml, tmp_path, text_file, sections, interrupt
):
    """Weights, adapters and exponent bit for bit, across an epoch's end.

    Rotation deletes the checkpoint that the second session continued from.
    """
    streaming = "data" in sections
    data = {
        "sources": [{"path": str(text_file), "streaming": streaming}],
        "eval": {"documents": 80},
    }
    shared = {"max_steps": 6, "save_steps": 4, "gradient_accumulation_steps": 2}
    shared["save_total_limit"] = 1
    path = make_yaml(**{**sections, "data": data | sections.get("data", {})}, training=shared)
    whole = start(path, f"training.output_dir={tmp_path / 'whole'}")
    cut = f"training.output_dir={tmp_path / 'cut'}"
    interrupt(5, path, cut)  # 1 after the checkpoint
    again = start(path, cut, "resume=true")
    assert (again["head"], again["final"]) == (whole["head"], whole["final"])
    assert logged(again["history"]) == logged(whole["history"])
    assert streaming or logged(whole["history"], "epoch")[-1] > 1
    files = [
        {file.relative_to(run): file.read_bytes() for file in run.rglob("*.safetensors")}
        for run in (tmp_path / "whole", tmp_path / "cut")
    ]
    assert len(files[0]) == 2 + 2 * ("peft" in sections) + ("loss" in sections)
    assert files[0] == files[1]


def test_a_loss_logged_after_a_resume_is_the_mean_since_the_last_log(
    make_yaml, tmp_path, interrupt
):
    path = make_yaml(training={"max_steps": 5, "save_steps": 3, "logging_steps": 5})
    whole = trained(path, f"training.output_dir={tmp_path / 'whole'}")
    interrupt(4, path)
    again = prepared(path)
    output = again.train(resume_from_checkpoint=True)
    assert losses(again) == losses(whole)
    checkpoint = tmp_path / "run" / "checkpoint-3"
    saved = json.loads((checkpoint / "running_loss_0.json").read_text())
    # Of this session's two steps alone; transformers before 5.19 divides by all five.
    assert again._total_loss_scalar == pytest.approx(5 * losses(whole)[0] - saved["sum"])
    steps = 2 if Version(transformers.__version__) >= Version("5.19") else 5
    assert output.training_loss == pytest.approx(again._total_loss_scalar / steps)
    (checkpoint / "running_loss_1.json").write_text(json.dumps({**saved, "sum": 0.0}))
    assert load_running_loss(checkpoint, again.args) == (saved["sum"] / 2, 0)  # of two processes


def test_nobody_misses_a_tied_weight_when_a_run_is_resumed(
    make_yaml, tmp_path, monkeypatch, caplog
):
    words = ["head={name: linear, tie: true}", "h_exp=null", "loss={name: cross_entropy}"]
    words += ["model.unfreeze={patterns: ['*']}", "training.max_steps=1"]
    trainer, again = trained(make_yaml(), *words), []
    monkeypatch.setattr(resumable_trainer, "load_checked", lambda *args, **kwargs: again.append(1))
    trainer._load_from_checkpoint(str(tmp_path / "run" / "checkpoint-1"))
    assert not again
    assert "of transformers" not in caplog.text


def test_a_checkpoint_of_another_version_of_transformers_is_named(make_yaml, tmp_path, caplog):
    trainer = trained(make_yaml(), "training.max_steps=1")
    folder = tmp_path / "run" / "checkpoint-1"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_version": "5.0.0"}))
    trainer._load_from_checkpoint(str(folder))
    assert f"checkpoint-1 is of transformers 5.0.0, this is {transformers.__version__}." in (
        caplog.text
    )


def test_a_checkpoint_that_does_not_fill_the_model_is_refused(make_yaml, tmp_path, caplog):
    trainer = trained(make_yaml(), "training.max_steps=1")
    path, name = tmp_path / "run" / "checkpoint-1" / "model.safetensors", "dist_head.weight"
    weights = load_file(path)
    save_file({**weights, "model.of_another": weights[name].clone()}, path, {"format": "pt"})
    trainer._load_from_checkpoint(str(path.parent))
    assert "checkpoint-1 has more: model.of_another." in caplog.text
    del weights[name]
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ValueError, match=f"got 1 weights missing: {name}"):
        trainer._load_from_checkpoint(str(path.parent))


def test_the_best_checkpoint_comes_back_with_its_exponent(make_yaml, tmp_path):
    """Training goes wrong on purpose: the first checkpoint is the best one."""
    path = make_yaml(
        model={"unfreeze": {"last_blocks": 0}},
        peft={"r": 4, "target_modules": ["query", "value"]},
        training={
            "max_steps": 9,
            "learning_rate": 1.0,
            "eval_strategy": "steps",
            "eval_steps": 3,
            "save_steps": 9,  # a new best is saved in between
            "load_best_model_at_end": True,
            "metric_for_best_model": "post_hoc_loss",
        },
        schedule={"warmup_ratio": 0.9, "decay_ratio": 0.1},
    )
    results = start(path)
    evaluated = {
        entry["step"]: entry["eval_post_hoc_loss"]
        for entry in results["history"]
        if entry.get("step") in (3, 6, 9) and "eval_runtime" in entry
    }
    best = min(evaluated, key=evaluated.__getitem__)
    assert best < 9
    assert results["final"]["h_exp"] == pytest.approx(-12 + 8 * best / 9)
    assert results["head"]["h_exp"] == results["final"]["h_exp"]
    assert weights_in(tmp_path / "run" / f"checkpoint-{best}") == weights_in(tmp_path / "run")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_of_a_bfloat16_body_train_in_their_own_dtype(make_yaml, dtype):
    """Through master weights, or under autocast."""
    unfreeze = {"last_blocks": 1, "dtype": dtype}
    model = {"dtype": "bfloat16", "unfreeze": unfreeze}
    trainer = trained(make_yaml(model=model, training={"max_steps": 1}))
    dtypes = {n: p.dtype for n, p in trainer.model.named_parameters()}
    assert dtypes.pop("dist_head.weight") == torch.float32
    block = {dtypes.pop(name) for name in list(dtypes) if ".layer.2." in name}
    assert block == {getattr(torch, dtype)}
    assert set(dtypes.values()) == {torch.bfloat16}
    assert losses(trainer)[-1] > 0


def test_a_run_on_another_keeps_what_that_trained_in_float32(make_yaml, tmp_path):
    """On a bfloat16 body, with the head that it had."""
    model = {"dtype": "bfloat16", "unfreeze": {"last_blocks": 1, "dtype": "float32"}}
    path = make_yaml(model=model, h_exp=-12.0)
    first = start(path)
    words = [f"model.base={tmp_path / 'run'}", "head.init=base_head", "training.max_steps=1"]
    after = start(path, *words, f"training.output_dir={tmp_path / 'after'}")
    assert after["before"]["loss"] == first["final"]["loss"]
    other = "model.unfreeze={patterns: ['encoder.layer.0.*'], dtype: float32}"
    start(path, *words, other, f"training.output_dir={tmp_path / 'other'}")
    before, found = (load_file(tmp_path / n / "model.safetensors") for n in ("run", "other"))
    block = [name for name in before if ".layer.2." in name]
    assert block
    assert all(torch.equal(found[name], before[name]) for name in block)


def test_gradients_whose_norm_overflows_stop_before_the_step_and_name_its_rows(
    make_yaml, tmp_path, monkeypatch, caplog
):
    """The gradients are finite; clipped by their norm, which is not, they would be zeros."""
    original, seen = HarmonicTrainer.training_step, []

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = original(self, model, inputs, num_items_in_batch)
        if self.state.global_step == 4:
            model.dist_head.weight.grad[0, 0] = 1e30
            seen.extend([model, model.dist_head.weight.detach().clone(), inputs["input_ids"]])
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(HarmonicTrainer, "training_step", training_step)
        message = r"gradient norm: expected a finite number, got inf at step 5. .* names the rows"
        with pytest.raises(StoppedError, match=message):
            start(make_yaml())
    model, before, input_ids = seen
    assert torch.equal(model.dist_head.weight, before)
    saved = json.loads((tmp_path / "run" / "bad_step_5_0.json").read_text())
    assert saved["gradient_norm"] == "inf"
    rows = prepared(make_yaml(), "resume=true").train_dataset.rows
    lengths = [len(rows[example["row"]]["input_ids"]) for example in saved["examples"]]
    assert lengths == (input_ids != 0).sum(1).tolist()  # 0 is padding
    with monkeypatch.context() as patch:  # the cause is still there
        patch.setattr(HarmonicTrainer, "training_step", training_step)
        resumed = start(make_yaml(), "resume=true", "skip_bad_steps=1")
    assert resumed["steps"] == 6
    logged = [(e["step"], e["grad_norm"] > 0) for e in resumed["history"] if "grad_norm" in e]
    assert logged == [(step, True) for step in (1, 2, 3, 4, 6)]
    assert "Step 5 was left out" in caplog.text
    assert math.isfinite(resumed["final"]["loss"])


def test_a_step_that_is_left_out_does_not_count_in_the_loss_that_is_logged(
    make, arguments, monkeypatch
):
    original, taken = HarmonicTrainer.training_step, []

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = original(self, model, inputs, num_items_in_batch)
        if self.state.global_step == 1:
            model.dist_head.weight.grad[0, 0] = math.inf
        else:
            taken.append(loss.item())
        return loss

    monkeypatch.setattr(HarmonicTrainer, "training_step", training_step)
    args = arguments(logging_steps=3, max_steps=3, skip_bad_steps=1, gradient_accumulation_steps=1)
    trainer = make(args)
    output = trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(taken) == 2
    assert logged == [pytest.approx(sum(taken) / 2)]
    if Version(transformers.__version__) >= Version("5.19"):  # earlier ones divide by all steps
        assert output.training_loss == pytest.approx(sum(taken) / 2)


def test_tokens_of_a_bad_step_are_written_where_its_rows_have_no_names(make, arguments, tmp_path):
    rows = [{"input_ids": [2, 5 + place, 3], "labels": [-100, 5, -100]} for place in range(4)]

    def loss(outputs, labels, num_items_in_batch):
        return outputs["logits"].sum() * math.nan

    args = arguments(per_device_train_batch_size=2, gradient_accumulation_steps=2)
    trainer = make(
        args,
        train_dataset=rows,
        data_collator=default_data_collator,
        compute_loss_func=loss,
    )
    message = (
        r"loss: expected a finite number, got nan at step 1\. .* in Python skip_bad_steps=1 and"
    )
    with pytest.raises(StoppedError, match=message):
        trainer.train()
    saved = json.loads((tmp_path / "run" / "bad_step_1_0.json").read_text())
    found = sorted(example["input_ids"] for example in saved["examples"])
    assert found == [row["input_ids"] for row in rows]


DECAYED = {  # heads, and which of their weights decay
    "tied": ({"name": "dist", "tie": True}, []),
    "dense": ({"name": "transform", "inner": {"name": "dist"}}, ["dense_weight"]),
    "nested": (
        {"name": "rotation", "inner": {"name": "transform", "inner": {"name": "dist"}}},
        ["inner.dense_weight"],
    ),
    "linear": ({"name": "linear"}, ["weight"]),
    "heads": ({"name": "multi_head", "inner": {"name": "linear"}}, ["inner.weight"]),
}


@pytest.mark.parametrize(("head", "expected"), DECAYED.values(), ids=DECAYED)
def test_weight_decay_leaves_prototypes_out(make_yaml, head, expected):
    """It is for linear heads, also inside another one, and for a dense layer before prototypes."""
    sections = {"model": {"unfreeze": {"patterns": ["*"]}}} if "tie" in head else {}
    if "linear" in str(head):
        sections = {"h_exp": None, "loss": {"name": "cross_entropy"}}
    trainer = prepared(make_yaml(head=head, training={"weight_decay": 0.1}, **sections))
    decayed = trainer.get_decay_parameter_names(trainer.model)
    of_head = dict(trainer.model.dist_head.named_parameters(remove_duplicate=False))
    assert [name for name in of_head if f"dist_head.{name}" in decayed] == expected
    assert not [n for n in decayed if "word_embeddings" in n and "tie" in head]
    assert "model.backbone.encoder.layer.2.output.dense.weight" in decayed


def test_a_step_left_out_whose_loss_is_no_number_is_not_logged(make, arguments, monkeypatch):
    original = HarmonicTrainer.compute_loss

    def compute_loss(self, *args, **kwargs):
        loss = original(self, *args, **kwargs)
        return loss * math.nan if self.state.global_step == 1 else loss

    monkeypatch.setattr(HarmonicTrainer, "compute_loss", compute_loss)
    trainer = make(arguments(max_steps=4, skip_bad_steps=1))
    trainer.train()
    assert len(losses(trainer)) == 3
    assert all(map(math.isfinite, losses(trainer)))


def test_a_training_leaves_its_arguments_as_they_were(make, arguments):
    given = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 3}
    make(arguments(**given, per_device_train_batch_size=8)).train()
    args = arguments(**given, per_device_train_batch_size=4)
    before = args.to_dict()
    make(args).train(resume_from_checkpoint=f"{args.output_dir}/checkpoint-2")
    assert args.to_dict() == before
