"""What `benchmark_ops` measures: the fused losses, their peers and the bare matrix products."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from harmonic_sft.models import AffineLogits, DistanceLogits
from harmonic_sft.ops import (
    Impl,
    LossOptions,
    chunked_loss,
    distance_cross_entropy,
    distance_cross_entropy_with_metrics,
    linear_cross_entropy,
)
from tests.ops.baselines import harmonic_full_logits, linear_full_logits

BASELINE = "linear, full logits"
FLOOR = "three bare products"

LossFn = Callable[[Tensor, Tensor, Tensor], Tensor]


class Unavailable(Exception):
    """An arm cannot run here; the message says why."""


class Sizes(NamedTuple):
    """The shape of a loss."""

    num_tokens: int
    hidden_size: int
    vocab_size: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `NxDxV`.

        Raises:
            ValueError: Not three counts above 0.
        """
        counts = [int(part) if part.isdecimal() else 0 for part in text.strip().split("x")]
        if len(counts) != 3 or min(counts) < 1:
            raise ValueError(f"rows: expected NxDxV, such as 1638x768x30522, got {text!r}")
        return cls(*counts)

    def __str__(self) -> str:
        return "x".join(map(str, self))


class Inputs(NamedTuple):
    """Leaf tensors of a loss: hidden states `[N, D]`, prototypes `[V, D]`, labels `[N]`."""

    hidden_states: Tensor
    prototypes: Tensor
    labels: Tensor

    @classmethod
    def draw(
        cls,
        sizes: Sizes,
        device: torch.device,
        dtype: torch.dtype,
        prototype_dtype: torch.dtype | None = None,
    ) -> Self:
        """Draw random inputs whose linear logits have a standard deviation of 1."""
        generator = torch.Generator().manual_seed(0)
        num_tokens, hidden_size, vocab_size = sizes
        hidden_states = torch.randn(num_tokens, hidden_size, generator=generator)
        prototypes = torch.randn(vocab_size, hidden_size, generator=generator)
        labels = torch.randint(vocab_size, (num_tokens,), generator=generator)
        prototypes.mul_(hidden_size**-0.5)
        return cls.place(hidden_states, prototypes, labels, device, dtype, prototype_dtype)

    @classmethod
    def place(
        cls,
        hidden_states: Tensor,
        prototypes: Tensor,
        labels: Tensor,
        device: torch.device,
        dtype: torch.dtype,
        prototype_dtype: torch.dtype | None = None,
    ) -> Self:
        """Make leaves on a device; the prototypes in a dtype of their own, if it is given."""
        return cls(
            hidden_states.to(device, dtype).requires_grad_(),
            prototypes.to(device, prototype_dtype or dtype).requires_grad_(),
            labels.to(device),
        )

    def clear(self) -> None:
        """Free the gradients."""
        self.hidden_states.grad = self.prototypes.grad = None

    @property
    def is_mixed(self) -> bool:
        """Whether 16-bit hidden states meet float32 prototypes."""
        return self.hidden_states.dtype != self.prototypes.dtype

    @property
    def gradient_bytes(self) -> int:
        """The least that a step has to allocate."""
        return self.hidden_states.nbytes + self.prototypes.nbytes


class Step(Protocol):
    """One measured step: `prepare` is not timed, calling it is."""

    def prepare(self, inputs: Inputs) -> None:
        """Bring the gradients into the state in which the step wants them."""

    def __call__(self, inputs: Inputs) -> None:
        """Make the gradients."""


@dataclass(frozen=True)
class LossStep:
    """Forward and backward pass of a mean loss.

    Attributes:
        loss_fn: The loss.
        casts: Prototypes are brought to the dtype of the hidden states, as autocast does.
    """

    loss_fn: LossFn
    casts: bool = False

    def prepare(self, inputs: Inputs) -> None:
        """Free the gradients of the step before."""
        inputs.clear()

    def __call__(self, inputs: Inputs) -> None:
        """Make the loss and its gradients."""
        states, prototypes, labels = inputs
        if self.casts:
            prototypes = prototypes.to(states.dtype)
        self.loss_fn(states, prototypes, labels).backward()


