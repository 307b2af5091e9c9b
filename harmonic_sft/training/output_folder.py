"""The output folder of a run: it belongs to one run, which alone may continue in it."""

import fcntl
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from harmonic_sft.config import parse, to_plain, to_yaml
from harmonic_sft.hub.run_folder import RUN_FILE, check_saved, read_run_file
from harmonic_sft.losses import DistillLoss, InfoNCELoss, SumLoss
from harmonic_sft.results import (
    leaves,
    read_results,
    read_whole,
    without_secrets,
    write_whole,
)
from harmonic_sft.training.arguments import TOP, TRAIN_NAME
from harmonic_sft.training.checkpoints import (
    all_checkpoints,
    last_checkpoint,
    read_manifest,
    was_saved,
)
from harmonic_sft.training.run_config import RunConfig

logger = logging.getLogger(__name__)
RESULTS_NAME = "train"
SYNC_SECONDS = 60.0  # until a network drive shows what another node wrote
LOCK_SECONDS = 10.0  # until a process that is ending has unlocked its folder
_locks: set[int] = set()  # folders that this process has locked
DRAFT = f".{RUN_FILE}.[0-9]*"  # left by a process that was killed while writing
# What a run may write before its first checkpoint; the last three say why it ended.
EARLY_FILES = (
    RUN_FILE,
    DRAFT,
    "results",
    "runs",  # of TensorBoard
    "error.txt",
    "error-[0-9]*.txt",
    "bad_step_[0-9]*.json",
)
MAX_STEPS = "training.max_steps"
ROWS, ACCUMULATION = "training.per_device_train_batch_size", "training.gradient_accumulation_steps"
# Keys that a resumed run may change: they alter what is shown or sent, not what is trained.
FREE_KEYS = (
    "resume",
    "neighbors",
    "hub.",
    "oom_fallback",
    "save",
    "skip_bad_steps",
    "check_base",
    "training.dataloader_num_workers",
    "training.dataloader_prefetch_factor",
    "training.per_device_eval_batch_size",
    "training.logging_",
    "training.report_to",
    "training.disable_tqdm",
    "training.enable_jit_checkpoint",
    "training.output_dir",
    "training.save_total_limit",
)
# Keys that may change after a trainer was made; the last ones say when it evaluates and saves.
LATER_KEYS = (*FREE_KEYS, "training.eval_", "training.log", "training.run_name", "training.save_")


def check_output_folder(run: RunConfig) -> None:
    """Make sure that the folder is empty, or holds this very run if it is to be resumed.

    A run that ended before its first checkpoint may be overwritten.
    """
    folder = run.output_dir
    existing = next(
        path for path in (folder, *folder.parents) if path.exists() or path.is_symlink()
    )
    if not existing.is_dir():
        raise ValueError(f"training.output_dir: expected a folder, got the file {str(existing)!r}")
    if not folder.exists() or all(path.match(DRAFT) for path in folder.iterdir()):
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ValueError(
                f"training.output_dir: expected a folder that you may write, got {str(folder)!r}. "
                f"You may not write {str(existing)!r}"
            )
        return
    if not (folder / RUN_FILE).is_file():
        raise ValueError(
            f"training.output_dir: expected an empty folder, got {str(folder)!r}, which holds "
            "other files. Choose another one"
        )
    if not run.resume:
        if _is_abandoned(folder):
            return
        raise holds_a_run(folder)
    old = _run_in(folder)
    different = changed_keys(to_plain(old), run)
    checkpoint = last_checkpoint(folder) if _batch_keys(run) & set(different) else None
    # Batch sizes may differ: the trainer compares rows per step, or nothing was trained yet.
    if (checkpoint is not None and read_manifest(checkpoint)) or _is_abandoned(folder):
        different = [key for key in different if key not in _batch_keys(run)]
    is_longer = different == [MAX_STEPS]
    if is_longer and (last_step := _last_step(old, folder)) < run.training.get("max_steps", -1):
        _check_longer(run, last_step)
    elif different:
        is_file = old.data.sources[0].path != TRAIN_NAME  # false if Python gave the rows
        how = f", `harmonic-sft train {folder / RUN_FILE} resume=true`" if is_file else ""
        raise ValueError(
            f"resume: expected the settings of the run in {str(folder)!r}, got other values for "
            f"{_with_values(old, different)}. Use the old ones{how}, or choose another "
            "training.output_dir"
        )


def holds_a_run(folder: Path) -> ValueError:
    """Return the error of a run that would be overwritten."""
    return ValueError(
        f"training.output_dir: expected an empty folder, got {str(folder)!r}, which holds a run. "
        "Add resume=true to continue it, in Python train(resume_from_checkpoint=True), or choose "
        "another one"
    )


