"""Squared 2-Wasserstein distance between prediction and label over the prototypes."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.autograd.function import once_differentiable

from harmonic_sft.config import STRICT
from harmonic_sft.losses.chunks import by_chunks
from harmonic_sft.losses.few_classes import logits_at, points_at, squared_gaps, top_classes
from harmonic_sft.losses.transport import Weights, transport_cross_entropy
from harmonic_sft.models import AffineForm, DistanceForm, Head
from harmonic_sft.models.head import at_least_float32


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WassersteinLoss:
    """Squared 2-Wasserstein distance from the predicted distribution to the label's prototype.

    The target is a Dirac, so the optimal plan is forced and W2 ** 2 = sum_j p_j |e_j - e_y| ** 2.

    With `top_k` the prediction is the softmax over the most probable classes and the label alone:
    a distribution again. Merely cutting the sum would make the tail a place without cost, and the
    gradient would move probability there.

    Matrix products of N x V x D multiplications (a cross-entropy has 3): 4 with a fixed ground and
    6 with a moving one, a cross-entropy beside it in a sum included; 1 with `top_k`, which finds
    the classes, on heads of dot products or Euclidean distances, and 3 on others.
    """

    name: Literal["wasserstein"] = "wasserstein"
    top_k: int | None = Field(
        None, ge=1, description="Only so many most probable classes and the label; null is all"
    )
    ground: Literal["moving", "fixed"] = Field(
        "moving", description="Distances between the prototypes, or between a copy of their start"
    )

    def check(self, head: Head) -> None:
        """Accept every head: each has prototypes, and their Euclidean distances are the ground."""

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
        """Return one loss per token `[N]` on moving ground; see `Transport`.

        Raises:
            ValueError: The ground is fixed: what `prepare` returns has the copy.
        """
        if self.ground == "fixed":
            raise ValueError(
                "loss wasserstein: expected a copy of the prototypes for ground fixed, got none. "
                "Call what prepare(head) returns"
            )
        return Transport(self.top_k, None)(head, hidden_states, labels)


class Transport:
    """`WassersteinLoss` on its ground.

    Args:
        top_k: As there.
        fixed: `[V, D]`, the ground points; None takes the head's prototypes, with gradients.
    """

    def __init__(self, top_k: int | None, fixed: Tensor | None):
        self.top_k = top_k
        self.fixed = fixed

    def ground(self, head: Head) -> Tensor:
        """Return the ground points `[V, D]`, float32 or better."""
        if self.fixed is None:
            return at_least_float32(head.prototypes)
        self.fixed = at_least_float32(self.fixed.to(head.weight.device))
        return self.fixed

    def __call__(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return one loss per token.

        Args:
            head: Maps `[N, D]` to logits `[N, V]` and has `prototypes` `[V, D]`.
            hidden_states: `[N, D]`.
            labels: `[N]`, every one a class in `[0, V)`.

        Returns:
            `[N]`, in squared units of the prototypes: from 0 to 4 on the unit sphere.
        """
        form = head.form(hidden_states)
        if not isinstance(form, AffineForm | DistanceForm):
            return by_chunks(self._dense, head, hidden_states, labels, shared=[self.ground(head)])
        if self.top_k is not None:
            shared = [] if self._compares_on_ground(form, head) else [self.ground(head)]
            return by_chunks(self._sparse, head, hidden_states, labels, shared=shared)
        weights = Weights(cross_entropy=0.0, transport=1.0)
        return self.with_cross_entropy(form, head, labels, weights)

    def with_cross_entropy(
        self, form: AffineForm | DistanceForm, head: Head, labels: Tensor, weights: Weights
    ) -> Tensor:
        """Return the weighted sum with the cross-entropy of the same logits.

        Args:
            form: What the head's logits of N hidden states are made of.
            head: Gives the prototypes.
            labels: `[N]`.
            weights: Of the two losses.

        Returns:
            `[N]`.
        """
        ground = None if self._compares_on_ground(form, head) else self.ground(head)
        return transport_cross_entropy(form, ground, labels, weights)

    def from_logits(
        self, logits: Tensor, head: Head, labels: Tensor, *, ground: Tensor | None = None
    ) -> Tensor:
        """Return one loss per token from its logits.

        Args:
            logits: `[N, V]`, of `head`.
            head: Gives the prototypes.
            labels: `[N]`.
            ground: What `ground(head)` returned, if it is there already.

        Returns:
            `[N]`, in squared units of the prototypes.
        """
        ground = self.ground(head) if ground is None else ground
        if self.top_k is None:
            cost: Tensor = _TransportCost.apply(logits, ground, labels)
            return cost
        columns = logits.detach().topk(self.top_k).indices  # [N, K]
        columns = torch.cat([labels.unsqueeze(-1), columns], -1)
        return _truncated_cost(logits.gather(-1, columns), F.embedding(columns, ground), columns)

    def _compares_on_ground(self, form: AffineForm | DistanceForm, head: Head) -> bool:
        """Whether the prototypes are the form's weight, normalized: they need not be made again."""
        on_sphere = isinstance(form, DistanceForm) and form.unit_sphere
        return self.fixed is None and on_sphere and form.weight is head.weight

    def _dense(self, head: Head, hidden_states: Tensor, labels: Tensor, ground: Tensor) -> Tensor:
        return self.from_logits(head(hidden_states), head, labels, ground=ground)

    def _sparse(self, head: Head, hidden_states: Tensor, labels: Tensor, *ground: Tensor) -> Tensor:
        form = head.form(hidden_states)
        assert isinstance(form, AffineForm | DistanceForm), "the others are dense"
        assert self.top_k is not None, "all classes are dense"
        columns = torch.cat([labels.unsqueeze(-1), top_classes(form, self.top_k)], -1)  # [N, 1 + K]
        points = points_at(form, columns)
        logits = logits_at(form, points, columns)
        places = F.embedding(columns, ground[0]) if ground else points
        return _truncated_cost(logits, places, columns)


