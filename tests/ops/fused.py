"""The fused losses by the kind of their logits; inputs, and comparisons with dense losses."""

import torch

from harmonic_sft.ops import (
    LossOptions,
    distance_cross_entropy,
    distance_cross_entropy_with_metrics,
    engine,
    linear_cross_entropy,
    linear_cross_entropy_with_metrics,
)

KINDS = ["euclidean", "sphere", "linear"]


def loss_of(kind, *tensors, h_exp=-3.0, reduction="none", impl="auto", options=None, **fields):
    options = options or LossOptions(**fields)
    shared = {"reduction": reduction, "impl": impl, "options": options}
    if kind == "linear":
        return linear_cross_entropy(*tensors, **shared)
    sphere = kind == "sphere"
    return distance_cross_entropy(*tensors, h_exp=h_exp, unit_sphere=sphere, **shared)


def with_metrics_of(kind, *tensors, h_exp=-3.0, impl="auto", options=None, **fields):
    shared = {"impl": impl, "options": options or LossOptions(**fields)}
    if kind == "linear":
        return linear_cross_entropy_with_metrics(*tensors, **shared)
    sphere = kind == "sphere"
    return distance_cross_entropy_with_metrics(*tensors, h_exp=h_exp, unit_sphere=sphere, **shared)


def random_inputs(num_tokens, vocab_size, hidden_size, dtype=torch.float32, seed=0):
    """Hidden states, prototypes and labels."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(num_tokens, hidden_size, generator=generator, dtype=dtype)
    prototypes = torch.randn(vocab_size, hidden_size, generator=generator, dtype=dtype)
    return states, prototypes, torch.randint(vocab_size, (num_tokens,), generator=generator)


def make_chunks_small(monkeypatch, rows):
    for name in ("KEPT_ROWS", "MIN_ROWS", "LOOSE_ROWS"):
        monkeypatch.setattr(engine, name, rows)


def assert_same(found, expected, inputs, upstream=None, *, allow_unused=False, **tolerances):
    """Compare losses `[N]` and the gradients of 3 times their sum, or of one with weights."""
    results = []
    for losses in (found, expected):
        total = 3 * losses.sum() if upstream is None else (losses * upstream).sum()
        gradients = torch.autograd.grad(total, inputs, retain_graph=True, allow_unused=allow_unused)
        results.append([losses, *gradients])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, **tolerances)
