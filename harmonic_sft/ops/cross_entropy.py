"""Cross-entropy of a distance or linear head without the [N, V] matrix of logits."""

import math
import os
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.autograd import forward_ad

from harmonic_sft.models import AffineLogits, DistanceLogits, MixtureLogits
from harmonic_sft.ops.arguments import (
    Arguments,
    Impl,
    LossOptions,
    Reduction,
    Results,
    TokenMetrics,
    check_choice,
    check_count,
    check_inputs,
)
from harmonic_sft.ops.engine import chunked_op
from harmonic_sft.ops.reference import reference_cross_entropy

_DEFAULT = LossOptions()
# Looked up once, here: torch.compile of torch 2.10 does not trace the look-up.
_HAS_TRITON = find_spec("triton") is not None


def distance_cross_entropy(  # noqa: PLR0913 - the exponent's law, then what every loss takes
    hidden_states: Tensor,
    prototypes: Tensor,
    labels: Tensor,
    *,
    h_exp: float | Tensor,
    unit_sphere: bool = True,
    eps: float = 1e-6,
    reduction: Reduction = "none",
    options: LossOptions = _DEFAULT,
    impl: Impl = "auto",
) -> Tensor:
    """Return the harmonic loss of each token, without logits for all of them at once.

    p_j is proportional to (d_j ** 2 + eps) ** h_exp. The label's distance and those of a few
    nearest prototypes are taken by direct difference, so that confident tokens and tokens near a
    wrong prototype keep their digits. Among many almost equal prototypes only the eight nearest of
    a tile are (on a GPU two); the others keep the rounding of |x| ** 2 + |w| ** 2 - 2xw. Triton
    counts at most eight of these pairs per token and leaves further ones out of the loss.

    | impl      | what it is                                                     | "auto" takes it |
    |-----------|----------------------------------------------------------------|-----------------|
    | reference | the definition: dense logits, autograd, any derivative         | never           |
    | chunked   | chunks of tokens, library products, a row-wise stage in torch  | CPU and others  |
    | triton    | the same chunks and products, the row-wise stage as kernels    | CUDA and Triton |

    Gradients are made in the forward pass. Where all tokens have one upstream gradient, as under
    `reduction="sum"` or "mean" or a `.sum()`, the backward pass only scales them; any other
    upstream gradient, that of `.mean()` included, computes the scores again. Weight tokens
    through `options.token_weights` instead.

    Args:
        hidden_states: `[N, D]`.
        prototypes: `[V, D]`.
        labels: `[N]`, every one a class in `[0, V)`; `[N, K]` with `options.target_weights`.
        h_exp: Below 0; a scalar tensor to learn it. Acts on the squared distance (the paper's n is
            -2 * h_exp).
        unit_sphere: Normalize both sides; gradients are then tangent to the sphere. A vector of
            norm 0, or up to 1e-12, is at a right angle to every other and gets no gradient.
        eps: Added to d ** 2, in squared units of the hidden states.
        reduction: "none", "sum", or "mean", which divides by N whatever the weights are.
        options: Weights, bias, smoothing, soft targets and how gradients are made.
        impl: See the table.

    Returns:
        `[N]`, or a scalar, in nats, float32 or better.

    Raises:
        ValueError: Shapes, dtypes, devices, labels (on the CPU) or an option are off.
        NotImplementedError: Forward-mode differentiation or a transform of `torch.func` of anything
            but impl="reference".

    Source:
        Baek et al. 2025, Harmonic Loss Trains Interpretable AI Models, arXiv:2502.01628, Eq. 2,
        with h_exp on the squared distance and eps added. Chunked gradients in the forward pass:
        Hsu et al. 2024, Liger Kernel, arXiv:2410.10989; tiles instead of logits: Wijmans et al.
        2024, Cut Your Losses, arXiv:2411.09009, without its gradient filter, which would drop the
        heavy tails of this loss.
    """
    logits = DistanceLogits(hidden_states, prototypes, h_exp, unit_sphere, eps)
    return _reduced(_cross_entropy(logits, labels, options, impl)[0], reduction)


