"""The command `python -m experiments worth_it`."""

import argparse
import functools
import logging
import math
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from experiments.worth_it import bottleneck, classes, language, masked, neobert
from experiments.worth_it.draw import draw_bottleneck, draw_classes, draw_language, draw_masked
from experiments.worth_it.store import Store
from harmonic_sft.eval.statistics import LEVEL, holm, show_interval, t_interval
from harmonic_sft.results import environment, show_table, write_results
from harmonic_sft.training.evaluation import evaluate_suite

logger = logging.getLogger(__name__)
RATIO = 1.15  # of the share of the gradient, below which the claim counts as negative
QUICK_STEPS = 3


def main(name: str, arguments: Sequence[str]) -> None:
    """Run a part of the protocol in experiments/worth_it/README.md, or tabulate what was run.

    Raises:
        ValueError: No seed.
    """
    parser = argparse.ArgumentParser(prog=f"python -m experiments {name}", description=main.__doc__)
    parser.add_argument("data", type=Path, help="a folder with probing/, text/ and tokenizer/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of runs of neobert")
    parser.add_argument("--part", required=True, choices=list(PARTS))
    parser.add_argument(
        "--regime", choices=list(classes.REGIMES), default="block", help="of classes"
    )
    parser.add_argument(
        "--made-with", choices=masked.BASES, help="one base of masked; default: both"
    )
    parser.add_argument("--seeds", type=int, default=5, help="how many; default: 5")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="no run starts after; 0: tabulate"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one cell, two seeds, three steps; all data are read, which takes minutes",
    )
    parser.add_argument(
        "--base", default=classes.ENCODER, help="the encoder of classes and masked, a BERT"
    )
    parser.add_argument("--output", type=Path, default=Path("runs") / name, help="a folder")
    options = parser.parse_intermixed_args(arguments)
    options.seeds = 2 if options.quick else options.seeds
    if options.seeds < 1:
        raise ValueError(f"seeds: expected at least 1, got {options.seeds}")
    options.prefix = "quick_" if options.quick else ""
    options.deadline = time.monotonic() + 60 * options.minutes
    PARTS[options.part](options)


def _write(options: argparse.Namespace, name: str, payload: dict[str, Any]) -> Path:
    payload = {
        "part": options.part,
        "seeds": options.seeds,
        **payload,
        "environment": environment(),
    }
    path = write_results(options.output, f"{options.prefix}{name}", payload)
    logger.info("Results: %s", path)
    return path


def _classes(options: argparse.Namespace) -> None:
    regime, cells = classes.REGIMES[options.regime], classes.CELLS[options.regime]
    if options.quick:
        regime, cells = regime._replace(num_steps=QUICK_STEPS), cells[:1]
    store = Store(
        options.output / f"{options.prefix}classes.jsonl", classes.KEYS, deadline=options.deadline
    )
    data = options.data / "probing"
    rates = classes.run_cells(store, data, regime, cells, options.seeds, options.base)
    rows = classes.summarize(store, regime, rates, options.seeds)
    noise = classes.noise_cost(rows)
    for cell, tuned in dict.fromkeys((row["cell"], row["rates_of"]) for row in rows):
        same = [row for row in rows if (row["cell"], row["rates_of"]) == (cell, tuned)]
        show_table(
            f"{regime.name}: {cell}; learning rates of {tuned}",
            COLUMNS,
            [_line(row) for row in same],
        )
    lines = [
        (
            row["rates_of"],
            row["arm"],
            *(show_interval(row[k], scale=100) for k in LOST),
            row["verdict"],
        )
        for row in noise
    ]
    show_table("Points lost to 40 % wrong labels", ["rates of", "arm", *LOST, "verdict"], lines)
    payload = {"regime": regime._asdict(), "rates": rates, "rows": rows, "noise": noise}
    path = _write(options, f"classes_{regime.name}", {**payload, "runs": list(store.rows.values())})
    if rows:
        logger.info("Picture: %s", draw_classes(payload, path.with_suffix(".png")))


