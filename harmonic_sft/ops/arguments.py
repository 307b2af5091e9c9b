"""The arguments and the results of the operator, and how the arguments are read."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from harmonic_sft.ops.options import TokenMetrics, check_labels


class Arguments(NamedTuple):
    """The arguments of the operator, flat and in the order of its schema.

    `h_exp` is a tensor, since a graph of torch.compile would hold a number fast and be compiled
    again when it changes. Options are those of `LossOptions`.
    """

    hidden_states: Tensor  # [N, D]
    prototypes: Tensor  # [V, D]
    class_bias: Tensor | None  # [V]
    h_exp: Tensor  # below 0, without an axis; unused by a linear head
    second_weight: Tensor | None  # [V, E], the teacher's weight, or the points of the transport
    labels: Tensor  # [N], or [N, K] with `target_weights`
    target_weights: Tensor | None  # [N, K]
    token_weights: Tensor | None  # [N]
    second_states: Tensor | None  # [N, E], what the teacher's weight multiplies
    second_bias: Tensor | None  # [V], of the teacher
    mix: Tensor  # [2] float64 on the CPU, factors of the cross-entropy and of the second loss
    stage: str  # a key of `STAGES`
    kind: str  # "linear", "euclidean" or "sphere"
    eps: float  # added to the squared distance
    label_smoothing: float
    z_loss: float
    num_heads: int  # slices of the columns with a softmax of their own
    needs: tuple[bool, ...]  # which of the first five arguments get gradients
    early: bool  # make the gradients in the forward pass
    with_metrics: bool  # also measure `TokenMetrics`
    impl: str  # "chunked" or "triton"

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

    The gradients but that of `h_exp` are those of the summed losses.
    """

    loss: Tensor  # [N]
    log_probs: Tensor  # [N], this and the next three are metrics
    log_normalizer: Tensor  # [N]
    entropy: Tensor  # [N]
    predictions: Tensor  # [N]
    grad_h_exp: Tensor  # [N], of the loss of each token
    grad_hidden_states: Tensor  # [N, D]
    grad_prototypes: Tensor  # [V, D]
    grad_class_bias: Tensor  # [V]
    grad_second_weight: Tensor  # [V, E]

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
