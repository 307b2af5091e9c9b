"""Fused losses: the same numbers as the heads give, without the [N, V] matrix of logits."""

from harmonic_sft.ops.arguments import Impl, LossOptions, Reduction, TokenMetrics
from harmonic_sft.ops.cross_entropy import (
    chunked_loss,
    distance_cross_entropy,
    distance_cross_entropy_with_metrics,
    linear_cross_entropy,
    linear_cross_entropy_with_metrics,
)
from harmonic_sft.ops.dense_chunks import by_chunks
from harmonic_sft.ops.engine import workspace_bytes

__all__ = [
    "Impl",
    "LossOptions",
    "Reduction",
    "TokenMetrics",
    "by_chunks",
    "chunked_loss",
    "distance_cross_entropy",
    "distance_cross_entropy_with_metrics",
    "linear_cross_entropy",
    "linear_cross_entropy_with_metrics",
    "workspace_bytes",
]