def check_same_arguments(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Refuse arguments that were changed after the trainer was made with them."""
    for name, value in new.items():
        key = name if name in TOP else f"training.{name}"
        if value != old[name] and not key.startswith(LATER_KEYS):
            raise ValueError(
                f"args.{name}: expected {old[name]!r}, with which the trainer was made, got "
                f"{value!r}. Make another trainer"
            )


def check_same_settings(checkpoint: Path, run: RunConfig) -> None:
    """Refuse a checkpoint of another run with other settings: its optimizer keeps the old ones."""
    home = checkpoint.resolve().parent
    if home == run.output_dir.resolve() or not (home / RUN_FILE).is_file():
        return
    free = (MAX_STEPS, "training.num_train_epochs", *_batch_keys(run))
    old = _run_in(home)
    different = [key for key in changed_keys(to_plain(old), run) if key not in free]
    if different:
        raise ValueError(
            f"resume_from_checkpoint: expected the settings of the run in {str(home)!r}, got other "
            f"values for {_with_values(old, different)}. Use the old ones, or give the checkpoint "
            "as the model of a new run"
        )


def _with_values(old: RunConfig, different: Collection[str]) -> str:
    """Name settings with their values in an old run; if the head differs, add the whole old one."""
    values = leaves(without_secrets(to_plain(old)))
    shown = [f"{key} (then {values[key]!r})" if key in values else key for key in different]
    return ", ".join(shown) + (
        f". Its head was {old.head_settings()}" if "head.name" in different else ""
    )


def read_run(folder: Path) -> dict[str, Any]:
    """Return what `run.yaml` in the folder of a run says, as this version would write it.

    In files without `data.eval.seed`, `training.seed` chose the held-out documents and is used.
    """
    saved = read_run_file(folder)
    section = {"seed": saved["training"].get("seed", 42), **(saved["data"].get("eval") or {})}
    gone = ("dataloader_persistent_workers", "ignore_data_skip")  # these must be false now
    training = {k: value for k, value in saved["training"].items() if not value or k not in gone}
    return {**saved, "data": {**saved["data"], "eval": section}, "training": training}


def _run_in(folder: Path) -> RunConfig:
    """Return the configuration of the run in a folder."""
    saved = read_run(folder)
    try:
        return parse(RunConfig, saved)
    except ValueError as error:
        path = folder / RUN_FILE
        raise ValueError(
            f"{path}: expected a run that this version can continue, got a file that is damaged or "
            "has what is refused now. Restore it as the run wrote it, or choose another "
            f"training.output_dir\n{error}"
        ) from error


def _last_step(run: RunConfig, folder: Path) -> int:
    """Return the last optimizer step of a run; -1 for a run by epochs that has not ended."""
    max_steps = run.training.get("max_steps", -1)
    results = read_whole(results_path(folder), "steps") or {"steps": max_steps}
    return max(results["steps"], max_steps)


def _check_longer(run: RunConfig, last_step: int) -> None:
    """Refuse more steps for a run whose training so far depended on their number."""
    max_steps, schedule = run.training["max_steps"], run.schedule
    kind = str(run.training.get("lr_scheduler_type"))
    given = 0 if kind == "constant" else run.training.get("warmup_steps", 0)
    # As in TrainingArguments; making an instance here would reset the state of accelerate.
    warmup = int(given) if given >= 1 else math.ceil(max_steps * given)
    if schedule is not None and not warmup:
        warmup, _ = schedule.phase_steps(max_steps)
    obstacles = {
        "an annealed h_exp": run.h_exp is not None and run.h_exp.start != run.h_exp.end,
        "schedule.decay_ratio above 0": schedule is not None and schedule.decay_ratio > 0,
        f"lr_scheduler_type {kind}": schedule is None and not kind.startswith("constant"),
        f"a warmup of {warmup} steps": warmup > last_step,
        "an annealed loss": isinstance(run.loss, DistillLoss),
        "no checkpoint": last_checkpoint(run.output_dir) is None,
    }
    got = [name for name, is_there in obstacles.items() if is_there]
    if got:
        raise ValueError(
            f"resume: expected {last_step} steps as before, or a run that continues the same way "
            f"up to step {max_steps}: h_exp held, schedule.decay_ratio 0. Got {', '.join(got)}. "
            f"Start a new run on this one: model.base={run.output_dir} head.init=base_head"
            f"{'' if run.h_exp is None else f' h_exp={run.h_exp.end:g}'}, with another "
            "training.output_dir"
        )


def _batch_keys(run: RunConfig) -> set[str]:
    """Return the keys that may change as long as the number of rows in a step does not."""
    return {ACCUMULATION} if has_batch_negatives(run) else {ACCUMULATION, ROWS}


def has_batch_negatives(run: RunConfig) -> bool:
    """Whether a loss depends on the micro-batch: InfoNCE's negatives are its other labels."""
    losses = [term.loss for term in run.loss.terms] if isinstance(run.loss, SumLoss) else [run.loss]
    return any(isinstance(loss, InfoNCELoss) for loss in losses)


def changed_keys(old: dict[str, Any], new: RunConfig) -> list[str]:
    """Return the keys in which a run differs from another's settings, as far as training goes.

    Web addresses that differ only in their signatures are equal.
    """
    before, after = (leaves(without_secrets(plain)) for plain in (old, to_plain(new)))
    # A loss function given in Python is not written down, so it cannot be compared.
    free = FREE_KEYS if new.loss is not None else (*FREE_KEYS, "loss")
    return sorted(
        key
        for key in before.keys() | after.keys()
        if before.get(key) != after.get(key) and not key.startswith(free)
    )


def _is_abandoned(folder: Path) -> bool:
    """Whether the run in a folder never completed a checkpoint, so that another may overwrite it.

    Not if the folder has a file that no run writes so early, such as a user's own `run.yaml`.
    """
    checkpoints = all_checkpoints(folder)
    other_paths = {*folder.iterdir()}.difference(checkpoints)
    return (
        not any(map(was_saved, checkpoints))
        and all(any(map(path.match, EARLY_FILES)) for path in other_paths)
        and not results_path(folder).exists()
        and _is_written_by_run(folder / RUN_FILE)
    )


def _is_written_by_run(path: Path) -> bool:
    """Whether a `run.yaml` is as this version writes it: a user's has comments or lacks keys."""
    try:
        return path.read_text(encoding="utf-8") == to_yaml(_run_in(path.parent))
    except ValueError:
        return False


def is_empty(folder: Path) -> bool:
    """Whether a folder is empty or does not exist."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def claim_output_folder(run: RunConfig) -> None:
    """Write the resolved configuration, which marks the locked folder as this run's."""
    path = run.output_dir / RUN_FILE
    if path.exists():
        check_output_folder(run)  # another process may have claimed it since
        if run.resume:
            old = _run_in(run.output_dir)
            different = {*changed_keys(to_plain(old), run)} - _batch_keys(run)
            is_longer = different == {MAX_STEPS}
            has_moved = old.output_dir != run.output_dir
            is_new = is_longer or has_moved or _is_abandoned(run.output_dir)
            if not is_new and old.data == run.data:
                return  # written again for more steps, newly signed addresses, another folder
        else:
            logger.warning(
                "The run in %s ended before its first checkpoint. It starts again.", run.output_dir
            )
    write_whole(path, to_yaml(run))


def check_shared(folder: Path) -> bytes:
    """Make sure that all processes see the folder that the main one has claimed; return the claim.

    Nodes with a folder each could train and save, but not resume.
    """
    state, path = PartialState(), folder / RUN_FILE
    claim = broadcast_object_list([path.read_bytes() if state.is_main_process else None])[0]
    is_visible = _wait_until(lambda: path.is_file() and path.read_bytes() == claim, SYNC_SECONDS)
    elsewhere = gather_object([] if is_visible else [state.process_index])
    if elsewhere:
        raise ValueError(
            f"training.output_dir: expected one folder that all nodes share, got {str(folder)!r}, "
            f"in which processes {elsewhere} do not see the run. Choose one on a drive that every "
            "node has mounted"
        )
    return claim


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition; return whether it came true."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(0.2)
    return True


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Keep other processes from training in a folder; the system unlocks it when this one ends."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    _locks.add(handle)
    try:
        if not _wait_until(lambda: _flock(handle), LOCK_SECONDS):
            raise ValueError(
                f"training.output_dir: expected a folder for one process, got {str(folder)!r}, in "
                "which another one is training. Wait for its end, or choose another folder"
            )
        yield
    finally:
        _close(handle)


def _close(*handles: int) -> None:
    """Close those handles of locked folders that are still open."""
    for handle in _locks.intersection(handles):
        _locks.remove(handle)
        os.close(handle)


# A forked data worker that outlives a killed process would keep the folder locked.
os.register_at_fork(after_in_child=lambda: _close(*_locks))


def _flock(handle: int) -> bool:
    """Lock an open folder; return False if another process holds the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # some network drives have no locks
        logger.warning("The folder cannot be locked (%s): start no second run in it.", error)
    return True


def is_finished(run: RunConfig) -> bool:
    """Whether a folder holds the results of all steps of a run, and its whole model."""
    results = read_whole(results_path(run.output_dir), "steps", "before", "final", "config")
    if results is None:
        return False
    asked = results["config"]["training"].get("max_steps", -1)  # early stopping may take fewer
    if max(results["steps"], asked) < run.training.get("max_steps", -1):
        return False
    try:
        check_saved(run.output_dir)
        read_results(run.output_dir / "config.json")
        tokenizer = read_results(run.output_dir / "tokenizer_config.json")
        if tokenizer.get("backend") == "tokenizers":  # other backends have other files, or none
            read_results(run.output_dir / "tokenizer.json")
    except ValueError as error:
        logger.warning("The model is made again, from the last whole checkpoint. %s", error)
        return False
    return True


def results_path(output_dir: Path) -> Path:
    """Return the path of a run's results."""
    return output_dir / "results" / f"{RESULTS_NAME}.json"
