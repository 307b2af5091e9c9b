"""Everything a training run needs of its data, from the `data:` part of a configuration."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from harmonic_sft.data.encoding import SpecialTokens
from harmonic_sft.data.files import BadRows
from harmonic_sft.data.formats import recognize
from harmonic_sft.data.masked_dataset import MaskedRows, PaddingCollator, PaddingFreeCollator
from harmonic_sft.data.masking import EVAL_EPOCH, RowMasker, special_tokens
from harmonic_sft.data.next_tokens import NextTokenLabels, RowLabels
from harmonic_sft.data.packing import fill_rate, join_rows, pack
from harmonic_sft.data.rows import RowMaker, check_tokenizer, table_rows, unigram_counts
from harmonic_sft.data.sections import DataConfig
from harmonic_sft.data.sources import check_column, first_row, load_documents
from harmonic_sft.data.splits import Split, split_streams, split_table
from harmonic_sft.data.streams import LogicalStream, StreamedRows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadedData:
    """Data sets of one run; the counts are of the training split, None for a stream."""

    train: MaskedRows | StreamedRows
    eval: MaskedRows
    collator: PaddingCollator | PaddingFreeCollator
    unigram_counts: np.ndarray | None  # [V], tokens that may be predicted: of an encoder, ordinary
    num_documents: int | None
    num_tokens: int | None  # the same
    fill_rate: float | None  # of packed rows
    bad_rows: BadRows = field(default_factory=BadRows)  # of tables; streams count while training


@dataclass(frozen=True)
class Finish:
    """Makes an item of the rows of a stream's pack."""

    masker: RowLabels
    packed: bool

    def __call__(self, members: Sequence[tuple[dict[str, Any], int]]) -> dict[str, np.ndarray]:
        """Mask every row by its own name and epoch, and join them."""
        rows = [self.masker(row, epoch) for row, epoch in members]
        return join_rows(rows) if self.packed else rows[0]


