"""Push a run to the Hub: one commit, or nothing."""

import json
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelInfo,
    get_token,
    hf_hub_download,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from harmonic_sft.hub.run_folder import TrainedFolder, read_trained
from harmonic_sft.hub.staging import CODE, FIGURE, SENTENCES, TOKENIZER, Form, check_form, stage
from harmonic_sft.models import BLOCKS_FILE, HEAD_FILE, HarmonicConfig

# What an earlier push may have left.
OURS = (
    *(
        "config.json",
        "generation_config.json",
        "model*.safetensors",
        "model.safetensors.index.json",
    ),
    *(HEAD_FILE, BLOCKS_FILE, FIGURE),
    *("adapter_config.json", "adapter_model.safetensors"),
    *(*CODE, *SENTENCES, *TOKENIZER),
)
FOREIGN = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.gguf", "*.h5", "*.msgpack")
OTHERS = ("*.pt", "*.pth", "*.ckpt", "*.onnx")  # weights too, but nothing that we would replace
SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")  # of the backbone

REASONS = {
    401: "The token is not valid. Log in with `hf auth login`",
    403: "The token may not write there. Use one with write access, or a repo of your own",
    409: "The repo was changed at the same moment",
    412: "The repo was changed at the same moment",
    413: "The Hub refuses files of this size",
}


class ForeignRepoError(ValueError):
    """The repo holds something that must not be replaced unasked."""


