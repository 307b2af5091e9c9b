"""The definition of the fused losses: dense logits and plain autograd."""

import math

import torch
from torch import Tensor

from harmonic_sft.models.head import (
    AffineLogits,
    DistanceLogits,
    dense_logits,
    distance_logits,
    label_nll,
)
from harmonic_sft.ops.arguments import LossOptions, TokenMetrics, check_labels


def reference_cross_entropy(
    lazy: AffineLogits | DistanceLogits, labels: Tensor, options: LossOptions
) -> tuple[Tensor, TokenMetrics]:
    """Return the loss `[N]` and its metrics by their definitions; see `distance_cross_entropy`.

    Args:
        lazy: Logits of N hidden states over V classes.
        labels: `[N]`, or `[N, K]` with soft targets.
        options: As in `distance_cross_entropy`.

    Raises:
        ValueError: A label is no class, or h_exp is not below 0.
    """
    dtype = torch.promote_types(lazy.hidden_states.dtype, lazy.weight.dtype)
    states = lazy.hidden_states.to(torch.promote_types(dtype, torch.float32))
    lazy = lazy._replace(hidden_states=states)
    weights = options.target_weights
    labels, least = (labels.unsqueeze(1), 0) if weights is None else (labels, -1)  # -1 pads
    num_rows, num_classes = states.shape[0], lazy.weight.shape[0]
    check_labels(labels, num_rows=num_rows, num_classes=num_classes, least=least)
    if isinstance(lazy, AffineLogits):
        logits = dense_logits(lazy)
    else:
        value = lazy.h_exp.item() if isinstance(lazy.h_exp, Tensor) else lazy.h_exp
        if not -math.inf < value < 0:
            raise ValueError(f"h_exp: expected a number below 0, got {value}")
        logits = distance_logits(lazy, labels.clamp_min(0) if labels.shape[1] == 1 else None)
    if options.class_bias is not None:
        logits = logits + options.class_bias.to(logits.dtype)
    weights = torch.ones_like(labels) if weights is None else weights
    weights = weights.to(logits.dtype) * (labels >= 0)  # [N, K]
    labels = labels.clamp_min(0)
    log_normalizer, log_probs = logits.logsumexp(-1), logits.log_softmax(-1)  # [N], [N, V]
    if labels.shape[1] == 1:
        costs = label_nll(logits, labels).unsqueeze(-1)  # [N, 1]
    else:
        costs = -log_probs.gather(-1, labels)
    costs = costs.masked_fill(weights == 0, 0)
    target_loss = (weights * costs).sum(-1)  # [N]
    loss = target_loss
    if options.label_smoothing:
        uniform = -log_probs.mean(-1)
        loss = (1 - options.label_smoothing) * loss + options.label_smoothing * uniform
    loss = loss + options.z_loss * log_normalizer.square()
    if options.token_weights is not None:
        loss = loss * options.token_weights.to(loss.dtype)
    with torch.no_grad():
        terms = torch.where(log_probs == -torch.inf, 0, log_probs.exp() * log_probs)
        metrics = TokenMetrics(
            -target_loss.detach(), log_normalizer.detach(), -terms.sum(-1), logits.argmax(-1)
        )
    return loss, metrics
