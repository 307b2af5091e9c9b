"""The command `harmonic-sft`: its arguments, read before the package and PyTorch are imported."""

import argparse
import ctypes
import difflib
import errno
import io
import os
import platform
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import metadata
from pathlib import Path
from typing import Any

INTERRUPTED = 130  # what shells report for Ctrl-C
PR_SET_PDEATHSIG = 1  # of Linux's prctl
OVERRIDES = "key=value pairs that replace values of the file, such as training.max_steps=10"
EXAMPLES = {
    "": """
        harmonic-sft init                          list the shipped configurations
        harmonic-sft train demo                    train one of them
        harmonic-sft train --model roberta-base --dataset my.txt
        harmonic-sft COMMAND --help                options and examples of one command
    """,
    "train": """
        harmonic-sft train demo
        harmonic-sft train my.yaml training.max_steps=100 h_exp=-24.0
        harmonic-sft train my.yaml --dry-run
        harmonic-sft train my.yaml resume=true
        harmonic-sft train --model roberta-base --dataset my.txt h_exp=-24.0
        harmonic-sft train --model roberta-base --dataset my.txt --head linear
    """,
    "init": """
        harmonic-sft init
        harmonic-sft init neobert > my.yaml
    """,
    "config": """
        harmonic-sft config
        harmonic-sft config data.mask
        harmonic-sft config head.dist
        harmonic-sft config training.learning_rate
    """,
    "data": """
        harmonic-sft data my.yaml
        harmonic-sft data my.yaml data.packing=true
    """,
    "eval": """
        harmonic-sft eval runs/mine
        harmonic-sft eval runs/mine data=other.txt
        harmonic-sft eval runs/mine data=other.txt --per-document losses.jsonl
        harmonic-sft eval runs/mine --against runs/other --html report.html
        harmonic-sft eval runs/mine --suite full --data sets
    """,
    "explain": """
        harmonic-sft explain runs/mine "The capital of [MASK] is Paris."
        harmonic-sft explain runs/my_decoder "Once upon a"
    """,
    "compare": """
        harmonic-sft compare runs/demo runs/demo_linear
        harmonic-sft compare runs/demo runs/demo_linear --figure comparison.png
    """,
    "verify": """
        harmonic-sft verify my.yaml
        harmonic-sft verify my.yaml training.use_cpu=true
    """,
    "push": """
        harmonic-sft push runs/mine --repo-id me/mine
        harmonic-sft push runs/mine --repo-id me/mine --form head --private
    """,
    "export": """
        harmonic-sft export runs/mine --output mine-linear
    """,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    The status is 0, or 1 after an error, which is printed in one line, or 130 after Ctrl-C. A run
    that a SIGTERM ended exits with 143.
    """
    with redirect_stdout(LastingStream(sys.stdout)), redirect_stderr(LastingStream(sys.stderr)):
        try:
            try:
                return _main(arguments)
            finally:
                sys.stdout.flush()  # an error of Python's own flush at exit could not be caught
        except OSError as error:  # such as a full disk under a log
            sys.stderr.write(f"error: {error}\n")
            return 1


class LastingStream:
    """A stream that drops text once its reader is gone, and escapes letters that it cannot encode.

    So a run survives its terminal, `tee` or `head`, also where a SIGTERM to a whole job ends them.
    """

    def __init__(self, stream: Any):
        # `sys.stdout` is None if it was closed before the program began.
        self._stream = stream or Path(os.devnull).open("w")  # noqa: SIM115 - until the end
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or drop the text."""
        return self._try(self._stream.write, text)

    def flush(self) -> None:
        """Flush, or drop what was to be flushed."""
        self._try(self._stream.flush)

    def _try(self, call: Callable[..., Any], *arguments: str) -> Any:
        try:
            return call(*arguments)
        except OSError as error:
            # Otherwise Python would flush again at exit, and print the error that it ignores.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if error.errno not in (errno.EPIPE, errno.EIO):  # a pipe or a terminal is gone
                raise


def _main(arguments: Sequence[str] | None) -> int:
    options, rest = _parser().parse_known_args(arguments)
    _take_overrides(options, rest)
    try:
        if options.command == "init":
            return _init(options.name)
        if options.command == "train":
            _end_with_launcher()
            _check_flags(options)
        if "config" in options and options.config is not None:
            options.config, options.shipped = _find_config(options.config)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    os.environ.setdefault("TQDM_DELAY", "1")  # no bar for the first second
    try:
        from harmonic_sft.cli import run_command

        return run_command(options)
    except KeyboardInterrupt:
        sys.stderr.write(f"\nInterrupted.{_saved(options)}\n")
        return INTERRUPTED


def _saved(options: argparse.Namespace) -> str:
    """Say whether an interrupted training can be resumed."""
    if options.command != "train":
        return ""
    is_saved = "folder" in options and any(options.folder.glob("checkpoint-*"))
    return " Add resume=true to continue." if is_saved else " Nothing was saved."


def _end_with_launcher() -> None:
    """Get a SIGTERM when `accelerate launch` ends: it passes none on to a single process."""
    if "ACCELERATE_MIXED_PRECISION" in os.environ and sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def configurations() -> dict[str, Path]:
    """Return the run files that come with the package by name, such as `causal/small_gpt`."""
    here = Path(__file__).parent
    installed = here / "harmonic_sft" / "configs"
    folder = installed if installed.is_dir() else here / "configs"  # of a clone
    paths = [path.relative_to(folder) for path in sorted(folder.rglob("*.yaml"))]
    runs = [path for path in paths if path.parts[0] != "accelerate"]
    return {path.with_suffix("").as_posix(): folder / path for path in runs}


def _check_flags(options: argparse.Namespace) -> None:
    """Check that there is a file or a model with data; the file's place may hold an override."""
    if options.model is None and options.dataset is None:
        if options.config is None:
            options.parser.error("expected a file, or --model and --dataset, got neither")
        for flag in ("task", "output"):
            if vars(options)[flag] is not None:
                options.parser.error(f"expected --{flag} beside --model, got it beside a file")
        return
    if options.model is None or options.dataset is None:
        options.parser.error("expected --model and --dataset together, got one of them")
    if options.config is not None and "=" not in options.config:
        options.parser.error(f"expected a file or --model, got both: {options.config}")
    if options.config is not None:
        options.overrides.insert(0, options.config)
        options.config = None


def _find_config(word: str) -> tuple[Path, dict[str, Path]]:
    """Return the file that a word names; for a shipped configuration also all shipped ones."""
    if os.path.isfile(word) or Path(word).suffix:  # isfile takes names of any length
        return Path(word), {}
    shipped = configurations()
    return _shipped(word, shipped), shipped


def _shipped(name: str, shipped: dict[str, Path]) -> Path:
    if name not in shipped:
        nearest = difflib.get_close_matches(name, shipped, 1)
        hint = f"Did you mean {nearest[0]!r}?" if nearest else "`harmonic-sft init` lists them"
        raise ValueError(
            f"config file: expected a file or a shipped configuration, got {name!r}. {hint}"
        )
    return shipped[name]


def _init(name: str | None) -> int:
    """Print a shipped configuration, or a list of all."""
    shipped = configurations()
    if name is not None:
        sys.stdout.write(_shipped(name, shipped).read_text(encoding="utf-8"))
        return 0
    width = 2 + max(map(len, shipped))
    lines = []
    for known, path in shipped.items():
        purpose = path.read_text(encoding="utf-8").split("\n")[0].removeprefix("# ")
        line = f"{known:{width}}{purpose}"
        lines.append(textwrap.fill(line, 80, subsequent_indent=" " * width))
    lines += ["", "Print one:  harmonic-sft init NAME > my.yaml"]
    lines += ["Train one:  harmonic-sft train NAME", ""]
    sys.stdout.write("\n".join(lines))
    return 0


def _take_overrides(options: argparse.Namespace, rest: Sequence[str]) -> None:
    """Add the key=value pairs that stand after an option to the overrides; refuse other words.

    From Python 3.13 on argparse has put both into `overrides` already.
    """
    if against := vars(options).get("against"):  # argparse gives --against all words that follow
        rest = [*(word for word in against if "=" in word), *rest]
        options.against = [Path(word) for word in against if "=" not in word]
    words = [*vars(options).get("overrides", ()), *rest]
    unknown = [word for word in words if word.startswith("-") or "=" not in word]
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest and "overrides" not in options:
        options.parser.error(f"expected no key=value pairs, got {' '.join(rest)}")
    if rest:
        options.overrides += rest


def _version() -> str:
    """Return what a bug report needs: this package, Python, PyTorch and transformers."""
    versions = []
    for package in ("harmonic-sft", "torch", "transformers"):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{package} (not installed)")
    return f"{versions[0]} ({', '.join(versions[1:])}, Python {platform.python_version()})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="harmonic-sft",
        description="Fine-tune models with a geometry-aware output head.",
        epilog=_examples(""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = _command(
        commands, "train", "train the model of a YAML file, or of --model and --dataset"
    )
    _add_config(command, nargs="?")
    _add_flags(command)
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="print the configuration, the parameters and the memory they need, and train nothing",
    )

    command = _command(commands, "init", "list or print the configurations that are shipped")
    command.add_argument("name", nargs="?", metavar="NAME", help="which one to print")

    command = _command(commands, "config", "explain the keys of a configuration")
    command.add_argument("key", nargs="?", metavar="KEY", help="a key, a section, or a name in it")

    command = _command(commands, "data", "show the data of a run without loading its model")
    _add_config(command)

    command = _command(commands, "eval", "evaluate a trained model")
    command.add_argument("folder", type=Path, help="the output folder of a run, or a download")
    command.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="data=PATH scores all of other data; more key=value pairs replace values of the run",
    )
    command.add_argument(
        "--per-document",
        type=Path,
        metavar="FILE",
        help="also write the loss of every document, one line of JSON each",
    )
    command.add_argument(
        "--suite",
        choices=["quick", "full"],
        help="measure language, calibration, geometry, hidden states and robustness",
    )
    command.add_argument(
        "--against",
        nargs="+",
        default=[],
        metavar="OTHER",
        help="models that the suite compares it with, on the same held-out data",
    )
    command.add_argument("--data", type=Path, metavar="FOLDER", help="the sets of the suite")
    command.add_argument(
        "--ruler",
        metavar="ENCODER",
        help="a sentence encoder, a name or a folder, that judges how near in meaning wrong "
        "predictions are",
    )
    command.add_argument("--html", type=Path, metavar="FILE", help="also write a report")

    command = _command(commands, "explain", "show what a language model predicts, and how near")
    command.add_argument("folder", type=Path, help="the output folder of a run, or a download")
    command.add_argument("text", help="with a mask token; of a decoder, what is to be continued")
    command.add_argument("--top", type=int, default=5, help="how many tokens; default: 5")

    command = _command(commands, "compare", "compare finished runs in one table")
    command.add_argument(
        "folders", nargs="+", type=Path, metavar="RUN", help="the output folder of a finished run"
    )
    command.add_argument("--figure", type=Path, help="also draw the comparison into this file")

    command = _command(commands, "verify", "compare ways of training that have to agree")
    _add_config(command)

    _add_push(_command(commands, "push", "publish a run on the Hub"))

    command = _command(commands, "export", "convert a head to one that other engines know")
    command.add_argument("folder", type=Path, metavar="RUN", help="the output folder of a run")
    command.add_argument("--to", choices=["linear"], default="linear", help="the kind of head")
    command.add_argument("--output", type=Path, help="a new folder; default: RUN-linear")
    return parser


