"""HarmonicTrainingArguments: the recipe by default, what is given honoured, or refused by name."""

import dataclasses
import json

import pytest
import torch
from accelerate import ParallelismConfig
from transformers import HfArgumentParser

from harmonic_sft import HarmonicTrainingArguments, WassersteinLoss
from harmonic_sft.losses import CrossEntropyLoss, KNNLabelSmoothingLoss, SumLoss
from harmonic_sft.training import load_run_config
from harmonic_sft.training.arguments import check_launch


def arguments_with(**fields):
    return HarmonicTrainingArguments("out", **{"report_to": "none", "use_cpu": True, **fields})


def config_of(arguments=None, **fields):
    return (arguments or arguments_with(**fields)).config_for("base", task="masked_lm")


def test_the_defaults_are_the_neobert_recipe():
    arguments = arguments_with()
    recipe = load_run_config("configs/neobert.yaml")
    config = config_of(arguments)
    assert (config.h_exp, config.schedule) == (recipe.h_exp, recipe.schedule)
    assert (config.head, config.loss) == (recipe.head, recipe.loss)
    assert config.data.mask == recipe.data.mask
    assert config.model.unfreeze.last_blocks == recipe.model.unfreeze.last_blocks == 1
    betas = ("learning_rate", "adam_beta1", "adam_beta2", "weight_decay")
    assert [getattr(arguments, key) for key in betas] == [recipe.training[key] for key in betas]


@pytest.mark.parametrize(
    ("given", "start", "end"),
    [
        (None, -12.0, -4.0),
        (-12.0, -12.0, -12.0),
        ({"start": -8.0, "end": -6.0}, -8.0, -6.0),
    ],
)
def test_a_number_holds_the_exponent_and_nothing_anneals_it(given, start, end):
    h_exp = config_of(h_exp=given).h_exp
    assert (h_exp.start, h_exp.end) == (start, end)
    linear = config_of(head="linear")
    assert (linear.h_exp, linear.loss.name) == (None, "cross_entropy")


def test_a_dtype_of_pytorch_is_taken_as_by_its_name():
    assert arguments_with(dtype=torch.bfloat16) == arguments_with(dtype="bfloat16")
    assert config_of(dtype=torch.bfloat16).model.dtype == "bfloat16"


def test_sections_take_what_the_yaml_file_takes():
    config = config_of(
        head={"name": "rotation", "inner": {"name": "dist", "unit_sphere": True}},
        loss=KNNLabelSmoothingLoss(epsilon=0.2),
        unfreeze=["*.layer.1.*"],
        mask=0.3,
        schedule={"decay": "linear"},
        packing=True,
    )
    assert config.head_settings()["inner"]["h_exp"] == -12.0
    assert config.loss == KNNLabelSmoothingLoss(epsilon=0.2)
    assert config.model.unfreeze.patterns == ["*.layer.1.*"]
    assert config.data.mask.probability == 0.3
    assert config.data.packing
    assert (config.schedule.decay, config.schedule.warmup_ratio) == ("linear", 0.1)


class OwnLoss(CrossEntropyLoss):
    """A name of ours, which would be read as the loss that has it."""


@pytest.mark.parametrize("loss", [OwnLoss(), max, SumLoss(terms=[{"loss": OwnLoss()}])])
def test_a_loss_of_the_users_own_is_refused(loss):
    with pytest.raises(ValueError, match=r"^loss: expected one of .*, got .*compute_loss_func"):
        HarmonicTrainingArguments("runs/own", loss=loss)


RISES = "training.metric_for_best_model: expected 'post_hoc_loss' while h_exp is annealed, got"


