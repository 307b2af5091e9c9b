"""What `benchmark_ops` measures: the fused losses, their peers and the bare matrix products."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from harmonic_sft.models import AffineLogits, DistanceLogits
from harmonic_sft.ops import (
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
BuildFn = Callable[[torch.device], LossFn]


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
    def gradient_bytes(self) -> int:
        """The least that a step has to allocate."""
        return self.hidden_states.nbytes + self.prototypes.nbytes


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


Step = LossStep | BareProducts  # `prepare` is not timed, calling it is


class Arm(NamedTuple):
    """A loss to be measured.

    Attributes:
        build_fn: Makes the mean loss for a device; `Unavailable` if it cannot.
        is_ours: Whether this package makes it.
        products: How many matrix products it is measured against.
        devices: Where it applies.
    """

    build_fn: BuildFn
    is_ours: bool = True
    products: int = 3
    devices: tuple[str, ...] = ("cpu", "cuda")


def _distance(**settings: Any) -> BuildFn:
    given: dict[str, Any] = {
        "h_exp": -14.0,
        "unit_sphere": False,
        "reduction": "mean",
        "impl": "chunked",
    }
    return lambda device: partial(distance_cross_entropy, **given | settings)


def _learned_exponent(device: torch.device) -> LossFn:
    h_exp = torch.tensor(-14.0, device=device, requires_grad=True)
    return _distance(h_exp=h_exp)(device)


def _with_metrics(device: torch.device) -> LossFn:
    def mean_loss(hidden_states: Tensor, prototypes: Tensor, labels: Tensor) -> Tensor:
        loss, _ = distance_cross_entropy_with_metrics(
            hidden_states, prototypes, labels, h_exp=-14.0, unit_sphere=False, impl="chunked"
        )
        return loss.sum() / len(labels)

    return mean_loss


def _linear(**settings: Any) -> BuildFn:
    return lambda device: partial(
        linear_cross_entropy, reduction="mean", impl="chunked", **settings
    )


def _linear_bias(device: torch.device) -> LossFn:
    def mean_loss(hidden_states: Tensor, prototypes: Tensor, labels: Tensor) -> Tensor:
        bias = prototypes.new_zeros(len(prototypes), requires_grad=True)
        loss_fn = _linear(options=LossOptions(class_bias=bias))(device)
        return loss_fn(hidden_states, prototypes, labels)

    return mean_loss


def _distilled(device: torch.device) -> LossFn:
    def mean_loss(hidden_states: Tensor, prototypes: Tensor, labels: Tensor) -> Tensor:
        logits = DistanceLogits(hidden_states, prototypes, -14.0, unit_sphere=False, eps=1e-6)
        second = (prototypes.detach(), hidden_states.detach(), None)
        loss = chunked_loss(logits, labels, stage="distillation", second=second, mix=(0.5, 0.5))
        return loss.loss.sum() / len(labels)

    return mean_loss


def _transported(*, moving: bool) -> BuildFn:
    def mean_loss(hidden_states: Tensor, prototypes: Tensor, labels: Tensor) -> Tensor:
        points = prototypes if moving else prototypes.detach()
        logits = AffineLogits(hidden_states, prototypes)
        second = (points, None, None)
        loss = chunked_loss(logits, labels, stage="transport", second=second, mix=(1.0, 0.1))
        return loss.loss.sum() / len(labels)

    return lambda device: mean_loss


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


SMOOTHING = LossOptions(label_smoothing=0.1)
ARMS = {
    BASELINE: Arm(lambda device: linear_full_logits, is_ours=False),
    # ForCausalLMLoss is the same but for the shift.
    "transformers ForMaskedLMLoss": Arm(_transformers, is_ours=False),
    "torch F.linear_cross_entropy": Arm(_torch_linear, is_ours=False),
    "torch F.linear_cross_entropy, chunked": Arm(_torch_chunked, is_ours=False),
    "linear, torch.compile": Arm(
        lambda device: torch.compile(linear_full_logits, dynamic=False), is_ours=False
    ),
    "Liger": Arm(_liger, is_ours=False, devices=("cuda",)),
    "cut-cross-entropy": Arm(_cut_cross_entropy, is_ours=False),
    "linear, full logits, smoothing": Arm(
        lambda device: partial(linear_full_logits, label_smoothing=0.1), is_ours=False
    ),
    "harmonic, full logits": Arm(lambda device: harmonic_full_logits, is_ours=False),
    "linear, chunked": Arm(_linear()),
    "linear, bias": Arm(_linear_bias),
    "linear, smoothing": Arm(_linear(options=SMOOTHING)),
    "harmonic, reference": Arm(_distance(impl="reference")),
    "harmonic, chunked": Arm(_distance()),
    "harmonic sphere, chunked": Arm(_distance(unit_sphere=True)),
    "harmonic h_exp=-7.3, chunked": Arm(_distance(h_exp=-7.3)),
    "harmonic, smoothing": Arm(_distance(options=SMOOTHING)),
    "harmonic, learned h_exp": Arm(_learned_exponent),
    "harmonic, metrics": Arm(_with_metrics),
    "harmonic, recompute": Arm(_distance(options=LossOptions(gradients="recompute")), products=4),
    "harmonic, distilled": Arm(_distilled, products=4),
    "linear, transport on fixed points": Arm(_transported(moving=False), products=4),
    "linear, transport on its prototypes": Arm(_transported(moving=True), products=6),
    "harmonic, triton": Arm(_distance(impl="triton"), devices=("cuda",)),
    "harmonic sphere, triton": Arm(_distance(unit_sphere=True, impl="triton"), devices=("cuda",)),
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
