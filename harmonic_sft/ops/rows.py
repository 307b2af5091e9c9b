"""From what the tiles found to each token's loss, metrics and gradient coefficients."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from harmonic_sft.ops.geometry import all_reduce_
from harmonic_sft.ops.options import TokenMetrics
from harmonic_sft.ops.request import Request


@dataclass(frozen=True)
class Pairs:
    """Pairs of a chunk that stay out of the matrix products: labels first, then near prototypes.

    Their distances are taken by direct difference: the label's decides the loss of a confident
    token, and a near prototype's expanded distance would have lost its digits.

    Attributes:
        columns: `[T, S]`, -1 where there is none.
        num_labels: K, how many of the S are labels.
        squared: `[T, S]`, d2 + eps; 1 for a linear head.
        logs: `[T, S]`, log(squared / unit); 0 for a linear head and where there is none.
        logits: `[T, S]`, h_exp * logs + bias, or the linear logit; -inf where there is none.
    """

    columns: Tensor
    num_labels: int
    squared: Tensor
    logs: Tensor
    logits: Tensor


@dataclass(frozen=True)
class TileSums:
    """`TileStatistics` of all tiles of a chunk, stacked.

    Attributes:
        unit: `[T, 1]`, of squared distances (`Frame.unit`); 1 for a linear head.
        log_scale: `[tiles, T]`.
        sums: `[tiles, T]`.
        scale: `[tiles, T]`.
        near: `[T, S]` or None, columns of near pairs.
        moments: `[4, tiles, T]` or None.
        best: `[tiles, T]` or None, columns.
    """

    unit: Tensor
    log_scale: Tensor
    sums: Tensor
    scale: Tensor
    near: Tensor | None
    moments: Tensor | None
    best: Tensor | None


class Rows(NamedTuple):
    """The normalized rows of a chunk.

    Attributes:
        log_normalizer: `[T]`, logsumexp over all classes of all ranks, distances in `unit`.
        log_probs: `[T, K]`, of the labels, on every rank; -inf where there is none. Accurate also
            when p is close to 1, so that 1 - p is.
        mass: `[T]`, factor of p in dL/dlogit, before the token weight.
    """

    log_normalizer: Tensor
    log_probs: Tensor
    mass: Tensor


def measure_pairs(
    request: Request,
    hidden_states: Tensor,
    unit: Tensor,
    labels: Tensor,
    near: Tensor | None,
) -> Pairs:
    """Return the pairs at columns `labels` `[T, K]` and `near` of hidden states in the frame."""
    columns = labels if near is None else torch.cat([labels, near], 1)  # [T, S]
    known = columns.clamp_min(0)
    found = []
    for classes in known.unbind(1):
        prototypes = request.frame.rows(classes)  # [T, D]
        if request.frame.kind == "linear":
            found.append((hidden_states * prototypes).sum(1))
        else:
            found.append((hidden_states - prototypes).square_().sum(1).add_(request.frame.eps))
    scores = torch.stack(found, 1)
    squared, logs, logits = torch.ones_like(scores), torch.zeros_like(scores), scores
    if request.frame.kind != "linear":
        squared, logs = scores, torch.log(scores / unit)
        logits = logs * request.h_exp
    if request.class_bias is not None:
        logits = logits + request.class_bias[known].to(logits.dtype)
    there = columns >= 0
    logits = logits.where(there, -torch.inf)
    return Pairs(columns, labels.shape[1], squared, logs.where(there, 0), logits)


def log_normalizer_of(request: Request, rows_log_normalizer: Tensor, unit: Tensor) -> Tensor:
    """Return the logsumexp of the logits themselves `[T]`, of distances not in `unit`."""
    if request.frame.kind == "linear":
        return rows_log_normalizer
    return rows_log_normalizer + request.h_exp * unit.squeeze(1).log()


def normalize(request: Request, pairs: Pairs, sums: TileSums, chunk: slice) -> Rows:
    """Return the normalized rows of a chunk, complete over all ranks."""
    count = pairs.num_labels
    partial = _logsumexp(torch.cat([sums.log_scale + sums.sums.log(), pairs.logits[:, count:].T]))
    others = partial
    label_logits = pairs.logits[:, :count]
    held = pairs.columns[:, :count] >= 0
    if request.group is not None:
        peak = all_reduce_(partial.clone(), request.group, "max")
        safe = peak.masked_fill(peak == -torch.inf, 0)
        others = all_reduce_((partial - safe).exp(), request.group).log() + safe
        here = held
        held = all_reduce_(here.to(label_logits.dtype), request.group) > 0
        label_logits = all_reduce_(label_logits.where(here, 0), request.group)
        label_logits = label_logits.where(held, -torch.inf)
    rests = torch.stack(
        [_logsumexp(torch.cat([others[None], _without(label_logits, k).T])) for k in range(count)],
        1,
    )  # [T, K], log of everything but the label
    log_normalizer = _logsumexp(torch.cat([others[None], label_logits.T]))
    margin = rests - label_logits
    log_probs = -torch.logaddexp(margin, torch.zeros_like(margin))
    log_probs = log_probs.where(held, -torch.inf)
    mass = mass_of(request, log_normalizer_of(request, log_normalizer, sums.unit), chunk)
    return Rows(log_normalizer, log_probs, mass)


def mass_of(request: Request, log_normalizer: Tensor, chunk: slice) -> Tensor:
    """Return the factor of p in dL/dlogit `[T]`: the target's sum, and what z-loss adds.

    Args:
        request: What is asked.
        log_normalizer: `[T]`, of the logits themselves.
        chunk: The tokens.
    """
    smoothing = request.label_smoothing
    target = (1 - smoothing) * request.target_weights[chunk].sum(1) + smoothing
    return target + 2 * request.z_loss * log_normalizer


def losses(
    request: Request, rows: Rows, unit: Tensor, logit_sums: Tensor | None, chunk: slice
) -> Tensor:
    """Return the loss `[T]`; `logit_sums` `[T]` over all classes is needed for smoothing."""
    smoothing = request.label_smoothing
    loss = -target_log_probs(request, rows, chunk)
    if logit_sums is not None and smoothing:
        uniform = rows.log_normalizer - logit_sums / request.vocab_size
        loss = (1 - smoothing) * loss + smoothing * uniform
    if request.z_loss:
        normalizer = log_normalizer_of(request, rows.log_normalizer, unit)
        loss = loss + request.z_loss * normalizer.square()
    return loss if request.token_weights is None else loss * request.token_weights[chunk]


def target_log_probs(request: Request, rows: Rows, chunk: slice) -> Tensor:
    """Return the log-probability of the target `[T]`, its mean under a soft one."""
    weights = request.target_weights[chunk]
    return (weights * rows.log_probs).where(weights != 0, 0).sum(1)


def pair_gradients(request: Request, pairs: Pairs, rows: Rows, chunk: slice) -> Tensor:
    """Return dL/dlogit `[T, S]` of the pairs, 0 where there is none, before token weights."""
    count = pairs.num_labels
    floor = request.label_smoothing / request.vocab_size
    mass = rows.mass[:, None]
    near = mass * (pairs.logits[:, count:] - rows.log_normalizer[:, None]).exp() - floor
    target = (1 - request.label_smoothing) * request.target_weights[chunk] + floor
    # mass * p - target, without the cancellation of p - 1.
    labels = (mass - target) * rows.log_probs.exp() + target * torch.expm1(rows.log_probs)
    return torch.cat([labels, near], 1).where(pairs.columns >= 0, 0)


def logit_totals(request: Request, pairs: Pairs, sums: TileSums) -> Tensor:
    """Return the sum of all logits of each token `[T]`."""
    assert sums.moments is not None, "moments were not asked for"
    logits = pairs.logits.masked_fill(pairs.logits == -torch.inf, 0)
    return all_reduce_(sums.moments[2].sum(0) + logits.sum(1), request.group)


def entropies(request: Request, pairs: Pairs, sums: TileSums, rows: Rows) -> Tensor:
    """Return the entropy of each token's distribution `[T]`, a sum of positive terms."""
    assert sums.moments is not None, "moments were not asked for"
    offsets = sums.log_scale - rows.log_normalizer  # [tiles, T]
    tiles = offsets.exp() * (sums.moments[0] + (sums.sums * offsets).where(sums.sums > 0, 0))
    near = pairs.logits[:, pairs.num_labels :] - rows.log_normalizer[:, None]
    found = all_reduce_(tiles.sum(0) + _self_weighted(near), request.group)
    return -(found + _self_weighted(rows.log_probs))


