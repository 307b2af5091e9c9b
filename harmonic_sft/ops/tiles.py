"""Row statistics and weights of one tile of scores, in plain PyTorch operations."""

from dataclasses import dataclass

import torch
from torch import Tensor

NEAR_PER_TILE = 8  # near pairs of a row that a tile hands over, the closest ones


@dataclass(frozen=True)
class TileStatistics:
    """What a row of a tile contributes to its normalizer, excluded pairs left out.

    Attributes:
        log_scale: `[T]`, the largest logit; -inf if nothing is left.
        sums: `[T]`, sum of exp(logit - log_scale).
        scale: `[T]` or 1, what the weights are multiples of: weight / scale * exp(log_scale) is
            exp(logit), divided by the squared distance if the head measures distances.
        moments: `[4, T]` or None, with p = exp(logit - log_scale): sums of p * log p,
            p * log d2, logit, and log d2.
        best: `[T]` or None, the column of the largest logit.
    """

    log_scale: Tensor
    sums: Tensor
    scale: Tensor | float
    moments: Tensor | None = None
    best: Tensor | None = None


def exclude_(scores: Tensor, columns: Tensor, fill: float) -> None:
    """Set `scores` `[T, W]` to `fill` (infinite) at those `columns` `[T, S]` that it has."""
    width = scores.shape[1]
    inside = (columns >= 0) & (columns < width)
    values = torch.where(inside, fill, -fill).to(scores.dtype)
    reduce = "amax" if fill > 0 else "amin"
    scores.scatter_reduce_(1, columns.clamp(0, width - 1), values, reduce)


def distance_statistics(
    squared: Tensor,
    unit: Tensor,
    h_exp: float | Tensor,
    *,
    bias: Tensor | None,
    moments: bool,
    out: Tensor | None,
) -> TileStatistics:
    """Turn squared distances `[T, W]` (eps added, inf where excluded) into statistics.

    Args:
        squared: Overwritten.
        unit: `[T, 1]`, of the squared distances whose logarithms are taken.
        h_exp: Below 0. A whole number takes no logarithm or exponential per score.
        bias: `[W]` or None, added to the logits.
        moments: Also give moments and the best column.
        out: `[T, W]`, gets the weights; None if they are not needed.
    """
    if bias is not None or moments:
        return _distance_statistics_by_logits(squared, unit, h_exp, bias, moments, out)
    nearest = squared.amin(1)  # [T]
    present = nearest.masked_fill(nearest == torch.inf, 0)
    ratio = torch.div(present.unsqueeze(1), squared, out=squared)  # in [0, 1], 0 where excluded
    power = _integer_power(ratio, h_exp)
    if power is None:
        power = torch.log(ratio).mul_(-h_exp).exp_()
    sums = power.sum(1)
    if out is not None:
        torch.mul(power, ratio, out=out)
    return TileStatistics((nearest / unit.squeeze(1)).log_().mul_(h_exp), sums, present)


def linear_statistics(
    logits: Tensor, bias: Tensor | None, moments: bool, out: Tensor | None
) -> TileStatistics:
    """Turn dot products `[T, W]` (-inf where excluded) into statistics; see `TileStatistics`."""
    if bias is not None:
        logits.add_(bias)
    log_scale, best = logits.max(1) if moments else (logits.amax(1), None)
    present = log_scale.masked_fill(log_scale == -torch.inf, 0).unsqueeze(1)
    logit_sums = logits.masked_fill(logits == -torch.inf, 0).sum(1) if moments else None
    logits.sub_(present)
    weights = torch.exp(logits, out=out)
    sums = weights.sum(1)
    found = None
    if logit_sums is not None:
        empty = torch.zeros_like(sums)
        found = torch.stack([_weighted_sum(weights, logits), empty, logit_sums, empty])
    return TileStatistics(log_scale, sums, 1.0, found, best)


