"""The cells of every figure of the paper, what it reports of them, and the files they go to."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, fields, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from scipy.stats import mannwhitneyu
from sklearn.decomposition import PCA

from experiments.harmonic_loss.bench import Cell, chance_cumulative, run
from experiments.harmonic_loss.data import TASKS
from harmonic_sft.eval.statistics import holm, t_interval
from harmonic_sft.results import environment, read_results, write_results

logger = logging.getLogger(__name__)
Row = dict[str, Any]

NUM_SEEDS_TOGETHER = 10  # a file holds as many seeds
FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9)
MARGIN_POINTS = 5.0  # registered: how far a published mean may lie outside our interval
EXPONENTS = (-0.5, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0, -9.0, -10.0)
PER_SEED = ("train_epochs", "test_epochs", "train_accuracy", "test_accuracy")
PER_SEED += ("variance", "test_accuracy_without_dropout", "share_seen", "embedding")

# Explained variance of two components in percent, mean, least and most of 20 seeds, read from the
# text of the released vector figure.
PUBLISHED = {
    ("in_context", "mlp", "linear"): (90.3, 89, 92),
    ("in_context", "mlp", "dist"): (100.0, 100, 100),
    ("in_context", "transformer", "linear"): (75.5, 68, 81),
    ("in_context", "transformer", "dist"): (99.95, 99, 100),
    ("modular_addition", "mlp", "linear"): (46.5, 35, 63),
    ("modular_addition", "mlp", "dist"): (86.8, 51, 100),
    ("modular_addition", "transformer", "linear"): (59.8, 38, 80),
    ("modular_addition", "transformer", "dist"): (69.3, 30, 96),
    ("equivalence", "mlp", "linear"): (95.0, 86, 98),
    ("equivalence", "mlp", "dist"): (78.4, 64, 92),
    ("equivalence", "transformer", "linear"): (91.3, 87, 97),
    ("equivalence", "transformer", "dist"): (91.6, 79, 97),
    ("genealogy", "mlp", "linear"): (29.1, 27, 32),
    ("genealogy", "mlp", "dist"): (50.7, 41, 60),
    ("genealogy", "transformer", "linear"): (25.4, 24, 27),
    ("genealogy", "transformer", "dist"): (39.5, 34, 46),
    ("permutation", "mlp", "linear"): (37.7, 32, 46),
    ("permutation", "mlp", "dist"): (43.4, 27, 86),
    ("permutation", "transformer", "linear"): (32.8, 29, 41),
    ("permutation", "transformer", "dist"): (36.4, 27, 42),
}


def both_splits(cells: Iterable[Cell]) -> Iterator[Cell]:
    """Yield every cell with the released split, then with the clean one."""
    for cell in cells:
        yield cell
        if cell.task != "permutation":  # its released split has no example twice
            yield replace(cell, split="clean")


def main_cells() -> Iterator[Cell]:
    """Yield the cells of Figures 2, 3 (left, right) and 7: tasks x models."""
    for task in TASKS:
        yield from models(task)


def models(task: str) -> Iterator[Cell]:
    """Yield the paper's four models of a task, as the released code trains them.

    Its penalty on the embedding of an MLP has no gradient.
    """
    for head in ("linear", "dist"):
        yield Cell(task=task, head=head)
    num_epochs = 10000 if task == "permutation" else 7000
    for head in ("linear", "dist"):
        yield Cell(
            task=task,
            model="transformer",
            head=head,
            num_epochs=num_epochs,
            weight_decay=0.005,
            penalty=0.01,
        )


def data_efficiency() -> Iterator[Cell]:
    """Yield the cells of Figure 3 (middle): the models on other shares of the examples."""
    for task in TASKS:
        for cell in models(task):
            for fraction in FRACTIONS:
                yield replace(cell, train_fraction=fraction)


def case_study() -> Iterator[Cell]:
    """Yield the cells of Figure 4 (left): modular addition with and without weight decay."""
    for head, weight_decay in (("linear", 0.0), ("linear", 0.5), ("dist", 0.0)):
        yield Cell(
            task="modular_addition",
            head=head,
            learning_rate=1e-3,
            num_epochs=2000,
            weight_decay=weight_decay,
        )


def ablations() -> Iterator[Cell]:
    """Yield the cells of Figure 6: distance or dot product, softmax or harmonic law."""
    for task, num_epochs in (("in_context", 1000), ("modular_addition", 2000)):
        for head in ("linear", "l2", "l2_squared", "dot_harmonic", "dist"):
            yield Cell(task=task, head=head, num_epochs=num_epochs)


def comparators() -> Iterator[Cell]:
    """Yield the cells of Figures 10 and 11: other losses on the outputs of both heads."""
    for task, num_epochs in (("in_context", 1000), ("modular_addition", 2000)):
        for head in ("linear", "dist"):
            for loss in ("nll", "contrastive", "soft_nn", "spherical"):
                yield Cell(task=task, head=head, loss=loss, num_epochs=num_epochs)


def exponents() -> Iterator[Cell]:
    """Yield the cells of Figures 12 and 13: the exponent, from the text's literal n = 1 on."""
    for task, num_epochs in (("in_context", 1000), ("modular_addition", 2000)):
        for h_exp in EXPONENTS:
            yield Cell(task=task, head="dist", h_exp=h_exp, num_epochs=num_epochs)


