"""A chunk of tokens, and the row-wise stage of each loss: from sums of tiles to gradient factors.

With p the softmax of a token's logits, t its target and q, c what the second loss needs:

- cross-entropy: dL/dlogit_j = p_j - t_j, with label smoothing and z-loss beside it;
- mixture: the mean of M softmaxes, each with its responsibility r for the label: r (p_j - t_j);
- distillation: a (p_j - t_j) + b (p_j - q_j), q the softmax of a linear teacher;
- transport: a (p_j - t_j) + b p_j (c_j - sum_k p_k c_k), c_j = |e_j - e_label| ** 2.

e are points `[V, E]`, a is `label_factor` and b `second_factor`: the numbers of `Arguments.mix`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harmonic_sft.models.head import mixture_nll
from harmonic_sft.ops.arguments import (
    Arguments,
    TokenMetrics,
    check_bias,
    read_exponent,
    read_target,
)
from harmonic_sft.ops.geometry import Geometry

NOTHING = -1e4  # a logarithm whose exponential is 0
LOG2_E = math.log2(math.e)  # on AMD, powers of 2 take a third of the time of `exp`


@dataclass
class Chunk:
    """The tokens of one chunk under one softmax; each step writes what the next ones read.

    A few pairs of a token and a class stay out of the matrix products: labels first, then near
    prototypes. Their distances are taken by direct difference: the label's decides the loss of a
    confident token, and a near prototype's expanded distance would have lost its digits. The sums
    of a tile leave them out; e = exp(logit - log_scale).

    Off the pairs dL/dlogit_j = mass * p_j + second * s_j - floor, with the stage's second weights
    s_j, scaled as `CrossEntropyStage.log_share` says.
    """

    tokens: slice  # where they stand among the N
    direct: Tensor  # [T, D], hidden states for differences
    placed: Tensor  # [T, D], hidden states as products compare them
    inverse: Tensor | None  # [T, 1], 1 / |x| on the sphere; None elsewhere
    unit: Tensor  # [T, 1], of squared distances (`Geometry.unit`); 1 for a linear head
    row_terms: Tensor | None  # [T, 1], what a token's squared distances have in common; None for 0
    near_limits: Tensor  # [T, 1], squared distances below which a prototype is near
    labels: Tensor  # [T, K], columns; -1 where padded or repeated

    # Of the tiles, None where not asked for.
    log_scale: Tensor = field(init=False)  # [tiles, T], the largest logit, or near it
    sums: Tensor = field(init=False)  # [tiles, T], of e
    moments: Tensor | None = None  # [3, tiles, T], sums of e * log e, of e * bias, of the biases
    logit_sums: Tensor | None = None  # [tiles, T]
    best: Tensor | None = None  # [tiles, T], the column of the largest logit
    nearest: Tensor | None = None  # [tiles, T], the least d2 + eps
    second_sums: Tensor = field(init=False)  # [R, tiles, T], for a stage with a second loss

    # Of the pairs.
    columns: Tensor = field(init=False)  # [T, S], their classes; -1 where there is no pair
    absent: Tensor = field(init=False)  # [T, S], where there is no pair
    squared: Tensor = field(init=False)  # [T, S], d2 + eps of distances
    logs: Tensor = field(init=False)  # [T, S], log(squared / unit); 0 where there is no pair
    logits: Tensor = field(init=False)  # [T, S], with the bias; -inf where there is no pair

    log_normalizer: Tensor = field(init=False)  # [T], over all classes, distances in `unit`
    # [T, K], of the labels; -inf where there is none. Accurate also when p is close to 1, so that
    # 1 - p is.
    log_probs: Tensor = field(init=False)
    saved: Tensor = field(init=False)  # [T], the teacher's log-normalizer, or the mean cost

    # Factors of the gradients.
    mass: Tensor = field(init=False)  # [T], of p_j
    target: Tensor = field(init=False)  # [T, K], dL/dlogit of a label is mass * p - target
    rest: Tensor = field(init=False)  # [T, K], mass - target
    floor: Tensor = field(init=False)  # [T], what label smoothing subtracts at every class
    second: Tensor | None = None  # [T], of s_j; None without a second loss

    def reserve(
        self,
        num_tiles: int,
        *,
        measure: bool,
        best: bool,
        smoothed: bool,
        num_sums: int = 0,
        ratios: bool = False,
    ) -> None:
        """Make room for what the tiles write: `measure` for moments, `ratios` for `nearest`."""
        shape, new_empty = (num_tiles, len(self.placed)), self.placed.new_empty
        self.log_scale, self.sums = new_empty(shape), new_empty(shape)
        self.moments = new_empty(3, *shape) if measure else None
        self.best = self.labels.new_empty(shape) if best else None
        self.nearest = new_empty(shape) if ratios else None
        self.logit_sums = new_empty(shape) if smoothed else None
        self.second_sums = new_empty(num_sums, *shape)

    def pair_classes(self, num_classes: int) -> Iterator[Tensor]:
        """Yield the classes `[T]` of the pairs, with distinct ones in the place of absent pairs.

        An absent pair has coefficient 0. If all of them added to one row, thousands of additions
        would wait for each other on a GPU.
        """
        places = torch.arange(len(self.placed), device=self.columns.device) % num_classes
        for classes in self.columns.unbind(1):
            yield torch.where(classes >= 0, classes, places)

    @property
    def near(self) -> Tensor:
        """Logits `[T, S - K]` of the pairs that are near prototypes."""
        return self.logits[:, self.labels.shape[1] :]

    def normalize(self) -> None:
        """Write the log-normalizers and the labels' log-probabilities."""
        labels = self.logits[:, : self.labels.shape[1]]
        # A tile with nothing left has no share, whatever the scale of its last weights was.
        nothing = torch.finfo(self.log_scale.dtype).min / 4
        self.log_scale.masked_fill_(self.sums == 0, nothing)
        others = [self.log_scale + self.sums.log(), self.near.T]
        log_others = torch.cat(others).logsumexp(0)[:, None]  # [T, 1]
        # The sum leaves out the label, so that 1 - p keeps its digits where p is close to 1.
        rests = log_others
        if labels.shape[1] > 1:
            others = [
                torch.cat([log_others, labels[:, :k], labels[:, k + 1 :]], 1).logsumexp(1)
                for k in range(labels.shape[1])
            ]
            rests = torch.stack(others, 1)
        margin = rests - labels
        log_probs = -torch.logaddexp(margin, torch.zeros_like(margin))
        self.log_probs = log_probs.masked_fill_(self.labels < 0, -torch.inf)
        if labels.shape[1] == 1 and not labels.is_cpu:  # one kernel, not eight
            self.log_normalizer = torch.logaddexp(log_others, labels).squeeze(1)
        else:
            self.log_normalizer = torch.cat([log_others, labels], 1).logsumexp(1)

    def metrics(self, target: Tensor, normalizer: Tensor) -> TokenMetrics:
        """Return the metrics of each token.

        Args:
            target: `[T, K]`, probabilities of the labels.
            normalizer: `[T]`, logsumexp of the logits themselves.
        """
        assert self.best is not None, "the best columns were not asked for"
        logits = torch.cat([self.log_scale.T, self.logits], 1)
        columns = torch.cat([self.best.T, self.columns], 1)
        # A tile with nothing left has no best column.
        empty = self.sums.T == 0
        logits[:, : empty.shape[1]].masked_fill_(empty, -torch.inf)
        best = logits.argmax(1, keepdim=True)
        log_probs = (target * self.log_probs).masked_fill_(target == 0, 0).sum(1)
        predictions = columns.gather(1, best).squeeze(1)
        return TokenMetrics(log_probs, normalizer, self._entropies(), predictions)

    def _entropies(self) -> Tensor:
        """Return the entropy of each token's distribution `[T]`, a sum of positive terms."""
        assert self.moments is not None, "moments were not asked for"
        offsets = self.log_scale - self.log_normalizer  # [tiles, T]
        tiles = offsets.exp() * (self.moments[0] + (self.sums * offsets).where(self.sums > 0, 0))
        log_probs = torch.cat([self.log_probs, self.near - self.log_normalizer[:, None]], 1)
        terms = (log_probs.exp() * log_probs).where(log_probs != -torch.inf, 0)
        return -(tiles.sum(0) + terms.sum(1))

    def log_moments(self, h_exp: float | Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of e * log(d2 / unit) and of log(d2 / unit) of each tile, `[tiles, T]`.

        The second is 0 without label smoothing, which alone needs it.
        """
        assert self.moments is not None, "moments were not asked for"
        entropy, biased, biases = self.moments
        weighted = (entropy + self.log_scale * self.sums - biased) / h_exp
        if self.logit_sums is None:
            return weighted, torch.zeros_like(weighted)
        return weighted, (self.logit_sums - biases) / h_exp


class CrossEntropyStage:
    """Cross-entropy with hard or soft targets, label smoothing and z-loss.

    Args:
        arguments: The arguments of the call.
    """

    num_sums = 0  # how many sums of each tile a second loss needs
    reads_logits = False  # whether a second loss needs the sum of weight * logit
    points: Geometry | None = None  # of a transport

    def __init__(self, arguments: Arguments):
        self.labels, self.target = read_target(arguments)  # [N, K]; -1 = padding or repeated label
        check_bias(arguments)
        self.h_exp = read_exponent(arguments)
        self.smoothing, self.z_loss = arguments.label_smoothing, arguments.z_loss
        self.num_classes, self.linear = len(arguments.prototypes), arguments.kind == "linear"

    def weigh(self, tile: slice, tokens: slice, exps: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the second weights `[T, W]` of one tile, and any further row sums `[T]`.

        `Chunk.second_sums` holds the sums of the weights, then, if the stage `reads_logits`, those
        of weight * logit, both without the pairs, and last the further row sums.

        Args:
            tile: Its classes.
            tokens: The chunk's tokens.
            exps: `[T, W]`, exponentials of the logits less `log_scale`; 0 at the pairs.
        """
        raise AssertionError("only a second loss has weights")

    def log_share(self, chunk: Chunk, k: int | slice) -> Tensor:
        """Return the log `[T]` of the factor that makes weights of tile `k` the s_j of `Chunk`."""
        raise AssertionError("only a second loss has weights")

    def second_of_pairs(self, chunk: Chunk) -> Tensor:
        """Return the s_j `[T, S]` of the pairs; see `Chunk`."""
        raise AssertionError("only a second loss has weights")

    def label_points(self, tokens: slice) -> Tensor:
        """Return the points of the labels `[T, E]` of a transport, for differences."""
        raise AssertionError("only a transport has points")

    def normalizer(self, chunk: Chunk) -> Tensor:
        """Return the logsumexp `[T]` of the logits themselves, with distances not in `unit`."""
        if self.linear:
            return chunk.log_normalizer
        return chunk.log_normalizer + self.h_exp * chunk.unit.squeeze(1).log()

    def losses(self, chunks: list[Chunk]) -> Tensor:
        """Return the loss of each token `[T]`, before its weight; save what gradients need."""
        (chunk,) = chunks
        target = self.target[chunk.tokens]
        loss = -(target * chunk.log_probs).masked_fill_(target == 0, 0).sum(1)
        if self.smoothing:
            assert chunk.logit_sums is not None, "smoothing sums the logits"
            pairs = chunk.logits.masked_fill(chunk.absent, 0).sum(1)
            uniform = chunk.log_normalizer - (chunk.logit_sums.sum(0) + pairs) / self.num_classes
            loss = (1 - self.smoothing) * loss + self.smoothing * uniform
        if self.z_loss:
            loss = loss + self.z_loss * self.normalizer(chunk).square()
        return loss

    def set_factors(self, chunks: list[Chunk], weights: Tensor) -> None:
        """Write the factors of the gradients, for tokens of these weights `[T]`."""
        (chunk,) = chunks
        target = (1 - self.smoothing) * self.target[chunk.tokens]
        mass = target.sum(1, keepdim=True)
        # mass - target. Smoothing is added after the difference, in which it would be rounded away.
        rest = mass - target
        if self.smoothing or self.z_loss:
            extra = torch.full_like(mass, self.smoothing)
            if self.z_loss:
                extra += 2 * self.z_loss * self.normalizer(chunk).unsqueeze(1)
            mass, rest = mass + extra, rest + extra
        factor = weights.unsqueeze(1)
        chunk.mass, chunk.target = (mass * factor).squeeze(1), target * factor
        chunk.rest, chunk.floor = rest * factor, weights * (self.smoothing / self.num_classes)

    def slopes(self, chunk: Chunk) -> Tensor:
        """Return dL/dlogit `[T, S]` of the pairs, 0 where there is none, without the floor."""
        near = chunk.mass.unsqueeze(1) * (chunk.near - chunk.log_normalizer.unsqueeze(1)).exp()
        # mass * p - target, without the cancellation of p - 1.
        labels = chunk.rest * chunk.log_probs.exp() + chunk.target * torch.expm1(chunk.log_probs)
        slopes = torch.cat([labels, near], 1)
        if chunk.second is not None:
            slopes += chunk.second.unsqueeze(1) * self.second_of_pairs(chunk)
        return slopes.masked_fill_(chunk.absent, 0)

    def exponent_slopes(self, chunk: Chunk, slopes: Tensor, weights: Tensor) -> Tensor:
        """Return dL/dh_exp `[T]` of distances, from the pairs' `slopes` `[T, S]`."""
        weighted, logs = chunk.log_moments(self.h_exp)
        shares = torch.exp(chunk.log_scale - chunk.log_normalizer)
        slope = chunk.mass * (shares * weighted).sum(0) - chunk.floor * logs.sum(0)
        if chunk.second is not None:
            sums, products = chunk.second_sums[:2]
            shares = torch.exp(self.log_share(chunk, slice(None)))
            mean_logit = (shares * (products + chunk.log_scale * sums)).sum(0)
            slope += chunk.second * mean_logit / self.h_exp
        slope += ((slopes - chunk.floor.unsqueeze(1)) * chunk.logs).sum(1)
        if self.z_loss:  # without it the slopes sum to 0, and the unit drops out
            unit = chunk.unit.squeeze(1).log()
            slope += 2 * self.z_loss * self.normalizer(chunk) * weights * unit
        return slope


class MixtureStage(CrossEntropyStage):
    """Cross-entropy of the mean of M softmaxes, one label for each token.

    Source:
        Yang et al. 2018, Breaking the Softmax Bottleneck, arXiv:1711.03953, with equal weights and
        slices of one hidden state for its contexts.
    """

    def losses(self, chunks: list[Chunk]) -> Tensor:
        """Return the loss of each token `[T]`, before its weight."""
        return mixture_nll(torch.stack([-chunk.log_probs.squeeze(1) for chunk in chunks]))

    def set_factors(self, chunks: list[Chunk], weights: Tensor) -> None:
        """Write the factors of the gradients, for tokens of these weights `[T]`."""
        log_probs = torch.stack([chunk.log_probs.squeeze(1) for chunk in chunks])
        for chunk, share in zip(chunks, log_probs.softmax(0), strict=True):
            chunk.mass = share * weights
            chunk.target = chunk.mass.unsqueeze(1)
            chunk.rest, chunk.floor = torch.zeros_like(chunk.target), torch.zeros_like(weights)


class DistillationStage(CrossEntropyStage):
    """label_factor * -log p_label + second_factor * KL(q || p), q the softmax of the teacher."""

    num_sums = 5
    reads_logits = True

    def __init__(self, arguments: Arguments):
        super().__init__(arguments)
        self.label_factor, self.second_factor = arguments.mix.tolist()
        assert arguments.second_states is not None, "a teacher has hidden states"
        assert arguments.second_weight is not None, "a teacher has a weight"
        self.states, self.weight = arguments.second_states, arguments.second_weight
        self.bias = arguments.second_bias

    def weigh(self, tile: slice, tokens: slice, exps: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return e = exp(teacher's logit - peak), the peak, and the sums of e and e * log e."""
        dtype = self.target.dtype
        taught = torch.mm(self.states[tokens].to(dtype), self.weight[tile].to(dtype).T)
        if self.bias is not None:
            taught.add_(self.bias[tile].to(dtype))
        peaks = taught.amax(1).clamp_min(torch.finfo(dtype).min / 4)  # -inf rules a class out
        logs = taught.sub_(peaks.unsqueeze(1)).clamp_min_(NOTHING)
        weights = (logs * LOG2_E).exp2_()
        return weights, [peaks, weights.sum(1), torch.linalg.vecdot(weights, logs)]

    def log_share(self, chunk: Chunk, k: int | slice) -> Tensor:
        """Return the log `[T]` of the factor that makes weights of tile `k` the teacher's q."""
        return chunk.second_sums[2, k] - chunk.saved

    def losses(self, chunks: list[Chunk]) -> Tensor:
        """Return the loss of each token `[T]`, and save the teacher's log-normalizer."""
        (chunk,) = chunks
        sums, cross, peaks, masses, entropy = chunk.second_sums
        chunk.saved = (peaks + masses.log()).logsumexp(0)
        shares = torch.exp(peaks - chunk.saved)
        negentropy = (shares * (entropy + peaks * masses)).sum(0) - chunk.saved  # sum of q log q
        logits = chunk.logits.masked_fill(chunk.absent, 0)
        mean_logit = (shares * (cross + chunk.log_scale * sums)).sum(0)
        mean_logit = mean_logit + (self.second_of_pairs(chunk) * logits).sum(1)
        divergence = negentropy - mean_logit + chunk.log_normalizer
        return self.second_factor * divergence - self.label_factor * chunk.log_probs.squeeze(1)

    def second_of_pairs(self, chunk: Chunk) -> Tensor:
        """Return q `[T, S]` of the pairs, 0 where there is none."""
        known, dtype = chunk.columns.clamp_min(0), self.target.dtype
        states = self.states[chunk.tokens].to(dtype)
        logits = torch.einsum("te,tse->ts", states, self.weight[known].to(dtype))
        if self.bias is not None:
            logits = logits + self.bias[known].to(dtype)
        return (logits - chunk.saved.unsqueeze(1)).exp().masked_fill_(chunk.absent, 0)

    def set_factors(self, chunks: list[Chunk], weights: Tensor) -> None:
        """Write the factors of the gradients, for tokens of these weights `[T]`."""
        (chunk,) = chunks
        chunk.mass = (self.label_factor + self.second_factor) * weights
        chunk.target = (self.label_factor * weights).unsqueeze(1)
        chunk.rest = (self.second_factor * weights).unsqueeze(1)
        chunk.floor, chunk.second = torch.zeros_like(weights), -self.second_factor * weights


class TransportStage(CrossEntropyStage):
    """label_factor * -log p_label + second_factor * sum_j p_j |e_j - e_label| ** 2."""

    def __init__(self, arguments: Arguments):
        super().__init__(arguments)
        self.reads_logits = arguments.needs_gradient("h_exp")
        self.num_sums = 1 + self.reads_logits
        self.label_factor, self.second_factor = arguments.mix.tolist()
        points, dtype = arguments.second_weight, self.target.dtype
        points = arguments.prototypes if points is None else points
        # Off the CPU a look whether the mean dominates would halt the device.
        centered = None if points.is_cpu else False
        self.points = self.ground = Geometry("euclidean", points, 0.0, dtype, centered=centered)
        self.squares = self.ground.column_terms()

    def label_points(self, tokens: slice) -> Tensor:
        """Return the points of the labels `[T, E]`, for differences."""
        return self.ground.direct_prototypes(self.labels[tokens, 0])

    def weigh(self, tile: slice, tokens: slice, exps: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return e times the cost."""
        targets = self.ground.place(self.label_points(tokens))
        costs = torch.mm(targets, self.ground.tile(tile).T)
        torch.add(self.squares[tile], costs, alpha=-2, out=costs)
        costs.add_(self.squares[self.labels[tokens]]).clamp_min_(0)
        return costs.mul_(exps), []

    def log_share(self, chunk: Chunk, k: int | slice) -> Tensor:
        """Return the log `[T]` of the factor that makes e times the cost p times the cost."""
        return chunk.log_scale[k] - chunk.log_normalizer

    def losses(self, chunks: list[Chunk]) -> Tensor:
        """Return the loss of each token `[T]`, and save its mean cost."""
        (chunk,) = chunks
        shares = torch.exp(chunk.log_scale - chunk.log_normalizer)
        costs = (shares * chunk.second_sums[0]).sum(0) + self.second_of_pairs(chunk).sum(1)
        # The normalizer of large logits is rounded: the probabilities do not quite sum to 1, and
        # cost - mean would not cancel where one class has nearly all of them.
        pairs = (chunk.logits - chunk.log_normalizer.unsqueeze(1)).exp().sum(1)
        chunk.saved = costs / ((shares * chunk.sums).sum(0) + pairs)
        return self.second_factor * chunk.saved - self.label_factor * chunk.log_probs.squeeze(1)

    def second_of_pairs(self, chunk: Chunk) -> Tensor:
        """Return p times the cost `[T, S]` of the pairs."""
        probs = (chunk.logits - chunk.log_normalizer.unsqueeze(1)).exp()
        targets = self.label_points(chunk.tokens)
        costs = [
            (self.ground.direct_prototypes(classes) - targets).square_().sum(1)
            for classes in chunk.columns.clamp_min(0).unbind(1)
        ]
        return probs * torch.stack(costs, 1)

    def set_factors(self, chunks: list[Chunk], weights: Tensor) -> None:
        """Write the factors of the gradients, for tokens of these weights `[T]`."""
        (chunk,) = chunks
        chunk.mass = (self.label_factor - self.second_factor * chunk.saved) * weights
        chunk.target = (self.label_factor * weights).unsqueeze(1)
        chunk.rest = -(self.second_factor * chunk.saved * weights).unsqueeze(1)
        chunk.floor, chunk.second = torch.zeros_like(weights), self.second_factor * weights


STAGES = {
    "cross_entropy": CrossEntropyStage,
    "mixture": MixtureStage,
    "distillation": DistillationStage,
    "transport": TransportStage,
}
