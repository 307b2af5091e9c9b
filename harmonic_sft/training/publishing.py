"""Pushing while and after a run trains."""

import logging
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from harmonic_sft.hub import Destination, push, read_trained, stage, upload
from harmonic_sft.hub.staging import check_completed
from harmonic_sft.results import without_secrets
from harmonic_sft.training.run_config import HubConfig, RunConfig

logger = logging.getLogger(__name__)


def destination_of(hub: HubConfig) -> Destination:
    """Return where the hub section pushes to."""
    assert hub.repo_id is not None, "checked in HubConfig"
    return Destination(
        repo_id=hub.repo_id,
        form=hub.form,
        private=hub.private,
        revision=hub.revision,
        license=hub.license,
    )


def push_run(run: RunConfig, callbacks: Sequence[TrainerCallback] = ()) -> None:
    """Push a finished run, after pending pushes of checkpoints, and log its address."""
    finish_pushes(callbacks)
    logger.info("Pushed: %s", push(run.output_dir, destination_of(run.hub)))


def finish_pushes(callbacks: Sequence[TrainerCallback]) -> None:
    """Wait for pending pushes of checkpoints, which the interpreter's end would interrupt."""
    for callback in callbacks:
        if isinstance(callback, PushCallback):
            callback.finish()


class PushCallback(TrainerCallback):
    """Pushes every checkpoint as it is saved, beside the training.

    A checkpoint is copied first, since the trainer may delete it; it is not pushed while an earlier
    one is still on its way. A failure is a warning, and training continues.
    """

    def __init__(self, to: Destination):
        self.to = to
        self._pushing = Thread()  # the last push
        self._is_checked = False  # that the base completes what is pushed

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any
    ) -> None:
        """Start to push the checkpoint just saved."""
        if not state.is_world_process_zero:
            return
        if self._pushing.is_alive():
            logger.info(
                "Step %d is not pushed: an earlier one is still being pushed.", state.global_step
            )
            return
        assert args.output_dir is not None, "every run has an output folder"
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        try:
            with ExitStack() as cleanup:
                place = tempfile.TemporaryDirectory(prefix="harmonic-sft-push-")
                staged = Path(cleanup.enter_context(place))
                trained = read_trained(folder)
                stage(trained, staged, self.to)
                if self.to.form != "full" and not self._is_checked:
                    check_completed(trained, self.to.form)
                    self._is_checked = True
                cleanup_after_push = cleanup.pop_all()
        except Exception as error:  # safetensors has its own class for a full disk
            self._warn(folder, error)
            return

        def send() -> None:
            with cleanup_after_push:
                try:
                    upload(staged, trained, self.to)
                except Exception as error:
                    self._warn(folder, error)

        # A daemon, so that a push that was given up does not keep the interpreter alive.
        self._pushing = Thread(target=send, name="push", daemon=True)
        self._pushing.start()

    def finish(self) -> None:
        """Wait for the last push."""
        if self._pushing.is_alive():
            logger.warning("Waiting for the push of a checkpoint; Ctrl-C gives it up.")
            self._pushing.join()

    def _warn(self, folder: Path, error: Exception) -> None:
        logger.warning("%s was not pushed. %s", folder.name, without_secrets(str(error)))
