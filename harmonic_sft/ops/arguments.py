"""The arguments and the results of the operator, and how the arguments are read."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from harmonic_sft.ops.options import TokenMetrics, check_labels


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
    impl: str

    def needs_gradient(self, name: str) -> bool:
        """Whether one of the first five arguments gets a gradient."""
        return self.needs[self._fields.index(name)]

    @property
    def leaves(self) -> list[tuple[str, Tensor | None, bool]]:
        """Name, value and need of those whose gradients are summed over tiles: not `h_exp`."""
        first = zip(self._fields, self, self.needs, strict=False)
        return [leaf for leaf in first if leaf[0] != "h_exp"]

    def empty_gradient(self, leaf: Tensor | None) -> Tensor:
        """Return the empty tensor that stands for the gradient of a leaf that gets none."""
        return (self.hidden_states if leaf is None else leaf).new_empty(0)


def kept_dtype(leaf: Tensor) -> torch.dtype:
    """Return the dtype of a leaf's gradient: a sum over tokens may exceed the range of float16."""
    return torch.float32 if leaf.dtype == torch.float16 else leaf.dtype


class Results(NamedTuple):
    """What the operator returns; a tensor that was not asked for is empty.

    Attributes:
        loss: `[N]`.
        log_probs: `[N]`, metric.
        log_normalizer: `[N]`, metric.
        entropy: `[N]`, metric.
        predictions: `[N]`, metric.
        grad_h_exp: `[N]`, of the loss of each token.
        grad_hidden_states: `[N, D]`; this and the following are gradients of the summed losses.
        grad_prototypes: `[V, D]`.
        grad_class_bias: `[V]`.
        grad_second_weight: `[V, E]`.
    """

    loss: Tensor
    log_probs: Tensor
    log_normalizer: Tensor
    entropy: Tensor
    predictions: Tensor
    grad_h_exp: Tensor
    grad_hidden_states: Tensor
    grad_prototypes: Tensor
    grad_class_bias: Tensor
    grad_second_weight: Tensor

    @property
    def gradients(self) -> tuple[Tensor, ...]:
        """The gradients of `Arguments.leaves`, in their order."""
        return self[self._fields.index("grad_hidden_states") :]

    @property
    def metrics(self) -> TokenMetrics:
        """The metrics of each token."""
        return TokenMetrics(self.log_probs, self.log_normalizer, self.entropy, self.predictions)


def check_bias(arguments: Arguments) -> None:
    """Refuse a bias of -inf, which rules a class out, beside a smoothing that gives it a share."""
    if arguments.class_bias is None or not arguments.label_smoothing:
        return
    finite = ~arguments.class_bias.isneginf().any()
    if finite.device.type == "cuda":  # fails later, without halting the device now
        torch._assert_async(finite)
    elif not finite:
        raise ValueError(
            "class_bias: expected no -inf beside label_smoothing, which gives every class a "
            "share of the target, got one. Use a finite number or no smoothing"
        )


def read_exponent(arguments: Arguments) -> float | Tensor:
    """Return the exponent as a number where reading it does not halt a device."""
    if arguments.h_exp.device.type != "cpu":
        return arguments.h_exp.detach()
    exponent = float(arguments.h_exp)
    if not -math.inf < exponent < 0:
        raise ValueError(f"h_exp: expected a number below 0, got {exponent}")
    return exponent


def read_target(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Return labels and probabilities `[N, K]` of the target, repeated labels merged."""
    labels, weights = arguments.labels, arguments.target_weights
    dtype = torch.promote_types(arguments.hidden_states.dtype, arguments.prototypes.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    vocab_size, least = len(arguments.prototypes), 0
    if weights is None:
        labels = labels.unsqueeze(1)
        weights = torch.ones_like(labels, dtype=dtype)
    else:
        least = -1  # pads
        weights = weights.to(dtype).where(labels >= 0, 0)
    if labels.device.type == "cuda":  # fails later, without halting the device now
        torch._assert_async(((labels >= least) & (labels < vocab_size)).all())
    check_labels(labels, num_rows=len(labels), num_classes=vocab_size, least=least)
    return _merge_repeated(labels, weights)


def _merge_repeated(labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Add the weights of a row's repeated labels `[N, K]` up at the first, and pad the others."""
    num_labels = labels.shape[1]
    if num_labels == 1:
        return labels, weights
    same = labels.unsqueeze(2) == labels.unsqueeze(1)  # [N, K, K]
    first = same.to(torch.uint8).argmax(2)  # [N, K], where the label stands first
    merged = torch.zeros_like(weights).scatter_add_(1, first, weights)
    kept = first == torch.arange(num_labels, device=labels.device)
    kept &= labels >= 0
    return labels.where(kept, -1), merged.where(kept, 0)