COLUMNS = ["arm", "rate", "class by", "accuracy, %", "gain, points", "", "Holm"]
COLUMNS += ["over linear, means", "scope by", "AUROC", "gain", "", "ECE, %", "loss, nats"]
LOST = ("lost", "linear_lost", "more")


def _line(row: dict[str, Any]) -> list[Any]:
    return [
        row["arm"],
        f"{row['rate']:g}{' (edge)' if row['edge'] else ''}",
        row["class_by"],
        show_interval(row["accuracy"], scale=100),
        show_interval(row["gain"], scale=100),
        row["gain_verdict"],
        {True: "rejected", False: "not", None: "-"}[row.get("rejected")],
        show_interval(row["over_start"], scale=100) if "over_start" in row else None,
        row["scope_by"],
        show_interval(row["auroc"], digits=3),
        show_interval(row["auroc_gain"], digits=3),
        row["auroc_gain_verdict"],
        show_interval(row["ece"], scale=100) if "ece" in row else None,
        show_interval(row["loss"], digits=3) if "loss" in row else None,
    ]


def _bottleneck(options: argparse.Namespace) -> None:
    store = Store(
        options.output / f"{options.prefix}bottleneck.jsonl",
        ("head", "width", "target", "seed"),
        deadline=options.deadline,
    )
    num_classes = 64 if options.quick else bottleneck.NUM_CLASSES
    rows, lines = [], []
    settings = product(bottleneck.WIDTHS, bottleneck.LOSSES, bottleneck.HEADS)
    for width, target, head in settings:
        runs = [
            run
            for seed in range(options.seeds)
            if (run := bottleneck.kept_row(store, head, width, target, seed, num_classes))
        ]
        if len(runs) < options.seeds:
            continue
        found = {
            key: t_interval([run[key] for run in runs]) for key in ("loss", "share", "alignment")
        }
        rows.append({"head": head, "width": width, "target": target, **found})
        lines.append(
            [head, width, target, *(show_interval(one, digits=3) for one in found.values())]
        )
    columns = ["head", "D", "target, nats", "loss, nats", "share", "alignment"]
    show_table(f"V {num_classes:,}: what reaches the body", columns, lines)
    path = _write(options, "bottleneck", {"num_classes": num_classes, "rows": rows})
    if rows:
        logger.info("Picture: %s", draw_bottleneck({"rows": rows}, path.with_suffix(".png")))


def _language(options: argparse.Namespace) -> None:
    store = Store(
        options.output / f"{options.prefix}language.jsonl", language.KEYS, deadline=options.deadline
    )
    num_steps = QUICK_STEPS if options.quick else language.NUM_STEPS
    rates = language.run_arms(store, options.data, tuple(language.ARMS), options.seeds, num_steps)
    runs = {
        arm: [
            run
            for seed in range(options.seeds)
            if (run := store.rows.get((arm, rate, seed))) is not None
        ]
        for arm, rate in rates.items()
    }
    found = {arm: rows for arm, rows in runs.items() if len(rows) == options.seeds}
    rows, ceiling = language.compare(found), language.ceiling()
    others = [row for row in rows if row["arm"] in language.ANNEALING]
    for row, p in zip(others, holm([row["behind"]["p"] for row in others]), strict=True):
        row["rejected"] = p is not None and p <= 1 - LEVEL
    lines = [
        [
            row["arm"],
            show_interval(row["loss"], digits=3),
            show_interval(row["best_loss"], digits=3),
            *(show_interval(row[key], digits=3) if key in row else None for key in MEASURED),
        ]
        for row in rows
    ]
    columns = ["arm", "loss, nats", "at the best exponent", "behind its rival", "share / linear"]
    show_table(f"{num_steps} steps, {options.seeds} seeds", [*columns, "alignment / linear"], lines)
    biases = language.compare_biases(found)
    lines = [
        [row["arm"], row["over"], show_interval(row["gain"], digits=3), row.get("rejected")]
        for row in biases
    ]
    show_table("What a bias gives, nats", ["arm", "over", "gain", "rejected by Holm"], lines)
    show_table("Cosine that a token needs", ["h_exp", "V", "p 0.5", "p 0.9"], ceiling)
    payload = {"rates": rates, "rows": rows, "biases": biases, "ceiling": ceiling}
    path = _write(options, "language", payload)
    if rows:
        logger.info("Picture: %s", draw_language(payload, path.with_suffix(".png")))


