"""What is compared over seeds: intervals, paired differences, and when a curve falls to a level."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from harmonic_sft.eval.statistics import LEVEL, holm, show_interval, t_interval, verdict

METRICS = {  # title, scale, digits
    "loss": ("loss, nats", 1, 3),
    "post_hoc_loss": ("best loss, nats", 1, 3),
    "accuracy": ("accuracy, %", 100, 2),
    "ece": ("ECE, %", 100, 2),
    "post_hoc_ece": ("best ECE, %", 100, 2),
    "error_cosine": ("error cosine", 1, 4),
    "spearman_cosine": ("Spearman cosine", 1, 3),
}


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the interval of the mean over seeds (see `t_interval`), and the values."""
    return {**t_interval(values), "values": list(values)}


def show_spread(value: dict[str, Any] | None, *, scale: float = 1, digits: int = 2) -> str | None:
    """Return mean and interval in words, None for None."""
    return None if value is None else show_interval(value, scale=scale, digits=digits)


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    """Return the interval (see `t_interval`) of values less baseline, seed by seed.

    Raises:
        ValueError: Not one value for each of the baseline, or none.
    """
    return t_interval([value - other for value, other in zip(values, baseline, strict=True)])


def decide(differences: Sequence[dict[str, Any]]) -> None:
    """Give the differences of one table a `verdict`, after Holm's correction over all of them."""
    for difference, p in zip(differences, holm([one["p"] for one in differences]), strict=True):
        difference["verdict"] = verdict(difference, p)


def correct(rows: Sequence[dict[str, Any]], key: str = "difference") -> None:
    """Give rows `p_holm`, that of row[key] corrected for all of them, and `verdict`."""
    for row, p in zip(rows, holm([row[key]["p"] for row in rows]), strict=True):
        row |= {"p_holm": p, "verdict": verdict(row[key], p)}


def reject(rows: Sequence[dict[str, Any]], key: str = "gain") -> None:
    """Give rows `rejected`, whether Holm's procedure over all of them says that of row[key]."""
    for row, p in zip(rows, holm([row[key]["p"] for row in rows]), strict=True):
        row["rejected"] = p is not None and p <= 1 - LEVEL


def show_difference(difference: dict[str, Any], *, scale: float = 1, digits: int = 2) -> str:
    """Return a paired difference with its interval and verdict."""
    sign = "+" if difference["mean"] > 0 else ""
    shown = show_interval(difference, scale=scale, digits=digits)
    return f"{sign}{shown} ({difference['verdict']})"


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