def _distance_statistics_by_logits(
    squared: Tensor,
    unit: Tensor,
    h_exp: float | Tensor,
    bias: Tensor | None,
    moments: bool,
    out: Tensor | None,
) -> TileStatistics:
    logs = torch.div(squared, unit).log_()  # inf where excluded
    logits = logs * h_exp
    if bias is not None:
        logits += bias
    log_scale, best = logits.max(1) if moments else (logits.amax(1), None)
    present = log_scale.masked_fill(log_scale == -torch.inf, 0).unsqueeze(1)
    logit_sums = logits.masked_fill(logits == -torch.inf, 0).sum(1) if moments else None
    logits -= present
    power = torch.exp(logits)
    sums = power.sum(1)
    if out is not None:
        torch.div(power, squared, out=out)
    found = None
    if logit_sums is not None:
        log_sums = logs.masked_fill(squared == torch.inf, 0).sum(1)
        weighted = [_weighted_sum(power, logits), _weighted_sum(power, logs)]
        found = torch.stack([*weighted, logit_sums, log_sums])
    return TileStatistics(log_scale, sums, 1.0, found, best)


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Return the row sums of weights * values, 0 where the weight is."""
    return (weights * values).where(weights != 0, 0).sum(1)


def distance_coefficients(
    squared: Tensor,
    unit: Tensor,
    h_exp: float | Tensor,
    bias: Tensor | None,
    rows: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Return -2 dL/d(d2) `[T, W]` and dL/dlogit `[T, W]`, 0 where excluded.

    Args:
        squared: `[T, W]`, eps added, inf where excluded; overwritten.
        unit: `[T, 1]`, of the squared distances whose logarithms are taken.
        h_exp: Below 0.
        bias: `[W]` or None.
        rows: Log-normalizer, mass and smoothing `[T]`: dL/dlogit = mass * p - smoothing.
    """
    log_normalizer, mass, smoothing = (row.unsqueeze(1) for row in rows)
    logits = torch.div(squared, unit).log_().mul_(h_exp)
    if bias is not None:
        logits += bias
    gradient = logits.sub_(log_normalizer).exp_().mul_(mass).sub_(smoothing)
    return torch.div(gradient * (-2 * h_exp), squared, out=squared), gradient


def linear_coefficients(
    logits: Tensor, bias: Tensor | None, rows: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Return dL/dlogit `[T, W]`, -smoothing where excluded; see `distance_coefficients`."""
    log_normalizer, mass, smoothing = (row.unsqueeze(1) for row in rows)
    if bias is not None:
        logits.add_(bias)
    return logits.sub_(log_normalizer).exp_().mul_(mass).sub_(smoothing)


def take_near(squared: Tensor, limits: Tensor, eps: float, always: bool) -> Tensor | None:
    """Exclude the near pairs of a tile and return their columns `[T, S]`, -1 where there is none.

    Args:
        squared: `[T, W]`; near pairs are set to inf.
        limits: `[T]`, below which a squared distance has lost digits.
        eps: The least value that a squared distance with eps added can have.
        always: Take the two closest without a look at the values, which would halt a device.
    """
    limits = limits.unsqueeze(1)
    count = 2
    if not always:
        if not bool((squared.amin(1, keepdim=True) < limits).any()):
            return None
        count = min(int((squared < limits).sum(1).max()), NEAR_PER_TILE)
    closest, columns = squared.topk(min(count, squared.shape[1]), largest=False)
    near = closest < limits
    columns = torch.where(near, columns, -1)
    exclude_(squared, columns, torch.inf)
    # What exceeds the cap keeps its expanded distance, which rounding may push below zero.
    squared.clamp_min_(eps)
    return columns


def _integer_power(ratio: Tensor, h_exp: float | Tensor) -> Tensor | None:
    """Return ratio ** -h_exp by repeated squaring; None if that is no whole number to 1023."""
    if isinstance(h_exp, Tensor) or h_exp != round(h_exp) or h_exp < -1023:
        return None
    power = ratio
    for bit in f"{int(-h_exp):b}"[1:]:
        power = torch.mul(power, power, out=None if power is ratio else power)
        if bit == "1":
            power.mul_(ratio)
    return power
