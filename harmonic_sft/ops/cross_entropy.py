"""Cross-entropy of a distance or linear head without the [N, V] matrix of logits."""

import math
import os
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harmonic_sft.ops.custom_ops import Arguments, Results, distance_op, linear_op
from harmonic_sft.ops.options import Impl, LossOptions, TokenMetrics, check_inputs
from harmonic_sft.ops.reference import distance_logits, loss_from_logits

_DEFAULT = LossOptions()


def distance_cross_entropy(
    hidden_states: Tensor,
    prototypes: Tensor,
    labels: Tensor,
    *,
    h_exp: float | Tensor,
    unit_sphere: bool = True,
    eps: float = 1e-6,
    options: LossOptions = _DEFAULT,
    impl: Impl = "auto",
) -> Tensor:
    """Return the harmonic loss of each token, without logits for all of them at once.

    p_j is proportional to (d_j ** 2 + eps) ** h_exp. A whole h_exp costs a few multiplications
    per logit, any other an exponential and a logarithm; changing it recompiles nothing. The
    label's distance and those of near prototypes are taken by direct difference, so that confident
    tokens and tokens near a wrong prototype keep their digits.

    | impl      | what it is                                              | "auto" takes it      |
    |-----------|---------------------------------------------------------|----------------------|
    | reference | the definition: dense logits, autograd, any derivative  | never                |
    | chunked   | token chunks x vocabulary tiles, on a CPU in C if there | CPU, other devices   |
    |           | is a compiler, else in PyTorch (`LossOptions.gemm`)     |                      |
    | triton    | kernels that keep 16-bit or float32 weights of a chunk  | CUDA with Triton     |

    With `loss.sum()` (and, on the CPU, any reduction that treats tokens alike, like `mean`) the
    backward pass only scales what the forward pass made; any other upstream gradient costs a
    fourth matrix product. Weight tokens through `options.token_weights` instead.

    Args:
        hidden_states: `[N, D]`.
        prototypes: `[V, D]`.
        labels: `[N]`, every one a class in `[0, V)`; `[N, K]` with `options.target_weights`.
        h_exp: Below 0; a tensor of no axis to learn it. Acts on the squared distance (the paper's
            n is -2 * h_exp).
        unit_sphere: Normalize both sides; gradients are then tangent to the sphere.
        eps: Added to d ** 2, in squared units of the hidden states.
        options: Weights, bias, smoothing, soft targets and how gradients are made.
        impl: See the table.

    Returns:
        `[N]`, in nats, float32 or better.

    Raises:
        ValueError: Shapes, dtypes, devices, labels (on the CPU) or an option are off.

    Source:
        Baek et al. 2025, Harmonic Loss Trains Interpretable AI Models, arXiv:2502.01628, Eq. 2,
        with h_exp on the squared distance and eps added. Chunked gradients in the forward pass:
        Hsu et al. 2024, Liger Kernel, arXiv:2410.10989; tiles instead of logits: Wijmans et al.
        2024, Cut Your Losses, arXiv:2411.09009, without its gradient filter, which would drop the
        heavy tails of this loss.
    """
    kind = "sphere" if unit_sphere else "euclidean"
    inputs = (hidden_states, prototypes, labels)
    return _cross_entropy(inputs, kind, h_exp, eps, options, impl, with_metrics=False)[0]


def linear_cross_entropy(
    hidden_states: Tensor,
    prototypes: Tensor,
    labels: Tensor,
    *,
    options: LossOptions = _DEFAULT,
    impl: Impl = "auto",
) -> Tensor:
    """Return the cross-entropy of logits hidden_states @ prototypes.T, made like the distances'.

    For heads to be compared on equal terms. `options.class_bias` is the layer's bias.

    Args:
        hidden_states: `[N, D]`.
        prototypes: `[V, D]`, the weight of the output layer.
        labels: As in `distance_cross_entropy`.
        options: As there.
        impl: As there.

    Returns:
        `[N]`, in nats, float32 or better.

    Raises:
        ValueError: Shapes, dtypes, devices, labels (on the CPU) or an option are off.
    """
    inputs = (hidden_states, prototypes, labels)
    return _cross_entropy(inputs, "linear", -1.0, 0.0, options, impl, with_metrics=False)[0]


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
    kind = "sphere" if unit_sphere else "euclidean"
    inputs = (hidden_states, prototypes, labels)
    return _cross_entropy(inputs, kind, h_exp, eps, options, impl, with_metrics=True)


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
    inputs = (hidden_states, prototypes, labels)
    return _cross_entropy(inputs, "linear", -1.0, 0.0, options, impl, with_metrics=True)


