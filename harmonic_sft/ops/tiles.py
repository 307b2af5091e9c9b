"""Row statistics and weights of one tile of scores, in plain PyTorch operations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

NEAR_PER_TILE = 8  # near pairs of a row that a tile hands over, the closest ones


class TileArrays(NamedTuple):
    """Where the tiles of a chunk leave what their rows contribute, excluded pairs left out.

    Attributes:
        log_scale: `[tiles, T]`, the largest logit; -inf if nothing is left.
        sums: `[tiles, T]`, sum of exp(logit - log_scale).
        scale: `[tiles, T]`, what the weights are multiples of: weight / scale * exp(log_scale) is
            exp(logit), divided by the squared distance if the head measures distances.
        moments: `[tiles, 4, T]` or None, with p = exp(logit - log_scale): sums of p * log p,
            p * log d2, logit, and log d2.
        best: `[tiles, T]` or None, the column of the largest logit.
    """

    log_scale: Tensor
    sums: Tensor
    scale: Tensor
    moments: Tensor | None
    best: Tensor | None

    def tile(self, index: int) -> "TileArrays":
        """Return the rows of one tile: `[T]` each, moments `[4, T]`."""
        moments = None if self.moments is None else self.moments[index]
        best = None if self.best is None else self.best[index]
        return TileArrays(self.log_scale[index], self.sums[index], self.scale[index], moments, best)


@dataclass(frozen=True)
class Exclusion:
    """The pairs that every tile of a chunk leaves out; made once, since a tile's own work is short.

    Attributes:
        columns: `[tiles, T, S]`, clamped to the tile's columns.
        values: `[tiles, T, S]`, what is infinite at pairs in the tile, and changes nothing
            elsewhere.
        fill: inf for squared distances, -inf for logits.
    """

    columns: Tensor
    values: Tensor
    fill: float

    def apply_(self, scores: Tensor, tile: int) -> None:
        """Set the pairs in `scores` `[T, W]` of a tile to `fill`."""
        reduce = "amax" if self.fill > 0 else "amin"
        scores.scatter_reduce_(1, self.columns[tile], self.values[tile], reduce)


def build_exclusion(
    columns: Tensor, edges: Sequence[tuple[int, int]], fill: float, dtype: torch.dtype
) -> Exclusion:
    """Return what leaves out `columns` `[T, S]` (-1: none) of tiles with the given edges."""
    bounds = torch.tensor(edges, device=columns.device)[:, :, None, None]  # [tiles, 2, 1, 1]
    starts, stops = bounds[:, 0], bounds[:, 1]
    inside = (columns >= starts) & (columns < stops)
    values = torch.where(inside, fill, -fill).to(dtype)
    clamped = torch.minimum((columns - starts).clamp_min_(0), stops - starts - 1)
    return Exclusion(clamped, values, fill)


def distance_weights(
    squared: Tensor, h_exp: float | Tensor, nearest: Tensor, sums: Tensor, out: Tensor | None
) -> None:
    """Sum (nearest / d2) ** -h_exp over the rows of a tile, and keep it over d2.

    Args:
        squared: `[T, W]`, eps added, inf where excluded; overwritten.
        h_exp: Below 0. A whole number takes no logarithm or exponential per score.
        nearest: `[T]`, the least of each row.
        sums: `[T]`, written.
        out: `[T, W]`, gets the weights, nearest / d2 times the power; None if not needed.
    """
    # A row that is excluded as a whole has the ratio 0 / inf = 0.
    ratio = torch.div(nearest.unsqueeze(1), squared, out=squared)
    power = _integer_power(ratio, h_exp)
    if power is None:
        power = torch.log(ratio).mul_(-h_exp).exp_()
    torch.sum(power, 1, out=sums)
    if out is not None:
        torch.mul(power, ratio, out=out)


def linear_statistics(
    logits: Tensor, bias: Tensor | None, arrays: TileArrays, out: Tensor | None
) -> None:
    """Turn dot products `[T, W]` (-inf where excluded) into statistics of one tile.

    Args:
        logits: Overwritten.
        bias: `[W]` or None, added to the logits.
        arrays: Rows of the tile, written.
        out: `[T, W]`, gets the weights; None if they are not needed.
    """
    if bias is not None:
        logits.add_(bias)
    if arrays.moments is None or arrays.best is None:
        torch.amax(logits, 1, out=arrays.log_scale)
    else:
        torch.max(logits, 1, out=(arrays.log_scale, arrays.best))
        arrays.moments[2] = logits.masked_fill(logits == -torch.inf, 0).sum(1)
    logits.sub_(finite_peaks(arrays.log_scale))
    weights = torch.exp(logits, out=out)
    torch.sum(weights, 1, out=arrays.sums)
    if arrays.moments is not None:
        arrays.moments[0] = _weighted_sum(weights, logits)


def distance_statistics(
    squared: Tensor,
    unit: Tensor,
    h_exp: float | Tensor,
    bias: Tensor | None,
    arrays: TileArrays,
    out: Tensor | None,
) -> None:
    """Turn squared distances `[T, W]` into statistics of one tile, by way of the logits.

    Args:
        squared: Eps added, inf where excluded; overwritten.
        unit: `[T, 1]`, of the squared distances whose logarithms are taken.
        h_exp: Below 0.
        bias: `[W]` or None, added to the logits.
        arrays: Rows of the tile, written.
        out: `[T, W]`, gets the weights; None if they are not needed.
    """
    logs = torch.div(squared, unit).log_()  # inf where excluded
    logits = logs * h_exp
    if bias is not None:
        logits += bias
    if arrays.moments is None or arrays.best is None:
        torch.amax(logits, 1, out=arrays.log_scale)
    else:
        torch.max(logits, 1, out=(arrays.log_scale, arrays.best))
        arrays.moments[2] = logits.masked_fill(logits == -torch.inf, 0).sum(1)
        arrays.moments[3] = logs.masked_fill(squared == torch.inf, 0).sum(1)
    logits -= finite_peaks(arrays.log_scale)
    power = torch.exp(logits)
    torch.sum(power, 1, out=arrays.sums)
    if out is not None:
        torch.div(power, squared, out=out)
    if arrays.moments is not None:
        arrays.moments[0] = _weighted_sum(power, logits)
        arrays.moments[1] = _weighted_sum(power, logs)


def finite_peaks(log_scale: Tensor) -> Tensor:
    """Return `[T, 1]`, 0 for rows with nothing left, whose logits stay -inf then."""
    return log_scale.masked_fill(log_scale == -torch.inf, 0).unsqueeze(1)


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


def take_near(squared: Tensor, limits: Tensor, eps: float, count: int) -> Tensor:
    """Exclude the near pairs of a tile and return their columns `[T, S]`, -1 where there is none.

    Args:
        squared: `[T, W]`; near pairs are set to inf.
        limits: `[T, 1]`, below which a squared distance has lost digits.
        eps: The least value that a squared distance with eps added can have.
        count: At most so many of a row, the closest ones.
    """
    closest, columns = squared.topk(min(count, squared.shape[1]), largest=False)
    near = closest < limits
    squared.scatter_(1, columns, torch.where(near, torch.inf, closest))
    # What exceeds the count keeps its expanded distance, which rounding may push below zero.
    squared.clamp_min_(eps)
    return torch.where(near, columns, -1)


def near_count(squared: Tensor, limits: Tensor) -> int:
    """Return how many near pairs the row with the most of them has, at most `NEAR_PER_TILE`."""
    return min(int((squared < limits).sum(1).max()), NEAR_PER_TILE)


def _integer_power(ratio: Tensor, h_exp: float | Tensor) -> Tensor | None:
    """Return ratio ** -h_exp by repeated squaring; None if that is no whole number to 1023."""
    if isinstance(h_exp, Tensor) or h_exp != round(h_exp) or h_exp < -1023:
        return None
    bits = f"{int(-h_exp):b}"[1:]
    power = ratio
    if bits.startswith("1"):  # a cube is one pass over the tile, a square and a product are two
        power, bits = torch.pow(ratio, 3), bits[1:]
    for bit in bits:
        power = torch.mul(power, power, out=None if power is ratio else power)
        if bit == "1":
            power.mul_(ratio)
    return power
