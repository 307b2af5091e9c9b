"""What a fused loss takes and returns, for its callers and as an operator; how it is checked."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Impl = Literal["auto", "reference", "chunked", "triton"]
Reduction = Literal["none", "sum", "mean"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LossOptions:
    """The rare options of the fused losses.

    Attributes:
        token_weights: `[N]`, factors of the tokens' losses; not differentiated.
        class_bias: `[V]`, added to the logits (a log prior); may require gradients.
        target_weights: `[N, K]`, the target's probabilities of labels `[N, K]`; not
            differentiated. A weight of 0 with label -1 pads. Repeated labels add up.
        label_smoothing: Share of the target spread evenly over all classes, from 0 to 1.
        z_loss: Adds `z_loss * logsumexp(logits) ** 2` to the loss of each token.
        gradients: "forward" makes them beside the loss, with three matrix products in all;
            "recompute" makes them in the backward pass, which starts again: a fourth product, and
            no gradient is held in between. An upstream gradient that differs between tokens
            recomputes anyway.
    """

    token_weights: Tensor | None = None
    class_bias: Tensor | None = None
    target_weights: Tensor | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    gradients: Literal["forward", "recompute"] = "forward"


class TokenMetrics(NamedTuple):
    """What the loss pass knows of each token; not differentiable.

    Attributes:
        log_probs: `[N]`, log-probability of the target in nats (its mean under a soft target).
        log_normalizer: `[N]`, logsumexp of the logits.
        entropy: `[N]`, of the predicted distribution, in nats.
        predictions: `[N]`, the most probable class: the nearest prototype if there is no bias.
    """

    log_probs: Tensor
    log_normalizer: Tensor
    entropy: Tensor
    predictions: Tensor


class Arguments(NamedTuple):
    """The arguments of the operator, flat and in the order of its schema.

    `h_exp` is a tensor, since torch.compile would take a number for a constant and compile again
    when it changes. Options are those of `LossOptions`.
    """

    hidden_states: Tensor  # [N, D]
    prototypes: Tensor  # [V, D]
    class_bias: Tensor | None  # [V]
    h_exp: Tensor  # a scalar below 0; unused by a linear head
    # [V, E], the teacher's weight, or the points of a transport: the prototypes if None
    second_weight: Tensor | None
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
        """Name, value and need of the first five but `h_exp`: tiles sum their gradients."""
        first = zip(self._fields, self, self.needs, strict=False)
        return [leaf for leaf in first if leaf[0] != "h_exp"]

    def empty_gradient(self, leaf: Tensor | None) -> Tensor:
        """Return the empty tensor that stands for the gradient of a leaf that gets none."""
        return (self.hidden_states if leaf is None else leaf).new_empty(0)


def kept_dtype(leaf: Tensor) -> torch.dtype:
    """Return the dtype of a leaf's gradient: not float16, whose range a sum may exceed."""
    return torch.float32 if leaf.dtype == torch.float16 else leaf.dtype