def linear_cross_entropy(
    hidden_states: Tensor,
    prototypes: Tensor,
    labels: Tensor,
    *,
    reduction: Reduction = "none",
    options: LossOptions = _DEFAULT,
    impl: Impl = "auto",
) -> Tensor:
    """Return the cross-entropy of logits hidden_states @ prototypes.T, without `[N, V]` of them.

    It runs the code of `distance_cross_entropy`, so that the two heads can be compared on equal
    terms. `options.class_bias` is the layer's bias.

    Args:
        hidden_states: `[N, D]`.
        prototypes: `[V, D]`, the weight of the output layer.
        labels: As in `distance_cross_entropy`.
        reduction: As in `distance_cross_entropy`.
        options: As in `distance_cross_entropy`.
        impl: As in `distance_cross_entropy`.

    Returns:
        `[N]`, or a scalar, in nats, float32 or better.

    Raises:
        ValueError: Shapes, dtypes, devices, labels (on the CPU) or an option are off.
        NotImplementedError: Forward-mode differentiation or a transform of `torch.func` of anything
            but impl="reference".
    """
    logits = AffineLogits(hidden_states, prototypes)
    return _reduced(_cross_entropy(logits, labels, options, impl)[0], reduction)


def distance_cross_entropy_with_metrics(
    hidden_states: Tensor,
    prototypes: Tensor,
    labels: Tensor,
    *,
    h_exp: float | Tensor,
    unit_sphere: bool = True,
    eps: float = 1e-6,
    options: LossOptions = _DEFAULT,
    impl: Impl = "auto",
) -> tuple[Tensor, TokenMetrics]:
    """Return `distance_cross_entropy` and, from the same pass, the metrics of each token.

    Arguments and errors are those of `distance_cross_entropy`.
    """
    logits = DistanceLogits(hidden_states, prototypes, h_exp, unit_sphere, eps)
    return _cross_entropy(logits, labels, options, impl, with_metrics=True)


def linear_cross_entropy_with_metrics(
    hidden_states: Tensor,
    prototypes: Tensor,
    labels: Tensor,
    *,
    options: LossOptions = _DEFAULT,
    impl: Impl = "auto",
) -> tuple[Tensor, TokenMetrics]:
    """Return `linear_cross_entropy` and, from the same pass, the metrics of each token.

    Arguments and errors are those of `linear_cross_entropy`.
    """
    logits = AffineLogits(hidden_states, prototypes)
    return _cross_entropy(logits, labels, options, impl, with_metrics=True)


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    check_choice("reduction", reduction, ("none", "sum", "mean"))
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / loss.shape[0]


def _cross_entropy(
    logits: AffineLogits | DistanceLogits,
    labels: Tensor,
    options: LossOptions,
    impl: str,
    *,
    with_metrics: bool = False,
) -> tuple[Tensor, TokenMetrics]:
    check_inputs(logits.hidden_states, logits.weight, labels, options, impl)
    if isinstance(logits, DistanceLogits):
        h_exp = logits.h_exp
        if not 0 < logits.eps < math.inf:
            raise ValueError(f"eps: expected a number above 0, got {logits.eps}")
        if isinstance(h_exp, Tensor) and h_exp.dim():
            raise ValueError(f"h_exp: expected a number or a tensor of no axis, got {h_exp.shape}")
    if impl == "reference":
        return reference_cross_entropy(logits, labels, options)
    results = chunked_loss(logits, labels, options=options, impl=impl, with_metrics=with_metrics)
    return results.loss, results.metrics


