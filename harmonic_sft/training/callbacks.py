"""What happens around optimizer steps: h_exp, norms, the teacher's weight, SIGTERM, reports."""

import contextlib
import logging
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import DataLoaderAdapter
from peft import PeftModel
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import (
    EarlyStoppingCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerState,
)
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    TensorBoardCallback,
    default_logdir,
)

from harmonic_sft.config import did_you_mean
from harmonic_sft.losses import Distillation, neighbor_tables
from harmonic_sft.models import HarmonicConfig
from harmonic_sft.training.run_config import HExpConfig

logger = logging.getLogger(__name__)
TERMINATED = 128 + signal.SIGTERM  # the exit status that shells report


class StoppedError(RuntimeError):
    """Training had to stop; weights and saved checkpoints are whole."""


class HeadCallback(TrainerCallback):
    """Sets what changes in head and loss from step to step.

    It goes by the step alone, so a resumed run sets the same. Trainers of other libraries can use
    it too.

    Raises:
        ValueError: The model is an adapter of PEFT, which would not save an exponent, or the best
            model is chosen by losses at different exponents.
    """

    def __init__(self, h_exp: HExpConfig | None):
        self.h_exp = h_exp
        self.last_h_exp: float | None = None  # of the last step; None without `h_exp`

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Bring the prototypes back to norm 1."""
        model = kwargs["model"]
        model.renormalize_prototypes_()
        # Read from the model, since a callback of the user's may have set it.
        self.last_h_exp = None if self.h_exp is None else model.h_exp

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Set what the next step uses; evaluations and checkpoints before it see the same."""
        model, step, total = kwargs["model"], state.global_step, state.max_steps
        if self.h_exp is not None:  # linear over the run
            start, end = self.h_exp.start, self.h_exp.end
            model.h_exp = start + (end - start) * min(step / total, 1.0)
        if isinstance(model.loss_fn, Distillation):
            model.loss_fn.anneal(step / total)
        for table in neighbor_tables(model.loss_fn):
            every = table.loss.refresh_every
            if every is not None and 0 < step < total and step % every == 0:
                table.refresh(model.dist_head)

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Set exponent, loss and learning rate for the step at which the run starts.

        The saved learning rate of a run that ended is 0, which is wrong if it continues for longer.
        """
        self._check(args, kwargs["model"])
        if state.global_step < state.max_steps:  # otherwise the checkpoint's exponent stays
            self.on_step_end(args, state, control, **kwargs)
        scheduler = kwargs["lr_scheduler"]
        if isinstance(scheduler, LambdaLR):
            factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
            rates = [base * f for base, f in zip(scheduler.base_lrs, factors, strict=True)]
            for group, rate in zip(kwargs["optimizer"].param_groups, rates, strict=True):
                group["lr"] = rate
            scheduler._last_lr = rates

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Set the exponent of the best checkpoint; other trainers load only its weights."""
        folder = state.best_model_checkpoint
        if self.h_exp is not None and args.load_best_model_at_end and folder is not None:
            kwargs["model"].h_exp = HarmonicConfig.from_pretrained(folder).h_exp

    def _check(self, args: Any, model: Any) -> None:
        if self.h_exp is None:
            return
        if isinstance(model, PeftModel):
            raise ValueError(
                "HeadCallback: expected no exponent beside an adapter of PEFT, which would not "
                f"save it, got {self.h_exp}. Write HeadCallback(None)"
            )
        # transformers sets this for load_best_model_at_end and for schedules that read a metric.
        metric = str(args.metric_for_best_model).removeprefix("eval_")
        if self.h_exp.start != self.h_exp.end and metric == "loss":
            raise ValueError(
                "HeadCallback: expected another metric_for_best_model than the loss, which "
                "cannot be compared between exponents, got loss. Hold h_exp, or do without "
                "load_best_model_at_end and schedules that read the metric"
            )


