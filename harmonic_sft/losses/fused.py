"""Cross-entropy of a head from the form of its logits, without the [N, V] matrix."""

import dataclasses
import math

import torch
from torch import Tensor

from harmonic_sft.models import AffineForm, DistanceForm, Form, MixtureForm
from harmonic_sft.ops import Impl, LossOptions, distance_cross_entropy, linear_cross_entropy
from harmonic_sft.ops.distillation import Student, Teacher, distillation_loss

_DEFAULT = LossOptions()
_PART = LossOptions(gradients="recompute")  # the parts of a mixture get uneven upstream gradients


def form_cross_entropy(
    form: Form, labels: Tensor, *, options: LossOptions = _DEFAULT, impl: Impl = "auto"
) -> Tensor:
    """Return the cross-entropy of each token from what its logits are made of.

    Args:
        form: Of N hidden states over V classes.
        labels: `[N]`, or `[N, K]` with `options.target_weights`.
        options: Of the fused losses; a `class_bias` is the form's own business.
        impl: See `harmonic_sft.ops.distance_cross_entropy`.

    Returns:
        `[N]`, in nats.

    Raises:
        ValueError: A mixture with options: its log-probabilities are not sums over classes.
    """
    if isinstance(form, MixtureForm):
        if options is not _DEFAULT:
            raise ValueError("options: expected none for a mixture of softmaxes, got some")
        # p_y is the mean of the components' probabilities of y.
        parts = [form_cross_entropy(part, labels, options=_PART, impl=impl) for part in form.parts]
        return math.log(len(parts)) - torch.stack(parts).neg().logsumexp(0)
    if isinstance(form, DistanceForm):
        return distance_cross_entropy(
            form.hidden_states,
            form.weight,
            labels,
            h_exp=form.h_exp,
            unit_sphere=form.unit_sphere,
            eps=form.eps,
            options=options,
            impl=impl,
        )
    assert isinstance(form, AffineForm), "every form is handled"
    options = dataclasses.replace(options, class_bias=form.bias)
    return linear_cross_entropy(form.hidden_states, form.weight, labels, options=options, impl=impl)


def form_distillation(
    form: AffineForm | DistanceForm, teacher: AffineForm, labels: Tensor, *, share: float
) -> Tensor:
    """Return share * KL(q || p) + (1 - share) * -log p_y of each token, q of the teacher.

    Args:
        form: Of N hidden states over V classes, on the CPU.
        teacher: Likewise; no gradient flows through it.
        labels: `[N]`.
        share: Of the divergence, from 0 to 1.

    Returns:
        `[N]`, in nats.
    """
    if isinstance(form, AffineForm):
        student = Student(form.hidden_states, form.weight, "linear", class_bias=form.bias)
    else:
        kind = "sphere" if form.unit_sphere else "euclidean"
        student = Student(form.hidden_states, form.weight, kind, h_exp=form.h_exp, eps=form.eps)
    return distillation_loss(student, Teacher(*teacher), labels, share=share)
