"""What a few seeds and documents can tell: intervals, Holm's correction, and one notation."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

UNDECIDED = "undecided"
LEVEL = 0.95
ROUNDING = 1e-12  # of differences between numbers of about 1
NUM_RESAMPLES = 2000
BATCH = 1 << 22  # documents of the resamples that are drawn at once
MIN_DOCUMENTS = 5  # with fewer, resampled intervals contain the mean too rarely


def t_interval(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean over seeds with its 95 % t interval.

    Args:
        values: One for each seed; for a comparison, the differences between paired seeds.

    Returns:
        `mean`, `half_width` and `p`, of the hypothesis that the mean is 0, both None for a single
        seed, and `seeds`. `p` is None too if all values are equal: they do not say how sure the
        mean is.

    Raises:
        ValueError: No value, or one that is not finite.
    """
    array = np.asarray(values, dtype=np.float64)
    if not len(array) or not np.isfinite(array).all():
        raise ValueError(f"values: expected finite numbers of at least one seed, got {values!r}")
    mean, count = float(array.mean()), len(array)
    if count == 1:
        return {"mean": mean, "half_width": None, "p": None, "seeds": 1}
    error = float(array.std(ddof=1)) / count**0.5
    if error < ROUNDING * max(1.0, float(np.abs(array).max())):
        error = 0.0
    half_width = float(stats.t.ppf((1 + LEVEL) / 2, count - 1)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, count - 1)) if error else None
    return {"mean": mean, "half_width": half_width, "p": p, "seeds": count}


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p values corrected for the number of comparisons in a table; None stays None.

    Source:
        Holm 1979, A Simple Sequentially Rejective Multiple Test Procedure.
    """
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, index) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - rank)))
        corrected[index] = highest
    return corrected


def verdict(difference: dict[str, Any], p: float | None) -> str:
    """Say "higher", "lower" or "undecided" of a `t_interval` and its p corrected by `holm`.

    A p of None, as for a single seed, decides nothing.
    """
    if p is None or p > 1 - LEVEL:
        return UNDECIDED
    return "higher" if difference["mean"] > 0 else "lower"


def show_interval(value: dict[str, Any], *, scale: float = 1, digits: int = 3) -> str:
    """Return mean ± half of the 95 % interval; for a single seed the mean alone."""
    mean, half_width = f"{scale * value['mean']:.{digits}f}", value["half_width"]
    return mean if half_width is None else f"{mean} ± {scale * half_width:.{digits}f}"


def document_interval(
    values: np.ndarray, documents: np.ndarray, *, level: float = LEVEL
) -> list[float] | None:
    """Return the interval of a mean over tokens, by resampling whole documents.

    The fewer documents there are, the further out its percentiles lie, as far as Student's t lies
    beyond the normal distribution: the level's own percentiles would contain the mean too rarely.

    Source:
        Hesterberg 2015, What Teachers Should Know About the Bootstrap, American Statistician 69:
        the expanded percentile interval.

    Args:
        values: `[N]`, of every token; for a comparison, the differences between two models.
        documents: `[N]`, the number of each token's document.
        level: The interval's confidence.

    Returns:
        The interval's lower and upper end; None with fewer than `MIN_DOCUMENTS`.
    """
    numbers = np.unique(documents, return_inverse=True)[1]
    count = int(numbers.max(initial=-1)) + 1
    if count < MIN_DOCUMENTS:
        return None
    beyond = stats.t.ppf((1 + level) / 2, count - 1) * (count / (count - 1)) ** 0.5

    def ratio(totals: np.ndarray, counts: np.ndarray, axis: int = -1) -> np.ndarray:
        return totals.sum(axis) / counts.sum(axis)

    found = stats.bootstrap(
        (np.bincount(numbers, values), np.bincount(numbers)),
        ratio,
        paired=True,
        n_resamples=NUM_RESAMPLES,
        batch=max(1, BATCH // count),
        confidence_level=float(1 - 2 * stats.norm.sf(beyond)),
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return [float(found.low), float(found.high)]
