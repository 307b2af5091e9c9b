"""What is published, a run's folder or one of its checkpoints, and where."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from harmonic_sft.config import read_yaml
from harmonic_sft.data.heldout import LIST, run_home
from harmonic_sft.models import HarmonicConfig
from harmonic_sft.models.backbones import check_whole
from harmonic_sft.models.partial_checkpoint import check_not_partial, hub_base
from harmonic_sft.results import read_results, reading

RUN_FILE = "run.yaml"
# Not the top of a checkpoint: transformers loads adapters that it finds there.
ADAPTER_FOLDER = "adapter"

Form = Literal["full", "head", "peft"]


@dataclass(frozen=True)
class TrainedFolder:
    """What a run has saved."""

    path: Path  # with the weights
    config: HarmonicConfig
    run: dict[str, Any]  # the content of `run.yaml`
    results: dict[str, Any] | None  # of `results/train.json`, None before the run's end
    step: int | None  # optimizer steps behind the weights, None if unknown
    figure: Path | None  # of the training, None before the run's end

    @property
    def has_adapter(self) -> bool:
        """Whether LoRA weights lie beside the merged ones."""
        return (self.path / ADAPTER_FOLDER).is_dir()


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where and how to publish; each field is the option of `harmonic-sft push` of that name."""

    repo_id: str  # owner/name
    form: Form = "full"  # see `stage`
    private: bool = False  # whether a new repo is private
    revision: str | None = None  # a branch, made if it does not exist; None is main
    force: bool = False  # push also over a model of another architecture
    message: str | None = None  # of the commit; None names form and step
    license: str | None = None  # of the weights, for the card; None is the base's

    def command(self, folder: Path) -> str:
        """Return the command that pushes `folder` here."""
        words = ["harmonic-sft", "push", str(folder)]
        for field in fields(self):
            value = vars(self)[field.name]
            if value != field.default:
                words += [f"--{field.name.replace('_', '-')}", *([] if value is True else [value])]
        return shlex.join(words)


def read_run_file(home: Path) -> dict[str, Any]:
    """Read the file of a run, as it is.

    Raises:
        ValueError: It is damaged.
    """
    run = read_yaml(home / RUN_FILE)
    for name in ("data", "training"):
        if not isinstance(run.get(name), dict):
            raise ValueError(
                f"{home / RUN_FILE}: expected a section {name}, got a damaged file. Restore it as "
                "the run wrote it"
            )
    return run


def _read_run(home: Path) -> dict[str, Any]:
    """Read `run.yaml`, and put `./` before local relative paths, to tell them from Hub names."""
    run, held_out = read_run_file(home), home / "results" / f"{LIST}.json"
    known = read_results(held_out) if held_out.is_file() else {}
    data = run["data"]
    pairs = [*zip(data.get("sources", []), known.get("sources", []), strict=False)]
    pairs.append(((data.get("eval") or {}).get("source"), known.get("eval_source")))
    for source, saved in pairs:
        if source and saved and saved.get("is_local") and not Path(source["path"]).is_absolute():
            source["path"] = f"./{source['path']}"
    return run


def read_trained(folder: Path) -> TrainedFolder:
    """Read what a run or one of its checkpoints holds, and make sure that its weights are whole.

    Raises:
        ValueError: No run, a link that leaves its folder, no weights in it yet, or a file that is
            half written or damaged.
    """
    folder = folder.resolve()
    home = run_home(folder)
    if not (home / RUN_FILE).is_file():
        raise ValueError(
            f"RUN: expected the output folder of a run, or a checkpoint in it, got {str(folder)!r}"
        )
    for path in home.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(home):
            raise ValueError(
                f"RUN: expected files of its own, got the link {str(path)!r}, which leaves the "
                "folder. Replace it by what may be published, or delete it"
            )
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"RUN: expected a finished run or a checkpoint, got no model in {str(folder)!r}"
        )
    if folder != home and not (folder / "trainer_state.json").is_file():
        raise ValueError(f"RUN: expected a whole checkpoint, got {str(folder)!r}, half written")
    fields = read_results(folder / "config.json")
    if fields.get("model_type") != HarmonicConfig.model_type:
        raise ValueError(
            f"RUN: expected a harmonic model, got a {fields.get('model_type')} in {str(folder)!r}"
        )
    check_saved(folder)
    results, figure = home / "results" / "train.json", home / "results" / "train.png"
    finished = folder == home and results.is_file()
    state, run = folder / "trainer_state.json", _read_run(home)
    with reading(state):
        saved = json.loads(state.read_bytes()) if state.is_file() else None
        step = None if saved is None else _step_of(saved, run, finished)
    return TrainedFolder(
        path=folder,
        config=HarmonicConfig.from_pretrained(folder),
        run=run,
        results=read_results(results) if finished else None,
        step=step,
        figure=figure if finished and figure.is_file() else None,
    )


def _step_of(state: dict[str, Any], run: dict[str, Any], finished: bool) -> int:
    """Return the step of the weights, which at the end may be those of the best checkpoint."""
    best = state.get("best_model_checkpoint")
    if finished and best and run["training"].get("load_best_model_at_end"):
        return int(Path(best).name.split("-")[1])
    return state["global_step"]


def saved_tokenizer(folder: Path) -> Any:
    """Load the tokenizer that lies beside a saved model.

    Raises:
        ValueError: It is damaged, or files are missing.
    """
    with reading(folder):
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        ordinary = tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens)
    if not ordinary:  # transformers makes an empty one up if its files are missing
        raise ValueError(
            f"{folder}: expected the files of a tokenizer, got special tokens alone. Put them there"
        )
    return tokenizer


def check_saved(folder: Path) -> None:
    """Raise a ValueError for a saved model whose weights are missing or cut."""
    check_whole(weight_files(folder))


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights of a saved model; raise if one is missing."""
    check_not_partial(folder)
    names, index = [SAFE_WEIGHTS_NAME], folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        with reading(index):
            names = sorted({*map(str, json.loads(index.read_bytes())["weight_map"].values())})
        if outside := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{index}: expected files of the folder, got {outside[0]!r}")
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"RUN: expected a whole model in {str(folder)!r}, got no {name}")
    return [folder / name for name in names]


def read_tensors(folder: Path, prefixes: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    """Yield the saved weights whose names start with one of `prefixes`."""
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                if name.startswith(prefixes):
                    yield name, file.get_tensor(name)


def last_part(path: str) -> str | None:
    """Return a path's last part, None if that would be a home or a dot."""
    parts = [part for part in re.split(r"[\\/]+", path) if part.strip(".")]
    return parts[-1] if parts and not parts[-1].startswith("~") else None


def public_base(config: HarmonicConfig) -> str | None:
    """Return the name of the base; of a local path only the last part."""
    base = config.base_model
    if base is None or base.startswith("package:") or hub_base(config) is not None:
        return base
    return last_part(base)
