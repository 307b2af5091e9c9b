"""HarmonicTrainingArguments: transformers' arguments, with those of head, loss and data."""

import copy
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from typing import Any, Literal, get_args, get_origin

import numpy as np
import torch
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.training_args import trainer_log_levels

from harmonic_sft.config import load_text, parse, to_plain
from harmonic_sft.losses import LOSSES, SumLoss
from harmonic_sft.losses.loss import Loss
from harmonic_sft.models.heads import behind_transform, heads_in
from harmonic_sft.training.run_config import (
    CLASSIFICATION,
    NOT_IN_HEAD,
    PeftConfig,
    RunConfig,
    fill_recipe,
)
from harmonic_sft.training.training_section import (
    DEFAULTS,
    FORCED,
    METRICS,
    OWN_WEIGHTS,
    check_refused,
)

# Arguments that `RunConfig.training` leaves out: `RunConfig.hub` has those of the Hub, and a script
# passes resume_from_checkpoint to `train`.
NOT_IN_CONFIG = (
    "accelerator_config",  # `check_launch` refuses all but the defaults
    "hub_model_id",
    "hub_private_repo",
    "hub_revision",
    "hub_strategy",
    "label_names",
    "push_to_hub",
    "resume_from_checkpoint",
)
SECTIONS = ("head", "h_exp", "loss", "schedule", "mask")  # a command line gives these as text
IN_MODEL = ("task", "revision", "from_scratch", "pooling", "dtype", "dropout", "unfreeze")
IN_DATA = (
    "context_length",
    "mask",
    "packing",
    "padding_free",
    "pad_to_multiple_of",
    "loss_on",
    "label_column",
    "weight_column",
    "on_bad_row",
)
TOP = (
    "head",
    "h_exp",
    "loss",
    "schedule",
    "oom_fallback",
    "save",
    "skip_bad_steps",
    "early_stopping_patience",
)
KEYS = {  # where the arguments stand in a YAML file
    **{name: f"model.{name}" for name in IN_MODEL},
    **{name: f"data.{name}" for name in IN_DATA},
    "dataset_num_proc": "data.num_proc",
    **{name: name for name in TOP},
    "hub_form": "hub.form",
    "hub_license": "hub.license",
}
TRAIN_NAME, EVAL_NAME = "train_dataset", "eval_dataset"  # paths of data sets given as objects
RECIPE = "Source: NeoBERT recipe."
ACCELERATE_PLUGINS = {  # why each is refused
    "ACCELERATE_USE_FSDP": "evaluations would read shards of the head",
    "ACCELERATE_USE_DEEPSPEED": OWN_WEIGHTS,
    "ACCELERATE_USE_MEGATRON_LM": OWN_WEIGHTS,
    "ACCELERATE_USE_PARALLELISM_CONFIG": "processes would share their rows, and count them twice",
}


def _ours(name: str, default: Any = None, more: str = "") -> Any:
    """Return a field whose help is the description of its YAML key, followed by `more`."""
    section, _, last = KEYS[name].partition(".")
    run_config: Any = RunConfig
    key = run_config.__pydantic_fields__[section]
    if last:
        key = key.annotation.__pydantic_fields__[last]
    kinds = (key.annotation, *get_args(key.annotation))
    choices = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    text = key.description or ""
    parts = [f"{text[:1].upper()}{text[1:]}", f"One of {', '.join(choices)}" if choices else ""]
    text = " ".join(f"{part.rstrip('.')}." for part in (*parts, more) if part)
    return field(default=default, metadata={"help": text})


def _theirs(name: str, text: str) -> Any:
    """Return a field of transformers with our default, as in a YAML file."""
    return field(default=DEFAULTS[name], metadata={"help": text})


def _forced(name: str) -> Any:
    """Return a field of transformers that allows one value only."""
    value, reason = FORCED[name]
    return field(default=value, metadata={"help": f"Has to be {value!r}: {reason}."})