class _TransportCost(torch.autograd.Function):
    """sum_j p_j |e_j - e_y| ** 2, with one matrix product forward.

    The gradient of a logit is p_j (cost_j - loss) and needs no product. That of the ground points
    is linear in the costs, so that it needs the mean points m = p E and the sums P^T E_y: two.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ground: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(logits.device.type, enabled=False):
            points = ground.to(logits.dtype)
            targets = points[labels]  # [N, D]
            probs = logits.softmax(-1)
            costs = torch.addmm(points.square().sum(-1), targets, points.T, alpha=-2)  # [N, V]
            costs.add_(targets.square().sum(-1, keepdim=True)).clamp_min_(0)
            costs.scatter_(-1, labels.unsqueeze(-1), 0)  # rounding left it close to 0
            loss = torch.linalg.vecdot(probs, costs)
            slopes = costs.sub_(loss.unsqueeze(-1)).mul_(probs)
        moving = ctx.needs_input_grad[1]
        ctx.save_for_backward(slopes, labels, *((probs, ground) if moving else ()))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        slopes, labels, *moving = ctx.saved_tensors
        (grad,) = upstream
        weights = grad.unsqueeze(-1)  # [N, 1]
        logits_gradient = slopes * weights if ctx.needs_input_grad[0] else None
        if not moving:
            return logits_gradient, None, None
        probs, ground = moving
        with torch.autocast(probs.device.type, enabled=False):
            points = ground.to(probs.dtype)
            targets = points[labels]
            means = probs @ points  # [N, D]
            probs = probs * weights
            gradient = points * (2 * probs.sum(0)).unsqueeze(-1)  # [V, D]
            gradient.addmm_(probs.T, targets, alpha=-2)
            gradient.index_add_(0, labels, 2 * weights * (targets - means))
        return logits_gradient, gradient.to(ground.dtype), None


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
    costs = squared_gaps(points, points[:, :1]).squeeze(-1)  # [N, 1 + K]
    return (probs * costs).sum(-1)
