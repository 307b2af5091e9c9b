"""The output folder of a run: never overwritten, and where a run continues."""

import json
import os
from pathlib import Path
from typing import Any

from harmonic_sft.config import parse, read_yaml, to_plain, to_yaml
from harmonic_sft.results import read_results
from harmonic_sft.training.run_config import RunConfig
from harmonic_sft.training.schedules import phase_steps

CONFIG_NAME = "run.yaml"
RESULTS_NAME = "train"
MAX_STEPS = "training.max_steps"
# Keys that a resumed run may change: they alter what is shown or sent, not what is trained.
FREE_KEYS = (
    "resume",
    "neighbors",
    "hub.",
    "oom_fallback",
    "check_base",
    "training.logging_",
    "training.report_to",
    "training.disable_tqdm",
    "training.save_total_limit",
)


def check_output_folder(run: RunConfig) -> None:
    """Make sure that the folder is empty, or holds this very run if it is to be resumed.

    Raises:
        ValueError: It holds something else, or another run.
    """
    folder = run.output_dir
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"training.output_dir: expected a folder, got the file {str(folder)!r}")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / CONFIG_NAME).is_file():
        raise ValueError(
            f"training.output_dir: expected an empty folder, got {str(folder)!r}, which holds "
            "other files. Choose another one"
        )
    if not run.resume:
        raise ValueError(
            f"training.output_dir: expected an empty folder, got {str(folder)!r}, which holds a "
            "run. Add resume=true to continue it, or choose another one"
        )
    old = parse(RunConfig, read_run(folder))
    different = changed_keys(old, run)
    if different == [MAX_STEPS] and _last_step(old) < run.training["max_steps"]:
        _check_longer(run, _last_step(old))
    elif different:
        raise ValueError(
            f"resume: expected the settings of the run in {str(folder)!r}, got other values for "
            f"{', '.join(different)}. Use the old ones, or choose another training.output_dir"
        )


def read_run(folder: Path) -> dict[str, Any]:
    """Return what `run.yaml` in the folder of a run says, as this version would write it.

    Before there was `data.eval.seed` the seed of the training chose the held-out documents.
    """
    saved = read_yaml(folder / CONFIG_NAME)
    section = {"seed": saved["training"].get("seed", 42), **(saved["data"].get("eval") or {})}
    return {**saved, "data": {**saved["data"], "eval": section}}


def _last_step(run: RunConfig) -> int:
    """Return after which optimizer step a run ends; of epochs, once it has ended."""
    if is_finished(run):
        return read_results(results_path(run))["steps"]
    return run.training.get("max_steps", -1)


def _check_longer(run: RunConfig, last_step: int) -> None:
    """Let a run train for more steps where what it did so far does not depend on their number.

    Raises:
        ValueError: Its schedules stretch over the run, or nothing is there to continue from.
    """
    max_steps, schedule = run.training["max_steps"], run.schedule
    kind = str(run.training.get("lr_scheduler_type"))
    warmup = 0
    if schedule is not None:
        warmup = phase_steps(max_steps, warmup_ratio=schedule.warmup_ratio, decay_ratio=0).warmup
    reasons = {
        "an annealed h_exp": run.h_exp is not None and run.h_exp.start != run.h_exp.end,
        "schedule.decay_ratio above 0": schedule is not None and schedule.decay_ratio > 0,
        f"lr_scheduler_type {kind}": schedule is None and not kind.startswith("constant"),
        f"a warmup of {warmup} steps": warmup > last_step,
        "an annealed loss": run.loss.name == "distill",
        "no checkpoint": last_checkpoint(run.output_dir) is None,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ValueError(
            f"resume: expected {last_step} steps as before, or a run that continues the same way "
            f"up to step {max_steps}: h_exp held, schedule.decay_ratio 0. Got {', '.join(found)}. "
            f"Start a new run on this one: model.base={run.output_dir} head.init=base_head, with "
            "another training.output_dir"
        )


def changed_keys(old: RunConfig, new: RunConfig) -> list[str]:
    """Return the keys in which two runs differ, as far as training goes."""
    before, after = _leaves(to_plain(old)), _leaves(to_plain(new))
    return sorted(
        key
        for key in before.keys() | after.keys()
        if before.get(key) != after.get(key) and not key.startswith(FREE_KEYS)
    )


def _leaves(node: Any, key: str = "") -> dict[str, Any]:
    """Flatten nested mappings to `a.b.c: value`."""
    if not isinstance(node, dict):
        return {key: node}
    flat = {}
    for name, value in node.items():
        flat |= _leaves(value, f"{key}.{name}" if key else name)
    return flat


def claim_output_folder(run: RunConfig) -> None:
    """Write the resolved configuration, which marks the folder as this run's.

    Raises:
        ValueError: Another run has claimed it since `check_output_folder`.
    """
    run.output_dir.mkdir(parents=True, exist_ok=True)
    path = run.output_dir / CONFIG_NAME
    draft = path.with_name(f".{CONFIG_NAME}.{os.getpid()}")
    if run.resume and path.exists():
        if changed_keys(parse(RunConfig, read_run(run.output_dir)), run) == [MAX_STEPS]:
            draft.write_text(to_yaml(run))
            os.replace(draft, path)
        return
    draft.write_text(to_yaml(run))
    try:
        os.link(draft, path)  # whole or not at all, and only once
    except FileExistsError:
        raise ValueError(
            f"training.output_dir: expected an empty folder, got {str(run.output_dir)!r}, which "
            "another run has just claimed. Choose another one"
        ) from None
    finally:
        draft.unlink()


def release_output_folder(run: RunConfig) -> None:
    """Let a folder go in which nothing but the claim is: its run was refused before training."""
    folder = run.output_dir
    if [path.name for path in folder.iterdir()] == [CONFIG_NAME]:
        (folder / CONFIG_NAME).unlink(missing_ok=True)
        folder.rmdir()


def is_finished(run: RunConfig) -> bool:
    """Whether the folder holds the results of a run that came to its end, with all its steps."""
    path = results_path(run)
    return path.is_file() and read_results(path)["steps"] >= run.training.get("max_steps", -1)


def results_path(run: RunConfig) -> Path:
    """Where the numbers of the run are."""
    return run.output_dir / "results" / f"{RESULTS_NAME}.json"


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint; a half-written one is passed over.

    transformers writes `trainer_state.json` last, so a checkpoint that has it is whole.
    """
    whole = [p for p in folder.glob("checkpoint-[0-9]*") if _is_json(p / "trainer_state.json")]
    return max(whole, key=lambda path: int(path.name.split("-")[1]), default=None)


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return True
