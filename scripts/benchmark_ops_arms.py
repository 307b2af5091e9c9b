"""What `benchmark_ops` measures: the fused losses, their peers and the bare matrix products."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.loss.loss_utils import ForMaskedLMLoss

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
        """Draw leaves whose linear logits have a standard deviation of 1.

        The prototypes have a dtype of their own, if it is given.
        """
        given: dict[str, Any] = {
            "generator": torch.Generator(device).manual_seed(0),
            "device": device,
        }
        num_tokens, hidden_size, vocab_size = sizes
        hidden_states = torch.randn(num_tokens, hidden_size, **given)
        prototypes = torch.randn(vocab_size, hidden_size, **given).mul_(hidden_size**-0.5)
        labels = torch.randint(vocab_size, (num_tokens,), **given)
        return cls(
            hidden_states.to(dtype).requires_grad_(),
            prototypes.to(prototype_dtype or dtype).requires_grad_(),
            labels,
        )

    def clear(self) -> None:
        """Free the gradients."""
        self.hidden_states.grad = self.prototypes.grad = None

    @property
    def gradient_bytes(self) -> int:
        """The least that a step has to allocate."""
        return self.hidden_states.nbytes + self.prototypes.nbytes


@dataclass(frozen=True)
class Arm:
    """Forward and backward pass of a mean loss. `prepare` is not timed, calling it is.

    Attributes:
        loss_fn: The loss; `Unavailable` if what it needs is not installed.
        is_ours: Whether this package makes it. To others the prototypes come in the dtype of the
            hidden states, as under autocast.
        products: How many matrix products it is measured against.
        devices: Where it applies.
    """

    loss_fn: LossFn
    is_ours: bool = True
    products: int = 3
    devices: tuple[str, ...] = ("cpu", "cuda")

    def prepare(self, inputs: Inputs) -> None:
        """Free the gradients of the step before."""
        inputs.clear()

    def __call__(self, inputs: Inputs) -> None:
        """Make the loss and its gradients."""
        states, prototypes, labels = inputs
        if not self.is_ours:
            prototypes = prototypes.to(states.dtype)
        self.loss_fn(states, prototypes, labels).backward()


class BareProducts:
    """The three matrix products of a loss by `torch.mm`, in the dtype of the hidden states.

    Classes are added up to a multiple of 64: on a GPU products of an odd number take several times
    as long, which is no floor.
    """

    is_ours, products, devices = False, 3, ("cpu", "cuda")

    def prepare(self, inputs: Inputs) -> None:
        """Allocate and touch all that the products write to."""
        self.hidden_states = inputs.hidden_states.detach()
        padding = (0, 0, 0, -len(inputs.prototypes) % 64)
        prototypes = inputs.prototypes.detach().to(self.hidden_states.dtype)
        self.prototypes = F.pad(prototypes, padding)
        self.gradients = torch.zeros_like(self.hidden_states), torch.zeros_like(self.prototypes)
        self.logits = self.hidden_states.new_zeros(len(inputs.labels), len(self.prototypes))

    def release(self) -> None:
        """Free all that `prepare` made."""
        vars(self).clear()

    def __call__(self, inputs: Inputs) -> None:
        """Multiply."""
        torch.mm(self.hidden_states, self.prototypes.T, out=self.logits)
        torch.mm(self.logits, self.prototypes, out=self.gradients[0])
        torch.mm(self.logits.T, self.hidden_states, out=self.gradients[1])


DISTANCE: dict[str, Any] = {"h_exp": -14.0, "unit_sphere": False}


def _distance(**settings: Any) -> LossFn:
    return partial(distance_cross_entropy, **{**DISTANCE, "reduction": "mean", **settings})


def _learned_exponent(hidden_states: Tensor, prototypes: Tensor, labels: Tensor) -> Tensor:
    h_exp = torch.full((), -14.0, device=labels.device, requires_grad=True)
    return _distance(h_exp=h_exp)(hidden_states, prototypes, labels)


def _with_metrics(hidden_states: Tensor, prototypes: Tensor, labels: Tensor) -> Tensor:
    loss, _ = distance_cross_entropy_with_metrics(hidden_states, prototypes, labels, **DISTANCE)
    return loss.sum() / len(labels)


def _linear(**settings: Any) -> LossFn:
    return partial(linear_cross_entropy, reduction="mean", **settings)


def _linear_bias(hidden_states: Tensor, prototypes: Tensor, labels: Tensor) -> Tensor:
    bias = prototypes.new_zeros(len(prototypes), requires_grad=True)
    loss_fn = _linear(options=LossOptions(class_bias=bias))
    return loss_fn(hidden_states, prototypes, labels)


def _distilled(hidden_states: Tensor, prototypes: Tensor, labels: Tensor) -> Tensor:
    logits = DistanceLogits(hidden_states, prototypes, -14.0, unit_sphere=False, eps=1e-6)
    second = (prototypes.detach(), hidden_states.detach(), None)
    loss = chunked_loss(logits, labels, stage="distillation", second=second, mix=(0.5, 0.5))
    return loss.loss.sum() / len(labels)


def _transported(
    hidden_states: Tensor, prototypes: Tensor, labels: Tensor, *, moving: bool
) -> Tensor:
    points = prototypes if moving else prototypes.detach()
    logits, second = AffineLogits(hidden_states, prototypes), (points, None, None)
    loss = chunked_loss(logits, labels, stage="transport", second=second, mix=(1.0, 0.1))
    return loss.loss.sum() / len(labels)


def _transformers(hidden_states: Tensor, prototypes: Tensor, labels: Tensor) -> Tensor:
    return ForMaskedLMLoss(F.linear(hidden_states, prototypes), labels, len(prototypes))


def _torch_loss() -> Callable[..., Tensor]:
    if not hasattr(F, "linear_cross_entropy"):
        raise Unavailable(f"torch {torch.__version__} has no F.linear_cross_entropy")
    return F.linear_cross_entropy


def _torch_linear(*inputs: Tensor) -> Tensor:
    return _torch_loss()(*inputs)


def _torch_chunked(*inputs: Tensor) -> Tensor:
    loss_fn = _torch_loss()
    return loss_fn(*inputs, options=torch.nn.LinearCrossEntropyOptions())


@cache
def _compiled() -> LossFn:
    return torch.compile(linear_full_logits, dynamic=False)


@cache
def _liger_loss() -> LossFn:
    return _import("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()


def _liger(hidden_states: Tensor, prototypes: Tensor, labels: Tensor) -> Tensor:
    return _liger_loss()(prototypes, hidden_states, labels)


def _cut_cross_entropy(hidden_states: Tensor, prototypes: Tensor, labels: Tensor) -> Tensor:
    impl = "cce" if hidden_states.is_cuda else "torch_compile"
    loss_fn = _import("cut_cross_entropy").linear_cross_entropy
    return loss_fn(hidden_states, prototypes, labels, impl=impl)


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unavailable(str(error)) from error


SMOOTHING, BARE = LossOptions(label_smoothing=0.1), BareProducts()
ARMS: dict[str, Arm | BareProducts] = {
    BASELINE: Arm(linear_full_logits, is_ours=False),
    # ForCausalLMLoss is the same but for the shift.
    "transformers ForMaskedLMLoss": Arm(_transformers, is_ours=False),
    "torch F.linear_cross_entropy": Arm(_torch_linear, is_ours=False),
    "torch F.linear_cross_entropy, chunked": Arm(_torch_chunked, is_ours=False),
    "linear, torch.compile": Arm(lambda *inputs: _compiled()(*inputs), is_ours=False),
    "Liger": Arm(_liger, is_ours=False, devices=("cuda",)),
    "cut-cross-entropy": Arm(_cut_cross_entropy, is_ours=False),
    "linear, full logits, smoothing": Arm(
        partial(linear_full_logits, label_smoothing=0.1), is_ours=False
    ),
    "harmonic, full logits": Arm(harmonic_full_logits, is_ours=False),
    # What a GPU computes by our kernels has arms of its own; the options take what users get.
    "linear, chunked": Arm(_linear(impl="chunked"), devices=("cpu",)),
    "linear, bias": Arm(_linear_bias),
    "linear, smoothing": Arm(_linear(options=SMOOTHING)),
    "harmonic, reference": Arm(_distance(impl="reference")),
    "harmonic, chunked": Arm(_distance(impl="chunked"), devices=("cpu",)),
    "harmonic sphere, chunked": Arm(_distance(unit_sphere=True, impl="chunked"), devices=("cpu",)),
    "harmonic h_exp=-7.3, chunked": Arm(_distance(h_exp=-7.3, impl="chunked"), devices=("cpu",)),
    "harmonic, smoothing": Arm(_distance(options=SMOOTHING)),
    "harmonic, learned h_exp": Arm(_learned_exponent),
    "harmonic, metrics": Arm(_with_metrics),
    "harmonic, recompute": Arm(_distance(options=LossOptions(gradients="recompute")), products=4),
    "harmonic, distilled": Arm(_distilled, products=4),
    "linear, transport on fixed points": Arm(partial(_transported, moving=False), products=4),
    "linear, transport on its prototypes": Arm(partial(_transported, moving=True), products=6),
    "linear, triton": Arm(_linear(impl="triton"), devices=("cuda",)),
    "harmonic, triton": Arm(_distance(impl="triton"), devices=("cuda",)),
    "harmonic sphere, triton": Arm(_distance(unit_sphere=True, impl="triton"), devices=("cuda",)),
    FLOOR: BARE,
}