def test_arguments_of_transformers_are_kept_and_derived_values_are_not():
    cosine = {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": '{"num_cycles": 1}'}
    assert config_of(**cosine).training["lr_scheduler_kwargs"] == {"num_cycles": 1}
    training = config_of(max_steps=7, eval_strategy="steps", eval_steps=2).training
    assert training["max_steps"] == 7
    assert training["eval_strategy"] == "steps"
    assert "accelerator_config" not in training
    assert "label_names" not in training


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"parallelism_config": ParallelismConfig()},
            "^training.parallelism_config: expected nothing, got Para.*; it is not supported",
        ),
        ({"save_on_each_node": True}, "save_on_each_node: .* all nodes share one folder"),
        ({"ddp_static_graph": True}, "ddp_static_graph: .* it fails with gradient accumulation"),
        ({"head": 3}, "head: expected a name or a dictionary, got 3"),
        ({"head": {"eps": 1e-4}}, "^head.name: expected a value, got nothing. Add this key"),
        (
            {"loss": WassersteinLoss},
            r"loss: expected .* class WassersteinLoss. Write Wasserstein.*\(",
        ),
        (
            {"push_to_hub": True, "hub_model_id": "me/mine", "hub_strategy": "checkpoint"},
            "hub_strategy: expected 'every_save' or 'end', got 'checkpoint'",
        ),
        # What transformers would take, or end at in a traceback.
        (
            {"early_stopping_patience": 3, "eval_strategy": "steps"},
            "early_stopping_patience: expected null without training.load_best_model_at_end, got 3",
        ),
        (
            {"early_stopping_patience": 3, "load_best_model_at_end": True, "save_strategy": "no"},
            "early_stopping_patience: expected null without training.eval_strategy, got 3",
        ),
        ({"log_level": "x"}, r"training.log_level: expected one of \['detail', .*, got 'x'"),
        ({"log_level_replica": "x"}, "training.log_level_replica: expected one of"),
        (
            {"deepspeed": {"x": 1}},
            "training.deepspeed: expected nothing, .* would lose norm 1; use",
        ),
        (
            {"eval_accumulation_steps": 0},
            "^training.eval_accumulation_steps: expected a number above 0, got 0",
        ),
        ({"data_seed": 0}, "training.data_seed: expected nothing, got 0; training.seed decides"),
        # What reads the loss of an annealed run, which rises by itself.
        ({"metric_for_best_model": "eval_loss"}, RISES),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, RISES),
    ],
)
def test_what_cannot_be_honoured_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        config_of(**fields)


def test_arguments_that_are_set_later_are_checked_like_the_first():
    with pytest.raises(ValueError, match=r"training.log_level: expected one of .*, got 'x'"):
        config_of(arguments_with().set_logging(level="x"))
    arguments = arguments_with()
    arguments.activation_checkpointing = True  # as `set_training` does
    assert config_of(arguments).training["gradient_checkpointing"]
    arguments = arguments_with().set_evaluate(strategy="steps", steps=2)
    assert config_of(arguments).training["eval_steps"] == 2
    assert arguments.eval_delay == 0  # transformers sets None, and cannot compare it


def test_a_yaml_file_and_its_arguments_say_the_same(make_yaml):
    path = make_yaml(
        loss={"name": "knn_label_smoothing"}, training={"seed": 3, "optim": "adafactor"}
    )
    run = load_run_config(path)
    again = run.training_arguments().config_for(run.model.base, task=run.model.task)
    for section in ("model", "head", "h_exp", "loss", "schedule", "oom_fallback"):
        assert getattr(again, section) == getattr(run, section)
    defaults = arguments_with()
    left_out = {key for key in run.training if run.training[key] == getattr(defaults, key)}
    assert again.training == {k: v for k, v in run.training.items() if k not in left_out} | {
        key: run.training[key] for key in left_out & again.training.keys()
    }
    assert again.data.mask == run.data.mask


@pytest.mark.parametrize(
    ("metric", "known", "greater"),
    [
        ("eval_a_ece", "ece", False),
        ("a_post_hoc_ece", "post_hoc_ece", False),
        ("eval_a_top_5_accuracy", "top_5_accuracy", True),
        ("eval_right", None, True),
    ],
)
def test_the_best_model_is_that_of_a_metric_of_any_evaluation_set(metric, known, greater):
    arguments = arguments_with(
        metric_for_best_model=metric,
        load_best_model_at_end=True,
        eval_strategy="steps",
        eval_steps=500,
    )
    assert arguments.greater_is_better is greater
    training = config_of(arguments).training
    assert training.get("metric_for_best_model") == known


