"""Cross-entropy of any head's logits."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from harmonic_sft.models import Head


@dataclass(frozen=True, kw_only=True)
class CrossEntropyLoss:
    """Negative log of the label's probability under the head's softmax."""

    def prepare(self, head: Head) -> Self:
        """Return this loss: it fits every head and needs nothing from it."""
        return self

    def __call__(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return one loss per token.

        Args:
            head: Maps `[N, D]` to logits `[N, V]`.
            hidden_states: `[N, D]`.
            labels: `[N]`, every one a class in `[0, V)`.

        Returns:
            `[N]`, in nats.
        """
        return head.nll(hidden_states, labels)
