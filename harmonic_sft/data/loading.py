"""Everything a training run needs of its data, from the `data:` part of a configuration."""

from dataclasses import dataclass

import datasets
import numpy as np
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as config_dataclass
from transformers import PreTrainedTokenizerBase

from harmonic_sft.data.masked_dataset import MaskedRows, PaddingCollator, StreamedMaskedRows
from harmonic_sft.data.masking import EVAL_EPOCH, MaskConfig, RowMasker
from harmonic_sft.data.rows import check_tokenizer, table_rows, unigram_counts
from harmonic_sft.data.sources import Source, load_documents
from harmonic_sft.data.splits import Split, split_stream, split_table


@config_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class EvalConfig:
    """What is kept out of training to evaluate on."""

    documents: int = Field(default=512, ge=1, description="documents kept for evaluation")


@config_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class DataConfig:
    """The `data:` part of a run's configuration."""

    sources: list[Source] = Field(min_length=1, description="where the documents come from")
    context_length: int = Field(ge=1, description="longest row, in tokens, special ones included")
    mask: MaskConfig = Field(default_factory=MaskConfig, description="how tokens are masked")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="the evaluation split")
    num_proc: int | None = Field(
        default=None, ge=1, description="processes that tokenize; null is the main one"
    )
    pad_to_multiple_of: int | None = Field(
        default=None, ge=1, description="round the length of a batch up to a multiple of this"
    )


@dataclass(frozen=True, kw_only=True)
class LoadedData:
    """Data sets of one run; the counts are of the training split, None for a stream."""

    train: MaskedRows | StreamedMaskedRows
    eval: MaskedRows
    collator: PaddingCollator
    unigram_counts: np.ndarray | None  # [V], ordinary tokens only
    num_documents: int | None
    num_tokens: int | None  # ordinary tokens only


def load_data(
    config: DataConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    max_positions: int,
    seed: int,
) -> LoadedData:
    """Load, tokenize, split and mask the documents of a run.

    Args:
        config: The `data:` part of the configuration.
        tokenizer: Of the model.
        vocab_size: Rows of the model's embedding table.
        max_positions: Longest row the model takes, in tokens.
        seed: Of the masks and of the choice of the evaluation documents.

    Returns:
        Training and evaluation sets, their collator, and what the training split holds.

    Raises:
        ValueError: Anything wrong with the tokenizer, the sources or the split.
    """
    check_tokenizer(
        tokenizer,
        vocab_size=vocab_size,
        max_positions=max_positions,
        context_length=config.context_length,
    )
    special_tokens = np.zeros(vocab_size, dtype=bool)  # [V]
    special_tokens[tokenizer.all_special_ids] = True
    masker = RowMasker(
        seed=seed,
        probability=config.mask.probability,
        mask_token_id=tokenizer.mask_token_id,
        special_tokens=special_tokens,
    )
    split = _load_split(config, tokenizer, seed)
    if isinstance(split.train, datasets.Dataset):
        train = MaskedRows(split.train, masker)
        counts = np.where(special_tokens, 0, unigram_counts(split.train, vocab_size))  # [V]
    else:
        train, counts = StreamedMaskedRows(split.train, masker), None
    return LoadedData(
        train=train,
        eval=MaskedRows(split.eval, masker, fixed_epoch=EVAL_EPOCH),
        collator=PaddingCollator(
            pad_token_id=tokenizer.pad_token_id, pad_to_multiple_of=config.pad_to_multiple_of
        ),
        unigram_counts=counts,
        num_documents=split.num_documents,
        num_tokens=None if counts is None else int(counts.sum()),
    )


def _load_split(config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> Split:
    """Open every source, all being tables or all being streams, and split off the evaluation."""
    if len({source.streaming for source in config.sources}) > 1:
        raise ValueError("data.sources: expected streaming in all or in none, got a mixture.")
    tables, streams = [], []
    for index, source in enumerate(config.sources):
        documents = load_documents(source, name=f"data.sources[{index}]")
        if isinstance(documents, datasets.IterableDataset):
            streams.append(documents)
            continue
        rows = table_rows(
            documents,
            source=index,
            tokenizer=tokenizer,
            context_length=config.context_length,
            num_proc=config.num_proc,
        )
        if len(rows) == 0:
            raise ValueError(
                f"data.sources[{index}].path: expected documents with text, "
                f"got only blank ones in {source.path!r}."
            )
        tables.append(rows)
    if tables:
        rows = datasets.concatenate_datasets(tables)
        return split_table(rows, eval_documents=config.eval.documents, seed=seed)
    return split_stream(
        streams,
        tokenizer=tokenizer,
        context_length=config.context_length,
        eval_documents=config.eval.documents,
    )