def chunked_loss(
    logits: AffineLogits | DistanceLogits | MixtureLogits,
    labels: Tensor,
    *,
    stage: str = "cross_entropy",
    second: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    mix: tuple[float, float] = (1.0, 0.0),
    options: LossOptions = _DEFAULT,
    impl: str = "auto",
    with_metrics: bool = False,
) -> Results:
    """Compute any loss that has a row-wise stage, chunk by chunk, and its metrics.

    Args:
        logits: What the logits of N hidden states over V classes are made of, with their own bias.
        labels: `[N]`, or `[N, K]` with `options.target_weights`.
        stage: A key of `STAGES`; for `MixtureLogits` it is always "mixture".
        second: Weight, states and bias of the stage's second loss: see `Arguments`.
        mix: Factors of the cross-entropy and of the second loss.
        options: Its class bias is added to that of affine logits.
        impl: "auto", "chunked" or "triton".
        with_metrics: Also measure `TokenMetrics`.
    """
    num_heads, bias = 1, options.class_bias
    if isinstance(logits, MixtureLogits):
        stage, num_heads, logits = "mixture", logits.num_heads, logits.whole
    check_count(labels, logits.hidden_states.shape[0])
    kind, h_exp, eps = "linear", -1.0, 0.0
    if isinstance(logits, DistanceLogits):
        kind = "sphere" if logits.unit_sphere else "euclidean"
        h_exp, eps = logits.h_exp, logits.eps
    elif logits.bias is not None:
        bias = logits.bias if bias is None else logits.bias + bias
    # Numbers as products with a tensor: torch.compile keeps them symbolic there; elsewhere it would
    # compile again for each value.
    one = torch.ones((), dtype=torch.float64, device="cpu")
    if not isinstance(h_exp, Tensor):
        h_exp = h_exp * one
    # If the points are the prototypes, both add to one gradient [V, D]. Not on the sphere, where
    # that of the prototypes is made tangent.
    is_shared = second[0] is logits.weight and kind != "sphere"
    leaves = (logits.hidden_states, logits.weight, bias, h_exp, None if is_shared else second[0])
    _refuse_transforms(leaves)
    enabled = torch.is_grad_enabled()
    needs = tuple(enabled and leaf is not None and leaf.requires_grad for leaf in leaves)
    others = (needs[0], needs[1], needs[2], needs[4])  # the exponent's is made with the loss
    arguments = Arguments(
        *leaves,
        labels=labels,
        target_weights=options.target_weights,
        token_weights=options.token_weights,
        second_states=second[1],
        second_bias=second[2],
        mix=torch.stack([factor * one for factor in mix]),
        stage=stage,
        kind=kind,
        eps=eps,
        label_smoothing=options.label_smoothing,
        z_loss=options.z_loss,
        num_heads=num_heads,
        needs=needs,
        early=options.gradients == "forward" and any(others),
        with_metrics=with_metrics,
        impl=_resolve(impl, stage, logits.hidden_states, logits.weight),
    )
    return Results(*chunked_op(*arguments))


def _refuse_transforms(leaves: tuple[Tensor | None, ...]) -> None:
    if torch.compiler.is_compiling():
        return
    for leaf in leaves:
        if leaf is not None and forward_ad.unpack_dual(leaf).tangent is not None:
            raise NotImplementedError(
                "fused loss: expected reverse-mode gradients, got a tangent of forward-mode "
                "differentiation. Use impl='reference'"
            )
        if leaf is not None and torch._C._functorch.is_gradtrackingtensor(leaf):
            raise NotImplementedError(
                "fused loss: expected gradients by backward, got a transform of torch.func. Use "
                "impl='reference'"
            )


def _resolve(impl: str, stage: str, hidden_states: Tensor, prototypes: Tensor) -> str:
    """Return "chunked" or "triton" for what was asked.

    Raises:
        ValueError: Triton cannot serve these tensors on this machine.
    """
    if impl == "chunked":
        return impl
    floats = (torch.float32, torch.bfloat16, torch.float16)
    served = _HAS_TRITON and hidden_states.dtype in floats and prototypes.dtype in floats
    has_kernels = stage in ("cross_entropy", "mixture")
    # An AMD GPU is of type cuda too, and lacks a function that the kernels call.
    on_gpu = hidden_states.device.type == "cuda" and torch.version.hip is None
    if impl == "auto":
        return "triton" if on_gpu and served and has_kernels else "chunked"
    if not has_kernels:
        raise ValueError(f"impl: expected auto or chunked for {stage}, got triton")
    if not served or not (on_gpu or os.environ.get("TRITON_INTERPRET") == "1"):
        raise ValueError(
            "impl: expected reference or chunked, since triton needs a GPU of NVIDIA and 16- or "
            f"32-bit floats, got triton with {hidden_states.dtype} on {hidden_states.device}"
        )
    return impl
