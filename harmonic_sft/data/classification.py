"""Texts with a class, or tokens with one each: rows and their labels."""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from harmonic_sft.data.bad_rows import BadRow, BadRows
from harmonic_sft.data.batches import LabeledRows, PaddingCollator
from harmonic_sft.data.files import BAD, PLACE, shown
from harmonic_sft.data.heldout import (
    NO_DUPLICATES,
    Duplicates,
    HeldOut,
    fingerprint,
    leave_out,
    word_hashes,
)
from harmonic_sft.data.loading import choose_eval
from harmonic_sft.data.masking import IGNORE_INDEX
from harmonic_sft.data.row_maker import check_tokenizer, weight_of
from harmonic_sft.data.sections import DataConfig, Source, check_label_settings
from harmonic_sft.data.sources import (
    check_column,
    document_name,
    load_documents,
    numbered_rows,
    source_name,
)

logger = logging.getLogger(__name__)
Task = Literal["sequence_classification", "token_classification"]
BATCH_ROWS = 1000


class _Row(NamedTuple):
    """A row as it was read."""

    text: str | list[str]
    labels: Sequence[str | int]  # one, or one for each word
    weight: float = 1.0

    @property
    def traces(self) -> tuple[str, np.ndarray]:
        """The fingerprint and the word hashes of the text, `[W]`; the label does not count."""
        text = self.text if isinstance(self.text, str) else " ".join(self.text)
        return fingerprint(text), word_hashes(text)


@dataclass(frozen=True, kw_only=True)
class LabeledData:
    """Data sets of one run; the fields are those of `LoadedData`, the classes being its tokens."""

    train: LabeledRows
    eval: LabeledRows
    collator: PaddingCollator
    labels: list[str]  # names of the classes, in the order of their numbers
    unigram_counts: np.ndarray  # [V], labels of each class in the training rows
    num_documents: int  # training rows
    num_tokens: int  # of the training rows, special ones included
    fill_rate: None = None  # rows are never packed
    bad_rows: BadRows = field(default_factory=BadRows)
    held_out: HeldOut = field(default_factory=HeldOut)
    duplicates: Duplicates = NO_DUPLICATES
    trained: np.ndarray | None = None


def load_labeled_data(
    config: DataConfig,
    *,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    max_positions: int,
    labels: Sequence[str] | None = None,
    eval_only: bool = False,
) -> LabeledData:
    """Load, split and tokenize the labeled rows of a run; a longer text is cut.

    Args:
        config: The `data:` part of the configuration, with a `label_column`.
        task: Whether a row has one label, or is a list of words with one each. A word's label is
            that of its first token; its other tokens are not scored.
        tokenizer: The model's tokenizer.
        vocab_size: Rows of the model's embedding table.
        max_positions: Longest row the model takes, in tokens.
        labels: Names of the classes of a trained model; None takes those of the training rows,
            sorted.
        eval_only: Evaluate on all rows of the sources.

    Returns:
        Training and evaluation sets, and the classes.

    Raises:
        ValueError: A setting that has no effect here, a missing column, bad rows, fewer than two
            classes, or a class that only evaluation rows have.
    """
    check_label_settings(config)
    check_tokenizer(
        tokenizer,
        vocab_size=vocab_size,
        max_positions=max_positions,
        context_length=config.context_length,
    )
    bad_rows = BadRows(skip=config.on_bad_row == "skip")
    rows: list[_Row] = []
    for index, source in enumerate(config.sources):
        name = source_name(source, f"data.sources[{index}]")
        rows += _read(source, name, config, task, bad_rows)
    if eval_only:
        train = held_out = rows
    elif config.eval.source is not None:
        train = rows
        held_out = _read(config.eval.source, "data.eval.source", config, task, bad_rows)
    else:
        chosen = choose_eval(len(rows), config.eval.documents, seed=config.eval.seed)
        train = [row for row, in_eval in zip(rows, chosen, strict=True) if not in_eval]
        held_out = [row for row, in_eval in zip(rows, chosen, strict=True) if in_eval]
    for part, found in (("sources", train), ("eval.source", held_out)):
        if not found and (part == "sources" or config.eval.documents):
            raise ValueError(f"data.{part}: expected rows with text and a label, got none")
    held = HeldOut.of(row.traces for row in held_out)
    duplicates, trained = NO_DUPLICATES, None
    if not eval_only:
        traces = [row.traces for row in train]
        drop_near = config.eval.drop_near_duplicates
        stay, duplicates, trained = leave_out(traces, held, drop_near=drop_near)
        train = [row for row, stays in zip(train, stay, strict=True) if stays]
    names = list(labels or _sorted_labels(train))
    _check_labels(held_out if labels is None else [*train, *held_out], names)
    encode = functools.partial(_encode, names=names, tokenizer=tokenizer, config=config, task=task)
    train_rows = encode(train, "training")
    counted = np.concatenate([np.atleast_1d(values) for values in train_rows.labels])
    return LabeledData(
        train=train_rows,
        eval=encode(held_out, "evaluation"),
        collator=PaddingCollator(
            pad_token_id=tokenizer.pad_token_id, pad_to_multiple_of=config.pad_to_multiple_of
        ),
        labels=names,
        unigram_counts=np.bincount(counted[counted != IGNORE_INDEX], minlength=len(names)),
        num_documents=len(train),
        num_tokens=sum(map(len, train_rows.input_ids)),
        bad_rows=bad_rows,
        held_out=held,
        duplicates=duplicates,
        trained=trained,
    )


