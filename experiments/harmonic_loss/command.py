"""The command `python -m experiments harmonic_loss`."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from experiments.harmonic_loss.cells import (
    CELLS,
    PUBLISHED,
    Row,
    cell_name,
    read_cell,
    summary,
    train_cells,
)
from harmonic_sft.results import show_table, write_results

COLUMNS = ["cell", "seeds", "variance in two components (%)", "least", "median", "most"]
COLUMNS += [">= 98", "chance (%)", "published (%)", "test accuracy", "chance accuracy"]
COLUMNS += ["converged", "test epoch", "gap"]


def main(name: str, arguments: Sequence[str]) -> None:
    """Run the experiments behind one figure of the paper again and draw it.

    What was trained is kept in OUT/cells and not trained again.

    Raises:
        ValueError: No seed, no cell of that name, or nothing to draw.
    """
    parser = argparse.ArgumentParser(prog=f"python -m experiments {name}")
    parser.add_argument("--figure", required=True, choices=list(CELLS), help="of the paper")
    parser.add_argument("--seeds", type=int, default=20, help="how many; default: 20")
    parser.add_argument("--quick", action="store_true", help="two seeds, one epoch")
    parser.add_argument("--only", default="", help="cells with this text in their name")
    parser.add_argument("--draw", action="store_true", help="train nothing")
    parser.add_argument("--out", type=Path, default=Path("runs/harmonic_loss"), help="a folder")
    options = parser.parse_args(arguments)
    cells = [cell for cell in CELLS[options.figure]() if options.only in cell_name(cell)]
    if not cells:
        raise ValueError(f"only: expected a part of a cell's name, got {options.only!r}")
    num_seeds = options.seeds
    if options.quick:
        num_seeds, cells = 2, [replace(cell, num_epochs=1) for cell in cells]
    if not options.draw:
        train_cells(cells, num_seeds, options.out)
    found = [one for cell in cells if (one := read_cell(cell, num_seeds, options.out)) is not None]
    if not found:
        raise ValueError(f"out: expected results in {options.out / 'cells'}, got none")
    rows = [summary(one) for one in found]
    write_results(options.out, f"figure_{options.figure}", {"rows": rows})
    show_table(f"Figure {options.figure}", COLUMNS, [table_row(row) for row in rows])
