"""Cross-entropy of any head's logits."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from harmonic_sft.models import DistLayer, Head, LinearHead
from harmonic_sft.ops import Impl, LossOptions, distance_cross_entropy, linear_cross_entropy


@dataclass(frozen=True, kw_only=True)
class CrossEntropyLoss:
    """Negative log of the label's probability under the head's softmax.

    Attributes:
        impl: How it is computed; see `harmonic_sft.ops.distance_cross_entropy`.
    """

    impl: Impl = "auto"

    def prepare(self, head: Head) -> Self:
        """Return this loss: it fits every head and needs nothing from it."""
        return self

    def __call__(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return one loss per token, what `head.nll` defines, without logits where that is known.

        Args:
            head: Maps `[N, D]` to logits `[N, V]`.
            hidden_states: `[N, D]`.
            labels: `[N]`, every one a class in `[0, V)`.

        Returns:
            `[N]`, in nats.
        """
        if isinstance(head, DistLayer):
            return distance_cross_entropy(
                hidden_states,
                head.weight,
                labels,
                h_exp=head.h_exp,
                unit_sphere=head.unit_sphere,
                eps=head.eps,
                impl=self.impl,
            )
        if isinstance(head, LinearHead):
            options = LossOptions(class_bias=head.bias)
            return linear_cross_entropy(
                hidden_states, head.weight, labels, options=options, impl=self.impl
            )
        return head.nll(hidden_states, labels)
