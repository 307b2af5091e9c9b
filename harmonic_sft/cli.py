"""The command line: harmonic-sft train | data | eval | compare | push | export."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers.utils import logging as transformers_logging

from harmonic_sft.hub import Destination, PushError, export_linear, push
from harmonic_sft.results import read_results
from harmonic_sft.training import (
    StoppedError,
    compare_runs,
    dry_run,
    evaluate_folder,
    load_run_config,
    show_data,
    train,
)

INTERRUPTED = 130  # what shells report for Ctrl-C
OVERRIDES = "key=value pairs that replace values of the file, such as training.max_steps=10"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The command line without the program's name; default: `sys.argv`.

    Returns:
        The exit status: 0, 1 after an error that was printed in one line, 130 after Ctrl-C.
    """
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and (any(word.startswith("-") or "=" not in word for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest  # key=value after an option
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("harmonic_sft").setLevel(logging.INFO)
    transformers_logging.set_verbosity_warning()
    command: Callable[[argparse.Namespace], None] = options.run_command
    try:
        command(options)
    except (ValueError, OSError, StoppedError, PushError) as error:
        rank = os.environ.get("RANK", "0")
        where = f" in process {rank}" if rank != "0" else ""
        sys.stderr.write(f"error{where}: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted. The same command with resume=true goes on.\n")
        return INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="harmonic-sft", description="Fine-tune models with a geometry-aware output head."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("train", help="run one YAML file")
    command.add_argument("config", type=Path, help="the YAML file of the run")
    command.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES)
    command.add_argument(
        "--dry-run", action="store_true", help="load nothing, print the plan and its memory"
    )
    command.set_defaults(run_command=_train)

    command = commands.add_parser("data", help="show what a run would train on, without its model")
    command.add_argument("config", type=Path, help="the YAML file of the run")
    command.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES)
    command.add_argument("--row", type=int, default=0, help="number of the row that is shown")
    command.set_defaults(run_command=_data)

    command = commands.add_parser("eval", help="evaluate a trained folder")
    command.add_argument("folder", type=Path, help="the output folder of a run, or a download")
    command.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES)
    command.set_defaults(run_command=_eval)

    command = commands.add_parser("compare", help="compare finished runs")
    command.add_argument(
        "folders", nargs="+", type=Path, metavar="RUN", help="output folders of runs"
    )
    command.add_argument("--figure", type=Path, help="where to draw the comparison")
    command.set_defaults(run_command=_compare)

    command = commands.add_parser("push", help="publish a run on the Hub")
    command.add_argument("folder", type=Path, metavar="RUN", help="its output folder or checkpoint")
    command.add_argument("--repo-id", required=True, metavar="OWNER/NAME", help="the repo")
    command.add_argument(
        "--form",
        choices=["full", "head", "peft"],
        default="full",
        help="the whole model; what was trained, completed from the base on loading; an adapter",
    )
    command.add_argument("--private", action="store_true", help="if the repo is made")
    command.add_argument("--revision", help="a branch; default: main")
    command.add_argument("--force", action="store_true", help="replace a model of another kind")
    command.set_defaults(run_command=_push)

    command = commands.add_parser("export", help="write a head that other engines know")
    command.add_argument("folder", type=Path, metavar="RUN", help="the output folder of a run")
    command.add_argument("--to", choices=["linear"], default="linear", help="the kind of head")
    command.add_argument("--output", type=Path, help="a new folder; default: RUN-linear")
    command.set_defaults(run_command=_export)
    return parser


def _train(options: argparse.Namespace) -> None:
    run = load_run_config(options.config, options.overrides)
    dry_run(run) if options.dry_run else train(run)


def _data(options: argparse.Namespace) -> None:
    show_data(load_run_config(options.config, options.overrides), row=options.row)


def _eval(options: argparse.Namespace) -> None:
    evaluate_folder(options.folder, options.overrides)


def _compare(options: argparse.Namespace) -> None:
    paths = [folder / "results" / "train.json" for folder in options.folders]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"compare: expected a finished run, got no {path}")
    compare_runs([read_results(path) for path in paths], options.figure)


def _push(options: argparse.Namespace) -> None:
    to = Destination(
        repo_id=options.repo_id,
        form=options.form,
        private=options.private,
        revision=options.revision,
        force=options.force,
    )
    sys.stdout.write(f"{push(options.folder, to)}\n")


def _export(options: argparse.Namespace) -> None:
    folder = options.folder.resolve()
    target = options.output or folder.with_name(f"{folder.name}-{options.to}")
    sys.stdout.write(f"{export_linear(folder, target)}\n")
