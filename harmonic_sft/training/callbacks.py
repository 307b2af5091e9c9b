"""What happens around optimizer steps: h_exp moves, prototypes return, bad gradients stop."""

import math
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from harmonic_sft.losses import Distillation, neighbor_tables
from harmonic_sft.training.run_config import HExpConfig
from harmonic_sft.training.schedules import h_exp_at


class StoppedError(RuntimeError):
    """Training had to stop; weights and saved checkpoints are whole."""


class HExpCallback(TrainerCallback):
    """Anneals h_exp as a function of the global step alone, so that a resumed run agrees."""

    def __init__(self, h_exp: HExpConfig):
        self.h_exp = h_exp

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Set the exponent of the next step, also at the start of a resumed run."""
        start, end = self.h_exp.start, self.h_exp.end
        value = h_exp_at(state.global_step, state.max_steps, start=start, end=end)
        kwargs["model"].h_exp = value

    on_step_end = on_train_begin  # evaluation and checkpoints come later and see the same


class DistillCallback(TrainerCallback):
    """Anneals the old head out of the loss as a function of the global step alone."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Set the weight of the next step, also at the start of a resumed run."""
        loss_fn = kwargs["model"].loss_fn
        if isinstance(loss_fn, Distillation):
            loss_fn.anneal(state.global_step / state.max_steps)

    on_step_end = on_train_begin


class GuardCallback(TrainerCallback):
    """Stops before a non-finite gradient reaches the weights."""

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Look at the gradients; clipping leaves what is not finite as it is, or makes it NaN.

        Raises:
            StoppedError: One of them is infinite or not a number.
        """
        gradients = [p.grad for p in kwargs["model"].parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).item()
        check_finite("gradient norm", norm, state.global_step)


def check_finite(name: str, value: float, global_step: int) -> None:
    """Raise a StoppedError unless `value` is finite."""
    if not math.isfinite(value):
        raise StoppedError(
            f"{name}: expected a finite number, got {value} at step {global_step + 1}. Nothing was "
            "updated with it, and checkpoints already saved are whole. Try a lower learning_rate "
            "or max_grad_norm"
        )


class PrototypeCallback(TrainerCallback):
    """Brings the prototypes back to norm 1 after every optimizer step."""

    def on_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Re-normalize; checkpoints and evaluations come later in the loop and see the result."""
        kwargs["model"].renormalize_prototypes_()


class RefreshCallback(TrainerCallback):
    """Makes the loss's tables of neighbors anew at multiples of their `refresh_every`."""

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Refresh what is due; a checkpoint comes later, with the same prototypes."""
        if not 0 < state.global_step < state.max_steps:
            return
        model = kwargs["model"]
        for table in neighbor_tables(model.loss_fn):
            every = table.loss.refresh_every
            if every is not None and state.global_step % every == 0:
                table.refresh(model.dist_head)

    on_train_begin = on_step_end  # a resumed run starts at a multiple, with the saved prototypes
