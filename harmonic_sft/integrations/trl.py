"""TRL's trainers on harmonic decoders: they get log-probabilities from our heads."""

import functools
import types
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any, cast

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedModel

from harmonic_sft.models import (
    AffineLogits,
    DistanceLogits,
    HarmonicForCausalLM,
    Head,
    LazyLogits,
)
from harmonic_sft.models.head import at_least_float32
from harmonic_sft.models.objective import IGNORE_INDEX
from harmonic_sft.ops import LossOptions, by_chunks, chunked_loss

TESTED = ("1.0", "1.16")  # with all patch releases
HOOK = "add_fused_lm_head"  # since 1.15
CHUNKED = "_patch_chunked_ce_lm_head"  # of SFT from 1.4 to 1.14, its default since 1.7
MODULES = (  # where TRL defines HOOK, and the modules that import it
    "trl.trainer.utils",
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "trl.trainer.kto_trainer",
    "trl.trainer.grpo_trainer",
    "trl.trainer.rloo_trainer",
)


def patch() -> None:
    """Let TRL's SFT, DPO, KTO, GRPO and RLOO trainers work on models with a `dist_head`.

    They multiply hidden states by the weight of `get_output_embeddings()`, which a harmonic model
    does not have. Call this before you make a trainer. It replaces one function of TRL,
    `add_fused_lm_head`, for harmonic models alone; all others are treated as before. Before TRL
    1.15 only the SFT trainer needs a patch.

    Raises:
        PackageNotFoundError: TRL is not installed.
        ValueError: Its version is not among the tested ones.
    """
    check_version()
    modules = [import_module(name) for name in MODULES]
    if HOOK not in vars(modules[0]):
        _patch_older(modules[1])
        return
    original = vars(modules[0])[HOOK]
    output_class = vars(modules[0])["FusedCausalLMOutput"]

    @functools.wraps(original)
    def add_head(
        model: PreTrainedModel,
        temperature: float = 1.0,
        cast_lm_head_to_fp32: bool = False,
        outputs: Sequence[str] = ("log_probs",),
    ) -> None:
        if model.config.model_type == "harmonic":  # also where its class came from the Hub
            add_harmonic_head_(model, output_class, temperature=temperature, outputs=outputs)
        else:
            original(model, temperature, cast_lm_head_to_fp32, outputs)

    for module in modules:
        setattr(module, HOOK, add_head)


def _patch_older(sft: types.ModuleType) -> None:
    """Patch the SFT trainer of a TRL before 1.15; the others score labels by the model's logits."""
    trainer, chunked = sft.SFTTrainer, vars(sft).get(CHUNKED)
    compute_loss = trainer.compute_loss

    @functools.wraps(compute_loss)
    def compute_loss_with_logits(self: Any, model: Any, inputs: Any, *args: Any, **kw: Any) -> Any:
        if self.model.config.model_type == "harmonic" and self.args.loss_type == "nll":
            inputs["output_logits"] = True  # a model that trains returns none unless asked
        return compute_loss(self, model, inputs, *args, **kw)

    def add_head(model: PreTrainedModel, *args: Any, **kw: Any) -> None:
        if model.config.model_type == "harmonic":
            add_chunked_head_(model, vars(sft)["_ChunkedCELMHeadOutput"])
        else:
            cast(Callable[..., None], chunked)(model, *args, **kw)

    trainer.compute_loss = compute_loss_with_logits
    setattr(sft, CHUNKED, add_head)
    # Before 1.7 TRL looks up a model's class by its name in transformers.
    setattr(transformers, HarmonicForCausalLM.__name__, HarmonicForCausalLM)


def check_version() -> None:
    """Raise a ValueError for a TRL whose trainers were not tested."""
    first, last = TESTED
    found = version("trl")
    if not Version(first) <= Version(".".join(found.split(".")[:2])) <= Version(last):
        raise ValueError(
            f"trl: expected version {first} to {last}, got {found}. Run pip install 'trl=={last}.*'"
        )


def add_harmonic_head_(
    model: Any, output_class: type, *, temperature: float, outputs: Sequence[str]
) -> None:
    """Give a model a forward pass that takes `fused_lm_head=True` and otherwise runs the old one.

    Args:
        model: A `HarmonicForCausalLM`. Changed in place.
        output_class: What the new forward pass returns: TRL's `FusedCausalLMOutput`.
        temperature: What logits are divided by.
        outputs: Fields of `token_fields`.
    """
    forward = _for_any(model.forward)

    @functools.wraps(type(model).forward)  # `generate` reads its signature
    def harmonic_forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        if not fused_lm_head:
            kwargs |= {"labels": labels, "shift_labels": shift_labels}
            return forward(self, *args, num_items_in_batch=num_items_in_batch, **kwargs)
        if kwargs.get("output_router_logits"):
            raise ValueError("router_aux_loss_coef: expected 0 on a harmonic model, got another")
        kwargs["use_cache"] = False
        hidden_states = self.model(*args, **kwargs).last_hidden_state  # [B, T, D]
        if shift_labels is None:
            assert labels is not None, "TRL scores labels"
            hidden_states, shift_labels = hidden_states[:, :-1], labels[:, 1:]
        mask = shift_labels != IGNORE_INDEX  # [B, T]
        hidden_states = hidden_states[mask.to(hidden_states.device)]
        device = self.dist_head.weight.device
        found = token_fields(
            self.dist_head,
            hidden_states.to(device),
            shift_labels[mask].to(device),
            temperature=temperature,
            outputs=outputs,
        )
        # The fields are attached to the graph even if no label is left.
        fields = {
            name: value.new_zeros(mask.shape).masked_scatter(mask.to(value.device), value)
            for name, value in found.items()
        }
        count = mask.sum().clamp_min(1) if num_items_in_batch is None else num_items_in_batch
        return output_class(
            loss=-fields["log_probs"].sum() / count, label_mask=mask, aux_loss=None, **fields
        )

    model.forward = types.MethodType(harmonic_forward, model)


