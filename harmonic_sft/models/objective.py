"""The objective: from hidden states and labels with ignored positions to one number."""

from collections.abc import Callable

import torch
from torch import Tensor

from .head import Head

LossFunction = Callable[[Head, Tensor, Tensor], Tensor]


def negative_log_likelihood(head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
    """Return the head's own loss per token `[N]`, in nats."""
    return head.nll(hidden_states, labels)


def mean_token_loss(
    loss_fn: LossFunction,
    head: Head,
    hidden_states: Tensor,
    labels: Tensor,
    *,
    num_items_in_batch: Tensor | int | None = None,
    causal: bool = False,
    ignore_index: int = -100,
) -> Tensor:
    """Return the mean loss over the labelled positions.

    Ignored positions are dropped before the head, so that no logit is computed for them.

    Args:
        loss_fn: Called with the head, hidden states `[N, D]` and labels `[N]`; returns `[N]`.
        head: The output head.
        hidden_states: `[B, T, D]`.
        labels: `[B, T]`, `ignore_index` where there is nothing to predict.
        num_items_in_batch: What to divide the sum by: the labelled positions of the whole
            accumulated batch on all processes. Default: those of this call.
        causal: Position t predicts label t + 1.
        ignore_index: The label of positions that are not scored.

    Returns:
        A scalar in nats; 0, still attached to the graph, if nothing is labelled anywhere.

    Raises:
        ValueError: A label is not a class of the head.
    """
    if causal:
        hidden_states, labels = hidden_states[:, :-1], labels[:, 1:]
    scored = labels != ignore_index
    hidden_states, labels = hidden_states[scored], labels[scored]  # [N, D], [N]
    vocab_size = len(head.weight)
    if torch.any((labels < 0) | (labels >= vocab_size)):
        raise ValueError(
            f"labels: expected values from 0 to {vocab_size - 1} or {ignore_index}, "
            f"got {int(labels.min())} to {int(labels.max())}"
        )
    total = loss_fn(head, hidden_states, labels).sum()
    if num_items_in_batch is None:
        return total / max(len(labels), 1)
    if isinstance(num_items_in_batch, Tensor):
        return total / num_items_in_batch.to(total.device).clamp_min(1)
    return total / max(num_items_in_batch, 1)
