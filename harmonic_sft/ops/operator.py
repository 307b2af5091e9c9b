"""The fused losses as one custom operator: one node for torch.compile, gradients of its own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from harmonic_sft.ops import engine
from harmonic_sft.ops.arguments import Arguments, Results, kept_dtype

NUM_LEAVES = 5  # of the arguments, that gradients flow to
NUM_TENSORS = 11
_ARGUMENTS = (
    "Tensor hidden_states, Tensor prototypes, Tensor? class_bias, Tensor h_exp, "
    "Tensor? second_weight, Tensor labels, Tensor? target_weights, Tensor? token_weights, "
    "Tensor? second_states, Tensor? second_bias, Tensor mix, str stage, str kind, float eps, "
    "float label_smoothing, float z_loss, int num_heads, bool[] needs, bool early, "
    "bool with_metrics, str impl"
)
_SCHEMA = f"({_ARGUMENTS}) -> ({', '.join(['Tensor'] * len(Results._fields))})"


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    arguments, results = Arguments(*inputs), Results(*output)
    ctx.mark_non_differentiable(*results[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*arguments[:NUM_TENSORS])
    ctx.settings = arguments[NUM_TENSORS:]
    ctx.grad_h_exp, ctx.h_exp_like = results.grad_h_exp, arguments.h_exp.new_empty(0)
    ctx.early_gradients = results.gradients if arguments.early else None


def is_uniform(upstream: Tensor) -> bool:
    """Whether all tokens are known to have one upstream gradient, without a look at the values.

    `loss.sum()` hands down a tensor of stride 0.
    """
    return upstream.shape[0] < 2 or upstream.stride(0) == 0


def factors_for(gradients: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    """Return the one value of uniform gradients `[N]` for each gradient, with its axes.

    PyTorch rounds a factor without axes to the dtype of a 16-bit gradient first.
    """
    factor = upstream[:1].sum()  # 0 without tokens
    return [factor.reshape([1] * gradient.dim()) for gradient in gradients]


def refuse_second_derivative() -> None:
    """Refuse to be differentiated in a backward pass: the gradients are made with the losses.

    Raises:
        RuntimeError: The backward pass makes a graph.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "fused loss: expected one derivative, got create_graph=True. Use impl='reference' "
            "or a loss of the head's logits"
        )


def _gradient(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Any, ...]:
    nothing = (None,) * len(Arguments._fields)
    if upstream is None:
        return nothing
    refuse_second_derivative()
    arguments = Arguments(*ctx.saved_tensors, *ctx.settings)
    early, ctx.early_gradients = ctx.early_gradients, None  # scaled in place, so used once
    if early is not None and is_uniform(upstream):
        factors = factors_for(early, upstream)
        sums = [gradient.mul_(factor) for gradient, factor in zip(early, factors, strict=True)]
    else:  # also in a second backward pass: the call again, weighted by the upstream gradients
        sums = Results(*chunked_op(*_weighted(arguments, upstream))).gradients
    learns_h_exp = arguments.needs_gradient("h_exp")
    h_exp = (ctx.grad_h_exp * upstream).sum().to(ctx.h_exp_like) if learns_h_exp else None
    hidden_states, prototypes, class_bias, second_weight = (
        gradient if leaf is None else gradient.to(leaf.dtype)
        for gradient, (_, leaf, _) in zip(sums, arguments.leaves, strict=True)
    )
    gradients = [hidden_states, prototypes, class_bias, h_exp, second_weight]
    needed = zip(gradients, arguments.needs, strict=True)
    return (*(gradient if need else None for gradient, need in needed), *nothing[NUM_LEAVES:])


def _weighted(arguments: Arguments, upstream: Tensor) -> Arguments:
    """Return the arguments that make the gradients of the sum of losses times `upstream` `[N]`."""
    weights, needs = arguments.token_weights, list(arguments.needs)
    needs[Arguments._fields.index("h_exp")] = False  # its gradient was made with the losses
    return arguments._replace(
        token_weights=upstream if weights is None else weights * upstream,
        needs=tuple(needs),
        early=True,
        with_metrics=False,
    )


def _fake_forward(*flat: Any) -> Results:
    arguments = Arguments(*flat)  # .shape and not len(), which would fix a symbolic size
    hidden_states = arguments.hidden_states
    dtype = torch.promote_types(hidden_states.dtype, arguments.prototypes.dtype)
    num_tokens = hidden_states.shape[0]
    tokens = hidden_states.new_empty(num_tokens, dtype=torch.promote_types(dtype, torch.float32))
    num_measured = num_tokens if arguments.with_metrics else 0
    gradients = [
        torch.empty_like(leaf, dtype=kept_dtype(leaf), memory_format=torch.contiguous_format)
        if arguments.early and needed and leaf is not None
        else arguments.empty_gradient(leaf)
        for _, leaf, needed in arguments.leaves
    ]
    return Results(
        tokens,
        *(tokens.new_empty(num_measured) for _ in range(3)),
        arguments.labels.new_empty(num_measured),
        torch.empty_like(tokens) if arguments.needs_gradient("h_exp") else tokens.new_empty(0),
        *gradients,
    )


chunked_op = custom_op(
    "harmonic_sft::chunked_loss", engine.forward, mutates_args=(), schema=_SCHEMA
)
chunked_op.register_fake(_fake_forward)
chunked_op.register_autograd(_gradient, setup_context=_setup_context)
