"""What a new head costs at the start, and how soon training makes up for it."""

import logging
from collections.abc import Sequence
from typing import Any

from harmonic_sft.experiments.evidence import show_spread, spread, tokens_to_reach
from harmonic_sft.results import show_table

logger = logging.getLogger(__name__)
MIN_EVALUATIONS = 4  # of a curve between which it may be taken for straight
NOTE = (
    "Losses of the evaluation split in nats, as trained. Tokens: all that the model has read, "
    "padding left out, until its loss is that of the base with its own head before any training; "
    "linear between evaluations."
)


def measure_start(results: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Sum up the start of one file's runs.

    Args:
        results: Their `results/train.json`, one for each seed.

    Returns:
        Spreads of the losses: `old_head`, of the base before the swap; `swapped`, of the new head
        before its calibration, None if there was none; `before` and `after` training. `tokens`,
        the spread of how many it took to the old head's loss, None if some run never arrived or
        was hardly ever evaluated. None in all if the base's own head is not known.
    """
    if any("old_head" not in one.get("swap", {}) for one in results):
        return None
    swapped = [one["swap"]["swapped"]["loss"] for one in results if "swapped" in one["swap"]]
    counts = [_tokens(one) for one in results]
    known = [count for count in counts if count is not None]
    return {
        "old_head": spread([one["swap"]["old_head"]["loss"] for one in results]),
        "swapped": spread(swapped) if len(swapped) == len(results) else None,
        "before": spread([one["before"]["loss"] for one in results]),
        "after": spread([one["final"]["loss"] for one in results]),
        "tokens": spread(known) if len(known) == len(counts) else None,
    }


def show_starts(rows: Sequence[dict[str, Any]]) -> None:
    """Print the start of every row that has one."""
    table = []
    for row in rows:
        start = row.get("start")
        if start is None:
            continue
        losses = [show_spread(start[key]) for key in ("old_head", "swapped", "before", "after")]
        table.append((row["name"], *losses, show_spread(start["tokens"], digits=0)))
    if not table:
        return
    columns = ["", "base, own head", "new head", "before training (calibrated)", "after training"]
    show_table("The start", [*columns, "tokens to the base's loss"], table)
    logger.info(NOTE)


def _tokens(results: dict[str, Any]) -> float | None:
    points = {
        int(entry.get("num_input_tokens_seen", 0)): entry["eval_loss"]
        for entry in results["history"]
        if "eval_loss" in entry
    }
    level = results["swap"]["old_head"]["loss"]
    if len(points) < MIN_EVALUATIONS and results["before"]["loss"] > level:
        return None
    return tokens_to_reach(list(points), list(points.values()), level)
