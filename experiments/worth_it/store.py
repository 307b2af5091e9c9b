"""Runs that were made, one line each, so that an interrupted part continues."""

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harmonic_sft.results import environment

logger = logging.getLogger(__name__)


class Store:
    """A file of runs.

    A new row carries `git_commit` and `dirty` of the code that made it, see `environment`. Rows of
    earlier versions have neither: their commit is not marked.

    Args:
        path: Made if it does not exist.
        fields: What tells a run from all others.
        deadline: Of `time.monotonic`, after which no new run starts.
    """

    def __init__(self, path: Path, fields: Sequence[str], *, deadline: float = math.inf):
        self.path, self.fields, self.deadline = path, tuple(fields), deadline
        path.parent.mkdir(parents=True, exist_ok=True)
        *lines, rest = path.read_text().split("\n") if path.is_file() else [""]
        if rest:  # of a full disk
            logger.warning("%s: half a line is taken out: %s", path, rest)
            path.write_text("".join(f"{line}\n" for line in lines))
        rows = [json.loads(line) for line in lines]
        self.rows = {tuple(row[field] for field in self.fields): row for row in rows}
        found = environment()  # now: the tree may change while the code that was read runs
        self.code = {key: found[key] for key in ("git_commit", "dirty")}

    def known(self, **key: Any) -> dict[str, Any] | None:
        """Return a run, None if it was not made."""
        return self.rows.get(tuple(key[field] for field in self.fields))

    def of_seeds(self, num_seeds: int, **key: Any) -> list[dict[str, Any]]:
        """Return the runs of seeds 0, 1, ..., none of them if one was not made."""
        runs = [self.known(**key, seed=seed) for seed in range(num_seeds)]
        known = [run for run in runs if run is not None]
        return known if len(known) == num_seeds else []

    def get(self, run: Callable[[], dict[str, Any]], **key: Any) -> dict[str, Any] | None:
        """Return a run, made if it was not; None if it was not and the time is over."""
        name = tuple(key[field] for field in self.fields)
        if name not in self.rows:
            if time.monotonic() > self.deadline:
                return None
            began = time.perf_counter()
            row = {**key, **run(), "seconds": round(time.perf_counter() - began, 1)}
            row |= self.code
            with self.path.open("a") as file:
                file.write(json.dumps(row, allow_nan=False) + "\n")
            logger.info("%s: %.1f s", name, row["seconds"])
            self.rows[name] = row
        return self.rows[name]


def best_rate(runs: Sequence[dict[str, Any] | None], loss: str = "loss") -> float | None:
    """Return the learning rate of the run with the least loss; None if one was not made."""
    known = [(run[loss], run["rate"]) for run in runs if run is not None]
    return min(known)[1] if len(known) == len(runs) else None
