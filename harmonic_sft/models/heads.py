"""Output heads: what turns a hidden state into one logit per token of the vocabulary."""

from abc import ABC, abstractmethod
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# A pair closer than this share of |x|^2 + |w|^2 loses digits when its distance is expanded.
NEAR = 2.0**-4


class Head(nn.Module, ABC):
    """An output layer: maps hidden states to logits whose softmax is the class distribution.

    Every learnable part of the output layer lives here, in float32 or better. A head knows neither
    batch axes nor ignored positions.
    """

    weight: nn.Parameter

    @abstractmethod
    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return logits `[N, V]`, float32 or better, for hidden states `[N, D]`."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return what rebuilds this head through `build_head`, ready for JSON."""

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
        """Copy `embeddings` `[V, D]` into the prototypes."""
        self.weight.copy_(embeddings)
        return self

    def renormalize_(self) -> None:
        """Bring the prototypes back to where the head defines them; nothing to do by default."""

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move with the model, but stay in float32 under `model.to(torch.bfloat16)`."""

        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            low = moved.is_floating_point() and moved.dtype.itemsize < tensor.dtype.itemsize
            return tensor.to(moved.device) if low and moved.dtype.itemsize < 4 else moved

        return super()._apply(keep_precision, recurse)


class LinearHead(Head):
    """The ordinary softmax head, logits = hidden_states @ weight.T + bias: the baseline."""

    def __init__(self, hidden_size: int, vocab_size: int, *, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=torch.float32))
        zeros = torch.zeros(vocab_size, dtype=torch.float32) if bias else None
        self.bias = nn.Parameter(zeros) if zeros is not None else None
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return logits `[N, V]` for hidden states `[N, D]`."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            dtype = torch.promote_types(hidden_states.dtype, torch.float32)
            bias = self.bias.to(dtype) if self.bias is not None else None
            return F.linear(hidden_states.to(dtype), self.weight.to(dtype), bias)  # [N, V]

    def settings(self) -> dict[str, Any]:
        """Return the name and the fields of this head."""
        return {"name": "linear", "bias": self.bias is not None}


class DistLayer(Head):
    """Distances to one prototype per token, made logits by the harmonic law.

    p_j is proportional to (d_j ** 2 + eps) ** h_exp, so the logits are h_exp * log(d_j ** 2 + eps)
    and the harmonic loss is their cross-entropy. On the unit sphere both sides are normalized and
    d ** 2 = 2 - 2 cos; the normalization is part of the forward pass, so the gradient of a
    prototype is tangent to the sphere.

    Args:
        hidden_size: D.
        vocab_size: V.
        h_exp: Below 0. Acts on the squared distance, as in the authors' released code; the
            paper's Eq. 2 raises the distance itself to -n, so n = -2 * h_exp.
        unit_sphere: Normalize hidden states and prototypes.
        eps: Added to d ** 2 before the logarithm, in squared units of the hidden states.

    Source:
        Baek et al. 2025, Harmonic Loss Trains Interpretable AI Models, arXiv:2502.01628, Eq. 1-2.
        The paper has no eps and no sphere; eps is added, not clamped, so that the gradient is
        smooth and 0 at d = 0.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        h_exp: float = -12.0,
        unit_sphere: bool = True,
        eps: float = 1e-6,
    ):
        super().__init__()
        if h_exp >= 0:
            raise ValueError(f"h_exp: expected a number below 0, got {h_exp}")
        if eps <= 0:
            raise ValueError(f"eps: expected a number above 0, got {eps}")
        self.h_exp = float(h_exp)
        self.unit_sphere = unit_sphere
        self.eps = float(eps)
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=torch.float32))
        nn.init.normal_(self.weight, std=hidden_size**-0.5)
        self.renormalize_()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return logits `[N, V]` for hidden states `[N, D]`."""
        return self._logits(hidden_states, None)

    def nll(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return the harmonic loss of each label.

        The label's distance is taken by direct difference and enters the normalizer with the same
        value; the loss is log1p(others / label), accurate also where it is close to 0.

        Args:
            hidden_states: `[N, D]`.
            labels: `[N]`, every one a class in `[0, V)`.

        Returns:
            `[N]`, in nats.
        """
        labels = labels.unsqueeze(-1)  # [N, 1]
        logits = self._logits(hidden_states, labels)  # [N, V]
        others = logits.scatter(-1, labels, -torch.inf).logsumexp(-1)  # [N]
        margin = others - logits.gather(-1, labels).squeeze(-1)
        return torch.logaddexp(margin, torch.zeros_like(margin))

    @property
    def prototypes(self) -> Tensor:
        """The vectors the head compares with, `[V, D]`: of norm 1 on the sphere."""
        return F.normalize(self.weight, dim=-1) if self.unit_sphere else self.weight

    @torch.no_grad()
    def initialize_(self, embeddings: Tensor) -> Self:
        """Copy `embeddings` `[V, D]` into the prototypes, normalized on the sphere.

        A row of zeros (a padding token, often) has no direction and gets a random one.
        """
        self.weight.copy_(embeddings)
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
            self.weight.div_(norms.clamp_min(1e-12))

    def settings(self) -> dict[str, Any]:
        """Return the name and the fields of this head, with the h_exp it has now."""
        fields = {"h_exp": self.h_exp, "unit_sphere": self.unit_sphere, "eps": self.eps}
        return {"name": "dist", **fields}

    def _logits(self, hidden_states: Tensor, labels: Tensor | None) -> Tensor:
        with torch.autocast(hidden_states.device.type, enabled=False):
            dtype = torch.promote_types(hidden_states.dtype, torch.float32)
            hidden_states, weight = hidden_states.to(dtype), self.weight.to(dtype)
            inverse_norms = None
            if self.unit_sphere:
                hidden_states = F.normalize(hidden_states, dim=-1)
                inverse_norms = 1 / torch.linalg.vector_norm(weight, dim=-1).clamp_min(1e-12)
            squared = squared_distances(hidden_states, weight, labels, inverse_norms)
            return self.h_exp * torch.log(squared + self.eps)  # [N, V]


