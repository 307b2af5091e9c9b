"""Distillation from the base's old head, annealed into the new head's cross-entropy."""

import copy
from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from harmonic_sft.config import STRICT
from harmonic_sft.losses.loss import CrossEntropyLoss, Loss
from harmonic_sft.models import AffineLogits, DistanceLogits, Head
from harmonic_sft.models.objective import IGNORE_INDEX
from harmonic_sft.ops import by_chunks, chunked_loss
from harmonic_sft.ops.dense_chunks import chunk_rows


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DistillLoss(Loss):
    """KL divergence from the old head's distribution, annealed into the cross-entropy.

    The loss is weight * KL(q || p) + (1 - weight) * -log p_y. p is the distribution of the trained
    head, for distances that of the harmonic loss. q is that of the old model: a frozen copy of the
    old head on the hidden states of a frozen body. The weight falls linearly from 1 at the first
    step to 0 after the share `until` of the run.

    A cross-entropy has three matrix products of N x V x D multiplications. While the weight is
    above 0 this loss has a fourth one and, if the body trains too, a forward pass of the old body.
    At weight 0 it is the cross-entropy.

    Source:
        Hinton et al. 2015, Distilling the Knowledge in a Neural Network, arXiv:1503.02531, Sec. 2,
        without its temperature: both distributions are taken as they are.
    """

    name: Literal["distill"] = "distill"
    needs = "a teacher"
    until: float = Field(
        default=0.5, gt=0, le=1, description="Share of the run that the old head is in"
    )

    def prepare(self, head: Head, body: nn.Module | None = None) -> "Distillation":
        """Return the loss with a frozen copy of `head`, the old one, as the teacher.

        Args:
            head: The old head.
            body: The old body, if training changes the body. It is not copied here: pass a
                `training.freezing.frozen_copy`. With None the teacher reads the new head's hidden
                states.
        """
        return Distillation(self, head, body)


class Distillation:
    """`DistillLoss` with its teacher.

    Args:
        loss: The settings.
        teacher: The old head; a frozen copy is kept.
        body: The old body, or None if training does not change the body.
    """

    def __init__(self, loss: DistillLoss, teacher: Head, body: nn.Module | None = None):
        self.loss = loss
        self.teacher = copy.deepcopy(teacher).requires_grad_(False).eval()
        self.body = body
        self.weight = 1.0  # the current factor of the divergence, from 0 to 1
        self._last = CrossEntropyLoss()  # the loss at weight 0
        self._states: Tensor | None = None

    def anneal(self, progress: float) -> None:
        """Set the weight for `progress`, the share of the run that is done, from 0 to 1."""
        self.weight = max(0.0, 1.0 - progress / self.loss.until)

    def read(self, batch: Mapping[str, Tensor]) -> None:
        """Run the old body on a batch, right before a causal model computes its loss on the batch.

        Args:
            batch: What the model gets, with `labels` `[B, T]`.
        """
        self._states = None
        if self.body is None or self.weight == 0:
            return
        inputs = dict(batch)
        scored = inputs.pop("labels")[:, 1:] != IGNORE_INDEX
        with torch.no_grad():
            outputs = self.body.to(scored.device)(**inputs, use_cache=False)
        self._states = outputs.last_hidden_state[:, :-1][scored]  # [N, E]

    def __call__(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return one loss per token; see `Loss`.

        Raises:
            ValueError: The old body has not read these tokens.
        """
        if self.weight == 0:
            return self._last(head, hidden_states, labels)
        states = self._teacher_states(hidden_states)
        if self.teacher.weight.device != hidden_states.device:  # torch.func breaks modules in `to`
            self.teacher.to(hidden_states.device)
        logits, teacher = head.lazy_logits(hidden_states), self.teacher.lazy_logits(states)
        if isinstance(logits, AffineLogits | DistanceLogits) and isinstance(teacher, AffineLogits):
            second = (teacher.weight.detach(), teacher.hidden_states.detach(), teacher.bias)
            mix = (1 - self.weight, self.weight)
            return chunked_loss(logits, labels, stage="distillation", second=second, mix=mix).loss
        rows = max(1, chunk_rows(head.weight) // 4)  # a chunk has about seven [rows, V] matrices
        widths = [hidden_states.shape[1], states.shape[1]]

        def dense(head: Head, both: Tensor, labels: Tensor) -> Tensor:
            hidden_states, states = both.split(widths, -1)
            return self._dense(head, hidden_states, labels, states)

        # Side by side, so that both are cut into the same chunks.
        return by_chunks(dense, head, torch.cat([hidden_states, states], -1), labels, rows=rows)

    def _teacher_states(self, hidden_states: Tensor) -> Tensor:
        """Return the teacher's hidden states `[N, E]`; those that `read` has made are used once."""
        if self.body is None:
            return hidden_states.detach()
        states, self._states = self._states, None
        if states is None or len(states) != len(hidden_states):
            raise ValueError(
                f"loss distill: expected the old body to have read these {len(hidden_states)} "
                f"tokens, got {'none' if states is None else len(states)}. Call read(batch) before "
                "the model, or train with HarmonicTrainer"
            )
        return states

    def _dense(self, head: Head, hidden_states: Tensor, labels: Tensor, states: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(states).softmax(-1)  # [n, V]
            entropy = torch.special.entr(target).sum(-1)
            target.mul_(self.weight)
            own = target.new_full((len(labels), 1), 1 - self.weight)
            target.scatter_add_(-1, labels.unsqueeze(-1), own)
        log_probs = head(hidden_states).log_softmax(-1)
        cross_entropy = -torch.linalg.vecdot(target.to(log_probs.dtype), log_probs)
        return cross_entropy - self.weight * entropy
