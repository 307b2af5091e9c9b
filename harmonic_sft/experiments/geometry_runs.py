"""The parts of the geometry note that train or read runs of `configs/family`."""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harmonic_sft.experiments.evidence import (
    paired_difference,
    show_difference,
    spread,
    tokens_to_reach,
)
from harmonic_sft.experiments.family import configure, load_trained, quiet
from harmonic_sft.experiments.geometry_bench import (
    Arm,
    Bench,
    Row,
    add_differences,
    metrics,
    tell,
    tell_decided,
    train_arms,
)
from harmonic_sft.experiments.subwords import describe_neighbors, neighbor_overlap
from harmonic_sft.losses.knn_label_smoothing import find_neighbors
from harmonic_sft.results import read_results, write_results
from harmonic_sft.training import RunConfig
from harmonic_sft.training.loading import load_model, load_run_data

PLAIN = "dist_harmonic"
LINEAR = "linear_ce"
BOTH = "rotation_wasserstein"
SMOOTHED = "dist_knn_smoothing"
TRANSPORTED = "dist_wasserstein"
CALIBRATED = (LINEAR, PLAIN, "rotation_dist", TRANSPORTED, BOTH)
COUNTED = (LINEAR, PLAIN, BOTH, SMOOTHED)
EPSILONS = (0.02, 0.05, 0.1, 0.2, 0.4)
LAMBDAS = (0.01, 0.03, 0.1, 0.3, 1.0)
MEASURED = ("rotation of dist", "dist, harmonic + ", "dist, knn")  # arms of the benchmark
NUM_POINTS = 10  # evaluations of a curve, checkpoints of a drift
NUM_NEIGHBORS = 10


def overhead(bench: Bench) -> dict[str, Any]:
    """Read what `scripts/benchmark_losses.py` measured of whole training steps.

    Returns:
        `rows`, one for each vocabulary and arm: `vocab_size`, `name`, `seconds`, and `overhead`,
        the median of the ratios to plain harmonic loss in the same round, minus 1.

    Raises:
        ValueError: The script's file is not in the output folder.
    """
    path = bench.output / "benchmark_losses.json"
    if not path.is_file():
        raise ValueError(
            f"overhead: expected the measurement {str(path)!r}, got none. "
            f"Run python scripts/benchmark_losses.py --json {path}"
        )
    measured = read_results(path)
    rows: list[Row] = [
        {
            "vocab_size": int(size),
            "name": name,
            "seconds": arm["median_seconds"],
            "overhead": arm["median_ratio_to_harmonic"] - 1,
        }
        for size, found in measured["vocab_sizes"].items()
        for name, arm in found["step"].items()
    ]
    told = [
        f"{row['name']} {100 * row['overhead']:+.1f} % (V = {row['vocab_size']:,})"
        for row in rows
        if row["name"].startswith(MEASURED)
    ]
    finding = f"a step against dist, harmonic: {', '.join(told)}; medians, no verdict"
    return {"rounds": measured["steps"], "rows": rows, "finding": finding}


def calibration(bench: Bench) -> dict[str, Any]:
    """Compare the calibration of finished runs of the family.

    Returns:
        `rows`, each with `name`, the spread of `ece` and `post_hoc_ece`, and the paired
        differences to the two plain arms.

    Raises:
        ValueError: A run is not there.
    """
    errors: dict[str, dict[str, list[float]]] = {}
    for name in CALIBRATED:
        runs = [bench.finished(name, seed) for seed in bench.seeds]
        finals = [run["final"] for run in runs if run is not None]
        if len(finals) < len(runs):
            raise ValueError(
                f"family: expected finished runs of {name} with seeds {list(bench.seeds)}, got "
                f"{len(finals)} in {str(bench.family)!r}. Run harmonic-sft compare on {name}.yaml "
                "and the other files first"
            )
        errors[name] = {key: [final[key] for final in finals] for key in ("ece", "post_hoc_ece")}
    rows: list[Row] = [
        {
            "name": name,
            **{key: spread(values) for key, values in found.items()},
            "against": {
                plain: {k: paired_difference(found[k], errors[plain][k]) for k in found}
                for plain in (LINEAR, PLAIN)
                if plain != name
            },
        }
        for name, found in errors.items()
    ]
    against = rows[-1]["against"]
    told = [
        f"{show_difference(against[plain][key], scale=100)} points of {label} against {plain}"
        for plain in against
        for key, label in (("ece", "ECE"), ("post_hoc_ece", "post-hoc ECE"))
    ]
    return {"rows": rows, "finding": f"{BOTH}: {', '.join(told)}"}


