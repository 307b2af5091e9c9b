"""What is shown of a family: its table, and differences to the linear head, seed by seed."""

import logging
from collections.abc import Sequence
from typing import Any

from harmonic_sft.experiments.evidence import paired_difference, show_difference, show_spread
from harmonic_sft.experiments.head_start import show_starts
from harmonic_sft.results import show_table

logger = logging.getLogger(__name__)
NOTE = (
    "Mean +- standard deviation over seeds. (*) At the best post-hoc h_exp, or inverse "
    "temperature, chosen on these very tokens. (**) Mean cosine between the input embeddings (the "
    "base's, where they are frozen) of label and prediction where they differ. (***) Head and "
    "loss alone, forward and backward, relative to a linear head with cross-entropy."
)
DIFFERENCE_NOTE = (
    "Mean +- standard error of the differences, seed by seed: runs of one seed share rows, masks "
    "and the evaluation split. Higher, lower: beyond two standard errors."
)
COMPARED = {  # title, scale, digits
    "loss": ("loss, nats", 1, 3),
    "post_hoc_loss": ("best loss, nats", 1, 3),
    "accuracy": ("accuracy, %", 100, 2),
    "ece": ("ECE, %", 100, 2),
    "post_hoc_ece": ("best ECE, %", 100, 2),
    "error_cosine": ("error cosine", 1, 4),
    "spearman_cosine": ("Spearman cosine", 1, 3),
}


def add_differences(rows: Sequence[dict[str, Any]], rated: str | None) -> str | None:
    """Give every row its differences to the linear head with cross-entropy.

    That of the same seeds and the same trained parts, whose name is then in `compared_with`.

    Args:
        rows: Of `compare_family`; changed in place.
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
    if len(plain_rows) > 1:
        return "the linear head that trains the same parts"
    return plain_rows[0]["name"] if plain_rows else None


def _is_plain(row: dict[str, Any]) -> bool:
    loss = row["loss"]
    changed = loss.get("label_smoothing") or loss.get("z_loss")
    return (row["head"]["name"], loss["name"]) == ("linear", "cross_entropy") and not changed


def _values(row: dict[str, Any], rated: str | None) -> dict[str, list[float]]:
    """Return what is compared of a row, one value for each seed."""
    found = {**row["metrics"], **row["word_similarity"].get(rated, {})}
    return {key: found[key]["values"] for key in COMPARED if key in found}


def show_family(results: dict[str, Any]) -> None:
    """Print the content of `family.json` and what went wrong."""
    rated = results["rated"]
    columns = ["", "loss, nats", "best loss (*)", "at (*)", "accuracy, %", "ECE, %"]
    columns += ["best ECE, % (*)", "error cosine (**)"]
    columns += [f"Spearman {kind}" for kind in ("cosine", "-L2")] if rated else []
    columns += ["time (***)", "memory (***)"]
    table = [_cells(row, rated, len(results["seeds"]), len(columns)) for row in results["rows"]]
    show_table(f"{results['folder']}, {len(results['seeds'])} seeds", columns, table)
    logger.info(NOTE)
    if rated:
        logger.info("Spearman: of the prototypes with the ratings of %s.", rated)
    if results["compared_with"] is not None:
        _show_differences(results)
    show_starts(results["rows"])
    for row in results["rows"]:
        for where, error in row["errors"].items():
            logger.warning("%s, %s: %s", row["name"], where, error)


def _show_differences(results: dict[str, Any]) -> None:
    rows = [row for row in results["rows"] if "difference" in row]
    keys = [key for key in COMPARED if any(key in row["difference"] for row in rows)]
    table = []
    for row in rows:
        found = [(row["difference"].get(key), COMPARED[key]) for key in keys]
        cells = [d and show_difference(d, scale=scale, digits=n) for d, (_, scale, n) in found]
        table.append((row["name"], *cells))
    title = f"Difference to {results['compared_with']}"
    show_table(title, ["", *(COMPARED[key][0] for key in keys)], table)
    logger.info(DIFFERENCE_NOTE)


def largest_set(rows: Sequence[dict[str, Any]]) -> str | None:
    """Return the set of ratings that covers most pairs, None if there is none."""
    sets = {key: s for row in rows for key, s in row.get("word_similarity", {}).items()}
    return max(sets, key=lambda key: sets[key]["covered"]["mean"], default=None)


def _cells(
    row: dict[str, Any], rated: str | None, num_seeds: int, width: int
) -> tuple[str | None, ...]:
    if "metrics" not in row:
        return (row["name"], "failed", *[None] * (width - 2))
    metrics = row["metrics"]
    some = len(row["seeds"]) < num_seeds
    name = f"{row['name']} ({len(row['seeds'])} of {num_seeds} seeds)" if some else row["name"]
    best = metrics.get("post_hoc_h_exp", metrics.get("post_hoc_inverse_temperature"))
    similarity = row["word_similarity"].get(rated, {})
    kinds = ("spearman_cosine", "spearman_l2") if rated else ()
    cost = row.get("cost")
    return (
        name,
        show_spread(metrics["loss"]),
        show_spread(metrics["post_hoc_loss"]),
        " ".join(f"{value:.3g}" for value in sorted(set(best["values"]))),
        show_spread(metrics["accuracy"], scale=100, digits=1),
        show_spread(metrics.get("ece"), scale=100, digits=1),
        show_spread(metrics.get("post_hoc_ece"), scale=100, digits=1),
        show_spread(metrics["error_cosine"], digits=3),
        *(show_spread(similarity.get(kind), digits=3) for kind in kinds),
        f"{cost['time_ratio']:.2f}" if cost else None,
        f"{cost['memory_ratio']:.2f}" if cost else None,
    )