@dataclass
class HarmonicTrainingArguments(TrainingArguments):
    """Arguments of `HarmonicTrainer`: those of `transformers.TrainingArguments` and of the head.

    Without further arguments they are the NeoBERT recipe: the last block and a `DistLayer` on the
    unit sphere train, h_exp goes from -12 to -4, the learning rate of 2e-4 follows warmup, stable
    and decay, and Adam's betas are 0.95. A field that is a section of the YAML file takes what the
    section takes: a name, a number, or a dictionary with its keys; also as text, so that
    `HfArgumentParser` can read it. The trainer checks the fields as those of a YAML file, once it
    knows the model, and its messages name the keys of that file.
    """

    learning_rate: float = _theirs("learning_rate", f"Peak learning rate. {RECIPE}")
    adam_beta1: float = _theirs("adam_beta1", f"Decay of the first moment of AdamW. {RECIPE}")
    adam_beta2: float = _theirs("adam_beta2", f"Decay of the second moment of AdamW. {RECIPE}")
    logging_steps: float = _theirs("logging_steps", "Optimizer steps between two log entries.")
    enable_jit_checkpoint: bool = _theirs(
        "enable_jit_checkpoint",
        "After a SIGTERM save a checkpoint at the end of the step and exit with 143.",
    )
    save_total_limit: int | None = _theirs(
        "save_total_limit", "Checkpoints that are kept; 0 keeps all."
    )
    lr_scheduler_type: str = field(
        default="warmup_stable_decay",
        metadata={
            "help": "Schedule of the learning rate. The default takes its phases from `schedule`; "
            f"any other one is transformers' own. {RECIPE}"
        },
    )
    remove_unused_columns: bool = _forced("remove_unused_columns")
    ddp_find_unused_parameters: bool | None = _theirs(
        "ddp_find_unused_parameters",
        "Needed where a part of what trains takes no part in some steps, such as routed layers.",
    )
    logging_nan_inf_filter: bool = _forced("logging_nan_inf_filter")
    include_num_input_tokens_seen: str = _forced(  # ty: ignore[incompatible-mutable-override]
        "include_num_input_tokens_seen"
    )
    dataloader_pin_memory: bool = field(
        default_factory=torch.cuda.is_available, metadata={"help": "Default: where there is a GPU."}
    )
    gradient_checkpointing: bool | None = field(
        default=False, metadata={"help": "Recompute every block that holds a graph."}
    )

    task: str | None = _ours(
        "task",
        more="Default: what the model is; with a label_column, sequence_classification.",
    )
    revision: str | None = _ours("revision")
    dtype: str = _ours("dtype", "float32")
    dropout: float | None = _ours("dropout")
    from_scratch: bool = _ours("from_scratch", False, "Needs unfreeze=['*'].")
    pooling: str | None = _ours("pooling")
    # HfArgumentParser reads a union as its second type, str; without None it would skip str.
    unfreeze: int | str | list[str] | dict[str, Any] | None = _ours(
        "unfreeze",
        more="A number of blocks from the top, or patterns of parameter names of the backbone. "
        "Default: 1, with a peft_config 0. Source: NeoBERT recipe, block 27 of 28.",
    )
    head: dict[str, Any] | str | None = _ours(
        "head",
        more="Name of a head, which goes behind the layers that the base has before its output "
        "layer, or a dictionary with its arguments, init and tie, taken as it stands. Default: "
        "dist, a DistLayer on the unit sphere; on one of our models that has been loaded, its own.",
    )
    h_exp: float | str | dict[str, Any] | None = _ours(
        "h_exp",
        more="Default: {'start': -12, 'end': -4}, for a classifier -12, or nothing for a head "
        "without an exponent; a model that keeps its head keeps its exponent. We recommend to "
        "hold it, at -24 or -12 (docs/results.md, Other exponents). Source: Baek et al. 2025, "
        "arXiv:2502.01628, and NeoBERT recipe.",
    )
    loss: dict[str, Any] | str | Loss | None = _ours(
        "loss",
        more="Name of a loss, a dictionary with its fields, or the loss. Default: harmonic, or "
        "cross_entropy for a head without an exponent.",
    )
    schedule: dict[str, Any] | str | None = _ours(
        "schedule",
        more="Keys: warmup_ratio (0.1), decay_ratio (0.2) and decay (cosine). A warmup_steps above "
        "0 wins over the first.",
    )
    context_length: int | None = _ours(
        "context_length", more="Default: what the model takes, at most 1024."
    )
    mask: float | str | dict[str, Any] | None = _ours(
        "mask",
        more="The share of masked tokens, or probability (0.2), policy (mask_only) and whole_word. "
        "Source: NeoBERT, Le Breton et al. 2025, arXiv:2502.19587.",
    )
    packing: bool = _ours("packing", False)
    padding_free: bool = _ours("padding_free", False)
    pad_to_multiple_of: int | None = _ours("pad_to_multiple_of")
    loss_on: str = _ours("loss_on", "all")
    text_column: str = field(
        default="text", metadata={"help": "Column of the text, where the rows are plain text."}
    )
    label_column: str | None = _ours("label_column", more="Default: labels.")
    weight_column: str | None = _ours("weight_column")
    on_bad_row: str = _ours("on_bad_row", "error")
    dataset_num_proc: int | None = _ours("dataset_num_proc")
    oom_fallback: bool = _ours("oom_fallback", True)
    save: str = _ours("save", "full", "The result is a whole model.")
    skip_bad_steps: int = _ours("skip_bad_steps", 0)
    early_stopping_patience: int | None = _ours(
        "early_stopping_patience", more="Needs load_best_model_at_end and evaluations."
    )
    hub_form: str = _ours("hub_form", "full")
    hub_license: str | None = _ours("hub_license")

    def __post_init__(self) -> None:
        """Check and convert the fields, then let transformers do so with its own."""
        self._settle_types()
        raw = {name: getattr(self, name) for name in their_names()}
        for name in SECTIONS:
            if isinstance(value := getattr(self, name), str):
                setattr(self, name, load_text(value, name))
        if isinstance(self.unfreeze, str) and self.unfreeze.isdecimal():
            self.unfreeze = int(self.unfreeze)
        self._settle_head_and_loss()
        self.gradient_checkpointing = None
        self._check_transformers()
        super().__post_init__()  # where gradient_checkpointing is deprecated
        self.gradient_checkpointing = bool(raw["gradient_checkpointing"])
        accelerator_config: Any = self.accelerator_config
        if accelerator_config.dispatch_batches is None:  # accelerate would choose True for streams
            accelerator_config.dispatch_batches = False
        metric = metric_of(str(self.metric_for_best_model))
        if raw["greater_is_better"] is None and metric is not None:
            self.greater_is_better = METRICS[metric]
        # For `_changed_fields`, which returns what was given, not what transformers made of it.
        self._derived = {
            name: (value, getattr(self, name))
            for name, value in raw.items()
            if getattr(self, name) is not value
        }

    def _settle_types(self) -> None:
        """Convert NumPy numbers, a torch dtype, and the placeholder that stands for a token."""
        for argument in fields(self):
            if isinstance(value := getattr(self, argument.name), np.generic):
                setattr(self, argument.name, value.item())
        if isinstance(self.dtype, torch.dtype):
            self.dtype = str(self.dtype).removeprefix("torch.")
        if self.hub_token == "<HUB_TOKEN>":  # written by `to_dict` in place of a token
            self.hub_token = None

    def _settle_head_and_loss(self) -> None:
        if not isinstance(self.head, str | Mapping | None):
            raise ValueError(f"head: expected a name or a dictionary, got {self.head!r}")
        if isinstance(self.loss, type):
            name = self.loss.__name__
            raise ValueError(f"loss: expected a loss, got the class {name}. Write {name}()")
        parts = [term.loss for term in self.loss.terms] if isinstance(self.loss, SumLoss) else []
        is_ours = all(type(loss) in LOSSES.values() for loss in [self.loss, *parts])
        if not is_ours and not isinstance(self.loss, str | Mapping | None):
            raise ValueError(
                f"loss: expected one of harmonic_sft.losses, got {self.loss!r}. One of your own is "
                "the trainer's compute_loss_func"
            )
        if is_ours:
            self.loss = to_plain(self.loss)

    def _check_transformers(self) -> None:
        """Convert or refuse values at which transformers would crash, or which it would ignore."""
        # Now: transformers would ask to install deepspeed, and take a data_seed of 0 as unset.
        check_refused({"deepspeed": self.deepspeed, "data_seed": self.data_seed})
        if self.eval_accumulation_steps == 0:
            raise ValueError("training.eval_accumulation_steps: expected a number above 0, got 0")
        self.report_to = "none" if self.report_to is None else self.report_to
        self.eval_delay = self.eval_delay or 0  # None is the default of `set_evaluate`
        for name in ("log_level", "log_level_replica"):
            if (level := getattr(self, name)) not in trainer_log_levels:
                raise ValueError(
                    f"training.{name}: expected one of {list(trainer_log_levels)}, got {level!r}"
                )
        for name in ("load_best_model_at_end", "eval_strategy"):
            is_missing = getattr(self, name) in (False, "no")
            if is_missing and (patience := self.early_stopping_patience) is not None:
                raise ValueError(
                    f"early_stopping_patience: expected null without training.{name}, got "
                    f"{patience}. Set it: the best of several evaluations decides"
                )

    def config_for(
        self,
        base: str,
        *,
        task: str,
        own_head: Mapping[str, Any] | None = None,
        has_transform: bool = False,
        peft: PeftConfig | None = None,
        is_stream: bool = False,
        context_length: int = 1024,
    ) -> RunConfig:
        """Return the configuration of a run with these arguments, as if a YAML file had it.

        Args:
            base: Name of the model.
            task: What the model predicts; replaces `self.task`.
            own_head: Settings of the head that the model has and keeps unless `head` names one.
            has_transform: Whether the base has layers before its output layer; a head given by its
                name alone goes behind them.
            peft: LoRA.
            is_stream: Whether the training data are read while training.
            context_length: Used if the arguments have none.

        Raises:
            ValueError: A value is wrong, or two do not go together.
        """
        self._check_transformers()  # again: `set_save` and the like may have changed them
        if getattr(self, "activation_checkpointing", False):  # from transformers 5.18 on
            self.gradient_checkpointing, self.activation_checkpointing = True, False
        head, h_exp = self.head, self.h_exp
        if head is None and own_head is not None:
            head, own_h_exp = _sections_of(own_head)
            h_exp = h_exp or own_h_exp
        elif has_transform and isinstance(head, str | None):
            head = behind_transform(head or "dist")
        unfreeze: Any = self.unfreeze
        if not isinstance(unfreeze, Mapping | None):
            patterns = [unfreeze] if isinstance(unfreeze, str) else unfreeze
            is_number = isinstance(unfreeze, int)
            unfreeze = {"last_blocks": unfreeze} if is_number else {"patterns": patterns}
        is_share = isinstance(self.mask, int | float)
        labels = "labels" if task in CLASSIFICATION else None
        settled = {
            "task": task,
            "unfreeze": unfreeze,
            "head": head,
            "h_exp": h_exp,
            "context_length": (
                context_length if self.context_length is None else self.context_length
            ),
            "mask": {"probability": self.mask} if is_share else self.mask or {},
            "label_column": self.label_column or labels,
        }
        source = {"path": TRAIN_NAME, "column": self.text_column, "streaming": is_stream}
        config: dict[str, Any] = {
            "model": {"base": base},
            "peft": peft and to_plain(peft),
            "data": {"sources": [source], "eval": {"documents": 0}},
            "training": self._changed_fields(),
            "hub": self._hub(),
        }
        for name, key in KEYS.items():
            *section, last = key.split(".")
            node = config[section[0]] if section else config
            node[last] = settled[name] if name in settled else vars(self)[name]
        if unfreeze is None:
            del config["model"]["unfreeze"]
        return parse(RunConfig, fill_recipe(config))

    def _changed_fields(self) -> dict[str, Any]:
        """Return the arguments of transformers that differ from their defaults here."""
        given = {}
        for name in their_names():
            value = getattr(self, name)
            is_parsed = name == "lr_scheduler_kwargs"  # from the text of a command line
            if name in self._derived and self._derived[name][1] is value and not is_parsed:
                value = self._derived[name][0]
            value = value.value if isinstance(value, Enum) else value
            # `or None`: parsers of command lines write "nothing" as None, False or an empty list.
            if name not in NOT_IN_CONFIG and (value or None) != (default_of(name) or None):
                given[name] = value
        if "metric_for_best_model" in given:
            metric = metric_of(str(given.pop("metric_for_best_model")))
            if metric is not None:
                given["metric_for_best_model"] = metric
            else:  # the user's compute_metrics knows it
                given.pop("load_best_model_at_end", None)
        return {**given, "output_dir": self.output_dir}

    def _hub(self) -> dict[str, Any]:
        strategy = getattr(self.hub_strategy, "value", self.hub_strategy)
        if self.push_to_hub and strategy not in ("every_save", "end"):
            raise ValueError(f"hub_strategy: expected 'every_save' or 'end', got {strategy!r}")
        return {
            "push": self.push_to_hub,
            "repo_id": self.hub_model_id,
            "private": bool(self.hub_private_repo),
            "revision": self.hub_revision,
            "every_save": self.push_to_hub and strategy == "every_save",
        }