class Results(NamedTuple):
    """What the operator returns; a tensor that was not asked for is empty.

    Gradients are of the summed losses, except that of `h_exp`, which is of each token's loss.
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


def check_inputs(
    hidden_states: Tensor, prototypes: Tensor, labels: Tensor, options: LossOptions, impl: str
) -> None:
    """Refuse inputs that do not fit together.

    Raises:
        ValueError: Shapes, dtypes, devices or an option are off.
    """
    check_choice("impl", impl, get_args(Impl))
    if hidden_states.dim() != 2:
        raise ValueError(f"hidden_states: expected [N, D], got {list(hidden_states.shape)}")
    hidden_size = hidden_states.shape[1]
    if prototypes.dim() != 2 or prototypes.shape[1] != hidden_size:
        raise ValueError(f"prototypes: expected [V, {hidden_size}], got {list(prototypes.shape)}")
    if 0 in prototypes.shape:
        raise ValueError(
            "prototypes: expected at least one class and one dimension, "
            f"got {list(prototypes.shape)}"
        )
    for name, tensor in {"hidden_states": hidden_states, "prototypes": prototypes}.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name}: expected a floating dtype, got {tensor.dtype}")
    if labels.dtype != torch.int64:
        raise ValueError(f"labels: expected torch.int64, got {labels.dtype}")
    _check_options(hidden_states, prototypes, labels, options)
    others = {
        "prototypes": prototypes,
        "labels": labels,
        "token_weights": options.token_weights,
        "class_bias": options.class_bias,
        "target_weights": options.target_weights,
    }
    for name, tensor in others.items():
        if tensor is not None and tensor.device != hidden_states.device:
            raise ValueError(
                f"{name}: expected device {hidden_states.device} of hidden_states, "
                f"got {tensor.device}"
            )


def check_count(labels: Tensor, num_rows: int) -> None:
    """Refuse more or fewer labels `[N]` or `[N, K]` than rows.

    Raises:
        ValueError: The numbers differ. Not checked in compiled code.
    """
    if not torch.compiler.is_compiling() and len(labels) != num_rows:
        raise ValueError(f"labels: expected {num_rows}, one for each row, got {len(labels)}")


def check_labels(labels: Tensor, *, num_rows: int, num_classes: int, least: int = 0) -> None:
    """Refuse labels that are not one class for each row, `[N]`, or K classes, `[N, K]`.

    On CUDA (which would have to wait), on fake tensors, in compiled code and in `torch.func.vmap`
    their values are not checked. A `least` of -1 lets pads pass.

    Raises:
        ValueError: There are more or fewer rows of labels, or a label is not a class.
    """
    check_count(labels, num_rows)
    is_known = labels.device.type != "cuda" and not isinstance(labels, FakeTensor)
    if torch.compiler.is_compiling() or not is_known or not num_rows:
        return
    try:
        found, most = int(labels.min()), int(labels.max())
    except RuntimeError:  # inside `torch.func.vmap` they have no values
        return
    if found < least or most >= num_classes:
        raise ValueError(
            f"labels: expected values from {least} to {num_classes - 1}, got {found} to {most}. "
            "Drop ignored positions first"
        )


def check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Refuse a value that is not one of those allowed.

    Raises:
        ValueError: It is another value.
    """
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {list(allowed)}, got {value!r}")


def _check_options(
    hidden_states: Tensor, prototypes: Tensor, labels: Tensor, options: LossOptions
) -> None:
    # len() would fix a symbolic size.
    num_tokens, vocab_size = hidden_states.shape[0], prototypes.shape[0]
    soft = options.target_weights
    if soft is None:
        if list(labels.shape) != [num_tokens]:
            raise ValueError(f"labels: expected [{num_tokens}], got {list(labels.shape)}")
    elif labels.shape != soft.shape or soft.shape[:-1] != (num_tokens,) or not soft.shape[-1]:
        raise ValueError(
            f"labels, target_weights: expected both [{num_tokens}, K], "
            f"got {list(labels.shape)} and {list(soft.shape)}"
        )
    weights, bias = options.token_weights, options.class_bias
    if weights is not None and list(weights.shape) != [num_tokens]:
        raise ValueError(f"token_weights: expected [{num_tokens}], got {list(weights.shape)}")
    if bias is not None and list(bias.shape) != [vocab_size]:
        raise ValueError(f"class_bias: expected [{vocab_size}], got {list(bias.shape)}")
    for name, tensor in {"token_weights": weights, "target_weights": soft}.items():
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"{name}: expected a tensor without requires_grad. Detach it")
    check_choice("gradients", options.gradients, ("forward", "recompute"))
    if not 0 <= options.label_smoothing <= 1:
        raise ValueError(f"label_smoothing: expected 0 to 1, got {options.label_smoothing}")
    if not 0 <= options.z_loss < math.inf:
        raise ValueError(f"z_loss: expected 0 or more, got {options.z_loss}")


def check_bias(arguments: Arguments) -> None:
    """Refuse a bias of -inf, which rules a class out, if smoothing gives the class a share."""
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
    """Return the exponent: a number on the CPU; elsewhere a tensor, as reading halts the device."""
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
    """Sum the weights of a row's repeated labels `[N, K]` at the first one, and pad the others."""
    num_labels = labels.shape[1]
    if num_labels == 1:
        return labels, weights
    same = labels.unsqueeze(2) == labels.unsqueeze(1)  # [N, K, K]
    first = same.to(torch.uint8).argmax(2)  # [N, K], where the label stands first
    merged = torch.zeros_like(weights).scatter_add_(1, first, weights)
    kept = first == torch.arange(num_labels, device=labels.device)
    kept &= labels >= 0
    return labels.where(kept, -1), merged.where(kept, 0)
