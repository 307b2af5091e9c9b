"""The fused losses by the kind of their logits."""

from harmonic_sft.models import AffineLogits, DistanceLogits
from harmonic_sft.ops import (
    LossOptions,
    chunked_loss,
    distance_cross_entropy,
    linear_cross_entropy,
)
from harmonic_sft.ops.reference import reference_cross_entropy

KINDS = ["euclidean", "sphere", "linear"]


def loss_of(kind, *tensors, h_exp=-3.0, reduction="none", impl="auto", options=None, **fields):
    options = options or LossOptions(**fields)
    shared = {"reduction": reduction, "impl": impl, "options": options}
    if kind == "linear":
        return linear_cross_entropy(*tensors, **shared)
    sphere = kind == "sphere"
    return distance_cross_entropy(*tensors, h_exp=h_exp, unit_sphere=sphere, **shared)


def with_metrics_of(
    kind, states, prototypes, labels, h_exp=-3.0, impl="auto", options=None, **fields
):
    options = options or LossOptions(**fields)
    logits = DistanceLogits(states, prototypes, h_exp, kind == "sphere", 1e-6)
    if kind == "linear":
        logits = AffineLogits(states, prototypes)
    if impl == "reference":
        return reference_cross_entropy(logits, labels, options)
    results = chunked_loss(logits, labels, options=options, impl=impl, with_metrics=True)
    return results.loss, results.metrics
