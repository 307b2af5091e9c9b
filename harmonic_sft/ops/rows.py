"""From the pairs and what the tiles found to normalizers, metrics and the exponent's gradient."""

import torch
from torch import Tensor

from harmonic_sft.ops.arguments import Chunk, Rows, TileStatistics
from harmonic_sft.ops.geometry import Geometry
from harmonic_sft.ops.options import TokenMetrics


def measure_pairs(
    chunk: Chunk,
    geometry: Geometry,
    h_exp: float | Tensor,
    class_bias: Tensor | None,
    near: Tensor | None,
) -> None:
    """Write the pairs of a chunk: its labels, and the columns `near` `[T, S]`, -1 for none."""
    columns = chunk.labels if near is None else torch.cat([chunk.labels, near], 1)  # [T, S]
    known = columns.clamp_min(0)
    found = []
    for classes in known.unbind(1):
        prototypes = geometry.rows(classes)  # [T, D]
        if geometry.linear:
            found.append((chunk.placed * prototypes).sum(1))
        else:
            found.append((chunk.placed - prototypes).square_().sum(1).add_(geometry.eps))
    scores = torch.stack(found, 1)
    squared, logs, logits = torch.ones_like(scores), torch.zeros_like(scores), scores
    if not geometry.linear:
        squared = scores + geometry.undirected(chunk.inverse, known)
        logs = torch.log(squared / chunk.unit)
        logits = logs * h_exp
    if class_bias is not None:
        logits = logits + class_bias[known].to(logits.dtype)
    there = columns >= 0
    chunk.columns, chunk.squared, chunk.logs = columns, squared, logs.where(there, 0)
    chunk.logits = logits.where(there, -torch.inf)


def normalize(chunk: Chunk, statistics: TileStatistics) -> tuple[Tensor, Tensor]:
    """Return log-normalizers `[T]`, distances in `unit`, and the labels' log-probs `[T, K]`."""
    count = chunk.num_labels
    others = [statistics.log_scale + statistics.sums.log(), chunk.logits[:, count:].T]
    log_others = torch.cat(others).logsumexp(0)[:, None]  # [T, 1]
    labels = chunk.logits[:, :count]  # [T, K]
    rests = [
        torch.cat([log_others, labels[:, :k], labels[:, k + 1 :]], 1).logsumexp(1)
        for k in range(count)
    ]
    # The sum leaves out the label, so that 1 - p keeps its digits where p is close to 1.
    margin = torch.stack(rests, 1) - labels
    log_probs = -torch.logaddexp(margin, torch.zeros_like(margin))
    log_probs = log_probs.where(chunk.columns[:, :count] >= 0, -torch.inf)
    return torch.cat([log_others, labels], 1).logsumexp(1), log_probs


def entropies(chunk: Chunk, statistics: TileStatistics, rows: Rows) -> Tensor:
    """Return the entropy of each token's distribution `[T]`, a sum of positive terms."""
    assert statistics.moments is not None, "moments were not asked for"
    offsets = statistics.log_scale - rows.log_normalizer  # [tiles, T]
    sums = statistics.sums
    tiles = offsets.exp() * (statistics.moments[0] + (sums * offsets).where(sums > 0, 0))
    near = chunk.logits[:, chunk.num_labels :] - rows.log_normalizer[:, None]
    log_probs = torch.cat([rows.log_probs, near], 1)
    terms = (log_probs.exp() * log_probs).where(log_probs != -torch.inf, 0)
    return -(tiles.sum(0) + terms.sum(1))


def token_metrics(
    chunk: Chunk, statistics: TileStatistics, rows: Rows, target: Tensor, normalizer: Tensor
) -> TokenMetrics:
    """Return the metrics of a chunk.

    Args:
        chunk: With its pairs.
        statistics: With moments and best columns.
        rows: Normalized.
        target: `[T, K]`, probabilities of the labels.
        normalizer: `[T]`, logsumexp of the logits themselves.
    """
    assert statistics.best is not None, "the best columns were not asked for"
    logits = torch.cat([statistics.log_scale.T, chunk.logits], 1)
    columns = torch.cat([statistics.best.T, chunk.columns], 1)
    # A tile with nothing left has no best column.
    empty = statistics.sums.T == 0
    logits[:, : empty.shape[1]].masked_fill_(empty, -torch.inf)
    best = logits.argmax(1, keepdim=True)
    log_probs = (target * rows.log_probs).where(target != 0, 0).sum(1)
    predictions = columns.gather(1, best).squeeze(1)
    return TokenMetrics(log_probs, normalizer, entropies(chunk, statistics, rows), predictions)


def log_moments(statistics: TileStatistics, h_exp: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of e * log(d2 / unit) and of log(d2 / unit) of each tile, `[tiles, T]`.

    The second is 0 where it was not asked for, without label smoothing.
    """
    assert statistics.moments is not None, "moments were not asked for"
    entropy, biased, biases = statistics.moments
    weighted = (entropy + statistics.log_scale * statistics.sums - biased) / h_exp
    if statistics.logits is None:
        return weighted, torch.zeros_like(weighted)
    return weighted, (statistics.logits - biases) / h_exp
