"""Fused losses: the same numbers as the heads give, without the [N, V] matrix of logits."""

from harmonic_sft.ops.cross_entropy import (
    distance_cross_entropy,
    distance_cross_entropy_with_metrics,
    linear_cross_entropy,
    linear_cross_entropy_with_metrics,
)
from harmonic_sft.ops.fused import workspace_bytes
from harmonic_sft.ops.options import Impl, LossOptions, TokenMetrics

__all__ = [
    "Impl",
    "LossOptions",
    "TokenMetrics",
    "distance_cross_entropy",
    "distance_cross_entropy_with_metrics",
    "linear_cross_entropy",
    "linear_cross_entropy_with_metrics",
    "workspace_bytes",
]
