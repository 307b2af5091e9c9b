"""A weighted sum of losses over the same logits."""

import functools
import operator
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from harmonic_sft.config import STRICT
from harmonic_sft.losses.cosines import ArcFaceLoss, CosFaceLoss, InfoNCELoss
from harmonic_sft.losses.knn_label_smoothing import KNNLabelSmoothingLoss, NeighborSmoothing
from harmonic_sft.losses.loss import CrossEntropyLoss, HarmonicLoss, Loss
from harmonic_sft.losses.wasserstein import Transport, WassersteinLoss
from harmonic_sft.models import AffineLogits, DistanceLogits, Head, LossFunction

# The losses that a sum may have as terms, by name: all but sums and distillation.
TERMS = {
    "cross_entropy": CrossEntropyLoss,
    "harmonic": HarmonicLoss,
    "knn_label_smoothing": KNNLabelSmoothingLoss,
    "wasserstein": WassersteinLoss,
    "arcface": ArcFaceLoss,
    "cosface": CosFaceLoss,
    "info_nce": InfoNCELoss,
}
_ANY_TERM: Any = functools.reduce(operator.or_, TERMS.values())
TermSection: Any = Annotated[_ANY_TERM, Field(discriminator="name")]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Term:
    """One loss of a sum."""

    weight: float = Field(default=1.0, allow_inf_nan=False, description="Factor of this loss")
    loss: TermSection = Field(description="Any loss but a sum, with its fields")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SumLoss(Loss):
    """A weighted sum of losses.

    Every term computes its own matrix products, except that a plain cross-entropy and a wasserstein
    without `top_k` share theirs.
    """

    name: Literal["sum"] = "sum"
    needs = "prepared terms"
    terms: list[Term] = Field(min_length=1, description="Losses and their weights; no sums")

    def check(self, head: Head) -> None:
        """Refuse a head that one of the terms refuses.

        Raises:
            ValueError: A term refuses the head.
        """
        for term in self.terms:
            term.loss.check(head)

    def prepare(self, head: Head) -> "WeightedSum":
        """Return the sum of the prepared terms.

        Raises:
            ValueError: One of them does not fit the head.
        """
        weights = [term.weight for term in self.terms]
        return WeightedSum(weights, [term.loss.prepare(head) for term in self.terms])


class WeightedSum:
    """`SumLoss` with prepared terms.

    Args:
        weights: Factors of the terms.
        losses: The terms, prepared.
    """

    def __init__(self, weights: Sequence[float], losses: Sequence[Any]):
        self.weights, self.losses = tuple(weights), tuple(losses)

    def __call__(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return one loss per token; see `Loss`. A wasserstein term has squared units."""
        logits = head.lazy_logits(hidden_states)
        terms = list(zip(self.weights, self.losses, strict=True))
        losses = []
        exact = [i for i, (_, t) in enumerate(terms) if isinstance(t, Transport) and not t.top_k]
        plain = [i for i, (_, loss) in enumerate(terms) if _is_plain(loss)]
        if exact and plain and isinstance(logits, AffineLogits | DistanceLogits):
            (carried, transport), (own, _) = terms[exact[0]], terms[plain[0]]
            losses.append(transport.with_cross_entropy(logits, head, labels, mix=(own, carried)))
            terms = [term for i, term in enumerate(terms) if i not in (exact[0], plain[0])]
        losses += [_Weighted.apply(loss(head, hidden_states, labels), w) for w, loss in terms]
        return functools.reduce(operator.add, losses)


def _is_plain(loss: Any) -> bool:
    """Whether a loss is the negative log-probability alone, by the default implementation."""
    return isinstance(loss, CrossEntropyLoss) and loss.is_plain and loss.impl != "reference"


class _Weighted(torch.autograd.Function):
    """loss * weight, whose backward pass returns a broadcast gradient broadcast: see `is_uniform`.

    A plain product would fill it, and the fused losses would compute their scores again.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return loss * weight

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (grad,) = upstream
        if grad.numel() and not any(grad.stride()):
            return (grad.flatten()[:1] * ctx.weight).expand(grad.shape), None
        return grad * ctx.weight, None


def neighbor_tables(loss: LossFunction) -> list[NeighborSmoothing]:
    """Return the tables of neighbors that a prepared loss holds."""
    losses = loss.losses if isinstance(loss, WeightedSum) else (loss,)
    return [part for part in losses if isinstance(part, NeighborSmoothing)]
