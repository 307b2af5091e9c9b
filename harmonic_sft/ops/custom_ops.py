"""The fused losses as custom operators: one node for torch.compile, gradients of their own."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.library import custom_op

from harmonic_sft.ops import fused
from harmonic_sft.ops.fused import Needs
from harmonic_sft.ops.geometry import build_frame
from harmonic_sft.ops.options import TokenMetrics
from harmonic_sft.ops.request import Request, merge_repeated, vocabulary_slice


class Arguments(NamedTuple):
    """The arguments of both operators, flat and in the order of their schema.

    Attributes:
        hidden_states: `[N, D]`.
        prototypes: `[V, D]`.
        labels: `[N]`, or `[N, K]` with `target_weights`.
        target_weights: `[N, K]` or None.
        token_weights: `[N]` or None.
        class_bias: `[V]` or None.
        h_exp: Of no axis, below 0; unused by a linear head. A tensor, since the graph that
            torch.compile makes would hold a number fast and be made anew when it changes.
        kind: "linear", "euclidean" or "sphere".
        eps: Added to the squared distance.
        label_smoothing: Share of the target spread over all classes.
        z_loss: Factor of the squared log-normalizer.
        needs: Which gradients are wanted, as in `Needs`.
        early: Make the gradients in the forward pass.
        with_metrics: Also measure `TokenMetrics`.
        gradient_dtype: Of the operands of the gradient products.
        gemm: Wanted backend on the CPU.
        impl: "chunked" or "triton".
        group: Name of the process group that shares the vocabulary, or "".
    """

    hidden_states: Tensor
    prototypes: Tensor
    labels: Tensor
    target_weights: Tensor | None
    token_weights: Tensor | None
    class_bias: Tensor | None
    h_exp: Tensor
    kind: str
    eps: float
    label_smoothing: float
    z_loss: float
    needs: tuple[bool, ...]
    early: bool
    with_metrics: bool
    gradient_dtype: torch.dtype | None
    gemm: str
    impl: str
    group: str


_ARGUMENTS = (
    "Tensor hidden_states, Tensor prototypes, Tensor labels, Tensor? target_weights, "
    "Tensor? token_weights, Tensor? class_bias, Tensor h_exp, str kind, "
    "float eps, float label_smoothing, float z_loss, bool[] needs, bool early, bool with_metrics, "
    "ScalarType? gradient_dtype, str gemm, str impl, str group"
)
_FORWARD = f"({_ARGUMENTS}) -> ({', '.join(['Tensor'] * 11)})"
_BACKWARD = (
    f"({_ARGUMENTS}, Tensor relative_normalizer, Tensor label_log_probs, Tensor upstream) "
    "-> (Tensor, Tensor, Tensor)"
)


class Results(NamedTuple):
    """What the operators give; empty where it was not asked for.

    Attributes:
        loss: `[N]`.
        relative_normalizer: `[N]`, logsumexp of the logits with distances in `Frame.unit`.
        label_log_probs: `[N, K]`.
        log_probs: `[N]`, metric.
        log_normalizer: `[N]`, metric.
        entropy: `[N]`, metric.
        predictions: `[N]`, metric.
        exponent: `[N]`, dL/dh_exp.
        hidden_states: `[N, D]`, gradient of the sum of the losses.
        prototypes: `[V, D]`, likewise.
        class_bias: `[V]`, likewise.
    """

    loss: Tensor
    relative_normalizer: Tensor
    label_log_probs: Tensor
    log_probs: Tensor
    log_normalizer: Tensor
    entropy: Tensor
    predictions: Tensor
    exponent: Tensor
    hidden_states: Tensor
    prototypes: Tensor
    class_bias: Tensor


def _forward(*flat: Any) -> Results:
    arguments = Arguments(*flat)
    outcome = fused.forward(
        request_of(arguments),
        Needs(*arguments.needs),
        with_metrics=arguments.with_metrics,
        with_gradients=arguments.early,
    )
    measured, loss = outcome.metrics, outcome.loss
    return Results(
        loss,
        outcome.log_normalizer,
        outcome.log_probs,
        *(_no_metrics(arguments, loss) if measured is None else measured),
        _or_empty(outcome.exponent, loss),
        *_gradients(arguments, outcome.gradients),
    )


def _backward(*flat: Any) -> tuple[Tensor, Tensor, Tensor]:
    arguments = Arguments(*flat[:-3])
    gradients = fused.backward(request_of(arguments), Needs(*arguments.needs), *flat[-3:])
    return _gradients(arguments, gradients)


def _gradients(arguments: Arguments, gradients: fused.Gradients) -> tuple[Tensor, Tensor, Tensor]:
    hidden, prototypes, bias = arguments.hidden_states, arguments.prototypes, arguments.class_bias
    return (
        _or_empty(gradients.hidden_states, hidden).to(hidden.dtype),
        _or_empty(gradients.prototypes, prototypes).to(prototypes.dtype),
        _or_empty(gradients.class_bias, hidden).to((hidden if bias is None else bias).dtype),
    )


def _no_metrics(arguments: Arguments, loss: Tensor) -> TokenMetrics:
    predictions = arguments.labels.new_empty(0)
    return TokenMetrics(loss.new_empty(0), loss.new_empty(0), loss.new_empty(0), predictions)


def _or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if tensor is None else tensor


def request_of(arguments: Arguments) -> Request:
    """Return what the arguments of a call ask for."""
    prototypes = arguments.prototypes
    group = None
    if arguments.group:  # a name is what an operator can be given
        group = _resolve_process_group(arguments.group)  # ty: ignore[invalid-argument-type]
    vocab_size, start = vocabulary_slice(len(prototypes), group)
    frame = build_frame(
        arguments.kind,
        prototypes,
        arguments.eps,
        torch.promote_types(prototypes.dtype, arguments.hidden_states.dtype),
        group,
    )
    labels, weights = _target(arguments, vocab_size, frame.dtype)
    columns = labels - start
    held = (labels >= 0) & (columns >= 0) & (columns < len(prototypes))
    token_weights, bias = arguments.token_weights, arguments.class_bias
    return Request(
        frame=frame,
        hidden_states=arguments.hidden_states.detach(),
        labels=columns.where(held, -1),
        target_weights=weights,
        token_weights=None if token_weights is None else token_weights.to(frame.dtype),
        class_bias=None if bias is None else _finite_bias(bias, arguments.label_smoothing),
        learns_bias=Needs(*arguments.needs).class_bias,
        h_exp=_exponent(arguments),
        label_smoothing=arguments.label_smoothing,
        z_loss=arguments.z_loss,
        gradient_dtype=arguments.gradient_dtype,
        gemm=arguments.gemm,
        impl=arguments.impl,
        group=group,
        vocab_size=vocab_size,
        vocab_start=start,
    )


def _finite_bias(bias: Tensor, label_smoothing: float) -> Tensor:
    """Return the class bias detached; with smoothing every class has a share of the target."""
    bias = bias.detach()
    if label_smoothing:
        finite = ~bias.isneginf().any()
        if bias.device.type != "cpu":  # fails later, without halting the device now
            torch._assert_async(finite)
        elif not finite:
            raise ValueError(
                "class_bias: expected no -inf beside label_smoothing, which gives every class a "
                "share of the target, got one. Use a finite number or no smoothing"
            )
    return bias


def _exponent(arguments: Arguments) -> float | Tensor:
    """Return the exponent as a number where reading it does not halt a device."""
    if arguments.h_exp.device.type != "cpu":
        return arguments.h_exp.detach()
    exponent = float(arguments.h_exp)
    if not -math.inf < exponent < 0:
        raise ValueError(f"h_exp: expected a number below 0, got {exponent}")
    return exponent


def _target(arguments: Arguments, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return global labels and weights `[N, K]` of the target, repeated labels merged."""
    labels, weights = arguments.labels, arguments.target_weights
    lowest = 0
    if weights is None:
        labels = labels.unsqueeze(1)
        weights = torch.ones_like(labels, dtype=dtype)
    else:
        lowest = -1  # pads
        weights = weights.to(dtype).where(labels >= 0, 0)
    if labels.device.type != "cpu":  # fails later, without halting the device now
        torch._assert_async(((labels >= lowest) & (labels < vocab_size)).all())
    elif labels.numel() and not lowest <= int(labels.min()) <= int(labels.max()) < vocab_size:
        raise ValueError(
            f"labels: expected values from {lowest} to {vocab_size - 1}, "
            f"got {int(labels.min())} to {int(labels.max())}. Drop ignored positions first"
        )
    return merge_repeated(labels, weights)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    arguments, results = Arguments(*inputs), Results(*output)
    ctx.mark_non_differentiable(*results[1:])
    ctx.set_materialize_grads(False)
    tensors = arguments[:7]
    ctx.save_for_backward(*tensors, results.relative_normalizer, results.label_log_probs)
    ctx.settings = arguments[7:]
    ctx.exponent = results.exponent
    ctx.h_exp = arguments.h_exp.new_empty(0)
    ctx.ready = list(results[8:]) if arguments.early else None