def _read(
    source: Source,
    name: str,
    config: DataConfig,
    task: Task,
    bad_rows: BadRows,
) -> list[_Row]:
    """Return the rows of a source that have text and a label."""
    label_column, weight_column = config.label_column, config.weight_column
    assert label_column is not None, "check_label_settings has looked"
    documents, first = load_documents(source, name=name, skip=bad_rows.skip)
    assert not isinstance(documents, datasets.IterableDataset), "streams are refused"
    check_column(documents, first, label_column, name="data.label_column")
    is_text = task == "sequence_classification"
    check_column(documents, first, source.column, name=f"{name}.column", is_text=is_text)
    feature: Any = (documents.features or {}).get(label_column)
    feature = feature.feature if isinstance(feature, datasets.List) else feature
    names = feature.names if isinstance(feature, datasets.ClassLabel) else None
    rows = []
    for row in numbered_rows(documents, name):
        place = row.get(PLACE) or f"{shown(source.path)}, {document_name(row['document'])}"
        if BAD in row:
            bad_rows.report(name, place, *row[BAD])
            continue
        text, label = row.get(source.column), row.get(label_column)
        try:
            labels = _text_label(text, label) if is_text else _word_labels(text, label)
            weight = 1.0 if weight_column is None else weight_of(row, weight_column)
            rows.append(_Row(text or "", [_label(value, names) for value in labels], weight))
        except BadRow as error:
            bad_rows.report(name, place, str(error))
    return rows


def _text_label(text: Any, label: Any) -> list[Any]:
    if not isinstance(text, str) or not text.strip():
        raise BadRow(f"expected text with a label, got {text!r}")
    return [label]


def _word_labels(text: Any, labels: Any) -> list[Any]:
    if not isinstance(text, list) or not text or not all(isinstance(word, str) for word in text):
        raise BadRow(f"expected a list of words, got {type(text).__name__}")
    if not isinstance(labels, list) or len(labels) != len(text):
        found = len(labels) if isinstance(labels, list) else type(labels).__name__
        raise BadRow(f"expected a label for each of {len(text)} words, got {found}")
    return labels


def _label(value: Any, names: Sequence[str] | None) -> str | int:
    """Return a label, or the name that a data set has for its number."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadRow(f"expected a string or an integer as label, got {value!r}")
    if names is None:
        return value
    if not 0 <= int(value) < len(names):
        raise BadRow(f"expected the number of one of {len(names)} classes, got {value}")
    return names[int(value)]


def _sorted_labels(rows: Sequence[_Row]) -> list[str]:
    found = {label for row in rows for label in row.labels}
    if len({isinstance(label, str) for label in found}) > 1:
        raise ValueError(
            "data.label_column: expected strings or integers, got both. Write all of one kind"
        )
    labels = [str(label) for label in sorted(found)]
    if len(labels) < 2:
        raise ValueError(
            f"data.label_column: expected two classes or more in the training rows, got {labels}"
        )
    return labels


def _check_labels(rows: Sequence[_Row], names: Sequence[str]) -> None:
    unseen = sorted({str(label) for row in rows for label in row.labels}.difference(names))
    if unseen:
        shown = ", ".join(map(repr, unseen[:3])) + (" ..." if len(unseen) > 3 else "")
        raise ValueError(
            f"data.eval: expected labels that the training rows have, got {shown}. "
            "Add training rows of these classes, or take out the evaluation rows"
        )


def _encode(
    rows: Sequence[_Row],
    what: str,
    *,
    names: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    task: Task,
) -> LabeledRows:
    """Tokenize rows and number their labels."""
    input_ids, labels = [], []
    numbers = {name: index for index, name in enumerate(names)}
    for start in range(0, len(rows), BATCH_ROWS):
        batch = rows[start : start + BATCH_ROWS]
        encoded = tokenizer(
            [row.text for row in batch],
            truncation=True,
            max_length=config.context_length,
            is_split_into_words=task == "token_classification",
            return_overflowing_tokens=False,
        )
        input_ids += [np.array(ids, dtype=np.int64) for ids in encoded["input_ids"]]
        for index, row in enumerate(batch):
            targets: Any = [numbers[str(label)] for label in row.labels]
            if task == "token_classification":
                targets = _first_tokens(targets, encoded.word_ids(index))
            else:
                targets = targets[0]
            labels.append(np.array(targets, dtype=np.int64))
    num_cut = sum(len(ids) == config.context_length for ids in input_ids)
    if num_cut:
        message = "%d of %d %s rows fill data.context_length and may be cut."
        logger.info(message, num_cut, len(rows), what)
    weights = None if config.weight_column is None else [row.weight for row in rows]
    return LabeledRows(input_ids, labels, names, weights)


def _first_tokens(targets: Sequence[int], word_ids: Sequence[int | None]) -> list[int]:
    """Return the label of a word at its first token, and -100 at all others."""
    found, before = [], None
    for word in word_ids:
        found.append(IGNORE_INDEX if word is None or word == before else targets[word])
        before = word
    return found
