"""Losses on cosines: ArcFace and CosFace, with a margin on the label, and InfoNCE."""

import math
from abc import abstractmethod
from typing import Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from harmonic_sft.config import STRICT
from harmonic_sft.losses.loss import Loss
from harmonic_sft.models import AffineLogits, CosineHead, DistanceLogits, Head, MappedHead
from harmonic_sft.models.head import at_least_float32, label_nll, unit_rows
from harmonic_sft.ops import by_chunks, linear_cross_entropy
from harmonic_sft.ops.arguments import check_labels

MIN_SQUARED_SINE = 1e-7  # below it rounding dominates, and at 0 the square root's slope is infinite


def _compares(head: Head) -> Head:
    """Return the head inside all `MappedHead`s, which compares what they have mapped."""
    while isinstance(head, MappedHead):
        head = head.inner
    return head


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _MarginLoss(Loss):
    """Cross-entropy of a cosine head's logits, with the label's logit lowered by a margin."""

    margin: float

    def check(self, head: Head) -> None:
        """Refuse any head but cosine: a margin needs its angles and its scale.

        Raises:
            ValueError: The head is not a cosine head.
        """
        if not isinstance(_compares(head), CosineHead):
            raise ValueError(
                f"loss {self.name}: expected a cosine head, got {head.settings()['name']}"
            )

    def __call__(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return one loss per token."""
        self.check(head)
        return by_chunks(self._dense, head, hidden_states, labels)

    def _dense(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        cosines = _compares(head)
        assert isinstance(cosines, CosineHead), "checked before"
        logits, labels = head(hidden_states), labels.unsqueeze(-1)  # [N, V], [N, 1]
        own = self._with_margin(logits.gather(-1, labels), cosines.scale)
        return label_nll(logits, labels, own)

    @abstractmethod
    def _with_margin(self, logits: Tensor, scale: Tensor | float) -> Tensor:
        """Return the labels' logits `[N, 1]` with the margin."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ArcFaceLoss(_MarginLoss):
    """Cross-entropy whose label logit is scale * cos(theta + margin), not scale * cos(theta).

    The scale is the head's. The margin is part of the loss only: the head predicts without it.
    Where theta + margin is above pi the cosine would rise again; there, as in the authors' code,
    the label's logit is scale * (cos(theta) - margin * sin(margin)).

    Source:
        Deng et al. 2019, ArcFace, arXiv:1801.07698, Eq. 3, with a scale of 64 and a margin of 0.5.
    """

    name: Literal["arcface"] = "arcface"
    margin: float = Field(
        default=0.5, ge=0, lt=math.pi, description="Added to the angle, in radians"
    )

    def _with_margin(self, logits: Tensor, scale: Tensor | float) -> Tensor:
        cosines = logits / scale
        sines = (1 - cosines.square()).clamp_min(MIN_SQUARED_SINE).sqrt()
        turned = cosines * math.cos(self.margin) - sines * math.sin(self.margin)
        beyond = cosines - self.margin * math.sin(self.margin)
        return scale * torch.where(cosines > -math.cos(self.margin), turned, beyond)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CosFaceLoss(_MarginLoss):
    """Cross-entropy whose label logit is scale * (cos(theta) - margin), not scale * cos(theta).

    The scale is the head's. The margin is part of the loss only: the head predicts without it.

    Source:
        Wang et al. 2018, CosFace, arXiv:1801.09414, Eq. 4, with a scale of 64 and a margin of 0.35.
    """

    name: Literal["cosface"] = "cosface"
    margin: float = Field(default=0.35, ge=0, le=2, description="Taken from the label's cosine")

    def _with_margin(self, logits: Tensor, scale: Tensor | float) -> Tensor:
        return logits - scale * self.margin


@dataclass(frozen=True, kw_only=True, config=STRICT)
class InfoNCELoss(Loss):
    """Negative log of the label's share of exp(scale * cos) among the labels of the batch.

    The positive is the label's prototype, the negatives are the prototypes of the batch's other
    labels, each of them once. No other prototype enters the loss or gets a gradient, so the head's
    probabilities over all V classes are not trained. The negatives come from one micro-batch, so
    accumulated batches do not equal a big one. The head's own scale, exponent and bias are not
    used.

    Source:
        van den Oord et al. 2018, Contrastive Predictive Coding, arXiv:1807.03748, Eq. 4, whose
        negatives are other encodings; a label that occurs twice counts twice there.
    """

    name: Literal["info_nce"] = "info_nce"
    scale: float = Field(
        default=20.0,
        gt=0,
        allow_inf_nan=False,
        description="Multiplies the cosines: 1 / temperature",
    )

    def check(self, head: Head) -> None:
        """Refuse a head that does not compare one vector with one prototype for each class.

        Raises:
            ValueError: Its logits are neither dot products nor Euclidean distances.
        """
        with torch.no_grad():  # the head may be on the meta device
            lazy = head.lazy_logits(head.weight.new_empty(1, head.weight.shape[1]))
        if not isinstance(lazy, AffineLogits | DistanceLogits):
            raise ValueError(
                "loss info_nce: expected a head of dot products, cosines or Euclidean distances, "
                f"got {head.settings()}"
            )

    def __call__(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return one loss per token, without a matrix of all pairs at once."""
        self.check(head)
        lazy = head.lazy_logits(hidden_states)
        assert isinstance(lazy, AffineLogits | DistanceLogits), "this is what was checked"
        check_labels(labels, num_rows=len(hidden_states), num_classes=len(lazy.weight))
        candidates, targets = labels.unique(return_inverse=True)  # [U], [N]
        states = unit_rows(at_least_float32(lazy.hidden_states))
        # Unused parameters get a gradient of zeros, since DDP waits for the gradients of all.
        idle = [p for p in head.parameters() if not len(labels) or p is not head.weight]
        nothing = sum(p.flatten()[:0].sum() for p in idle)
        if not len(labels):
            return states.sum(-1) + nothing  # empty: the fused loss wants at least one class
        points = unit_rows(lazy.weight[candidates].to(states.dtype))  # [U, D]
        return linear_cross_entropy(self.scale * states, points, targets) + nothing
