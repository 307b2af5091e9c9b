"""All experiments by name, and how one is run: results file, table, figure."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from harmonic_sft.experiments import figures, multi_head_modular_addition, multi_head_toy
from harmonic_sft.results import environment, write_results


class Experiment(NamedTuple):
    """An experiment of a paper.

    Attributes:
        run: From the number of seeds and of epochs to what goes into the results file.
        show: Prints it.
        draw: Draws it from a results file or its payload into a PNG file.
        num_epochs: How long it runs unless told otherwise.
    """

    run: Callable[[int, int], dict[str, Any]]
    show: Callable[[dict[str, Any]], None]
    draw: Callable[[dict[str, Any], Path], Path]
    num_epochs: int


EXPERIMENTS = {
    "multi_head_toy": Experiment(
        multi_head_toy.run,
        multi_head_toy.show,
        figures.draw_multi_head_toy,
        multi_head_toy.NUM_EPOCHS,
    ),
    "multi_head_modular_addition": Experiment(
        multi_head_modular_addition.run,
        multi_head_modular_addition.show,
        figures.draw_multi_head_modular_addition,
        multi_head_modular_addition.NUM_EPOCHS,
    ),
}


def reproduce(
    name: str, output: str | Path, *, num_seeds: int = 10, num_epochs: int | None = None
) -> Path:
    """Run an experiment, print its table, write `<name>.json` and draw `<name>.png`.

    Args:
        name: One of `EXPERIMENTS`.
        output: The folder, made if it does not exist. Files of these names are replaced.
        num_seeds: Seeds 0, 1, ...
        num_epochs: Default: the experiment's own.

    Returns:
        The path of the results file.

    Raises:
        ValueError: No such experiment, a number below 1, or matplotlib is not installed, which
            shows after the results are written.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"experiment: expected one of {sorted(EXPERIMENTS)}, got {name!r}")
    experiment = EXPERIMENTS[name]
    num_epochs = experiment.num_epochs if num_epochs is None else num_epochs
    for key, value in (("seeds", num_seeds), ("epochs", num_epochs)):
        if value < 1:
            raise ValueError(f"{key}: expected at least 1, got {value}")
    start = time.perf_counter()
    payload = experiment.run(num_seeds, num_epochs)
    seconds = round(time.perf_counter() - start, 1)
    payload = {"experiment": name, **payload, "seconds": seconds, "environment": environment()}
    path = write_results(output, name, payload)
    experiment.show(payload)
    experiment.draw(payload, path.with_suffix(".png"))
    return path
