"""The head with a scale that is above 0: fixed, or learned as its logarithm."""

import math

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .head import SphereHead


class ScaledHead(SphereHead):
    """A head whose logits are multiplied by a scale.

    Args:
        hidden_size: D.
        vocab_size: V.
        scale: Above 0, what the scale is or starts at.
        learn_scale: Make it a parameter, `log_scale`.
        per_class: One scale for each class.

    Raises:
        ValueError: The scale is not above 0.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        scale: float,
        learn_scale: bool,
        per_class: bool = False,
    ):
        super().__init__()
        if not 0 < scale < math.inf:
            raise ValueError(f"scale: expected a number above 0, got {scale}")
        self._scale = float(scale)
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=torch.float32))
        self.log_scale = None
        if learn_scale:
            shape = (vocab_size,) if per_class else ()
            self.log_scale = nn.Parameter(torch.empty(shape, dtype=torch.float32))
        self.reset_parameters()
        self.renormalize_()

    @property
    def scale(self) -> Tensor | float:
        """The scale now: a number, or a tensor with a gradient where it is learned."""
        return self._scale if self.log_scale is None else self.log_scale.exp()

    def reset_parameters(self) -> None:
        """Draw prototypes of norm 1 on average; the scale is the one given."""
        super().reset_parameters()
        if self.log_scale is not None:
            init.constant_(self.log_scale, math.log(self._scale))

    def rounded_scale(self) -> float:
        """Return the scale (of the classes, the geometric mean) as settings write it."""
        if self.log_scale is None or self.log_scale.is_meta:
            return self._scale
        # Six digits: float32 returns 20 as 19.9999996, and the parameter itself is saved.
        return float(f"{math.exp(self.log_scale.mean().item()):.6g}")
