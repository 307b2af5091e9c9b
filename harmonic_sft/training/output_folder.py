"""The output folder of a run: never overwritten, and where a run goes on."""

import json
from pathlib import Path

from harmonic_sft.config import parse, read_yaml, to_yaml
from harmonic_sft.training.run_config import RunConfig

CONFIG_NAME = "run.yaml"
RESULTS_NAME = "train"
# Keys that a resumed run may change: they alter what is shown, not what is trained.
FREE_KEYS = {"resume", "neighbors", "oom_fallback"}


def check_output_folder(run: RunConfig) -> None:
    """Make sure that the folder is empty, or holds this very run if it is to be resumed.

    Raises:
        ValueError: It holds something else, or another run.
    """
    folder = run.output_dir
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
            "run. Add resume=true to go on with it, or choose another one"
        )
    different = changed_keys(parse(RunConfig, read_yaml(folder / CONFIG_NAME)), run)
    if different:
        raise ValueError(
            f"resume: expected the settings of the run in {str(folder)!r}, got other values for "
            f"{', '.join(different)}. Use the old ones, or choose another training.output_dir"
        )


def changed_keys(old: RunConfig, new: RunConfig) -> list[str]:
    """Return the sections of the file in which two runs differ, as far as training goes."""
    names = [name for name in RunConfig.__dataclass_fields__ if name not in FREE_KEYS]
    return [name for name in names if getattr(old, name) != getattr(new, name)]


def claim_output_folder(run: RunConfig) -> None:
    """Write the resolved configuration, which marks the folder as this run's."""
    run.output_dir.mkdir(parents=True, exist_ok=True)
    path = run.output_dir / CONFIG_NAME
    if not path.exists():
        path.write_text(to_yaml(run))


def is_finished(run: RunConfig) -> bool:
    """Whether the folder holds the results of a run that came to its end."""
    return results_path(run).is_file()


def results_path(run: RunConfig) -> Path:
    """Where the numbers of the run are."""
    return run.output_dir / "results" / f"{RESULTS_NAME}.json"


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint; a half-written one is passed over.

    transformers writes `trainer_state.json` last, so a checkpoint that has it is whole.
    """
    found = sorted(
        folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]), reverse=True
    )
    return next((path for path in found if _is_json(path / "trainer_state.json")), None)


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return True
