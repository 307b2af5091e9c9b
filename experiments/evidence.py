"""What few seeds can tell: paired differences, and when a curve first falls to a level.

Intervals and Holm's correction are those of `harmonic_sft.eval.statistics`.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from harmonic_sft.eval.statistics import UNDECIDED

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
