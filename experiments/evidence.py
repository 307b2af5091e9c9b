"""What few seeds can tell: paired differences, and when a curve first falls to a level."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t

UNDECIDED = "undecided"
METRICS = {  # title, scale, digits
    "loss": ("loss, nats", 1, 3),
    "post_hoc_loss": ("best loss, nats", 1, 3),
    "accuracy": ("accuracy, %", 100, 2),
    "ece": ("ECE, %", 100, 2),
    "post_hoc_ece": ("best ECE, %", 100, 2),
    "error_cosine": ("error cosine", 1, 4),
    "spearman_cosine": ("Spearman cosine", 1, 3),
}


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    """Compare two sets of runs that share their seeds, and so their data order and masks.

    Args:
        values: One for each seed.
        baseline: For the same seeds, in the same order.

    Returns:
        `mean` of the differences, values minus baseline; its `standard_error`, None for one seed;
        `verdict`, "higher" or "lower" if the mean is more than two standard errors from 0, else
        "undecided". With 3 seeds chance alone passes that line in 18 of 100 comparisons.

    Raises:
        ValueError: Not as many values as in the baseline, or none.
    """
    if len(values) != len(baseline) or not values:
        raise ValueError(
            f"values: expected one for each of the baseline's seeds, got {len(values)} and "
            f"{len(baseline)}"
        )
    differences = [value - other for value, other in zip(values, baseline, strict=True)]
    mean = fmean(differences)
    error = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else None
    decided = error is not None and abs(mean) > 2 * error
    verdict = ("higher" if mean > 0 else "lower") if decided else UNDECIDED
    return {"mean": mean, "standard_error": error, "verdict": verdict}


def show_difference(difference: dict[str, Any], *, scale: float = 1, digits: int = 2) -> str:
    """Return a paired difference in a few words, its standard error after +-."""
    error, verdict = difference["standard_error"], difference["verdict"]
    spread = "" if error is None else f" +- {scale * error:.{digits}f}"
    return f"{scale * difference['mean']:+.{digits}f}{spread} ({verdict})"


def tokens_to_reach(tokens: Sequence[float], losses: Sequence[float], level: float) -> float | None:
    """Return after how many tokens a loss first is at a level or below.

    Args:
        tokens: Seen before each evaluation, ascending.
        losses: What the evaluations gave.
        level: In the unit of the losses.

    Returns:
        Linear between the two evaluations around it; the first number of tokens if the curve
        starts there already; None if it never arrives.
    """
    if losses[0] <= level:
        return float(tokens[0])
    points = list(zip(tokens, losses, strict=True))
    for (start, above), (end, below) in pairwise(points):
        if below <= level:
            return start + (end - start) * (above - level) / (above - below)
    return None


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return mean, standard deviation (of a sample; None for one value) and the values."""
    return {
        "mean": fmean(values),
        "std": stdev(values) if len(values) > 1 else None,
        "values": list(values),
    }


def show_spread(value: dict[str, Any] | None, *, scale: float = 1, digits: int = 2) -> str | None:
    """Return mean and standard deviation of what `spread` made, None for None."""
    if value is None:
        return None
    mean = f"{scale * value['mean']:.{digits}f}"
    return mean if value["std"] is None else f"{mean} +- {scale * value['std']:.{digits}f}"


def t_interval(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean, its 95 % t interval, and the p value of Student's test against 0.

    Args:
        values: One for each seed, often differences between two runs of that seed.

    Returns:
        `mean`, `low`, `high`, `p` (two-sided) and the `values`; the middle three are None for one
        value. Equal values have an interval of no width, and p is 0, or 1 if they are 0.
    """
    mean, found = fmean(values), list(values)
    if len(found) < 2:
        return {"mean": mean, "low": None, "high": None, "p": None, "values": found}
    error = stdev(found) / len(found) ** 0.5
    freedom = len(found) - 1
    half = float(t.ppf(0.975, freedom)) * error
    p = float(2 * t.sf(abs(mean) / error, freedom)) if error else float(mean == 0)
    return {"mean": mean, "low": mean - half, "high": mean + half, "p": p, "values": found}


def holm(p_values: Sequence[float | None]) -> list[bool]:
    """Return which of a family of tests are rejected at 0.05, by Holm's step-down procedure.

    Args:
        p_values: One for each test; None, of a test that had too few seeds, is never rejected.

    Source:
        Holm 1979, A Simple Sequentially Rejective Multiple Test Procedure.
    """
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    rejected = [False] * len(p_values)
    for passed, (p, place) in enumerate(known):
        if p > 0.05 / (len(p_values) - passed):
            break
        rejected[place] = True
    return rejected


def show_interval(value: dict[str, Any], *, scale: float = 1, digits: int = 1) -> str:
    """Return a mean and its 95 % interval in brackets, as `t_interval` made them."""
    mean = f"{scale * value['mean']:.{digits}f}"
    if value["low"] is None:
        return mean
    return f"{mean} [{scale * value['low']:.{digits}f}, {scale * value['high']:.{digits}f}]"