MEASURED = ("behind", "share_ratio", "alignment_ratio")


def _masked(options: argparse.Namespace) -> None:
    name = {"masked": "language_masked", "bias": "language_bias"}[options.part]
    path = options.output / f"{options.prefix}{name}.jsonl"
    store = Store(path, masked.KEYS, deadline=options.deadline)
    base_steps, num_steps = masked.BASE_STEPS, masked.NUM_STEPS
    if options.quick:
        base_steps = num_steps = QUICK_STEPS
    load = functools.cache(
        lambda made_with: masked.load_base(
            options.data, options.output, made_with, options.base, base_steps
        )
    )
    bases: Sequence[str] = [options.made_with] if options.made_with else masked.BASES
    names, known = tuple(masked.ARMS), {}
    if options.part == "bias":
        names, known, bases = tuple(masked.BIAS_ARMS), masked.BIAS_RATES, ["linear"]
    rates = masked.run_arms(store, load, bases, options.seeds, num_steps, names, known)
    _show_masked(options, name, store, rates)


def _neobert(options: argparse.Namespace) -> None:
    name, folder = "neobert", options.output / "neobert"
    store = Store(
        options.output / f"{options.prefix}{name}.jsonl", masked.KEYS, deadline=options.deadline
    )
    steps = [f"training.max_steps={QUICK_STEPS}"] if options.quick else []
    rates = neobert.run_arms(store, folder, options.seeds, [*options.overrides, *steps])
    _show_masked(options, name, store, rates)
    page = options.output / f"{options.prefix}{name}.html"
    models = [neobert.run_folder(folder, arm, rate, 0) for arm, rate in rates["linear"].items()]
    if not page.is_file() and all((model / "config.json").is_file() for model in models):
        size = "quick" if options.quick else "full"
        evaluate_suite(models, size=size, sets=options.data, html=page)


def _show_masked(
    options: argparse.Namespace, name: str, store: Store, rates: dict[str, dict[str, float]]
) -> None:
    rows = masked.summarize(store, rates, options.seeds)
    lines = [
        [
            row["base"],
            row["arm"],
            f"{row['rate']:g}{' (edge)' if row['edge'] else ''}" if "rate" in row else None,
            *(show_interval(row[key]) if key in row else None for key in masked.SCORES),
            *(_shown_gain(row) if "gain" in row else (None, None)),
            row.get("verdict"),
            {True: "rejected", False: "not", None: "-"}[row.get("rejected")],
            show_interval(row["bias"]) if "bias" in row else None,
            row.get("reason"),
        ]
        for row in rows
    ]
    columns = ["base", "arm", "rate", "loss, nats", "as trained", "accuracy", "gain, nats"]
    show_table("Masked language", [*columns, "by article", "", "Holm", "by the bias", ""], lines)
    payload = {"rates": rates, "rows": rows}
    path = _write(options, name, payload)
    if lines:
        logger.info("Picture: %s", draw_masked(payload, path.with_suffix(".png")))


def _shown_gain(row: dict[str, Any]) -> tuple[str, str | None]:
    ends = row["articles"]
    return show_interval(row["gain"]), ends and f"{ends[0]:.3f} to {ends[1]:.3f}"


PARTS = {
    "classes": _classes,
    "masked": _masked,
    "bias": _masked,
    "bottleneck": _bottleneck,
    "language": _language,
    "neobert": _neobert,
}
