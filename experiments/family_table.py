"""What is shown of a family: its table, differences to the linear head, and the start of runs."""

import logging
from collections.abc import Sequence
from typing import Any

from experiments.evidence import (
    METRICS,
    decide,
    paired_difference,
    show_difference,
    show_spread,
    spread,
    tokens_to_reach,
)
from harmonic_sft.results import show_table

logger = logging.getLogger(__name__)
Row = dict[str, Any]
MIN_EVALUATIONS = 4  # of a curve between which it may be taken for straight
NOTE = (
    "± is half of the 95 % t interval over seeds. (*) Half of the documents at the post-hoc h_exp, "
    'or inverse temperature, that is best for the others; "at" is the best for all. (**) Mean '
    "cosine between the input embeddings (the base's, where they are frozen) of label and "
    "prediction where they differ. (***) Head and loss alone, forward and backward, relative to a "
    "linear head with cross-entropy."
)
DIFFERENCE_NOTE = (
    "Differences seed by seed, since runs of one seed share rows, masks and the evaluation split. "
    "± is half of the 95 % t interval. Higher, lower: after Holm's correction over this table."
)
START_NOTE = (
    "Losses of the evaluation split in nats, as trained. Tokens: all that the model has read, "
    "padding left out, until its loss is that of the base with its own head before any training; "
    "linear between evaluations."
)


def largest_set(rows: Sequence[Row]) -> str | None:
    """Return the set of ratings that covers most pairs, None if there is none."""
    sets = {key: s for row in rows for key, s in row.get("word_similarity", {}).items()}
    return max(sets, key=lambda key: sets[key]["covered"]["mean"], default=None)


def add_differences(rows: Sequence[Row], rated: str | None) -> str | None:
    """Give every row its differences to the linear head with cross-entropy.

    That of the same seeds and the same trained parts, whose name is then in `compared_with`.

    Args:
        rows: Of `compare`; changed in place.
        rated: The set of ratings whose correlation is compared.

    Returns:
        What they are compared with, in words: the name of a row where it is one; None if there
        is nothing.
    """
    plain_rows = [row for row in rows if "metrics" in row and _is_plain(row)]
    for plain in plain_rows:
        plain["compared_with"] = plain["name"]
        known = _values(plain, rated)
        for row in rows:
            same = all(row.get(key) == plain.get(key) for key in ("seeds", "trains"))
            if same and "compared_with" not in row:
                row["compared_with"] = plain["name"]
                row["difference"] = {
                    key: paired_difference(values, known[key])
                    for key, values in _values(row, rated).items()
                    if key in known
                }
    decide([one for row in rows for one in row.get("difference", {}).values()])
    if len(plain_rows) > 1:
        return "the linear head that trains the same parts"
    return plain_rows[0]["name"] if plain_rows else None


