"""Heads of cosines: scaled, or as the likelihood of von Mises-Fisher densities."""

from typing import Any

import torch
from torch import Tensor

from .head import AffineLogits, at_least_float32
from .scaled_head import ScaledHead
from .unit_rows import unit_rows

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

    def __init__(
        self, hidden_size: int, vocab_size: int, *, scale: float = 20.0, learn_scale: bool = True
    ):
        super().__init__(hidden_size, vocab_size, scale=scale, learn_scale=learn_scale)

    def lazy_logits(self, hidden_states: Tensor) -> AffineLogits:
        """Return what the logits are made of, for hidden states `[N, D]`."""
        return AffineLogits(self.scale * _normalize(hidden_states), _normalize(self.weight))

    def settings(self) -> dict[str, Any]:
        """Return the name and the fields of this head, with the scale it has now."""
        learned = self.log_scale is not None
        return {"name": "cosine", "scale": self.rounded_scale(), "learn_scale": learned}


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
        super().__init__(
            hidden_size, vocab_size, scale=scale, learn_scale=True, per_class=per_class
        )
        self.per_class = per_class

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
    """Log of the von Mises-Fisher constant, against that of the uniform density.

    log C_D(kappa) - log C_D(0) with C_D(kappa) proportional to kappa ** nu / I_nu(kappa),
    nu = D / 2 - 1, and I_nu by its uniform expansion for large order to 1 / nu ** 5. Only
    differences of small numbers are left of it, so float32 keeps its digits. The derivative is
    -I_{nu + 1}(kappa) / I_nu(kappa).

    Args:
        kappa: Concentrations, 0 or more, of any shape.
        hidden_size: D, at least 16: the error is below 1e-6 then, for every kappa.

    Returns:
        Of the shape of `kappa`, in nats, not above 0.

    Source:
        Abramowitz and Stegun 1964, 9.7.7 with u_k of 9.3.9 (u_5: DLMF 10.41.9).
    """
    order = hidden_size / 2 - 1
    ratio = kappa / order
    root = torch.hypot(ratio, torch.ones_like(ratio))  # 1 / t
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
    """Return vectors of norm 1, `[N, D]`, in float32 or better whatever autocast says."""
    with torch.autocast(vectors.device.type, enabled=False):
        return unit_rows(at_least_float32(vectors))