@contextmanager
def changed(args: TrainingArguments, **values: Any) -> Generator[None]:
    """Give arguments other values inside a `with` block, where transformers reads them."""
    before = {name: getattr(args, name) for name in values}
    vars(args).update(values)
    try:
        yield
    finally:
        vars(args).update(before)


def their_names() -> list[str]:
    """Return the names of transformers' own arguments."""
    return [argument.name for argument in fields(TrainingArguments) if argument.init]


def default_of(name: str) -> Any:
    """Return the default of an argument."""
    argument = HarmonicTrainingArguments.__dataclass_fields__[name]
    return argument.default if argument.default_factory is MISSING else argument.default_factory()


def metric_of(name: str) -> str | None:
    """Return the metric of ours that a name ends in: `loss` for `eval_other_loss`."""
    metrics = [metric for metric in METRICS if f"_{name}".endswith(f"_{metric}")]
    return max(metrics, key=len, default=None)


def _sections_of(own_head: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the sections head and h_exp for a head that a model has and keeps."""
    head, h_exp = {**copy.deepcopy(own_head), "init": "base_head"}, None
    for settings in heads_in(head):
        other = {key: settings.pop(key, None) for key in NOT_IN_HEAD}
        learned = {"start": other["h_exp"], "schedule": "learned"}
        h_exp = h_exp or (learned if other["learn_h_exp"] else other["h_exp"])
    return head, h_exp


def check_launch(args: HarmonicTrainingArguments) -> None:
    """Refuse launches that would train something other than the arguments say."""
    for variable, reason in ACCELERATE_PLUGINS.items():
        if os.environ.get(variable, "false").lower() in ("true", "1"):
            plugin = variable.removeprefix("ACCELERATE_USE_")
            raise ValueError(
                f"accelerate launch: expected no {plugin}, got {variable}: {reason}. "
                "Use plain data parallelism (--multi_gpu)"
            )
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no":
        raise ValueError(
            f"accelerate launch: expected --mixed_precision no, got {precision}. "
            "model.dtype and model.unfreeze.dtype decide"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"launch: expected one GPU per process, got {args.n_gpu}. "
            "Use accelerate launch --multi_gpu, or set CUDA_VISIBLE_DEVICES=0. In a notebook use "
            "accelerate.notebook_launcher, or restart the kernel and set it in os.environ first"
        )
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1 and args.world_size == 1:
        raise ValueError(
            f"launch: expected {processes} processes that work together, got single ones. "
            "Without GPUs set training.use_cpu=true and start with torchrun"
        )
    if args.accelerator_config != AcceleratorConfig(dispatch_batches=False):
        check_refused({"accelerator_config": args.accelerator_config})
    needed = {
        # Rows that are repeated to fill the last batches could not be left out.
        "data.padding_free": (args.padding_free, False),
        # Tokens would weigh more in a process that has fewer of them.
        "training.average_tokens_across_devices": (args.average_tokens_across_devices, True),
    }
    for name, (value, expected) in needed.items():
        if args.world_size > 1 and value != expected:
            raise ValueError(
                f"{name}: expected {str(expected).lower()} with {args.world_size} processes, got "
                f"{str(value).lower()}"
            )
