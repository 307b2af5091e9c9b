"""Heads around other heads, and all output heads by name."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.utils.generic import maybe_autocast

from .dist_layer import DistLayer, check_metric
from .head import (
    AffineLogits,
    DistanceLogits,
    Head,
    LazyLogits,
    MixtureLogits,
    SphereHead,
    at_least_float32,
    exact_nll,
    unit_rows,
)
from .linear_heads import CosineHead, L2Head, LinearHead, PowerHead, VonMisesFisherHead

INNER = ("cosine", "dist", "linear")


class OuterHead(Head):
    """A head around another head, `inner`, whose weight and exponent it uses as its own."""

    inner: Head

    @property
    def weight(self) -> nn.Parameter:  # ty: ignore[incompatible-property-override]
        """The inner head's weight, `[V, D]`."""
        return self.inner.weight

    @property
    def h_exp(self) -> float | None:
        """The inner head's exponent, None for heads without one."""
        return self.inner.h_exp

    @h_exp.setter
    def h_exp(self, value: float) -> None:
        self.inner.h_exp = value

    def reset_parameters(self) -> None:
        """Draw the inner head again."""
        self.inner.reset_parameters()


class MultiHead(OuterHead, SphereHead):
    """The mean of M softmaxes: p_j = mean_m softmax_j of head m on columns m of x and W.

    Hidden states and prototypes are cut into M slices of D / M columns. Every slice is compared as
    the inner head would compare it, on a unit sphere of its own where that head has one. The weight
    stays one matrix, so that it can be tied; bias, scale and exponent of the inner head hold for
    all slices. With M = 1 it is the inner head.

    Args:
        hidden_size: D.
        vocab_size: V.
        num_heads: M, a divisor of D.
        inner: `{"name": ..., fields...}` of a linear, cosine or Euclidean dist head; default:
            linear.

    Raises:
        ValueError: M does not divide D, or the inner head is of another kind.

    Source:
        Yang et al. 2018, Breaking the Softmax Bottleneck, arXiv:1711.03953: a mixture of softmaxes,
        here with equal weights and slices of one hidden state for its contexts. Liu 2026,
        Multi-head cross entropy loss (blog): the sum over linear heads; the softmax of its
        logarithm is the mean. The variant over distances, multi-head harmonic loss, is ours.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        num_heads: int = 4,
        inner: dict[str, Any] | None = None,
    ):
        super().__init__()
        inner = inner or {"name": "linear"}
        if num_heads < 1 or hidden_size % num_heads:
            raise ValueError(
                f"num_heads: expected a divisor of hidden_size {hidden_size}, got {num_heads}"
            )
        if inner.get("name") not in INNER:
            raise ValueError(
                f"multi_head inner: expected one of {list(INNER)}, got {inner.get('name')!r}"
            )
        if inner.get("metric", "euclidean") != "euclidean":
            raise ValueError(f"multi_head inner metric: expected euclidean, got {inner['metric']}")
        if inner.get("softcap") is not None:
            raise ValueError(
                f"multi_head inner softcap: expected none, got {inner['softcap']}. Leave it out"
            )
        self.num_heads = num_heads
        self.inner = build_head(inner, hidden_size=hidden_size, vocab_size=vocab_size)
        self.scaled_by_h_exp = self.inner.scaled_by_h_exp and num_heads == 1
        self.unit_sphere = isinstance(self.inner, SphereHead) and self.inner.unit_sphere
        self.renormalize_()

    @property
    def prototypes(self) -> Tensor:
        """The slices the head compares with, side by side, `[V, D]`: each of norm 1 on spheres."""
        return self._unit_slices(self.weight) if self.unit_sphere else self.weight

    def lazy_logits(self, hidden_states: Tensor) -> MixtureLogits:
        """Return what the logits of `[N, D]` are made of: one part for each slice."""
        return MixtureLogits(self._whole(hidden_states), self.num_heads)

    def nll(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return the negative log-likelihood `[N]` of each label, in nats; see `exact_nll`."""
        return exact_nll(self.lazy_logits(hidden_states), labels)

    def renormalize_(self) -> None:
        """Scale every slice of every prototype back to norm 1; nothing to do off the sphere."""
        if self.unit_sphere:
            with torch.no_grad():
                self.weight.copy_(self.prototypes)

    def settings(self) -> dict[str, Any]:
        """Return the name and the fields of this head, with the inner head's settings."""
        return {"name": "multi_head", "num_heads": self.num_heads, "inner": self.inner.settings()}

    def _whole(self, hidden_states: Tensor) -> AffineLogits | DistanceLogits:
        """Return the logits over all columns, from which the slices are cut."""
        if not isinstance(self.inner, CosineHead):
            whole = self.inner.lazy_logits(hidden_states)
            assert isinstance(whole, AffineLogits | DistanceLogits), "INNER holds no other heads"
            return whole
        directions = self._unit_slices(hidden_states)  # [N, D]
        return AffineLogits(self.inner.scale * directions, self.prototypes)

    def _unit_slices(self, vectors: Tensor) -> Tensor:
        """Return `[N, D]` with every slice at norm 1, in float32 or better."""
        slices = vectors.reshape(-1, vectors.shape[1] // self.num_heads)  # [N * M, D / M]
        return unit_rows(at_least_float32(slices)).view_as(vectors)


class MappedHead(OuterHead):
    """A head that maps hidden states before another head, `inner`, sees them."""

    def __init__(self, hidden_size: int, vocab_size: int, inner: dict[str, Any]):
        super().__init__()
        self.inner = build_head(inner, hidden_size=hidden_size, vocab_size=vocab_size)
        self.scaled_by_h_exp = self.inner.scaled_by_h_exp

    @abstractmethod
    def mapped(self, hidden_states: Tensor) -> Tensor:
        """Map `[N, D]` to what the inner head sees, in float32 or better and outside autocast."""

    @property
    def prototypes(self) -> Tensor:
        """The inner head's prototypes, `[V, D]`: what mapped hidden states are compared with."""
        return self.inner.prototypes

    def lazy_logits(self, hidden_states: Tensor) -> LazyLogits | None:
        """Return the inner head's lazy logits of the mapped hidden states `[N, D]`."""
        return self.inner.lazy_logits(self.mapped(hidden_states))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the inner head's logits `[N, V]` of the mapped hidden states `[N, D]`."""
        return self.inner(self.mapped(hidden_states))

    def nll(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return the inner head's loss `[N]`, in nats, of the mapped hidden states `[N, D]`."""
        return self.inner.nll(self.mapped(hidden_states), labels)

    def initialize_(self, embeddings: Tensor) -> Self:
        """Copy `embeddings` `[V, D]` into the inner head's prototypes; the map stays as it is."""
        self.inner.initialize_(embeddings)
        return self

    def renormalize_(self) -> None:
        """Bring the inner head's prototypes back to where it defines them."""
        self.inner.renormalize_()


class TransformHead(MappedHead):
    """Another head behind a dense layer, an activation and a norm, as masked models have them.

    BERT, RoBERTa, ModernBERT and others were trained with these layers before their output layer;
    a new head on such a base starts far better behind them than without. On a base of this kind
    their weights and all fields but `inner` are the base's; otherwise the weights are drawn.

    Args:
        hidden_size: D.
        vocab_size: V.
        inner: `{"name": ..., fields...}` of the head behind them; default: linear, as the base's.
        activation: A name that transformers knows; default: the base's, or gelu.
        bias: Whether the dense layer has one; default: as in the base, or True.
        norm_bias: Whether the norm has one; default: as in the base, or True.
        norm_eps: Added to the variance by the norm; default: the base's, or 1e-12.

    Source:
        Devlin et al. 2019, BERT, arXiv:1810.04805, `get_masked_lm_output` of the released code;
        without biases Warner et al. 2024, ModernBERT, arXiv:2412.13663.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        inner: dict[str, Any] | None = None,
        activation: str | None = None,
        bias: bool | None = None,
        norm_bias: bool | None = None,
        norm_eps: float | None = None,
    ):
        super().__init__(hidden_size, vocab_size, inner or {"name": "linear"})
        activation = "gelu" if activation is None else activation
        if activation not in ACT2FN:
            raise ValueError(
                f"transform activation: expected one of {sorted(ACT2FN)}, got {activation!r}"
            )
        if norm_eps is not None and not 0 <= norm_eps < math.inf:
            raise ValueError(f"transform norm_eps: expected 0 or more, got {norm_eps}")
        self.activation, self.norm_eps = activation, 1e-12 if norm_eps is None else norm_eps
        # Plain parameters: whatever adapts or quantizes linear layers leaves a head alone.
        self.dense_weight = nn.Parameter(torch.empty(hidden_size, hidden_size, dtype=torch.float32))
        self.norm_weight = nn.Parameter(torch.empty(hidden_size, dtype=torch.float32))
        self.dense_bias = self.norm_bias = None
        if bias is not False:
            self.dense_bias = nn.Parameter(torch.empty_like(self.norm_weight))
        if norm_bias is not False:
            self.norm_bias = nn.Parameter(torch.empty_like(self.norm_weight))
        self._draw()

    def mapped(self, hidden_states: Tensor) -> Tensor:
        """Return the norm of the activated dense layer of each row of `[N, D]`."""
        with maybe_autocast(hidden_states.device.type, enabled=False):
            states = at_least_float32(hidden_states)
            weight, scale = (w.to(states.dtype) for w in (self.dense_weight, self.norm_weight))
            biases = (self.dense_bias, self.norm_bias)
            bias, shift = (None if b is None else b.to(states.dtype) for b in biases)
            states = ACT2FN[self.activation](F.linear(states, weight, bias))
            return F.layer_norm(states, scale.shape, scale, shift, self.norm_eps)

    def reset_parameters(self) -> None:
        """Draw the inner head and the dense layer again, and set the norm to its start."""
        super().reset_parameters()
        self._draw()

    def _draw(self) -> None:
        init.normal_(self.dense_weight, std=len(self.dense_weight) ** -0.5)
        init.ones_(self.norm_weight)
        for bias in (self.dense_bias, self.norm_bias):
            if bias is not None:
                init.zeros_(bias)

    def settings(self) -> dict[str, Any]:
        """Return the name and the fields of this head, with the settings of the inner one."""
        return {
            "name": "transform",
            "activation": self.activation,
            "bias": self.dense_bias is not None,
            "norm_bias": self.norm_bias is not None,
            "norm_eps": self.norm_eps,
            "inner": self.inner.settings(),
        }


class RotationHead(MappedHead):
    """Another head, on hidden states turned by a learned orthogonal matrix R.

    R is the Cayley transform (I + A / 2) (I - A / 2)^-1 of a skew-symmetric A, as in torch. A is
    the part of `skew` below the diagonal, minus its transpose; it starts at 0 and R at I. R never
    mirrors, and turns no plane by 180 degrees. Each forward pass solves D equations once.

    If the inner head compares by dot product, cosine or Euclidean distance, R has the same effect
    as R^T on all its prototypes: it learns something new only if these are frozen or tied, or if
    the axes matter (a multi_head, a mahalanobis diagonal).

    Args:
        hidden_size: D.
        vocab_size: V.
        inner: `{"name": ..., fields...}` of the head behind the rotation; default: cosine.

    Source:
        Cayley 1846. Lezcano-Casado 2019, Trivializations for Gradient-Based Optimization on
        Manifolds, arXiv:1909.09501, is what torch follows; here with the base point I.
    """

    def __init__(self, hidden_size: int, vocab_size: int, *, inner: dict[str, Any] | None = None):
        super().__init__(hidden_size, vocab_size, inner or {"name": "cosine"})
        self.skew = nn.Parameter(torch.zeros(hidden_size, hidden_size, dtype=torch.float32))

    @property
    def rotation(self) -> Tensor:
        """R, `[D, D]`, in the precision of the head."""
        lower = self.skew.tril()
        half = (lower - lower.T) / 2
        identity = torch.eye(len(half), dtype=half.dtype, device=half.device)
        if torch.onnx.is_in_onnx_export():
            return 2 * _inverse_by_products(identity, half) - identity
        # The matrix is never singular, and `solve` would halt a GPU to check that.
        return torch.linalg.solve_ex(identity - half, identity + half).result

    def mapped(self, hidden_states: Tensor) -> Tensor:
        """Return R x for each row x of `[N, D]`."""
        with maybe_autocast(hidden_states.device.type, enabled=False):
            hidden_states = at_least_float32(hidden_states)
            return F.linear(hidden_states, self.rotation.to(hidden_states.dtype))

    def reset_parameters(self) -> None:
        """Draw the inner head again and set R to I."""
        super().reset_parameters()
        init.zeros_(self.skew)

    def settings(self) -> dict[str, Any]:
        """Return the name of this head and the settings of the inner one."""
        return {"name": "rotation", "inner": self.inner.settings()}


def _inverse_by_products(identity: Tensor, skew: Tensor) -> Tensor:
    """Return (I - B) ** -1 of a skew-symmetric B `[D, D]` by Newton's iteration: ONNX cannot solve.

    For |B| < 500 the error is about 1e-7 * |B|, like a solver's. An ONNX runtime computes the
    matrix once, when it loads the file, since it depends on weights alone.
    """
    wide = (identity - skew @ skew).abs().sum(0).max()  # no eigenvalue of I - B ** 2 is above it
    inverse = (identity + skew) * (2 / (1 + wide))
    for _ in range(24):
        inverse = inverse @ (2 * identity - (identity - skew) @ inverse)
    return inverse


HEADS: dict[str, type[Head]] = {
    "linear": LinearHead,
    "dist": DistLayer,
    "cosine": CosineHead,
    "vmf": VonMisesFisherHead,
    "l2": L2Head,
    "power": PowerHead,
    "rotation": RotationHead,
    "transform": TransformHead,
    "multi_head": MultiHead,
}


def heads_in(settings: Any) -> Iterator[dict[str, Any]]:
    """Yield the settings of a head, then those of the head inside it, and so on."""
    while isinstance(settings, Mapping):
        yield settings
        settings = settings.get("inner")


def behind_transform(name: str) -> dict[str, Any]:
    """Return the settings of the head `name` inside a transform, or of a transform itself."""
    return {"name": "transform", "inner": {"name": name}} if name != "transform" else {"name": name}


def build_head(settings: dict[str, Any], *, hidden_size: int, vocab_size: int) -> Head:
    """Build a head from `{"name": ..., fields...}`, the inverse of `Head.settings`.

    Raises:
        ValueError: The name is not in `HEADS`, a field is not one of that head's, or there is no
            dimension or no class.
    """
    if min(hidden_size, vocab_size) < 1:
        raise ValueError(
            "head: expected at least one dimension and one class, "
            f"got hidden_size {hidden_size} and vocab_size {vocab_size}"
        )
    fields = dict(settings)
    name = fields.pop("name", None)
    if name not in HEADS:
        raise ValueError(f"head name: expected one of {sorted(HEADS)}, got {name!r}")
    if name == "dist":
        check_metric(fields.get("metric", "euclidean"))
        if fields.get("p") == 1.0:  # the previous version wrote it for every metric but lp
            del fields["p"]
    try:
        return HEADS[name](hidden_size, vocab_size, **fields)
    except TypeError as error:
        raise ValueError(f"head {name}: expected its own fields, got {fields}. {error}") from error


def check_class(head: Head) -> None:
    """Refuse a head whose settings would load another class, as those of a subclass would."""
    for part in head.modules():
        if isinstance(part, Head):
            # FSDP2 puts two classes before the head's: one that it makes, in `abc`, and its own.
            classes = (c for c in type(part).__mro__ if c.__module__ != "abc")
            own = next(c for c in classes if not c.__module__.startswith("torch."))
            name = part.settings()["name"]
            if HEADS.get(name) is not own:
                raise ValueError(
                    f"dist_head: expected a class of HEADS, got {own.__name__}, whose settings say "
                    f"{name!r}. Give it a name of its own there and in its settings"
                )


@torch.no_grad()
def resized_head(head: Head, vocab_size: int) -> Head:
    """Return a head with more or fewer classes; classes in both keep prototype, bias and scale.

    New prototypes are drawn, with a fixed seed, from a normal distribution with the mean and the
    covariance of the old ones; new biases and scales are the mean of the old. A tied weight that
    the embeddings have resized already is taken as it is.
    """
    resized = build_head(
        head.settings(), hidden_size=head.weight.shape[1], vocab_size=vocab_size
    ).to(head.weight)
    old = dict(head.named_parameters())
    for name, parameter in resized.named_parameters():
        if old[name].shape != parameter.shape:
            parameter[len(old[name]) :] = _more_rows(old[name], len(parameter) - len(old[name]))
        parameter.requires_grad_(old[name].requires_grad)
    resized.renormalize_()  # the new rows; the old ones, written next, keep their bits
    for name, parameter in resized.named_parameters():
        if old[name].shape == parameter.shape:
            parameter.copy_(old[name])
        else:
            kept = min(len(old[name]), len(parameter))
            parameter[:kept] = old[name][:kept]
    return resized.train(head.training)


def _more_rows(rows: Tensor, count: int) -> Tensor:
    """Draw `count` rows with the mean and covariance of `rows` `[V, ...]`, none if below 1."""
    mean = rows.mean(0, keepdim=True)
    generator = torch.Generator().manual_seed(0)
    mixture = torch.randn(max(0, count), len(rows), generator=generator).to(rows)
    if rows.dim() == 1:
        return mean.expand(len(mixture))
    return mean + mixture @ (rows - mean) / len(rows) ** 0.5
