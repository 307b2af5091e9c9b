"""Everything a training run needs of its data, from the `data:` part of a configuration."""

import functools
import itertools
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import datasets
import numpy as np
from datasets.utils import tqdm
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from harmonic_sft.data.bad_rows import SHOWN_REASONS, BadRows
from harmonic_sft.data.batches import (
    Collator,
    MaskedRows,
    PaddingCollator,
    collate_padding_free,
    fill_rate,
    join_rows,
    pack,
)
from harmonic_sft.data.classification import class_counts, class_labels
from harmonic_sft.data.files import Row
from harmonic_sft.data.formats import LABELED, Format, Reader, recognize
from harmonic_sft.data.heldout import Duplicates, HeldOut
from harmonic_sft.data.keyed_random import permutation
from harmonic_sft.data.masking import (
    EVAL_EPOCH,
    ClassLabels,
    NextTokenLabels,
    RowLabels,
    RowMasker,
    special_tokens,
)
from harmonic_sft.data.row_maker import (
    TRACES,
    RowMaker,
    check_tokenizer,
    document_numbers,
    document_traces,
    row_lengths,
    rows_table,
    tokenize_table,
    unigram_counts,
)
from harmonic_sft.data.sections import (
    DataConfig,
    EvalConfig,
    MaskConfig,
    Source,
    check_label_settings,
)
from harmonic_sft.data.sources import (
    Documents,
    GivenSource,
    check_column,
    load_documents,
    most_streams,
    names_of_classes,
    readable_rows,
)
from harmonic_sft.data.streams import LogicalStream, Members, Snapshot, StreamedRows
from harmonic_sft.models import max_positions

logger = logging.getLogger(__name__)
SAMPLE = 100  # rows; the first of them with a known format decides the source's format


@dataclass(frozen=True, kw_only=True)
class LoadedData:
    """Data sets of one run; the counts are of the training split, None for a stream."""

    train: MaskedRows | StreamedRows
    eval: MaskedRows
    collator: Collator
    labels: list[str] | None = None  # of labeled rows: the classes, in the order of their numbers
    # [V], counts of each token where it may be predicted, or of the labels of each class.
    unigram_counts: np.ndarray | None = None
    num_documents: int | None = None
    num_tokens: int | None = None  # that may be predicted; all tokens of labeled rows
    fill_rate: float | None = None  # of packed rows
    bad_rows: BadRows = field(default_factory=BadRows)  # of tables; streams count while training
    held_out: HeldOut = field(default_factory=HeldOut)  # the documents of `eval`
    # Of tables; streams count while training.
    duplicates: Duplicates = field(default_factory=Duplicates)
    trained: np.ndarray | None = None  # `short_hashes` of the training documents

    def left_out(self, streams: Mapping[Any, Snapshot]) -> tuple[int, list[str], Duplicates]:
        """Total what was left out of tables, and of streams up to their latest windows.

        Returns:
            The number of bad rows, the first reasons, and the copies of held-out documents.
        """
        windows = [window for _, window in sorted(streams.items())]
        rows = self.bad_rows.total + sum(window["skipped"] for window in windows)
        lists = [self.bad_rows.first, *(window["reasons"] for window in windows)]
        reasons = list(dict.fromkeys(itertools.chain.from_iterable(lists)))[:SHOWN_REASONS]
        copies = [self.duplicates, *(window["duplicates"] for window in windows)]
        return rows, reasons, Duplicates(*map(sum, zip(*copies, strict=True)))


