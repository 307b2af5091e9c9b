"""Runs that were made, one line each, so that an interrupted part continues."""

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class Store:
    """A file of runs.

    Args:
        path: Made if it does not exist.
        fields: What tells a run from all others.
        deadline: Of `time.monotonic`, after which no new run starts.
    """

    def __init__(self, path: Path, fields: Sequence[str], *, deadline: float = math.inf):
        self.path, self.fields, self.deadline = path, tuple(fields), deadline
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.is_file() else []
        rows = [json.loads(line) for line in lines]
        self.rows = {tuple(row[field] for field in self.fields): row for row in rows}

    def get(self, run: Callable[[], dict[str, Any]], **key: Any) -> dict[str, Any] | None:
        """Return a run, made if it was not; None if it was not and the time is over."""
        name = tuple(key[field] for field in self.fields)
        if name not in self.rows:
            if time.monotonic() > self.deadline:
                return None
            began = time.perf_counter()
            row = {**key, **run(), "seconds": round(time.perf_counter() - began, 1)}
            with self.path.open("a") as file:
                file.write(json.dumps(row, allow_nan=False) + "\n")
            logger.info("%s: %.1f s", name, row["seconds"])
            self.rows[name] = row
        return self.rows[name]