class TerminationCallback(TrainerCallback):
    """Ends training after a SIGTERM, with a checkpoint at the end of the current step.

    A checkpoint of an epoch's last step is always saved after the evaluation that ends the epoch.
    transformers' own callback, of `enable_jit_checkpoint`, waits for three seconds and saves in the
    middle of a step, which a resumed run could not repeat with the same random numbers. With
    several processes the trainer asks all whether they got the signal, and sets `agreed`.
    """

    def __init__(self, *, is_alone: bool):
        self.is_alone = is_alone
        self.received = self.agreed = False  # `agreed`: all processes know of the signal
        self._saves_after_epoch = False
        self._listens = torch.zeros(1, dtype=torch.bool).share_memory_()  # workers read it

    @contextlib.contextmanager
    def listening(self, *, is_asked: bool) -> Generator[None]:
        """Handle the signal if `is_asked`; Python allows that in the main thread only."""
        self.received = self.agreed = False
        if not is_asked or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self._note)
        self._listens.fill_(True)
        try:
            yield
        finally:
            self._listens.fill_(False)
            signal.signal(signal.SIGTERM, before)

    def keep_workers_(self, loader: DataLoader) -> DataLoader:
        """Let the loader's workers outlive the signal while it is handled; return the loader.

        Schedulers send it to all processes of a job, and the current step still needs its rows.
        """
        inner = loader.base_dataloader if isinstance(loader, DataLoaderAdapter) else loader
        inner.worker_init_fn = partial(_init_worker, self._listens, inner.worker_init_fn)
        is_default = inner.num_workers > 0 and inner.multiprocessing_context is None
        if is_default and multiprocessing.get_start_method() == "forkserver":
            # Python 3.14's default. The signal would end the server, and all workers with it.
            inner.multiprocessing_context = "fork"
        return loader

    def _note(self, number: int, frame: Any) -> None:
        self.received, self.agreed = True, self.is_alone

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Save and stop, in all processes after the same step; at an epoch's end save later.

        The evaluation comes first there, since a run that continues from that checkpoint skips it.
        """
        if self.agreed:
            logger.warning(
                "SIGTERM: training ends with a checkpoint of step %d.", state.global_step
            )
            control.should_training_stop = control.should_save = True
        self._saves_after_epoch = control.should_save and _ends_epoch(state)
        control.should_save &= not self._saves_after_epoch

    def on_epoch_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Save the checkpoint that `on_step_end` has postponed, after this evaluation and log.

        transformers also calls this if training stops in the middle of an epoch: then nothing is
        evaluated, logged or saved.
        """
        if self.agreed and control.should_training_stop:
            is_end = _ends_epoch(state)
            control.should_save = is_end
            control.should_evaluate &= is_end
            control.should_log &= is_end
        control.should_save |= self._saves_after_epoch

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Save if the signal came in the evaluation after the last step: no step follows."""
        if self.agreed and state.global_step >= state.max_steps:
            control.should_save = True


class EarlyStopping(EarlyStoppingCallback):
    """transformers' early stopping, without warnings at evaluations before and after training."""

    def on_evaluate(self, *args: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        """Count evaluations during training only."""
        if any(name.startswith("eval_") for name in metrics):
            super().on_evaluate(*args, metrics=metrics, **kwargs)


def _ends_epoch(state: TrainerState) -> bool:
    """Whether the step that was taken is the last one of an epoch or of the run."""
    return state.epoch % 1 == 0 or state.global_step >= state.max_steps


def _init_worker(listens: Tensor, init_fn: Callable[[int], None] | None, worker_id: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None if listens else os._exit(0))
    if init_fn is not None:
        init_fn(worker_id)


NOT_SHOWN = (
    "num_input_tokens_seen",
    "eval_runtime",
    "eval_samples_per_second",
    "eval_steps_per_second",
)


class LabeledProgress(ProgressCallback):
    """transformers' progress bars with evaluations labelled, and log lines with their step."""

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        """Count a batch of an evaluation."""
        super().on_prediction_step(*args, **kwargs)
        if self.prediction_bar is not None and not self.prediction_bar.desc:
            self.prediction_bar.set_description("Evaluating")

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        """Print the step first; leave out what the bar shows or the next line repeats."""
        shown = {key: value for key, value in logs.items() if key not in NOT_SHOWN}
        super().on_log(args, state, control, {"step": state.global_step, **shown}, **kwargs)


def label_bars_(callbacks: list[TrainerCallback]) -> None:
    """Replace transformers' progress bars with labelled ones; a user's own stay."""
    callbacks[:] = [LabeledProgress() if type(c) is ProgressCallback else c for c in callbacks]


def place_events_(callbacks: Sequence[TrainerCallback], folder: str) -> None:
    """Write TensorBoard's events into the output folder, also those before the first step.

    transformers would begin with `runs/` of the current folder, and stay there for the whole run.
    """
    for callback in callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
            callback.logging_dir = os.path.join(folder, default_logdir())


@contextlib.contextmanager
def lasting_reports(callbacks: Sequence[TrainerCallback]) -> Generator[None]:
    """Keep reporters open until the final evaluation, which would otherwise open another run."""
    reporters = [c for c in callbacks if isinstance(c, tuple(INTEGRATION_TO_CALLBACK.values()))]
    ends: list[Callable[[], Any]] = []

    def postpone(end: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        ends.append(partial(end, *args, **kwargs))

    for reporter in reporters:
        vars(reporter)["on_train_end"] = partial(postpone, reporter.on_train_end)
    try:
        yield
    finally:
        for reporter in reporters:
            del vars(reporter)["on_train_end"]
        for end in ends:
            end()


def check_reporters(names: Sequence[str]) -> None:
    """Refuse reporters that are unknown or not installed, before anything is loaded."""
    available = get_available_reporting_integrations()
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:  # a misspelled one must not be installed
            known = sorted(INTEGRATION_TO_CALLBACK)
            raise ValueError(
                f"training.report_to: expected some of {known}, got {name!r}"
                f"{did_you_mean(name, known)}"
            )
        if name not in available:
            raise ValueError(
                f"training.report_to: expected installed packages, got {name!r}. "
                f"Run pip install {name.replace('_', '-')}, or leave it out"
            )


def not_finite(step: int, loss: float, gradient_norm: float) -> StoppedError:
    """Return the error for a step, from 0 on, whose loss or gradients are not finite."""
    is_loss = not math.isfinite(loss)
    name, value = ("loss", loss) if is_loss else ("gradient norm", gradient_norm)
    return StoppedError(
        f"{name}: expected a finite number, got {value} at step {step + 1}. Nothing was updated "
        f"with it, and checkpoints already saved are whole. bad_step_{step + 1}_* in the output "
        "folder names the rows. Try a lower learning_rate or max_grad_norm, or continue without "
        "this step: resume=true skip_bad_steps=1, in Python skip_bad_steps=1 and "
        "train(resume_from_checkpoint=True)"
    )
