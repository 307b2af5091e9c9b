"""The fused losses by the kind of their logits."""

from harmonic_sft.ops import (
    LossOptions,
    distance_cross_entropy,
    distance_cross_entropy_with_metrics,
    linear_cross_entropy,
    linear_cross_entropy_with_metrics,
)

KINDS = ["euclidean", "sphere", "linear"]


def loss_of(kind, *tensors, h_exp=-3.0, reduction="none", impl="auto", **options):
    shared = {"reduction": reduction, "impl": impl, "options": LossOptions(**options)}
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