def _self_weighted(log_probs: Tensor) -> Tensor:
    """Return the row sums of p * log p, 0 where p is."""
    return (log_probs.exp() * log_probs).where(log_probs != -torch.inf, 0).sum(1)


def exponent_gradients(
    request: Request, pairs: Pairs, sums: TileSums, rows: Rows, slopes: Tensor
) -> Tensor:
    """Return dL/dh_exp of each token `[T]`, before its weight, from the pairs' slopes `[T, S]`."""
    assert sums.moments is not None, "moments were not asked for"
    scale = (sums.log_scale - rows.log_normalizer).exp()  # [tiles, T]
    floor = request.label_smoothing / request.vocab_size
    tiles = rows.mass * (sums.moments[1] * scale).sum(0) - floor * sums.moments[3].sum(0)
    found = all_reduce_(tiles + (slopes * pairs.logs).sum(1), request.group)
    # The slopes sum to 0 but for the z-loss, so that the unit of the distances mostly drops out.
    normalizer = log_normalizer_of(request, rows.log_normalizer, sums.unit)
    return found + 2 * request.z_loss * normalizer * sums.unit.squeeze(1).log()


def metrics(
    request: Request, pairs: Pairs, sums: TileSums, rows: Rows, chunk: slice
) -> TokenMetrics:
    """Return the metrics of a chunk."""
    assert sums.best is not None, "the best columns were not asked for"
    logits = torch.cat([sums.log_scale.T, pairs.logits], 1)
    columns = torch.cat([sums.best.T, pairs.columns], 1)
    best, where = logits.max(1)
    predictions = columns.gather(1, where[:, None]).squeeze(1) + request.vocab_start
    if request.group is not None:
        top = all_reduce_(best.clone(), request.group, "max")
        predictions = all_reduce_(
            predictions.where(best == top, request.vocab_size), request.group, "min"
        )
    return TokenMetrics(
        target_log_probs(request, rows, chunk),
        log_normalizer_of(request, rows.log_normalizer, sums.unit),
        entropies(request, pairs, sums, rows),
        predictions,
    )


def _without(logits: Tensor, column: int) -> Tensor:
    return torch.cat([logits[:, :column], logits[:, column + 1 :]], 1)


def _logsumexp(logits: Tensor) -> Tensor:
    """Return the logsumexp over the first axis; -inf if everything is."""
    return logits.logsumexp(0)