def load_data(
    config: DataConfig,
    *,
    base: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    task: str = "masked_lm",
    labels: Sequence[str] | None = None,
    eval_only: bool = False,
    is_trained: bool = False,
) -> LoadedData:
    """Load, tokenize, split, mask and pack the documents of a run.

    Args:
        config: The `data:` part of the configuration.
        base: Configuration of the model, or of its base.
        tokenizer: The model's tokenizer. It may have tokens that a decoder does not have yet.
        seed: Decides the masks and the order of a stream.
        task: `masked_lm`; `causal_lm`, where plain text ends in the tokenizer's eos token; or
            `sequence_classification` or `token_classification`, where a document has one label, or
            is a list of words with one each.
        labels: Names of the classes of a trained classifier. None takes those of the training rows,
            in the order of a `ClassLabel` if all sources have the same one, else sorted.
        eval_only: Evaluate on all documents; streams are split as for training. The rows of a
            trained classifier may then have no labels (`label_column` None).
        is_trained: Refuse a tokenizer with tokens that the model does not have, for decoders too.

    Returns:
        Training and evaluation sets, their collator, and what the training split holds.

    Raises:
        ValueError: Anything wrong with the tokenizer, the sources, the labels or the split.
    """
    if task in LABELED and not (eval_only and config.label_column is None):
        check_label_settings(config)
    base = base.get_text_config()
    takes_new_tokens = task == "causal_lm" and not is_trained
    vocab_size = max(base.vocab_size, len(tokenizer) if takes_new_tokens else 0)
    check_tokenizer(
        tokenizer,
        vocab_size=vocab_size,
        max_positions=max_positions(base),
        context_length=config.context_length,
        needs_mask=task == "masked_lm",
        pad_to_multiple_of=config.pad_to_multiple_of or 1,
    )
    masker = None
    if task not in LABELED:
        is_causal = task == "causal_lm"
        masker = _masker(config.mask, tokenizer, vocab_size, seed, is_causal=is_causal)
    eval_config = replace(config, weight_column=None)  # evaluations have no weights
    sources = {f"data.sources.{index}": source for index, source in enumerate(config.sources)}
    open_fn = functools.partial(_open_all, tokenizer=tokenizer, task=task)
    opened = open_fn(eval_config if eval_only else config, sources)
    collator: Collator = collate_padding_free
    if not config.padding_free:
        collator = PaddingCollator(
            pad_token_id=tokenizer.pad_token_id, pad_to_multiple_of=config.pad_to_multiple_of
        )
    eval_rows, bad_rows = None, BadRows()
    if not eval_only and config.eval.source is not None:
        place = {"data.eval.source": config.eval.source}
        eval_opened = open_fn(eval_config, place, first=len(sources))
        eval_rows, bad_rows = _table_rows(eval_opened, config)
    if masker is not None and config.sources[0].streaming:
        return _streamed_data(opened, config, masker, collator, seed, eval_rows, bad_rows)
    rows, train_bad_rows = _table_rows(opened, config)
    bad_rows.merge(train_bad_rows)
    if eval_rows is None:
        rows, eval_rows = (rows, rows) if eval_only else split_table(rows, config.eval)
    held_out = HeldOut.of(document_traces(eval_rows), drop_near=config.eval.drop_near_duplicates)
    duplicates, trained = Duplicates(), None
    if not eval_only:
        traces = tqdm(
            document_traces(rows),
            desc="Comparing with held-out documents",
            unit=" documents",
            delay=2,
        )
        is_kept, duplicates, trained = held_out.drop_copies(traces)
        if not is_kept.all():
            rows = rows.select(np.flatnonzero(is_kept[document_numbers(rows)]))
    if masker is None:
        orders = {maker.read.class_names for _, maker in opened}
        masker = class_labels(
            rows,
            eval_rows,
            names=labels,
            order=orders.pop() if len(orders) == 1 else None,
            # `map` makes streams of unknown columns, which may have lost their class names.
            has_numbers=all(documents.features is not None for documents, _ in opened),
            of_tokens=task == "token_classification",
            seed=seed,
        )
    return replace(
        _table_data(rows, eval_rows, config, masker, collator),
        bad_rows=bad_rows,
        held_out=held_out,
        duplicates=duplicates,
        trained=trained,
    )


def _streamed_data(
    opened: Sequence[tuple[Any, RowMaker]],
    config: DataConfig,
    masker: RowLabels,
    collator: Collator,
    seed: int,
    eval_rows: datasets.Dataset | None,
    bad_rows: BadRows,
) -> LoadedData:
    """Read the sources in as many logical streams as all of them have shards for."""
    count = min(config.streams, *(most_streams(documents) for documents, _ in opened))
    weights = [source.weight for source in config.sources if source.weight is not None]
    streams = [
        LogicalStream(
            # A single stream is not sharded: even one shard would split what follows a skip.
            sources=[d.shard(count, number) if count > 1 else d for d, _ in opened],
            number=number,
            weights=weights or None,
            make_rows=[maker for _, maker in opened],
            window=config.window,
            seed=seed,
            capacity=config.context_length if config.packing else None,
        )
        for number in range(count)
    ]
    count = config.eval.documents if eval_rows is None else 0
    unfinished, first_rows = split_streams(streams, eval_documents=count)
    eval_rows = first_rows if eval_rows is None else eval_rows
    held_out = HeldOut.of(document_traces(eval_rows), drop_near=config.eval.drop_near_duplicates)
    for stream in streams:
        stream.held_out = held_out
        bad_rows.merge(stream.bad_rows)
    return LoadedData(
        train=StreamedRows(unfinished, functools.partial(_masked_item, masker, config.packing)),
        eval=_eval_rows(eval_rows, masker, config),
        collator=collator,
        bad_rows=bad_rows,
        held_out=held_out,
    )