def test_no_reporter_is_no_reporter():
    arguments = arguments_with(report_to=None)
    assert arguments.report_to == []
    assert not config_of(arguments).training.get("report_to")


def test_arguments_are_replaced():
    for given in ({}, {"warmup_steps": 3}):
        arguments = arguments_with(**given)
        again = dataclasses.replace(arguments, max_steps=2)
        found, expected = (config_of(one).training for one in (again, arguments))
        # transformers writes into the arguments themselves what they say of reporters and the CPU.
        for settings in (found, expected):
            settings["report_to"] = []
            settings.pop("dataloader_pin_memory", None)
        assert found == expected | {"max_steps": 2}


def test_the_parser_of_transformers_and_reporters_read_them():
    parse = HfArgumentParser(HarmonicTrainingArguments).parse_args_into_dataclasses
    words = ["--output_dir", "out", "--max_steps", "5", "--packing", "--use_cpu"]
    (arguments,) = parse([*words, "--head", "cosine"])
    assert (arguments.max_steps, arguments.packing, arguments.head) == (5, True, "cosine")
    for text, value in (("2", 2), ("*", "*"), ("encoder.layer.1*", "encoder.layer.1*")):
        assert parse([*words, "--unfreeze", text])[0].unfreeze == value
    plain = json.loads(arguments_with(loss=WassersteinLoss()).to_json_string())
    assert plain["loss"]["name"] == "wasserstein"


def test_every_field_has_a_help():
    fields = HarmonicTrainingArguments.__dataclass_fields__
    own = HarmonicTrainingArguments.__annotations__
    assert [name for name in own if not fields[name].metadata.get("help")] == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"padding_free": True},
            r"^data\.padding_free: expected false with 2 processes, got true",
        ),
        (
            {"average_tokens_across_devices": False},
            r"average_tokens_across_devices: expected true with 2 processes, got false",
        ),
    ],
)
def test_what_several_processes_cannot_follow_is_refused(fields, message, monkeypatch):
    args = arguments_with(**fields)
    check_launch(args)
    monkeypatch.setattr(HarmonicTrainingArguments, "world_size", 2)
    with pytest.raises(ValueError, match=message):
        check_launch(args)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ACCELERATE_USE_FSDP", "true", r"expected no FSDP.*shards of the head"),
        ("ACCELERATE_USE_DEEPSPEED", "true", r"no DEEPSPEED.*prototypes would lose norm 1"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "no MEGATRON_LM"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "no PARALLELISM_CONFIG.*share their rows"),
        ("ACCELERATE_MIXED_PRECISION", "bf16", "expected --mixed_precision no, got bf16"),
        ("WORLD_SIZE", "2", "launch: expected 2 processes that work together"),
    ],
)
def test_launches_that_would_not_do_what_they_say_are_refused(
    variable, value, message, make, arguments, monkeypatch
):
    args = arguments()
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=message):
        make(args)


def test_several_gpus_in_one_process_are_refused(arguments, monkeypatch):
    args = arguments()
    monkeypatch.setattr(args, "_n_gpu", 2)
    message = (
        "launch: expected one GPU per process, got 2. .* In a notebook use accelerate.notebook_"
    )
    with pytest.raises(ValueError, match=message):
        check_launch(args)


@pytest.mark.parametrize(
    "changed",
    [
        {"even_batches": False},
        {"split_batches": True},
        {"dispatch_batches": True},
        {"use_seedable_sampler": False},
    ],
)
def test_other_settings_of_accelerate_than_the_defaults_are_refused(arguments, changed):
    args = arguments(accelerator_config=changed)
    with pytest.raises(ValueError, match=r"accelerator_config: expected nothing, got .*own rows"):
        check_launch(args)
