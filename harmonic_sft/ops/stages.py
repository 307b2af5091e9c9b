"""The row-wise stage of each loss: from what the tiles found to losses and gradient factors.

With p the softmax of a token's logits, t its target and q, c what the second loss needs:

- cross-entropy: dL/dlogit_j = p_j - t_j, with label smoothing and z-loss beside it;
- mixture: the mean of M softmaxes, each with its responsibility r for the label: r (p_j - t_j);
- distillation: the target is (1 - share) t + share * q, q the softmax of a linear teacher;
- transport: own (p_j - t_j) + carried * p_j (c_j - sum_k p_k c_k), c_j = |e_j - e_label| ** 2.
"""

import torch
from torch import Tensor

from harmonic_sft.models.head import mixture_nll
from harmonic_sft.ops.arguments import Arguments, Chunk, Rows, TileStatistics
from harmonic_sft.ops.geometry import Geometry, build_geometry
from harmonic_sft.ops.rows import log_moments


class CrossEntropy:
    """Cross-entropy with hard or soft targets, label smoothing and z-loss.

    Args:
        arguments: The arguments of the call.
        labels: `[N, K]`, -1 where padded or repeated.
        target: `[N, K]`, probabilities of the labels.
        h_exp: The exponent; a tensor of no axis where reading it would halt a device.

    Attributes:
        num_sums: How many row sums `weigh` returns; None where the softmax has the only weights.
        points: Of a transport.
    """

    num_sums: int | None = None
    points: Geometry | None = None

    def __init__(self, arguments: Arguments, labels: Tensor, target: Tensor, h_exp: float | Tensor):
        self.labels, self.target, self.h_exp = labels, target, h_exp
        self.smoothing, self.z_loss = arguments.label_smoothing, arguments.z_loss
        self.num_classes, self.linear = len(arguments.prototypes), arguments.kind == "linear"

    def weigh(self, tile: slice, tokens: slice, probs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the second weights `[T, W]` of one tile, and `num_sums` row sums `[T]`.

        `TileStatistics.second` holds the sums of the weights and of weight * logit, both without
        the pairs, and then these.

        Args:
            tile: Its classes.
            tokens: The chunk's tokens.
            probs: `[T, W]`, exponentials of the logits less `log_scale`; 0 at the pairs.
        """
        raise AssertionError("only a second loss has weights")

    def log_share(self, statistics: TileStatistics, rows: Rows, k: int | slice) -> Tensor:
        """Return the logarithm `[T]` of what makes the weights of tile `k` those of `Rows`."""
        raise AssertionError("only a second loss has weights")

    def normalizer(self, chunk: Chunk, row: Rows) -> Tensor:
        """Return the logsumexp of the logits themselves `[T]`, of distances not in `unit`."""
        if self.linear:
            return row.log_normalizer
        return row.log_normalizer + self.h_exp * chunk.unit.squeeze(1).log()

    def targets(self, tokens: slice) -> Tensor:
        """Return the points of the labels `[T, E]` of a transport."""
        raise AssertionError("only a transport has points")

    def losses(
        self, chunks: list[Chunk], statistics: list[TileStatistics], rows: list[Rows]
    ) -> Tensor:
        """Return the loss of each token `[T]`, before its weight."""
        (chunk,), (row,) = chunks, rows
        target = self.target[chunk.tokens]
        loss = -(target * row.log_probs).where(target != 0, 0).sum(1)
        if self.smoothing:
            totals = statistics[0].logits
            assert totals is not None, "smoothing sums the logits"
            pairs = chunk.logits.where(chunk.columns >= 0, 0).sum(1)
            uniform = row.log_normalizer - (totals.sum(0) + pairs) / self.num_classes
            loss = (1 - self.smoothing) * loss + self.smoothing * uniform
        if self.z_loss:
            normalizer = self.normalizer(chunk, row)
            loss = loss + self.z_loss * normalizer.square()
        return loss

    def set_factors(self, chunks: list[Chunk], rows: list[Rows], outer: Tensor) -> None:
        """Write the factors of the gradients, for upstream gradients `outer` `[T]`."""
        (chunk,), (row,) = chunks, rows
        target = (1 - self.smoothing) * self.target[chunk.tokens]
        total = target.sum(1, keepdim=True)
        extra = torch.full_like(total, self.smoothing)
        if self.z_loss:
            normalizer = self.normalizer(chunk, row)
            extra += 2 * self.z_loss * normalizer.unsqueeze(1)
        row.mass = (total + extra).squeeze(1) * outer
        row.target = target * outer.unsqueeze(1)
        # mass - target, but not by a difference: a small smoothing would vanish in it.
        row.rest = (total - target + extra) * outer.unsqueeze(1)
        row.floor = torch.full_like(outer, self.smoothing / self.num_classes) * outer

    def slopes(self, chunk: Chunk, row: Rows) -> Tensor:
        """Return dL/dlogit `[T, S]` of the pairs, 0 where there is none, without the floor."""
        near = chunk.logits[:, chunk.num_labels :] - row.log_normalizer.unsqueeze(1)
        near = row.mass.unsqueeze(1) * near.exp()
        # mass * p - target, without the cancellation of p - 1.
        labels = row.rest * row.log_probs.exp() + row.target * torch.expm1(row.log_probs)
        found = torch.cat([labels, near], 1)
        if row.second is not None:
            found += row.second.unsqueeze(1) * self.second_of_pairs(chunk, row)
        return found.where(chunk.columns >= 0, 0)

    def second_of_pairs(self, chunk: Chunk, row: Rows) -> Tensor:
        """Return the second weights `[T, S]` of the pairs, divided as those of the tiles."""
        raise AssertionError("only a second loss has weights")

    def exponent_slopes(
        self, chunk: Chunk, statistics: TileStatistics, row: Rows, slopes: Tensor, outer: Tensor
    ) -> Tensor:
        """Return dL/dh_exp `[T]` of distances, from the pairs' `slopes` `[T, S]`."""
        weighted, logs = log_moments(statistics, self.h_exp)
        shares = torch.exp(statistics.log_scale - row.log_normalizer)
        found = row.mass * (shares * weighted).sum(0) - row.floor * logs.sum(0)
        if row.second is not None:
            sums, products = statistics.second[:2]
            shares = torch.exp(self.log_share(statistics, row, slice(None)))
            mean_logit = (shares * (products + statistics.log_scale * sums)).sum(0)
            found += row.second * mean_logit / self.h_exp
        found += ((slopes - row.floor.unsqueeze(1)) * chunk.logs).sum(1)
        if self.z_loss:  # the slopes sum to 0 but for it, so that elsewhere the unit drops out
            unit = chunk.unit.squeeze(1).log()
            found += 2 * self.z_loss * self.normalizer(chunk, row) * outer * unit
        return found


class Mixture(CrossEntropy):
    """Cross-entropy of the mean of M softmaxes, one label for each token.

    Source:
        Yang et al. 2018, Breaking the Softmax Bottleneck, arXiv:1711.03953, with equal weights and
        slices of one hidden state for its contexts.
    """

    def losses(
        self, chunks: list[Chunk], statistics: list[TileStatistics], rows: list[Rows]
    ) -> Tensor:
        """Return the loss of each token `[T]`, before its weight."""
        return mixture_nll(torch.stack([-row.log_probs.squeeze(1) for row in rows]))

    def set_factors(self, chunks: list[Chunk], rows: list[Rows], outer: Tensor) -> None:
        """Write the factors of the gradients, for upstream gradients `outer` `[T]`."""
        log_probs = torch.stack([row.log_probs.squeeze(1) for row in rows])
        for row, share in zip(rows, log_probs.softmax(0), strict=True):
            row.mass = share * outer
            row.target = row.mass.unsqueeze(1)
            row.rest, row.floor = torch.zeros_like(row.target), torch.zeros_like(outer)


class Distillation(CrossEntropy):
    """share * KL(q || p) + (1 - share) * -log p_label, q the softmax of a linear teacher."""

    num_sums = 3

    def __init__(self, arguments: Arguments, labels: Tensor, target: Tensor, h_exp: float | Tensor):
        super().__init__(arguments, labels, target, h_exp)
        self.own, self.share = arguments.mix.tolist()
        assert arguments.second_states is not None, "a teacher reads"
        assert arguments.second_weight is not None, "a teacher has a weight"
        self.dtype = target.dtype
        self.states, self.weight = arguments.second_states, arguments.second_weight
        self.bias = arguments.second_bias

    def weigh(self, tile: slice, tokens: slice, probs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return e = exp(teacher's logit - peak), the peak, and the sums of e and e * log e."""
        taught = torch.mm(self.states[tokens].to(self.dtype), self.weight[tile].to(self.dtype).T)
        if self.bias is not None:
            taught.add_(self.bias[tile].to(self.dtype))
        peaks = taught.amax(1)
        weights = taught.sub_(peaks.unsqueeze(1)).exp_()
        return weights, [peaks, weights.sum(1), -torch.special.entr(weights).sum(1)]

    def log_share(self, statistics: TileStatistics, rows: Rows, k: int | slice) -> Tensor:
        """Return what makes the teacher's weights of a tile its probabilities, as a logarithm."""
        return statistics.second[2, k] - rows.saved

    def losses(
        self, chunks: list[Chunk], statistics: list[TileStatistics], rows: list[Rows]
    ) -> Tensor:
        """Return the loss of each token `[T]`, and save the teacher's log-normalizer."""
        (chunk,), (row,), (found,) = chunks, rows, statistics
        sums, cross, peaks, masses, entropy = found.second
        row.saved = (peaks + masses.log()).logsumexp(0)
        shares = torch.exp(peaks - row.saved)
        negentropy = (shares * (entropy + peaks * masses)).sum(0) - row.saved  # sum of q log q
        taught = self.second_of_pairs(chunk, row)
        logits = chunk.logits.where(chunk.columns >= 0, 0)
        mean_logit = (shares * (cross + found.log_scale * sums)).sum(0) + (taught * logits).sum(1)
        divergence = negentropy - mean_logit + row.log_normalizer
        return self.share * divergence - self.own * row.log_probs.squeeze(1)

    def second_of_pairs(self, chunk: Chunk, row: Rows) -> Tensor:
        """Return q `[T, S]` of the pairs, 0 where there is none."""
        known = chunk.columns.clamp_min(0)
        states = self.states[chunk.tokens].to(self.dtype)
        logits = torch.einsum("te,tse->ts", states, self.weight[known].to(self.dtype))
        if self.bias is not None:
            logits = logits + self.bias[known].to(self.dtype)
        return (logits - row.saved.unsqueeze(1)).exp().where(chunk.columns >= 0, 0)

    def set_factors(self, chunks: list[Chunk], rows: list[Rows], outer: Tensor) -> None:
        """Write the factors of the gradients, for upstream gradients `outer` `[T]`."""
        (row,) = rows
        row.mass = (self.own + self.share) * outer
        row.target, row.rest = ((f * outer).unsqueeze(1) for f in (self.own, self.share))
        row.floor, row.second = torch.zeros_like(outer), -self.share * outer


class Transport(CrossEntropy):
    """own * -log p_label + carried * sum_j p_j |e_j - e_label| ** 2, e the points `[V, E]`."""

    num_sums = 0

    def __init__(self, arguments: Arguments, labels: Tensor, target: Tensor, h_exp: float | Tensor):
        super().__init__(arguments, labels, target, h_exp)
        self.own, self.carried = arguments.mix.tolist()
        assert arguments.second_weight is not None, "a transport has points"
        points = arguments.second_weight
        ground = build_geometry("euclidean", points, 0.0, target.dtype, centered=False)
        self.points = self.ground = ground
        self.squares = ground.columns(0, self.num_classes)

    def targets(self, tokens: slice) -> Tensor:
        """Return the points of the labels `[T, E]`."""
        return self.ground.rows(self.labels[tokens, 0])

    def weigh(self, tile: slice, tokens: slice, probs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return e times the cost."""
        targets = self.targets(tokens)
        costs = torch.mm(targets, self.ground.tile(tile.start, tile.stop).T)
        torch.add(self.squares[tile], costs, alpha=-2, out=costs)
        costs.add_(self.squares[self.labels[tokens]]).clamp_min_(0)
        return costs.mul_(probs), []

    def log_share(self, statistics: TileStatistics, rows: Rows, k: int | slice) -> Tensor:
        """Return what makes e times the cost p times the cost, as a logarithm."""
        return statistics.log_scale[k] - rows.log_normalizer

    def losses(
        self, chunks: list[Chunk], statistics: list[TileStatistics], rows: list[Rows]
    ) -> Tensor:
        """Return the loss of each token `[T]`, and save its mean cost."""
        (chunk,), (row,), (found,) = chunks, rows, statistics
        shares = torch.exp(found.log_scale - row.log_normalizer)
        row.saved = (shares * found.second[0]).sum(0) + self.second_of_pairs(chunk, row).sum(1)
        return self.carried * row.saved - self.own * row.log_probs.squeeze(1)

    def second_of_pairs(self, chunk: Chunk, row: Rows) -> Tensor:
        """Return p times the cost `[T, S]` of the pairs."""
        probs = (chunk.logits - row.log_normalizer.unsqueeze(1)).exp()
        targets = self.targets(chunk.tokens)
        costs = [
            (self.ground.rows(classes) - targets).square_().sum(1)
            for classes in chunk.columns.clamp_min(0).unbind(1)
        ]
        return probs * torch.stack(costs, 1)

    def set_factors(self, chunks: list[Chunk], rows: list[Rows], outer: Tensor) -> None:
        """Write the factors of the gradients, for upstream gradients `outer` `[T]`."""
        (row,) = rows
        row.mass = (self.own - self.carried * row.saved) * outer
        row.target = (self.own * outer).unsqueeze(1)
        row.rest = -(self.carried * row.saved * outer).unsqueeze(1)
        row.floor, row.second = torch.zeros_like(outer), self.carried * outer


STAGES = {
    "cross_entropy": CrossEntropy,
    "mixture": Mixture,
    "distillation": Distillation,
    "transport": Transport,
}
