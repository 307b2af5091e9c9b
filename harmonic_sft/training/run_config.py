"""RunConfig: everything one run needs, as one YAML file says it."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass
from transformers import TrainingArguments

from harmonic_sft.config import STRICT, apply_overrides, check_fields, parse, read_yaml
from harmonic_sft.data import DataConfig, MaskConfig, check_label_settings
from harmonic_sft.losses import LOSSES, refresh_intervals
from harmonic_sft.models import build_head
from harmonic_sft.training.head_section import (
    HeadSection,
    head_settings,
    measures_distances,
    one_of,
)
from harmonic_sft.training.sections import (
    HExpConfig,
    HubConfig,
    ModelConfig,
    PeftConfig,
    ScheduleConfig,
)

# transformers' arguments that another section of the file decides, or that would break the recipe.
RESERVED = {
    "fp16": "use model.dtype: bfloat16; prototypes need more than 16 bits",
    "bf16": "model.dtype and model.unfreeze.dtype decide",
    "fp16_full_eval": "it would cast the head to 16 bits",
    "bf16_full_eval": "it would cast the head to 16 bits",
    "lr_scheduler_type": "the schedule section decides",
    "lr_scheduler_kwargs": "the schedule section decides",
    "warmup_steps": "the schedule section decides",
    "label_smoothing_factor": "the loss section decides",
    "auto_find_batch_size": "it changes the effective batch; use oom_fallback",
    "push_to_hub": "write hub: {push: true, repo_id: owner/name}",
    "hub_model_id": "write hub: {push: true, repo_id: owner/name}",
    "hub_strategy": "write hub: {push: true, every_save: true}",
    "hub_token": "log in with `hf auth login`; a token in a file leaks",
    "resume_from_checkpoint": "use resume: true",
    "save_only_model": "such a checkpoint cannot be resumed",
    "data_seed": "training.seed decides",
    "train_sampling_strategy": "the order is shuffled by training.seed",
    "tf32": "prototypes need all digits of float32",
    "deepspeed": "it is not supported; use DDP through accelerate launch",
    "fsdp": "it is not supported yet; use DDP through accelerate launch",
    "fsdp_config": "it is not supported yet; use DDP through accelerate launch",
    "use_liger_kernel": "it replaces the head's loss",
    "activation_checkpointing": "use gradient_checkpointing",
    "activation_checkpointing_kwargs": "use gradient_checkpointing",
    "gradient_checkpointing_kwargs": "use gradient_checkpointing",
}
POSITIVE = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "logging_steps",
    "save_steps",
    "eval_steps",
    "learning_rate",
    "num_train_epochs",
)
TOKEN_INITS = ("input_embeddings", "output_embeddings", "base_head")
CLASS_INITS = ("class_means", "random", "base_head")
CLASSIFICATION = ("sequence_classification", "token_classification")
TASK_INITS = {
    "masked_lm": TOKEN_INITS,
    "causal_lm": TOKEN_INITS,
    **dict.fromkeys(CLASSIFICATION, CLASS_INITS),
}
WIDTH = 4 * math.lcm(*range(1, 17))
LossSection: Any = one_of(tuple(LOSSES.values()))
METRICS = {  # of an evaluation, and whether more of it is better
    "loss": False,
    "accuracy": True,
    "error_cosine": True,
    "ece": False,
    "post_hoc_loss": False,
    "post_hoc_ece": False,
}
DEFAULTS = {
    "adam_beta1": 0.95,
    "adam_beta2": 0.95,
    "learning_rate": 2e-4,
    "weight_decay": 0.0,
    "logging_steps": 10,
    "save_total_limit": 3,
    "seed": 42,
}
FORCED = {
    "remove_unused_columns": False,  # our rows hold what the model takes, and nothing else
    "ddp_find_unused_parameters": False,  # frozen parameters are known not to take part
    "logging_nan_inf_filter": False,  # it would hide what the trainer stops at
    "include_num_input_tokens_seen": "non_padding",
}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig:
    """One run. Every field is a section or a key of the YAML file."""

    model: ModelConfig
    head: HeadSection
    h_exp: HExpConfig | None = Field(None, description="Only for a dist head, which needs it")
    peft: PeftConfig | None = Field(None, description="LoRA beside what model.unfreeze trains")
    loss: LossSection
    data: DataConfig
    training: dict[str, Any] = Field(description="transformers.TrainingArguments")
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    oom_fallback: bool = Field(True, description="After running out of memory, go on cheaper")
    hub: HubConfig = Field(default_factory=HubConfig)
    neighbors: list[str] = Field(
        default_factory=lambda: ["king", "dog", "paris", "doctor", "monday", "three", "money"],
        description="Words whose nearest prototypes are shown before and after",
    )
    resume: bool = Field(False, description="Go on with the run in output_dir")

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_task(self)
        _check_head(self)
        _check_peft(self)
        _check_training(self.training, self)
        return self

    @property
    def output_dir(self) -> Path:
        """Where the run writes everything."""
        return Path(self.training["output_dir"])

    @property
    def is_stream(self) -> bool:
        """Whether the documents are read while training."""
        return any(source.streaming for source in self.data.sources)

    @property
    def seed(self) -> int:
        """The seed of masks, order and initialization."""
        return self.training["seed"]

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether blocks that hold a graph recompute it."""
        return bool(self.training.get("gradient_checkpointing", False))

    def head_settings(self) -> dict[str, Any]:
        """Return what `build_head` takes."""
        h_exp = None if self.h_exp is None else self.h_exp.start
        return head_settings(self.head, h_exp=h_exp, learn_h_exp=self.learns_h_exp)

    @property
    def learns_h_exp(self) -> bool:
        """Whether the exponent is a parameter."""
        return self.h_exp is not None and self.h_exp.schedule == "learned"

    def training_arguments(self) -> TrainingArguments:
        """Build transformers' arguments.

        Raises:
            ValueError: transformers refuses a value.
        """
        own = {
            key: value for key, value in self.training.items() if key != "gradient_checkpointing"
        }
        metric = _best_metric(own)
        computed: dict[str, Any] = {
            "greater_is_better": None if metric is None else METRICS[metric],
            "dataloader_pin_memory": torch.cuda.is_available(),  # it warns without a GPU
            **own,
            **FORCED,
        }
        computed["ignore_data_skip"] = self.is_stream  # streams know themselves where they stood
        return TrainingArguments(**computed)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the trainer needs beside transformers' arguments."""

    schedule: ScheduleConfig
    h_exp: HExpConfig | None = None
    oom_fallback: bool = True
    gradient_checkpointing: bool = False


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run from its YAML file and the command line.

    Args:
        path: The file; its name gives the default `training.output_dir`, `runs/NAME`.
        overrides: `key.key=value`, each read as YAML.

    Raises:
        ValueError: One line per problem, with the nearest valid key for an unknown one.
    """
    data = apply_overrides(read_yaml(path), overrides)
    training = data.get("training")
    if isinstance(training, dict):
        own = {"output_dir": str(Path("runs") / Path(path).stem)}
        training = check_fields(TrainingArguments, {**own, **DEFAULTS, **training}, "training")
        if not training["output_dir"]:
            raise ValueError("training.output_dir: expected a folder, got nothing")
        training["output_dir"] = str(Path(training["output_dir"]).expanduser())
        data = {**data, "training": training}
    return parse(RunConfig, data)


def _check_task(run: RunConfig) -> None:
    task, init = run.model.task, run.head.init
    inits = TASK_INITS[task]
    if init not in inits:
        raise ValueError(f"head.init: expected one of {list(inits)} for {task}, got {init!r}")
    if task in CLASSIFICATION:
        check_label_settings(run.data)
        if run.head.tie:
            raise ValueError(
                f"head.tie: expected false for {task}, got true. Classes are no tokens"
            )
    elif run.data.label_column is not None or run.data.eval.source is not None:
        raise ValueError(
            f"data: expected no label_column and no eval.source for {task}, got one. "
            "Set model.task: sequence_classification, or leave them out"
        )
    if task == "causal_lm" and run.data.mask != MaskConfig():
        raise ValueError(
            "data.mask: expected nothing for causal_lm, got a section. A decoder predicts every "
            "token from those before it; remove it"
        )


def _check_head(run: RunConfig) -> None:
    name = run.head.name
    settings = run.head_settings()
    distances = measures_distances(settings)
    if distances and run.h_exp is None:
        raise ValueError(f"h_exp: expected start and end for a {name} head, got nothing")
    if not distances and run.h_exp is not None:
        raise ValueError(f"h_exp: expected nothing for a {name} head, got a section. Remove it")
    if not distances and run.loss.name == "harmonic":
        raise ValueError(f"loss.name: expected 'cross_entropy' for a {name} head, got 'harmonic'")
    with torch.device("meta"):  # the head's own checks, at a size that most numbers divide
        head = build_head(settings, hidden_size=WIDTH, vocab_size=2)
    run.loss.check(head)
    if run.loss.name == "distill" and run.model.task != "causal_lm":
        raise ValueError(
            f"loss.name: expected another one for {run.model.task}, got 'distill'. Only the head "
            "of a published decoder is kept as the teacher"
        )
    if run.h_exp is not None and run.h_exp.calibrate and not head.scaled_by_h_exp:
        raise ValueError(
            f"h_exp.calibrate: expected false for head {name}, got true. Its logits are not "
            "proportional to h_exp"
        )
    if run.head.tie and run.model.dtype != "float32":
        raise ValueError(
            f"head.tie: expected false with model.dtype {run.model.dtype}, got true. "
            "The head is float32 and so would have to be the embeddings"
        )
    unfreeze = run.model.unfreeze
    if run.model.dtype == "float32" and unfreeze.dtype == "bfloat16":
        raise ValueError(
            "model.unfreeze.dtype: expected 'float32' on a float32 body, got 'bfloat16'. "
            "Set model.dtype: bfloat16 too"
        )
    if run.head.tie and unfreeze.last_blocks is not None:
        raise ValueError(
            "head.tie: expected false with model.unfreeze.last_blocks, got true. A tied head "
            "trains the token embeddings; name them in model.unfreeze.patterns if that is meant"
        )


def _check_peft(run: RunConfig) -> None:
    if run.peft is None:
        return
    if run.head.tie:
        raise ValueError(
            "head.tie: expected false with a peft section, got true. An adapter holds the head "
            "alone, without the embeddings it would be tied to"
        )
    lists = {
        "target_modules": run.peft.target_modules,
        "layers_to_transform": run.peft.layers_to_transform,
    }
    for key, value in lists.items():
        if value == []:
            raise ValueError(f"peft.{key}: expected at least one, got none. Leave the key out")


def _check_training(training: dict[str, Any], run: RunConfig) -> None:
    for key, instead in RESERVED.items():
        if training.get(key):
            got = "a secret" if key == "hub_token" else repr(training[key])
            raise ValueError(f"training.{key}: expected nothing, got {got}; {instead}")
    if run.is_stream and training.get("max_steps", 0) <= 0:
        raise ValueError("training.max_steps: expected a number above 0 for a stream, got none")
    _check_numbers(training)
    _check_refresh(training, refresh_intervals(run.loss))
    _check_best_model(training, annealed=run.h_exp is not None and run.h_exp.start != run.h_exp.end)
    low_precision = run.model.unfreeze.dtype == "bfloat16"
    optim = str(training.get("optim", "adamw_torch"))
    if low_precision and not optim.startswith("adamw_torch"):
        raise ValueError(
            f"training.optim: expected adamw_torch for bfloat16 weights, got {optim!r}. "
            "Or set model.unfreeze.dtype: float32"
        )


def _check_refresh(training: dict[str, Any], intervals: list[int]) -> None:
    """Let a resumed run find the neighbors of an uninterrupted one: both look at a checkpoint."""
    strategy = training.get("save_strategy", "steps")
    save_steps = training.get("save_steps", 500)
    for interval in intervals:
        if strategy not in ("no", "steps"):
            raise ValueError(
                "training.save_strategy: expected 'steps' or 'no' with refresh_every in the loss, "
                f"got {strategy!r}. A resumed run could not tell its neighbors"
            )
        if strategy == "steps" and (save_steps < 1 or save_steps % interval):
            raise ValueError(
                f"training.save_steps: expected a multiple of the loss's refresh_every {interval}, "
                f"got {save_steps:g}. A resumed run could not tell its neighbors"
            )


def _best_metric(training: dict[str, Any]) -> str | None:
    """Return what the best checkpoint is chosen by, None if the run does not say."""
    metric = training.get("metric_for_best_model")
    return None if metric is None else str(metric).removeprefix("eval_")


def _check_best_model(training: dict[str, Any], *, annealed: bool) -> None:
    metric = _best_metric(training) or "loss"
    if metric not in METRICS:
        raise ValueError(
            f"training.metric_for_best_model: expected one of {list(METRICS)}, got {metric!r}"
        )
    wants_best = training.get("load_best_model_at_end") or training.get("save_strategy") == "best"
    if annealed and wants_best and metric == "loss":
        raise ValueError(
            "training.metric_for_best_model: expected 'post_hoc_loss' while h_exp is annealed, "
            "got the raw loss, which rises by itself"
        )


def _check_numbers(training: dict[str, Any]) -> None:
    for key in POSITIVE:
        value = training.get(key)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"training.{key}: expected a number above 0, got {value}")
    if (max_steps := training.get("max_steps", -1)) == 0 or max_steps < -1:
        raise ValueError(
            f"training.max_steps: expected a number above 0, or -1 for epochs, got {max_steps}"
        )
    if training.get("max_grad_norm", 1.0) < 0:
        raise ValueError(
            f"training.max_grad_norm: expected 0 or more, got {training['max_grad_norm']}"
        )
    for key, value in FORCED.items():
        if training.get(key, value) != value:
            raise ValueError(f"training.{key}: expected {value!r}, got {training[key]!r}")
