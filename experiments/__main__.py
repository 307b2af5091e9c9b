"""Run an experiment again: `python -m experiments NAME`; `NAME --help` shows its options."""

import logging
import sys
from collections.abc import Callable, Sequence

from transformers.utils import logging as transformers_logging

from experiments import (
    decoder_cost,
    exponent,
    family,
    figures,
    geometry_note,
    gpt2_small,
    kitsunp,
    multi_head_modular_addition,
    multi_head_toy,
    small_gpt,
)
from experiments.harmonic_loss import command as harmonic_loss
from experiments.worth_it import command as worth_it
from harmonic_sft.training.callbacks import StoppedError
from harmonic_sft_cli import INTERRUPTED

EXPERIMENTS: dict[str, Callable[[str, Sequence[str]], None]] = {
    "family": family.main,
    "causal_family": family.main,
    "decoder_cost": decoder_cost.main,
    "geometry_note": geometry_note.main,
    "multi_head_toy": multi_head_toy.main,
    "multi_head_modular_addition": multi_head_modular_addition.main,
    "harmonic_loss": harmonic_loss.main,
    "worth_it": worth_it.main,
    "small_gpt": small_gpt.main,
    "gpt2_small": gpt2_small.main,
    "kitsunp": kitsunp.main,
    "exponent": exponent.main,
    "draw": figures.main,
}


def main(arguments: Sequence[str]) -> int:
    """Run one experiment.

    Args:
        arguments: Its name, and what it takes.

    Returns:
        The exit status: 0, 1 after an error that was printed in one line, or 130 after Ctrl-C.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("experiments").setLevel(logging.INFO)
    transformers_logging.set_verbosity_warning()
    name = arguments[0] if arguments else "nothing"
    if name in ("-h", "--help"):
        sys.stdout.write(f"{__doc__}\n\nExperiments: {', '.join(EXPERIMENTS)}.\n")
        return 0
    if name not in EXPERIMENTS:
        sys.stderr.write(f"error: experiment: expected one of {list(EXPERIMENTS)}, got {name!r}\n")
        return 1
    try:
        EXPERIMENTS[name](name, arguments[1:])
    except (ValueError, OSError, StoppedError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted.\n")
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
