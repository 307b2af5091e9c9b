"""Heads whose logits are dot products: the ordinary softmax layer and its kin."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .head import AffineLogits, Head, at_least_float32, dense_logits
from .scaled_head import ScaledHead


class LinearHead(Head):
    """The ordinary softmax head, logits = hidden_states @ weight.T + bias: the baseline.

    Args:
        hidden_size: D.
        vocab_size: V.
        bias: Have one per class.
        softcap: Squash every logit z to softcap * tanh(z / softcap), as some decoders do; None
            leaves them alone. Such a head has no fused loss.

    Raises:
        ValueError: A softcap that is not above 0.

    Source:
        Soft-capping: Gemma Team 2024, Gemma 2, arXiv:2408.00118.
    """

    def __init__(
        self, hidden_size: int, vocab_size: int, *, bias: bool = True, softcap: float | None = None
    ):
        super().__init__()
        if softcap is not None and not 0 < softcap < math.inf:
            raise ValueError(f"softcap: expected a number above 0, got {softcap}")
        self.softcap = softcap
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=torch.float32))
        zeros = torch.zeros(vocab_size, dtype=torch.float32) if bias else None
        self.bias = nn.Parameter(zeros) if zeros is not None else None
        self.reset_parameters()

    def lazy_logits(self, hidden_states: Tensor) -> AffineLogits | None:
        """Return what the logits of `[N, D]` are made of; None if they are squashed."""
        if self.softcap is not None:
            return None
        return AffineLogits(hidden_states, self.weight, self.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return logits `[N, V]`, float32 or better, for hidden states `[N, D]`."""
        logits = dense_logits(AffineLogits(hidden_states, self.weight, self.bias))
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, 0.02 ** 2), as transformers does; the bias is 0."""
        init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            init.zeros_(self.bias)

    def settings(self) -> dict[str, Any]:
        """Return the name and the fields of this head."""
        softcap = {} if self.softcap is None else {"softcap": self.softcap}
        return {"name": "linear", "bias": self.bias is not None, **softcap}


class L2Head(ScaledHead):
    """Softmax of negative squared distances: logits -scale * |hidden_states - prototypes| ** 2.

    Up to a constant per token they are 2 * scale * hidden_states @ weight.T with the bias
    -scale * |weight| ** 2, so it costs what a linear layer costs.

    Args:
        hidden_size: D.
        vocab_size: V.
        scale: Above 0, in 1 / squared units of the hidden states.
        learn_scale: Make it a parameter, `log_scale`, that starts there.

    Source:
        The ablation "l2 + SoftMax" of Baek et al. 2025, Harmonic Loss Trains Interpretable AI
        Models, arXiv:2502.01628, Fig. 6, without released code; squared distances are our reading.
    """

    unit_sphere = False

    def __init__(
        self, hidden_size: int, vocab_size: int, *, scale: float = 1.0, learn_scale: bool = True
    ):
        super().__init__(hidden_size, vocab_size, scale=scale, learn_scale=learn_scale)

    def lazy_logits(self, hidden_states: Tensor) -> AffineLogits:
        """Return what the logits of `[N, D]` are made of, up to a constant per row."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            hidden_states = at_least_float32(hidden_states)
            weight = self.weight.to(hidden_states.dtype)
            bias = -self.scale * weight.square().sum(-1)  # [V]
            return AffineLogits(2 * self.scale * hidden_states, weight, bias)

    def settings(self) -> dict[str, Any]:
        """Return the name and the fields of this head, with the scale it has now."""
        learned = self.log_scale is not None
        return {"name": "l2", "scale": self.rounded_scale(), "learn_scale": learned}


class PowerHead(Head):
    """A power of the dot product: p_j is proportional to (dot_j ** 2 + eps) ** power.

    Power 1 is the spherical softmax, a power below 0 the dot product under the HarMax of harmonic
    loss. HarMax of a signed number is not defined, so the dot product is squared: its sign is lost,
    and prototypes w and -w are the same class. Below 0 the most probable class is the one most
    orthogonal to the hidden state. The logits, power * log(dot ** 2 + eps), are not sums of
    products: no fused loss.

    Args:
        hidden_size: D.
        vocab_size: V.
        power: Not 0.
        eps: Added to dot ** 2, so that the logarithm and its gradient are finite.

    Raises:
        ValueError: A number out of its range.

    Source:
        de Brebisson and Vincent 2016, An Exploration of Softmax Alternatives Belonging to the
        Spherical Loss Family, arXiv:1511.05042; the ablation "dot + HarMax" of Baek et al. 2025,
        arXiv:2502.01628, Fig. 6, which does not say what becomes of the sign.
    """

    def __init__(self, hidden_size: int, vocab_size: int, *, power: float = 1.0, eps: float = 1e-6):
        super().__init__()
        if power == 0 or not math.isfinite(power):
            raise ValueError(f"power: expected a number other than 0, got {power}")
        if not 0 < eps < math.inf:
            raise ValueError(f"eps: expected a number above 0, got {eps}")
        self.power, self.eps = float(power), float(eps)
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=torch.float32))
        self.reset_parameters()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return logits `[N, V]`, float32 or better, for hidden states `[N, D]`."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            hidden_states = at_least_float32(hidden_states)
            dots = F.linear(hidden_states, self.weight.to(hidden_states.dtype))  # [N, V]
            return self.power * torch.log(dots.square() + self.eps)

    def settings(self) -> dict[str, Any]:
        """Return the name and the fields of this head."""
        return {"name": "power", "power": self.power, "eps": self.eps}
