"""What every output head is, and what its logits are made of."""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

TINY = 1e-12  # norms up to which a vector has no direction
# A pair closer than this share of |x|^2 + |w|^2 loses digits when its distance is expanded.
NEAR = 2.0**-4
COLLAPSED = 1e-6  # of the mean norm: prototypes as close as this to their mean count as equal
FLAT = 1.01 / 64  # with -h_exp below this, all classes are about equally probable
LEAST_NORM, MOST_NORM = 0.5, 2.0  # accepted norms on the unit sphere; training keeps them near 1
MOST_NEAR = 8  # at most so many near pairs of a row are recomputed (on a CPU: on average)


class AffineLogits(NamedTuple):
    """Logits hidden_states @ weight.T + bias.

    Attributes:
        hidden_states: `[N, E]`, whatever the head makes of its input.
        weight: `[V, E]`.
        bias: `[V]` or None.
    """

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor | None = None


class DistanceLogits(NamedTuple):
    """Logits h_exp * log(d ** 2 + eps), d the Euclidean distance of hidden state and weight.

    Attributes:
        hidden_states: `[N, E]`, whatever the head makes of its input.
        weight: `[V, E]`.
        h_exp: Below 0; a scalar tensor if it is learned.
        unit_sphere: Both sides are normalized before the distance is taken.
        eps: Added to d ** 2.
    """

    hidden_states: Tensor
    weight: Tensor
    h_exp: float | Tensor
    unit_sphere: bool
    eps: float


class MixtureLogits(NamedTuple):
    """Log of the mean of the softmaxes over slices of the columns.

    Attributes:
        whole: What the slices are cut from.
        num_heads: The number of slices, all of equal width.
    """

    whole: AffineLogits | DistanceLogits
    num_heads: int

    @property
    def parts(self) -> list[AffineLogits | DistanceLogits]:
        """The slices."""
        states = self.whole.hidden_states.chunk(self.num_heads, dim=-1)
        weights = self.whole.weight.chunk(self.num_heads, dim=-1)
        cut = zip(states, weights, strict=True)
        return [self.whole._replace(hidden_states=x, weight=w) for x, w in cut]


LazyLogits = AffineLogits | DistanceLogits | MixtureLogits


