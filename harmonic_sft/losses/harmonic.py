"""Harmonic loss: the cross-entropy of a distance head."""

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from harmonic_sft.config import STRICT
from harmonic_sft.losses.cross_entropy import CrossEntropyLoss
from harmonic_sft.losses.loss import Loss
from harmonic_sft.models import Head
from harmonic_sft.ops import Impl


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HarmonicLoss(Loss):
    """Negative log of p_y, with p_j proportional to (d_j ** 2 + eps) ** h_exp.

    The exponent and eps belong to the head, which anneals and publishes them.

    Source:
        Baek et al. 2025, Harmonic Loss Trains Interpretable AI Models, arXiv:2502.01628, Eq. 2,
        with h_exp on the squared distance: the paper's n is -2 * h_exp.
    """

    name: Literal["harmonic"] = "harmonic"
    impl: Impl = Field(
        "auto", description="How it is computed: see harmonic_sft.ops.distance_cross_entropy"
    )

    def check(self, head: Head) -> None:
        """Refuse a head that measures no distances.

        Raises:
            ValueError: It does not.
        """
        if head.h_exp is None:
            raise ValueError(
                f"loss harmonic: expected a dist head, got {head.settings()['name']}. "
                "Use loss cross_entropy"
            )

    def prepare(self, head: Head) -> CrossEntropyLoss:
        """Return what it is, after `check`: the cross-entropy of the head's distances."""
        self.check(head)
        return CrossEntropyLoss(impl=self.impl)

    def __call__(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return one loss per token: the cross-entropy of the distances."""
        return self.prepare(head)(head, hidden_states, labels)