class PushError(RuntimeError):
    """The Hub did not take it; the repo's last revision and the run are as they were."""


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where and how to publish.

    Attributes:
        repo_id: owner/name.
        form: See `stage`.
        private: Of a repo that is made.
        revision: A branch, made if it does not exist; None is main.
        force: Push also over a model of another architecture.
    """

    repo_id: str
    form: Form = "full"
    private: bool = False
    revision: str | None = None
    force: bool = False

    def command(self, folder: Path) -> str:
        """Return the command that pushes `folder` here."""
        words = ["harmonic-sft", "push", str(folder), "--repo-id", self.repo_id]
        words += ["--form", self.form] if self.form != "full" else []
        words += ["--private"] if self.private else []
        words += ["--revision", self.revision] if self.revision is not None else []
        words += ["--force"] if self.force else []
        return shlex.join(words)


def push(folder: Path, to: Destination) -> str:
    """Publish what a run has saved, in a single commit.

    Args:
        folder: The output folder of a run, or one of its `checkpoint-N`.
        to: Where.

    Returns:
        The address of the commit.

    Raises:
        ValueError: Bad input; nothing was sent.
        PushError: The Hub refused, or the connection broke; the command to try again is named.
    """
    trained = read_trained(folder)
    check_form(trained.config, to.form)  # needs no network
    check_destination(to)
    check_model(trained.config, to)
    with tempfile.TemporaryDirectory(prefix="harmonic-sft-push-") as staged:
        stage(trained, Path(staged), form=to.form, repo_id=to.repo_id)
        return upload(Path(staged), trained, to)


def check_destination(to: Destination) -> None:
    """Refuse what cannot be pushed to, before anything is trained or sent.

    Raises:
        ValueError: Not a name of a repo, no token, or one that the Hub does not know.
        PushError: The Hub cannot be reached.
    """
    try:
        validate_repo_id(to.repo_id)
    except HFValidationError as error:
        raise ValueError(f"repo_id: expected owner/name, got {to.repo_id!r}. {error}") from error
    if to.repo_id.count("/") != 1 or "--" in to.repo_id:
        raise ValueError(f"repo_id: expected owner/name without '--', got {to.repo_id!r}")
    if get_token() is None:
        raise ValueError("token: expected to be logged in, got no token. Run `hf auth login`")
    try:
        HfApi().whoami()
    except (HTTPError, OSError) as error:
        if _status(error) == 401:
            raise ValueError(
                f"token: expected a valid one, got one refused. {REASONS[401]}"
            ) from None
        raise PushError(f"Hub: expected an answer, got an error. {_reason(error)}") from error


def check_model(config: HarmonicConfig, to: Destination) -> None:
    """Refuse a form that does not suit a model, and a repo that holds something else.

    Raises:
        ValueError: The form, or the repo holds another model and `to.force` is not set.
        PushError: The Hub cannot be reached.
    """
    check_form(config, to.form)
    try:
        _check_repo(_find_repo(to), config, to)
    except (HTTPError, OSError) as error:
        raise PushError(f"Hub: expected an answer, got an error. {_reason(error)}") from error


def upload(staged: Path, trained: TrainedFolder, to: Destination) -> str:
    """Send a staged folder as one commit and return its address.

    Raises:
        ValueError: The repo holds another model by now.
        PushError: The Hub refused, or the connection broke.
    """
    api = HfApi()
    step = "" if trained.step is None else f", step {trained.step}"
    try:
        api.create_repo(to.repo_id, private=to.private, exist_ok=True)
        if to.revision is not None:
            api.create_branch(to.repo_id, branch=to.revision, exist_ok=True)
        info = api.model_info(to.repo_id, revision=to.revision)
        _check_repo(info, trained.config, to)
        commit = api.create_commit(
            repo_id=to.repo_id,
            operations=_operations(staged, info, to),
            revision=to.revision,
            parent_commit=info.sha,  # nobody else's push is overwritten unseen
            commit_message=f"Harmonic SFT: {to.form}{step}",
        )
    except ForeignRepoError:
        raise
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        raise PushError(
            f"push: expected the Hub to take {to.repo_id}, got an error. {_reason(error)} The "
            f"repo's last revision and the run are as before. Try again: {to.command(trained.path)}"
        ) from error
    return commit.commit_url


def _operations(
    staged: Path, info: ModelInfo, to: Destination
) -> list[CommitOperationAdd | CommitOperationDelete]:
    """Add what is staged, and delete what another push has left and would now mislead."""
    paths = sorted(path for path in staged.rglob("*") if path.is_file())
    added = {path.relative_to(staged).as_posix(): path for path in paths}
    patterns = (*OURS, *FOREIGN) if to.force else OURS
    stale = [
        name
        for name in _names(info)
        if name not in added and any(_matches(name, pattern) for pattern in patterns)
    ]
    return [
        *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=p) for name, p in added.items()),
        *(CommitOperationDelete(path_in_repo=name) for name in stale),
    ]


def _find_repo(to: Destination) -> ModelInfo | None:
    """Return what the Hub knows of the repo, None if it does not exist."""
    try:
        return HfApi().model_info(to.repo_id, revision=to.revision)
    except RevisionNotFoundError:
        return HfApi().model_info(to.repo_id)  # where the branch will begin
    except RepositoryNotFoundError:
        return None


def _check_repo(info: ModelInfo | None, config: HarmonicConfig, to: Destination) -> None:
    """Raise a `ForeignRepoError` unless the repo is new, or holds this model or its adapter."""
    if info is None:
        return
    if to.private and not info.private:
        raise ForeignRepoError(
            f"--private: expected a new repo or a private one, got {to.repo_id!r}, which is public"
        )
    if to.force:
        return
    found = _foreign_content(info, config)
    if found is not None:
        raise ForeignRepoError(
            f"repo_id: expected a new repo or an earlier version of this model, got {to.repo_id!r} "
            f"with {found}. Choose another name, or replace it by `harmonic-sft push` with --force"
        )


def _foreign_content(info: ModelInfo, config: HarmonicConfig) -> str | None:
    """Return what of a repo is not of this model, None if there is nothing."""
    names = _names(info)
    if "config.json" in names:
        theirs, ours = _read_json(info, "config.json"), config.to_dict()
        shape = (("text_config", key) for key in SHAPE)
        for keys in (("model_type",), ("architectures",), *shape):
            there, here = _at(theirs, keys), _at(ours, keys)
            if there != here:
                return f"{'.'.join(keys)} {there!r} instead of {here!r}"
        return None
    if "adapter_config.json" in names:
        adapter = _read_json(info, "adapter_config.json")
        is_ours = "dist_head" in (_at(adapter, ("modules_to_save",)) or [])
        return None if is_ours else "an adapter of another model"
    weights = (*FOREIGN, *OTHERS)
    found = any(fnmatchcase(name, pattern) for name in names for pattern in weights)
    return "weights of another model" if found else None


def _names(info: ModelInfo) -> list[str]:
    return [file.rfilename for file in info.siblings or []]


def _matches(name: str, pattern: str) -> bool:
    """Whether a file is one of those; `*` stays in its folder."""
    return name.count("/") == pattern.count("/") and fnmatchcase(name, pattern)


def _read_json(info: ModelInfo, name: str) -> Any:
    try:
        return json.loads(Path(hf_hub_download(info.id, name, revision=info.sha)).read_text())
    except ValueError as error:
        raise ForeignRepoError(
            f"repo_id: expected {name} of {info.id!r} to be JSON, got an error: {error}. Choose "
            "another name, or replace it by `harmonic-sft push` with --force"
        ) from error


def _at(fields: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        fields = fields.get(key) if isinstance(fields, dict) else None
    return fields


def _status(error: BaseException) -> int | None:
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _reason(error: BaseException) -> str:
    while not isinstance(error, HTTPError) and error.__cause__ is not None:
        error = error.__cause__  # the client wraps what breaks an upload
    status = _status(error)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set. Unset it."
    if status is None and isinstance(error, HTTPError):
        return f"The connection failed ({type(error).__name__}). Check the network."
    if status is None:
        return f"{str(error).strip().rstrip('.')}."
    advice = REASONS.get(status, "The Hub has a problem" if status >= 500 else "It was refused")
    return f"{advice} (HTTP {status})."