def add_chunked_head_(model: Any, output_class: type) -> None:
    """Give a model the forward pass that `chunked_nll` of TRL 1.4 to 1.14 needs.

    Args:
        model: A `HarmonicForCausalLM`. Changed in place.
        output_class: TRL's `_ChunkedCELMHeadOutput`, which with labels holds sums over tokens.
    """
    add_harmonic_head_(
        model, types.SimpleNamespace, temperature=1.0, outputs=("entropy", "is_top1")
    )
    forward = _for_any(model.forward)

    @functools.wraps(type(model).forward)
    def chunked_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("labels") is None and kwargs.get("shift_labels") is None:
            return forward(self, *args, **kwargs)
        found = forward(self, *args, fused_lm_head=True, **kwargs)
        return output_class(
            loss=found.loss,
            num_correct_tokens=found.is_top1.sum(),
            entropy_sum=found.entropy.detach().sum(),
            num_valid_tokens=found.label_mask.sum(),
        )

    model.forward = types.MethodType(chunked_forward, model)


def _for_any(forward: Any) -> Callable[..., Any]:
    """Return a model's forward pass as one that takes the model, also a deep copy of it."""
    if isinstance(forward, types.MethodType):
        return forward.__func__
    return lambda model, *args, **kwargs: forward(*args, **kwargs)  # of accelerate's hooks


def token_fields(
    head: Head,
    hidden_states: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    outputs: Sequence[str] = (),
) -> dict[str, Tensor]:
    """Return what TRL asks of each token, without logits for all of them at once.

    Args:
        head: Of the model.
        hidden_states: `[N, D]`.
        labels: `[N]`, every one a class in `[0, V)`.
        temperature: What logits are divided by.
        outputs: Beside `log_probs`: `entropy` in nats, differentiable; `is_top1`, whether the
            label is the most probable class; `mean_logits` over the classes; `log_sum_sq_probs`,
            the log of the sum of squared probabilities. The last two take a pass of their own each.

    Returns:
        Tensors `[N]` by name.
    """

    def measure(name: str) -> Tensor:
        one = functools.partial(_dense_field, name=name, temperature=temperature)
        return by_chunks(one, head, hidden_states, labels)

    fields: dict[str, Tensor] = {}
    lazy = _cooled(head.lazy_logits(hidden_states), temperature)
    if lazy is not None:
        # TRL weighs tokens after this, so gradients made with the losses would be lost.
        options = LossOptions(gradients="recompute")
        found = chunked_loss(lazy, labels, options=options, with_metrics=True)
        sources = [t for t in (hidden_states, *head.parameters()) if t.requires_grad]
        entropy = _Entropy.apply(found.entropy, measure, *sources)
        fields = {
            "log_probs": -found.loss,
            "entropy": entropy,
            "is_top1": found.predictions == labels,
        }
    wanted = {"log_probs", *outputs}
    return {name: fields[name] if name in fields else measure(name) for name in sorted(wanted)}


def _cooled(lazy: LazyLogits | None, temperature: float) -> AffineLogits | DistanceLogits | None:
    """Return lazy logits divided by the temperature; None for other kinds of logits."""
    if isinstance(lazy, DistanceLogits):
        return lazy._replace(h_exp=lazy.h_exp / temperature)
    if isinstance(lazy, AffineLogits):
        bias = None if lazy.bias is None else lazy.bias / temperature
        hidden_states = at_least_float32(lazy.hidden_states)  # 16 bits would round the quotient
        return lazy._replace(hidden_states=hidden_states / temperature, bias=bias)
    return None


def _dense_field(
    head: Head, hidden_states: Tensor, labels: Tensor, *, name: str, temperature: float
) -> Tensor:
    """Return one field `[n]` from the logits of a few tokens."""
    logits = head(hidden_states) / temperature  # [n, V]
    if name == "mean_logits":
        return logits.detach().mean(-1)
    if name == "is_top1":
        return logits.argmax(-1) == labels
    log_probs = logits.log_softmax(-1)
    if name == "log_probs":
        return log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    if name == "entropy":
        return -(log_probs.exp() * log_probs).sum(-1)
    assert name == "log_sum_sq_probs", f"TRL asks for {name}, which no tested version does"
    return (2 * log_probs.detach()).logsumexp(-1)


class _Entropy(torch.autograd.Function):
    """An entropy measured with the loss; its gradients, which few losses need, come on demand."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, measure: Callable[[str], Tensor], *sources: Tensor
    ) -> Tensor:
        ctx.measure = measure
        ctx.save_for_backward(*sources)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            entropy = ctx.measure("entropy")
        found = torch.autograd.grad(entropy, ctx.saved_tensors, upstream, allow_unused=True)
        return (None, None, *found)
