"""Harmonic models: any backbone under one geometry-aware output head."""

import os
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils import can_return_tuple

from .backbones import cast_parameters_, load_backbone, load_checked, set_dropout_
from .configuration_harmonic import HarmonicConfig
from .decoders import load_decoder
from .head import Head
from .heads import build_head, resized_head
from .linear_heads import LinearHead
from .modeling_backbone import HarmonicModel, HarmonicPreTrainedModel
from .modeling_neobert import NeoBERTForMaskedLM
from .objective import LossFunction, mean_token_loss, negative_log_likelihood
from .partial import commit_of


class Base(NamedTuple):
    """A loaded base: its backbone, its head if one of ours was asked for, and where it is from."""

    name: str
    backbone: PreTrainedModel
    head: Head | None
    labels: list[str]  # of the head's rows, if it is a classifier's
    origin: dict[str, Any]  # fields of the configuration
    generation_config: GenerationConfig | None = None  # of a decoder


class HarmonicHeadModel(HarmonicPreTrainedModel):
    """A backbone and a head: what the models for every task share.

    A task says how many classes its head has, what of the hidden states the head sees (`select`),
    and how a base becomes such a model (`from_base`).

    Attributes:
        model: The backbone.
        dist_head: The head, in float32.
        loss_fn: What `forward` minimizes: maps head, `[N, D]` and labels `[N]` to `[N]`.
    """

    def __init__(self, config: HarmonicConfig):
        super().__init__(config)
        self.model = HarmonicModel(config)
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
    def _around(cls, base: Base, head: dict[str, Any], **fields: Any) -> Self:
        """Build the model around a loaded base, with a new head in evaluation mode.

        Args:
            base: Of `load_base`.
            head: `{"name": ..., fields...}`.
            fields: Further ones of the configuration.
        """
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
        )
        model.config.head = model.dist_head.settings()
        return model.eval()

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
            args: Of `PreTrainedModel.resize_token_embeddings`.
            kwargs: As well.
        """
        num_before = len(self.dist_head.weight)
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        num_classes = self.num_classes(self.config)
        if num_classes != num_before:
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


class HarmonicForMaskedLM(HarmonicHeadModel):
    """An encoder with a head that predicts masked tokens."""

    _auto_map: ClassVar[dict[str, str]] = {
        "AutoModelForMaskedLM": "modeling_harmonic.HarmonicForMaskedLM"
    }

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
        """Put a new head on a pretrained encoder.

        Args:
            name: A folder or a name on the Hub; also one of our own checkpoints, whose head is
                then replaced.
            revision: A revision on the Hub.
            head: `{"name": ..., fields...}`; default: a `DistLayer` on the unit sphere.
            init: `input_embeddings` copies the token embeddings into the prototypes;
                `base_head` keeps the weights of the base's own head of the same name.
            tie: Share the head's weight with the input embeddings.
            dtype: Of the backbone; the head is float32.
            dropout: Probability of every dropout of the backbone; default: the base's own.

        Raises:
            ValueError: The checkpoint does not fill the backbone, or has no such head.
        """
        head_class = cls if init == "base_head" else None
        base = load_base(name, revision, head_class=head_class, dtype=dtype, dropout=dropout)
        embeddings = base.backbone.get_input_embeddings().get_parameter("weight")
        if embeddings.shape[1] != base.backbone.config.hidden_size:
            raise ValueError(
                f"base {name}: expected input embeddings as wide as the hidden states "
                f"({base.backbone.config.hidden_size}), got {embeddings.shape[1]}"
            )
        model = cls._around(base, dict(head or {"name": "dist"}), tie_word_embeddings=tie)
        if init == "base_head":
            copy_head_(model.dist_head, base)
        elif init == "input_embeddings":
            model.dist_head.initialize_(embeddings)
        else:
            raise ValueError(f"init: expected 'input_embeddings' or 'base_head', got {init!r}")
        model.config.head = model.dist_head.settings()
        model.tie_weights()
        return model

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_logits: bool = False,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Predict masked tokens.

        Args:
            input_ids: `[B, T]`.
            attention_mask: `[B, T]`, 1 = attend.
            labels: `[B, T]`, -100 where there is nothing to predict. With labels only the
                labelled positions reach the head.
            num_items_in_batch: Divides the summed loss; see `mean_token_loss`.
            output_logits: Return logits beside the loss.
            kwargs: The backbone's further arguments (`position_ids`, ...).

        Returns:
            `loss` in nats; `logits` `[B, T, V]` without labels or if asked for.
        """
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        hidden_states = outputs.last_hidden_state  # [B, T, D]
        loss = logits = None
        if labels is not None:
            loss = mean_token_loss(
                self.loss_fn,
                self.dist_head,
                hidden_states,
                labels,
                num_items_in_batch=num_items_in_batch,
            )
        if labels is None or output_logits:
            flat = self.dist_head(hidden_states.flatten(0, 1))  # [B * T, V]
            logits = flat.unflatten(0, hidden_states.shape[:2])
        return MaskedLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def load_base(
    name: str,
    revision: str | None,
    *,
    head_class: type[HarmonicHeadModel] | None,
    dtype: torch.dtype,
    dropout: float | None,
    is_causal: bool = False,
) -> Base:
    """Load what a new head is put on.

    Args:
        name: A folder or a name on the Hub; also one of our own checkpoints.
        revision: A revision on the Hub.
        head_class: What loads a checkpoint of ours with its head, if the head is kept.
        dtype: Of the backbone.
        dropout: Probability of every dropout of the backbone; None is the base's own.
        is_causal: Load a decoder, with the head that it was published with.

    Raises:
        ValueError: The checkpoint does not fill the backbone, or is none of this kind.
    """
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    if dropout is not None:
        set_dropout_(config.get_text_config(), dropout)
    source = {"config": config, "revision": revision, "dtype": dtype}
    head = generation_config = None
    if config.model_type == "harmonic" and config.is_causal != is_causal:
        kind = "a decoder" if is_causal else "an encoder"
        raise ValueError(f"base {name}: expected {kind}, got {config.architectures}")
    if config.model_type == "harmonic" and head_class is not None:
        loaded = load_checked(head_class, name, **source)
        backbone, head = loaded.model.backbone, loaded.dist_head
        generation_config = loaded.generation_config
    elif config.model_type == "harmonic":
        backbone = load_checked(HarmonicModel, name, **source).backbone
    elif config.model_type == "neobert" and head_class is HarmonicForMaskedLM:
        loaded = load_checked(NeoBERTForMaskedLM, name, **source)
        backbone, head = loaded.base_model, LinearHead(config.hidden_size, config.vocab_size)
        head.load_state_dict(loaded.get_submodule("decoder").state_dict())
    elif is_causal:
        backbone, head, generation_config = load_decoder(name, **source)
    else:
        backbone = load_backbone(name, **source)
    cast_parameters_(backbone, dtype)  # a base of ours may have had float32 blocks
    backbone.config.name_or_path = ""  # a local path is nobody's business
    origin = {
        "base_model": Path(name).name if os.path.isabs(name) else name,
        "base_revision": commit_of(name, revision),  # a branch may move on; a folder has none
        "base_dtype": str(dtype).removeprefix("torch."),
        "dtype": dtype,
    }
    labels = list((config.id2label or {}).values())
    return Base(name, backbone, head, labels, origin, generation_config)


def copy_head_(head: Head, base: Base) -> None:
    """Copy the weights of the base's own head.

    Raises:
        ValueError: It has none of this name.
    """
    expected = head.settings()["name"]
    if (
        base.head is None
        or base.head.settings()["name"] != expected
        or base.head.state_dict().keys() != head.state_dict().keys()
    ):
        raise ValueError(
            f"init base_head: expected base {base.name} to have a {expected} head with the same "
            "fields"
        )
    caps = [one.settings().get("softcap") for one in (base.head, head)]
    if caps[0] != caps[1]:
        raise ValueError(
            f"head.softcap: expected that of base {base.name}, {caps[0]}, got {caps[1]}"
        )
    head.load_state_dict(base.head.state_dict())
