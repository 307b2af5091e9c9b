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
from harmonic_sft.losses.chunks import by_chunks
from harmonic_sft.losses.cross_entropy import CrossEntropyLoss
from harmonic_sft.losses.harmonic import HarmonicLoss
from harmonic_sft.losses.info_nce import InfoNCELoss
from harmonic_sft.losses.knn_label_smoothing import KNNLabelSmoothingLoss, NeighborSmoothing
from harmonic_sft.losses.terms import TERMS
from harmonic_sft.losses.transport import Weights
from harmonic_sft.losses.wasserstein import Transport
from harmonic_sft.models import AffineForm, DistanceForm, Head, LossFunction

_ANY_TERM: Any = functools.reduce(operator.or_, TERMS.values())
TermSection: Any = Annotated[_ANY_TERM, Field(discriminator="name")]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Term:
    """One loss of a sum."""

    weight: float = Field(1.0, allow_inf_nan=False, description="Factor of this loss")
    loss: TermSection


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SumLoss:
    """A weighted sum of losses.

    Where two or more terms start from the logits of all classes, one chunk of logits serves them
    all, and `impl` of a term has no effect; a single one takes its own, fused, way.
    """

    name: Literal["sum"] = "sum"
    terms: list[Term] = Field(min_length=1, description="Losses and their weights; no sums")

    def check(self, head: Head) -> None:
        """Refuse a head that one of the terms refuses.

        Raises:
            ValueError: One does.
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

    def __call__(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Refuse to work without what the terms prepare.

        Raises:
            ValueError: Always; what `prepare` returns is called.
        """
        raise ValueError(
            "loss sum: expected prepared terms, got their settings. Call what prepare(head) returns"
        )


class WeightedSum:
    """`SumLoss` with prepared terms.

    Args:
        weights: Of the terms.
        losses: The terms, prepared.
    """

    def __init__(self, weights: Sequence[float], losses: Sequence[Any]):
        self.weights, self.losses = tuple(weights), tuple(losses)

    def __call__(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return one loss per token.

        Args:
            head: Maps `[N, D]` to logits `[N, V]`.
            hidden_states: `[N, D]`.
            labels: `[N]`, every one a class in `[0, V)`.

        Returns:
            `[N]`, in nats, but for the squared units of a wasserstein term.
        """
        form = head.form(hidden_states)
        fused = isinstance(form, AffineForm | DistanceForm)
        terms = list(zip(self.weights, self.losses, strict=True))
        dense = [term for term in terms if _starts_from_logits(term[1], fused=fused)]
        if len(dense) < 2:
            dense = []
        own = [term for term in terms if term not in dense]
        found = [_Weighted.apply(loss(head, hidden_states, labels), w) for w, loss in own]
        transports = [loss for _, loss in dense if isinstance(loss, Transport)]
        pair = _cross_entropy_and_transport(dense)
        if pair is not None and isinstance(form, AffineForm | DistanceForm):
            found.append(transports[0].with_cross_entropy(form, head, labels, pair))
        elif dense:
            grounds = [loss.ground(head) for loss in transports]
            from_logits = functools.partial(_from_logits, dense)
            found.append(by_chunks(from_logits, head, hidden_states, labels, shared=grounds))
        return functools.reduce(operator.add, found)


def _starts_from_logits(loss: Any, *, fused: bool) -> bool:
    """Whether a loss needs the logits of all classes; those of a few are cheaper by themselves."""
    few = isinstance(loss, Transport) and loss.top_k is not None and fused
    return not few and not isinstance(loss, InfoNCELoss)


def _cross_entropy_and_transport(dense: Sequence[tuple[float, Any]]) -> Weights | None:
    """Return the weights of the two if the terms are these alone: they have their own function."""
    plain = [
        weight
        for weight, loss in dense
        if isinstance(loss, HarmonicLoss) or (isinstance(loss, CrossEntropyLoss) and loss.is_plain)
    ]
    exact = [w for w, loss in dense if isinstance(loss, Transport) and loss.top_k is None]
    if len(exact) != 1 or len(plain) + 1 != len(dense):
        return None
    return Weights(cross_entropy=sum(plain), transport=exact[0])


def _from_logits(
    terms: Sequence[tuple[float, Any]],
    head: Head,
    hidden_states: Tensor,
    labels: Tensor,
    *grounds: Tensor,
) -> Tensor:
    """Return the weighted sum of the terms `[n]` over one chunk of logits."""
    logits, left = head(hidden_states), iter(grounds)
    total = logits.new_zeros(len(labels))
    for weight, loss in terms:
        if isinstance(loss, Transport):
            found = loss.from_logits(logits, head, labels, ground=next(left))
        else:
            found = loss.from_logits(logits, head, labels)
        total = total + weight * found
    return total


class _Weighted(torch.autograd.Function):
    """A factor whose backward pass keeps uniform gradients uniform, as the fused losses want."""

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


def refresh_intervals(loss: Any) -> list[int]:
    """Return after how many steps the tables of a loss of `LOSSES` are to be made anew."""
    losses = [term.loss for term in loss.terms] if isinstance(loss, SumLoss) else [loss]
    tables = [part for part in losses if isinstance(part, KNNLabelSmoothingLoss)]
    return [table.refresh_every for table in tables if table.refresh_every is not None]


def neighbor_tables(loss: LossFunction) -> list[NeighborSmoothing]:
    """Return the tables of neighbors that a prepared loss holds."""
    losses = loss.losses if isinstance(loss, WeightedSum) else (loss,)
    return [part for part in losses if isinstance(part, NeighborSmoothing)]
