"""The objective: from hidden states and labels with ignored positions to one number."""

from collections.abc import Callable

import torch
from torch import Tensor

from .head import Head

LossFunction = Callable[[Head, Tensor, Tensor], Tensor]
IGNORE_INDEX = -100  # the label of positions that are not scored, everywhere in transformers


def negative_log_likelihood(head: Head, hidden_states: Tensor, labels: Tensor) -> Tensor:
    """Return the head's own loss per token `[N]`, in nats."""
    return head.nll(hidden_states, labels)


def scored_positions(labels: Tensor, *, num_classes: int, causal: bool = False) -> Tensor:
    """Return the positions of scored labels (not -100) in the flattened batch, `[N]` int64.

    N depends on the labels' values, so on a GPU this waits for the device. To avoid the wait, call
    it on the CPU, in the collator, and give the model the result as `label_positions`.
    Labels are `[B, T]` or `[B]`; `causal` leaves out the first of every row, which no position
    predicts.

    Raises:
        ValueError: A label is not a class. Checked only on the CPU and outside of compiled code:
            elsewhere the check would wait for the device or break the graph, and a bad label fails
            when its class is looked up.
    """
    if labels.is_meta:  # without values: as if every label were scored
        return torch.arange(labels.numel(), device="meta")
    scored = labels != IGNORE_INDEX
    if causal:
        scored[:, 0] = False
    positions = scored.flatten().nonzero().squeeze(-1)  # [N]
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        classes = labels.flatten()[positions]
        if torch.any((classes < 0) | (classes >= num_classes)):
            raise ValueError(
                f"labels: expected values from 0 to {num_classes - 1} or {IGNORE_INDEX}, "
                f"got {int(classes.min())} to {int(classes.max())}"
            )
    return positions


def mean_token_loss(
    loss_fn: LossFunction,
    head: Head,
    hidden_states: Tensor,
    labels: Tensor,
    *,
    label_positions: Tensor | None = None,
    label_weights: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    causal: bool = False,
) -> Tensor:
    """Return the mean loss over the labelled positions.

    Ignored positions are dropped before the head, so that no logit is computed for them.

    Args:
        loss_fn: Called with the head, hidden states `[N, D]` and labels `[N]`; returns `[N]`.
        head: The output head.
        hidden_states: `[B, T, D]`. The labelled ones are moved to the head's device.
        labels: `[B, T]`, -100 where there is nothing to predict.
        label_positions: `[N]`, from `scored_positions`, on the device of `labels`; with it nothing
            waits for the device. Default: found here.
        label_weights: `[B, T]`, one per label. The weighted sum is still divided by the number of
            labels: a weight of 2 counts a label twice in the gradient, and one of 0 leaves it out.
            Default: 1 for all.
        num_items_in_batch: What to divide the sum by: the labelled positions of the whole
            accumulated batch on all processes. Default: those of this call.
        causal: Position t predicts label t + 1.

    Returns:
        A scalar in nats; 0, still attached to the graph, if nothing is labelled anywhere.

    Raises:
        ValueError: A label is not a class of the head, or there is not one label, and one weight
            if any are given, for each position.
    """
    if not torch.compiler.is_compiling():
        _check_labels(labels, label_weights, hidden_states.shape[:2])
    if label_positions is None:
        label_positions = scored_positions(labels, num_classes=len(head.weight), causal=causal)
    labels = labels.flatten()[label_positions].long()  # [N]
    state_positions = (label_positions - 1 if causal else label_positions).to(hidden_states.device)
    hidden_states = hidden_states.flatten(0, 1).index_select(0, state_positions)  # [N, D]
    device = head.weight.device
    losses = loss_fn(head, hidden_states.to(device), labels.to(device))  # [N]
    if label_weights is not None:
        losses = losses * label_weights.flatten()[label_positions].to(losses.device)
    count = labels.shape[0] if num_items_in_batch is None else num_items_in_batch
    return mean_of(losses, count)


def mean_of(losses: Tensor, count: Tensor | int) -> Tensor:
    """Return the sum of losses divided by `count`, or by 1 if `count` is 0."""
    total = losses.sum()
    if isinstance(count, Tensor):
        return total / count.to(total.device).clamp_min(1)
    return total / max(count, 1)


def _check_labels(labels: Tensor, label_weights: Tensor | None, shape: tuple[int, ...]) -> None:
    """Refuse labels or weights that are not one for each position `[B, T]`."""
    if labels.is_floating_point() or labels.shape != shape:
        raise ValueError(
            f"labels: expected one class number for each of {list(shape)}, got "
            f"{labels.dtype} of {list(labels.shape)}"
        )
    if label_weights is None:
        return
    # Weights of whole texts come as `[B]`, and their labels are `[B, 1]`.
    if label_weights.shape[:1] != shape[:1] or label_weights.numel() != labels.numel():
        raise ValueError(
            f"label_weights: expected one for each of {list(shape)}, "
            f"got {list(label_weights.shape)}"
        )
