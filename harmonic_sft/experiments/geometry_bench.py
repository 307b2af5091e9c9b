"""The bench of the geometry note: arms made of files of `configs/family`, trained and compared."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.utils import release_memory

from harmonic_sft.config import parse, read_yaml
from harmonic_sft.experiments.evidence import UNDECIDED, paired_difference, show_difference, spread
from harmonic_sft.experiments.family import configure, finish
from harmonic_sft.results import read_results
from harmonic_sft.training import RunConfig
from harmonic_sft.training.output_folder import CONFIG_NAME, changed_keys

logger = logging.getLogger(__name__)
METRICS = ("post_hoc_loss", "accuracy", "ece", "post_hoc_ece", "error_cosine")
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where a part finds its runs and puts its own.

    Attributes:
        configs: The folder of `dist_harmonic.yaml` and the others.
        family: The output folder of `harmonic-sft compare configs/family`. A run with the very
            settings of an arm is read from there, not trained again.
        output: Gets a folder for each run that is trained.
        seeds: Of every arm.
    """

    configs: Path
    family: Path
    output: Path
    seeds: Sequence[int]

    def file(self, name: str) -> Path:
        """Return the YAML file of a name.

        Raises:
            ValueError: There is none.
        """
        path = self.configs / f"{name}.yaml"
        if not path.is_file():
            raise ValueError(
                f"configs: expected a folder with {path.name}, got {str(self.configs)!r}. "
                "Start in a checkout of the repository"
            )
        return path

    def max_steps(self, name: str) -> int:
        """Return how many steps a file trains."""
        return read_yaml(self.file(name))["training"]["max_steps"]

    def finished(self, name: str, seed: int) -> dict[str, Any] | None:
        """Return the results of a run of the family, None if it is not finished."""
        path = self.family / f"{name}-{seed}" / "results" / "train.json"
        return read_results(path) if path.is_file() else None


class Arm(NamedTuple):
    """A file of the family, by its name, with a few values replaced."""

    name: str
    file: str
    overrides: tuple[str, ...] = ()


class Finished(NamedTuple):
    """One arm with one seed."""

    run: RunConfig
    results: dict[str, Any]


def train_arms(
    bench: Bench, arms: Sequence[Arm], after_fn: Callable[[RunConfig], object] | None = None
) -> dict[str, list[Finished]]:
    """Train every arm with every seed, or read what an earlier call or the family left.

    Args:
        bench: Folders and seeds.
        arms: By different names.
        after_fn: Called with each run of the bench's own as soon as it is finished.

    Returns:
        By the arm's name, in the order of the seeds.
    """
    found: dict[str, list[Finished]] = {arm.name: [] for arm in arms}
    plan = list(product(bench.seeds, arms))  # every arm with the first seed, then with the second
    for number, (seed, arm) in enumerate(plan, start=1):
        logger.info("%d of %d: %s, seed %d", number, len(plan), arm.name, seed)
        folder = bench.output / f"{arm.name}-{seed}"
        run = configure(bench.file(arm.file), seed, folder, arm.overrides)
        results = _of_family(bench, arm.file, run)
        if results is None:
            results = finish(run)
            if after_fn is not None:
                after_fn(run)
            release_memory()
        found[arm.name].append(Finished(run, results))
    return found


def metrics(runs: Sequence[Finished]) -> Row:
    """Return the spread of every metric over the seeds of one arm."""
    return {key: spread([one.results["final"][key] for one in runs]) for key in METRICS}


def add_differences(rows: Sequence[Row]) -> None:
    """Give every row but the first the paired differences of its metrics to the first."""
    for row in rows[1:]:
        row["difference"] = {
            key: paired_difference(row[key]["values"], rows[0][key]["values"]) for key in METRICS
        }


def tell(rows: Sequence[Row], key: str, *, scale: float = 1, digits: int = 3) -> str:
    """Return the differences of one metric in words, row by row."""
    return ", ".join(
        f"{row['name']} {show_difference(row['difference'][key], scale=scale, digits=digits)}"
        for row in rows
    )


def tell_decided(rows: Sequence[Row], key: str) -> str:
    """Return at which values a metric differs from the first row by two standard errors."""
    verdicts = [(row["value"], row["difference"][key]["verdict"]) for row in rows]
    words = [
        f"{verdict} at {', '.join(f'{value:g}' for value, v in verdicts if v == verdict)}"
        for verdict in dict.fromkeys(verdict for _, verdict in verdicts)
        if verdict != UNDECIDED
    ]
    return " and ".join(words) or "undecided everywhere"


def _of_family(bench: Bench, file: str, run: RunConfig) -> dict[str, Any] | None:
    """Return the results of the family's run if its settings are those of this one."""
    results = bench.finished(file, run.seed)
    if results is None:
        return None
    old = parse(RunConfig, read_yaml(bench.family / f"{file}-{run.seed}" / CONFIG_NAME))
    return results if set(changed_keys(old, run)) <= {"training.output_dir"} else None
