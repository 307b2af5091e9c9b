"""After running out of memory: the same optimizer step, in a cheaper way."""

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from accelerate.utils.memory import release_memory, should_reduce_batch_size
from torch import Tensor

from harmonic_sft.models import HarmonicHeadModel
from harmonic_sft.training.arguments import HarmonicTrainingArguments
from harmonic_sft.training.batches import num_rows, split_batch
from harmonic_sft.training.callbacks import StoppedError

logger = logging.getLogger(__name__)


class MemoryFallback:
    """Runs micro-batches; out of memory it turns to gradient checkpointing, then to fewer rows.

    It then repeats the step from its first micro-batch with the same random numbers. Checkpointing
    changes nothing else; fewer rows at a time sum in another order and draw other dropout masks.
    """

    def __init__(self, args: HarmonicTrainingArguments, model: HarmonicHeadModel):
        self._args, self._model = args, model
        # Not `is_gradient_checkpointing`, which stays false where no block holds a graph.
        self.checkpoints_blocks = args.gradient_checkpointing
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        self.batches: list[dict[str, Any]] = []  # of this step, so far
        self._num_chunks = 1

    def run(
        self,
        backward: Callable[[dict[str, Any]], Tensor],
        batch: dict[str, Any],
        *,
        step: int,
        is_sum: bool,
    ) -> Tensor:
        """Return the loss of one micro-batch of a step; `batches` are those before it.

        `backward` runs a micro-batch, or some of its rows. Unless losses of some rows add up to
        that of all (`is_sum`), they are means, and a micro-batch stays whole.
        """
        if not self.batches:
            # For dropout in a repeated step, on the CPU and on every GPU.
            self._random_state = torch.get_rng_state(), torch.cuda.get_rng_state_all()
        self.batches.append(dict(batch))
        batches = [batch]
        while True:
            try:
                for micro_batch in batches:
                    chunks = split_batch(micro_batch, self._num_chunks)
                    losses = [backward(chunk) for chunk in chunks]
                return torch.stack(losses).sum()
            except RuntimeError as error:
                self._check_memory(error)
            # Outside of `except`, where the error does not keep the tensors of its frames alive.
            change = self._fall_back(is_sum=is_sum)
            logger.warning("Out of memory at step %d: %s.", step, change)
            # The failed backward pass may have left some of its gradients: redo the whole step.
            self._model.zero_grad()
            torch.set_rng_state(self._random_state[0])
            torch.cuda.set_rng_state_all(self._random_state[1])
            batches = self.batches

    def _check_memory(self, error: RuntimeError) -> None:
        """Raise errors other than a lack of memory, and this one too if no step can be repeated."""
        # Messages of the driver, cuBLAS, cuDNN and Triton, which accelerate does not know.
        is_known = any(words in str(error) for words in ("out of memory", "ALLOC_FAILED"))
        is_memory = is_known or should_reduce_batch_size(error)
        if not is_memory or not self._args.oom_fallback:
            raise error
        if self._args.world_size > 1:
            raise StoppedError(
                "out of memory: oom_fallback works on a single process only, since the others wait "
                "for this one. Lower per_device_train_batch_size, raise "
                "gradient_accumulation_steps, or set gradient_checkpointing: true"
            ) from error

    def _fall_back(self, *, is_sum: bool) -> str:
        """Turn gradient checkpointing on, or halve the chunks if it is on; return what was done."""
        release_memory()
        rows = num_rows(self.batches[-1])
        if not self.checkpoints_blocks:
            self.checkpoints_blocks = True
            with suppress(ValueError):  # some bodies have none
                self._model.gradient_checkpointing_enable()
                return "gradient checkpointing turned on"
        if not is_sum:
            raise StoppedError(
                "out of memory: a micro-batch does not fit with gradient checkpointing, and a mean "
                "over its rows is no sum of parts. Lower per_device_train_batch_size and raise "
                "gradient_accumulation_steps"
            )
        if self._num_chunks < rows:
            self._num_chunks *= 2
            size = math.ceil(rows / self._num_chunks)
            return f"micro-batches of {rows} rows run {size} at a time, same effective batch"
        raise StoppedError(
            "out of memory: one row at a time with gradient checkpointing does not fit. "
            "Lower data.context_length or use a smaller model"
        )
