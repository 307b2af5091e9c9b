"""The tiles of a chunk in plain PyTorch: scores, their row sums, weights for the gradients."""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from harmonic_sft.ops.arguments import Arguments
from harmonic_sft.ops.geometry import GradientProducts, log_ratio
from harmonic_sft.ops.stages import LOG2_E, Chunk, CrossEntropyStage

# Small tiles stay in the cache of a core; an accelerator wants large ones.
CPU_WIDTH, DEVICE_WIDTH = 768, 8192
# On a CPU subnormal numbers take up to a hundred times as long, also in products, and exponents
# below `STEEP` make many of them. With such exponents a probability is set to 0 if its logit, less
# the highest of its tile, is below `LOWEST`: 2e-19 adds nothing to a sum of at least 1, and its
# square is normal. A coefficient is set to 0 if it is below `SMALLEST`.
STEEP, LOWEST, SMALLEST = -16, -43.0, 2e-38
NEAR_PER_TILE = 8  # near pairs of a row that a tile hands over, the closest ones
NEAR_ON_DEVICE = 2  # the same where counting them would halt the device


class TorchTiles:
    """Works through the tiles of one chunk after another.

    A tile keeps weights for the gradients, which become coefficients once the factor of each row is
    known. With e = exp(logit - log_scale) and d2 a squared distance, the matrices it keeps are:

    - `softmax`: e / d2; e for a linear head. Under label smoothing with a whole exponent it holds
      the least d2 of the tile over d2 instead (`keeps_ratios`), a power of which is e.
    - `second`: the weights of a second loss, over d2.
    - `inverse`: 1 / d2, for label smoothing.
    - `exps`: e, for the gradient of a bias or of the points of a transport.

    Args:
        arguments: The arguments of the call.
        stage: The loss's row-wise stage.
        products: Takes the gradients of hidden states and prototypes, and has their geometry.
        point_products: Takes the gradient of the points of a transport, or None.
    """

    def __init__(
        self,
        arguments: Arguments,
        stage: CrossEntropyStage,
        products: GradientProducts,
        point_products: GradientProducts | None,
    ):
        self.stage, self.h_exp = stage, stage.h_exp
        self.products, self.point_products = products, point_products
        self.workers, self.geometry = products.workers, products.geometry
        geometry = products.geometry
        self.smoothed = arguments.label_smoothing > 0
        self.learns_bias = arguments.needs_gradient("class_bias")
        bias = arguments.class_bias
        self.bias = None if bias is None else bias.detach().to(geometry.dtype)
        distances = not geometry.linear
        self.with_metrics = arguments.with_metrics
        measures = self.with_metrics or arguments.needs_gradient("h_exp")
        # Repeated squaring takes half the time of a logarithm and an exponential.
        self.power = 0
        plain = distances and bias is None and not measures and not stage.reads_logits
        if plain and isinstance(self.h_exp, float) and -self.h_exp % 1 == 0 and self.h_exp >= -1023:
            self.power = int(-self.h_exp)
        self.sums_logits = measures or stage.reads_logits or self.smoothed
        self.keeps_ratios = self.power > 0 and self.smoothed and not stage.num_sums
        kept = {
            "softmax": True,
            "second": stage.num_sums > 0,
            "inverse": distances and self.smoothed and not self.keeps_ratios,
            "exps": distances and (self.learns_bias or point_products is not None),
        }
        names = [name for name, needed in kept.items() if needed]
        self.slots = {name: slot for slot, name in enumerate(names)}
        self.num_kept = len(names)  # matrices `[T, V]` of a chunk
        self.on_cpu = geometry.prototypes.device.type == "cpu"
        self.is_steep = self.on_cpu and distances and float(self.h_exp) < STEEP
        width, size = CPU_WIDTH if self.on_cpu else DEVICE_WIDTH, len(geometry.prototypes)
        self.edges = [slice(k, min(k + width, size)) for k in range(0, size, width)]
        self.column_terms = geometry.column_terms() if distances else None
        self.scale = geometry.scale  # taken here, and not by every worker
        self.buffer: Tensor | None = None

    def score(self, chunk: Chunk, *, keep: bool, measure: bool) -> Tensor | None:
        """Write the sums of all tiles; return the columns of near pairs `[T, S]` or None.

        Args:
            chunk: Its labels are left out of all sums.
            keep: Keep the weights for `accumulate`.
            measure: Also sum moments; for metrics, find the best columns too.
        """
        near: list[Tensor | None] = [None] * len(self.edges)
        chunk.reserve(
            len(self.edges),
            measure=measure,
            best=self.with_metrics,
            smoothed=self.smoothed,
            num_sums=self.stage.num_sums,
            ratios=self.keeps_ratios,
        )
        if keep:
            size = self.num_kept * len(chunk.placed) * self.edges[-1].stop
            if self.buffer is None or len(self.buffer) < size:
                self.buffer = chunk.placed.new_empty(size)
        work = functools.partial(self._score_tile, chunk, near, keep)
        self.workers.run(work, len(self.edges), fixed=False)  # results are per tile
        return self._joined(near)

    def pair_scores(self, chunk: Chunk, columns: Tensor) -> Tensor:
        """Return dot products or squared distances of pairs `[T, S]`, by direct difference.

        What is returned for the column -1 has no meaning.
        """
        geometry, known, parts = self.geometry, columns.clamp_min(0), []
        for classes in known.unbind(1):
            prototypes = geometry.direct_prototypes(classes)  # [T, D]
            if geometry.linear:
                parts.append((chunk.direct * prototypes).sum(1))
            else:
                parts.append((chunk.direct - prototypes).square_().sum(1).add_(geometry.eps))
        return torch.stack(parts, 1) + geometry.undirected(chunk.inverse, known)

    def finish(self, chunk: Chunk, coefficients: Tensor, hidden_gradient: Tensor | None) -> None:
        """Add the pairs' part, and complete the gradient of a chunk's hidden states.

        Args:
            chunk: After `accumulate`.
            coefficients: `[T, S]`, of the pairs: see `GradientProducts`.
            hidden_gradient: `[T, D]`, is written; None if it is not wanted.
        """
        total = None if hidden_gradient is None else self.products.hidden_gradient()
        for column, classes in enumerate(chunk.pair_classes(self.edges[-1].stop)):
            pulls = self.products.add_pairs(classes, coefficients[:, column])
            if total is not None:
                total += pulls
        if hidden_gradient is not None and total is not None:
            if chunk.inverse is not None:  # tangent to the sphere
                radial = torch.linalg.vecdot(chunk.direct, total).unsqueeze(1)
                total.addcmul_(chunk.direct, radial, value=-1)
                total *= chunk.inverse
            hidden_gradient.copy_(total)
        self.products.end_chunk()

    def complete(self) -> None:
        """Complete the prototypes' gradient after the last chunk."""
        self.products.complete()

    def accumulate(self, chunk: Chunk) -> Tensor | None:
        """Add a chunk's products to the gradients, from the weights that `score` kept.

        Returns:
            `[V]`, the sums of dL/dlogit of each class; None if no bias learns.
        """
        class_sums = chunk.mass.new_empty(self.edges[-1].stop) if self.learns_bias else None
        linear = self.geometry.linear
        self.products.start_chunk(chunk.direct)
        if self.point_products is not None:
            self.point_products.start_chunk(self.stage.label_points(chunk.tokens))

        def multiply(worker: int, k: int) -> None:
            tile, kept = self.edges[k], self._kept(chunk, k)
            share = torch.exp(chunk.log_scale[k] - chunk.log_normalizer)  # [T]
            exps = kept[self.slots.get("exps", 0)]
            if class_sums is not None and not linear:
                torch.mv(exps.T, chunk.mass * share, out=class_sums[tile])
                class_sums[tile].sub_(chunk.floor.sum())
            if self.point_products is not None:
                assert chunk.second is not None, "factors are set before"
                factors = -2 * chunk.second * share
                self.point_products.add(worker, tile, exps * factors.unsqueeze(1))
            coefficients = self._coefficients(chunk, k, share, kept)
            if class_sums is not None and linear:
                torch.sum(coefficients, 0, out=class_sums[tile])
            self.products.add(worker, tile, coefficients)

        self.workers.run(multiply, len(self.edges))
        return class_sums

    def _kept(self, chunk: Chunk, k: int) -> list[Tensor]:
        """Return where tile `k` of a chunk keeps its weights: `[T, W]` for each slot."""
        assert self.buffer is not None, "accumulate: expected score with keep before"
        num_rows, tile = len(chunk.placed), self.edges[k]
        size = self.num_kept * num_rows
        part = self.buffer[size * tile.start : size * tile.stop]
        return list(part.view(self.num_kept, num_rows, tile.stop - tile.start))

    def _score_tile(
        self, chunk: Chunk, near: list[Tensor | None], keep: bool, worker: int, k: int
    ) -> None:
        """Write the sums of tile `k`, its weights, and its near pairs to `near[k]`."""
        tile, geometry = self.edges[k], self.geometry
        kept = self._kept(chunk, k) if keep else None
        scores = torch.mm(chunk.placed, geometry.tile(tile).T)  # [T, W]
        if self.column_terms is not None:  # squared distances with eps
            if self.scale is None:
                torch.add(self.column_terms[tile], scores, alpha=-2, out=scores)
            else:
                factors = self.scale[tile]
                torch.addcmul(self.column_terms[tile], scores, factors, value=-2, out=scores)
            scores = scores if chunk.row_terms is None else scores.add_(chunk.row_terms)
        near[k], nearest = self._take_out_pairs(chunk, scores, tile)
        log_scale = chunk.log_scale[k].zero_()
        if nearest is not None:
            nearest.masked_fill_(nearest == torch.inf, 1)  # nothing is left of the row
            log_scale.copy_(log_ratio(nearest, chunk.unit).mul_(self.h_exp).squeeze(1))
        if nearest is not None and self.power:
            place = kept[0] if kept is not None and self.keeps_ratios else None
            ratios = torch.div(nearest, scores, out=place)  # 0 where left out
            exps = self._powers(ratios)
            logits = ratios.log().mul_(-self.h_exp) if self.smoothed else None
            if chunk.nearest is not None:
                chunk.nearest[k] = nearest.squeeze(1)
        else:
            logits = self._logits(scores, nearest, tile, log_scale)
            place = logits if kept is None or not geometry.linear else kept[0]
            powers = F.threshold(logits, LOWEST, -torch.inf) if self.is_steep else logits
            # The exponentials must not overwrite the logits if these are summed too.
            powers = torch.mul(powers, LOG2_E, out=None if self.sums_logits else place)
            exps = powers.exp2_()
        finite = second = None
        if logits is not None and self.sums_logits:
            finite = self._sum_logits(chunk, k, logits, exps, near[k])
        if self.stage.num_sums:
            second = self._second_weights(chunk, k, exps, finite, near[k])
        torch.sum(exps, 1, out=chunk.sums[k])
        if kept is not None and not self.keeps_ratios:
            self._keep_weights(kept, scores, exps, second)

    def _take_out_pairs(
        self, chunk: Chunk, scores: Tensor, tile: slice
    ) -> tuple[Tensor | None, Tensor | None]:
        """Take labels and near pairs out of the scores of a tile.

        Returns:
            The columns of the near pairs `[T, S]` or None, and the least squared distance `[T, 1]`
            of what is left; None for a linear head.
        """
        linear = self.geometry.linear
        _write_extreme_(scores, chunk.labels, tile, -torch.inf if linear else torch.inf)
        if linear:
            return None, None
        nearest = scores.amin(1, keepdim=True)
        limits, count = chunk.near_limits, NEAR_ON_DEVICE
        if self.on_cpu:  # elsewhere a look at the values would halt the device
            if not bool((nearest < limits).any()):
                return None, nearest
            count = min(int((scores < limits).sum(1).max()), NEAR_PER_TILE)
        closest, columns = scores.topk(min(count, scores.shape[1]), largest=False)
        near = closest < limits
        scores.scatter_(1, columns, torch.where(near, torch.inf, closest))
        # Further near pairs keep their expanded distances, which rounding may push below zero.
        scores.clamp_min_(self.geometry.eps)
        return torch.where(near, columns + tile.start, -1), scores.amin(1, keepdim=True)

    def _logits(
        self, scores: Tensor, nearest: Tensor | None, tile: slice, log_scale: Tensor
    ) -> Tensor:
        """Return logits `[T, W]` less `log_scale` `[T]`, -inf where left out.

        With a bias or dot products `log_scale` is raised by the largest logit of each row first.
        """
        logits = scores
        if nearest is not None:
            # The ratio keeps digits that a difference of large logits would lose.
            logits = torch.div(scores, nearest).log_().mul_(self.h_exp)
        if self.bias is not None:
            logits.add_(self.bias[tile])
        if self.geometry.linear or self.bias is not None:
            peaks = logits.amax(1)
            peaks.masked_fill_(peaks == -torch.inf, 0)
            logits.sub_(peaks.unsqueeze(1))
            log_scale.add_(peaks)
        return logits

    def _powers(self, ratios: Tensor) -> Tensor:
        """Return ratios ** power `[T, W]` for a whole power, by repeated squaring."""
        if self.is_steep:
            ratios = F.threshold(ratios, math.exp(LOWEST / self.power), 0)
        power = ratios
        for bit in f"{self.power:b}"[1:]:
            power = ratios * ratios if power is ratios else power.mul_(power)
            if bit == "1":
                power.mul_(ratios)
        return power

    def _sum_logits(
        self, chunk: Chunk, k: int, logits: Tensor, exps: Tensor, near: Tensor | None
    ) -> Tensor:
        """Write the sums of tile `k` over logits `[T, W]`; return the logits with 0 for -inf."""
        tile = self.edges[k]
        finite = F.threshold(logits, torch.finfo(logits.dtype).min, 0)
        if chunk.logit_sums is not None:  # then no bias is -inf
            count = logits.shape[1] - _inside(chunk.labels, tile).sum(1)
            count = count if near is None else count - (near >= 0).sum(1)
            torch.addcmul(finite.sum(1), count, chunk.log_scale[k], out=chunk.logit_sums[k])
        if chunk.best is not None:
            # `max` finds the column in a third of the time of `argmax`.
            torch.add(logits.max(1).indices, tile.start, out=chunk.best[k])
        if chunk.moments is not None:
            moments = chunk.moments[:, k]
            moments[0] = torch.linalg.vecdot(exps, finite)
            moments[1:] = 0
            if self.bias is not None:
                bias = self.bias[tile].nan_to_num(neginf=0)
                torch.mv(exps, bias, out=moments[1])
                torch.mv((logits != -torch.inf).to(bias.dtype), bias, out=moments[2])
        return finite

    def _second_weights(
        self, chunk: Chunk, k: int, exps: Tensor, finite: Tensor | None, near: Tensor | None
    ) -> Tensor:
        """Write the sums of tile `k` that the stage asks for; return its weights `[T, W]`."""
        tile = self.edges[k]
        second, sums = self.stage.weigh(tile, chunk.tokens, exps)
        for columns in (chunk.labels, near):
            if columns is not None:
                _write_extreme_(second, columns, tile, 0)
        products = [] if finite is None else [torch.linalg.vecdot(second, finite)]
        for row, values in zip(chunk.second_sums, [second.sum(1), *products, *sums], strict=True):
            row[k] = values
        return second

    def _keep_weights(
        self, kept: list[Tensor], scores: Tensor, exps: Tensor, second: Tensor | None
    ) -> None:
        """Write the weights of one tile to `kept`."""
        linear, slots = self.geometry.linear, self.slots
        if second is not None:
            target = kept[slots["second"]]
            target.copy_(second) if linear else torch.div(second, scores, out=target)
        if "inverse" in slots:
            torch.reciprocal(scores, out=kept[slots["inverse"]])
        if "exps" in slots:
            kept[slots["exps"]].copy_(exps)
        if not linear:
            torch.div(exps, scores, out=kept[0])
        elif exps is not kept[0]:
            kept[0].copy_(exps)

    def _coefficients(self, chunk: Chunk, k: int, share: Tensor, kept: list[Tensor]) -> Tensor:
        """Return dL/dlogit `[T, W]` of a linear head, -2 dL/d(d2) of distances, in `kept`."""
        slope = 1.0 if self.geometry.linear else -2 * self.h_exp
        factors = slope * chunk.mass * share  # [T]
        if chunk.nearest is not None:
            ratios, nearest = kept[0], chunk.nearest[k]
            powers = self._powers(ratios) * (factors / nearest).unsqueeze(1)
            return ratios.mul_(powers.sub_((slope * chunk.floor / nearest).unsqueeze(1)))
        if self.is_steep:
            _drop_tiny_(kept[0], factors)
        coefficients = kept[0].mul_(factors.unsqueeze(1))
        if chunk.second is not None:
            factors = slope * chunk.second * torch.exp(self.stage.log_share(chunk, k))
            coefficients.addcmul_(kept[self.slots["second"]], factors.unsqueeze(1))
        if self.smoothed:
            floor = (slope * chunk.floor).unsqueeze(1)
            if self.geometry.linear:
                coefficients.sub_(floor)
            else:
                coefficients.addcmul_(kept[self.slots["inverse"]], floor, value=-1)
        return coefficients

    def _joined(self, near: list[Tensor | None]) -> Tensor | None:
        """Join the tiles' near columns, valid ones first, without needless slots."""
        parts = [columns for columns in near if columns is not None]
        if not parts:
            return None
        joined = torch.cat(parts, 1)  # [T, S]
        if not self.on_cpu:
            return joined
        width = int((joined >= 0).sum(1).max())
        return joined.sort(1, descending=True).values[:, :width]


def _drop_tiny_(weights: Tensor, factors: Tensor) -> None:
    """Put zeros where weights `[T, W]` times the factors of their rows `[T]` would be tiny."""
    limits = SMALLEST / factors.abs()
    if bool(limits.max() > math.exp(LOWEST)):
        weights.masked_fill_(weights < limits.unsqueeze(1), 0)


def _inside(columns: Tensor, tile: slice) -> Tensor:
    """Return which columns `[T, S]` are of a tile."""
    return (columns >= tile.start) & (columns < tile.stop)


def _write_extreme_(values: Tensor, columns: Tensor, tile: slice, extreme: float) -> None:
    """Write `extreme` into a tile's values `[T, W]` at those of the classes `[T, S]` inside it.

    `extreme` must be infinity, or not above any value. A class of another tile is clamped to an
    edge of this one and changes nothing there.
    """
    reduce, nothing = ("amax", -torch.inf) if extreme == torch.inf else ("amin", torch.inf)
    places = (columns - tile.start).clamp_(0, tile.stop - tile.start - 1)
    written = torch.where(_inside(columns, tile), extreme, nothing).to(values.dtype)
    values.scatter_reduce_(1, places, written, reduce)
