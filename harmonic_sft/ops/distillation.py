"""Cross-entropy mixed with the divergence from a linear teacher, by tiles on the CPU."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harmonic_sft.ops.chunked import ChunkedTiles
from harmonic_sft.ops.custom_ops import Arguments, is_uniform, request_of
from harmonic_sft.ops.fused import Needs, chunks_of, empty_gradients
from harmonic_sft.ops.gradients import Gradients, add_pairs, finish_hidden_states
from harmonic_sft.ops.request import Request
from harmonic_sft.ops.rows import (
    Pairs,
    Rows,
    TileSums,
    measure_pairs,
    normalize,
    pair_gradients,
    target_log_probs,
)
from harmonic_sft.ops.tiles import finite_peaks
from harmonic_sft.ops.workers import cpu_workers

FAR = 80.0  # what stands for the logarithm of an excluded pair's distance, where its weight is 0


class Teacher(NamedTuple):
    """A linear head whose distribution q is the target; no gradient flows through it.

    Attributes:
        hidden_states: `[N, E]`.
        weight: `[V, E]`.
        bias: `[V]` or None.
    """

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor | None


class Student(NamedTuple):
    """The head that learns, with its distribution p.

    Attributes:
        hidden_states: `[N, D]`, on the CPU.
        prototypes: `[V, D]`.
        kind: "linear", "euclidean" or "sphere".
        class_bias: `[V]` or None, added to the logits of a linear head.
        h_exp: Below 0; a tensor of no axis to learn it. Unused by a linear head.
        eps: Added to the squared distance.
    """

    hidden_states: Tensor
    prototypes: Tensor
    kind: str
    class_bias: Tensor | None = None
    h_exp: float | Tensor = -1.0
    eps: float = 0.0


def distillation_loss(
    student: Student, teacher: Teacher, labels: Tensor, *, share: float
) -> Tensor:
    """Return share * KL(q || p) + (1 - share) * -log p_y of each token, without `[N, V]` logits.

    Four matrix products where the cross-entropy alone takes three; a chunk keeps two `[chunk, V]`
    matrices of weights. Labels and near prototypes are treated as in `distance_cross_entropy`.

    Args:
        student: Of N tokens and V classes.
        teacher: Of the same.
        labels: `[N]`, every one a class in `[0, V)`.
        share: Of the divergence, from 0 to 1.

    Returns:
        `[N]`, in nats, float32 or better.
    """
    h_exp = student.h_exp
    if not isinstance(h_exp, Tensor):
        h_exp = torch.tensor(h_exp, dtype=torch.float64)
    tensors = (student.hidden_states, student.prototypes, student.class_bias, h_exp)
    enabled = torch.is_grad_enabled()
    needs = tuple(enabled and tensor is not None and tensor.requires_grad for tensor in tensors)
    arguments = Arguments(
        hidden_states=student.hidden_states,
        prototypes=student.prototypes,
        labels=labels.unsqueeze(1),
        target_weights=torch.full((len(labels), 1), 1 - share, dtype=torch.float64),
        token_weights=None,
        class_bias=student.class_bias,
        h_exp=h_exp,
        kind=student.kind,
        eps=student.eps,
        label_smoothing=0.0,
        z_loss=0.0,
        needs=needs,
        early=any(needs),
        with_metrics=False,
        gradient_dtype=None,
        gemm="auto",
        impl="chunked",
        group="",
    )
    bias = None if teacher.bias is None else teacher.bias.detach()
    teacher = Teacher(teacher.hidden_states.detach(), teacher.weight.detach(), bias)
    loss: Tensor = _Distillation.apply(teacher, share, *arguments)
    return loss


class _Distillation(torch.autograd.Function):
    """The losses, with the gradients of their sum made on the way."""

    @staticmethod
    def forward(ctx: Any, teacher: Teacher, share: float, *flat: Any) -> Tensor:
        arguments = Arguments(*flat)
        loss, found = _differentiate(arguments, teacher, share)
        ctx.save_for_backward(*flat[:7], *teacher)
        ctx.settings, ctx.share, ctx.found = flat[7:], share, found
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = upstream
        found: Any
        arguments = Arguments(*ctx.saved_tensors[:7], *ctx.settings)
        found, ctx.found = ctx.found, None
        if found is not None and len(grad) and is_uniform(grad):
            for part in found:
                if part is not None:
                    part.mul_(grad[0].to(part.dtype))
        else:  # made again, weighted; also for a second pass
            weighted = arguments._replace(token_weights=grad)
            found = _differentiate(weighted, Teacher(*ctx.saved_tensors[7:]), ctx.share)[1]
        gradients: list[Tensor | None] = [None] * (2 + len(Arguments._fields))
        for name, gradient in zip(Needs._fields, found, strict=True):
            if gradient is not None:
                like: Tensor = getattr(arguments, name)
                gradients[2 + Arguments._fields.index(name)] = gradient.to(like.dtype)
        return tuple(gradients)


@dataclass(frozen=True)
class _Taught:
    """What the teacher says of a chunk.

    Attributes:
        log_shares: `[tiles, T]`, of which the exponential makes e of a tile q.
        cross: `[T]`, sum of q * log(d2 / unit), or of q * logit of a linear head, without pairs.
        negative_entropy: `[T]`, sum of q * log q over all classes.
        pairs: `[T, S]`, q of the pairs, 0 where there is none.
    """

    log_shares: Tensor
    cross: Tensor
    negative_entropy: Tensor
    pairs: Tensor


@dataclass
class _TaughtTiles(ChunkedTiles):
    """Tiles whose weights are those of the head and, beside them, those of its teacher.

    Args:
        request: What is asked.
        workers: As in `ChunkedTiles`.
        teacher: Of all tokens.
    """

    teacher: Teacher

    def score_both(
        self, placed: Tensor, labels: Tensor, states: Tensor, *, with_moments: bool
    ) -> tuple[TileSums, Tensor]:
        """Return the head's sums and the teacher's `[4, tiles, T]`; keep the weights of both.

        The teacher's are: largest logit t, then sums of e = exp(logit - t), e * (logit - t), and
        e * log(d2 / unit) or e * logit, the last without excluded pairs.

        Args:
            placed: `[T, D]`, hidden states in the frame.
            labels: `[T, 1]`.
            states: `[T, E]`, the teacher's.
            with_moments: Also sum p * log(d2 / unit).
        """
        count = len(placed)
        self._reserve(2 * count)
        chunk = self._prepare(placed, labels)
        zeros = torch.where(chunk.exclusion.values == self._fill, 0.0, torch.inf).to(placed.dtype)
        shape = (len(self.edges), count)
        log_scale, sums = placed.new_empty(shape), placed.new_empty(shape)
        taught = placed.new_empty(4, *shape)
        moments = placed.new_zeros(4, *shape) if with_moments else None

        tiles = iter(range(len(self.edges)))

        def work(_: int) -> None:
            for k in tiles:
                own, weights = self._buffer(k, 2 * count).view(2, count, -1)
                self._teach(states, k, taught[:3, k], weights)
                weights.scatter_reduce_(1, chunk.exclusion.columns[k], zeros[k], "amin")
                scores = self._scores(chunk, k)
                chunk.exclusion.apply_(scores, k)
                bias = self._bias(k)
                if self.linear:
                    logs = scores if bias is None else scores.add_(bias)
                    own.copy_(logs)
                    logs.clamp_min_(torch.finfo(logs.dtype).min)
                else:
                    self._take_near(chunk, scores, k, placed.new_empty(count))
                    if chunk.near[k] is not None:
                        weights.masked_fill_(scores == torch.inf, 0)
                    logs = torch.div(scores, chunk.unit).log_()
                    torch.mul(logs, self.request.h_exp, out=own)
                    logs.clamp_max_(FAR)
                torch.amax(own, 1, out=log_scale[k])
                own.sub_(finite_peaks(log_scale[k])).exp_()
                torch.sum(own, 1, out=sums[k])
                torch.linalg.vecdot(weights, logs, out=taught[3, k])
                if moments is not None:
                    torch.linalg.vecdot(own, logs, out=moments[1, k])
                if not self.linear:
                    own.div_(scores)
                    weights.div_(scores)

        self.workers.run(work)
        near = self._compact(chunk.near)
        scale = torch.ones_like(sums)
        return TileSums(chunk.unit, log_scale, sums, scale, near, moments, None), taught

    def accumulate_both(
        self,
        placed: Tensor,
        factors: tuple[Tensor, Tensor],
        gradients: Gradients,
        chunk: slice,
    ) -> None:
        """Add a chunk's products to the gradients, from the weights that `score_both` kept.

        Args:
            placed: `[T, D]`, hidden states in the frame.
            factors: `[tiles, T]` each, of the head's weights and of the teacher's.
            gradients: Accumulated in place.
            chunk: The tokens.
        """
        count = len(placed)

        def coefficients(k: int) -> Tensor:
            own, weights = self._buffer(k, 2 * count).view(2, count, -1)
            own.mul_(factors[0][k].unsqueeze(1)).addcmul_(weights, factors[1][k].unsqueeze(1))
            edges = slice(*self.edges[k])
            if gradients.class_bias is not None:
                gradients.class_bias[edges].add_(own.sum(0))
            return own if self.gain is None else own.mul_(self.gain[edges])

        self._products(placed, coefficients, gradients, chunk)

    def _teach(self, states: Tensor, k: int, rows: Tensor, out: Tensor) -> None:
        """Write e = exp(logit - t) of tile `k` to `out`, and t, sums of e and e * (logit - t)."""
        tile = slice(*self.edges[k])
        weight, bias = self.teacher.weight[tile], self.teacher.bias
        bias = None if bias is None else bias[tile].to(states.dtype)
        logits = self.gemm(states, weight.to(states.dtype), bias)
        torch.amax(logits, 1, out=rows[0])
        logits.sub_(rows[0].unsqueeze(1))
        torch.exp(logits, out=out)
        torch.sum(out, 1, out=rows[1])
        torch.linalg.vecdot(out, logits, out=rows[2])


def _read(teacher: Teacher, states: Tensor, pairs: Pairs, taught: Tensor) -> _Taught:
    """Normalize the teacher's rows of a chunk."""
    peaks, masses, products, cross = taught
    log_normalizer = (peaks + masses.log()).logsumexp(0)  # [T]
    log_shares = peaks - log_normalizer
    shares = log_shares.exp()
    mean_logit = (shares * (products + peaks * masses)).sum(0)
    known = pairs.columns.clamp_min(0)
    logits = torch.einsum("te,tse->ts", states, teacher.weight[known].to(states.dtype))
    if teacher.bias is not None:
        logits += teacher.bias[known].to(states.dtype)
    of_pairs = (logits - log_normalizer.unsqueeze(1)).exp().where(pairs.columns >= 0, 0)
    return _Taught(log_shares, (shares * cross).sum(0), mean_logit - log_normalizer, of_pairs)


