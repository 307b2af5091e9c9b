"""Documents kept for evaluation, which training never sees."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np

from harmonic_sft.data.keyed_random import permutation
from harmonic_sft.data.rows import FEATURES
from harmonic_sft.data.streams import LogicalStream


@dataclass(frozen=True, kw_only=True)
class Split:
    """Rows to train on and rows to evaluate on, no document being in both."""

    train: datasets.Dataset | list[LogicalStream]
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
    columns = rows.select_columns(["source", "document"]).with_format("arrow")[:].columns
    names = np.stack([column.to_numpy() for column in columns])
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


def split_streams(streams: Sequence[LogicalStream], *, eval_documents: int) -> Split:
    """Keep the first documents of every logical stream for evaluation.

    Args:
        streams: All of a run; told to begin after these documents in every pass.
        eval_documents: How many documents to keep of all of them; those without rows do not count.

    Returns:
        The split, without the streams that have nothing left to train on.

    Raises:
        ValueError: Nothing would be left to train on.
    """
    rows: list[dict[str, Any]] = []
    kept, waiting = 0, list(streams)
    # Short streams leave their share to the others.
    for opened in itertools.count():
        if not waiting or (opened and kept == eval_documents):
            break
        going_on = []
        for place, stream in enumerate(waiting):
            share = -(-(eval_documents - kept) // (len(waiting) - place))
            found, documents, left = stream.hold_out(share)
            rows += found
            kept += documents
            if left:
                going_on.append(stream)
        waiting = going_on
    if not waiting:
        _check_enough(kept, eval_documents)
    columns = [name for name in FEATURES if any(name in row for row in rows)]
    for row in rows:  # of plain text, beside formats that say what is scored
        row.setdefault("scored", [True] * len(row["input_ids"]))
    features = datasets.Features({name: FEATURES[name] for name in columns})
    table = {name: [row[name] for row in rows] for name in columns}
    return Split(
        train=waiting,
        eval=datasets.Dataset.from_dict(table, features=features),
        num_documents=None,
    )


def _check_enough(num_documents: int, eval_documents: int) -> None:
    if num_documents <= eval_documents:
        raise ValueError(
            f"data.eval.documents: expected fewer than the documents there are, got "
            f"{eval_documents} of {num_documents}. Keep fewer, or add sources."
        )
