"""What travels through a fused loss: its arguments, the state of a chunk, the gradients."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class Arguments(NamedTuple):
    """The arguments of the operator, flat and in the order of its schema.

    Attributes:
        hidden_states: `[N, D]`.
        prototypes: `[V, D]`.
        class_bias: `[V]` or None.
        h_exp: Below 0, without an axis; unused by a linear head. A tensor, since a graph of
            torch.compile would hold a number fast and be compiled again when it changes.
        second_weight: `[V, E]` or None: the teacher's weight, or the points of the transport.
        labels: `[N]`, or `[N, K]` with `target_weights`.
        target_weights: `[N, K]` or None.
        token_weights: `[N]` or None.
        second_states: `[N, E]` or None, what the teacher's weight multiplies.
        second_bias: `[V]` or None, of the teacher.
        mix: `[2]` float64 on the CPU: factors of the cross-entropy and of the second loss.
        stage: Name of the row-wise stage, a key of `STAGES`.
        kind: "linear", "euclidean" or "sphere".
        eps: Added to the squared distance.
        label_smoothing: Share of the target spread evenly over all classes.
        z_loss: Factor of the squared log-normalizer.
        num_heads: How many slices of the columns have a softmax of their own.
        needs: Which of the first five arguments get gradients.
        early: Make the gradients in the forward pass.
        with_metrics: Also measure `TokenMetrics`.
        gradient_dtype: What the gradient products multiply in; None is float32 or better.
        impl: "chunked" or "triton".
    """

    hidden_states: Tensor
    prototypes: Tensor
    class_bias: Tensor | None
    h_exp: Tensor
    second_weight: Tensor | None
    labels: Tensor
    target_weights: Tensor | None
    token_weights: Tensor | None
    second_states: Tensor | None
    second_bias: Tensor | None
    mix: Tensor
    stage: str
    kind: str
    eps: float
    label_smoothing: float
    z_loss: float
    num_heads: int
    needs: tuple[bool, ...]
    early: bool
    with_metrics: bool
    gradient_dtype: torch.dtype | None
    impl: str

    def needs_gradient(self, name: str) -> bool:
        """Whether one of the first five arguments gets a gradient."""
        return self.needs[self._fields.index(name)]


@dataclass
class Chunk:
    """The tokens of one chunk under one softmax.

    The pairs are those that stay out of the matrix products: labels first, then near prototypes.
    Their distances are taken by direct difference: the label's decides the loss of a confident
    token, and a near prototype's expanded distance would have lost its digits.

    Attributes:
        tokens: Where they stand among the N.
        placed: `[T, D]`, hidden states as the geometry compares them.
        inverse: `[T, 1]`, 1 / |x| on the sphere; None elsewhere.
        unit: `[T, 1]`, of squared distances (`Geometry.unit`); 1 for a linear head.
        row: `[T, 1]`, what the squared distances of a token have in common; None for 0.
        labels: `[T, K]`, columns; -1 where padded or repeated.
        columns: `[T, S]`, of the pairs; -1 where there is none.
        squared: `[T, S]`, d2 + eps of the pairs; 1 for a linear head.
        logs: `[T, S]`, log(squared / unit); 0 for a linear head and where there is no pair.
        logits: `[T, S]`, h_exp * logs + bias, or the linear logit; -inf where there is no pair.
    """

    tokens: slice
    placed: Tensor
    inverse: Tensor | None
    unit: Tensor
    row: Tensor | None
    labels: Tensor
    columns: Tensor = field(init=False)
    squared: Tensor = field(init=False)
    logs: Tensor = field(init=False)
    logits: Tensor = field(init=False)

    @property
    def num_labels(self) -> int:
        """K, how many of the S pairs are labels."""
        return self.labels.shape[1]


class TileStatistics(NamedTuple):
    """Sums over the columns of each tile, without the pairs; e = exp(logit - log_scale).

    Attributes:
        log_scale: `[tiles, T]`, the largest logit, or near it.
        sums: `[tiles, T]`, of e.
        moments: `[3, tiles, T]` or None: sums of e * log e, of e * bias, and of the biases.
        logits: `[tiles, T]` or None, sums of the logits.
        best: `[tiles, T]` or None, the column of the largest logit.
        second: `[R, tiles, T]`, sums that the stage asks for.
    """

    log_scale: Tensor
    sums: Tensor
    moments: Tensor | None
    logits: Tensor | None
    best: Tensor | None
    second: Tensor


@dataclass
class Rows:
    """The tokens of a chunk once their normalizers are known.

    Off the pairs dL/dlogit_j = mass * p_j + second * s_j - floor, with the stage's second weights
    s_j; `CrossEntropy.log_share` says what they are divided by.

    Attributes:
        log_normalizer: `[T]`, logsumexp over all classes, distances in `Chunk.unit`.
        log_probs: `[T, K]`, of the labels; -inf where there is none. Accurate also when p is close
            to 1, so that 1 - p is.
        saved: `[T]`, what a stage with a second loss must know to make its gradients.
        mass: `[T]`.
        target: `[T, K]`: at a label dL/dlogit = mass * p - target, besides second and floor.
        rest: `[T, K]`, mass - target.
        floor: `[T]`.
        second: `[T]` or None.
    """

    log_normalizer: Tensor
    log_probs: Tensor
    saved: Tensor
    mass: Tensor = field(init=False)
    target: Tensor = field(init=False)
    rest: Tensor = field(init=False)
    floor: Tensor = field(init=False)
    second: Tensor | None = None


class Results(NamedTuple):
    """What the operator gives; empty where it was not asked for.

    Attributes:
        loss: `[N]`.
        log_normalizers: `[N, M]`, of each softmax, distances in `Chunk.unit`.
        label_log_probs: `[N, K]`; `[N, M]` of a mixture.
        saved: `[N]`, see `Rows`.
        log_probs: `[N]`, metric.
        log_normalizer: `[N]`, metric.
        entropy: `[N]`, metric.
        predictions: `[N]`, metric.
        exponent: `[N]`, dL/dh_exp.
        hidden_states: `[N, D]`, gradient of the sum of the losses, as for the three that follow.
        prototypes: `[V, D]`.
        class_bias: `[V]`.
        second_weight: `[V, E]`.
    """

    loss: Tensor
    log_normalizers: Tensor
    label_log_probs: Tensor
    saved: Tensor
    log_probs: Tensor
    log_normalizer: Tensor
    entropy: Tensor
    predictions: Tensor
    exponent: Tensor
    hidden_states: Tensor
    prototypes: Tensor
    class_bias: Tensor
    second_weight: Tensor


def empty_gradient(arguments: Arguments, leaf: Tensor | None) -> Tensor:
    """Return what stands for the gradient of a leaf that gets none."""
    return (arguments.hidden_states if leaf is None else leaf).new_empty(0)
