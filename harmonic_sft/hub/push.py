"""Push a run to the Hub: one commit, or nothing."""

import json
import logging
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import shorten
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
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from harmonic_sft.hub.run_folder import Destination, TrainedFolder, read_trained
from harmonic_sft.hub.staging import (
    FIGURE,
    LICENSE,
    SENTENCE_FILES,
    TOKENIZER_FILES,
    PushError,
    base_license,
    check_completed,
    check_form,
    stage,
)
from harmonic_sft.models import BLOCKS_FILE, HEAD_FILE, HarmonicConfig, objective
from harmonic_sft.results import without_secrets

logger = logging.getLogger(__name__)
MAX_QUOTED = 200  # characters of a message of the Hub
# Files that an earlier push may have left.
CODE = tuple(path.name for path in Path(objective.__file__).parent.glob("[!_]*.py"))
OURS = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    HEAD_FILE,
    BLOCKS_FILE,
    FIGURE,
    "adapter_config.json",
    "adapter_model.safetensors",
    *CODE,
    *SENTENCE_FILES,
    *TOKENIZER_FILES,
)
FOREIGN = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.gguf", "*.h5", "*.msgpack")
OTHER_WEIGHTS = ("*.pt", "*.pth", "*.ckpt", "*.onnx")  # of no push of ours, and never deleted
SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")  # of the backbone

LOGIN = "Run `hf auth login`, in a notebook huggingface_hub.login()"
ADVICE = {
    401: f"The token is not valid. {LOGIN}",
    403: "You may not do this there. Use a token with write access, or a repo of your own",
    404: "There is no such repo, or the token may not see it",
    409: "The repo was changed at the same moment",
    429: "The Hub limits how often an account may ask. Wait a while",
    500: "The Hub has a problem",
}
# What the client raises if nothing answers, or a login page or proxy instead of the Hub.
NO_ANSWER = (HTTPError, OSError, ValueError, KeyError, TypeError, AttributeError)


class ForeignRepoError(ValueError):
    """The repo holds something that must not be replaced unasked."""


def push(folder: Path, to: Destination) -> str:
    """Publish a run or one of its checkpoints in a single commit, and return its address.

    Raises:
        ValueError: Bad input; nothing was sent.
        PushError: The Hub refused, or the connection broke; the command to try again is named.
    """
    trained = read_trained(folder)
    check_form(trained.config, to.form, trained.has_adapter)  # needs no network
    with tempfile.TemporaryDirectory(prefix="harmonic-sft-push-") as staged:
        try:
            check_destination(to)
            check_model(trained.config, to, trained.has_adapter)
            stage(trained, Path(staged), to)
            if to.form != "full":
                check_completed(trained, to.form)
        except PushError as error:
            raise PushError(
                f"{error} Nothing was sent; the run is as before. Try again: "
                f"{to.command(trained.path)}"
            ) from error
        return upload(Path(staged), trained, to)


def check_destination(to: Destination) -> None:
    """Refuse what cannot be pushed to, before anything is trained or sent.

    Raises:
        ValueError: Not a name of a repo, an empty license, no token, one that the Hub refuses, or
            one that stands in the message or the branch.
        PushError: The Hub cannot be reached.
    """
    if to.license is not None and not to.license.strip():
        raise ValueError(f"license: expected one that the Hub knows, got {to.license!r}")
    try:
        validate_repo_id(to.repo_id)
    except HFValidationError as error:
        raise ValueError(f"repo_id: expected owner/name, got {to.repo_id!r}. {error}") from error
    if "/" not in to.repo_id:
        raise ValueError(f"repo_id: expected owner/name, got {to.repo_id!r}")
    token = get_token()
    if token is None:
        raise ValueError(f"token: expected to be logged in, got no token. {LOGIN}")
    for name in ("message", "revision"):
        if token in (vars(to)[name] or ""):
            raise ValueError(f"{name}: expected what everybody may read, got your token")
    try:
        HfApi().whoami()
    except NO_ANSWER as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code == 401:
            message = f"token: expected a valid one, got one refused. {ADVICE[401]}"
            raise ValueError(message) from None
        raise PushError(f"Hub: expected an answer, got an error. {_reason(error)}") from None


