"""Any loss over a head, a few tokens at a time: no more than one chunk of logits exists."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from harmonic_sft.models import Head

CHUNK_BYTES = 2**25  # of one [rows, V] matrix in float32: autograd keeps a few of them
TokenLoss = Callable[[Head, Tensor, Tensor], Tensor]


def by_chunks(
    loss_fn: TokenLoss,
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
        rows: Rows of a chunk; default: what makes its logits 32 MiB.

    Returns:
        `[N]`.
    """
    size = rows or max(1, CHUNK_BYTES // (4 * len(head.weight)))
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    losses: Tensor = _Chunks.apply(loss_fn, head, size, labels, hidden_states, *parameters)
    return losses


class _Chunks(torch.autograd.Function):
    """Losses of all chunks, with the gradients of their sum made on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        loss_fn: TokenLoss,
        head: Head,
        rows: int,
        labels: Tensor,
        hidden_states: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        needs = ctx.needs_input_grad[4:]
        ctx.loss_fn, ctx.head, ctx.rows, ctx.parameters = loss_fn, head, rows, parameters
        inputs = (hidden_states, labels)
        losses, gradients = _differentiate(ctx, inputs, needs, None)
        ctx.save_for_backward(hidden_states, labels, *gradients)
        return losses

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, labels, *gradients = ctx.saved_tensors
        needs = ctx.needs_input_grad[4:]
        (grad,) = upstream
        if grad.numel() > 1 and any(grad.stride()):
            gradients = _differentiate(ctx, (hidden_states, labels), needs, grad)[1]
            scaled = gradients
        else:
            factor = grad.flatten()[0] if grad.numel() else grad.sum()
            scaled = [g * factor.to(g.dtype) for g in gradients]
        found = iter(scaled)
        return (None,) * 4 + tuple(next(found) if need else None for need in needs)


def _differentiate(
    ctx: Any, inputs: tuple[Tensor, Tensor], needs: Sequence[bool], weights: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Return the losses `[N]` and the gradients of their weighted sum for what needs one."""
    hidden_states, labels = inputs
    sources = [t for t, need in zip((hidden_states, *ctx.parameters), needs, strict=True) if need]
    totals = [torch.zeros_like(source) for source in sources]
    losses = []
    for start in range(0, max(len(labels), 1), ctx.rows):
        chunk = slice(start, start + ctx.rows)
        with torch.enable_grad():
            states = hidden_states[chunk].detach().requires_grad_(needs[0])
            loss = ctx.loss_fn(ctx.head, states, labels[chunk])
            losses.append(loss.detach())
            if not sources or not loss.requires_grad:
                continue
            total = loss.sum() if weights is None else (loss * weights[chunk]).sum()
            wanted = [states] * needs[0] + sources[needs[0] :]
            found = torch.autograd.grad(total, wanted, allow_unused=True)
        for index, gradient in enumerate(found):
            if gradient is None:
                continue
            if index == 0 and needs[0]:
                totals[0][chunk] = gradient
            else:
                totals[index].add_(gradient)
    return torch.cat(losses), totals
