"""Checkpoints: a manifest with checksums says which are whole, the step says which are old."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from harmonic_sft.losses import neighbor_tables
from harmonic_sft.losses.knn_label_smoothing import NeighborTable
from harmonic_sft.models import HarmonicConfig, HarmonicHeadModel
from harmonic_sft.models.objective import LossFunction
from harmonic_sft.models.partial_checkpoint import RESUME_FILE
from harmonic_sft.results import file_sha256, write_whole

logger = logging.getLogger(__name__)
MANIFEST_NAME = "manifest.json"
STATE_NAME = "trainer_state.json"
LOSS_NAME = "running_loss_{}.json"  # process index
NEIGHBORS_NAME = "neighbors.safetensors"
# What a checkpoint of an earlier version, which has no manifest, holds at least.
NEEDED = ("optimizer.pt", "scheduler.pt", "rng_state*.pth", "model*.safetensors")


def write_manifest(folder: Path, **recorded: int | str | None) -> None:
    """Write the last file of a checkpoint: `recorded`, and the checksums of all other files."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for path in paths:  # on the disk before older checkpoints are deleted
        with path.open("rb") as file:
            os.fsync(file.fileno())
    files = {path.relative_to(folder).as_posix(): file_sha256(path) for path in paths}
    content = {**recorded, "files": files}
    text = json.dumps({**content, "sha256": _sha256_of(content)}, indent=2)
    write_whole(folder / MANIFEST_NAME, text)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's manifest, empty if there is none or if it is damaged."""
    try:
        content = json.loads((folder / MANIFEST_NAME).read_text())
    except (OSError, ValueError):
        return {}
    is_whole = isinstance(content, dict) and content.pop("sha256", "") == _sha256_of(content)
    return content if is_whole else {}


def rows_at_once(args: TrainingArguments) -> int:
    """Return the rows of one micro-batch, of all processes."""
    return args.per_device_train_batch_size * args.world_size


def rows_per_step(args: TrainingArguments) -> int:
    """Return the rows of one optimizer step, of all processes."""
    return rows_at_once(args) * args.gradient_accumulation_steps


def same_accumulation(folder: Path, args: TrainingArguments) -> int:
    """Return the accumulation steps that give an optimizer step as many rows as a checkpoint's."""
    manifest = read_manifest(folder)
    saved = manifest.get("rows_per_step")  # None in a checkpoint of an earlier version
    at_once = rows_at_once(args)
    now = rows_per_step(args)
    if args.dataloader_drop_last and manifest.get("rows_at_once") not in (None, at_once):
        raise ValueError(
            f"resume: expected {manifest['rows_at_once']} rows at once, of all processes, as in "
            f"{str(folder)!r} with dataloader_drop_last, which leaves out what is less, got "
            f"{at_once}. Use the old training.per_device_train_batch_size"
        )
    if saved is None:
        logger.warning("%s does not say how many rows a step had; it has %d now.", folder, now)
    if saved is None or saved == now:
        return args.gradient_accumulation_steps
    shape = f"{args.world_size} processes with {args.per_device_train_batch_size} rows each"
    if saved % at_once:
        raise ValueError(
            f"resume: expected {saved} rows per optimizer step as in {str(folder)!r}, got a "
            f"multiple of {at_once}: {shape}. Start as many processes as before, or set "
            "training.per_device_train_batch_size to what divides these rows"
        )
    logger.warning(
        "%d rows per optimizer step as before: %s accumulate over %d micro-batches. Dropout draws "
        "other numbers than before.",
        saved,
        shape,
        saved // at_once,
    )
    return saved // at_once


def find_damage(folder: Path, *, is_best: bool = False) -> str | None:
    """Return what is wrong with a checkpoint, None if it is as it was saved.

    A checkpoint of this version without a manifest was not saved to its end. Earlier versions wrote
    no manifests: in their checkpoints only missing files are found. A checkpoint without a manifest
    beside others that have one counts as unfinished, unless a later one names it as the best
    (`is_best`).
    """
    if not folder.is_dir():
        return "it is missing"
    if not (folder / MANIFEST_NAME).is_file():
        manifests = folder.parent.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{MANIFEST_NAME}")
        if not was_saved(folder) or (not is_best and any(manifests)):
            return f"it has no {MANIFEST_NAME}, so it was not saved to its end"
        return _find_missing(folder)
    manifest = read_manifest(folder)
    if not manifest:
        return f"its {MANIFEST_NAME} is damaged"
    for name, digest in manifest["files"].items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if file_sha256(folder / name) != digest:
            return f"{name} has changed since it was saved"
    return None


