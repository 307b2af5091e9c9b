"""Push a run to the Hub: one commit, or nothing."""

import json
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, get_token, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from harmonic_sft.hub.run_folder import TrainedFolder, read_trained
from harmonic_sft.hub.staging import STALE, Form, check_form, stage
from harmonic_sft.models import HarmonicConfig

REASONS = {
    401: "The token is not valid. Log in with `hf auth login`",
    403: "The token may not write there. Use one with write access, or a repo of your own",
    409: "The repo was changed at the same moment",
    412: "The repo was changed at the same moment",
    413: "The Hub refuses files of this size",
}


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
    """Refuse a form that does not suit a model, and to replace one of another architecture.

    Raises:
        ValueError: The form, or the repo holds another model and `to.force` is not set.
        PushError: The Hub cannot be reached.
    """
    check_form(config, to.form)
    if to.force:
        return
    try:
        path = hf_hub_download(to.repo_id, "config.json", revision=to.revision)
    except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError):
        return  # a new repo, or one without a model
    except (HTTPError, OSError) as error:
        raise PushError(f"Hub: expected an answer, got an error. {_reason(error)}") from error
    found, own = json.loads(Path(path).read_text()), config.to_dict()
    for keys in (("model_type",), *(("text_config", k) for k in ("model_type", "hidden_size"))):
        theirs, ours = found, own
        for key in keys:
            theirs = theirs.get(key, {}) if isinstance(theirs, dict) else None
            ours = ours.get(key, {})
        if theirs != ours:
            raise ValueError(
                f"repo_id: expected a new repo or an earlier version of this model, got "
                f"{to.repo_id!r} with {'.'.join(keys)} {theirs!r} instead of {ours!r}. Choose "
                "another name, or add --force to replace it"
            )


def upload(staged: Path, trained: TrainedFolder, to: Destination) -> str:
    """Send a staged folder as one commit and return its address.

    Raises:
        PushError: The Hub refused, or the connection broke.
    """
    api = HfApi()
    step = "" if trained.step is None else f", step {trained.step}"
    try:
        api.create_repo(to.repo_id, private=to.private, exist_ok=True)
        if to.revision is not None:
            api.create_branch(to.repo_id, branch=to.revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=to.repo_id,
            folder_path=staged,
            revision=to.revision,
            commit_message=f"Harmonic SFT: {to.form}{step}",
            delete_patterns=list(STALE),
        )
    except (HTTPError, OSError, RuntimeError) as error:
        raise PushError(
            f"push: expected the Hub to take {to.repo_id}, got an error. {_reason(error)} The "
            f"repo's last revision and the run are as before. Try again: {to.command(trained.path)}"
        ) from error
    return commit.commit_url


def _status(error: Exception) -> int | None:
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _reason(error: Exception) -> str:
    status = _status(error)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set. Unset it."
    if status is None:
        name = type(error).__name__
        return f"The connection failed ({name}). Check the network."
    advice = REASONS.get(status, "The Hub has a problem" if status >= 500 else "It was refused")
    return f"{advice} (HTTP {status})."
