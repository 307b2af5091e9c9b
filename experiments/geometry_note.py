"""The claims and questions of the geometry note: arms made of rows of the family, compared."""

import argparse
import logging
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import release_memory
from torch import Tensor
from transformers import AutoTokenizer

from experiments.evidence import (
    METRICS,
    decide,
    paired_difference,
    show_difference,
    show_spread,
    spread,
    tokens_to_reach,
)
from experiments.family import (
    FILE,
    SEEDS,
    Family,
    Finished,
    configure,
    finish,
    load_trained,
    quiet,
    read_family,
)
from experiments.figures import keep
from experiments.overhead import measure_overhead
from experiments.subwords import KINDS, describe_neighbors, neighbor_overlap
from harmonic_sft.eval.statistics import UNDECIDED
from harmonic_sft.losses.knn_label_smoothing import find_neighbors
from harmonic_sft.results import read_results, show_table, write_results
from harmonic_sft.training import RunConfig
from harmonic_sft.training.loading import load_run_data

logger = logging.getLogger(__name__)
PLAIN = "dist_harmonic"
LINEAR = "linear_ce"
SMOOTHED = "dist_knn_smoothing"
TRANSPORTED = "dist_wasserstein"
BOTH = "rotation_wasserstein"
CALIBRATED = (LINEAR, PLAIN, "rotation_dist", TRANSPORTED, BOTH)
COUNTED = (LINEAR, PLAIN, BOTH, SMOOTHED)
CALIBRATION = ("ece", "post_hoc_ece")
EPSILONS = (0.02, 0.05, 0.1, 0.2, 0.4)
LAMBDAS = (0.01, 0.03, 0.1, 0.3, 1.0)
ROUNDS, VOCAB_SIZES = 30, (30_522, 50_257)  # of what heads and losses add to a step
NUM_POINTS = 10  # evaluations of a curve, checkpoints of a drift
NUM_NEIGHBORS = 10
COMPARED = ("post_hoc_loss", "accuracy", "ece", "post_hoc_ece", "error_cosine")
Row = dict[str, Any]
Payload = dict[str, Any]
Table = tuple[list[str], list[list[str | int | float | None]]]


class Bench(NamedTuple):
    """Where a part finds its runs and puts its own.

    Attributes:
        family: The base and its rows.
        family_runs: The output folder of `python -m experiments family`. An arm with the very
            settings of a row is read from there, or trained there, and not twice.
        output: Gets a folder for each other run.
        seeds: Of every arm.
    """

    family: Family
    family_runs: Path
    output: Path
    seeds: Sequence[int]


class Arm(NamedTuple):
    """A row of the family with a few values replaced."""

    name: str
    row: str
    overrides: tuple[str, ...] = ()


def main(name: str, arguments: Sequence[str]) -> None:
    """Run one part of the geometry note; a run that was interrupted continues."""
    parser = argparse.ArgumentParser(prog=f"python -m experiments {name}", description=main.__doc__)
    parser.add_argument("--part", choices=list(PARTS), required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="default: 42 to 46")
    parser.add_argument("--output", type=Path, default=Path("runs") / name, help="a folder")
    parser.add_argument("--family", type=Path, default=Path("runs/family"), help="its runs")
    parser.add_argument("--file", type=Path, default=FILE, help="the family's rows")
    options = parser.parse_args(arguments)
    family = read_family(options.file, "family")
    run, table = PARTS[options.part]
    payload = run(Bench(family, options.family, options.output, options.seeds))
    show_table(f"Geometry note, {options.part}", *table(payload))
    keep(options.part, {"seeds": list(options.seeds), **payload}, options.output)


def train_arms(
    bench: Bench, arms: Sequence[Arm], after_fn: Callable[[RunConfig], object] | None = None
) -> dict[str, list[Finished]]:
    """Train every arm with every seed, or read what an earlier call or the family left.

    Args:
        bench: Folders and seeds.
        arms: By different names.
        after_fn: Called with each run as soon as it is finished.

    Returns:
        By the arm's name, in the order of the seeds.
    """
    found: dict[str, list[Finished]] = {arm.name: [] for arm in arms}
    order = list(product(bench.seeds, arms))  # every arm with the first seed, then with the second
    for number, (seed, arm) in enumerate(order, start=1):
        logger.info("%d of %d: %s, seed %d", number, len(order), arm.name, seed)
        folder = bench.family_runs / f"{arm.row}-{seed}"
        run = configure(bench.family, arm.row, seed, folder, arm.overrides)
        if run != configure(bench.family, arm.row, seed, folder):
            folder = bench.output / f"{arm.name}-{seed}"
            run = configure(bench.family, arm.row, seed, folder, arm.overrides)
        found[arm.name].append(Finished(run, finish(run)))
        if after_fn is not None:
            after_fn(run)
        release_memory()
    return found


