"""Every head in every geometry, for the tests that hold for all of them."""

from typing import Any

import torch

from harmonic_sft.models import Head, build_head

V, D = 40, 24

VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {"name": "linear"},
    "linear without bias": {"name": "linear", "bias": False},
    "dist": {"name": "dist"},
    "dist off the sphere": {"name": "dist", "unit_sphere": False, "eps": 1e-3},
    "dist learned": {"name": "dist", "learn_h_exp": True},
    "dist mahalanobis": {"name": "dist", "metric": "mahalanobis"},
    "dist mahalanobis off the sphere": {
        "name": "dist",
        "metric": "mahalanobis",
        "rank": 3,
        "unit_sphere": False,
    },
    "cosine": {"name": "cosine"},
    "cosine fixed": {"name": "cosine", "scale": 7.0, "learn_scale": False},
    "vmf": {"name": "vmf"},
    "vmf per class": {"name": "vmf", "per_class": True},
    "l2": {"name": "l2"},
    "l2 fixed": {"name": "l2", "scale": 0.5, "learn_scale": False},
    "power": {"name": "power"},
    "power -2": {"name": "power", "power": -2.0, "eps": 1e-4},
    "rotation": {"name": "rotation"},
    "rotation of dist": {"name": "rotation", "inner": {"name": "dist", "h_exp": -5.0}},
    "rotation of multi_head": {
        "name": "rotation",
        "inner": {"name": "multi_head", "num_heads": 2, "inner": {"name": "dist"}},
    },
    "transform": {"name": "transform"},
    "transform of dist": {
        "name": "transform",
        "activation": "relu",
        "bias": False,
        "norm_bias": False,
        "norm_eps": 1e-5,
        "inner": {"name": "dist"},
    },
    "multi_head": {"name": "multi_head"},
    "multi_head of cosine": {"name": "multi_head", "inner": {"name": "cosine"}},
    "multi_head of dist": {"name": "multi_head", "inner": {"name": "dist"}},
    "multi_head of dist off the sphere": {
        "name": "multi_head",
        "num_heads": 8,
        "inner": {"name": "dist", "unit_sphere": False},
    },
}


@torch.no_grad()
def moved_head(
    name: str, *, hidden_size: int = D, vocab_size: int = V, dtype: torch.dtype = torch.float32
) -> Head:
    """Make a head whose parameters are all moved from where they start."""
    torch.manual_seed(0)
    head = build_head(VARIANTS[name], hidden_size=hidden_size, vocab_size=vocab_size).to(dtype)
    for parameter in head.parameters():
        parameter.add_(0.3 * torch.randn(parameter.shape))
    return head
