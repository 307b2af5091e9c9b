"""What the commands of `harmonic-sft` do; each imports what it needs when it runs."""

import argparse
import logging
import os
import sys

from transformers.utils import logging as transformers_logging


def run_command(options: argparse.Namespace) -> int:
    """Run the command that `harmonic_sft_cli` has read.

    Returns:
        The exit status: 0, or 1 after an error that was printed in one line.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("harmonic_sft").setLevel(logging.INFO)
    transformers_logging.set_verbosity_warning()
    try:
        COMMANDS[options.command](options)
    except (ValueError, OSError) as error:
        return _report(error)
    except RuntimeError as error:
        from harmonic_sft.hub import PushError
        from harmonic_sft.training.callbacks import StoppedError

        if not isinstance(error, PushError | StoppedError):
            raise
        return _report(error)
    return 0


def _report(error: Exception) -> int:
    rank = os.environ.get("RANK", "0")
    where = f" in process {rank}" if rank != "0" else ""
    sys.stderr.write(f"error{where}: {error}\n")
    return 1


def _train(options: argparse.Namespace) -> None:
    from harmonic_sft.training.run_config import load_run_config

    run = load_run_config(options.config, options.overrides)
    # Only now what takes seconds to import: a mistyped key is reported before.
    if options.dry_run:
        from harmonic_sft.training.preview import dry_run

        dry_run(run)
    else:
        from harmonic_sft.training.run import train

        train(run)


def _data(options: argparse.Namespace) -> None:
    from harmonic_sft.training.run_config import load_run_config

    run = load_run_config(options.config, options.overrides)
    from harmonic_sft.training.preview import show_data

    show_data(run, row=options.row)


def _eval(options: argparse.Namespace) -> None:
    from harmonic_sft.training.evaluation import evaluate_folder

    evaluate_folder(options.folder, options.overrides)


def _compare(options: argparse.Namespace) -> None:
    from harmonic_sft.results import read_results
    from harmonic_sft.training.report import compare_runs

    paths = [folder / "results" / "train.json" for folder in options.folders]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"compare: expected a finished run, got no {path}")
    compare_runs([read_results(path) for path in paths], options.figure)


def _push(options: argparse.Namespace) -> None:
    from harmonic_sft.hub import Destination, push

    to = Destination(
        repo_id=options.repo_id,
        form=options.form,
        private=options.private,
        revision=options.revision,
        force=options.force,
    )
    sys.stdout.write(f"{push(options.folder, to)}\n")


def _export(options: argparse.Namespace) -> None:
    from harmonic_sft.hub import export_linear

    folder = options.folder.resolve()
    target = options.output or folder.with_name(f"{folder.name}-{options.to}")
    sys.stdout.write(f"{export_linear(folder, target)}\n")


COMMANDS = {
    "train": _train,
    "data": _data,
    "eval": _eval,
    "compare": _compare,
    "push": _push,
    "export": _export,
}