class BareProducts:
    """The three matrix products of a loss by `torch.mm`, in the dtype of the hidden states."""

    def prepare(self, inputs: Inputs) -> None:
        """Allocate and touch all that the products write to."""
        self.hidden_states = inputs.hidden_states.detach()
        self.prototypes = inputs.prototypes.detach().to(self.hidden_states.dtype)
        self.gradients = torch.zeros_like(self.hidden_states), torch.zeros_like(self.prototypes)
        self.logits = self.hidden_states.new_zeros(len(inputs.labels), len(self.prototypes))

    def __call__(self, inputs: Inputs) -> None:
        """Multiply."""
        torch.mm(self.hidden_states, self.prototypes.T, out=self.logits)
        torch.mm(self.logits, self.prototypes, out=self.gradients[0])
        torch.mm(self.logits.T, self.hidden_states, out=self.gradients[1])


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A loss to be measured.

    Attributes:
        build_fn: Makes the mean loss for a device; `Unavailable` if it cannot.
        is_ours: Whether this package makes it.
        head: Which function it computes.
        products: How many matrix products it is measured against.
        h_exp: Of a distance head.
        label_smoothing: Share of the target spread over all classes.
        accurate: Its gradient is that of the cross-entropy.
        devices: Where it applies.
        compiles: The first step at a size compiles for that size.
    """

    build_fn: Callable[[torch.device], LossFn]
    is_ours: bool = True
    head: Literal["linear", "euclidean", "sphere"] = "euclidean"
    products: int = 3
    h_exp: float = -14.0
    label_smoothing: float = 0.0
    accurate: bool = True
    devices: tuple[str, ...] = ("cpu", "cuda")
    compiles: bool = False


def _distance(
    h_exp: float | Tensor = -14.0,
    unit_sphere: bool = False,
    impl: Impl = "chunked",
    options: LossOptions | None = None,
) -> Callable[[torch.device], LossFn]:
    def mean_loss(hidden_states: Tensor, prototypes: Tensor, labels: Tensor) -> Tensor:
        return distance_cross_entropy(
            hidden_states,
            prototypes,
            labels,
            h_exp=h_exp,
            unit_sphere=unit_sphere,
            reduction="mean",
            options=options or LossOptions(),
            impl=impl,
        )

    return lambda device: mean_loss


def _with_metrics(device: torch.device) -> LossFn:
    def mean_loss(hidden_states: Tensor, prototypes: Tensor, labels: Tensor) -> Tensor:
        loss, _ = distance_cross_entropy_with_metrics(
            hidden_states, prototypes, labels, h_exp=-14.0, unit_sphere=False, impl="chunked"
        )
        return loss.sum() / len(labels)

    return mean_loss


def _learned_exponent(device: torch.device) -> LossFn:
    h_exp = torch.tensor(-14.0, device=device, requires_grad=True)
    return _distance(h_exp)(device)


def _linear(options: LossOptions | None = None) -> Callable[[torch.device], LossFn]:
    def mean_loss(hidden_states: Tensor, prototypes: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden_states,
            prototypes,
            labels,
            reduction="mean",
            options=options or LossOptions(),
            impl="chunked",
        )

    return lambda device: mean_loss


def _linear_bias(device: torch.device) -> LossFn:
    def mean_loss(hidden_states: Tensor, prototypes: Tensor, labels: Tensor) -> Tensor:
        bias = prototypes.new_zeros(len(prototypes), requires_grad=True)
        return _linear(LossOptions(class_bias=bias))(device)(hidden_states, prototypes, labels)

    return mean_loss


def _distilled(device: torch.device) -> LossFn:
    def mean_loss(hidden_states: Tensor, prototypes: Tensor, labels: Tensor) -> Tensor:
        logits = DistanceLogits(hidden_states, prototypes, -14.0, unit_sphere=False, eps=1e-6)
        second = (prototypes.detach(), hidden_states.detach(), None)
        loss = chunked_loss(logits, labels, stage="distillation", second=second, mix=(0.5, 0.5))
        return loss.loss.sum() / len(labels)

    return mean_loss


def _transported(*, moving: bool) -> Callable[[torch.device], LossFn]:
    def mean_loss(hidden_states: Tensor, prototypes: Tensor, labels: Tensor) -> Tensor:
        points = prototypes if moving else prototypes.detach()
        logits = AffineLogits(hidden_states, prototypes)
        second = (points, None, None)
        loss = chunked_loss(logits, labels, stage="transport", second=second, mix=(1.0, 0.1))
        return loss.loss.sum() / len(labels)

    return lambda device: mean_loss


def _compiled_linear(device: torch.device) -> LossFn:
    return torch.compile(linear_full_logits, dynamic=False)


def _transformers(device: torch.device) -> LossFn:
    from transformers.loss.loss_utils import ForMaskedLMLoss

    def mean_loss(hidden_states: Tensor, prototypes: Tensor, labels: Tensor) -> Tensor:
        return ForMaskedLMLoss(F.linear(hidden_states, prototypes), labels, len(prototypes))

    return mean_loss


def _torch_linear(device: torch.device) -> LossFn:
    try:
        return F.linear_cross_entropy
    except AttributeError as error:
        raise Unavailable(f"torch {torch.__version__} does not have it") from error


def _torch_chunked(device: torch.device) -> LossFn:
    try:
        options = torch.nn.LinearCrossEntropyOptions()
    except AttributeError as error:
        raise Unavailable(f"torch {torch.__version__} does not have it") from error
    return partial(F.linear_cross_entropy, options=options)


def _liger(device: torch.device) -> LossFn:
    loss = _import("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
    return lambda hidden_states, prototypes, labels: loss(prototypes, hidden_states, labels)


def _cut_cross_entropy(device: torch.device) -> LossFn:
    impl = "cce" if device.type == "cuda" else "torch_compile"
    return partial(_import("cut_cross_entropy").linear_cross_entropy, impl=impl)


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unavailable(str(error)) from error


ARMS = {
    BASELINE: Arm(build_fn=lambda device: linear_full_logits, is_ours=False, head="linear"),
    # ForCausalLMLoss is the same but for the shift.
    "transformers ForMaskedLMLoss": Arm(build_fn=_transformers, is_ours=False, head="linear"),
    "torch F.linear_cross_entropy": Arm(build_fn=_torch_linear, is_ours=False, head="linear"),
    "torch F.linear_cross_entropy, chunked": Arm(
        build_fn=_torch_chunked, is_ours=False, head="linear"
    ),
    "linear, torch.compile": Arm(
        build_fn=_compiled_linear, is_ours=False, head="linear", compiles=True
    ),
    "Liger": Arm(build_fn=_liger, is_ours=False, head="linear", devices=("cuda",)),
    "cut-cross-entropy": Arm(
        build_fn=_cut_cross_entropy, is_ours=False, head="linear", compiles=True
    ),
    "linear, full logits, smoothing": Arm(
        build_fn=lambda device: partial(linear_full_logits, label_smoothing=0.1),
        is_ours=False,
        head="linear",
        label_smoothing=0.1,
    ),
    "harmonic, full logits": Arm(build_fn=lambda device: harmonic_full_logits, is_ours=False),
    "linear, chunked": Arm(build_fn=_linear(), head="linear"),
    "linear, bias": Arm(build_fn=_linear_bias, head="linear"),
    "linear, smoothing": Arm(
        build_fn=_linear(LossOptions(label_smoothing=0.1)), head="linear", label_smoothing=0.1
    ),
    "harmonic, reference": Arm(build_fn=_distance(impl="reference")),
    "harmonic, chunked": Arm(build_fn=_distance()),
    "harmonic sphere, chunked": Arm(build_fn=_distance(unit_sphere=True), head="sphere"),
    "harmonic h_exp=-7.3, chunked": Arm(build_fn=_distance(-7.3), h_exp=-7.3),
    "harmonic, smoothing": Arm(
        build_fn=_distance(options=LossOptions(label_smoothing=0.1)), label_smoothing=0.1
    ),
    "harmonic, learned h_exp": Arm(build_fn=_learned_exponent),
    "harmonic, metrics": Arm(build_fn=_with_metrics),
    "harmonic, recompute": Arm(
        build_fn=_distance(options=LossOptions(gradients="recompute")), products=4
    ),
    "harmonic, distilled": Arm(build_fn=_distilled, products=4, accurate=False),
    "linear, transport on fixed points": Arm(
        build_fn=_transported(moving=False), products=4, head="linear", accurate=False
    ),
    "linear, transport on its prototypes": Arm(
        build_fn=_transported(moving=True), products=6, head="linear", accurate=False
    ),
    "harmonic, bfloat16 gradients": Arm(
        build_fn=_distance(options=LossOptions(gradient_dtype=torch.bfloat16))
    ),
    "harmonic, triton": Arm(build_fn=_distance(impl="triton"), devices=("cuda",)),
    "harmonic sphere, triton": Arm(
        build_fn=_distance(unit_sphere=True, impl="triton"), head="sphere", devices=("cuda",)
    ),
}


def build_step(name: str, device: torch.device) -> Step:
    """Build what `FLOOR` or a name in `ARMS` stands for.

    Raises:
        Unavailable: It does not apply to the device, or something is not installed.
    """
    if name == FLOOR:
        return BareProducts()
    arm = ARMS[name]
    if device.type not in arm.devices:
        raise Unavailable(f"only on {' and '.join(arm.devices)}")
    return LossStep(arm.build_fn(device), casts=not arm.is_ours)