def _table_data(
    rows: datasets.Dataset,
    eval_rows: datasets.Dataset,
    config: DataConfig,
    masker: RowLabels,
    collator: Collator,
) -> LoadedData:
    lengths = row_lengths(rows)
    packs = pack(lengths, config.context_length) if config.packing else None
    train = MaskedRows(_without_traces(rows), masker, packs=packs)
    if isinstance(masker, ClassLabels):
        counts, num_tokens = class_counts(train), int(lengths.sum())
        parts = {} if rows is eval_rows else {"training": rows}
        for name, part in {**parts, "evaluation": eval_rows}.items():
            if num_cut := int((row_lengths(part) == config.context_length).sum()):
                message = "%d of %d %s rows fill data.context_length and may be cut."
                level = logging.WARNING if masker.of_tokens else logging.INFO  # cut labels are lost
                logger.log(level, message, num_cut, len(part), name)
    else:
        counts = unigram_counts(rows, masker)  # [V]
        num_tokens = int(counts.sum())
        if rows is not eval_rows and not num_tokens:
            raise ValueError(
                "data.sources: expected training rows with a token that may be predicted, got "
                "special and unknown tokens alone. Does the tokenizer know this language?"
            )
    return LoadedData(
        train=train,
        eval=_eval_rows(eval_rows, masker, config),
        collator=collator,
        labels=train.class_names,
        unigram_counts=counts,
        num_documents=int(document_numbers(rows)[-1]) + 1,
        num_tokens=num_tokens,
        fill_rate=fill_rate(lengths, packs, config.context_length) if packs else None,
    )


def _eval_rows(rows: datasets.Dataset, masker: RowLabels, config: DataConfig) -> MaskedRows:
    return MaskedRows(
        _without_traces(rows), replace(masker, seed=config.eval.seed), fixed_epoch=EVAL_EPOCH
    )


def _without_traces(rows: datasets.Dataset) -> datasets.Dataset:
    """Remove `TRACES`, by which copies of documents are found: no model reads them."""
    return rows.remove_columns([name for name in TRACES if name in rows.column_names])


def _masked_item(masker: RowLabels, is_packed: bool, members: Members) -> dict[str, np.ndarray]:
    rows = [masker(row, epoch) for row, epoch in members]
    return join_rows(rows) if is_packed else rows[0]