class Head(nn.Module, ABC):
    """An output layer: maps hidden states to logits whose softmax is the class distribution.

    Every learnable part of the output layer lives here, in float32 or better. A head does not know
    of ignored positions, and only its `forward` takes batch axes. Either `lazy_logits` says what
    its logits are made of, which gives it the fused losses, or it has a `forward` of its own.

    Attributes:
        weight: `[V, D]`, one row per class: what is tied, initialized and counted.
        scaled_by_h_exp: Whether logits are proportional to `h_exp`, up to a constant per row, so
            that another exponent can be tried on logits already computed.
    """

    weight: nn.Parameter
    scaled_by_h_exp: bool = False

    @property
    def h_exp(self) -> float | None:
        """The exponent on the squared distance, None for heads without one."""
        return None

    @h_exp.setter
    def h_exp(self, value: float) -> None:
        raise ValueError(f"h_exp: expected a dist head, got {self.settings()['name']}")

    def lazy_logits(self, hidden_states: Tensor) -> LazyLogits | None:
        """Return what the logits of hidden states `[N, D]` are made of, None if nothing fits."""
        return None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return logits `[..., V]`, float32 or better, for hidden states `[..., D]`."""
        is_rows = hidden_states.dim() == 2
        rows = hidden_states if is_rows else hidden_states.reshape(-1, hidden_states.shape[-1])
        lazy = self.lazy_logits(rows)
        assert lazy is not None, "a head without lazy logits has a forward pass of its own"
        logits = dense_logits(lazy)
        return logits if is_rows else logits.view(*hidden_states.shape[:-1], logits.shape[-1])

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return what rebuilds this head through `build_head`, ready for JSON."""

    def reset_parameters(self) -> None:
        """Draw this head's own parameters again, through `transformers.initialization`."""
        init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def nll(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return the negative log-likelihood of each label.

        Args:
            hidden_states: `[N, D]`.
            labels: `[N]`, every one a class in `[0, V)`.

        Returns:
            `[N]`, in nats.
        """
        return F.cross_entropy(self(hidden_states), labels, reduction="none")

    @property
    def prototypes(self) -> Tensor:
        """The vectors the head compares with, `[V, D]`."""
        return self.weight

    @torch.no_grad()
    def initialize_(self, embeddings: Tensor) -> Self:
        """Copy `embeddings` `[V, D]` into the prototypes.

        Raises:
            ValueError: `embeddings` are not one vector for each class.
        """
        if embeddings.shape != self.weight.shape:
            expected, got = list(self.weight.shape), list(embeddings.shape)
            raise ValueError(f"embeddings: expected {expected}, got {got}")
        self.weight.copy_(embeddings)
        return self

    def renormalize_(self) -> None:
        """Bring the prototypes back to where the head defines them; nothing to do by default."""

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move with the model, but stay in float32 under `model.to(torch.bfloat16)`."""
        return super()._apply(functools.partial(keep_precision, fn), recurse)


class SphereHead(Head):
    """A head whose prototypes may live on the unit sphere.

    Attributes:
        unit_sphere: Whether they do.
    """

    unit_sphere: bool = True

    @property
    def prototypes(self) -> Tensor:
        """The vectors the head compares with, `[V, D]`: of norm 1 on the sphere."""
        return unit_rows(self.weight) if self.unit_sphere else self.weight

    @torch.no_grad()
    def initialize_(self, embeddings: Tensor) -> Self:
        """Copy `embeddings` `[V, D]` into the prototypes, normalized on the sphere.

        A row of zeros (a padding token, often) has no direction and gets a random one.
        """
        super().initialize_(embeddings)
        if self.unit_sphere:
            empty = self.weight.norm(dim=-1) == 0
            generator = torch.Generator().manual_seed(0)
            noise = torch.randn(int(empty.sum()), self.weight.shape[1], generator=generator)
            self.weight[empty] = noise.to(self.weight)
        self.renormalize_()
        return self

    @torch.no_grad()
    def renormalize_(self) -> None:
        """Scale every prototype back to norm 1; nothing to do off the sphere."""
        if self.unit_sphere:
            norms = torch.linalg.vector_norm(self.weight, dim=-1, keepdim=True)
            self.weight.div_(norms.clamp_min(TINY))


@torch.no_grad()
def check_prototypes(head: Head, *, is_tied: bool) -> list[str]:
    """Say in at most one sentence what is wrong with a head whose predictions mean nothing.

    A few rows may be zero (padding tokens, often). Norms are checked only on the sphere, and not
    those of tied prototypes, which are embeddings. A head on the meta device has no values and
    passes.
    """
    weight = head.weight
    if weight.is_meta or len(weight) < 2:
        return []
    norms = weight.norm(dim=-1)  # [V]
    finite = norms.isfinite()
    if not finite.all():
        return [f"{int((~finite).sum()):,} of {len(weight):,} prototypes are not finite"]
    spread = (weight - weight.mean(0)).norm(dim=-1).max()
    if spread <= COLLAPSED * norms.mean():
        return ["all prototypes are equal: the head has collapsed"]
    used = head.prototypes.norm(dim=-1)
    off = int(((norms < used * LEAST_NORM) | (norms > used * MOST_NORM)).sum())
    if off and not is_tied:
        return [f"{off:,} of {len(weight):,} prototypes are off the unit sphere"]
    if head.h_exp is not None and -head.h_exp < FLAT:
        return [f"h_exp is {head.h_exp:.3g}, at which all classes are alike"]
    return []


@torch.no_grad()
def find_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor with NaN or infinity, None if there is none.

    Tensors on the meta device, of integers, or packed in a byte or less are skipped.
    """
    for name, tensor in tensors:
        has_values = tensor.is_floating_point() and tensor.itemsize > 1 and not tensor.is_meta
        # The sum needs one pass, but it also overflows where many finite numbers are large.
        if has_values and not tensor.sum().isfinite() and not tensor.isfinite().all():
            return name
    return None


def keep_precision(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Return `fn(tensor)`, but in the tensor's own dtype if `fn` would round it below 32 bits."""
    moved = fn(tensor)
    low = moved.is_floating_point() and moved.dtype.itemsize < tensor.dtype.itemsize
    return tensor.to(moved.device) if low and moved.dtype.itemsize < 4 else moved


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or unchanged if it is float64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def inverse_norms(vectors: Tensor) -> Tensor:
    """Return 1 / |v| of the last axis, `[...]`, and 0 for a vector without a direction."""
    dtype = torch.promote_types(vectors.dtype, torch.float32)
    norms = torch.linalg.vector_norm(vectors, dim=-1, dtype=dtype)
    return norms.masked_fill(norms <= TINY, torch.inf).reciprocal()


def unit_rows(rows: Tensor) -> Tensor:
    """Return the rows `[N, D]` at norm 1; a row without a direction is 0 and gets no gradient.

    `F.normalize` and its gradient pass over the rows ten times, which for a whole vocabulary costs
    as much as several matrix products; this takes five passes.
    """
    unit, _ = _UnitRows.apply(rows)
    return unit


class _UnitRows(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor) -> tuple[Tensor, Tensor]:
        scale = inverse_norms(rows).unsqueeze(-1).to(rows.dtype)
        return rows * scale, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        rows, unit, scale = ctx.saved_tensors
        grad = upstream[0]
        if torch.is_grad_enabled():  # a second derivative also flows through the norms
            scale = inverse_norms(rows).unsqueeze(-1).to(rows.dtype)
            unit = rows * scale
        with maybe_autocast(grad.device.type, enabled=False):
            radial = torch.linalg.vecdot(grad, unit).unsqueeze(-1)  # [N, 1]
            return torch.addcmul(grad, unit, radial, value=-1).mul_(scale)


def dense_logits(lazy: LazyLogits) -> Tensor:
    """Return the logits `[N, V]` in float32 or better, also under autocast."""
    if isinstance(lazy, MixtureLogits):
        parts = torch.stack([dense_logits(part).log_softmax(-1) for part in lazy.parts])
        return parts.logsumexp(0) - math.log(len(lazy.parts))
    if isinstance(lazy, DistanceLogits):
        return distance_logits(lazy, None)
    with maybe_autocast(lazy.hidden_states.device.type, enabled=False):
        hidden_states = at_least_float32(lazy.hidden_states)
        bias = None if lazy.bias is None else lazy.bias.to(hidden_states.dtype)
        return F.linear(hidden_states, lazy.weight.to(hidden_states.dtype), bias)


def label_nll(logits: Tensor, labels: Tensor, own: Tensor | None = None) -> Tensor:
    """Return log(1 + p_others / p_label) of each row in nats, accurate also where it is close to 0.

    `logits` are `[N, V]` and `labels` `[N, 1]`; `own` `[N, 1]` replaces the logits of the labels.
    """
    own = logits.gather(-1, labels) if own is None else own
    others = logits.scatter(-1, labels, -torch.inf)
    # torch's logsumexp has the gradient exp(logits - result), whose rounding error grows with the
    # size of both. If there is no other class, the sum is 0.
    limits = torch.finfo(others.dtype)
    peaks = others.detach().amax(-1, keepdim=True).clamp_min(limits.min)
    total = others.sub_(peaks).exp_().sum(-1, keepdim=True).clamp_min(limits.tiny)
    own = own - peaks
    return torch.logaddexp(total.log() - own, torch.zeros_like(own)).squeeze(-1)


def exact_nll(lazy: LazyLogits, labels: Tensor) -> Tensor:
    """Return the loss log(1 + p_others / p_label) `[N]`, accurate also where it is close to 0.

    It is in nats. The distances of `labels` `[N]` are taken by direct difference, also in the
    normalizer.
    """
    if isinstance(lazy, MixtureLogits):
        return mixture_nll(torch.stack([exact_nll(part, labels) for part in lazy.parts]))
    labels = labels.unsqueeze(-1)  # [N, 1]
    is_distance = isinstance(lazy, DistanceLogits)
    logits = distance_logits(lazy, labels) if is_distance else dense_logits(lazy)  # [N, V]
    return label_nll(logits, labels)


def mixture_nll(losses: Tensor) -> Tensor:
    """Return the loss `[N]` of the mean of M distributions, whose own losses are `[M, N]`."""
    # Both terms are at least 0, so that none of their digits cancel.
    least = losses.detach().amin(0)
    return least - torch.log1p(torch.expm1(least - losses).mean(0))


def distance_logits(lazy: DistanceLogits, labels: Tensor | None) -> Tensor:
    """Return `[N, V]` logits; distances of `labels` `[N, 1]` are taken by direct difference."""
    with maybe_autocast(lazy.hidden_states.device.type, enabled=False):
        hidden_states = at_least_float32(lazy.hidden_states)
        weight = lazy.weight.to(hidden_states.dtype)
        squared = squared_distances(hidden_states, weight, labels, unit_sphere=lazy.unit_sphere)
        return lazy.h_exp * torch.log(squared + lazy.eps)  # [N, V]


def squared_distances(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor | None = None,
    *,
    unit_sphere: bool = False,
) -> Tensor:
    """Squared distances `[N, V]` by |x|^2 + |w|^2 - 2xw, by difference where that loses digits.

    The pairs of `labels` `[N, 1]` and those of `near_pairs` are taken by direct difference: in
    float32 the error of d is below 1e-6 (|x| + |w|), however small d is. For all others the error
    of d ** 2 is below 1e-6 (|x|^2 + |w|^2), which is 2e-5 of d ** 2 unless there were too many near
    pairs. `unit_sphere` normalizes both sides; a vector of norm 0 is then at a right angle to every
    other.
    """
    undirected = None  # on the sphere, which hidden states and which prototypes have norm 0
    if unit_sphere:
        state_inverse, weight_inverse = inverse_norms(hidden_states), inverse_norms(weight)
        undirected = (state_inverse == 0, weight_inverse == 0)
        hidden_states = hidden_states * state_inverse.unsqueeze(-1)
        # The products are scaled, since a normalized copy of the vocabulary costs more.
        dots = (hidden_states @ weight.T) * weight_inverse  # [N, V]
        norms = dots.new_full((), 2)  # |x|^2 + |w|^2
    else:
        dots = hidden_states @ weight.T
        norms = hidden_states.square().sum(-1, keepdim=True) + weight.square().sum(-1)
    squared = norms - 2 * dots
    rows, classes, are_all_near = near_pairs(squared.detach(), norms.detach(), labels)
    if not are_all_near:  # rounding may have pushed a distance that is not recomputed below zero
        squared = squared.clamp_min(0)
    if labels is not None:
        rows = torch.cat([rows, torch.arange(labels.shape[0], device=labels.device)])
        classes = torch.cat([classes, labels.squeeze(-1)])
    prototypes = weight[classes]  # [P, D]
    if undirected is not None:
        prototypes = prototypes * inverse_norms(prototypes).unsqueeze(-1)
    exact = (hidden_states[rows] - prototypes).square().sum(-1)
    if undirected is not None:
        exact = exact + undirected[0][rows] + undirected[1][classes]
    return squared.index_put((rows, classes), exact)


def near_pairs(
    squared: Tensor, norms: Tensor, labels: Tensor | None
) -> tuple[Tensor, Tensor, bool]:
    """Choose the pairs, besides those of the labels, whose squared distances are recomputed.

    On a CPU these are the pairs below `NEAR` * `norms`, at most `MOST_NEAR` a row on average (the
    closest ones), so that memory stays bounded. Elsewhere, while torch compiles or exports, and
    inside `torch.func.vmap`, they are the `MOST_NEAR` closest of every row, since there no value
    may decide a shape or halt the device. `squared` is `[N, V]`, `norms` are |x|^2 + |w|^2,
    `[N, V]` or a scalar, and `labels` are `[N, 1]`.

    Returns:
        Their rows `[P]`, their classes `[P]`, and whether certainly no near pair is left out.
    """
    if squared.device.type == "cpu" and not torch.compiler.is_compiling():
        try:
            return _pairs_below(NEAR * norms, squared, labels)
        except RuntimeError:  # inside `vmap`
            pass
    num_others = squared.shape[1]
    if labels is not None:
        num_others -= 1
        squared = squared.scatter(-1, labels, torch.inf)
    closest = squared.topk(min(MOST_NEAR, num_others), largest=False).indices  # [N, K]
    rows = torch.arange(closest.shape[0], device=closest.device).unsqueeze(-1)
    return rows.expand_as(closest).flatten(), closest.flatten(), False


def _pairs_below(
    limits: Tensor, squared: Tensor, labels: Tensor | None
) -> tuple[Tensor, Tensor, bool]:
    near = squared < limits
    if labels is not None:
        near.scatter_(-1, labels, False)
    rows, classes = near.nonzero(as_tuple=True)
    limit = MOST_NEAR * max(len(squared), 128)
    if len(rows) <= limit:
        return rows, classes, True
    closest = squared[rows, classes].topk(limit, largest=False).indices
    return rows[closest], classes[closest], False
