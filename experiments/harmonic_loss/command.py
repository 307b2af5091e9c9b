"""The command `python -m experiments harmonic_loss`."""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.evidence import show_spread
from experiments.figures import check_output, positive
from experiments.harmonic_loss import cosets, gpt, mnist, probes, toy
from experiments.harmonic_loss.bench import Cell
from experiments.harmonic_loss.cells import (
    CELLS,
    Row,
    both_splits,
    cell_name,
    compare,
    pairs_of,
    read_cell,
    summary,
    train_cells,
)
from experiments.harmonic_loss.draw import DRAW
from harmonic_sft.eval.statistics import show_interval
from harmonic_sft.results import environment, read_results, show_table, write_results

logger = logging.getLogger(__name__)
QUICK_STEPS = 4  # of a language model
COLUMNS = ["cell", "variance (%)", "+-", "least", "median", "most", ">= 98", "chance"]
COLUMNS += ["published", "reproduced", "accuracy", "no dropout", "chance"]
COLUMNS += ["converged", "epoch", "gap"]


def main(name: str, arguments: Sequence[str]) -> None:
    """Run the experiments behind one figure of the paper again and draw it.

    What was trained is kept in OUT/cells and not trained again.

    Raises:
        ValueError: No cell of that name, or nothing to draw.
    """
    parser = argparse.ArgumentParser(prog=f"python -m experiments {name}")
    parser.add_argument("--figure", required=True, choices=[*DRAW, "probes"], help="of the paper")
    parser.add_argument("--seeds", type=positive, default=20, help="how many; default: 20")
    parser.add_argument("--epochs", type=positive, help="other than the released code's")
    parser.add_argument("--penalty", type=float, help="other than the released code's")
    parser.add_argument("--weight-decay", type=float, help="other than the released code's")
    parser.add_argument("--quick", action="store_true", help="two seeds, a few steps")
    parser.add_argument("--only", default="", help="cells with this text in their name")
    parser.add_argument("--workers", type=positive, default=1, help="processes; default: 1")
    parser.add_argument("--mnist", type=Path, help="folder of the digits, for figure 4-mnist")
    parser.add_argument("--data", type=Path, help="folder of texts, for 5 and probes")
    parser.add_argument("--tabulate", action="store_true", help="train nothing, use what there is")
    parser.add_argument("--draw", action="store_true", help="draw the results file again")
    parser.add_argument(
        "--out", "--output", type=Path, default=Path("runs") / name, help="a folder"
    )
    options = parser.parse_args(arguments)
    for key in ("epochs", "penalty", "weight_decay", "only", "tabulate", "draw"):
        beside = (key, options.figure) in (("epochs", "4-mnist"), ("only", "5"))
        is_known = options.figure in (DRAW if key == "draw" else CELLS) or beside
        if vars(options)[key] != parser.get_default(key) and not is_known:
            raise ValueError(f"{key}: expected nothing for figure {options.figure}, got a value")
    if options.quick:
        options.seeds, options.epochs = 2, 1
    figure = f"figure_{options.figure}"
    path = options.out / f"{figure}.json"
    if not options.draw:
        check_output(options.out)
        shown, made_by = _found(options), environment()
        if any(row.get("dirty") for row in shown.get("rows", [])):  # as what they were made of
            made_by["dirty"] = True
        found = {"figure": options.figure, **shown, "environment": made_by}
        path = write_results(options.out, figure, found)
        logger.info("Results: %s", path)
    if options.figure in DRAW:
        picture = DRAW[options.figure](read_results(path), path.with_suffix(".png"))
        logger.info("Picture: %s", picture)


def _found(options: argparse.Namespace) -> dict[str, Any]:
    """Train what a figure needs, print its table and return what it shows."""
    if options.figure == "1":
        payload = toy.run(options.seeds, 30 if options.quick else toy.NUM_STEPS)
        columns = ["points", "head", "accuracy", "distance to the points", "growth of the norm"]
        keys = ("accuracy", "distance", "growth")
        lines = [
            [row["points"], row["head"], *(fmean(row[key]) for key in keys)]
            for row in payload["rows"]
        ]
        show_table(f"{options.seeds} seeds", columns, lines)
        return payload
    if options.figure == "4-mnist":
        if options.mnist is None:
            raise ValueError("mnist: expected the folder of the digits, got nothing. Say --mnist")
        num_epochs = options.epochs or mnist.NUM_EPOCHS
        payload = mnist.run(options.mnist, options.seeds, num_epochs, options.out)
        columns = ["head", "seed", "epochs", "accuracy", "cosine to class means"]
        columns += ["near zero", "below 0.01"]
        keys = ("head", "seed", "num_epochs", "accuracy", "cosine")
        keys += ("share_near_zero", "share_below")
        lines = [[row[key] for key in keys] for row in payload["rows"]]
        show_table(f"p = {payload['p_value']} of equal accuracies", columns, lines)
        return payload
    if options.figure in ("5", "probes"):
        if options.data is None:
            raise ValueError("data: expected a folder of texts, got nothing. Say --data")
        num_steps = QUICK_STEPS if options.quick else gpt.NUM_STEPS
        return (_language if options.figure == "5" else _probes)(options, num_steps)
    rows = _cells(options)
    pairs = [
        (_as_asked(one, options), _as_asked(other, options))
        for one, other in pairs_of(options.figure)
    ]
    found = compare(rows, pairs)
    if found:
        columns = ["cell", "and", "variances (%)", "", "p", "p (Holm)"]
        lines = [[*one["names"], *one["means"], one["p"], one["p_holm"]] for one in found]
        show_table("Mann-Whitney tests over seeds", columns, lines)
    return {"rows": rows, "pairs": found}


