"""Heads of dot products and cosines: the ordinary softmax layer and its kin."""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from .head import AffineLogits, Head, SphereHead, at_least_float32, dense_logits, unit_rows

MIN_SIZE = 16  # below it the expansion of the Bessel function is off by more than 1e-6
# u_k(t) = t ** k * (c_0 + c_1 t ** 2 + ...) / denominator, k = 1, 2, ...
DEBYE = (
    (24, (3, -5)),
    (1152, (81, -462, 385)),
    (414720, (30375, -369603, 765765, -425425)),
    (39813120, (4465125, -94121676, 349922430, -446185740, 185910725)),
    (
        6688604160,
        (1519035525, -49286948607, 284499769554, -614135872350, 566098157625, -188699385875),
    ),
)


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
        self.bias = nn.Parameter(torch.zeros(vocab_size, dtype=torch.float32)) if bias else None
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


class ScaledHead(SphereHead):
    """A head whose logits are multiplied by a scale, a parameter `log_scale` if it is learned."""

    name: ClassVar[str]

    def __init__(
        self, hidden_size: int, vocab_size: int, *, scale: float = 20.0, learn_scale: bool = True
    ):
        super().__init__()
        if not 0 < scale < math.inf:
            raise ValueError(f"scale: expected a number above 0, got {scale}")
        self._scale = float(scale)
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=torch.float32))
        self.log_scale = None
        if learn_scale:
            self.log_scale = nn.Parameter(torch.empty((), dtype=torch.float32))
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
        """Return the scale as settings write it; with one per class, their geometric mean."""
        if self.log_scale is None or self.log_scale.is_meta:
            return self._scale
        # Six digits: float32 returns 20 as 19.9999996, and the parameter itself is saved.
        return float(f"{math.exp(self.log_scale.mean().item()):.6g}")

    def settings(self) -> dict[str, Any]:
        """Return the name and the fields of this head, with the scale it has now."""
        learned = self.log_scale is not None
        return {"name": self.name, "scale": self.rounded_scale(), "learn_scale": learned}


class L2Head(ScaledHead):
    """Softmax of negative squared distances, -scale * |hidden_states - prototypes| ** 2.

    The logits are that up to a constant per token: 2 * scale * hidden_states @ weight.T with the
    bias -scale * |weight| ** 2, so it costs what a linear layer costs. A z-loss acts on those
    logits.

    Args:
        hidden_size: D.
        vocab_size: V.
        scale: Above 0, in 1 / squared units of the hidden states.
        learn_scale: Make it a parameter, `log_scale`, that starts there.

    Source:
        The ablation "l2 + SoftMax" of Baek et al. 2025, Harmonic Loss Trains Interpretable AI
        Models, arXiv:2502.01628, Fig. 6, without released code; squared distances are our reading.
    """

    name = "l2"
    unit_sphere = False

    def __init__(
        self, hidden_size: int, vocab_size: int, *, scale: float = 1.0, learn_scale: bool = True
    ):
        super().__init__(hidden_size, vocab_size, scale=scale, learn_scale=learn_scale)

    def lazy_logits(self, hidden_states: Tensor) -> AffineLogits:
        """Return what the logits of `[N, D]` are made of, up to a constant per row."""
        hidden_states = at_least_float32(hidden_states)
        weight = self.weight.to(hidden_states.dtype)
        bias = -self.scale * weight.square().sum(-1)  # [V]
        return AffineLogits(2 * self.scale * hidden_states, weight, bias)


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
        with maybe_autocast(hidden_states.device.type, enabled=False):
            hidden_states = at_least_float32(hidden_states)
            dots = F.linear(hidden_states, self.weight.to(hidden_states.dtype))  # [N, V]
            return self.power * torch.log(dots.square() + self.eps)

    def settings(self) -> dict[str, Any]:
        """Return the name and the fields of this head."""
        return {"name": "power", "power": self.power, "eps": self.eps}


class CosineHead(ScaledHead):
    """Logits scale * cos(hidden_states, prototypes).

    Args:
        hidden_size: D.
        vocab_size: V.
        scale: Above 0: 1 / temperature.
        learn_scale: Make it a parameter, `log_scale`, that starts there.

    Source:
        Wang et al. 2017, NormFace, arXiv:1704.06369, which learns the scale itself; here it is
        learned in log space, so that it stays above 0.
    """

    name = "cosine"

    def lazy_logits(self, hidden_states: Tensor) -> AffineLogits:
        """Return what the logits are made of, for hidden states `[N, D]`."""
        return AffineLogits(self.scale * _normalize(hidden_states), _normalize(self.weight))