def overhead(bench: Bench) -> Payload:
    """Measure whole training steps with every head and loss.

    Returns:
        `rows` of `measure_overhead`; `seeds`, the first alone.
    """
    with tempfile.TemporaryDirectory() as folder, quiet():
        run = configure(bench.family, PLAIN, bench.seeds[0], Path(folder))
        rows = measure_overhead(run, vocab_sizes=VOCAB_SIZES, rounds=ROUNDS)
        return {"seeds": list(bench.seeds[:1]), "rounds": ROUNDS, "rows": rows}


def calibration(bench: Bench) -> Payload:
    """Compare the calibration of rows of the family.

    Returns:
        `rows`, each with `name`, and `ece` and `post_hoc_ece` as `compare_to_plain` makes them.
    """
    runs = train_arms(bench, [Arm(name, name) for name in CALIBRATED])
    errors = {
        key: compare_to_plain({name: _finals(runs[name], key) for name in CALIBRATED})
        for key in CALIBRATION
    }
    _decide(list(errors.values()))
    return {
        "rows": [
            {"name": name, **{key: errors[key][name] for key in CALIBRATION}} for name in CALIBRATED
        ]
    }


def tokens(bench: Bench) -> Payload:
    """Count the tokens to levels of the validation loss at its best post-hoc scale.

    Returns:
        `levels`, in nats, which every run reaches, the lowest first; `rows`, each with `name`,
        `curves` (one for each seed: `tokens`, all that the model has read but padding, and
        `losses`) and `reached`, for each level what `compare_to_plain` makes of the tokens.
    """
    interval = max(1, _max_steps(bench) // NUM_POINTS)
    overrides = ("training.eval_strategy=steps", f"training.eval_steps={interval}")
    runs = train_arms(bench, [Arm(f"{name}_curve", name, overrides) for name in COUNTED])
    curves = {
        name: [loss_curve(one.results["history"]) for one in runs[f"{name}_curve"]]
        for name in COUNTED
    }
    levels = common_levels([curve["losses"] for found in curves.values() for curve in found])
    counts = [
        compare_to_plain(
            {name: [_count(curve, level) for curve in curves[name]] for name in curves}
        )
        for level in levels
    ]
    _decide(counts)
    rows = [
        {"name": name, "curves": found, "reached": [count[name] for count in counts]}
        for name, found in curves.items()
    ]
    return {"levels": levels, "rows": rows}


def compare_to_plain(values: dict[str, list[float]]) -> dict[str, Row]:
    """Return the spread of every arm's values, and `against`, differences to the two plain arms."""
    return {
        name: {
            **spread(found),
            "against": {
                plain: paired_difference(found, values[plain])
                for plain in (LINEAR, PLAIN)
                if plain != name
            },
        }
        for name, found in values.items()
    }


def _decide(tables: Sequence[dict[str, Row]]) -> None:
    """Give a verdict to all that `compare_to_plain` has compared for one part."""
    decide([d for table in tables for row in table.values() for d in row["against"].values()])


def loss_curve(history: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Return tokens seen and post-hoc losses of the evaluations of one run, none twice."""
    found = {
        entry.get("num_input_tokens_seen", 0): entry["eval_post_hoc_loss"]
        for entry in history
        if "eval_post_hoc_loss" in entry
    }
    return {"tokens": list(found), "losses": list(found.values())}


def common_levels(curves: Sequence[Sequence[float]]) -> list[float]:
    """Return losses, in hundredths of a nat, that every curve starts above and gets down to.

    Args:
        curves: Losses of each run.

    Returns:
        The lowest such loss and those a quarter and half way up to the lowest start; the lowest
        loss alone if some run starts below it.
    """
    low = max(min(curve) for curve in curves)
    gap = max(0.0, min(curve[0] for curve in curves) - low)
    return sorted({math.ceil(100 * (low + share * gap)) / 100 for share in (0, 0.25, 0.5)})


def refresh(bench: Bench) -> Payload:
    """Train label smoothing with neighbors found once, or again, and follow the neighborhoods.

    Returns:
        `rows`, each with `name`, `refresh_every`, the spread of the metrics and paired differences
        to the row without refresh, and `steps` with `kept`, the share of the first neighbors that
        are still there: `all` tokens alike, and `weighted` by their occurrences in the text.
    """
    max_steps = _max_steps(bench)
    every = max(1, max_steps // NUM_POINTS)
    intervals = [None, *sorted({max_steps // 2, max_steps // 4, every} - {0}, reverse=True)]
    arms = []
    for interval in intervals:
        name, value = ("never", "null") if interval is None else (str(interval), str(interval))
        overrides = (
            f"loss.refresh_every={value}",
            "training.save_strategy=steps",
            f"training.save_steps={interval or every}",
            "training.save_total_limit=null",
        )
        arms.append(Arm(f"refresh_{name}", SMOOTHED, overrides))
    runs = train_arms(bench, arms, after_fn=_drift)
    rows: list[Row] = []
    for arm, interval in zip(arms, intervals, strict=True):
        drifts = [_drift(one.run) for one in runs[arm.name]]
        kept = {
            kind: [spread(values) for values in zip(*(d[kind] for d in drifts), strict=True)]
            for kind in ("all", "weighted")
        }
        row = {"name": arm.name, "refresh_every": interval, "steps": drifts[0]["steps"]}
        rows.append({**row, "kept": kept, **_metrics(runs[arm.name])})
    add_differences(rows)
    return {"rows": rows}


def sweep(bench: Bench) -> Payload:
    """Train with every weight of smoothing (epsilon) and of transport (lambda).

    Returns:
        `rows`, each with `name`, `knob`, `value`, the spread of the metrics, and paired differences
        to the plain arm, which is the first row and the 0 of both.
    """
    knobs = {
        "epsilon": (SMOOTHED, "loss.epsilon", EPSILONS),
        "lambda": (TRANSPORTED, "loss.terms.1.weight", LAMBDAS),
    }
    arms: list[tuple[Arm, str | None, float]] = [(Arm(PLAIN, PLAIN), None, 0.0)]
    for knob, (row, key, values) in knobs.items():
        arms += [(Arm(f"{knob}_{v:g}", row, (f"{key}={v:g}",)), knob, v) for v in values]
    runs = train_arms(bench, [arm for arm, _, _ in arms])
    rows: list[Row] = [
        {"name": arm.name, "knob": knob, "value": value, **_metrics(runs[arm.name])}
        for arm, knob, value in arms
    ]
    add_differences(rows)
    return {"rows": rows}


def subwords(bench: Bench) -> Payload:
    """Describe the neighbors of every kind of token, before and after training with every seed.

    Returns:
        `before` and `after`, each as `describe_neighbors`, and `kept`, the share of neighbors that
        are the same; of every share the spread over the seeds.
    """
    found = []
    for run, _ in train_arms(bench, [Arm(PLAIN, PLAIN)])[PLAIN]:
        tokenizer: Any = AutoTokenizer.from_pretrained(run.output_dir, trust_remote_code=False)
        first = _first_neighbors(run.output_dir)
        last = _neighbors(load_trained(run.output_dir).dist_head.prototypes)
        names = tokenizer.convert_ids_to_tokens(list(range(len(first))))
        before, after = (describe_neighbors(names, neighbors) for neighbors in (first, last))
        found.append({"before": before, "after": after, "kept": neighbor_overlap(first, last)})
    return _over_seeds(found)


def _over_seeds(values: Sequence[Any]) -> Any:
    """Return the spread of every share; counts are those of the vocabulary, the same each time."""
    if isinstance(values[0], dict):
        return {key: _over_seeds([value[key] for value in values]) for key in values[0]}
    return spread(values) if isinstance(values[0], float) else values[0]


def add_differences(rows: Sequence[Row]) -> None:
    """Give every row but the first the paired differences of its metrics to the first."""
    for row in rows[1:]:
        row["difference"] = {
            key: paired_difference(row[key]["values"], rows[0][key]["values"]) for key in COMPARED
        }
    decide([difference for row in rows[1:] for difference in row["difference"].values()])


def _metrics(runs: Sequence[Finished]) -> Row:
    """Return the spread of every metric over the seeds of one arm."""
    return {key: spread(_finals(runs, key)) for key in COMPARED}


def _finals(runs: Sequence[Finished], key: str) -> list[float]:
    return [one.results["final"][key] for one in runs]


def _max_steps(bench: Bench) -> int:
    return configure(bench.family, PLAIN, bench.seeds[0], bench.output).training["max_steps"]


def _count(curve: dict[str, list[float]], level: float) -> float:
    count = tokens_to_reach(curve["tokens"], curve["losses"], level)
    assert count is not None, "common_levels gave one that a curve does not reach"
    return count


def _drift(run: RunConfig) -> dict[str, list[Any]]:
    """Measure the neighbors of every checkpoint against the first ones, then delete it.

    Returns:
        `steps`, and for each the share of neighbors kept, `all` tokens alike and `weighted`.
    """
    path = run.output_dir / "results" / "neighbors.json"
    if path.is_file():
        return read_results(path)
    with quiet():
        _, data = load_run_data(run)
    counts = torch.as_tensor(data.unigram_counts)
    checkpoints = sorted(run.output_dir.glob("checkpoint-[0-9]*"), key=_step)
    found: dict[str, list[Any]] = {"steps": [0], "all": [1.0], "weighted": [1.0]}
    first = _first_neighbors(checkpoints[0])
    for checkpoint in checkpoints:
        now = _neighbors(load_trained(checkpoint).dist_head.prototypes)
        found["steps"].append(_step(checkpoint))
        found["all"].append(neighbor_overlap(first, now))
        found["weighted"].append(neighbor_overlap(first, now, counts))
    write_results(path.parent, path.stem, found)
    for checkpoint in checkpoints:
        shutil.rmtree(checkpoint)
    return found


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def _first_neighbors(folder: Path) -> Tensor:
    """Return the neighbors that training began with: embeddings stay frozen."""
    return _neighbors(load_trained(folder).get_input_embeddings().get_parameter("weight"))


def _neighbors(prototypes: Tensor) -> Tensor:
    return find_neighbors(prototypes.detach(), NUM_NEIGHBORS, scale=1.0).indices


def _overhead_table(payload: Payload) -> Table:
    columns = ["classes", "arm", "seconds", "overhead, %", "peak, MiB", "before, s"]
    rows = [
        [
            row["vocab_size"],
            row["name"],
            row["seconds"],
            f"{100 * row['overhead']:+.1f}",
            round(row["peak_bytes"] / 2**20),
            f"{row['prepare_seconds']:.1f}",
        ]
        for row in payload["rows"]
    ]
    return columns, rows


def _calibration_table(payload: Payload) -> Table:
    columns = [""]
    for key in CALIBRATION:
        columns += [METRICS[key][0], f"- {LINEAR}", f"- {PLAIN}"]
    rows = [
        [row["name"], *(cell for key in CALIBRATION for cell in _cells(row[key], scale=100))]
        for row in payload["rows"]
    ]
    return columns, rows


def _tokens_table(payload: Payload) -> Table:
    columns = ["tokens to"]
    for level in payload["levels"]:
        columns += [f"{level:.2f} nats", f"- {LINEAR}", f"- {PLAIN}"]
    rows = [
        [row["name"], *(cell for found in row["reached"] for cell in _cells(found, digits=0))]
        for row in payload["rows"]
    ]
    return columns, rows


def _cells(found: Row, *, scale: float = 1, digits: int = 2) -> list[str | None]:
    """Return in words what `compare_to_plain` made for one arm."""
    cells = [show_spread(found, scale=scale, digits=digits)]
    for plain in (LINEAR, PLAIN):
        difference = found["against"].get(plain)
        cells.append(difference and show_difference(difference, scale=scale, digits=digits))
    return cells


def _refresh_table(payload: Payload) -> Table:
    columns, rows = _metrics_table(payload)
    columns += ["neighbors kept, %", "of the text's tokens, %"]
    for cells, row in zip(rows, payload["rows"], strict=True):
        last = [row["kept"][kind][-1] for kind in ("all", "weighted")]
        cells += [show_spread(value, scale=100, digits=1) for value in last]
    return columns, rows


def _metrics_table(payload: Payload) -> Table:
    """Return every metric with its spread, and the verdict on its difference if there is one."""
    rows = []
    for row in payload["rows"]:
        cells = [row["name"]]
        for key in COMPARED:
            _, scale, digits = METRICS[key]
            verdict = row.get("difference", {}).get(key, {}).get("verdict", UNDECIDED)
            mark = "" if verdict == UNDECIDED else f" ({verdict})"
            cells.append(f"{show_spread(row[key], scale=scale, digits=digits)}{mark}")
        rows.append(cells)
    return ["", *(METRICS[key][0] for key in COMPARED)], rows


def _subwords_table(payload: Payload) -> Table:
    columns = ["", "tokens", *(f"{kind}, %" for kind in KINDS), "same form, %", "twin found, %"]
    rows = []
    for when in ("before", "after"):
        for kind, found in payload[when].items():
            shares = [*found["neighbors"].values(), found["same_form"], found["twin_found"]]
            cells = [show_spread(share, scale=100, digits=1) for share in shares]
            rows.append([f"{kind}, {when} training", found["tokens"], *cells])
    return columns, rows


PARTS: dict[str, tuple[Callable[[Bench], Payload], Callable[[Payload], Table]]] = {
    "overhead": (overhead, _overhead_table),
    "calibration": (calibration, _calibration_table),
    "tokens": (tokens, _tokens_table),
    "refresh": (refresh, _refresh_table),
    "subwords": (subwords, _subwords_table),
    "sweep": (sweep, _metrics_table),
}
