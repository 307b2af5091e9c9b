"""The chunk loop for a loss without a row-wise stage: dense logits of a few tokens at a time."""

from typing import Any

import torch
from torch import Tensor

from harmonic_sft.models import Head, LossFunction
from harmonic_sft.ops.arguments import check_labels, kept_dtype
from harmonic_sft.ops.engine import chunk_slices, factors_for, is_uniform, refuse_second_derivative

# The size of one [rows, V] matrix in float32: autograd keeps a few of them. Every chunk passes over
# all prototypes several times, so that an accelerator, whose products are fast, wants large chunks.
CPU_BYTES = 2**25
DEVICE_BYTES = 2**28


def by_chunks(
    loss_fn: LossFunction,
    head: Head,
    hidden_states: Tensor,
    labels: Tensor,
    *,
    rows: int | None = None,
) -> Tensor:
    """Return `loss_fn(head, hidden_states, labels)`, computed a few rows at a time.

    The gradients of the sum are made with the losses, chunk by chunk, so that nothing is computed
    twice; an upstream gradient that differs between tokens (anything but `.sum()` and what scales
    it) computes the chunks again, weighted.

    Args:
        loss_fn: Maps head, `[n, D]` and `[n]` to `[n]`; a token's loss depends on no other token.
        head: Its parameters get gradients.
        hidden_states: `[N, D]`.
        labels: `[N]`.
        rows: Rows of a chunk; default: what makes its logits 32 MiB on the CPU, 256 MiB elsewhere.

    Returns:
        `[N]`.
    """
    check_labels(labels, num_rows=len(hidden_states), num_classes=len(head.weight))
    size = rows or chunk_rows(head.weight)
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    sources: list[Tensor] = [hidden_states, *parameters]
    if not torch.is_grad_enabled():  # a Function's needs_input_grad ignores this
        sources = [source.detach() for source in sources]
    losses: Tensor = _Chunks.apply(loss_fn, head, size, labels, *sources)
    return losses


def chunk_rows(weight: Tensor) -> int:
    """Return how many rows a chunk has for a weight `[V, D]`."""
    limit = CPU_BYTES if weight.device.type == "cpu" else DEVICE_BYTES
    return max(1, limit // (4 * len(weight)))


class _Chunks(torch.autograd.Function):
    """Losses of all chunks, with the gradients of their sum made on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        loss_fn: LossFunction,
        head: Head,
        rows: int,
        labels: Tensor,
        hidden_states: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        # The parameters are not saved as tensors: the loss reaches them through the head.
        ctx.loss_fn, ctx.head, ctx.rows, ctx.parameters = loss_fn, head, rows, parameters
        # Frozen ones too. Held here, so that the ids in `_state` are not reused.
        ctx.tensors, ctx.state = tuple(head.parameters()), _state(head)
        losses, gradients = _differentiate(ctx, hidden_states, labels, None)
        ctx.save_for_backward(hidden_states, labels, *gradients)
        return losses

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        # Read only once: checkpointing recomputes them for a single access.
        hidden_states, labels, *gradients = ctx.saved_tensors
        (grad,) = upstream
        if is_uniform(grad):
            factors = factors_for(gradients, grad)
            scaled = [gradient * f for gradient, f in zip(gradients, factors, strict=True)]
        else:
            if ctx.state != _state(ctx.head):
                raise RuntimeError(
                    "backward: expected the head's weights and h_exp of the forward pass, got "
                    "others, which were changed in place or replaced since"
                )
            scaled = _differentiate(ctx, hidden_states, labels, grad)[1]
        remaining = iter(scaled)
        needs = ctx.needs_input_grad[4:]
        return (None,) * 4 + tuple(next(remaining) if need else None for need in needs)


def _state(head: Head) -> list[Any]:
    """Return the exponents, and the id and version (number of in-place changes) of each parameter.

    Tensors made in inference mode have no version. `Head.h_exp` would read a learned exponent from
    its device.
    """
    tensors = [(id(p), 0 if p.is_inference() else p._version) for p in head.parameters()]
    return [vars(part).get("_h_exp") for part in head.modules()] + tensors


def _differentiate(
    ctx: Any, hidden_states: Tensor, labels: Tensor, weights: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Return the losses `[N]` and the gradients of their weighted sum for what needs one."""
    needs: tuple[bool, ...] = ctx.needs_input_grad[4:]
    sources = [t for t, n in zip(ctx.parameters, needs[1:], strict=True) if n]
    totals = [torch.zeros_like(source, dtype=kept_dtype(source)) for source in sources]
    hidden_gradient = torch.zeros_like(hidden_states, dtype=kept_dtype(hidden_states))
    losses = []
    # Without tokens one empty chunk still runs, so that the result has a graph.
    for chunk in chunk_slices(len(labels), ctx.rows) if len(labels) else [slice(0, 0)]:
        # The gradients are made here, where autocast, if it is on, would round their products.
        no_autocast = torch.autocast(hidden_states.device.type, enabled=False)
        with torch.set_grad_enabled(any(needs)), no_autocast:
            states = hidden_states[chunk].detach().requires_grad_(needs[0])
            loss = ctx.loss_fn(ctx.head, states, labels[chunk])
            losses.append(loss.detach())
            wanted = [states] * needs[0] + sources
            if not loss.requires_grad:
                continue
            loss_sum = loss.sum() if weights is None else (loss * weights[chunk]).sum()
            gradients = list(torch.autograd.grad(loss_sum, wanted))
        if needs[0]:
            hidden_gradient[chunk] = gradients.pop(0)
        for total, gradient in zip(totals, gradients, strict=True):
            total.add_(gradient)
    return torch.cat(losses), [hidden_gradient] * needs[0] + totals