def is_uniform(upstream: Tensor) -> bool:
    """Whether all tokens have the same upstream gradient, as far as a look does not halt a device.

    `loss.sum()` hands down a tensor of stride 0; on the CPU the values of any other are compared.
    """
    if upstream.stride(0) == 0:
        return True
    if torch.compiler.is_compiling() or upstream.device.type != "cpu":
        return False
    return bool((upstream == upstream[:1]).all())


def _scaled_gradients(ctx: Any, upstream: Tensor) -> list[Tensor]:
    """Scale the gradients of the forward pass in place; a second backward pass recomputes them."""
    ready, ctx.ready = ctx.ready, None
    factor = upstream[:1].sum()
    return [gradient.mul_(factor.to(gradient.dtype)) for gradient in ready]


def _gradient(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if upstream is None:
        return (None,) * len(Arguments._fields)
    if torch.is_grad_enabled():
        raise RuntimeError(
            "fused loss: expected one derivative, got create_graph=True. Use impl='reference'"
        )
    needs = Needs(*ctx.settings[Arguments._fields.index("needs") - 7])
    if ctx.ready is not None and is_uniform(upstream):
        found = _scaled_gradients(ctx, upstream)
    elif any(needs[:3]):
        tensors = ctx.saved_tensors
        found = backward_op(*tensors[:7], *ctx.settings, *tensors[7:], upstream)
    else:
        found = [None] * 3
    wanted = [tensor if need else None for tensor, need in zip(found, needs, strict=False)]
    exponent = (ctx.exponent * upstream).sum().to(ctx.h_exp) if needs.h_exp else None
    empty: list[Any] = [None] * len(Arguments._fields)
    for name, tensor in zip(Needs._fields, [*wanted, exponent], strict=True):
        empty[Arguments._fields.index(name)] = tensor
    return tuple(empty)


def _fake_forward(*flat: Any) -> Results:
    arguments = Arguments(*flat)  # .shape and not len(), which would fix a symbolic size
    dtype = torch.promote_types(arguments.hidden_states.dtype, arguments.prototypes.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    tokens = arguments.hidden_states.new_empty(arguments.hidden_states.shape[0], dtype=dtype)
    num_labels = 1 if arguments.target_weights is None else arguments.labels.shape[1]
    nothing = tokens.new_empty(0)
    measured = _no_metrics(arguments, tokens)
    if arguments.with_metrics:
        predictions = torch.empty_like(tokens, dtype=arguments.labels.dtype)
        measured = TokenMetrics(*(torch.empty_like(tokens) for _ in range(3)), predictions)
    return Results(
        tokens,
        torch.empty_like(tokens),
        tokens.new_empty(tokens.shape[0], num_labels),
        *measured,
        torch.empty_like(tokens if arguments.needs[3] else nothing),
        *_fake_gradients(arguments, arguments.early),
    )


def _fake_gradients(arguments: Arguments, made: bool) -> tuple[Tensor, Tensor, Tensor]:
    hidden, prototypes, bias = arguments.hidden_states, arguments.prototypes, arguments.class_bias
    needs = Needs(*arguments.needs)
    biased = made and needs.class_bias and bias is not None
    return (
        torch.empty_like(hidden) if made and needs.hidden_states else hidden.new_empty(0),
        torch.empty_like(prototypes) if made and needs.prototypes else prototypes.new_empty(0),
        torch.empty_like(bias)
        if biased and bias is not None
        else hidden.new_empty(0, dtype=(hidden if bias is None else bias).dtype),
    )


def _fake_backward(*flat: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_gradients(Arguments(*flat[:-3]), made=True)


distance_op = custom_op(
    "harmonic_sft::distance_cross_entropy", _forward, mutates_args=(), schema=_FORWARD
)
linear_op = custom_op(
    "harmonic_sft::linear_cross_entropy", _forward, mutates_args=(), schema=_FORWARD
)
backward_op = custom_op(
    "harmonic_sft::cross_entropy_backward", _backward, mutates_args=(), schema=_BACKWARD
)
for operator in (distance_op, linear_op):
    operator.register_fake(_fake_forward)
    operator.register_autograd(_gradient, setup_context=_setup_context)
backward_op.register_fake(_fake_backward)
