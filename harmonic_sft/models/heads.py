"""All output heads by name: what turns a hidden state into one logit per class."""

from typing import Any

import torch
from torch import Tensor

from .cosine_heads import CosineHead, VonMisesFisherHead
from .dist_layer import DistLayer, check_metric
from .head import Head
from .linear_heads import L2Head, LinearHead, PowerHead
from .multi_head import MultiHead
from .rotation import RotationHead

HEADS: dict[str, type[Head]] = {
    "linear": LinearHead,
    "dist": DistLayer,
    "cosine": CosineHead,
    "vmf": VonMisesFisherHead,
    "l2": L2Head,
    "power": PowerHead,
    "rotation": RotationHead,
    "multi_head": MultiHead,
}


def build_head(settings: dict[str, Any], *, hidden_size: int, vocab_size: int) -> Head:
    """Build a head from `{"name": ..., fields...}`, the inverse of `Head.settings`.

    Raises:
        ValueError: The name is not in `HEADS`, a field is not one of that head's, or there is no
            dimension or no class.
    """
    if min(hidden_size, vocab_size) < 1:
        raise ValueError(
            "head: expected at least one dimension and one class, "
            f"got hidden_size {hidden_size} and vocab_size {vocab_size}"
        )
    fields = dict(settings)
    name = fields.pop("name", None)
    if name not in HEADS:
        raise ValueError(f"head name: expected one of {sorted(HEADS)}, got {name!r}")
    if name == "dist":
        check_metric(fields.get("metric", "euclidean"))
        if fields.get("p") == 1.0:  # what the version before wrote for every metric but lp
            del fields["p"]
    try:
        return HEADS[name](hidden_size, vocab_size, **fields)
    except TypeError as error:
        raise ValueError(f"head {name}: expected its own fields, got {fields}. {error}") from error


@torch.no_grad()
def resized_head(head: Head, vocab_size: int) -> Head:
    """Return a head with more or fewer classes; those in both keep all that is theirs.

    New prototypes are drawn from a normal distribution with the mean and the covariance of the old
    ones, always the same; new biases and scales are the mean of the old.

    Args:
        head: Not changed. A weight that was resized already, being tied, is taken as it is.
        vocab_size: V of the new one.
    """
    resized = build_head(
        head.settings(), hidden_size=head.weight.shape[1], vocab_size=vocab_size
    ).to(head.weight.device)
    old = dict(head.named_parameters())
    for name, parameter in resized.named_parameters():
        if old[name].shape != parameter.shape:
            parameter[len(old[name]) :] = _more_rows(old[name], len(parameter) - len(old[name]))
        parameter.requires_grad_(old[name].requires_grad)
    resized.renormalize_()
    for name, parameter in resized.named_parameters():
        if old[name].shape == parameter.shape:
            parameter.copy_(old[name])
        else:
            kept = min(len(old[name]), len(parameter))
            parameter[:kept] = old[name][:kept]
    return resized.train(head.training)


def _more_rows(rows: Tensor, count: int) -> Tensor:
    """Return `count` rows like those `[V, ...]` that are there, none if it is below 1."""
    mean = rows.mean(0, keepdim=True)
    generator = torch.Generator().manual_seed(0)
    mixture = torch.randn(max(0, count), len(rows), generator=generator).to(rows)
    if rows.dim() == 1:
        return mean.expand(len(mixture))
    return mean + mixture @ (rows - mean) / len(rows) ** 0.5
