"""The claims of the geometry note, part by part: results file, table, figure, one line."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from harmonic_sft.experiments import geometry_figures, geometry_runs
from harmonic_sft.experiments.evidence import show_difference, show_spread
from harmonic_sft.experiments.family import SEEDS
from harmonic_sft.experiments.geometry_bench import METRICS, Bench
from harmonic_sft.experiments.subwords import KINDS
from harmonic_sft.results import environment, show_table, write_results

logger = logging.getLogger(__name__)
Payload = dict[str, Any]
Table = tuple[list[str], list[list[str | int | float | None]]]
TITLES = {
    "post_hoc_loss": ("post-hoc loss, nats", 1, 3),
    "accuracy": ("accuracy, %", 100, 2),
    "ece": ("ECE, %", 100, 2),
    "post_hoc_ece": ("post-hoc ECE, %", 100, 2),
    "error_cosine": ("error cosine", 1, 4),
}  # title, scale, digits


class Part(NamedTuple):
    """One claim or question of the note.

    Attributes:
        asked: In a few words.
        run: Trains or reads, and returns what goes into the results file.
        table: The columns and rows that are printed.
        draw: Draws it into a PNG file.
    """

    asked: str
    run: Callable[[Bench], Payload]
    table: Callable[[Payload], Table]
    draw: Callable[[Payload, Path], Path]


def reproduce_part(
    name: str,
    output: str | Path,
    *,
    family: str | Path = "runs/family",
    configs: str | Path = "configs/family",
    num_seeds: int = len(SEEDS),
) -> Path:
    """Run one part, print its table, write `NAME.json` and draw `NAME.png`.

    What is trained goes on where an earlier call stopped.

    Args:
        name: One of `PARTS`.
        output: The folder, made if it does not exist; gets a folder for each run.
        family: The output folder of `harmonic-sft compare configs/family`, whose finished runs are
            used.
        configs: The folder of its YAML files.
        num_seeds: Seeds 42, 43, ...

    Returns:
        The path of the results file.

    Raises:
        ValueError: No such part, no seeds, a file or run that is not there, or matplotlib is not
            installed, which shows after the results are written.
    """
    if name not in PARTS:
        raise ValueError(f"part: expected one of {list(PARTS)}, got {name!r}")
    if num_seeds < 1:
        raise ValueError(f"seeds: expected at least 1, got {num_seeds}")
    part = PARTS[name]
    seeds = list(range(SEEDS[0], SEEDS[0] + num_seeds))
    output = Path(output)
    bench = Bench(configs=Path(configs), family=Path(family), output=output, seeds=seeds)
    start = time.perf_counter()
    payload = part.run(bench)
    payload = {
        "experiment": f"geometry_note, {name}",
        "asked": part.asked,
        "seeds": seeds,
        **payload,
        "seconds": round(time.perf_counter() - start, 1),
        "environment": environment(),
    }
    path = write_results(output, name, payload)
    show_table(f"Geometry note, {name}", *part.table(payload))
    logger.info("The note: %s.", part.asked)
    logger.info("Measured: %s.", payload["finding"])
    logger.info("Figure: %s", part.draw(payload, path.with_suffix(".png")))
    return path


def _overhead_table(payload: Payload) -> Table:
    columns = ["classes", "arm", "seconds", "overhead, %"]
    rows = [
        [row["vocab_size"], row["name"], row["seconds"], f"{100 * row['overhead']:+.1f}"]
        for row in payload["rows"]
    ]
    return columns, rows


def _calibration_table(payload: Payload) -> Table:
    keys = ("ece", "post_hoc_ece")
    plain = list(payload["rows"][-1]["against"])
    columns = ["", *(TITLES[key][0] for key in keys)]
    columns += [f"{TITLES[key][0]} - {other}" for other in plain for key in keys]
    rows = []
    for row in payload["rows"]:
        cells = [show_spread(row[key], scale=100) for key in keys]
        for other in plain:
            found = row["against"].get(other)
            cells += [found and show_difference(found[key], scale=100) for key in keys]
        rows.append([row["name"], *cells])
    return columns, rows


def _tokens_table(payload: Payload) -> Table:
    columns = ["tokens to", *(f"{level:.2f} nats" for level in payload["levels"])]
    rows = [
        [row["name"], *(show_spread(reached, digits=0) for reached in row["reached"])]
        for row in payload["rows"]
    ]
    return columns, rows


def _refresh_table(payload: Payload) -> Table:
    columns = ["", *(title for title, _, _ in TITLES.values()), "neighbors kept, %"]
    columns += ["of the text's tokens, %"]
    rows = []
    for row in payload["rows"]:
        last = [row["kept"][kind][-1] for kind in ("all", "weighted")]
        kept = [show_spread(value, scale=100, digits=1) for value in last]
        rows.append([row["name"], *_metric_cells(row), *kept])
    return columns, rows


def _subwords_table(payload: Payload) -> Table:
    columns = ["", "tokens", *(f"{kind}, %" for kind in KINDS), "same form, %", "twin found, %"]
    rows = []
    for when in ("before", "after"):
        for kind, found in (payload[when] or {}).items():
            shares = [f"{100 * share:.1f}" for share in found["neighbors"].values()]
            twin = found["twin_found"]
            same = [100 * found["same_form"], None if twin is None else 100 * twin]
            cells = [value if value is None else f"{value:.1f}" for value in same]
            rows.append([f"{kind}, {when} training", found["tokens"], *shares, *cells])
    return columns, rows


def _sweep_table(payload: Payload) -> Table:
    columns = ["", *(title for title, _, _ in TITLES.values())]
    return columns, [[row["name"], *_metric_cells(row)] for row in payload["rows"]]


def _metric_cells(row: dict[str, Any]) -> list[str | None]:
    """Return every metric with its spread, and the verdict on its difference if there is one."""
    cells = []
    for key in METRICS:
        _, scale, digits = TITLES[key]
        verdict = row.get("difference", {}).get(key, {}).get("verdict", "undecided")
        mark = "" if verdict == "undecided" else f" ({verdict})"
        cells.append(f"{show_spread(row[key], scale=scale, digits=digits)}{mark}")
    return cells


PARTS = {
    "overhead": Part(
        "rotation adds about 8 % and W2 3 to 8 % to a step, smoothing next to nothing",
        geometry_runs.overhead,
        _overhead_table,
        geometry_figures.draw_overhead,
    ),
    "calibration": Part(
        "is a head with rotation and W2 better calibrated than a plain one",
        geometry_runs.calibration,
        _calibration_table,
        geometry_figures.draw_calibration,
    ),
    "tokens": Part(
        "does geometry save tokens on the way to a given validation loss",
        geometry_runs.tokens,
        _tokens_table,
        geometry_figures.draw_tokens,
    ),
    "refresh": Part(
        "how often must the table of neighbors be made anew",
        geometry_runs.refresh,
        _refresh_table,
        geometry_figures.draw_refresh,
    ),
    "subwords": Part(
        "what do sub-words do to neighborhoods",
        geometry_runs.subwords,
        _subwords_table,
        geometry_figures.draw_subwords,
    ),
    "sweep": Part(
        "how are epsilon and lambda to be balanced",
        geometry_runs.sweep,
        _sweep_table,
        geometry_figures.draw_sweep,
    ),
}
