"""Label smoothing towards the neighbors of the label in the space of the prototypes."""

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from harmonic_sft.config import STRICT
from harmonic_sft.losses.loss import Loss
from harmonic_sft.models import Head, MixtureLogits
from harmonic_sft.models.head import at_least_float32
from harmonic_sft.ops import Impl, LossOptions, by_chunks, chunked_loss
from harmonic_sft.ops.arguments import check_labels
from harmonic_sft.ops.dense_chunks import chunk_rows


class NeighborTable(NamedTuple):
    """The smoothing distribution of every class.

    Attributes:
        indices: `[V, K]`, int64, the nearest other classes.
        weights: `[V, K]`, positive, each row sums to 1.
    """

    indices: Tensor
    weights: Tensor


@dataclass(frozen=True, kw_only=True, config=STRICT)
class KNNLabelSmoothingLoss(Loss):
    """Cross-entropy with a share of the target on the nearest prototypes of the label.

    The target of label y is (1 - epsilon) at y and epsilon * q_j at its nearest prototypes j,
    q_j proportional to exp(scale * <e_j, e_y>), e normalized. `prepare` makes the table
    of q, and it is made again every `refresh_every` steps.

    Source:
        Label smoothing: Szegedy et al. 2016, arXiv:1512.00567, whose target is uniform.
    """

    name: Literal["knn_label_smoothing"] = "knn_label_smoothing"
    needs = "a table of neighbors"
    epsilon: float = Field(
        default=0.1, ge=0, lt=1, description="Share of the target on the neighbors"
    )
    num_neighbors: int = Field(default=10, ge=1, description="How many of the nearest prototypes")
    scale: float = Field(
        default=10.0,
        ge=0,
        allow_inf_nan=False,
        description="1 / temperature of the neighbors' cosines",
    )
    refresh_every: int | None = Field(
        default=None, ge=1, description="Steps after which neighbors are found again; null is never"
    )
    impl: Impl = Field(
        default="auto",
        description="How it is computed: see harmonic_sft.ops.distance_cross_entropy",
    )

    def prepare(self, head: Head) -> "NeighborSmoothing":
        """Return the loss with the table of the head's prototypes as they are now.

        Raises:
            ValueError: There are fewer than `num_neighbors` other prototypes.
        """
        return NeighborSmoothing(self, head)


class NeighborSmoothing:
    """`KNNLabelSmoothingLoss` with its table, which `refresh` replaces.

    Args:
        loss: The settings.
        head: Gives the prototypes.

    Attributes:
        table: The neighbors of every class; each call moves it to the labels' device.
    """

    def __init__(self, loss: KNNLabelSmoothingLoss, head: Head):
        num_others = len(head.weight) - 1
        if loss.num_neighbors > num_others:
            raise ValueError(
                f"num_neighbors: expected at most {num_others}, the number of other prototypes, "
                f"got {loss.num_neighbors}"
            )
        self.loss = loss
        self.refresh(head)

    def refresh(self, head: Head) -> None:
        """Make the table again from the head's prototypes as they are now."""
        loss = self.loss
        self.table = find_neighbors(head.prototypes.detach(), loss.num_neighbors, scale=loss.scale)

    def __call__(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return one loss per token; see `Loss`. Its minimum is the entropy of the target."""
        check_labels(labels, num_rows=len(hidden_states), num_classes=len(head.weight))
        if len(self.table.indices) != len(head.weight):  # the vocabulary was resized
            self.refresh(head)
        if self.loss.impl == "reference":
            return self._dense(head, hidden_states, labels)
        logits = head.lazy_logits(hidden_states)
        if logits is None or isinstance(logits, MixtureLogits):
            return by_chunks(self._dense, head, hidden_states, labels)
        targets, weights = self._targets(labels)
        options = LossOptions(target_weights=weights)
        return chunked_loss(logits, targets, options=options, impl=self.loss.impl).loss

    def _dense(self, head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
        log_probs = head(hidden_states).log_softmax(-1)
        targets, weights = self._targets(labels)  # [N, 1 + K]
        return -(weights.to(log_probs.dtype) * log_probs.gather(-1, targets)).sum(-1)

    def _targets(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the classes `[N, 1 + K]` of the target and their probabilities."""
        self.table = NeighborTable(*(t.to(labels.device) for t in self.table))
        indices, weights = (t[labels] for t in self.table)  # [N, K]
        epsilon = self.loss.epsilon
        own = weights.new_full((len(labels), 1), 1 - epsilon)
        targets = torch.cat([labels.unsqueeze(-1), indices], -1)
        return targets, torch.cat([own, epsilon * weights], -1)


@torch.no_grad()
def find_neighbors(prototypes: Tensor, num_neighbors: int, *, scale: float) -> NeighborTable:
    """Return the exact nearest prototypes by cosine, a few rows at a time.

    One product of V * V * D multiplications: 11 s for 30,522 x 384 and 44 s for 50,257 x 768 on two
    busy CPU cores. Memory: a few `[rows, V]` matrices of 32 MiB.

    Args:
        prototypes: `[V, D]`, of any norm.
        num_neighbors: K, below V.
        scale: Multiplies the cosines before their softmax.
    """
    unit = F.normalize(at_least_float32(prototypes), dim=-1)
    indices, weights = [], []
    rows = chunk_rows(unit)
    for number, block in enumerate(unit.split(rows)):
        cosines = block @ unit.T  # [rows, V]
        cosines.diagonal(number * rows).fill_(-math.inf)
        values, columns = cosines.topk(num_neighbors)
        indices.append(columns)
        weights.append((scale * values).softmax(-1))
    return NeighborTable(torch.cat(indices), torch.cat(weights))
