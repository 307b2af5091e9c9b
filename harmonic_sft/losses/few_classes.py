"""The most probable classes of each token, and logits of a few classes alone."""

import torch
import torch.nn.functional as F
from torch import Tensor

from harmonic_sft.models import AffineForm, DistanceForm
from harmonic_sft.models.head import at_least_float32
from harmonic_sft.models.unit_rows import unit_rows


@torch.no_grad()
def top_classes(form: AffineForm | DistanceForm, top_k: int) -> Tensor:
    """Return the K most probable classes of each token, by one matrix product.

    Args:
        form: Of N hidden states over V classes.
        top_k: K, at most V.

    Returns:
        `[N, K]`, int64, the most probable one first.
    """
    with torch.autocast(form.hidden_states.device.type, enabled=False):
        states = at_least_float32(form.hidden_states)
        weight = form.weight.to(states.dtype)
        if isinstance(form, AffineForm):
            bias = None if form.bias is None else form.bias.to(states.dtype)
            scores = F.linear(states, weight, bias)  # [N, V]
        elif form.unit_sphere:
            norms = torch.linalg.vector_norm(weight, dim=-1)
            scores = (states @ weight.T).div_(norms.clamp_min(1e-12))
        else:
            scores = F.linear(states, weight, -weight.square().sum(-1) / 2)
        return scores.topk(top_k).indices


def points_at(form: AffineForm | DistanceForm, columns: Tensor) -> Tensor:
    """Return the weight `[N, K, D]` of classes `[N, K]`, normalized where the form normalizes."""
    points = at_least_float32(F.embedding(columns, form.weight))
    on_sphere = isinstance(form, DistanceForm) and form.unit_sphere
    return unit_rows(points.flatten(0, 1)).view_as(points) if on_sphere else points


def logits_at(form: AffineForm | DistanceForm, points: Tensor, columns: Tensor) -> Tensor:
    """Return the logits of a few classes, every distance by direct difference.

    Args:
        form: Of N hidden states over V classes.
        points: `[N, K, D]`, what `points_at` returns.
        columns: `[N, K]`, the classes.

    Returns:
        `[N, K]`, in nats.
    """
    with torch.autocast(form.hidden_states.device.type, enabled=False):
        states = at_least_float32(form.hidden_states)
        points = points.to(states.dtype)
        if isinstance(form, DistanceForm):
            states = F.normalize(states, dim=-1) if form.unit_sphere else states
            squared = squared_gaps(points, states.unsqueeze(1)).squeeze(-1)
            return form.h_exp * torch.log(squared + form.eps)
        logits = torch.bmm(points, states.unsqueeze(-1)).squeeze(-1)
        return logits if form.bias is None else logits + form.bias.to(logits.dtype)[columns]


def squared_gaps(points: Tensor, others: Tensor) -> Tensor:
    """Return the squared distances `[N, K, M]` of `[N, K, D]` and `[N, M, D]`, by difference."""
    distances = torch.cdist(points, others, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.square()  # no matrix of gaps, and a gradient of 0 where there is no gap