def tokens(bench: Bench) -> dict[str, Any]:
    """Count the tokens to levels of the validation loss at its best post-hoc scale.

    Returns:
        `levels`, in nats, which every run reaches, the lowest first; `rows`, each with `name`,
        `curves` (one for each seed: `tokens`, all that the model has read but padding, and
        `losses`) and `reached`, one for each level: spread, and paired differences to the two
        plain arms.
    """
    interval = max(1, bench.max_steps(PLAIN) // NUM_POINTS)
    overrides = ("training.eval_strategy=steps", f"training.eval_steps={interval}")
    runs = train_arms(bench, [Arm(f"{name}_curve", name, overrides) for name in COUNTED])
    curves = {
        name: [loss_curve(one.results["history"]) for one in runs[f"{name}_curve"]]
        for name in COUNTED
    }
    levels = common_levels([curve["losses"] for found in curves.values() for curve in found])
    counts = {
        name: [[_count(curve, level) for curve in found] for level in levels]
        for name, found in curves.items()
    }
    rows: list[Row] = [
        {
            "name": name,
            "curves": curves[name],
            "reached": [
                {**spread(values), "against": _against(name, place, counts)}
                for place, values in enumerate(found)
            ],
        }
        for name, found in counts.items()
    ]
    told = [
        f"{row['name']} {show_difference(row['reached'][0]['against'][PLAIN], digits=0)}"
        for row in rows
        if row["name"] != PLAIN
    ]
    finding = f"tokens to {levels[0]:.2f} nats, against {PLAIN}: {', '.join(told)}"
    return {"levels": levels, "rows": rows, "finding": finding}


def loss_curve(history: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Return tokens seen and post-hoc losses of the evaluations in a run's history."""
    found = {
        int(entry.get("num_input_tokens_seen", 0)): entry["eval_post_hoc_loss"]
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


def refresh(bench: Bench) -> dict[str, Any]:
    """Train label smoothing with neighbors found once, or anew, and follow the neighborhoods.

    Returns:
        `rows`, each with `name`, `refresh_every`, the spread of the metrics and paired differences
        to the row without refresh, and `steps` with `kept`, the share of the first neighbors that
        are still there: `all` tokens alike, and `weighted` by their occurrences in the text.
    """
    max_steps = bench.max_steps(SMOOTHED)
    every = max(1, max_steps // NUM_POINTS)
    intervals = [None, *sorted({max_steps // 2, max_steps // 4, every} - {0}, reverse=True)]
    arms = []
    for interval in intervals:
        name = "never" if interval is None else str(interval)
        overrides = (
            f"loss.refresh_every={'null' if interval is None else interval}",
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
        steps = drifts[0]["steps"]
        row = {"name": arm.name, "refresh_every": interval, "steps": steps, "kept": kept}
        rows.append({**row, **metrics(runs[arm.name])})
    add_differences(rows)
    last = {kind: 100 * found[-1]["mean"] for kind, found in rows[0]["kept"].items()}
    finding = (
        f"never refreshed, {last['weighted']:.0f} % of the first neighbors of the text's tokens "
        f"({last['all']:.0f} % of all tokens') are left at the end; post-hoc loss against never: "
        f"{tell(rows[1:], 'post_hoc_loss', digits=4)}"
    )
    return {"rows": rows, "finding": finding}


def sweep(bench: Bench) -> dict[str, Any]:
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
    for knob, (file, key, values) in knobs.items():
        arms += [(Arm(f"{knob}_{v:g}", file, (f"{key}={v:g}",)), knob, v) for v in values]
    runs = train_arms(bench, [arm for arm, _, _ in arms])
    rows: list[Row] = [
        {"name": arm.name, "knob": knob, "value": value, **metrics(runs[arm.name])}
        for arm, knob, value in arms
    ]
    add_differences(rows)
    told = [
        f"{knob}: {key} {tell_decided([row for row in rows if row['knob'] == knob], key)}"
        for knob in knobs
        for key in ("post_hoc_loss", "accuracy", "ece", "error_cosine")
    ]
    return {"rows": rows, "finding": f"against {PLAIN}, {'; '.join(told)}"}


def subwords(bench: Bench) -> dict[str, Any]:
    """Describe the neighbors of every kind of token, before and after training if a run is there.

    Returns:
        `before` and `after` (None without a finished run), each as `describe_neighbors`, and
        `kept`, the share of neighbors that are the same.
    """
    seed = bench.seeds[0]
    folder = bench.family / f"{PLAIN}-{seed}"
    run = configure(bench.file(PLAIN), seed, folder)
    with quiet():
        tokenizer, data = load_run_data(run)
        model, _ = load_model(run, tokenizer, data)
        trained = load_trained(folder) if bench.finished(PLAIN, seed) else None
    names = tokenizer.convert_ids_to_tokens(list(range(len(model.dist_head.weight))))
    first = _neighbors(model.dist_head.prototypes)
    before = describe_neighbors(names, first)
    after, kept = None, None
    if trained is not None:
        last = _neighbors(trained.dist_head.prototypes)
        after, kept = describe_neighbors(names, last), neighbor_overlap(first, last)
    now = after or before
    told = [
        f"{100 * found['neighbors']['piece']:.0f} % of the neighbors of a {kind} are pieces"
        for kind, found in now.items()
        if kind in ("word", "piece")
    ]
    told += [
        f"{100 * found['twin_found']:.0f} % of each {kind} with a twin have it as a neighbor"
        for kind, found in now.items()
        if found["twin_found"] is not None
    ]
    when = "before training" if after is None else "after training"
    finding = f"{when}, {', '.join(told)}"
    return {"before": before, "after": after, "kept": kept, "finding": finding}


def _against(name: str, place: int, counts: dict[str, list[list[float]]]) -> dict[str, Any]:
    return {
        plain: paired_difference(counts[name][place], counts[plain][place])
        for plain in (LINEAR, PLAIN)
        if plain != name
    }


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
    checkpoints = sorted(run.output_dir.glob("checkpoint-[0-9]*"), key=_step)
    found: dict[str, list[Any]] = {"steps": [0], "all": [1.0], "weighted": [1.0]}
    # The prototypes start as the embeddings, which stay frozen.
    first = _neighbors(load_trained(checkpoints[0]).get_input_embeddings().get_parameter("weight"))
    for checkpoint in checkpoints:
        now = _neighbors(load_trained(checkpoint).dist_head.prototypes)
        found["steps"].append(_step(checkpoint))
        found["all"].append(neighbor_overlap(first, now))
        found["weighted"].append(neighbor_overlap(first, now, torch.as_tensor(data.unigram_counts)))
    write_results(path.parent, path.stem, found)
    for checkpoint in checkpoints:
        shutil.rmtree(checkpoint)
    return found


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def _neighbors(prototypes: Tensor) -> Tensor:
    return find_neighbors(prototypes.detach(), NUM_NEIGHBORS, scale=1.0).indices