def _divergence(request: Request, pairs: Pairs, rows: Rows, taught: _Taught) -> Tensor:
    """Return KL(q || p) of each token `[T]`."""
    scale = 1.0 if request.frame.kind == "linear" else request.h_exp
    logits = pairs.logits.where(pairs.columns >= 0, 0)
    mean_logit = scale * taught.cross + (taught.pairs * logits).sum(1)
    return taught.negative_entropy - mean_logit + rows.log_normalizer


def _differentiate(
    arguments: Arguments, teacher: Teacher, share: float
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the losses `[N]` and the gradients of their sum, weighted by the token weights."""
    request, needs = request_of(arguments), Needs(*arguments.needs)
    frame = request.frame
    loss = request.hidden_states.new_empty(len(request.hidden_states), dtype=frame.dtype)
    exponent = loss.new_zeros(())
    gradients = empty_gradients(request, needs)
    slope = 1.0 if frame.kind == "linear" else -2 * request.h_exp
    with torch.no_grad(), torch.autocast("cpu", enabled=False), cpu_workers() as workers:
        tiles = _TaughtTiles(request, workers, teacher)
        for chunk in chunks_of(request, stored=True):
            placed, norms = frame.place(request.hidden_states[chunk])  # [T, D]
            states, labels = teacher.hidden_states[chunk].to(frame.dtype), request.labels[chunk]
            sums, raw = tiles.score_both(placed, labels, states, with_moments=needs.h_exp)
            pairs = measure_pairs(request, placed, sums.unit, labels, sums.near)
            rows = normalize(request, pairs, sums, chunk)
            rows = rows._replace(mass=torch.ones_like(rows.log_normalizer))
            taught = _read(teacher, states, pairs, raw)
            divergence = _divergence(request, pairs, rows, taught)
            loss[chunk] = share * divergence - target_log_probs(request, rows, chunk)
            if not any(needs):
                continue
            weights = torch.ones_like(divergence)
            if request.token_weights is not None:
                weights = request.token_weights[chunk]
            slopes = pair_gradients(request, pairs, rows, chunk) - share * taught.pairs
            own = (sums.log_scale - rows.log_normalizer).exp()  # [tiles, T]
            if sums.moments is not None:
                found = (sums.moments[1] * own).sum(0) - share * taught.cross
                exponent += ((found + (slopes * pairs.logs).sum(1)) * weights).sum()
            factors = slope * weights * own, -slope * share * weights * taught.log_shares.exp()
            tiles.accumulate_both(placed, factors, gradients, chunk)
            add_pairs(request, placed, pairs, slopes * weights[:, None], gradients, chunk)
            finish_hidden_states(request, placed, norms, gradients, chunk)
        tiles.finish_prototypes(gradients)
    parts = (gradients.hidden_states, gradients.prototypes, gradients.class_bias)
    return loss, (*parts, exponent if needs.h_exp else None)
