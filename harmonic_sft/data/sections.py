"""The `data:` section of a run; importing this module does not import `datasets`."""

from typing import Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from harmonic_sft.config import STRICT

LossOn = Literal["all", "completion", "assistant"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MaskConfig:
    """How tokens are masked; the defaults are those NeoBERT was trained with."""

    probability: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="share of the ordinary tokens, or of the words, that is masked",
    )
    policy: Literal["mask_only", "80_10_10"] = Field(
        default="mask_only",
        description="what a masked token becomes: mask_only, always the mask token; 80_10_10, "
        "in 10 % of the cases a random token and in another 10 % itself",
    )
    whole_word: bool = Field(
        default=False, description="mask all tokens of a word together, or none of them"
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Source:
    """One place to take documents from; docs/data.md lists what the path may be."""

    path: str = Field(
        min_length=1,
        description="a file, glob, web address, owner/name on the Hub, folder of save_to_disk, "
        "python:docstrings",
    )
    name: str | None = Field(default=None, description="configuration of a Hub data set")
    split: str = Field(
        default="train", description="split; on the Hub also a part of it, train[:1000]"
    )
    format: Literal[
        "auto", "text", "prompt_completion", "messages", "alpaca", "sharegpt", "tokens"
    ] = Field(default="auto", description="what a row holds; auto goes by the columns")
    column: str = Field(default="text", description="column that holds the text")
    weight: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="share in a mixture of sources"
    )
    data_files: str | list[str] | None = Field(
        default=None, description="files to read of a Hub data set"
    )
    revision: str | None = Field(default=None, description="commit, tag or branch on the Hub")
    streaming: bool = Field(default=False, description="read while training, download nothing else")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvalConfig:
    """What is kept out of training to evaluate on."""

    documents: int = Field(
        default=512, ge=0, description="documents kept for evaluation, out of the training ones"
    )
    seed: int = Field(
        default=42,
        ge=-(2**63),
        lt=2**63,
        description="chooses them; the same for every training.seed, so that runs are comparable",
    )
    drop_near_duplicates: bool = Field(
        default=False,
        description="also leave documents out of training of which more than half of the 13-grams "
        "stand in one held-out document; exact copies always leave",
    )
    source: Source | None = Field(
        default=None, description="evaluate on all documents of this place instead"
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    """The documents, how rows are made of them, and what is held out to evaluate on."""

    sources: list[Source] = Field(min_length=1, description="where the documents come from")
    context_length: int = Field(ge=1, description="longest row, in tokens, special ones included")
    label_column: str | None = Field(
        default=None, description="classification: column of the label, or of the words' labels"
    )
    weight_column: str | None = Field(
        default=None,
        description="column of a document's weight in the loss, 0 or more; null is 1 for all",
    )
    loss_on: LossOn = Field(
        default="all", description="what is predicted: all, the completion or assistant turns"
    )
    mask: MaskConfig = Field(default_factory=MaskConfig, description="how tokens are masked")
    packing: bool = Field(
        default=False, description="fill rows with several documents that do not see each other"
    )
    padding_free: bool = Field(
        default=False, description="lay a batch out as one row instead of padding"
    )
    on_bad_row: Literal["error", "skip"] = Field(
        default="error", description="what happens to a row that cannot be used"
    )
    eval: EvalConfig = Field(default_factory=EvalConfig, description="the evaluation split")
    num_proc: int | None = Field(
        default=None, ge=1, description="processes that tokenize; null is the main one"
    )
    streams: int = Field(
        default=8, ge=1, description="most logical streams; part of what fixes the order"
    )
    window: int = Field(
        default=256, ge=1, description="documents of a stream shuffled and packed together"
    )
    pad_to_multiple_of: int | None = Field(
        default=None, ge=1, description="round the length of a batch up to a multiple of this"
    )

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        weights = [source.weight for source in self.sources]
        if None in weights and any(weight is not None for weight in weights):
            raise ValueError(
                f"sources: expected a weight in all or in none, got {weights}. "
                "Give every source one"
            )
        if len({source.streaming for source in self.sources}) > 1:
            raise ValueError("sources: expected streaming in all or in none, got a mixture")
        if weights[0] is not None and len(weights) > 1 and not self.sources[0].streaming:
            raise ValueError(
                "sources: expected streaming: true in a mixture by weight, got tables. A table is "
                "read once in an epoch, whatever its weight"
            )
        if self.padding_free and self.pad_to_multiple_of is not None:
            raise ValueError("padding_free: expected no pad_to_multiple_of beside it, got one")
        return self

    @property
    def eval_sources(self) -> list[Source]:
        """The sources of the evaluation documents."""
        return self.sources if self.eval.source is None else [self.eval.source]


def check_label_settings(config: DataConfig) -> None:
    """Refuse settings of masked text, which would have no effect on labeled rows.

    Raises:
        ValueError: One is set, or `label_column` is not.
    """
    if config.label_column is None:
        raise ValueError("data.label_column: expected a column for classification, got nothing")
    sources = [*config.sources, *([config.eval.source] if config.eval.source else [])]
    refused = {
        "mask": config.mask != MaskConfig(),
        "packing": config.packing,
        "padding_free": config.padding_free,
        "loss_on": config.loss_on != "all",
        "sources.streaming": any(source.streaming for source in sources),
        "sources.weight": any(source.weight is not None for source in sources),
        "sources.format": any(source.format not in ("auto", "text") for source in sources),
    }
    for name, is_set in refused.items():
        if is_set:
            raise ValueError(
                f"data.{name}: expected the default for classification, got another value. "
                "Leave the key out"
            )
