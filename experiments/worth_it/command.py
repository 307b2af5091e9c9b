"""The command `python -m experiments worth_it`."""

import argparse
import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from experiments.evidence import reject, show_spread
from experiments.figures import positive
from experiments.worth_it import bottleneck, classes, language, masked, neobert
from experiments.worth_it.draw import draw_bottleneck, draw_classes, draw_language, draw_masked
from experiments.worth_it.store import Store
from harmonic_sft.eval.statistics import show_interval, t_interval
from harmonic_sft.results import environment, show_table, write_results
from harmonic_sft.training.evaluation import evaluate_suite

logger = logging.getLogger(__name__)
QUICK_STEPS = 3


def main(name: str, arguments: Sequence[str]) -> None:
    """Run a part of the protocol in experiments/worth_it/README.md, or tabulate what was run."""
    parser = argparse.ArgumentParser(prog=f"python -m experiments {name}", description=main.__doc__)
    parser.add_argument("data", type=Path, help="a folder with probing/, text/ and tokenizer/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of runs of neobert")
    parser.add_argument("--part", required=True, choices=list(PARTS))
    parser.add_argument(
        "--regime", choices=list(classes.REGIMES), default="block", help="of classes"
    )
    parser.add_argument("--seeds", type=positive, default=5, help="how many; default: 5")
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
    options.prefix = "quick_" if options.quick else ""
    options.deadline = time.monotonic() + 60 * options.minutes
    PARTS[options.part](options)


def _store(options: argparse.Namespace, name: str, keys: Sequence[str]) -> Store:
    path = options.output / f"{options.prefix}{name}.jsonl"
    return Store(path, keys, deadline=options.deadline)


def _keep(
    options: argparse.Namespace,
    name: str,
    payload: dict[str, Any],
    draw_fn: Callable[[dict[str, Any], Path], Path],
) -> None:
    """Write what was found, and draw its rows; without any nothing is replaced."""
    if not payload["rows"]:
        raise ValueError(
            f"--minutes: expected time for one arm with all its seeds, got {options.minutes:g}, "
            f"and none is kept in {str(options.output)!r}"
        )
    payload = {"part": options.part, "seeds": options.seeds, **payload}
    payload["environment"] = environment()
    path = write_results(options.output, f"{options.prefix}{name}", payload)
    logger.info("Results: %s", path)
    logger.info("Picture: %s", draw_fn(payload, path.with_suffix(".png")))


def _classes(options: argparse.Namespace) -> None:
    regime, cells = classes.REGIMES[options.regime], classes.CELLS[options.regime]
    if options.quick:
        regime, cells = regime._replace(num_steps=QUICK_STEPS), cells[:1]
    store = _store(options, "classes", classes.KEYS)
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
    payload["runs"] = list(store.rows.values())
    _keep(options, f"classes_{regime.name}", payload, draw_classes)


COLUMNS = ["arm", "rate", "class by", "accuracy, %", "gain, points", "", "Holm"]
COLUMNS += [
    "over linear, means",
    "so read as linear",
    "scope by",
    "AUROC",
    "gain",
    "",
    "ECE, %",
    "loss, nats",
]
LOST = ("lost", "linear_lost", "more")
HOLM = {True: "rejected", False: "not", None: "-"}


def _line(row: dict[str, Any]) -> list[Any]:
    return [
        row["arm"],
        _rate(row),
        row["class_by"],
        show_interval(row["accuracy"], scale=100),
        show_interval(row["gain"], scale=100),
        row["gain_verdict"],
        HOLM[row.get("rejected")],
        show_spread(row.get("over_start"), scale=100, digits=3),
        show_spread(row.get("over_start_as_linear"), scale=100, digits=3),
        row["scope_by"],
        show_interval(row["auroc"], digits=3),
        show_interval(row["auroc_gain"], digits=3),
        row["auroc_gain_verdict"],
        show_spread(row.get("ece"), scale=100, digits=3),
        show_spread(row.get("loss"), digits=3),
    ]


def _rate(row: dict[str, Any]) -> str:
    return f"{row['rate']:g}{' (edge)' if row['edge'] else ''}"


def _bottleneck(options: argparse.Namespace) -> None:
    store = _store(options, "bottleneck", ("head", "width", "target", "seed"))
    num_classes = 64 if options.quick else bottleneck.NUM_CLASSES
    rows, lines = [], []
    settings = product(bottleneck.WIDTHS, bottleneck.LOSSES, bottleneck.HEADS)
    for width, target, head in settings:
        key = {"head": head, "width": width, "target": target}
        for seed in range(options.seeds):
            run = functools.partial(
                bottleneck.synthetic_row, head, width, target, seed, num_classes
            )
            store.get(run, **key, seed=seed)
        runs = store.of_seeds(options.seeds, **key)
        if not runs:
            continue
        found = {
            name: t_interval([run[name] for run in runs]) for name in ("loss", "share", "alignment")
        }
        rows.append({**key, **found})
        lines.append(
            [head, width, target, *(show_interval(one, digits=3) for one in found.values())]
        )
    columns = ["head", "D", "target, nats", "loss, nats", "share", "alignment"]
    show_table(f"V {num_classes:,}: what reaches the body", columns, lines)
    payload = {"num_classes": num_classes, "rows": rows}
    _keep(options, "bottleneck", payload, draw_bottleneck)