def load_data(
    config: DataConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    max_positions: int,
    seed: int,
    is_causal: bool = False,
) -> LoadedData:
    """Load, tokenize, split, mask and pack the documents of a run.

    Args:
        config: The `data:` part of the configuration.
        tokenizer: Of the model.
        vocab_size: Rows of the model's embedding table.
        max_positions: Longest row the model takes, in tokens.
        seed: Of the masks, of the choice of the evaluation documents, and of a stream's order.
        is_causal: Predict every token from those before it instead of masked ones from all. Plain
            text then ends in the tokenizer's eos token.

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
        needs_mask=not is_causal,
    )
    masker: RowLabels
    if is_causal:
        masker = NextTokenLabels(seed=seed, special_tokens=special_tokens(tokenizer, vocab_size))
    else:
        masker = RowMasker.of(config.mask, tokenizer=tokenizer, vocab_size=vocab_size, seed=seed)
    bad_rows = BadRows()
    split = _load_split(config, tokenizer, seed, bad_rows, is_causal=is_causal)
    counts = rate = None
    if isinstance(split.train, datasets.Dataset):
        packs = None
        if config.packing:
            lengths = _lengths(split.train)
            packs = pack(lengths, config.context_length)
            rate = fill_rate(lengths, packs, config.context_length)
        train = MaskedRows(split.train, masker, packs=packs)
        counts = unigram_counts(split.train, vocab_size)  # [V]
        if not is_causal:  # special tokens are never predicted
            counts = np.where(masker.special_tokens, 0, counts)
    else:
        train = StreamedRows(split.train, Finish(masker, packed=config.packing))
    pad = PaddingCollator(
        pad_token_id=tokenizer.pad_token_id, pad_to_multiple_of=config.pad_to_multiple_of
    )
    return LoadedData(
        train=train,
        eval=MaskedRows(split.eval, masker, fixed_epoch=EVAL_EPOCH),
        collator=PaddingFreeCollator() if config.padding_free else pad,
        unigram_counts=counts,
        num_documents=split.num_documents,
        num_tokens=None if counts is None else int(counts.sum()),
        fill_rate=rate,
        bad_rows=bad_rows,
    )


def _load_split(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    bad_rows: BadRows,
    *,
    is_causal: bool,
) -> Split:
    """Open every source, all being tables or all being streams, and split off the evaluation."""
    ends_rows = bool(SpecialTokens.of(tokenizer).suffix)  # the tokenizer itself ends every row
    opened = []
    for index, source in enumerate(config.sources):
        name = f"data.sources[{index}]"
        documents = load_documents(
            source, name=name, on_bad_row=config.on_bad_row, bad_rows=bad_rows
        )
        form = source.format
        if form == "auto":
            form = "text" if source.column != "text" else _recognize(first_row(documents), name)
            logger.info("%s: rows of the format %s.", name, form)
        if form == "text":
            check_column(documents, source, name=name)
        maker = RowMaker(
            name=name,
            source=index,
            form=form,
            column=source.column,
            tokenizer=tokenizer,
            context_length=config.context_length,
            loss_on=config.loss_on,
            word_ids=config.mask.whole_word,
            bad_rows=bad_rows,
            skip=config.on_bad_row == "skip",
            end_of_text=tokenizer.eos_token_id if is_causal and not ends_rows else None,
        )
        opened.append((documents, maker))
    if config.sources[0].streaming:
        return split_streams(
            _logical_streams(opened, config, seed, bad_rows), eval_documents=config.eval.documents
        )
    tables = []
    for documents, maker in opened:
        assert isinstance(documents, datasets.Dataset), "streams have returned above"
        rows = table_rows(documents, maker, num_proc=config.num_proc)
        if len(rows) == 0:
            raise ValueError(
                f"{maker.name}.path: expected documents with text, got only blank ones in "
                f"{config.sources[maker.source].path!r}."
            )
        tables.append(rows)
    if bad_rows.blank:
        logger.info("Left out: %d blank documents.", bad_rows.blank)
    rows = _join_tables(tables)
    return split_table(rows, eval_documents=config.eval.documents, seed=seed)


def _logical_streams(
    opened: Sequence[tuple[Any, RowMaker]],
    config: DataConfig,
    seed: int,
    bad_rows: BadRows,
) -> list[LogicalStream]:
    """Split the sources into as many streams as all of them have shards for."""
    count = min(config.streams, *(documents.num_shards for documents, _ in opened))
    weights = [source.weight for source in config.sources]
    return [
        LogicalStream(
            [documents.shard(count, number) for documents, _ in opened],
            number,
            weights=None if weights[0] is None else [weight or 0.0 for weight in weights],
            make_rows=[maker for _, maker in opened],
            bad_rows=bad_rows,
            window=config.window,
            seed=seed,
            capacity=config.context_length if config.packing else None,
        )
        for number in range(count)
    ]


def _recognize(row: dict[str, Any] | None, name: str) -> Any:
    assert row is not None, "load_documents has looked"
    try:
        return recognize(row)
    except ValueError as error:
        raise ValueError(f"{name}.{error}") from error


def _lengths(rows: datasets.Dataset) -> np.ndarray:
    """Return the length of every row in tokens, `[rows]`."""
    batches = rows.select_columns(["input_ids"]).with_format("arrow").iter(batch_size=10_000)
    lengths = [batch["input_ids"].combine_chunks().value_lengths() for batch in batches]
    return np.concatenate([part.to_numpy() for part in lengths])


def _join_tables(tables: Sequence[datasets.Dataset]) -> datasets.Dataset:
    """Join tables; rows of plain text may predict everything where others have `scored`."""
    if len({tuple(table.column_names) for table in tables}) > 1:
        tables = [
            table if "scored" in table.column_names else table.map(_all_scored, desc="Joining")
            for table in tables
        ]
        names = tables[0].column_names
        tables = [table.select_columns(names) for table in tables]
    return datasets.concatenate_datasets(list(tables))


def _all_scored(row: dict[str, Any]) -> dict[str, list[bool]]:
    return {"scored": [True] * len(row["input_ids"])}