def _command(commands: argparse._SubParsersAction, name: str, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=_examples(name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--debug", action="store_true", help="show where an error comes from")
    command.set_defaults(parser=command)
    return command


def _examples(name: str) -> str:
    return f"examples:\n{textwrap.indent(textwrap.dedent(EXAMPLES[name]).strip(), '  ')}"


def _add_config(command: argparse.ArgumentParser, nargs: str | None = None) -> None:
    command.add_argument(
        "config", nargs=nargs, help="the YAML file of the run, or the name of a shipped one"
    )
    command.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES)


def _add_flags(command: argparse.ArgumentParser) -> None:
    flags = command.add_argument_group(
        "without a file",
        "The NeoBERT recipe on any model and data; key=value pairs change it.",
    )
    flags.add_argument("--model", metavar="NAME", help="the base: a name on the Hub, or a folder")
    flags.add_argument(
        "--dataset",
        metavar="NAME_OR_PATH",
        help="a file, a glob, or a data set on the Hub; 64 documents are held out, of a small "
        "local one a tenth (data.eval.documents)",
    )
    flags.add_argument(
        "--head",
        metavar="NAME",
        help="the output head, with its loss; default: dist. Of a file it replaces head and loss",
    )
    flags.add_argument(
        "--task", help="what the model predicts, as in model.task; default: what the base does"
    )
    flags.add_argument("--output", metavar="DIR", help="default: runs/NAME-HEAD")


def _add_push(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", type=Path, metavar="RUN", help="an output folder or checkpoint")
    command.add_argument("--repo-id", required=True, metavar="OWNER/NAME", help="the repository")
    command.add_argument(
        "--form",
        choices=["full", "head", "peft"],
        default="full",
        help="full: the whole model; head: the parameters that were trained, completed from the "
        "base when the model is loaded; peft: the adapter of a LoRA run. Default: full",
    )
    command.add_argument(
        "--private", action="store_true", help="make the repository private if it is new"
    )
    command.add_argument("--license", help="of the weights, for the card; default: the base's")
    command.add_argument("--message", help="of the commit; default: form and step")
    command.add_argument("--revision", help="the branch to push to; default: main")
    command.add_argument(
        "--force", action="store_true", help="replace a model of another kind in the repository"
    )


if __name__ == "__main__":
    sys.exit(main())
