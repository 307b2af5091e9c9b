"""The classes of labeled rows: their names, and how many labels each has."""

import json
from collections import Counter
from collections.abc import Sequence

import datasets
import numpy as np

from harmonic_sft.data.batches import MaskedRows
from harmonic_sft.data.masking import ClassLabels
from harmonic_sft.data.row_maker import column_batches


def class_labels(
    train: datasets.Dataset,
    held_out: datasets.Dataset,
    *,
    names: Sequence[str] | None,
    of_tokens: bool,
    seed: int,
) -> ClassLabels:
    """Number the classes of labeled rows, by default those of the training rows, sorted.

    Raises:
        ValueError: Fewer than two classes, labels of two types, or a row of another class.
    """
    trained, evaluated = _labels(train), _labels(held_out)
    unseen = evaluated if names is None else trained | evaluated
    names = _sorted_names(trained) if names is None else names
    others = sorted({str(label) for label in unseen}.difference(names))
    if others:
        shown = ", ".join(map(repr, others[:3])) + (" ..." if len(others) > 3 else "")
        raise ValueError(
            f"data.eval: expected labels that the training rows have, got {shown}. "
            "Add training rows of these classes, or take out the evaluation rows"
        )
    places = {name: number for number, name in enumerate(names)}
    numbers = {json.dumps(label): places[str(label)] for label in trained | evaluated}
    return ClassLabels(seed=seed, names=list(names), numbers=numbers, of_tokens=of_tokens)


def class_counts(rows: MaskedRows) -> np.ndarray:
    """Return how many labels of every class labeled rows have, `[V]` int64."""
    assert isinstance(rows.masker, ClassLabels), "only labeled rows have classes"
    counts = np.zeros(len(rows.masker.names), dtype=np.int64)
    for label, count in _count_labels(rows.rows).items():
        counts[rows.masker.numbers[label]] += count
    return counts


def _count_labels(rows: datasets.Dataset) -> Counter[str]:
    counts: Counter[str] = Counter()
    for (labels,) in column_batches(rows, "labels"):
        for found in labels.flatten().value_counts().to_pylist():
            counts[found["values"]] += found["counts"]
    del counts[None]  # tokens without a label
    return counts


def _labels(rows: datasets.Dataset) -> set[str | int]:
    return {json.loads(label) for label in _count_labels(rows)}


def _sorted_names(labels: set[str | int]) -> list[str]:
    if len({isinstance(label, str) for label in labels}) > 1:
        raise ValueError(
            "data.label_column: expected strings or integers, got both. Write all of one kind"
        )
    names = [str(label) for label in sorted(labels)]
    if len(names) < 2:
        raise ValueError(
            f"data.label_column: expected two classes or more in the training rows, got {names}"
        )
    return names
