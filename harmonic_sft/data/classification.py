"""The classes of labeled rows: their names, and how many labels each has."""

import json
import logging
from collections import Counter
from collections.abc import Sequence

import datasets
import numpy as np

from harmonic_sft.data.batches import MaskedRows
from harmonic_sft.data.masking import ClassLabels
from harmonic_sft.data.row_maker import column_batches

logger = logging.getLogger(__name__)


def class_labels(
    train: datasets.Dataset,
    held_out: datasets.Dataset,
    *,
    names: Sequence[str] | None,
    order: Sequence[str] | None,
    has_numbers: bool,
    of_tokens: bool,
    seed: int,
) -> ClassLabels:
    """Number the classes of labeled rows.

    Args:
        train: Rows to train on.
        held_out: Rows to evaluate on.
        names: A trained model's classes, in its order. If no label is one of them, integers are
            taken as their numbers. None takes the classes of the training rows.
        order: The order of the training rows' classes, if `names` is None; None sorts them.
        has_numbers: Whether integers may be numbers of `names`, and not of another data set's.
        of_tokens: Whether a row has a label for each word.
        seed: Passed on to `ClassLabels`.

    Raises:
        ValueError: Fewer than two classes, labels of two types, or a label that is no class.
    """
    trained, evaluated = _labels(train), _labels(held_out)
    classes = _class_names(trained, order) if names is None else list(names)
    places = {name: number for number, name in enumerate(classes)}
    labels = trained | evaluated
    # If the names are integers themselves, an integer label is a name.
    has_numbers = has_numbers and names is not None and not any(map(_is_integer, names))
    is_counted = any(map(_is_integer, labels))
    if has_numbers and is_counted and places.keys().isdisjoint(map(str, labels)):
        places = {str(number): number for number in range(len(classes))}
        logger.warning(
            "data.label_column: integers are taken for the model's numbers of its classes, %s. "
            "Where those of the data are others, write names.",
            _shown([f"{number} is {name}" for number, name in enumerate(classes)]),
        )
    number_of = {label: places.get(str(label)) for label in labels}
    others = sorted(str(label) for label, number in number_of.items() if number is None)
    if others and names is None:
        raise ValueError(
            f"data.eval: expected labels that the training rows have, got {_shown(others)}. "
            "Add training rows of these classes, or take out the evaluation rows"
        )
    if others:
        raise ValueError(
            f"data.label_column: expected the model's classes, {_shown(classes)}, got "
            f"{_shown(others)}. Rename the labels, or train a new head over the classes of the rows"
        )
    numbers = {json.dumps(label): n for label, n in number_of.items() if n is not None}
    return ClassLabels(seed=seed, names=classes, numbers=numbers, of_tokens=of_tokens)


def _shown(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (" ..." if len(names) > 3 else "")


def class_counts(rows: MaskedRows) -> np.ndarray:
    """Count the labels of every class in labeled rows, `[V]` int64."""
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


def _class_names(labels: set[str | int], order: Sequence[str] | None) -> list[str]:
    if len({isinstance(label, str) for label in labels}) > 1:
        raise ValueError(
            "data.label_column: expected strings or integers, got both. Write all of one kind"
        )
    ordered = sorted(labels) if order is None else [name for name in order if name in labels]
    if left_out := [name for name in order or () if name not in labels]:
        logger.warning(
            "data.label_column: no training rows of %s. The model leaves them out, so its numbers "
            "of the classes are not those of the data set.",
            _shown(left_out),
        )
    # A CSV file holds integers as strings: sort them as numbers.
    if order is None and all(map(_is_integer, labels)):
        ordered = sorted(ordered, key=int)
    names = [str(label) for label in ordered]
    if len(names) < 2:
        raise ValueError(
            f"data.label_column: expected two classes or more in the training rows, got {names}"
        )
    return names


def _is_integer(label: str | int) -> bool:
    return str(label).removeprefix("-").isdecimal()
