"""Squared 2-Wasserstein distance over the prototypes, from the prediction to the label."""

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from harmonic_sft.config import STRICT
from harmonic_sft.losses.loss import Loss
from harmonic_sft.models import AffineLogits, DistanceLogits, Head
from harmonic_sft.models.head import at_least_float32
from harmonic_sft.ops import by_chunks, chunked_loss


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WassersteinLoss(Loss):
    """Squared 2-Wasserstein distance from the predicted distribution to the label's prototype.

    The target is a Dirac, so the optimal plan is forced and W2 ** 2 = sum_j p_j |e_j - e_y| ** 2.

    With `top_k` the prediction is the softmax over the most probable classes and the label alone.
    If the sum were only truncated, the tail would cost nothing, and the gradient would move
    probability there.

    Cost in matrix products of N x V x D multiplications, of which a cross-entropy has 3: 4 with a
    fixed ground, 6 with a moving one, 3 with `top_k`. The 4 and the 6 also cover a cross-entropy
    beside it in a sum.
    """

    name: Literal["wasserstein"] = "wasserstein"
    needs = "a copy of the prototypes for ground fixed"
    top_k: int | None = Field(
        default=None,
        ge=1,
        description="Only so many most probable classes and the label; null is all",
    )
    ground: Literal["moving", "fixed"] = Field(
        default="moving",
        description="Distances between the prototypes, or between a copy of their start",
    )

    def prepare(self, head: Head) -> "Transport":
        """Return the loss on its ground: the head's prototypes, or a copy of them as they are now.

        Raises:
            ValueError: `top_k` is not below the number of classes.
        """
        if self.top_k is not None and self.top_k >= len(head.weight):
            raise ValueError(
                f"top_k: expected less than {len(head.weight)}, the number of classes, "
                f"got {self.top_k}. Leave it out"
            )
        copy = head.prototypes.detach().clone() if self.ground == "fixed" else None
        return Transport(self.top_k, copy)

    def __call__(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return one loss per token on moving ground, in squared units; see `Transport`."""
        if self.ground == "fixed":
            return super().__call__(head, hidden_states, labels)  # refuses
        return Transport(self.top_k, None)(head, hidden_states, labels)


class Transport:
    """`WassersteinLoss` on its ground.

    Args:
        top_k: As in `WassersteinLoss`.
        fixed: `[V, D]`, the ground points; None takes the head's prototypes, with gradients.
    """

    def __init__(self, top_k: int | None, fixed: Tensor | None):
        self.top_k = top_k
        self.fixed = fixed

    def ground(self, head: Head) -> Tensor:
        """Return the ground points `[V, D]`, float32 or better."""
        if self.fixed is None:
            return at_least_float32(head.prototypes)
        if len(self.fixed) != len(head.weight):
            raise ValueError(
                f"loss wasserstein: expected a fixed ground for {len(head.weight)} classes, got "
                f"one for {len(self.fixed)}. Resize the vocabulary before prepare(head)"
            )
        self.fixed = at_least_float32(self.fixed.to(head.weight.device))
        return self.fixed

    def __call__(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return one loss per token; see `Loss`.

        They are in squared units of the prototypes: from 0 to 4 on the unit sphere.
        """
        logits = head.lazy_logits(hidden_states)
        if isinstance(logits, AffineLogits | DistanceLogits) and self.top_k is None:
            return self.with_cross_entropy(logits, head, labels, mix=(0.0, 1.0))
        return by_chunks(self._dense, head, hidden_states, labels)

    def with_cross_entropy(
        self,
        logits: AffineLogits | DistanceLogits,
        head: Head,
        labels: Tensor,
        *,
        mix: tuple[float, float],
    ) -> Tensor:
        """Return the weighted sum of this loss and the cross-entropy of the same logits.

        Args:
            logits: The head's, of N hidden states.
            head: Gives the prototypes.
            labels: `[N]`.
            mix: Factors of cross-entropy and transport.

        Returns:
            `[N]`.
        """
        second = (self.ground(head), None, None)
        return chunked_loss(logits, labels, stage="transport", second=second, mix=mix).loss

    def _dense(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        logits, ground = head(hidden_states), self.ground(head)  # [N, V], [V, D]
        if self.top_k is None:
            points = ground.to(logits.dtype)
            points = points - points.detach().mean(0)  # a common offset would cost digits
            squares, targets = points.square().sum(-1), points[labels]
            costs = squares + squares[labels].unsqueeze(-1) - 2 * targets @ points.T  # [N, V]
            # Rounding can push a small cost below zero; that of the label is 0.
            costs = costs.clamp_min(0).scatter(-1, labels.unsqueeze(-1), 0)
            return torch.linalg.vecdot(logits.softmax(-1), costs)
        columns = logits.detach().topk(self.top_k).indices  # [N, K]
        columns = torch.cat([labels.unsqueeze(-1), columns], -1)
        return _truncated_cost(logits.gather(-1, columns), F.embedding(columns, ground), columns)


def _truncated_cost(logits: Tensor, points: Tensor, columns: Tensor) -> Tensor:
    """Return the cost `[N]` of the softmax over a few classes, the label first.

    Args:
        logits: `[N, 1 + K]`.
        points: `[N, 1 + K, D]`, the ground points of the classes.
        columns: `[N, 1 + K]`, the classes; if the label is repeated, the repetition is left out.
    """
    again = columns == columns[:, :1]
    again[:, 0] = False
    probs = logits.masked_fill(again, -torch.inf).softmax(-1)
    # cdist subtracts without storing the differences; its gradient at distance 0 is 0.
    gaps = torch.cdist(points, points[:, :1], compute_mode="donot_use_mm_for_euclid_dist")
    return (probs * gaps.squeeze(-1).square()).sum(-1)
