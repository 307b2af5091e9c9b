"""What every loss is, and the label's negative log-probability: cross-entropy, harmonic loss."""

from typing import ClassVar, Literal

import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from harmonic_sft.config import STRICT
from harmonic_sft.models import Head, LossFunction, MixtureLogits
from harmonic_sft.ops import Impl, LossOptions, by_chunks, chunked_loss
from harmonic_sft.ops.arguments import check_labels


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Loss:
    """The settings of a loss; `prepare` makes the loss that a model calls."""

    name: str
    needs: ClassVar[str]  # what `prepare` takes from a head, if the loss cannot be called without

    def check(self, head: Head) -> None:
        """Refuse a head that the loss does not fit.

        Args:
            head: May be on the meta device, without values.

        Raises:
            ValueError: The head does not fit.
        """

    def prepare(self, head: Head) -> LossFunction:
        """Check the head and return the loss to call, with whatever it takes from the head.

        Raises:
            ValueError: The head does not fit.
        """
        self.check(head)
        return self

    def __call__(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return one loss per token.

        Args:
            head: Maps `[N, D]` to logits `[N, V]`.
            hidden_states: `[N, D]`.
            labels: `[N]`, every one a class in `[0, V)`.

        Returns:
            `[N]`, in nats.

        Raises:
            ValueError: The loss needs something from a head, so call `prepare(head)` first.
        """
        raise ValueError(
            f"loss {self.name}: expected {self.needs}, got none. Call what prepare(head) returns"
        )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CrossEntropyLoss(Loss):
    """Negative log of the label's probability under the head's softmax."""

    name: Literal["cross_entropy"] = "cross_entropy"
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=1, description="Share of the target spread evenly over all classes"
    )
    z_loss: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="Adds this times logsumexp(logits) ** 2"
    )
    impl: Impl = Field(
        default="auto",
        description="How it is computed: see harmonic_sft.ops.distance_cross_entropy",
    )

    @property
    def is_plain(self) -> bool:
        """Whether it is the negative log-probability alone."""
        return self.label_smoothing == 0 and self.z_loss == 0

    def __call__(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return one loss per token, without the logits of all tokens at once."""
        if self.impl == "reference":
            check_labels(labels, num_rows=len(hidden_states), num_classes=len(head.weight))
            return self._dense(head, hidden_states, labels)
        logits = head.lazy_logits(hidden_states)
        if logits is None or (isinstance(logits, MixtureLogits) and not self.is_plain):
            return by_chunks(self._dense, head, hidden_states, labels)
        options = LossOptions(label_smoothing=self.label_smoothing, z_loss=self.z_loss)
        return chunked_loss(logits, labels, options=options, impl=self.impl).loss

    def _dense(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        if self.is_plain:
            return head.nll(hidden_states, labels)
        logits, smoothing = head(hidden_states), self.label_smoothing
        loss = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        return loss + self.z_loss * logits.logsumexp(-1).square() if self.z_loss else loss


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HarmonicLoss(Loss):
    """Negative log of p_y, with p_j proportional to (d_j ** 2 + eps) ** h_exp.

    The exponent and eps are settings of the head and are published with it; training anneals the
    exponent there.

    Source:
        Baek et al. 2025, Harmonic Loss Trains Interpretable AI Models, arXiv:2502.01628, Eq. 2,
        with h_exp on the squared distance: the paper's n is -2 * h_exp.
    """

    name: Literal["harmonic"] = "harmonic"
    impl: Impl = Field(
        default="auto",
        description="How it is computed: see harmonic_sft.ops.distance_cross_entropy",
    )

    def check(self, head: Head) -> None:
        """Refuse a head that measures no distances.

        Raises:
            ValueError: The head has no `h_exp`.
        """
        if head.h_exp is None:
            raise ValueError(
                f"loss harmonic: expected a dist head, got {head.settings()['name']}. "
                "Use loss cross_entropy"
            )

    def prepare(self, head: Head) -> CrossEntropyLoss:
        """Check the head and return its cross-entropy, which for distances is this loss."""
        self.check(head)
        return CrossEntropyLoss(impl=self.impl)

    def __call__(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return one loss per token: the cross-entropy of the distances."""
        return self.prepare(head)(head, hidden_states, labels)
