"""What the commands of `harmonic-sft` do; each imports what it needs when it runs."""

import argparse
import atexit
import errno
import gc
import logging
import os
import signal
import sys
import tempfile
import traceback
from glob import glob
from itertools import islice
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from tqdm import tqdm
from transformers.utils import logging as transformers_logging

if TYPE_CHECKING:
    from harmonic_sft.training.run_config import RunConfig

logger = logging.getLogger(__name__)
DRIVE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
ONE_PROCESS = ("eval", "verify", "explain", "push", "export")  # commands for one process
NUM_HELD_OUT = 64  # documents, for a run without a file


def run_command(options: argparse.Namespace) -> int:
    """Run the command that `harmonic_sft_cli` has read, and return its exit status.

    The status is 0, or 1 after an error, which is printed in one line, or a traceback with --debug.
    """
    if gc.get_freeze_count() < 1000:  # Python 3.12 starts with some hundred
        gc.freeze()  # or the collector searches all imports again and again
        if "triton" in sys.modules:
            atexit.register(gc.unfreeze)  # or triton 3.9 prints a page about leaks at the end
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    rank = os.environ.get("RANK", "0")
    logging.getLogger("harmonic_sft").setLevel(logging.INFO if rank == "0" else logging.WARNING)
    transformers_logging.set_verbosity_warning()
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own
    try:
        _run(options)
    except Exception as error:
        from harmonic_sft.results import without_secrets

        if options.debug:
            sys.stderr.write(without_secrets(traceback.format_exc()))
            return 1
        where = f" in process {rank}" if rank != "0" else ""
        try:
            message = str(error) if _is_ours(error) else _unforeseen(error, options, rank)
        except Exception:  # torch's signal handler may report a dead worker at any line
            message = _unforeseen(error, options, rank)
        sys.stdout.flush()  # earlier tables stand before the error
        sys.stderr.write(f"error{where}: {without_secrets(message)}\n")
        return 1
    return 0


def _run(options: argparse.Namespace) -> None:
    """Run a command, and close progress bars, so that none is drawn after the last line."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1 and options.command in ONE_PROCESS:
        raise ValueError(
            f"{options.command}: expected one process, got {processes}. Start it without torchrun "
            "and accelerate launch"
        )
    if processes == 1:  # so that temporary folders are removed
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        COMMANDS[options.command](options)
    finally:
        for bar in list(tqdm._instances):  # of transformers, which leaves them open after an error
            bar.close()


def _is_ours(error: Exception) -> bool:
    """Whether an error is meant for the user; others come from libraries, machines or bugs."""
    if isinstance(error, ValueError):
        return True
    if isinstance(error, OSError):
        return error.errno not in DRIVE_ERRORS
    from harmonic_sft.hub import PushError
    from harmonic_sft.training.callbacks import StoppedError

    return isinstance(error, PushError | StoppedError)


def _unforeseen(error: Exception, options: argparse.Namespace, rank: str) -> str:
    """Return one line about an error, and write where it comes from into a file.

    The file is `error.txt` in the folder of the run, or a temporary one if there is no run yet.
    """
    from harmonic_sft.results import without_secrets

    text = str(error).strip() or "no message"
    parts = [f"{type(error).__name__}: {text.splitlines()[0].rstrip('.')}."]
    folder = None
    if "folder" in options and (options.folder / "run.yaml").is_file():
        folder = options.folder
        if isinstance(error, UnpicklingError):
            parts = [
                "A checkpoint holds code, which is never run, or was written under another major "
                "version of NumPy. Restore it, use that version, or delete it."
            ]
        elif options.command == "train":
            parts.append("Checkpoints that were saved are whole; add resume=true to continue.")
    try:
        folder = folder or Path(tempfile.mkdtemp(prefix="harmonic-sft-"))
        path = folder / ("error.txt" if rank == "0" else f"error-{rank}.txt")
        text = without_secrets("".join(traceback.format_exception(error)))
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError:
        parts.append("--debug shows where it comes from")
    else:
        parts.append(f"The traceback is in {path}")
    return " ".join(parts)


def _train(options: argparse.Namespace) -> None:
    from harmonic_sft.config import apply_overrides, parse
    from harmonic_sft.training.run_config import RunConfig, for_inner_head, load_run_config

    if options.config is None:
        data = _run_of_flags(options)
        words = for_inner_head(options.overrides, data["head"])
        run = parse(RunConfig, apply_overrides(data, words))
    else:
        run = load_run_config(options.config, options.overrides, head=options.head)
    # Imported here because it takes seconds: a mistyped key has been reported by now.
    if options.dry_run:
        from harmonic_sft.training.preview import dry_run

        dry_run(run)
    else:
        from harmonic_sft.training.run import train

        if options.config is not None:
            _make_base(run, options)
        options.folder = run.output_dir
        train(run)


def _make_base(run: "RunConfig", options: argparse.Namespace) -> None:
    """Train the base of a shipped configuration first, if another shipped one makes it."""
    from harmonic_sft.training.output_folder import check_output_folder
    from harmonic_sft.training.run import train
    from harmonic_sft.training.run_config import load_run_config

    base, shipped = Path(run.model.base), options.shipped
    if base.parent != Path("runs") or base.name not in shipped or (base / "config.json").is_file():
        return
    check_output_folder(run)  # now, not after the minutes that the base takes
    logger.info("The base %s does not exist yet. The shipped %s makes it first.", base, base.name)
    base_run = load_run_config(shipped[base.name], ["resume=true"] if base.exists() else [])
    options.folder = base_run.output_dir
    train(base_run)


def _run_of_flags(options: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration for --model and --dataset: the NeoBERT recipe."""
    from harmonic_sft.config import apply_overrides
    from harmonic_sft.models import max_positions
    from harmonic_sft.models.bases import check_supported, has_transform
    from harmonic_sft.models.heads import behind_transform
    from harmonic_sft.training.loading import load_base_config
    from harmonic_sft.training.run_config import CLASSIFICATION, ModelConfig, fill_recipe
    from harmonic_sft.training.tasks import MODELS, task_of

    model = apply_overrides({"model": {"base": options.model}}, options.overrides)["model"]
    if not isinstance(model, dict) or not isinstance(model.get("base"), str):
        raise ValueError(f"model: expected a base beside --model, got {model!r}. Leave it out")
    config = load_base_config(ModelConfig(base=model["base"], revision=model.get("revision")))
    check_supported(options.model, config, is_causal=True)  # accept bases of any task
    task = options.task or model.get("task")
    try:
        task = task or task_of(options.model, config, None)
    except ValueError as error:
        raise ValueError(
            f"--task: expected one of {list(MODELS)}, got nothing, and a {config.model_type} with "
            f"architectures {config.architectures} does not say which"
        ) from error
    name = options.head or "dist"
    is_trained = task == "masked_lm" and not model.get("from_scratch")
    has_layers = is_trained and has_transform(config, config.architectures)
    head = behind_transform(name) if has_layers else name
    base = options.model.rstrip("/").split("/")[-1].removeprefix("package:")
    data = {
        "sources": [{"path": options.dataset}],
        "context_length": min(512, max_positions(config.get_text_config())),
        "eval": {"documents": _num_held_out(options.dataset)},
    }
    if task in CLASSIFICATION:
        data["label_column"] = "label" if task == "sequence_classification" else "labels"
    return fill_recipe(
        {
            "model": {"base": options.model, "task": task},
            "head": head,
            "data": data,
            "training": {
                "output_dir": f"runs/{base}-{name}" if options.output is None else options.output,
                "num_train_epochs": 1.0,
            },
        }
    )


