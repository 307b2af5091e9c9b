"""Squared 2-Wasserstein distances over the prototypes: to the label, and to a reference policy."""

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

NOTHING = 1e-12  # total variation below which distributions are the same


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WassersteinLoss(Loss):
    """Squared 2-Wasserstein distance from the predicted distribution to the label's prototype.

    The target is a Dirac, so the optimal plan is forced and W2 ** 2 = sum_j p_j |e_j - e_y| ** 2.

    With `top_k` the prediction is the softmax over the most probable classes and the label alone:
    in a sum merely cut, the tail would cost nothing, and the gradient would move probability there.

    Matrix products of N x V x D multiplications (a cross-entropy has 3): 4 with a fixed ground and
    6 with a moving one, a cross-entropy beside it in a sum included; 3 with `top_k`.
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
            ValueError: There are not more classes than `top_k`.
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
        return by_chunks(self._dense, head, hidden_states, labels, shared=[self.ground(head)])

    def with_cross_entropy(
        self,
        logits: AffineLogits | DistanceLogits,
        head: Head,
        labels: Tensor,
        *,
        mix: tuple[float, float],
    ) -> Tensor:
        """Return the weighted sum with the cross-entropy of the same logits.

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

    def _dense(self, head: Head, hidden_states: Tensor, labels: Tensor, ground: Tensor) -> Tensor:
        logits = head(hidden_states)  # [N, V]
        if self.top_k is None:
            points = ground.to(logits.dtype)
            squares, targets = points.square().sum(-1), points[labels]
            costs = squares + squares[labels].unsqueeze(-1) - 2 * targets @ points.T  # [N, V]
            # Rounding can push a small cost below zero; that of the label is 0.
            costs = costs.clamp_min(0).scatter(-1, labels.unsqueeze(-1), 0)
            return torch.linalg.vecdot(logits.softmax(-1), costs)
        columns = logits.detach().topk(self.top_k).indices  # [N, K]
        columns = torch.cat([labels.unsqueeze(-1), columns], -1)
        return _truncated_cost(logits.gather(-1, columns), F.embedding(columns, ground), columns)


def _squared_gaps(points: Tensor, other: Tensor) -> Tensor:
    """Return the squared distances `[N, K]` of `[N, K, D]` and `[N, 1, D]`, by difference."""
    distances = torch.cdist(points, other, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.squeeze(-1).square()  # no matrix of gaps; a gradient of 0 where there is none


def _truncated_cost(logits: Tensor, points: Tensor, columns: Tensor) -> Tensor:
    """Return the cost `[N]` of the softmax over a few classes, the label first.

    Args:
        logits: `[N, 1 + K]`.
        points: `[N, 1 + K, D]`, where the classes are.
        columns: `[N, 1 + K]`, the classes; the label may come again and is left out then.
    """
    again = columns == columns[:, :1]
    again[:, 0] = False
    probs = logits.masked_fill(again, -torch.inf).softmax(-1)
    costs = _squared_gaps(points, points[:, :1])  # [N, 1 + K]
    return (probs * costs).sum(-1)


def w2_penalty(policy_logits: Tensor, reference_logits: Tensor, prototypes: Tensor) -> Tensor:
    """Return an upper bound of the squared 2-Wasserstein distance of two next-token distributions.

    In place of a KL divergence. Experimental: nobody has trained a large model with it.

    What both distributions give a token stays there, and what the policy has given up goes to what
    it has gained in proportion (the maximal coupling, its rest independent): with a = (p - r)+,
    b = (r - p)+ and their common sum t the bound is sum_jk a_j b_k |e_j - e_k| ** 2 / t. It is 0
    where the distributions agree, and exact where one of them is a Dirac or only two tokens differ:
    moving to a token nearby then costs little, which a KL divergence does not see. Where many
    tokens differ it is far above the distance, since each part goes to all that have gained: ten
    words that each move to a synonym cost nearly as much as moves to unrelated words. Two products
    of N x V x D multiplications instead of a transport problem.

    Args:
        policy_logits: `[N, V]`, p; gradients flow through them.
        reference_logits: `[N, V]`, r; none do.
        prototypes: `[V, D]`, where the tokens are, such as `head.prototypes`; none do.

    Returns:
        `[N]`, in squared units of the prototypes.

    Source:
        Maximal coupling: Lindvall 1992, Lectures on the Coupling Method, Sec. I.5. As a penalty:
        the open question of the geometry note, whether the KL divergence of preference training
        can be a Wasserstein expectation.
    """
    wide = torch.promote_types(policy_logits.dtype, torch.float32)
    with torch.autocast(policy_logits.device.type, enabled=False):
        policy = policy_logits.to(wide).softmax(-1)
        reference = reference_logits.detach().to(wide).softmax(-1)
        change, points = policy - reference, prototypes.detach().to(wide)
        gained, given_up = change.clamp_min(0), (-change).clamp_min(0)
        moved = gained.sum(-1)  # [N], the total variation
        # Only differences count, and a common mean takes their digits.
        points = points - points.mean(0)
        squares = points.square().sum(-1)  # [V]
        # Where nothing moved the last term is 0 / 0, and near there the slope of 1 / t overflows.
        inverse = torch.where(moved > NOTHING, moved, 1.0).reciprocal()
        cross = torch.linalg.vecdot(gained @ points, given_up @ points) * inverse
        return (gained + given_up) @ squares - 2 * cross
