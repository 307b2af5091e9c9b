"""Texts with a class, or tokens with one each: rows, their labels, and padded batches."""

import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import datasets
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from harmonic_sft.data.files import PLACE, BadRowPolicy, BadRows
from harmonic_sft.data.keyed_random import permutation
from harmonic_sft.data.masked_dataset import PaddingCollator
from harmonic_sft.data.masking import IGNORE_INDEX
from harmonic_sft.data.rows import check_tokenizer
from harmonic_sft.data.sections import DataConfig, Source, check_label_settings
from harmonic_sft.data.sources import check_column, column_names, load_documents

logger = logging.getLogger(__name__)
Task = Literal["sequence_classification", "token_classification"]
BATCH_ROWS = 1000
Label = str | int


class LabeledRows(torch.utils.data.Dataset):
    """Rows in memory, each with its label or those of its tokens.

    Args:
        input_ids: `[T]` of each row.
        labels: Class of each row, or `[T]` classes of its tokens.
    """

    def __init__(self, input_ids: Sequence[np.ndarray], labels: Sequence[np.ndarray]) -> None:
        self.input_ids = input_ids
        self.labels = labels
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Note the epoch, which orders the rows."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.input_ids)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return `input_ids` `[T]` and `labels`, `[]` or `[T]`, all int64, of one row."""
        return {"input_ids": self.input_ids[index], "labels": self.labels[index]}


@dataclass(frozen=True, kw_only=True)
class LabelCollator:
    """Pad rows on the right to the longest one.

    Args:
        pad: Pads the tokens.
    """

    pad: PaddingCollator

    def __call__(self, rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Tensor]:
        """Make one batch.

        Args:
            rows: `input_ids` `[T]` and `labels`, `[]` or `[T]`, of each row.

        Returns:
            `input_ids` and `attention_mask` `[B, T]`; `labels` `[B]`, or `[B, T]` with -100 where
            there is padding. All int64.
        """
        if rows[0]["labels"].ndim:
            return self.pad(rows)
        padded = self.pad([{**row, "labels": row["input_ids"]} for row in rows])
        return {**padded, "labels": torch.tensor([int(row["labels"]) for row in rows])}


@dataclass(frozen=True, kw_only=True)
class LabeledData:
    """Data sets of one run; the fields are those of `LoadedData`, the classes being its tokens.

    Attributes:
        train: To train on.
        eval: To evaluate on.
        collator: Of both.
        labels: Names of the classes, in the order of their numbers.
        unigram_counts: `[V]`, labels of each class in the training rows.
        num_documents: Training rows.
        num_tokens: Tokens of the training rows, special ones included.
        fill_rate: Rows are never packed.
        bad_rows: What was left out.
    """

    train: LabeledRows
    eval: LabeledRows
    collator: LabelCollator
    labels: list[str]
    unigram_counts: np.ndarray
    num_documents: int
    num_tokens: int
    fill_rate: None = None
    bad_rows: BadRows = field(default_factory=BadRows)


