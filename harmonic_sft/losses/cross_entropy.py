"""Cross-entropy of any head's logits."""

from typing import Literal

import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from harmonic_sft.config import STRICT
from harmonic_sft.losses.loss import Loss
from harmonic_sft.models import Head, MixtureLogits
from harmonic_sft.ops import Impl, LossOptions, by_chunks, chunked_loss


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CrossEntropyLoss(Loss):
    """Negative log of the label's probability under the head's softmax."""

    name: Literal["cross_entropy"] = "cross_entropy"
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="Share of the target spread evenly over all classes"
    )
    z_loss: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="Adds this times logsumexp(logits) ** 2"
    )
    impl: Impl = Field(
        "auto", description="How it is computed: see harmonic_sft.ops.distance_cross_entropy"
    )

    @property
    def is_plain(self) -> bool:
        """Whether it is the negative log-probability alone."""
        return self.label_smoothing == 0 and self.z_loss == 0

    def __call__(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return one loss per token, without the logits of all tokens at once."""
        if self.impl == "reference":
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
