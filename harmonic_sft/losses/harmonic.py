"""Harmonic loss: the cross-entropy of a distance head."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from harmonic_sft.losses.cross_entropy import CrossEntropyLoss
from harmonic_sft.models import DistLayer, Head
from harmonic_sft.ops import Impl


@dataclass(frozen=True, kw_only=True)
class HarmonicLoss:
    """Negative log of p_y, with p_j proportional to (d_j ** 2 + eps) ** h_exp.

    The exponent and eps belong to the head, which anneals and publishes them.

    Attributes:
        impl: How it is computed; see `harmonic_sft.ops.distance_cross_entropy`.

    Source:
        Baek et al. 2025, Harmonic Loss Trains Interpretable AI Models, arXiv:2502.01628, Eq. 2,
        with h_exp on the squared distance: the paper's n is -2 * h_exp.
    """

    impl: Impl = "auto"

    def prepare(self, head: Head) -> Self:
        """Return this loss, after making sure that `head` measures distances.

        Raises:
            ValueError: It does not.
        """
        if not isinstance(head, DistLayer):
            raise ValueError(
                f"loss harmonic: expected a dist head, got {head.settings()['name']}. "
                "Use loss cross_entropy"
            )
        return self

    def __call__(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return one loss per token: the cross-entropy of the distances.

        Args:
            head: A `DistLayer`.
            hidden_states: `[N, D]`.
            labels: `[N]`, every one a class in `[0, V)`.

        Returns:
            `[N]`, in nats.
        """
        return CrossEntropyLoss(impl=self.impl)(head, hidden_states, labels)
