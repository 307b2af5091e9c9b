"""The frames in which scores are measured: linear, Euclidean, spherical, about the mean or not."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# Closer than this share of |x|^2 + |w|^2, a distance is taken by direct difference: expanded, it
# would carry a relative error above 1e-7 / NEAR, times h_exp in the gradient.
NEAR = 2.0**-4
# A common mean of the prototypes that holds this share of their squared norm is subtracted first.
DOMINANT = 0.5
_NORMS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class Frame:
    """How raw hidden states and prototypes enter the matrix products of one call.

    Attributes:
        kind: "linear", "euclidean" or "sphere".
        dtype: Of all arithmetic, float32 or better.
        prototypes: `[V, D]`, raw.
        norms: `[V]`, |w|; None for a linear head.
        center: `[D]`, subtracted from both sides (of norm 1 on the sphere); None for 0.
        spread: Mean squared norm of the prototypes in the frame, of no axis; None for a linear
            head.
        eps: Added to the squared distance.
    """

    kind: str
    dtype: torch.dtype
    prototypes: Tensor
    norms: Tensor | None
    center: Tensor | None
    spread: Tensor | None
    eps: float

    @property
    def gain(self) -> Tensor | None:
        """`[V]`, 1 / |w| on the sphere; None elsewhere."""
        return 1 / self.norms if self.kind == "sphere" and self.norms is not None else None

    @property
    def with_sums(self) -> bool:
        """Whether gradients need the row and column sums of the weights.

        On the sphere these terms are radial and vanish, unless the frame is about a mean.
        """
        return self.kind == "euclidean" or self.center is not None

    def place(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return hidden states `[T, D]` in this frame, and their norms `[T, 1]` on the sphere."""
        hidden_states = hidden_states.to(self.dtype)
        norms = None
        if self.kind == "sphere":
            norms = torch.linalg.vector_norm(hidden_states, dim=-1, keepdim=True)
            norms = norms.clamp_min(1e-12)
            hidden_states = hidden_states / norms
        return self._centered(hidden_states), norms

    def unit(self, hidden_states: Tensor) -> Tensor:
        """Return a squared distance `[T, 1]` typical of each of `hidden_states` `[T, D]`.

        Logarithms are taken of distances over it: h_exp * log(d2) itself is so far from 0 that
        rounding it costs a relative error of 1e-5 in p. Equal on all ranks of a group.
        """
        squared = torch.linalg.vecdot(hidden_states, hidden_states).unsqueeze(1)
        if self.spread is None:
            return torch.ones_like(squared)
        # Not 0 either where all prototypes are one, and the hidden state is too.
        return (squared + self.spread).clamp_min(torch.finfo(squared.dtype).tiny)

    def rows(self, classes: Tensor) -> Tensor:
        """Return the prototypes of `classes` `[P]` in this frame, `[P, D]`."""
        prototypes = self.prototypes[classes].to(self.dtype)
        if self.kind == "sphere" and self.norms is not None:
            prototypes /= self.norms[classes].unsqueeze(-1)
        return self._centered(prototypes)

    def tile(self, start: int, stop: int) -> Tensor:
        """Return what multiplies hidden states for classes `start` to `stop`: `[stop-start, D]`.

        On the sphere about no mean these are the raw prototypes; their products are scaled by
        `gain`, since a normalized copy of the tile costs more.
        """
        prototypes = self.prototypes[start:stop].to(self.dtype)
        if self.center is None:
            return prototypes
        if self.kind == "sphere" and self.norms is not None:
            prototypes = prototypes / self.norms[start:stop].unsqueeze(-1)
        return self._centered(prototypes)

    def _centered(self, vectors: Tensor) -> Tensor:
        return vectors if self.center is None else vectors - self.center


def build_frame(
    kind: str,
    prototypes: Tensor,
    eps: float,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
) -> Frame:
    """Return the frame for `prototypes` `[V, D]`; about their mean if that dominates them.

    The mean is taken over a sample of 2,048 rows: any center is exact, a near one is enough.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    if kind == "linear":
        return Frame(kind, dtype, prototypes.detach(), None, None, None, eps)
    norms = prototype_norms(prototypes).to(dtype)
    prototypes = prototypes.detach()
    sample = prototypes[:: max(len(prototypes) // 2048, 1)].to(dtype)
    if kind == "sphere":
        norms = norms.clamp_min(1e-12)
        sample = torch.nn.functional.normalize(sample, dim=-1)
    center = all_reduce_(sample.mean(0), group, "mean")
    energy = all_reduce_(sample.square().sum(-1).mean(), group, "mean")
    share = center.square().sum()
    # Elsewhere than on the CPU a look at the value would halt the device.
    if prototypes.device.type == "cpu" and not bool(share > DOMINANT * energy):
        return Frame(kind, dtype, prototypes, norms, None, energy, eps)
    return Frame(kind, dtype, prototypes, norms, center, energy - share, eps)


def all_reduce_(tensor: Tensor, group: dist.ProcessGroup | None, how: str = "sum") -> Tensor:
    """Reduce `tensor` in place over the ranks of `group`: "sum", "mean", "max" or "min"."""
    if group is None:
        return tensor
    operations = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
    dist.all_reduce(tensor, operations.get(how, dist.ReduceOp.SUM), group)
    return tensor.div_(group.size()) if how == "mean" else tensor


def prototype_norms(prototypes: Tensor) -> Tensor:
    """Return |w| `[V]`, kept as long as frozen prototypes stay as they are."""
    frozen = not prototypes.requires_grad and not prototypes.is_inference()
    state = None
    if frozen:
        state = (prototypes._version, prototypes.data_ptr())
        kept = _NORMS.get(prototypes)
        if kept is not None and kept[0] == state:
            return kept[1]
    dtype = torch.promote_types(prototypes.dtype, torch.float32)
    norms = torch.linalg.vector_norm(prototypes, dim=-1, dtype=dtype)
    if frozen:
        _NORMS[prototypes] = (state, norms)
    return norms


def near_limits(frame: Frame, squared_norms: Tensor) -> Tensor:
    """Return the squared distances `[T]` below which expansion has lost digits.

    Near means |w| close to |x|, so that |x|^2 + |w|^2 is at most 2.6 |x|^2.
    """
    return squared_norms * (2.6 * NEAR) + frame.eps
