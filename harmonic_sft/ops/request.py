"""One call of a fused loss, in the form its implementations share."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from harmonic_sft.ops.geometry import Frame


@dataclass(frozen=True)
class Request:
    """What is asked of one call; every rank of a group has its own.

    Attributes:
        frame: Geometry and prototypes `[V, D]`.
        hidden_states: `[N, D]`.
        labels: `[N, K]`, columns of this rank's prototypes; -1 where padded, repeated, or held
            by another rank.
        target_weights: `[N, K]`, 0 where padded or repeated; the same on every rank.
        token_weights: `[N]` or None.
        class_bias: `[V]` or None.
        learns_bias: Whether its gradient is needed.
        h_exp: Below 0; a tensor of no axis if it is learned.
        label_smoothing: Share of the target spread over all classes.
        z_loss: Factor of the squared log-normalizer.
        gradient_dtype: Of the operands of the gradient products; None is the frame's.
        gemm: Wanted backend on the CPU.
        impl: "chunked" or "triton".
        group: Ranks that share the vocabulary.
        vocab_size: Over all ranks.
        vocab_start: Where this rank's slice begins.
    """

    frame: Frame
    hidden_states: Tensor
    labels: Tensor
    target_weights: Tensor
    token_weights: Tensor | None
    class_bias: Tensor | None
    learns_bias: bool
    h_exp: float | Tensor
    label_smoothing: float
    z_loss: float
    gradient_dtype: torch.dtype | None
    gemm: str
    impl: str
    group: dist.ProcessGroup | None
    vocab_size: int
    vocab_start: int

    @property
    def num_classes(self) -> int:
        """V, of this rank."""
        return len(self.frame.prototypes)


def merge_repeated(labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Add the weights of a row's repeated labels `[N, K]` up at the first, and pad the others."""
    num_labels = labels.shape[1]
    if num_labels == 1:
        return labels, weights
    same = labels.unsqueeze(2) == labels.unsqueeze(1)  # [N, K, K]
    first = same.to(torch.uint8).argmax(2)  # [N, K], where the label stands first
    merged = torch.zeros_like(weights).scatter_add_(1, first, weights)
    kept = first == torch.arange(num_labels, device=labels.device)
    kept &= labels >= 0
    return labels.where(kept, -1), merged.where(kept, 0)


def vocabulary_slice(num_classes: int, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return the size of the vocabulary over all ranks and where this rank's slice begins."""
    if group is None:
        return num_classes, 0
    sizes: list[int] = [0] * group.size()
    dist.all_gather_object(sizes, num_classes, group)
    return sum(sizes), sum(sizes[: group.rank()])