def measure_start(results: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Sum up what a new head cost one row's runs at the start, and how soon training paid for it.

    Args:
        results: Their `results/train.json`, one for each seed.

    Returns:
        Spreads of the losses: `old_head`, of the base before the swap; `swapped`, of the new head
        before its calibration, None if there was none; `before` training, at its `first`
        evaluation (None if there was none) and `after` it. `tokens`, the spread of how many it
        took to the old head's loss, None if some run never arrived or was hardly ever evaluated.
        None in all if the base's own head is not known.
    """
    if any("old_head" not in one.get("swap", {}) for one in results):
        return None
    swapped = [one["swap"]["swapped"]["loss"] for one in results if "swapped" in one["swap"]]
    counts = [_tokens(one) for one in results]
    known = [count for count in counts if count is not None]
    first = [loss for one in results for loss in list(_curve(one).values())[1:2]]
    return {
        "old_head": spread([one["swap"]["old_head"]["loss"] for one in results]),
        "swapped": spread(swapped) if len(swapped) == len(results) else None,
        "before": spread([one["before"]["loss"] for one in results]),
        "first": spread(first) if len(first) == len(results) else None,
        "after": spread([one["final"]["loss"] for one in results]),
        "tokens": spread(known) if len(known) == len(counts) else None,
    }


def show_family(name: str, results: dict[str, Any]) -> None:
    """Print the content of a family's results file and what went wrong."""
    rated = results["rated"]
    columns = ["", "loss, nats", "best loss (*)", "at (*)", "accuracy, %", "ECE, %"]
    columns += ["best ECE, % (*)", "error cosine (**)"]
    columns += [f"Spearman {kind}" for kind in ("cosine", "-L2")] if rated else []
    columns += ["time (***)", "memory (***)"]
    table = [_cells(row, rated, len(results["seeds"]), len(columns)) for row in results["rows"]]
    show_table(f"{name}, {len(results['seeds'])} seeds", columns, table)
    logger.info(NOTE)
    if rated:
        logger.info("Spearman: of the prototypes with the ratings of %s.", rated)
    if results["compared_with"] is not None:
        _show_differences(results)
    _show_starts(results["rows"])
    for row in results["rows"]:
        for where, error in row["errors"].items():
            logger.warning("%s, %s: %s", row["name"], where, error)


def _is_plain(row: Row) -> bool:
    loss = row["loss"]
    changed = loss.get("label_smoothing") or loss.get("z_loss")
    return (row["head"]["name"], loss["name"]) == ("linear", "cross_entropy") and not changed


def _values(row: Row, rated: str | None) -> dict[str, list[float]]:
    """Return what is compared of a row, one value for each seed."""
    found = {**row["metrics"], **row["word_similarity"].get(rated, {})}
    return {key: found[key]["values"] for key in METRICS if key in found}


def _curve(results: dict[str, Any]) -> dict[int, float]:
    """Return the loss of every evaluation by its tokens, from that before training on."""
    return {
        int(entry.get("num_input_tokens_seen", 0)): entry["eval_loss"]
        for entry in results["history"]
        if "eval_loss" in entry
    }


def _tokens(results: dict[str, Any]) -> float | None:
    points = _curve(results)
    level = results["swap"]["old_head"]["loss"]
    if len(points) < MIN_EVALUATIONS and results["before"]["loss"] > level:
        return None
    return tokens_to_reach(list(points), list(points.values()), level)


def _cells(row: Row, rated: str | None, num_seeds: int, width: int) -> list[str | None]:
    if "metrics" not in row:
        return [row["name"], "failed", *[None] * (width - 2)]
    metrics = row["metrics"]
    some = len(row["seeds"]) < num_seeds
    name = f"{row['name']} ({len(row['seeds'])} of {num_seeds} seeds)" if some else row["name"]
    best = metrics.get("post_hoc_h_exp", metrics.get("post_hoc_inverse_temperature"))
    cells = [name, show_spread(metrics["loss"]), show_spread(metrics["post_hoc_loss"])]
    cells.append(" ".join(f"{value:.3g}" for value in sorted(set(best["values"]))))
    cells += [
        show_spread(metrics.get(key), scale=100, digits=1)
        for key in ("accuracy", "ece", "post_hoc_ece")
    ]
    cells.append(show_spread(metrics.get("error_cosine"), digits=3))
    if rated:
        similarity = row["word_similarity"].get(rated, {})
        kinds = ("spearman_cosine", "spearman_l2")
        cells += [show_spread(similarity.get(kind), digits=3) for kind in kinds]
    for ratio in ("time_ratio", "memory_ratio"):
        cells.append(f"{row['cost'][ratio]:.2f}" if "cost" in row else None)
    return cells


def _show_differences(results: dict[str, Any]) -> None:
    rows = [row for row in results["rows"] if "difference" in row]
    keys = [key for key in METRICS if any(key in row["difference"] for row in rows)]
    table = []
    for row in rows:
        found = [(row["difference"].get(key), METRICS[key]) for key in keys]
        cells = [d and show_difference(d, scale=scale, digits=n) for d, (_, scale, n) in found]
        table.append((row["name"], *cells))
    title = f"Difference to {results['compared_with']}"
    show_table(title, ["", *(METRICS[key][0] for key in keys)], table)
    logger.info(DIFFERENCE_NOTE)


def _show_starts(rows: Sequence[Row]) -> None:
    """Print the start of every row that has one."""
    starts = [(row["name"], row["start"]) for row in rows if row.get("start") is not None]
    if not starts:
        return
    losses = ("old_head", "swapped", "before", "first", "after")
    table = [
        (name, *(show_spread(start[key]) for key in losses), show_spread(start["tokens"], digits=0))
        for name, start in starts
    ]
    columns = ["", "base, own head", "new head", "before training (calibrated)"]
    columns += ["first evaluation", "after training", "tokens to the base's loss"]
    show_table("The start", columns, table)
    logger.info(START_NOTE)