def was_saved(folder: Path) -> bool:
    """Whether a checkpoint was saved to its end, even if it has been damaged since.

    Earlier versions wrote no manifests. Their checkpoints have a trainer state but no running
    losses, which this version writes before the state.
    """
    is_old = (folder / STATE_NAME).exists() and not any(folder.glob(LOSS_NAME.format("*")))
    return is_old or (folder / MANIFEST_NAME).exists()


def find_checkpoint(asked: str | bool | None, folder: Path) -> Path | None:
    """Return the checkpoint that was asked for; True asks for the newest whole one."""
    if not asked:
        return None
    if asked is not True:
        check_undamaged(Path(asked))
        return Path(asked)
    checkpoint = last_checkpoint(folder)
    if checkpoint is None:
        raise ValueError(
            f"resume_from_checkpoint: expected a whole checkpoint in {str(folder)!r}, got none"
        )
    return checkpoint


def check_undamaged(folder: Path, *, is_best: bool = False) -> None:
    """Refuse a damaged checkpoint, named by a user or, as the best one, by a later checkpoint."""
    damage = find_damage(folder, is_best=is_best)
    if damage is None:
        return
    name, advice = repr(str(folder)), "Use another one"
    if is_best:
        name = f"{name}, the best one,"
        advice = "Restore it, or delete the checkpoints after it: the run then continues before it"
    raise ValueError(
        f"checkpoint: expected {name} as it was saved, got a damaged one: {damage}. {advice}"
    )


def check_continues(folder: Path, config: HarmonicConfig, **rows: str | None) -> None:
    """Refuse a checkpoint with other classes or rows, or of another commit of the base.

    `rows` are `rows_sha256` and `eval_sha256` of the trainer; None on either side is not compared.
    """
    manifest, saved = read_manifest(folder), HarmonicConfig.from_pretrained(folder)
    if saved.id2label != config.id2label:
        raise ValueError(
            f"resume: expected the classes of {str(folder)!r}, {saved.id2label}, "
            f"got {config.id2label}. The data have changed; start a new run"
        )
    for name, digest in rows.items():
        if None not in (known := manifest.get(name), digest) and known != digest:
            what = "training" if name == "rows_sha256" else "evaluation"
            raise ValueError(
                f"resume: expected the {what} rows of {str(folder)!r}, got others. Give the same "
                "data and tokenizer, or give the checkpoint as the model of a new run"
            )
    if None not in (saved.base_revision, config.base_revision) and (
        saved.base_revision != config.base_revision
    ):
        raise ValueError(
            f"resume: expected the base at commit {saved.base_revision}, got "
            f"{config.base_revision}: its branch has moved on. Set model.revision to the first"
        )


def read_state(checkpoint: Path, *, needs_best: bool) -> TrainerState:
    """Return a checkpoint's state; the best checkpoint is sought beside it, as runs are moved."""
    state = TrainerState.load_from_json(str(checkpoint / STATE_NAME))
    if state.best_model_checkpoint is not None:
        best = checkpoint.parent / Path(state.best_model_checkpoint).name
        if needs_best:
            check_undamaged(best, is_best=True)
        state.best_model_checkpoint = str(best) if best.is_dir() else None
    return state


def save_running_loss(folder: Path, process: int, loss: float, last_logged: int) -> None:
    """Save the sum of a process's losses since the last log, and the step of that log."""
    content = {"sum": loss, "last_logged_step": last_logged}
    (folder / LOSS_NAME.format(process)).write_text(json.dumps(content))


def load_running_loss(folder: Path, args: TrainingArguments) -> tuple[float, int | None]:
    """Return what `save_running_loss` was given; 0 and None for a checkpoint without it.

    If the number of processes has changed, the loss is the mean of all that were saved.
    """
    paths = sorted(folder.glob(LOSS_NAME.format("*")))
    if not paths:  # of an earlier version
        return 0.0, None
    own = folder / LOSS_NAME.format(args.process_index)
    chosen = [own] if len(paths) == args.world_size else paths
    saved = [json.loads(path.read_text()) for path in chosen]
    return fmean(entry["sum"] for entry in saved), saved[0]["last_logged_step"]


