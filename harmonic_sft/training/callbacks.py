"""What happens around optimizer steps: the exponent moves, the prototypes return to the sphere."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from harmonic_sft.models import HarmonicForMaskedLM
from harmonic_sft.training.run_config import HExpConfig
from harmonic_sft.training.schedules import h_exp_at


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
        """Set the exponent of the first step, also of a resumed run."""
        self._update(state, kwargs["model"])

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Set the exponent of the next step; evaluation and checkpoints see the same."""
        self._update(state, kwargs["model"])

    def _update(self, state: TrainerState, model: HarmonicForMaskedLM) -> None:
        start, end = self.h_exp.start, self.h_exp.end
        model.h_exp = h_exp_at(state.global_step, state.max_steps, start=start, end=end)


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
