"""Harmonic models: any backbone under one geometry-aware output head."""

import copy
import functools
import os
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils import can_return_tuple

from .backbones import settle_quantized_
from .bases import Base, copy_head_, load_base
from .configuration_harmonic import HarmonicConfig
from .head import Head, keep_precision
from .heads import build_head, resized_head
from .modeling_backbone import HarmonicModel, HarmonicPreTrainedModel
from .objective import LossFunction, mean_token_loss, negative_log_likelihood

INITS = ("input_embeddings", "output_embeddings", "base_head")


class HarmonicHeadModel(HarmonicPreTrainedModel):
    """A backbone and a head: what the models for every task share.

    A task says how many classes its head has, what of the hidden states the head sees (`select`),
    and how a base becomes such a model (`from_base`).

    Attributes:
        model: The backbone.
        dist_head: The head, in float32.
        loss_fn: What `forward` minimizes: maps head, `[N, D]` and labels `[N]` to `[N]`.
        is_causal: Whether position t predicts token t + 1.
    """

    is_causal: ClassVar[bool] = False

    def __init__(self, config: HarmonicConfig):
        super().__init__(config)
        self.model = HarmonicModel(config)
        self._supports_flex_attn = self.model._supports_flex_attn
        self.dist_head: Head = build_head(
            config.head,
            hidden_size=config.text_config.hidden_size,
            vocab_size=self.num_classes(config),
        )
        self.loss_fn: LossFunction = negative_log_likelihood
        self._set_tied_keys()
        self.post_init()

    @staticmethod
    def num_classes(config: HarmonicConfig) -> int:
        """Return V, the number of classes of the head: the tokens, unless a task has its own."""
        return config.text_config.vocab_size

    def select(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return what the head sees, one vector for each label: every position, by default.

        Args:
            hidden_states: `[B, T, D]`, the backbone's last.
            attention_mask: `[B, T]`, 1 = attend; None is all ones.

        Returns:
            `[B, T, D]`.
        """
        return hidden_states

    def targets(self, labels: Tensor) -> Tensor:
        """Return the labels of what `select` leaves: all, in their shape, by default."""
        return labels

    def class_embeddings(self) -> Tensor:
        """Return what says how alike two classes are, `[V, D]`: by default the prototypes."""
        return self.dist_head.prototypes

    @classmethod
    def _around(
        cls,
        base: Base,
        head: dict[str, Any] | None,
        *,
        embeddings: Tensor | None = None,
        keep_head: bool = False,
        **fields: Any,
    ) -> Self:
        """Build the model around a loaded base, with a new head in evaluation mode.

        Args:
            base: What `load_base` returned.
            head: `{"name": ..., fields...}`; None is a `DistLayer` on the unit sphere.
            embeddings: What the prototypes start at, `[V, D]`; None keeps them random.
            keep_head: Give the head all weights of the base's own.
            fields: Further ones of the configuration.
        """
        head = dict(head or {"name": "dist"})
        config = HarmonicConfig(
            text_config=base.backbone.config,
            head=head,
            architectures=[cls.__name__],
            **base.origin,
            **fields,
        )
        with torch.device("meta"):
            model = cls(config)
        model.model.backbone = base.backbone
        model.dist_head = build_head(
            head, hidden_size=config.text_config.hidden_size, vocab_size=cls.num_classes(config)
        ).to(base.backbone.device)
        vars(model)["hf_quantizer"] = vars(base.backbone).get("hf_quantizer")
        settle_quantized_(model)
        if keep_head:
            copy_head_(model.dist_head, base)
        elif embeddings is not None:
            model.dist_head.initialize_(embeddings)
        model.config.head = model.dist_head.settings()
        if model.config.tie_word_embeddings:
            model._prepare_tied_embeddings()
        model.tie_weights()
        return model.eval()

    def _loss(
        self,
        hidden_states: Tensor,
        labels: Tensor | None,
        label_positions: Tensor | None,
        label_weights: Tensor | None,
        num_items_in_batch: Tensor | int | None,
        *,
        shifts: bool = False,
    ) -> Tensor | None:
        """Return the mean loss of hidden states `[B, T, D]`, None without labels `[B, T]`."""
        if labels is None:
            return None
        return mean_token_loss(
            self.loss_fn,
            self.dist_head,
            hidden_states,
            labels,
            label_positions=label_positions,
            label_weights=label_weights,
            num_items_in_batch=num_items_in_batch,
            causal=shifts,
        )

    def _needs_logits(self, labels: Tensor | None, asked: bool | None) -> bool:
        """Whether to return logits: always without labels, otherwise if asked or not training."""
        return labels is None or (not self.training if asked is None else asked)

    def _logits(self, hidden_states: Tensor) -> Tensor:
        """Return logits `[B, T, V]` for hidden states `[B, T, D]`."""
        return self.dist_head(hidden_states.flatten(0, 1)).unflatten(0, hidden_states.shape[:2])

    @property
    def h_exp(self) -> float | None:
        """The head's exponent, None for heads without one."""
        return self.config.h_exp

    @h_exp.setter
    def h_exp(self, value: float) -> None:
        self.dist_head.h_exp = value
        self.config.head = self.dist_head.settings()

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Save with the head's settings as they are now, also where only the head was changed."""
        self.config.head = self.dist_head.settings()
        super().save_pretrained(save_directory, *args, **kwargs)

    def renormalize_prototypes_(self) -> None:
        """Bring the prototypes back to norm 1 where the head wants it; tied ones stay."""
        if not self.config.tie_word_embeddings:
            self.dist_head.renormalize_()

    def get_input_embeddings(self) -> nn.Module:
        """Return the backbone's token embeddings."""
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the backbone's token embeddings."""
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> None:
        """Return None: a head of prototypes is not the linear layer that callers expect here."""

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the token embeddings as transformers does, and a head over tokens with them.

        New prototypes are drawn like the old ones. transformers starts new embeddings at their
        mean, which is close to everything: a distance head would give it much probability.

        Args:
            args: Arguments of `PreTrainedModel.resize_token_embeddings`.
            kwargs: Its keyword arguments.
        """
        num_before = len(self.dist_head.weight)
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        num_classes = self.num_classes(self.config)
        if num_classes != num_before:
            if self.config.base_vocab_size is None:
                self.config.base_vocab_size = num_before
            self.dist_head = resized_head(self.dist_head, num_classes)
            self.tie_weights()
        return embeddings

    def _set_tied_keys(self) -> None:
        if self.config.tie_word_embeddings:
            embeddings = self.get_input_embeddings()
            path = next(name for name, module in self.named_modules() if module is embeddings)
            weight = self.dist_head.weight
            own = next(key for key, value in self.dist_head.named_parameters() if value is weight)
            self._tied_weights_keys = {f"dist_head.{own}": f"{path}.weight"}
            # The head's weight is theirs.
            self._keep_in_fp32_modules_strict = {*(self._keep_in_fp32_modules_strict or ()), path}
            self._prepare_tied_embeddings()

    def _prepare_tied_embeddings(self) -> None:
        """Keep the table in float32, as the head, and hand it to a 16-bit body in 16 bits."""
        embeddings = self.get_input_embeddings().float()
        embeddings.register_forward_hook(functools.partial(_in_dtype_of, self.model.backbone))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move all weights; embeddings that are tied to the head stay in float32, as it does."""
        if not self.config.tie_word_embeddings:
            return super()._apply(fn, recurse)
        weight = self.dist_head.weight

        def move(tensor: Tensor) -> Tensor:
            tied = tensor is weight or tensor is weight.grad
            return keep_precision(fn, tensor) if tied else fn(tensor)

        return super()._apply(move, recurse)


def _in_dtype_of(body: nn.Module, embeddings: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Return embeddings in the lowest precision of a body: some layers take no other."""
    return output.to(min((weight.dtype for weight in body.parameters()), key=lambda d: d.itemsize))


class HarmonicLanguageModel(HarmonicHeadModel):
    """A backbone with a head over its tokens: what encoders and decoders share."""

    def class_embeddings(self) -> Tensor:
        """Return the input embeddings `[V, D]`: the classes are tokens."""
        return self.get_input_embeddings().get_parameter("weight")

    @classmethod
    def from_base(
        cls,
        name: str,
        *,
        revision: str | None = None,
        head: dict[str, Any] | None = None,
        init: str = "input_embeddings",
        tie: bool = False,
        dtype: torch.dtype = torch.float32,
        dropout: float | None = None,
    ) -> Self:
        """Put a new head on a pretrained model.

        Args:
            name: A folder or a name on the Hub; also one of our own checkpoints, whose head is
                then replaced.
            revision: A revision on the Hub.
            head: `{"name": ..., fields...}`; default: a `DistLayer` on the unit sphere.
            init: `input_embeddings` copies the token embeddings into the prototypes,
                `output_embeddings` the prototypes of the base's own head; `base_head` keeps all its
                weights, if it is of the same name (`linear` on a published decoder).
            tie: Share the head's weight with the input embeddings.
            dtype: The backbone's dtype; the head is float32.
            dropout: Probability of every dropout of the backbone; default: the base's own.

        Raises:
            ValueError: The checkpoint does not fill the backbone, or has no such head.
        """
        base = load_base(
            name,
            revision,
            head_class=None if init == "input_embeddings" else cls,
            dtype=dtype,
            dropout=dropout,
            is_causal=cls.is_causal,
        )
        return cls.on_base(base, head=head, init=init, tie=tie)

    @classmethod
    def on_base(
        cls,
        base: Base,
        *,
        head: dict[str, Any] | None = None,
        init: str = "input_embeddings",
        tie: bool = False,
    ) -> Self:
        """Put a new head on a loaded base, which is not copied; see `from_base`.

        Raises:
            ValueError: The base has no such head, or embeddings of another width.
        """
        if init not in INITS:
            raise ValueError(f"init: expected one of {list(INITS)}, got {init!r}")
        embeddings: Tensor | None = None
        if init == "input_embeddings":
            embeddings = base.backbone.get_input_embeddings().get_parameter("weight")
        elif init == "output_embeddings":
            if base.head is None:
                raise ValueError(f"init {init}: expected base {base.name} to have a head, got none")
            embeddings = base.head.prototypes
        hidden_size = base.backbone.config.hidden_size
        if embeddings is not None and embeddings.shape[1] != hidden_size:
            raise ValueError(
                f"base {base.name}: expected input embeddings as wide as the hidden states "
                f"({hidden_size}), got {embeddings.shape[1]}"
            )
        model = cls._around(
            base,
            head,
            embeddings=embeddings,
            keep_head=init == "base_head",
            tie_word_embeddings=tie,
            is_causal=cls.is_causal,
        )
        if base.generation_config is not None:
            model.generation_config = copy.deepcopy(base.generation_config)
        return model


class HarmonicForMaskedLM(HarmonicLanguageModel):
    """An encoder with a head that predicts masked tokens."""

    _auto_map: ClassVar[dict[str, str]] = {
        "AutoModelForMaskedLM": "modeling_harmonic.HarmonicForMaskedLM"
    }

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        label_positions: Tensor | None = None,
        label_weights: Tensor | None = None,
        output_logits: bool | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Predict masked tokens.

        Args:
            input_ids: `[B, T]`.
            attention_mask: `[B, T]`, 1 = attend.
            labels: `[B, T]`, -100 where there is nothing to predict. With labels only the
                labelled positions reach the head.
            num_items_in_batch: Divides the summed loss; see `mean_token_loss`.
            label_positions: `[N]`, from `scored_positions`; saves a wait for the device.
            label_weights: Of each label, as `labels`; each loss is multiplied by its own.
            output_logits: Return logits beside the loss. Default: not in training mode, where the
                logits of every position would be the largest tensor.
            kwargs: The backbone's further arguments (`position_ids`, ...).

        Returns:
            `loss` in nats, with labels; `logits` `[B, T, V]`, as `output_logits` says.
        """
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        hidden_states = outputs.last_hidden_state  # [B, T, D]
        needs_logits = self._needs_logits(labels, output_logits)
        return MaskedLMOutput(
            loss=self._loss(
                hidden_states, labels, label_positions, label_weights, num_items_in_batch
            ),
            logits=self._logits(hidden_states) if needs_logits else None,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