def split_table(
    rows: datasets.Dataset, held_out: EvalConfig
) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Split off documents chosen by the seed; the rows of a document must be adjacent.

    Returns:
        Rows to train on and to evaluate on, in the order of `rows`.
    """
    numbers = document_numbers(rows)
    num_documents = int(numbers[-1]) + 1
    if num_documents <= held_out.documents:
        raise _too_few(num_documents, held_out.documents)
    chosen = permutation("eval split", (held_out.seed,), num_documents)[: held_out.documents]
    in_eval = np.isin(numbers, chosen)  # [rows]
    return rows.select(np.flatnonzero(~in_eval)), rows.select(np.flatnonzero(in_eval))


def _too_few(num_documents: int, eval_documents: int) -> ValueError:
    return ValueError(
        f"data.eval.documents: expected fewer than the documents there are, got "
        f"{eval_documents} of {num_documents}. Keep fewer, or add sources."
    )


def split_streams(
    streams: Sequence[LogicalStream], *, eval_documents: int
) -> tuple[list[LogicalStream], datasets.Dataset]:
    """Keep the first documents of every logical stream of a run for evaluation.

    The streams are told to begin after these in every pass; documents without rows do not count.

    Returns:
        The streams that have something left to train on, and rows to evaluate on.
    """
    rows: list[Row] = []
    num_held, waiting = 0, list(streams)
    while waiting:  # short streams leave their share to the others
        unfinished = []
        for place, stream in enumerate(waiting):
            share = -(-(eval_documents - num_held) // (len(waiting) - place))
            held_rows, num_documents, is_left = stream.hold_out(share)
            rows += held_rows
            num_held += num_documents
            if is_left:
                unfinished.append(stream)
        waiting = unfinished
        if num_held >= eval_documents:
            break
    if not waiting and eval_documents:
        if not num_held:
            next(streams[0].rows(None))  # raises, and says what is wrong with the rows
        raise _too_few(num_held, eval_documents)
    return waiting or list(streams), rows_table(rows)  # reading streams without rows raises


def _masker(
    mask: MaskConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    seed: int,
    *,
    is_causal: bool,
) -> RowLabels:
    special = special_tokens(tokenizer, vocab_size)
    if is_causal:
        return NextTokenLabels(seed=seed, special_tokens=special)
    words = tokenizer("a b c", add_special_tokens=False)
    # A slow tokenizer, which knows no words, is refused where text is encoded.
    if mask.whole_word and words.is_fast and len(set(words.word_ids())) < 2:
        raise ValueError(
            "data.mask.whole_word: expected a tokenizer that tells words apart, got "
            f"{type(tokenizer).__name__}, to which a text is one word. Mask single tokens."
        )
    return RowMasker(
        config=mask, seed=seed, mask_token_id=tokenizer.mask_token_id, special_tokens=special
    )


def _open(
    config: DataConfig,
    source: Source,
    place: str,
    number: int,
    *,
    tokenizer: PreTrainedTokenizerBase,
    task: str,
) -> tuple[Documents, RowMaker]:
    name = source.path if isinstance(source, GivenSource) else place
    documents, first = load_documents(source, name=name, skip=config.on_bad_row == "skip")
    try:
        row_format = _format_of(first, config, source, name=name, task=task)
    except ValueError:  # the first row may be bad, and is then reported when it is read
        for row in itertools.islice(readable_rows(documents), 1, SAMPLE):
            with suppress(ValueError):
                row_format = _format_of(row, config, source, name=name, task=task)
                break
        else:
            raise
    read = Reader(
        row_format=row_format,
        tokenizer=tokenizer,
        loss_on=config.loss_on,
        column=source.column,
        word_ids=config.mask.whole_word,
        label_column=config.label_column,
        class_names=names_of_classes(documents, config.label_column) if task in LABELED else None,
        is_causal=task == "causal_lm",
    )
    maker = RowMaker(
        name=name,
        source=number,
        read=read,
        context_length=config.context_length,
        weight_column=config.weight_column,
        skip=config.on_bad_row == "skip",
    )
    return documents, maker


def _open_all(
    config: DataConfig, sources: Mapping[str, Source], *, first: int = 0, **options: Any
) -> list[tuple[Documents, RowMaker]]:
    """Open sources by their places, numbered from `first`; rows of all have the same columns."""
    opened = [
        _open(config, source, place, number, **options)
        for number, (place, source) in enumerate(sources.items(), first)
    ]
    scored = any(maker.read.row_format not in ("text", *LABELED.values()) for _, maker in opened)
    return [(documents, replace(maker, scored=scored)) for documents, maker in opened]


def _format_of(row: Row, config: DataConfig, source: Source, *, name: str, task: str) -> Format:
    """Return a source's format, by its settings or a row, and check the columns of that row."""
    if task in LABELED and config.label_column is not None:
        check_column(row, config.label_column, name="data.label_column")
    if config.weight_column is not None:
        check_column(row, config.weight_column, name="data.weight_column")
    if task in LABELED:
        row_format = LABELED[task]
    elif source.format != "auto":
        row_format = source.format
    elif source.column != "text":
        row_format = "text"
    else:
        try:
            row_format = recognize(row)
        except ValueError as error:
            raise ValueError(f"{name}.{error}") from error
        logger.info("%s: rows of the format %s.", name, row_format)
    if row_format in ("text", *LABELED.values()):
        is_text = row_format != "labeled_words"
        setting = f"text_column of {name}" if isinstance(source, GivenSource) else f"{name}.column"
        check_column(row, source.column, name=setting, is_text=is_text)
    return row_format


def _table_rows(
    opened: Sequence[tuple[Any, RowMaker]], config: DataConfig
) -> tuple[datasets.Dataset, BadRows]:
    tables, bad_rows = [], BadRows()
    for documents, maker in opened:
        rows, new_bad_rows = tokenize_table(documents, maker, config.num_proc)
        if len(rows) == 0:
            reasons = "".join(f" {reason}." for reason in new_bad_rows.first[:1])
            raise ValueError(
                f"{maker.name}: expected documents with text, got only blank or bad ones.{reasons}"
            )
        bad_rows.merge(new_bad_rows)
        tables.append(rows)
    if bad_rows.blank:
        logger.info("Left out: %d blank documents.", bad_rows.blank)
    return datasets.concatenate_datasets(tables), bad_rows
