"""InfoNCE: contrast the label's prototype with those of the batch's other labels."""

from typing import Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from harmonic_sft.config import STRICT
from harmonic_sft.losses.loss import Loss
from harmonic_sft.models import AffineLogits, DistanceLogits, Head
from harmonic_sft.models.head import at_least_float32, unit_rows
from harmonic_sft.ops import linear_cross_entropy
from harmonic_sft.ops.options import check_labels


@dataclass(frozen=True, kw_only=True, config=STRICT)
class InfoNCELoss(Loss):
    """Negative log of the label's share of exp(scale * cos) among the labels of the batch.

    The positive is the label's prototype, the negatives are the prototypes of the batch's other
    labels, each of them once. No other prototype enters the loss or gets a gradient, so that the
    probabilities of the head over all V classes are not trained; and since the negatives are those
    of one micro-batch, accumulated batches do not equal a big one. The head's own scale, exponent
    and bias take no part.

    Source:
        van den Oord et al. 2018, Contrastive Predictive Coding, arXiv:1807.03748, Eq. 4, whose
        negatives are other encodings; a label that occurs twice counts twice there.
    """

    name: Literal["info_nce"] = "info_nce"
    scale: float = Field(
        20.0, gt=0, allow_inf_nan=False, description="Multiplies the cosines: 1 / temperature"
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
        lazy = head.lazy_logits(hidden_states)
        assert isinstance(lazy, AffineLogits | DistanceLogits), "prepare has checked it"
        check_labels(labels, num_rows=len(hidden_states), num_classes=len(lazy.weight))
        candidates, targets = labels.unique(return_inverse=True)  # [U], [N]
        with torch.autocast(hidden_states.device.type, enabled=False):
            states = unit_rows(at_least_float32(lazy.hidden_states))
            # Gradients of zeros for what takes no part: processes wait for one another's.
            idle = [p for p in head.parameters() if not len(labels) or p is not head.weight]
            nothing = sum(p.flatten()[:0].sum() for p in idle if p.requires_grad)
            if not len(labels):
                return states.sum(-1) + nothing  # empty: the fused loss wants at least one class
            points = unit_rows(lazy.weight[candidates].to(states.dtype))  # [U, D]
            return linear_cross_entropy(self.scale * states, points, targets) + nothing