def load_labeled_data(
    config: DataConfig,
    *,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    max_positions: int,
    seed: int,
    labels: Sequence[str] | None = None,
) -> LabeledData:
    """Load, split and tokenize the labeled rows of a run; a longer text is cut.

    Args:
        config: The `data:` part of the configuration, with a `label_column`.
        task: Whether a row has one label, or is a list of words with one each. A word's label is
            that of its first token; its other tokens are not scored.
        tokenizer: Of the model.
        vocab_size: Rows of the model's embedding table.
        max_positions: Longest row the model takes, in tokens.
        seed: Of the choice of evaluation rows.
        labels: Names of the classes of a trained model; None takes those of the training rows,
            sorted.

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
    reader = _Reader(config, task, tokenizer, BadRows())
    rows = [
        row
        for index, source in enumerate(config.sources)
        for row in reader.read(source, f"data.sources[{index}]")
    ]
    if config.eval.source is not None:
        train, held_out = rows, reader.read(config.eval.source, "data.eval.source")
    else:
        train, held_out = _split(rows, config.eval.documents, seed)
    for part, found in (("sources", train), ("eval.source", held_out)):
        if not found:
            raise ValueError(f"data.{part}: expected rows with text and a label, got none")
    names = list(labels or _sorted_labels(train))
    numbers = {name: index for index, name in enumerate(names)}
    _check_labels(held_out if labels is None else [*train, *held_out], numbers)
    train_set = reader.encode(train, numbers, "training")
    counted = np.concatenate([np.atleast_1d(values) for values in train_set.labels])
    pad = PaddingCollator(
        pad_token_id=tokenizer.pad_token_id,
        pad_to_multiple_of=config.pad_to_multiple_of,
    )
    return LabeledData(
        train=train_set,
        eval=reader.encode(held_out, numbers, "evaluation"),
        collator=LabelCollator(pad=pad),
        labels=names,
        unigram_counts=np.bincount(counted[counted != IGNORE_INDEX], minlength=len(names)),
        num_documents=len(train),
        num_tokens=sum(map(len, train_set.input_ids)),
        bad_rows=reader.bad_rows,
    )


@dataclass(frozen=True)
class _Row:
    """A row as it was read."""

    text: str | list[str]
    labels: Sequence[Label]  # one, or one for each word


@dataclass(frozen=True)
class _Reader:
    """Reads and tokenizes rows."""

    config: DataConfig
    task: Task
    tokenizer: PreTrainedTokenizerBase
    bad_rows: BadRows

    def read(self, source: Source, name: str) -> list[_Row]:
        """Return the rows of a source that have text and a label."""
        skip = self.config.on_bad_row == "skip"
        documents = load_documents(
            source, name=name, on_bad_row=self.config.on_bad_row, bad_rows=self.bad_rows
        )
        assert isinstance(documents, datasets.Dataset), "streams are refused"
        label_column = self.config.label_column or ""
        _check_label_column(documents, label_column)
        if self.task == "sequence_classification":
            check_column(documents, source, name=name)
        policy = BadRowPolicy(name, self.bad_rows if skip else None)
        rows = []
        wanted = {source.column, label_column, PLACE}.intersection(documents.column_names)
        columns = documents.select_columns(sorted(wanted))
        names = _class_names(documents.features[label_column])
        for number, row in enumerate(columns, 1):
            assert isinstance(row, dict), "a table gives dictionaries"
            made = self._make(row[source.column], row[label_column], names)
            if isinstance(made, str):
                policy.report(row.get(PLACE) or f"{source.path!r}, row {number}", made)
            else:
                rows.append(made)
        return rows

    def _make(self, text: Any, label: Any, names: Sequence[str] | None) -> _Row | str:
        """Return a row, or what is wrong with it."""
        if self.task == "sequence_classification":
            if not isinstance(text, str) or not text.strip():
                return "no text"
            found = [label]
        else:
            if not isinstance(text, list) or not text or not all(isinstance(w, str) for w in text):
                return "no list of words"
            if not isinstance(label, list) or len(label) != len(text):
                return f"{len(label) if isinstance(label, list) else 'no list of'} labels " + (
                    f"for {len(text)} words"
                )
            found = label
        for value in found:
            if isinstance(value, bool) or not isinstance(value, str | int):
                return f"the label {value!r}, neither a string nor an integer"
            if names is not None and not 0 <= int(value) < len(names):
                return f"the label {value}, which is none of the {len(names)} classes"
        return _Row(text, [names[value] for value in found] if names is not None else found)

    def encode(self, rows: Sequence[_Row], numbers: Mapping[str, int], what: str) -> LabeledRows:
        """Tokenize rows and number their labels."""
        input_ids, labels, num_cut = [], [], 0
        for start in range(0, len(rows), BATCH_ROWS):
            batch = rows[start : start + BATCH_ROWS]
            encoded = self.tokenizer(
                [row.text for row in batch],
                truncation=True,
                max_length=self.config.context_length,
                is_split_into_words=self.task == "token_classification",
                return_overflowing_tokens=False,
            )
            for index, row in enumerate(batch):
                ids = np.array(encoded["input_ids"][index], dtype=np.int64)
                num_cut += len(ids) == self.config.context_length
                input_ids.append(ids)
                targets = [numbers[str(label)] for label in row.labels]
                if self.task == "token_classification":
                    targets = _of_first_tokens(targets, encoded.word_ids(index))
                    labels.append(np.array(targets, dtype=np.int64))
                else:
                    labels.append(np.array(targets[0], dtype=np.int64))
        if num_cut:
            logger.info(
                "%d of %d %s rows fill data.context_length and may be cut.",
                *(num_cut, len(rows), what),
            )
        return LabeledRows(input_ids, labels)


def _of_first_tokens(targets: Sequence[int], word_ids: Sequence[int | None]) -> list[int]:
    """Return the label of a word at its first token, and -100 at all others."""
    found, before = [], None
    for word in word_ids:
        found.append(IGNORE_INDEX if word is None or word == before else targets[word])
        before = word
    return found


def _check_label_column(documents: datasets.Dataset, column: str) -> None:
    columns = column_names(documents)
    if column not in columns:
        nearest = difflib.get_close_matches(column, columns, n=1, cutoff=0.0)
        raise ValueError(
            f"data.label_column: expected one of {sorted(columns)}, got {column!r}. "
            f"Did you mean {nearest[0]!r}?"
        )


def _class_names(feature: Any) -> Sequence[str] | None:
    """Return the names that a data set has for its numbers, None if it has none."""
    inner = feature.feature if isinstance(feature, datasets.List) else feature
    return inner.names if isinstance(inner, datasets.ClassLabel) else None


def _split(rows: list[_Row], num_eval: int, seed: int) -> tuple[list[_Row], list[_Row]]:
    if len(rows) <= num_eval:
        raise ValueError(
            f"data.eval.documents: expected fewer than the documents there are, got "
            f"{num_eval} of {len(rows)}. Keep fewer, or add sources."
        )
    chosen = {int(i) for i in permutation("eval split", (seed,), len(rows))[:num_eval]}
    train = [row for index, row in enumerate(rows) if index not in chosen]
    return train, [row for index, row in enumerate(rows) if index in chosen]


def _sorted_labels(rows: Sequence[_Row]) -> list[str]:
    found = {label for row in rows for label in row.labels}
    if len({isinstance(label, str) for label in found}) > 1:
        raise ValueError(
            "data.label_column: expected strings or integers, got both. Write all of one kind"
        )
    labels = sorted(found)
    if len(labels) < 2:
        raise ValueError(
            f"data.label_column: expected two classes or more in the training rows, got {labels}"
        )
    return [str(label) for label in labels]


def _check_labels(rows: Sequence[_Row], numbers: Mapping[str, int]) -> None:
    unseen = sorted({str(label) for row in rows for label in row.labels} - numbers.keys())
    if unseen:
        shown = ", ".join(map(repr, unseen[:3])) + (" ..." if len(unseen) > 3 else "")
        raise ValueError(
            f"data.eval: expected labels that the training rows have, got {shown}. "
            "Add training rows of these classes, or take out the evaluation rows"
        )