def _num_held_out(dataset: str) -> int:
    """Return 64, or a tenth of the rows of a small local data set."""
    from harmonic_sft.data.sections import Source
    from harmonic_sft.data.sources import load_documents

    path = os.path.expanduser(dataset)
    if not os.path.exists(path) and not glob(path, recursive=True):
        return NUM_HELD_OUT
    try:
        rows, _ = load_documents(Source(path=dataset), name="--dataset", skip=True)
    except ValueError:  # the run reads it with all its settings, and says what is wrong
        return NUM_HELD_OUT
    return max(1, sum(1 for _ in islice(rows, 10 * NUM_HELD_OUT)) // 10)


def _data(options: argparse.Namespace) -> None:
    from harmonic_sft.training.run_config import load_run_config

    run = load_run_config(options.config, options.overrides)
    from harmonic_sft.training.preview import show_data

    show_data(run)


def _verify(options: argparse.Namespace) -> None:
    from harmonic_sft.training.run_config import load_run_config

    run = load_run_config(options.config, options.overrides)
    from harmonic_sft.training.verify import verify

    verify(run)


def _config(options: argparse.Namespace) -> None:
    from harmonic_sft.training.key_help import explain

    sys.stdout.write(f"{explain(options.key)}\n")


def _eval(options: argparse.Namespace) -> None:
    from harmonic_sft.training.evaluation import evaluate_folder, evaluate_suite

    suite_options = (options.suite, options.against, options.data, options.ruler, options.html)
    if not any(suite_options):
        evaluate_folder(options.folder, options.overrides, options.per_document)
        return
    if options.per_document is not None:
        raise ValueError("--per-document: expected no suite beside it. Run `eval` without --suite")
    evaluate_suite(
        [options.folder, *options.against],
        options.overrides,
        size=options.suite or "quick",
        sets=options.data,
        ruler=options.ruler,
        html=options.html,
    )


def _explain(options: argparse.Namespace) -> None:
    from harmonic_sft.training.evaluation import explain_folder

    explain_folder(options.folder, options.text, top=options.top)


def _compare(options: argparse.Namespace) -> None:
    from harmonic_sft.results import read_results
    from harmonic_sft.training.report import compare_runs, names_of

    figure = options.figure
    if figure is not None and figure.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(
            f"--figure: expected a name that ends in .png, .svg or .pdf, got {str(figure)!r}"
        )
    paths = [folder / "results" / "train.json" for folder in options.folders]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"compare: expected a finished run, got no {path}")
    named = zip(names_of(options.folders), paths, strict=True)
    keys = ("config", "steps", "before", "final")
    runs = [{**read_results(path, *keys), "run": name} for name, path in named]
    compare_runs(runs, figure)


def _push(options: argparse.Namespace) -> None:
    from harmonic_sft.hub import Destination, push

    to = Destination(
        repo_id=options.repo_id,
        form=options.form,
        private=options.private,
        revision=options.revision,
        force=options.force,
        message=options.message,
        license=options.license,
    )
    sys.stdout.write(f"{push(options.folder, to)}\n")


def _export(options: argparse.Namespace) -> None:
    from harmonic_sft.hub import export_linear

    folder = options.folder.resolve()
    target = options.output or folder.with_name(f"{folder.name}-{options.to}")
    sys.stdout.write(f"{export_linear(folder, target)}\n")
    logger.info("Its README.md says what is kept of the model.")


COMMANDS = {
    "train": _train,
    "config": _config,
    "data": _data,
    "eval": _eval,
    "verify": _verify,
    "explain": _explain,
    "compare": _compare,
    "push": _push,
    "export": _export,
}