def cosets() -> Iterator[Cell]:
    """Yield the cells of Appendix B: permutations, whose embeddings are searched for cosets."""
    yield from (cell for cell in models("permutation") if cell.model == "mlp")


CELLS: dict[str, Callable[[], Iterator[Cell]]] = {  # each with the released split
    "2": main_cells,
    "3a": main_cells,
    "3b": data_efficiency,
    "3c": main_cells,
    "4": case_study,
    "6": ablations,
    "7": main_cells,
    "10": comparators,
    "12": exponents,
    "B": cosets,
}


def cell_name(cell: Cell) -> str:
    """Return the name of a cell's files: its task, model and head, and what is not the default."""
    values, parts = asdict(cell), [cell.task, cell.model, cell.head]
    for field in fields(cell)[3:]:
        value = values[field.name]
        if value != field.default:
            parts.append(f"{field.name}={value}")
    return "-".join(parts)


def seed_groups(num_seeds: int) -> list[range]:
    """Return the seeds 0, 1, ... in the groups that are trained together."""
    starts = range(0, num_seeds, NUM_SEEDS_TOGETHER)
    return [range(start, min(start + NUM_SEEDS_TOGETHER, num_seeds)) for start in starts]


def cell_path(folder: Path, cell: Cell, seeds: range) -> Path:
    """Return the file of a cell and a group of seeds."""
    return folder / "cells" / f"{cell_name(cell)}-seeds_{seeds.start}_{seeds.stop - 1}.json"


def train_cells(cells: Sequence[Cell], num_seeds: int, folder: Path, num_workers: int = 1) -> None:
    """Train what has no file yet, the first group of seeds of every cell before the next.

    Args:
        cells: What to train.
        num_seeds: Seeds 0, 1, ... of each.
        folder: Where the files go.
        num_workers: Processes of one thread each; 1: this process, with its threads.
    """
    jobs = [(cell, seeds, folder) for seeds in seed_groups(num_seeds) for cell in cells]
    jobs = [job for job in jobs if not cell_path(folder, *job[:2]).is_file()]
    if num_workers == 1:
        for job in jobs:
            logger.info(_train(*job))
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, torch.set_num_threads, (1,)) as pool:
        for job in as_completed([pool.submit(_train, *job) for job in jobs]):
            logger.info(job.result())


def kept(path: Path, make_fn: Callable[[], Row]) -> Row:
    """Return what a file holds, made and written if there is none."""
    if not path.is_file():
        write_results(path.parent, path.stem, {**make_fn(), "environment": environment()})
        logger.info("Made: %s", path.name)
    return read_results(path)


def read_cell(cell: Cell, num_seeds: int, folder: Path) -> Row | None:
    """Return what was found of a cell, whatever groups its seeds were trained in.

    Args:
        cell: What was trained.
        num_seeds: Of the seeds 0, 1, ... those that have been trained.
        folder: Where the files are.

    Returns:
        What a file of the cell holds, with the seeds of all its files; None before any was trained.
        A seed that two files hold is taken once.
    """
    seeds: dict[int, Row] = {}
    groups: list[Row] = []
    for path in sorted((folder / "cells").glob(f"{cell_name(cell)}-seeds_*.json")):
        group = read_results(path)
        new = {
            seed: {key: group[key][place] for key in PER_SEED}
            for place, seed in enumerate(group["seeds"])
            if seed < num_seeds and seed not in seeds
        }
        if new:
            seeds |= new
            groups.append(group)
    if not groups:
        return None
    joined = {key: [seeds[seed][key] for seed in sorted(seeds)] for key in PER_SEED}
    seconds = sum(group["cpu_seconds"] for group in groups)
    # Whether the code differed from its commit; earlier files name it otherwise.
    made = [group["environment"] for group in groups]
    dirty = any(one.get("dirty") or one.get("git_changed") for one in made)
    return {
        **groups[0],
        "seeds": sorted(seeds),
        **joined,
        "cpu_seconds": seconds,
        "dirty": dirty,
    }