def _cross_entropy(
    inputs: tuple[Tensor, Tensor, Tensor],
    kind: str,
    h_exp: float | Tensor,
    eps: float,
    options: LossOptions,
    impl: str,
    *,
    with_metrics: bool,
) -> tuple[Tensor, TokenMetrics]:
    hidden_states, prototypes, labels = inputs
    check_inputs(hidden_states, prototypes, labels, options, impl)
    if kind != "linear" and eps <= 0:
        raise ValueError(f"eps: expected a number above 0, got {eps}")
    if isinstance(h_exp, Tensor) and h_exp.dim():
        raise ValueError(f"h_exp: expected a number or a tensor of no axis, got {h_exp.shape}")
    if impl == "reference":
        value = h_exp.item() if isinstance(h_exp, Tensor) else h_exp
        if not -math.inf < value < 0:
            raise ValueError(f"h_exp: expected a number below 0, got {value}")
        return _reference(inputs, kind, h_exp, eps, options)
    impl = _resolve(impl, hidden_states, prototypes)
    bias = options.class_bias
    if not isinstance(h_exp, Tensor):  # this product is what torch.compile keeps symbolic
        h_exp = h_exp * torch.ones((), dtype=torch.float64, device="cpu")
    tensors = (hidden_states, prototypes, bias, h_exp)
    enabled = torch.is_grad_enabled()
    needs = tuple(enabled and tensor is not None and tensor.requires_grad for tensor in tensors)
    arguments = Arguments(
        *inputs,
        options.target_weights,
        options.token_weights,
        bias,
        h_exp,
        kind,
        eps,
        options.label_smoothing,
        options.z_loss,
        needs,
        _are_early(needs, kind, options, impl),
        with_metrics,
        options.gradient_dtype,
        options.gemm,
        impl,
        "" if options.group is None else options.group.group_name,
    )
    results = Results(*_operator(kind)(*arguments))
    metrics = TokenMetrics(
        results.log_probs, results.log_normalizer, results.entropy, results.predictions
    )
    return results.loss, metrics


def _operator(kind: str) -> Any:
    return linear_op if kind == "linear" else distance_op


def _resolve(impl: str, hidden_states: Tensor, prototypes: Tensor) -> str:
    """Return "chunked" or "triton" for what was asked.

    Raises:
        ValueError: Triton cannot serve these tensors on this machine.
    """
    if impl == "chunked":
        return impl
    floats = (torch.float32, torch.bfloat16, torch.float16)
    served = hidden_states.dtype in floats and prototypes.dtype in floats
    there = find_spec("triton") is not None
    if impl == "auto":
        on_gpu = hidden_states.device.type == "cuda"
        return "triton" if on_gpu and served and there else "chunked"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not (there and served and (hidden_states.device.type == "cuda" or interpreted)):
        raise ValueError(
            "impl: expected reference or chunked, since triton needs a GPU and 16- or 32-bit "
            f"floats, got triton with {hidden_states.dtype} on {hidden_states.device}"
        )
    return impl


def _are_early(needs: tuple[bool, ...], kind: str, options: LossOptions, impl: str) -> bool:
    """Whether gradients are made in the forward pass, from weights or scores of a chunk."""
    wanted = options.gradients == "forward" and any(needs[:3])
    biased = needs[2] and kind != "linear"  # weights are divided by distances there
    from_weights = not biased and options.label_smoothing == 0
    return wanted and (from_weights or impl == "chunked")


def _reference(
    inputs: tuple[Tensor, Tensor, Tensor],
    kind: str,
    h_exp: float | Tensor,
    eps: float,
    options: LossOptions,
) -> tuple[Tensor, TokenMetrics]:
    hidden_states, prototypes, labels = inputs
    dtype = torch.promote_types(hidden_states.dtype, prototypes.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    labels = labels.unsqueeze(1) if options.target_weights is None else labels
    with torch.autocast(hidden_states.device.type, enabled=False):
        hidden_states, prototypes = hidden_states.to(dtype), prototypes.to(dtype)
        if kind == "linear":
            logits = F.linear(hidden_states, prototypes)  # [N, V]
        else:
            logits = distance_logits(
                hidden_states,
                prototypes,
                h_exp,
                unit_sphere=kind == "sphere",
                eps=eps,
                labels=labels if labels.shape[1] == 1 else None,
            )
        return loss_from_logits(logits, labels, options)