def check_model(config: HarmonicConfig, to: Destination, has_adapter: bool) -> None:
    """Refuse a form that does not suit a model, and a repo that holds something else.

    Raises:
        ValueError: The form, or the repo holds another model and `to.force` is not set.
        PushError: The Hub cannot be reached, or the base's license is not known.
    """
    check_form(config, to.form, has_adapter)
    if to.license is None:
        base_license(config)  # raises before anything is trained, if it cannot be read
    try:
        try:
            info = HfApi().model_info(to.repo_id, revision=to.revision)
        except RevisionNotFoundError:
            info = HfApi().model_info(to.repo_id)  # where the branch will begin
        _check_repo(info, config, to)
    except RepositoryNotFoundError:
        pass  # it will be made
    except ForeignRepoError:
        raise
    except NO_ANSWER as error:
        raise PushError(f"Hub: expected an answer, got an error. {_reason(error)}") from None


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
            commit_message=to.message or f"Harmonic SFT: {to.form}{step}",
        )
    except ForeignRepoError:
        raise
    except (*NO_ANSWER, RuntimeError) as error:
        raise PushError(
            f"push: expected the Hub to take {to.repo_id}, got an error. {_reason(error)} The run "
            "is as before; if the commit arrived, pushing again changes nothing. Try again: "
            f"{to.command(trained.path)}"
        ) from None
    if "README.md" in _file_names(info) and commit.oid != info.sha:  # something was sent
        old = f"{info.sha} of {to.repo_id}"
        logger.info("README.md was replaced by the new card; the old one is in commit %s.", old)
    return commit.commit_url


def _operations(
    staged: Path, info: ModelInfo, to: Destination
) -> list[CommitOperationAdd | CommitOperationDelete]:
    """Add what is staged, and delete files of earlier pushes that would now mislead.

    `HfApi.upload_folder` is not for this: with hf_xet it makes several commits.
    """
    paths = sorted(path for path in staged.rglob("*") if path.is_file())
    added = {path.relative_to(staged).as_posix(): path for path in paths}
    patterns = (*OURS, *FOREIGN) if to.force else OURS
    names = _file_names(info)
    stale = [n for n in names if n not in added and any(_matches(n, p) for p in patterns)]
    if LICENSE in names:  # it may be the owner's own
        added.pop(LICENSE, None)
    return [
        *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=p) for name, p in added.items()),
        *(CommitOperationDelete(path_in_repo=name) for name in stale),
    ]


def _check_repo(info: ModelInfo, config: HarmonicConfig, to: Destination) -> None:
    """Raise a `ForeignRepoError` unless the repo is empty, or holds this model or its adapter."""
    if to.private and not info.private:
        raise ForeignRepoError(
            f"--private: expected a new repo or a private one, got {to.repo_id!r}, which is public"
        )
    theirs = None if to.force else _foreign_content(info, config)
    if theirs is not None:
        raise ForeignRepoError(
            f"repo_id: expected a new repo or an earlier version of this model, got {to.repo_id!r} "
            f"with {theirs}. Choose another name, or replace it by `harmonic-sft push` with --force"
        )


def _foreign_content(info: ModelInfo, config: HarmonicConfig) -> str | None:
    """Say what in a repo does not belong to this model; None if everything does."""
    names = _file_names(info)
    if "config.json" in names:
        theirs, ours = (_kind(fields) for fields in (_read(info, "config.json"), config.to_dict()))
        for key, value in ours.items():
            if theirs[key] != value:
                return f"{key} {theirs[key]!r} instead of {value!r}"
        return None
    if "adapter_config.json" in names:
        modules = _read(info, "adapter_config.json").get("modules_to_save") or []
        return None if "dist_head" in modules else "an adapter of another model"
    weights = (*FOREIGN, *OTHER_WEIGHTS)
    has_weights = any(fnmatchcase(name, pattern) for name in names for pattern in weights)
    return "weights of another model" if has_weights else None


def _kind(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration that all versions of one model share."""
    backbone = config.get("text_config") or {}
    kind = {key: config.get(key) for key in ("model_type", "architectures")}
    return kind | {f"text_config.{key}": backbone.get(key) for key in SHAPE}


def _file_names(info: ModelInfo) -> list[str]:
    return [file.rfilename for file in info.siblings or []]


def _matches(name: str, pattern: str) -> bool:
    """Whether a name matches; `*` matches no `/`."""
    return name.count("/") == pattern.count("/") and fnmatchcase(name, pattern)


def _read(info: ModelInfo, name: str) -> dict[str, Any]:
    """Read a JSON file of the repo; one that is broken, or no mapping, counts as empty."""
    try:
        content = json.loads(Path(hf_hub_download(info.id, name, revision=info.sha)).read_bytes())
    except ValueError:
        content = None
    return content if isinstance(content, dict) else {}


def _reason(error: BaseException) -> str:
    """Return advice, and the first line of the Hub's answer or else of the error."""
    while not isinstance(error, HTTPError) and error.__cause__ is not None:
        error = error.__cause__  # the client wraps it in others
    kind, words, advice = type(error).__name__, str(error), ""
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        kind, words = f"HTTP {status}", error.server_message or words
        advice = ADVICE.get(min(status, 500), "It was refused")
    elif isinstance(error, HTTPError):
        advice = "The connection failed. Check the network"
    first, *_ = words.strip().split("\n")
    line = shorten(without_secrets(f"{kind}: {first}"), MAX_QUOTED).rstrip(": .")
    return f"{advice} ({line})." if advice else f"{line}."