def _language(options: argparse.Namespace, num_steps: int) -> dict[str, Any]:
    """Train the small GPT-2, print its tables and return what they show."""
    payload = gpt.run(options.data, options.seeds, num_steps, options.out, options.only)
    lines = [
        [line["arm"], line["h_exp"], line["rate"]]
        + [show_spread(line.get(key), digits=3) for key in gpt.LOSSES]
        for line in payload["summary"]
    ]
    columns = ["arm", "h_exp", "rate", *gpt.LOSSES]
    title = f"test, nats a token; unigram frequencies {payload['unigram_loss']:.3f}"
    show_table(title, columns, lines)
    for line in payload["summary"][1:]:
        lines = [
            [task, payload["num_pairs"][task]]
            + [one[task][key] for one in line["tasks"].values() for key in ("mean", "linear")]
            for task in payload["num_pairs"]
        ]
        columns = [f"{key}{own}" for key in gpt.MEASURES for own in ("", ", linear")]
        show_table(f"words, {line['arm']}", ["task", "pairs", *columns], lines)
    return payload


def _probes(options: argparse.Namespace, num_steps: int) -> dict[str, Any]:
    """Probe hidden layers, print the table and return what it shows."""
    num_pool = 60 if options.quick else probes.NUM_POOL
    payload = probes.run(options.data, options.seeds, num_steps, options.out, num_pool)
    lines = [
        [row[key] for key in probes.KEYS]
        + [show_interval(row[key], scale=100, digits=1) for key in probes.METRICS]
        + [f"{100 * payload['chance'][row['task']][key]:.1f}" for key in probes.METRICS]
        for row in payload["rows"]
    ]
    columns = [*probes.KEYS, "accuracy (%)", "F1 (%)", "commoner class", "its F1"]
    show_table("Probes of hidden layers", columns, lines)
    lines = [
        [*(one[key] for key in probes.KEYS[1:]), show_interval(one["difference"]), one["verdict"]]
        for one in payload["pairs"]
    ]
    show_table("harmonic - linear GPT, accuracy", [*probes.KEYS[1:], "difference", ""], lines)
    return payload


def _cells(options: argparse.Namespace) -> list[Row]:
    """Train the cells of a figure, print their table and return its lines."""
    cells = [
        cell for cell in both_splits(CELLS[options.figure]()) if options.only in cell_name(cell)
    ]
    if not cells:
        raise ValueError(f"only: expected a part of a cell's name, got {options.only!r}")
    cells = [_as_asked(cell, options) for cell in cells]
    if not options.tabulate:
        train_cells(cells, options.seeds, options.out, options.workers)
    found = [one for cell in cells if (one := read_cell(cell, options.seeds, options.out))]
    if not found:
        raise ValueError(f"out: expected results in {options.out / 'cells'}, got none")
    rows = [summary(one) for one in found]
    if options.figure == "B":
        num_shuffles = 2 if options.quick else cosets.NUM_SHUFFLES
        for row, one in zip(rows, found, strict=True):
            row["cosets"] = cosets.analyze(one["embedding"], num_shuffles)
            beyond = sum(seed["silhouette"] > seed["chance"] for seed in row["cosets"])
            logger.info("%s: %d seeds beyond chance", row["name"], beyond)
    title = f"Figure {options.figure}: variance of the embedding in two components"
    show_table(title, COLUMNS, [_line(row) for row in rows])
    return rows


def _as_asked(cell: Cell, options: argparse.Namespace) -> Cell:
    """Return a cell with what differs from the released code by the command."""
    asked = {
        "num_epochs": options.epochs,
        "penalty": options.penalty,
        "weight_decay": options.weight_decay,
    }
    return replace(cell, **{key: value for key, value in asked.items() if value is not None})


def _line(row: Row) -> list[object]:
    """Return one line of the table."""
    variance, published = row["variance_percent"], row["published"]
    return [
        row["name"],
        row["mean_percent"],
        row["interval_percent"],
        min(variance),
        row["median_percent"],
        max(variance),
        row["num_above_98"],
        row["chance_percent"],
        published and published[0],
        row["reproduced"],
        row["test_accuracy"],
        row["test_accuracy_without_dropout"],
        row["chance_accuracy"],
        f"{row['num_converged']} of {row['num_seeds']}",
        row["median_test_epoch"],
        row["median_gap"],
    ]