def summary(found: Row) -> Row:
    """Return one line of a figure's table.

    A seed has converged if its test accuracy stays above 0.9 for 20 epochs; a median over seeds
    is that of the converged ones, as in the paper. `gap` is the test epoch minus the train epoch.
    `places` are the tokens on two components, of the seed with the median variance among those
    that converged (of all seeds, where none did).
    `published` is None where the paper has no such cell. `reproduced`: its mean lies within our
    interval widened by the registered margin; None of the clean split, which is ours.
    """
    cell = Cell(**found["cell"])
    # A penalty that acts on an MLP is the text's, and is compared with the same figures.
    same = replace(cell, penalty=Cell.penalty) if cell.model == "mlp" else cell
    is_published = replace(same, split="released") in models(cell.task)
    published = PUBLISHED[cell.task, cell.model, cell.head] if is_published else None
    compared = published if cell.split == "released" else None
    variance = [100 * shares[1] for shares in found["variance"]]
    mean, half_width = fmean(variance), t_interval(variance)["half_width"]
    seeds = range(len(variance))
    converged = [seed for seed in seeds if found["test_epochs"][seed] is not None]
    ordered = sorted(converged or seeds, key=lambda seed: variance[seed])
    shown = ordered[(len(ordered) - 1) // 2]  # the lower median
    pairs = zip(found["train_epochs"], found["test_epochs"], strict=True)
    arrived = [(first, second) for first, second in pairs if second is not None]
    gaps = [second - first for first, second in arrived if first is not None]
    return {
        "name": cell_name(cell),
        "dirty": found["dirty"],
        "published": published,
        "reproduced": compared and abs(mean - compared[0]) <= (half_width or 0) + MARGIN_POINTS,
        "cell": found["cell"],
        "num_seeds": len(found["seeds"]),
        "variance_percent": variance,
        "mean_percent": mean,
        "interval_percent": half_width,
        "median_percent": median(variance),
        "num_above_98": sum(value >= 98 for value in variance),
        "chance_percent": 100 * found["chance_variance"],
        "cumulative": found["variance"],
        "chance_cumulative": chance_cumulative(*np.shape(found["embedding"])[1:]),
        "places": PCA(2).fit_transform(np.asarray(found["embedding"][shown])).round(3).tolist(),
        "shown_percent": variance[shown],
        "test_accuracies": found["test_accuracy"],
        "test_accuracy": fmean(found["test_accuracy"]),
        "test_accuracy_without_dropout": fmean(found["test_accuracy_without_dropout"]),
        "chance_accuracy": found["chance_accuracy"],
        "share_seen": fmean(found["share_seen"]),
        "num_converged": len(arrived),
        "train_epochs": found["train_epochs"],
        "test_epochs": found["test_epochs"],
        "median_test_epoch": median(second for _, second in arrived) if arrived else None,
        "median_gap": median(gaps) if gaps else None,
        "cpu_seconds": found["cpu_seconds"],
    }


def pairs_of(figure: str) -> list[tuple[Cell, Cell]]:
    """Return the pairs of cells whose variances are compared, as registered; often none.

    Figures 2 and 7: the linear and the harmonic head of the ten published pairs. Figure 6: every
    alternative and the full harmonic head.
    """
    if figure in ("2", "7"):
        fours = [list(models(task)) for task in TASKS]
        return [(four[place], four[place + 1]) for four in fours for place in (0, 2)]
    if figure == "6":
        chosen = list(ablations())
        return [(cell, replace(cell, head="dist")) for cell in chosen if cell.head != "dist"]
    return []


def compare(rows: Sequence[Row], pairs: Sequence[tuple[Cell, Cell]]) -> list[Row]:
    """Compare the variances of two cells over their seeds.

    Args:
        rows: See `summary`.
        pairs: See `pairs_of`.

    Returns:
        `names` and `means` (in percent) of both cells, `p` of the two-sided Mann-Whitney test and
        `p_holm`, corrected for all pairs, of which one that was not trained has p = 1.
    """
    variances = {row["name"]: row["variance_percent"] for row in rows}
    lines: list[Row] = []
    for pair in pairs:
        names = [cell_name(cell) for cell in pair]
        if all(name in variances for name in names):
            values = [variances[name] for name in names]
            means, p = [fmean(one) for one in values], float(mannwhitneyu(*values).pvalue)
            lines.append({"names": names, "means": means, "p": p})
    p_values: list[float | None] = [1.0] * len(pairs)
    p_values[: len(lines)] = [line["p"] for line in lines]
    return [{**line, "p_holm": p} for line, p in zip(lines, holm(p_values), strict=False)]


def _train(cell: Cell, seeds: range, folder: Path) -> str:
    """Train a group of seeds of a cell, write their file and say so."""
    path = cell_path(folder, cell, seeds)
    payload = kept(path, lambda: run(cell, seeds))
    return f"{path.name}: {payload['cpu_seconds']:.0f} CPU seconds"
