"""The command `harmonic-sft`: its arguments, read before the package and PyTorch are imported."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

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
    if rest:
        _take_overrides(parser, options, rest)
    try:
        from harmonic_sft.cli import run_command

        return run_command(options)
    except KeyboardInterrupt:
        resume = " Add resume=true to continue." if options.command == "train" else ""
        sys.stderr.write(f"\nInterrupted.{resume}\n")
        return INTERRUPTED


def _take_overrides(
    parser: argparse.ArgumentParser, options: argparse.Namespace, rest: Sequence[str]
) -> None:
    """Take key=value pairs that stand after an option, where the command takes any."""
    if any(word.startswith("-") or "=" not in word for word in rest):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if "overrides" not in options:
        parser.error(f"{options.command}: expected no key=value pairs, got {' '.join(rest)}")
    options.overrides += rest


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="harmonic-sft", description="Fine-tune models with a geometry-aware output head."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser("train", help="train the model that a YAML file describes")
    _add_config(command)
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="print the configuration, the parameters and the memory they need, and train nothing",
    )

    command = commands.add_parser("data", help="show the data of a run without loading its model")
    _add_config(command)
    command.add_argument("--row", type=int, default=0, help="which row to print; default: 0")

    command = commands.add_parser("eval", help="evaluate a trained model")
    command.add_argument("folder", type=Path, help="the output folder of a run, or a download")
    command.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES)

    command = commands.add_parser("compare", help="compare finished runs in one table")
    command.add_argument(
        "folders", nargs="+", type=Path, metavar="RUN", help="the output folder of a finished run"
    )
    command.add_argument("--figure", type=Path, help="also draw the comparison into this file")

    command = commands.add_parser("push", help="publish a run on the Hub")
    command.add_argument("folder", type=Path, metavar="RUN", help="an output folder or checkpoint")
    command.add_argument("--repo-id", required=True, metavar="OWNER/NAME", help="the repository")
    command.add_argument(
        "--form",
        choices=["full", "head", "peft"],
        default="full",
        help="full: the whole model; head: the parameters that were trained, completed from the "
        "base when the model is loaded; peft: an adapter. Default: full",
    )
    command.add_argument(
        "--private", action="store_true", help="make the repository private if it is new"
    )
    command.add_argument("--revision", help="the branch to push to; default: main")
    command.add_argument(
        "--force", action="store_true", help="replace a model of another kind in the repository"
    )

    command = commands.add_parser("export", help="convert a head to one that other engines know")
    command.add_argument("folder", type=Path, metavar="RUN", help="the output folder of a run")
    command.add_argument("--to", choices=["linear"], default="linear", help="the kind of head")
    command.add_argument("--output", type=Path, help="a new folder; default: RUN-linear")
    return parser


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", type=Path, help="the YAML file of the run")
    command.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES)


if __name__ == "__main__":
    sys.exit(main())
