"""What every head computes, as its paper writes it: one hidden state, one prototype, float64."""

from typing import Any

import mpmath
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from harmonic_sft.models import Head


def definition(head: Any, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Logits `[V]` of one hidden state, up to a constant; of prototypes `[V, D]` or the head's."""
    weight = head.weight.detach().double() if weight is None else weight
    settings = head.settings()
    name = settings["name"]
    if name == "rotation":
        return definition(head.inner, cayley(head.skew) @ x, weight)
    if name == "transform":
        return definition(head.inner, transformed(head, x), weight)
    if name == "multi_head":
        parts = [definition(head.inner, *cut).softmax(-1) for cut in slices(head, x, weight)]
        return torch.stack(parts).mean(0).log()
    scores = torch.stack([score(head, settings, x, w) for w in weight])
    if settings.get("bias"):
        scores = scores + head.bias.detach().double()
    if name in ("cosine", "vmf", "l2"):
        kappas = torch.as_tensor(head.scale).detach().double().expand(len(weight))
        scores = kappas * scores
        if settings.get("per_class"):
            constants = [float(log_bessel_ratio(kappa, len(x))) for kappa in kappas.tolist()]
            scores = scores + torch.tensor(constants, dtype=torch.float64)
    return scores


def score(head: Any, settings: dict[str, Any], x: Tensor, w: Tensor) -> Tensor:
    if settings["name"] == "dist":
        if settings["unit_sphere"]:
            x, w = x / x.norm(), w / w.norm()
        matrix = torch.eye(len(x), dtype=torch.float64)
        if "metric" in settings:
            matrix = torch.diag(head.diagonal.detach().double() ** 2)
        if settings.get("rank"):
            factor = head.factor.detach().double()
            matrix = matrix + factor @ factor.T
        return settings["h_exp"] * torch.log((x - w) @ matrix @ (x - w) + settings["eps"])
    if settings["name"] == "l2":
        return -(x - w).square().sum()
    if settings["name"] == "power":
        return settings["power"] * torch.log((x @ w) ** 2 + settings["eps"])
    return x @ w if settings["name"] == "linear" else x @ w / (x.norm() * w.norm())


def slices(head: Head, x: Tensor, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The columns of each head of a `MultiHead`."""
    size = len(x) // head.settings()["num_heads"]
    cuts = [slice(start, start + size) for start in range(0, len(x), size)]
    return [(x[cut], weight[:, cut]) for cut in cuts]


def transformed(head: Any, x: Tensor) -> Tensor:
    """The norm of the activated dense layer, element by element."""
    zero = torch.zeros(len(x))
    bias, shift = (zero if b is None else b.detach() for b in (head.dense_bias, head.norm_bias))
    dense = head.dense_weight.detach().double() @ x + bias.double()
    values = [float(ACT2FN[head.activation](value)) for value in dense]
    mean = sum(values) / len(x)
    spread = (sum((value - mean) ** 2 for value in values) / len(x) + head.norm_eps) ** 0.5
    normed = torch.tensor([(value - mean) / spread for value in values], dtype=torch.float64)
    return normed * head.norm_weight.detach().double() + shift.double()


def cayley(skew: Tensor) -> Tensor:
    """(I - B) (I + B)^-1 with B = -A / 2, A skew-symmetric, element by element."""
    original, size = skew.detach().double(), len(skew)
    skew = torch.zeros(size, size, dtype=torch.float64)
    for row in range(size):
        for column in range(row):
            skew[row, column] = original[row, column]
            skew[column, row] = -original[row, column]
    identity = torch.eye(size, dtype=torch.float64)
    return (identity + skew / 2) @ torch.linalg.inv(identity - skew / 2)


def log_bessel_ratio(kappa: float, size: int) -> mpmath.mpf:
    """Log of C_D(kappa) / C_D(0), whose surface is 2 pi ** (D / 2) / Gamma(D / 2)."""
    order = mpmath.mpf(size) / 2 - 1
    kappa = mpmath.mpf(kappa)
    constant = kappa**order / (2 * mpmath.pi) ** (order + 1) / mpmath.besseli(order, kappa)
    return mpmath.log(constant * 2 * mpmath.pi ** (order + 1) / mpmath.gamma(order + 1))
