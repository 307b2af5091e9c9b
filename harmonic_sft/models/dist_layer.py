"""The distance head of harmonic loss."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .head import DistanceForm, SphereHead, distance_logits


class DistLayer(SphereHead):
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
        learn_h_exp: Make the exponent a parameter, log(-h_exp), that starts at `h_exp`.

    Source:
        Baek et al. 2025, Harmonic Loss Trains Interpretable AI Models, arXiv:2502.01628, Eq. 1-2.
        The paper has no eps, no sphere and a fixed exponent; eps is added, not clamped, so that
        the gradient is smooth and 0 at d = 0.
    """

    scaled_by_h_exp = True

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        h_exp: float = -12.0,
        unit_sphere: bool = True,
        eps: float = 1e-6,
        learn_h_exp: bool = False,
    ):
        super().__init__()
        if not -math.inf < h_exp < 0:
            raise ValueError(f"h_exp: expected a number below 0, got {h_exp}")
        if eps <= 0:
            raise ValueError(f"eps: expected a number above 0, got {eps}")
        self._h_exp = float(h_exp)
        self.unit_sphere = unit_sphere
        self.eps = float(eps)
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=torch.float32))
        self.log_steepness = None
        if learn_h_exp:
            self.log_steepness = nn.Parameter(torch.empty((), dtype=torch.float32))
        self.reset_parameters()
        self.renormalize_()

    @property
    def h_exp(self) -> float:
        """The exponent now."""
        if self.log_steepness is None or self.log_steepness.is_meta:
            return self._h_exp
        return -math.exp(float(self.log_steepness))

    @h_exp.setter
    def h_exp(self, value: float) -> None:
        self._h_exp = float(value)
        if self.log_steepness is not None:
            self.log_steepness.data.fill_(math.log(-self._h_exp))

    def form(self, hidden_states: Tensor) -> DistanceForm:
        """Return the logits' form for hidden states `[N, D]`."""
        h_exp = self._h_exp if self.log_steepness is None else -self.log_steepness.exp()
        return DistanceForm(hidden_states, self.weight, h_exp, self.unit_sphere, self.eps)

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
        logits = distance_logits(self.form(hidden_states), labels)  # [N, V]
        others = logits.scatter(-1, labels, -torch.inf).logsumexp(-1)  # [N]
        margin = others - logits.gather(-1, labels).squeeze(-1)
        return torch.logaddexp(margin, torch.zeros_like(margin))

    def reset_parameters(self) -> None:
        """Draw prototypes of norm 1 on average; the exponent is the one given."""
        super().reset_parameters()
        if self.log_steepness is not None:
            init.constant_(self.log_steepness, math.log(-self._h_exp))

    def settings(self) -> dict[str, Any]:
        """Return the name and the fields of this head, with the h_exp it has now."""
        fields = {"h_exp": self.h_exp, "unit_sphere": self.unit_sphere, "eps": self.eps}
        learned = {"learn_h_exp": True} if self.log_steepness is not None else {}
        return {"name": "dist", **fields, **learned}
