"""Rows for the model: documents tokenized, cut to length and wrapped, with nothing lost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

ROW_FEATURES = datasets.Features(
    {
        "input_ids": datasets.List(datasets.Value("int32")),
        "source": datasets.Value("int32"),
        "document": datasets.Value("int64"),
        "chunk": datasets.Value("int32"),
    }
)


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase, *, vocab_size: int, max_positions: int, context_length: int
) -> None:
    """Refuse a tokenizer or a length that the model cannot take.

    Args:
        tokenizer: Of the model.
        vocab_size: Rows of the model's embedding table.
        max_positions: Longest row the model takes, in tokens.
        context_length: Longest row that will be made, in tokens.

    Raises:
        ValueError: No mask or pad token, an id beyond `vocab_size`, or rows longer than the model.
    """
    for role, token_id in (("mask", tokenizer.mask_token_id), ("pad", tokenizer.pad_token_id)):
        if token_id is None:
            raise ValueError(
                f"tokenizer: expected a {role} token, got none. "
                "Use the tokenizer of a masked language model."
            )
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ValueError(
            "tokenizer: expected ordinary tokens, got only special ones. "
            "Put the tokenizer's files beside the model"
        )
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        raise ValueError(
            f"tokenizer: expected ids below the model's vocab_size {vocab_size}, got {largest}. "
            "Use the tokenizer the model was trained with."
        )
    if context_length > max_positions:
        raise ValueError(
            f"data.context_length: expected at most the {max_positions} positions of the model, "
            f"got {context_length}."
        )


@dataclass(frozen=True)
class SpecialTokens:
    """What a tokenizer puts around one text."""

    prefix: list[int]
    suffix: list[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "SpecialTokens":
        """Find them by tokenizing a word: v5 has no `build_inputs_with_special_tokens`."""
        encoded = tokenizer("a", return_special_tokens_mask=True)
        ordinary = np.flatnonzero(np.asarray(encoded["special_tokens_mask"]) == 0)
        input_ids = list(encoded["input_ids"])
        return cls(input_ids[: ordinary[0]], input_ids[ordinary[-1] + 1 :])


def tokenize_documents(
    documents: Mapping[str, Sequence[Any]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
) -> dict[str, list[Any]]:
    """Cut documents into rows: consecutive chunks, each wrapped in the special tokens.

    A document's tail is a row of its own, and a blank document makes no row. Text that
    spells a special token, such as `[MASK]`, is tokenized as text.

    Args:
        documents: Columns `text`, `source` and `document`.
        tokenizer: Any tokenizer.
        context_length: Longest row, in tokens, special tokens included.

    Returns:
        Columns `input_ids`, `source`, `document` and `chunk`, one entry per row.

    Raises:
        ValueError: A document is not a text, or rows have no place for ordinary tokens.
    """
    special = SpecialTokens.of(tokenizer)
    num_special = len(special.prefix) + len(special.suffix)
    body = context_length - num_special
    if body < 1:
        raise ValueError(
            f"data.context_length: expected more than the {num_special} special tokens of a row, "
            f"got {context_length}."
        )
    names = list(zip(documents["source"], documents["document"], strict=True))
    for text, (source, document) in zip(documents["text"], names, strict=True):
        if not isinstance(text, str):
            raise ValueError(
                f"data.sources[{source}]: expected text in every document, "
                f"got {text!r} in document {document}."
            )
    encoded = tokenizer(
        [text if text.strip() else "" for text in documents["text"]],
        add_special_tokens=False,
        split_special_tokens=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # no warning about documents longer than the model
    )
    rows: dict[str, list[Any]] = {column: [] for column in ROW_FEATURES}
    for input_ids, (source, document) in zip(encoded["input_ids"], names, strict=True):
        for chunk, start in enumerate(range(0, len(input_ids), body)):
            body_ids = input_ids[start : start + body]
            rows["input_ids"].append([*special.prefix, *body_ids, *special.suffix])
            rows["source"].append(source)
            rows["document"].append(document)
            rows["chunk"].append(chunk)
    return rows


def _tokenize_source(
    batch: Mapping[str, Sequence[str]],
    indices: Sequence[int],
    *,
    source: int,
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
    code: str,  # only part of the cache's key
) -> dict[str, list[Any]]:
    documents = {"text": batch["text"], "source": [source] * len(indices), "document": indices}
    return tokenize_documents(documents, tokenizer=tokenizer, context_length=context_length)


def table_rows(
    documents: datasets.Dataset,
    *,
    source: int,
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
    num_proc: int | None = None,
) -> datasets.Dataset:
    """Tokenize a table of documents, with a progress bar and the library's cache on disk.

    Args:
        documents: Column `text`.
        source: Number of the source, part of every row's name.
        tokenizer: As in `tokenize_documents`.
        context_length: As in `tokenize_documents`.
        num_proc: Processes to tokenize in; None is this one, best below some million words.

    Returns:
        The rows of `tokenize_documents`, in the order of the documents.
    """
    return documents.map(
        _tokenize_source,
        with_indices=True,
        batched=True,
        remove_columns=["text"],
        features=ROW_FEATURES,
        num_proc=num_proc,
        desc=f"Tokenizing source {source}",
        fn_kwargs={
            "source": source,
            "tokenizer": tokenizer,
            "context_length": context_length,
            # datasets knows an imported function by its name alone: a cache made by another
            # version of this file must not be taken for this one's.
            "code": Path(__file__).read_text(),
        },
    )


def stream_rows(
    documents: datasets.IterableDataset,
    *,
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
) -> datasets.IterableDataset:
    """Tokenize a stream of documents a few at a time, so that the first row comes soon.

    Args:
        documents: Columns `text`, `source` and `document`.
        tokenizer: As in `tokenize_documents`.
        context_length: As in `tokenize_documents`.

    Returns:
        The rows of `tokenize_documents`, in the order of the documents.
    """
    return documents.map(
        tokenize_documents,
        batched=True,
        batch_size=32,
        remove_columns=["text"],
        fn_kwargs={"tokenizer": tokenizer, "context_length": context_length},
    )


def unigram_counts(rows: datasets.Dataset, vocab_size: int) -> np.ndarray:
    """Count how often every token occurs.

    Args:
        rows: Column `input_ids`.
        vocab_size: Length of the table.

    Returns:
        `[V]`, int64.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for table in rows.select_columns(["input_ids"]).with_format("arrow").iter(batch_size=10_000):
        input_ids = table["input_ids"].combine_chunks().flatten().to_numpy()
        counts += np.bincount(input_ids, minlength=vocab_size)
    return counts
