"""Fused losses: the same numbers as the heads give, without the [N, V] matrix of logits."""

from harmonic_sft.ops.cross_entropy import (
    chunked_loss,
    distance_cross_entropy,
    distance_cross_entropy_with_metrics,
    linear_cross_entropy,
    linear_cross_entropy_with_metrics,
)
from harmonic_sft.ops.dense_chunks import by_chunks
from harmonic_sft.ops.engine import workspace_bytes
from harmonic_sft.ops.options import Impl, LossOptions, TokenMetrics