def _language_runs(
    options: argparse.Namespace, name: str, arms: Sequence[str]
) -> tuple[dict[str, float], dict[str, list[dict[str, Any]]]]:
    """Return learning rates, and the runs of the arms that have all seeds."""
    store = _store(options, name, language.KEYS)
    num_steps = QUICK_STEPS if options.quick else language.NUM_STEPS
    rates = language.run_arms(store, options.data, options.seeds, num_steps, arms)
    runs = {arm: store.of_seeds(options.seeds, arm=arm, rate=rate) for arm, rate in rates.items()}
    return rates, {arm: rows for arm, rows in runs.items() if rows}


def _exponents(options: argparse.Namespace) -> None:
    name = "language_exponents"
    rates, found = _language_runs(options, name, language.EXPONENTS)
    gains = {row["arm"]: row for row in language.compare_exponents(found)}
    rows = [{**row, **gains.get(row["arm"], {})} for row in language.compare(found)]
    lines = [
        [
            row["arm"],
            rates[row["arm"]],
            *(show_spread(row.get(key), digits=3) for key in GAINED),
            HOLM[row.get("rejected")],
            row.get("verdict"),
        ]
        for row in rows
    ]
    columns = ["arm", "rate", "loss, nats", "at the best exponent", "gain over -12"]
    show_table("Other exponents", [*columns, "over linear, wide", "Holm", ""], lines)
    _keep(options, name, {"rates": rates, "rows": rows}, draw_language)


GAINED = ("loss", "best_loss", "gain", "over_wide")


def _language(options: argparse.Namespace) -> None:
    rates, found = _language_runs(options, "language", language.LANGUAGE)
    rows, ceiling = language.compare(found), language.ceiling()
    reject([row for row in rows if row["arm"] in language.ANNEALING], "behind")
    lines = [
        [
            row["arm"],
            *(show_spread(row.get(key), digits=3) for key in ("loss", "best_loss", *MEASURED)),
        ]
        for row in rows
    ]
    columns = ["arm", "loss, nats", "at the best exponent", "behind its rival", "share / linear"]
    show_table(
        f"A tiny language model, {options.seeds} seeds", [*columns, "alignment / linear"], lines
    )
    biases = language.compare_biases(found)
    lines = [
        [row["arm"], row["over"], show_interval(row["gain"], digits=3), row.get("rejected")]
        for row in biases
    ]
    show_table("What a bias gives, nats", ["arm", "over", "gain", "rejected by Holm"], lines)
    show_table("Cosine that a token needs", ["h_exp", "V", "p 0.5", "p 0.9"], ceiling)
    payload = {"rates": rates, "rows": rows, "biases": biases, "ceiling": ceiling}
    _keep(options, "language", payload, draw_language)


MEASURED = ("behind", "share_ratio", "alignment_ratio")


def _masked(options: argparse.Namespace) -> None:
    name = {"masked": "language_masked", "bias": "language_bias"}[options.part]
    store = _store(options, name, masked.KEYS)
    base_steps, num_steps = masked.BASE_STEPS, masked.NUM_STEPS
    if options.quick:
        base_steps = num_steps = QUICK_STEPS
    load = functools.cache(
        lambda made_with: masked.load_base(
            options.data, options.output, made_with, options.base, base_steps
        )
    )
    names, known, bases = tuple(masked.ARMS), {}, masked.BASES
    if options.part == "bias":
        names, known, bases = tuple(masked.BIAS_ARMS), masked.BIAS_RATES, masked.BASES[:1]
    rates = masked.run_arms(store, load, bases, options.seeds, num_steps, names, known)
    _show_masked(options, name, store, rates)


def _neobert(options: argparse.Namespace) -> None:
    name, folder = "neobert", options.output / "neobert"
    store = _store(options, name, masked.KEYS)
    steps = [f"training.max_steps={QUICK_STEPS}"] if options.quick else []
    rates = neobert.run_arms(store, folder, options.seeds, [*options.overrides, *steps])
    _show_masked(options, name, store, rates)
    page = options.output / f"{options.prefix}{name}.html"
    models = [neobert.run_folder(folder, arm, rate, 0) for arm, rate in rates["linear"].items()]
    is_there = bool(models) and all((model / "config.json").is_file() for model in models)
    if is_there and not page.is_file():
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
            _rate(row) if "rate" in row else None,
            *(show_spread(row.get(key), digits=3) for key in masked.SCORES),
            *(_shown_gain(row) if "gain" in row else (None, None)),
            row.get("verdict"),
            HOLM[row.get("rejected")],
            show_spread(row.get("bias"), digits=3),
            row.get("reason"),
        ]
        for row in rows
    ]
    columns = ["base", "arm", "rate", "loss, nats", "as trained", "accuracy", "gain, nats"]
    show_table("Masked language", [*columns, "by article", "", "Holm", "by the bias", ""], lines)
    _keep(options, name, {"rates": rates, "rows": rows}, draw_masked)


def _shown_gain(row: dict[str, Any]) -> tuple[str, str | None]:
    ends = row["articles"]
    return show_interval(row["gain"]), ends and f"{ends[0]:.3f} to {ends[1]:.3f}"


PARTS = {
    "classes": _classes,
    "masked": _masked,
    "bias": _masked,
    "bottleneck": _bottleneck,
    "language": _language,
    "exponents": _exponents,
    "neobert": _neobert,
}
