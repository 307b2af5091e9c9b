"""ArcFace and CosFace: cross-entropy of cosines with a margin on the label."""

import math
from abc import abstractmethod
from typing import Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from harmonic_sft.config import STRICT
from harmonic_sft.losses.loss import Loss
from harmonic_sft.models import CosineHead, Head
from harmonic_sft.models.head import label_nll
from harmonic_sft.ops import by_chunks

MIN_SQUARED_SINE = 1e-7  # below it rounding decides, and the slope of the square root is not finite


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _MarginLoss(Loss):
    """Cross-entropy of a cosine head's logits, that of the label made smaller."""

    margin: float

    def check(self, head: Head) -> None:
        """Refuse any head but cosine: a margin needs its angles and its scale.

        Raises:
            ValueError: It is another one.
        """
        if not isinstance(head, CosineHead):
            raise ValueError(
                f"loss {self.name}: expected a cosine head, got {head.settings()['name']}"
            )

    def __call__(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return one loss per token."""
        self.check(head)
        return by_chunks(self._dense, head, hidden_states, labels)

    def _dense(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        assert isinstance(head, CosineHead), "checked before"
        logits, labels = head(hidden_states), labels.unsqueeze(-1)  # [N, V], [N, 1]
        return label_nll(logits, labels, self._moved(logits.gather(-1, labels), head.scale))

    @abstractmethod
    def _moved(self, logits: Tensor, scale: Tensor | float) -> Tensor:
        """Return what the logits of the labels `[N, 1]` become."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ArcFaceLoss(_MarginLoss):
    """Cross-entropy with the label's logit scale * cos(theta) made scale * cos(theta + margin).

    The scale is the head's. The margin only trains: the head predicts without it. Where theta +
    margin is above pi the cosine would rise again; there, as the authors' code does, the label's
    logit is scale * (cos(theta) - margin * sin(margin)).

    Source:
        Deng et al. 2019, ArcFace, arXiv:1801.07698, Eq. 3, with a scale of 64 and a margin of 0.5.
    """

    name: Literal["arcface"] = "arcface"
    margin: float = Field(0.5, ge=0, lt=math.pi, description="Added to the angle, in radians")

    def _moved(self, logits: Tensor, scale: Tensor | float) -> Tensor:
        cosines = logits / scale
        sines = (1 - cosines.square()).clamp_min(MIN_SQUARED_SINE).sqrt()
        turned = cosines * math.cos(self.margin) - sines * math.sin(self.margin)
        beyond = cosines - self.margin * math.sin(self.margin)
        return scale * torch.where(cosines > -math.cos(self.margin), turned, beyond)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CosFaceLoss(_MarginLoss):
    """Cross-entropy with the label's logit scale * cos(theta) made scale * (cos(theta) - margin).

    The scale is the head's. The margin only trains: the head predicts without it.

    Source:
        Wang et al. 2018, CosFace, arXiv:1801.09414, Eq. 4, with a scale of 64 and a margin of 0.35.
    """

    name: Literal["cosface"] = "cosface"
    margin: float = Field(0.35, ge=0, le=2, description="Taken from the label's cosine")

    def _moved(self, logits: Tensor, scale: Tensor | float) -> Tensor:
        return logits - scale * self.margin
