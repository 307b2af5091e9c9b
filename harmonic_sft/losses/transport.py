"""Cross-entropy and transport cost from one set of logits, in buffers that chunks share."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harmonic_sft.losses.chunks import chunk_rows
from harmonic_sft.models import AffineForm, DistanceForm
from harmonic_sft.models.head import NEAR, at_least_float32
from harmonic_sft.models.unit_rows import unit_rows


class Weights(NamedTuple):
    """Factors of the two losses.

    Attributes:
        cross_entropy: Of the negative log-probability of the label.
        transport: Of sum_j p_j |e_j - e_y| ** 2.
    """

    cross_entropy: float
    transport: float


class _Settings(NamedTuple):
    """What is not differentiated by.

    Attributes:
        weights: Factors of the two losses.
        eps: Added to squared distances.
        unit_sphere: Hidden states and weight have norm 1.
    """

    weights: Weights
    eps: float
    unit_sphere: bool


class _Inputs(NamedTuple):
    """What the loss is differentiated by.

    Attributes:
        hidden_states: `[N, E]`.
        weight: `[V, E]`.
        bias: `[V]` or None.
        h_exp: Below 0; None for logits that are dot products.
        ground: `[V, D]`.
    """

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor | None
    h_exp: Tensor | None
    ground: Tensor


class _Gradients(NamedTuple):
    """Of `_Inputs`, None where none is wanted."""

    hidden_states: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    h_exp: Tensor | None
    ground: Tensor | None


class _Pairs(NamedTuple):
    """Distances that are taken by direct difference, and stay out of the matrix products."""

    rows: Tensor
    columns: Tensor


def transport_cross_entropy(
    form: AffineForm | DistanceForm, ground: Tensor | None, labels: Tensor, weights: Weights
) -> Tensor:
    """Return the weighted sum of cross-entropy and transport cost of each token.

    The same numbers as autograd gives from dense logits, with a third of its passes over `[n, V]`
    and `[V, D]` matrices. Matrix products of N x V x D multiplications: logits, costs and two of
    the gradients, and two more for the gradient of the ground. Memory: four `[n, V]` matrices of a
    chunk. As in `by_chunks`, gradients are made with the losses, and once more, weighted, for an
    upstream gradient that differs between tokens.

    Args:
        form: Of N hidden states over V classes.
        ground: `[V, D]`, points between which probability is carried; None takes the form's
            weight, normalized where it normalizes.
        labels: `[N]`, every one a class in `[0, V)`.
        weights: Factors of the two losses.

    Returns:
        `[N]`, float32 or better.
    """
    with torch.autocast(form.hidden_states.device.type, enabled=False):
        hidden_states = at_least_float32(form.hidden_states)
        dtype, device = hidden_states.dtype, hidden_states.device
        weight, bias, h_exp, settings = (
            form.weight.to(dtype),
            None,
            None,
            _Settings(weights, 0, False),
        )
        if isinstance(form, DistanceForm):
            h_exp = torch.as_tensor(form.h_exp, dtype=dtype, device=device)
            settings = _Settings(weights, form.eps, form.unit_sphere)
            if form.unit_sphere:
                hidden_states, weight = unit_rows(hidden_states), unit_rows(weight)
        elif form.bias is not None:
            bias = form.bias.to(dtype)
        points = weight if ground is None else ground.to(dtype)
        inputs = _Inputs(hidden_states, weight, bias, h_exp, points)
        sources = [t if t is None or torch.is_grad_enabled() else t.detach() for t in inputs]
        loss: Tensor = _TransportCrossEntropy.apply(labels, settings, *sources)
        return loss


class _TransportCrossEntropy(torch.autograd.Function):
    """The losses of all chunks, with the gradients of their sum made on the way."""

    @staticmethod
    def forward(ctx: Any, labels: Tensor, settings: _Settings, *tensors: Any) -> Tensor:
        ctx.settings = settings
        chunks = _Chunks(_Inputs(*tensors), labels, settings, ctx.needs_input_grad[2:])
        losses, gradients = chunks.run(None)
        ctx.save_for_backward(labels, *tensors, *gradients)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        labels, *saved = ctx.saved_tensors
        tensors, gradients = saved[:5], saved[5:]
        (grad,) = upstream
        if grad.numel() > 1 and any(grad.stride()):
            needs = ctx.needs_input_grad[2:]
            return None, None, *_Chunks(_Inputs(*tensors), labels, ctx.settings, needs).run(grad)[1]
        factor = grad.flatten()[0] if grad.numel() else grad.sum()
        return None, None, *(g if g is None else g * factor.to(g.dtype) for g in gradients)


class _Chunks:
    """Works through the chunks of one call.

    Args:
        inputs: The tensors.
        labels: `[N]`.
        settings: The rest.
        needs: Which of the inputs get gradients.
    """

    def __init__(
        self,
        inputs: _Inputs,
        labels: Tensor,
        settings: _Settings,
        needs: tuple[bool, ...],
    ):
        self.inputs, self.labels, self.settings = inputs, labels, settings
        self.h_exp = None if inputs.h_exp is None else inputs.h_exp.item()
        self.gradients = _Gradients(
            *(
                torch.zeros_like(tensor) if tensor is not None and need else None
                for tensor, need in zip(inputs, needs, strict=True)
            )
        )
        rows = min(chunk_rows(inputs.weight), len(labels))
        count = 3 if self.h_exp is None else 4
        size = (rows, len(inputs.weight))
        self.buffers = [inputs.weight.new_empty(size) for _ in range(count)]
        self.norms, self.ground_norms = (
            torch.linalg.vector_norm(points, dim=-1).square()
            for points in (inputs.weight, inputs.ground)
        )  # [V], squared
        # What multiplies the rows of weight and ground in their own gradients.
        self.columns, self.masses = (torch.zeros_like(self.norms) for _ in range(2))

    def run(self, upstream: Tensor | None) -> tuple[Tensor, _Gradients]:
        """Return the losses `[N]` and the gradients of their sum, weighted by `upstream`."""
        with torch.no_grad(), torch.autocast(self.labels.device.type, enabled=False):
            losses = [self._chunk(chunk, upstream) for chunk in self._slices()]
            weight, ground = self.gradients.weight, self.gradients.ground
            if weight is not None and self.h_exp is not None:
                weight.addcmul_(self.inputs.weight, self.columns.unsqueeze(-1))
            if ground is not None:
                ground.addcmul_(self.inputs.ground, self.masses.unsqueeze(-1))
        return torch.cat(losses) if losses else self.ground_norms[:0], self.gradients

    def _slices(self) -> Iterator[slice]:
        rows = max(1, len(self.buffers[0]))
        for start in range(0, len(self.labels), rows):
            yield slice(start, min(start + rows, len(self.labels)))

    def _chunk(self, chunk: slice, upstream: Tensor | None) -> Tensor:
        labels = self.labels[chunk].unsqueeze(-1)  # [n, 1]
        buffers = [buffer[: len(labels)] for buffer in self.buffers]
        logits, probs, costs = buffers[:3]
        pairs = None
        if self.h_exp is None:
            self._dots(chunk, logits)
        else:
            pairs = self._squared(chunk, labels, buffers[3])
            torch.log(buffers[3], out=logits).mul_(self.h_exp)
        torch.softmax(logits, -1, out=probs)
        top, best = logits.max(-1, keepdim=True)
        nll = top - probs.gather(-1, best).log() - logits.gather(-1, labels)  # [n, 1]
        self._costs(labels, costs)
        transport = torch.bmm(probs.unsqueeze(1), costs.unsqueeze(2)).squeeze(-1)  # [n, 1]
        own, carried = self.settings.weights
        if any(gradient is not None for gradient in self.gradients):
            slopes = torch.add(own - carried * transport, costs, alpha=carried, out=costs)
            slopes.mul_(probs).scatter_add_(-1, labels, torch.full_like(nll, -own))
            weights = torch.ones_like(nll)
            if upstream is not None:
                weights = upstream[chunk].unsqueeze(-1)
                slopes.mul_(weights)
            self._add_gradients(chunk, buffers, pairs)
            self._add_ground(probs, labels, carried * weights)
        return (own * nll + carried * transport).squeeze(-1)

    def _dots(self, chunk: slice, out: Tensor) -> None:
        states, weight, bias = (
            self.inputs.hidden_states[chunk],
            self.inputs.weight,
            self.inputs.bias,
        )
        if bias is None:
            torch.mm(states, weight.T, out=out)
        else:
            torch.addmm(bias, states, weight.T, out=out)

    def _squared(self, chunk: slice, labels: Tensor, out: Tensor) -> _Pairs:
        """Write squared distances with eps; return the pairs by direct difference, labels first."""
        states, weight = self.inputs.hidden_states[chunk], self.inputs.weight
        norms, eps = states.square().sum(-1, keepdim=True), self.settings.eps  # [n, 1]
        torch.addmm(self.norms, states, weight.T, alpha=-2, out=out).add_(norms + eps)
        # Pairs with d^2 < NEAR * (|x|^2 + |w|^2), as in squared_distances.
        limits = norms.new_tensor(2 * NEAR + eps)
        if not self.settings.unit_sphere:
            limits = torch.add(NEAR * norms + eps, self.norms, alpha=NEAR)
        near = out < limits
        near.scatter_(-1, labels, False)
        rows, columns = near.nonzero(as_tuple=True)
        limit = 8 * max(len(out), 128)
        if len(rows) > limit:
            closest = out[rows, columns].topk(limit, largest=False).indices
            rows, columns = rows[closest], columns[closest]
            out.clamp_min_(eps)
        own = torch.arange(len(labels), device=labels.device)
        pairs = _Pairs(torch.cat([own, rows]), torch.cat([labels.squeeze(-1), columns]))
        gaps = states[pairs.rows] - weight[pairs.columns]  # [P, E]
        out[pairs] = gaps.square().sum(-1) + eps
        return pairs

    def _costs(self, labels: Tensor, out: Tensor) -> None:
        ground = self.inputs.ground
        targets = ground[labels.squeeze(-1)]  # [n, D]
        torch.addmm(self.ground_norms, targets, ground.T, alpha=-2, out=out)
        out.add_(self.ground_norms[labels])
        out.scatter_(-1, labels, 0)  # rounding left it close to 0

    def _add_gradients(self, chunk: slice, buffers: list[Tensor], pairs: _Pairs | None) -> None:
        """Add what the slopes `[n, V]` make of hidden states, weight, bias and exponent."""
        hidden, weight, bias, h_exp, _ = self.gradients
        slopes, states, scale = buffers[2], self.inputs.hidden_states[chunk], 1.0
        if bias is not None:
            bias.add_(slopes.sum(0))
        if pairs is not None and self.h_exp is not None:
            if h_exp is not None:
                h_exp.add_(slopes.mul(buffers[0]).sum() / self.h_exp)
            scale = -2 * self.h_exp  # the gradient of a squared distance by x is 2 x - 2 w
            slopes.div_(buffers[3])
            self._add_pairs(chunk, slopes, pairs)
        if weight is not None:
            weight.addmm_(slopes.T, states, alpha=scale)
        if hidden is not None:
            hidden[chunk].addmm_(slopes, self.inputs.weight, alpha=scale)
        if pairs is not None:
            self.columns.add_(slopes.sum(0), alpha=-scale)
            if hidden is not None:
                hidden[chunk].addcmul_(states, slopes.sum(-1, keepdim=True), value=-scale)

    def _add_pairs(self, chunk: slice, slopes: Tensor, pairs: _Pairs) -> None:
        """Move the pairs out of the slopes: their small differences do not survive the products."""
        hidden, weight = self.gradients.hidden_states, self.gradients.weight
        states = self.inputs.hidden_states[chunk]
        gaps = states[pairs.rows] - self.inputs.weight[pairs.columns]  # [P, E]
        assert self.h_exp is not None, "only distances have pairs"
        gaps.mul_(2 * self.h_exp * slopes[pairs].unsqueeze(-1))
        slopes[pairs] = 0
        if hidden is not None:
            hidden[chunk].index_add_(0, pairs.rows, gaps)
        if weight is not None:
            weight.index_add_(0, pairs.columns, gaps, alpha=-1)

    def _add_ground(self, probs: Tensor, labels: Tensor, weights: Tensor) -> None:
        """Add what the probabilities, which are overwritten, make of the ground points."""
        gradient, ground = self.gradients.ground, self.inputs.ground
        if gradient is None:
            return
        labels = labels.squeeze(-1)
        targets = ground[labels]  # [n, D]
        gradient.index_add_(0, labels, 2 * weights * (targets - probs @ ground))
        probs.mul_(weights)
        gradient.addmm_(probs.T, targets, alpha=-2)
        self.masses.add_(probs.sum(0), alpha=2)