def save_neighbors(folder: Path, loss: LossFunction) -> None:
    """Save the tables of neighbors that a loss holds, since they were made at an earlier step."""
    tensors = {
        f"{number}.{name}": tensor.contiguous()
        for number, smoothing in enumerate(neighbor_tables(loss))
        for name, tensor in smoothing.table._asdict().items()
    }
    if tensors:
        save_file(tensors, folder / NEIGHBORS_NAME)


def load_neighbors_(folder: Path, loss: LossFunction) -> None:
    """Restore the tables that `save_neighbors` saved; earlier versions saved none."""
    path = folder / NEIGHBORS_NAME
    tensors = load_file(path) if path.is_file() else {}
    for number, smoothing in enumerate(neighbor_tables(loss) if tensors else []):
        names = smoothing.table._fields
        smoothing.table = NeighborTable(*(tensors[f"{number}.{name}"] for name in names))


def all_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in the folder of a run by their steps, whole or not.

    Folders such as `checkpoint-3-best` are left out: they are a user's copies.
    """
    found = folder.glob(f"{PREFIX_CHECKPOINT_DIR}-[0-9]*")
    steps = {path: path.name.split("-", 1)[1] for path in found if path.is_dir()}
    return sorted((p for p, step in steps.items() if step.isdecimal()), key=lambda p: int(steps[p]))


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint or None; damaged newer ones are named in the log."""
    for checkpoint in reversed(all_checkpoints(folder)):
        damage = find_damage(checkpoint)
        if damage is None:
            return checkpoint
        logger.warning("Skipped %s: %s.", checkpoint, damage)
    return None


def rotate(folder: Path, *, keep: int | None, protected: Iterable[Path]) -> None:
    """Delete checkpoints, but not protected ones, until `keep` are left.

    Those that were not saved to their end go first, then those of the lowest steps, whatever
    their dates. None and numbers below 1 keep all, as in transformers.
    """
    if keep is None or keep < 1:
        return
    checkpoints = all_checkpoints(folder)
    deletable = sorted((path for path in checkpoints if path not in set(protected)), key=was_saved)
    num_protected = len(checkpoints) - len(deletable)
    for path in deletable[: max(0, len(checkpoints) - max(keep, num_protected))]:
        shutil.rmtree(path, ignore_errors=True)


def save_trained(model: HarmonicHeadModel, folder: Path) -> None:
    """Save what training changes, and the configuration: enough to continue, but no whole model."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("model*.safetensors*"):  # of an earlier save as a whole
        path.unlink()
    model.config.head = model.dist_head.settings()
    model.config.to_json_file(folder / "config.json")
    state = {name: value.contiguous() for name, value in trained_state(model).items()}
    save_file(state, folder / RESUME_FILE, {"format": "pt"})


def check_frozen(model: HarmonicHeadModel, folder: Path) -> None:
    """Refuse a model whose frozen weights differ from those that a checkpoint has recorded."""
    frozen = read_manifest(folder).get("frozen_sha256")
    if frozen is not None and frozen != frozen_sha256(model):
        raise ValueError(
            f"resume: expected the frozen weights that {str(folder)!r} was trained on, got others. "
            "Give the base as it was, on the Hub by its commit in model.revision, or start a new "
            "run"
        )


def frozen_sha256(model: HarmonicHeadModel) -> str:
    """Return the checksum of all weights that do not train, of their names and dtypes."""
    frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    named = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    named |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    # Scales and codes of packed 4-bit weights are in the state alone.
    frozen |= {name: value for name, value in model.state_dict().items() if name not in named}
    digest = hashlib.sha256()
    for name, value in frozen.items():
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def trained_state(model: HarmonicHeadModel) -> dict[str, Tensor]:
    """Return what training can change, by name: trained parameters and saved buffers."""
    state = model.state_dict()
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    return {name: state[name] for name in names} | {
        name: value for name, value in model.named_buffers() if name in state
    }


def _find_missing(folder: Path) -> str | None:
    try:
        json.loads((folder / STATE_NAME).read_text())
    except (OSError, ValueError):
        return f"it has no whole {STATE_NAME}, so it was not saved to its end"
    missing = [pattern for pattern in NEEDED if not any(folder.glob(pattern))]
    return f"{missing[0]} is missing" if missing else None


def _sha256_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