def squared_distances(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor | None = None,
    inverse_norms: Tensor | None = None,
) -> Tensor:
    """Squared distances by |x|^2 + |w|^2 - 2xw, and by direct difference where that loses digits.

    Recomputed are the pairs of `labels` and those closer than `NEAR` of |x|^2 + |w|^2, at most
    8 a row on average (the closest ones), so that memory stays bounded.

    Args:
        hidden_states: `[N, D]`, of norm 1 with `inverse_norms`.
        weight: `[V, D]`, the prototypes before normalization.
        labels: `[N, 1]` or None.
        inverse_norms: `[V]`, what normalizes the rows of `weight`; applied to the dot products,
            since a normalized copy of the vocabulary costs more. None leaves them as they are.

    Returns:
        `[N, V]`, not below 0.
    """
    dots = hidden_states @ weight.T  # [N, V]
    if inverse_norms is not None:
        dots = dots * inverse_norms
        scale = dots.new_tensor(2.0)  # |x|^2 + |w|^2
    else:
        scale = hidden_states.square().sum(-1, keepdim=True) + weight.square().sum(-1)
    squared = scale - 2 * dots
    near = squared.detach() < NEAR * scale.detach()
    if labels is not None:
        near.scatter_(-1, labels, False)
    rows, columns = near.nonzero(as_tuple=True)
    limit = 8 * max(len(squared), 128)
    if len(rows) > limit:
        closest = squared.detach()[rows, columns].topk(limit, largest=False).indices
        rows, columns = rows[closest], columns[closest]
        squared = squared.clamp_min(0)
    if labels is not None:
        rows = torch.cat([rows, torch.arange(len(labels), device=labels.device)])
        columns = torch.cat([columns, labels.squeeze(-1)])
    prototypes = weight[columns]  # [P, D]
    if inverse_norms is not None:
        prototypes = prototypes * inverse_norms[columns].unsqueeze(-1)
    exact = (hidden_states[rows] - prototypes).square().sum(-1)
    return squared.index_put((rows, columns), exact)


HEADS: dict[str, type[Head]] = {"linear": LinearHead, "dist": DistLayer}


def build_head(settings: dict[str, Any], *, hidden_size: int, vocab_size: int) -> Head:
    """Build a head from `{"name": ..., fields...}`, the inverse of `Head.settings`.

    Raises:
        ValueError: The name is not in `HEADS`, or a field is not one of that head's.
    """
    fields = dict(settings)
    name = fields.pop("name", None)
    if name not in HEADS:
        raise ValueError(f"head name: expected one of {sorted(HEADS)}, got {name!r}")
    try:
        return HEADS[name](hidden_size, vocab_size, **fields)
    except TypeError as error:
        raise ValueError(f"head {name}: expected its own fields, got {fields}. {error}") from error
