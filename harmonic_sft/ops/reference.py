"""The definition of the fused losses: dense logits and plain autograd."""

import torch
import torch.nn.functional as F
from torch import Tensor

from harmonic_sft.models.head import squared_distances
from harmonic_sft.ops.options import LossOptions, TokenMetrics


def distance_logits(
    hidden_states: Tensor,
    prototypes: Tensor,
    h_exp: float | Tensor,
    *,
    unit_sphere: bool,
    eps: float,
    labels: Tensor | None = None,
) -> Tensor:
    """Return `[N, V]` logits h_exp * log(d ** 2 + eps), as `DistLayer` defines them.

    Args:
        hidden_states: `[N, D]`.
        prototypes: `[V, D]`.
        h_exp: Below 0, on the squared distance (the paper's n is -2 * h_exp).
        unit_sphere: Normalize both sides.
        eps: Added to d ** 2.
        labels: `[N, K]`, pairs whose distance is taken by direct difference.
    """
    inverse_norms = None
    if unit_sphere:
        hidden_states = F.normalize(hidden_states, dim=-1)
        inverse_norms = 1 / torch.linalg.vector_norm(prototypes, dim=-1).clamp_min(1e-12)
    squared = squared_distances(hidden_states, prototypes, labels, inverse_norms)
    return h_exp * torch.log(squared + eps)


def loss_from_logits(
    logits: Tensor, labels: Tensor, options: LossOptions
) -> tuple[Tensor, TokenMetrics]:
    """Return the loss `[N]` and the metrics, from logits `[N, V]` without the class bias.

    Args:
        logits: `[N, V]`.
        labels: `[N, K]`.
        options: Weights of the target `[N, K]` (default: 1) and the other options.
    """
    if options.class_bias is not None:
        logits = logits + options.class_bias.to(logits.dtype)
    weights = options.target_weights
    weights = torch.ones_like(labels) if weights is None else weights
    weights = weights.to(logits.dtype) * (labels >= 0)  # [N, K]
    labels = labels.clamp_min(0)
    log_normalizer = logits.logsumexp(-1)  # [N]
    if labels.shape[1] == 1:  # log1p(others / label) stays accurate when p is close to 1
        others = logits.scatter(-1, labels, -torch.inf).logsumexp(-1, keepdim=True)
        margin = others - logits.gather(-1, labels)
        costs = torch.logaddexp(margin, torch.zeros_like(margin))  # [N, 1]
    else:
        costs = log_normalizer.unsqueeze(-1) - logits.gather(-1, labels)
    costs = costs.masked_fill(weights == 0, 0)
    target_loss = (weights * costs).sum(-1)  # [N]
    loss = target_loss
    if options.label_smoothing:
        uniform = log_normalizer - logits.mean(-1)
        loss = (1 - options.label_smoothing) * loss + options.label_smoothing * uniform
    loss = loss + options.z_loss * log_normalizer.square()
    if options.token_weights is not None:
        loss = loss * options.token_weights.to(loss.dtype)
    with torch.no_grad():
        log_probs = logits.log_softmax(-1)
        terms = torch.where(log_probs == -torch.inf, 0, log_probs.exp() * log_probs)
        metrics = TokenMetrics(
            -target_loss.detach(), log_normalizer.detach(), -terms.sum(-1), logits.argmax(-1)
        )
    return loss, metrics