class VonMisesFisherHead(ScaledHead):
    """Posterior of the classes, each a von Mises-Fisher density on the unit sphere.

    p_j is proportional to C_D(kappa_j) * exp(kappa_j * cos_j), with kappa_j the learned
    concentration of class j and C_D what makes the density integrate to 1. With one kappa for all
    classes C_D cancels, and this is `CosineHead` with a learned scale.

    Args:
        hidden_size: D, at least 16 with `per_class`.
        vocab_size: V.
        scale: kappa to start with.
        per_class: One kappa for each class; the settings then show their geometric mean.

    Raises:
        ValueError: `hidden_size` is too small for `per_class`.

    Source:
        Kumar and Tsvetkov 2019, Von Mises-Fisher Loss for Training Sequence to Sequence Models with
        Continuous Outputs, arXiv:1812.04616: there one density, around the prediction, scores the
        target's fixed embedding, and kappa is the norm of the prediction. Densities around
        learned prototypes, compared by their posterior: Scott et al. 2021, arXiv:2103.15718.
    """

    def __init__(
        self, hidden_size: int, vocab_size: int, *, scale: float = 20.0, per_class: bool = False
    ):
        if per_class and hidden_size < MIN_SIZE:
            raise ValueError(
                f"per_class: expected a hidden size of at least {MIN_SIZE}, got {hidden_size}. "
                "The densities' constant is not accurate below. Use per_class: false"
            )
        super().__init__(hidden_size, vocab_size, scale=scale)
        self.per_class = per_class
        if per_class:
            log_scales = torch.full((vocab_size,), math.log(scale), dtype=torch.float32)
            self.log_scale = nn.Parameter(log_scales)

    def lazy_logits(self, hidden_states: Tensor) -> AffineLogits:
        """Return what the logits are made of, for hidden states `[N, D]`."""
        unit, prototypes = _normalize(hidden_states), _normalize(self.weight)
        scale = self.scale
        if not self.per_class or not isinstance(scale, Tensor):
            return AffineLogits(scale * unit, prototypes)
        bias = log_normalizer(scale, self.weight.shape[1])  # [V]
        return AffineLogits(unit, scale.unsqueeze(-1) * prototypes, bias)

    def settings(self) -> dict[str, Any]:
        """Return the name and the fields of this head, with the scale it has now."""
        return {"name": "vmf", "scale": self.rounded_scale(), "per_class": self.per_class}


def log_normalizer(kappa: Tensor, hidden_size: int) -> Tensor:
    """Log of the von Mises-Fisher constant, against that of the uniform density, in nats.

    log C_D(kappa) - log C_D(0) with C_D(kappa) proportional to kappa ** nu / I_nu(kappa),
    nu = D / 2 - 1, and I_nu by its uniform expansion for large order to 1 / nu ** 5. In this form
    only small numbers are subtracted, so float32 keeps its digits: for D of 16 or more the error is
    below 1e-6 at every kappa, or 1e-6 of the value if that is above 1 in float32. The derivative
    is -I_{nu + 1}(kappa) / I_nu(kappa).

    Source:
        Abramowitz and Stegun 1964, 9.7.7 with u_k of 9.3.9 (u_5: DLMF 10.41.9).
    """
    order = hidden_size / 2 - 1
    ratio = kappa / order
    root = (1 + ratio.square()).sqrt()  # 1 / t
    excess = ratio * (ratio / (1 + root))  # root - 1, without cancellation
    terms, uniform = _debye_sum(1 / root, order), _debye_sum(torch.ones_like(root), order)
    leading = order * (torch.log1p(excess / 2) - excess) + torch.log1p(excess) / 2
    return leading - torch.log1p(terms) + torch.log1p(uniform)


def _debye_sum(t: Tensor, order: float) -> Tensor:
    """Sum of u_k(t) / order ** k, k = 1 to 5."""
    total = torch.zeros_like(t)
    for power, (denominator, coefficients) in enumerate(DEBYE, start=1):
        polynomial = torch.zeros_like(t)
        for coefficient in reversed(coefficients):
            polynomial = polynomial * t.square() + coefficient / denominator
        total = total + (t / order) ** power * polynomial
    return total


def _normalize(vectors: Tensor) -> Tensor:
    """Return vectors of norm 1, `[N, D]`, in float32 or better."""
    return unit_rows(at_least_float32(vectors))
