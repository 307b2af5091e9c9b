"""Documents kept for evaluation, which training never sees."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from harmonic_sft.data.keyed_random import permutation
from harmonic_sft.data.rows import ROW_FEATURES, stream_rows, tokenize_documents


@dataclass(frozen=True, kw_only=True)
class Split:
    """Rows to train on and rows to evaluate on, no document being in both."""

    train: datasets.Dataset | datasets.IterableDataset
    eval: datasets.Dataset
    num_documents: int | None  # of the training rows; None for a stream


def split_table(rows: datasets.Dataset, *, eval_documents: int, seed: int) -> Split:
    """Keep documents chosen at random for evaluation.

    Args:
        rows: The rows of a document stand together.
        eval_documents: How many documents to keep.
        seed: Of the choice.

    Returns:
        The split, both parts in the order of `rows`.

    Raises:
        ValueError: Nothing would be left to train on.
    """
    names = np.stack([rows.data.column(key).to_numpy() for key in ("source", "document")])
    starts = np.diff(names, axis=1, prepend=-1).any(axis=0)  # [rows], true at a new document
    num_documents = int(starts.sum())
    _check_enough(num_documents, eval_documents)
    chosen = np.zeros(num_documents, dtype=bool)
    chosen[permutation("eval split", (seed,), num_documents)[:eval_documents]] = True
    in_eval = chosen[np.cumsum(starts) - 1]  # [rows]
    return Split(
        train=rows.select(np.flatnonzero(~in_eval)),
        eval=rows.select(np.flatnonzero(in_eval)),
        num_documents=num_documents - eval_documents,
    )


def split_stream(
    streams: Sequence[datasets.IterableDataset],
    *,
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
    eval_documents: int,
) -> Split:
    """Read documents of several streams in turn and keep the first ones for evaluation.

    Args:
        streams: Column `text`.
        tokenizer: As in `tokenize_documents`.
        context_length: As in `tokenize_documents`.
        eval_documents: How many documents to keep; blank ones do not count.

    Returns:
        The split. A stream that ends before the others is not begun anew.

    Raises:
        ValueError: Nothing would be left to train on.
    """
    numbered = [
        stream.map(_number, with_indices=True, fn_kwargs={"source": source})
        for source, stream in enumerate(streams)
    ]
    in_turn = datasets.interleave_datasets(
        numbered, stopping_strategy="all_exhausted_without_replacement"
    )
    documents = in_turn.filter(_is_not_blank)
    first = list(documents.take(eval_documents + 1))
    _check_enough(len(first), eval_documents)
    columns = {key: [row[key] for row in first[:-1]] for key in ("text", "source", "document")}
    rows = tokenize_documents(columns, tokenizer=tokenizer, context_length=context_length)
    return Split(
        train=stream_rows(
            documents.skip(eval_documents), tokenizer=tokenizer, context_length=context_length
        ),
        eval=datasets.Dataset.from_dict(rows, features=ROW_FEATURES),
        num_documents=None,
    )


def _number(_: Mapping[str, Any], index: int, *, source: int) -> dict[str, int]:
    return {"source": source, "document": index}


def _is_not_blank(document: Mapping[str, Any]) -> bool:
    # What is no text at all passes, and tokenize_documents refuses it by name.
    return not isinstance(document["text"], str) or bool(document["text"].strip())


def _check_enough(num_documents: int, eval_documents: int) -> None:
    if num_documents <= eval_documents:
        raise ValueError(
            f"data.eval.documents: expected fewer than the documents there are, got "
            f"{eval_documents} of {num_documents}. Keep fewer, or add sources."
        )
