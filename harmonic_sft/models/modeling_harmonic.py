"""Harmonic models: any backbone under one geometry-aware output head."""

import functools
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput
from transformers.utils import can_return_tuple

from .backbones import (
    blocks_without_graph,
    build_backbone,
    cast_parameters_,
    find_blocks,
    load_backbone,
    load_checked,
    set_dropout_,
    trains,
)
from .configuration_harmonic import HarmonicConfig
from .head import Head
from .heads import build_head
from .linear_heads import LinearHead
from .modeling_neobert import NeoBERTForMaskedLM
from .objective import LossFunction, mean_token_loss, negative_log_likelihood
from .packing import document_arguments
from .partial import HUB_OPTIONS, PLACE_OPTIONS, commit_of, complete_state_dict, partial_config


class HarmonicPreTrainedModel(PreTrainedModel):
    """What harmonic models share: loading, freezing, checkpointing."""

    config: HarmonicConfig
    config_class = HarmonicConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _auto_map: ClassVar[dict[str, str]] = {}  # beside AutoConfig and AutoModel
    _keep_in_fp32_modules_strict = ["dist_head"]  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = [r"^dist_head\."]  # noqa: RUF012

    def __init__(self, config: HarmonicConfig):
        super().__init__(config)
        self._keep_in_fp32_modules_strict = {"dist_head", *(config.float32_modules or [])}

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *model_args: Any,
        config: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Load a model as transformers does; a partial checkpoint is completed from its base.

        Args:
            pretrained_model_name_or_path: A folder or a name on the Hub.
            model_args: Passed on.
            config: A configuration, or where to find it.
            kwargs: All options of `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: The base of a partial checkpoint cannot be fetched or does not fit.
        """
        name = pretrained_model_name_or_path
        if name is None or kwargs.get("state_dict") is not None:
            return super().from_pretrained(name, *model_args, config=config, **kwargs)
        hub = {key: kwargs[key] for key in HUB_OPTIONS if key in kwargs}
        where: dict[str, Any] = {key: kwargs[key] for key in PLACE_OPTIONS if key in kwargs}
        if isinstance(config, PreTrainedConfig):
            partial = config.partial
        else:
            fields, _ = PreTrainedConfig.get_config_dict(config or name, **where, **hub)
            partial = fields.get("partial", False)
        if not partial:
            return super().from_pretrained(name, *model_args, config=config, **kwargs)
        # A branch may move on between two files.
        where["revision"] = commit_of(str(name), **where, **hub) or where.get("revision")
        rest = {k: v for k, v in kwargs.items() if k not in (*hub, *where, "state_dict")}
        if not isinstance(config, PreTrainedConfig):
            config = partial_config(str(name), where, hub, rest)
        state_dict = complete_state_dict(str(name), config, HarmonicModel, where=where, **hub)
        loaded = super().from_pretrained(
            None, *model_args, config=config, state_dict=state_dict, **rest
        )
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.config.partial = False  # saved again, it is a whole checkpoint
        model.config.name_or_path = model.name_or_path = str(name)
        return loaded

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Save weights, configuration and the code that loads them without this package."""
        self.config.auto_map = {
            "AutoConfig": "configuration_harmonic.HarmonicConfig",
            "AutoModel": "modeling_harmonic.HarmonicModel",
            **self._auto_map,
        }
        super().save_pretrained(save_directory, *args, **kwargs)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Checkpoint every block that holds a graph: from the first trainable one on.

        A frozen block below has no graph and nothing to save. transformers would make the input
        embeddings require gradients and pull all frozen blocks into the graph.

        Raises:
            ValueError: Reentrant checkpointing, or transformers' further options.
        """
        if kwargs.pop("every_n_layers", 1) != 1 or kwargs.pop("offload", False) or kwargs:
            raise ValueError(
                "gradient checkpointing: expected only gradient_checkpointing_kwargs, got more"
            )
        options = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        if options["use_reentrant"]:
            raise ValueError(
                "use_reentrant: expected False, got True. "
                "Reentrant checkpointing gives the block above a frozen one no gradient"
            )
        self._set_gradient_checkpointing(
            enable=True, gradient_checkpointing_func=functools.partial(checkpoint, **options)
        )
        for block in blocks_without_graph(cast("HarmonicModel", self.base_model).backbone):
            block.gradient_checkpointing = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Head):
            module.reset_parameters()


class HarmonicModel(HarmonicPreTrainedModel):
    """The backbone alone, as `AutoModel` loads it: hidden states for embeddings and retrieval."""

    def __init__(self, config: HarmonicConfig):
        super().__init__(config)
        self.backbone = build_backbone(config.text_config)
        self.post_init()

    def train(self, mode: bool = True) -> Self:
        """Set training mode, but leave what runs without a graph in evaluation mode.

        Dropout in a frozen part would only add noise to the features that the rest learns from.
        """
        super().train(mode)
        if mode:
            blocks = find_blocks(self.backbone)[1]
            for part in self.backbone.children():
                if not trains(part) and blocks not in part.modules():
                    part.eval()
            for block in blocks_without_graph(self.backbone):
                block.eval()
        return self

    def get_input_embeddings(self) -> nn.Module:
        """Return the backbone's token embeddings."""
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the backbone's token embeddings."""
        self.backbone.set_input_embeddings(value)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Return the backbone's output.

        A backbone of float32 and 16-bit weights runs under autocast to 16 bits.

        Args:
            input_ids: `[B, T]`.
            attention_mask: `[B, T]`, 1 = attend.
            position_ids: `[B, T]` or `[1, T]`, counted from 0 whatever the backbone. A position
                that does not continue the one before it starts a new document (at 0), and tokens
                attend only to their own document.
            kwargs: The backbone's further arguments.
        """
        if position_ids is not None:
            batch_size = len(kwargs["inputs_embeds"] if input_ids is None else input_ids)
            shown = document_arguments(self.backbone, attention_mask, position_ids, batch_size)
            attention_mask = shown.pop("attention_mask")
            kwargs |= shown
        dtypes = {parameter.dtype for parameter in self.backbone.parameters()}
        low = min(dtypes, key=lambda dtype: dtype.itemsize)
        autocast = torch.autocast(self.device.type, low) if len(dtypes) > 1 else nullcontext()
        with autocast:
            return self.backbone(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


class HarmonicForMaskedLM(HarmonicPreTrainedModel):
    """An encoder with a head that predicts masked tokens."""

    _auto_map: ClassVar[dict[str, str]] = {
        "AutoModelForMaskedLM": "modeling_harmonic.HarmonicForMaskedLM"
    }

    def __init__(self, config: HarmonicConfig):
        super().__init__(config)
        self.model = HarmonicModel(config)
        text_config = config.text_config
        self.dist_head: Head = build_head(
            config.head, hidden_size=text_config.hidden_size, vocab_size=text_config.vocab_size
        )
        self.loss_fn: LossFunction = negative_log_likelihood
        self._set_tied_keys()
        self.post_init()

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
        head = dict(head or {"name": "dist"})
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
        if dropout is not None:
            set_dropout_(config.get_text_config(), dropout)
        source = {"config": config, "revision": revision, "dtype": dtype}
        backbone, old_head = _load_base(name, source, with_head=init == "base_head")
        cast_parameters_(backbone, dtype)  # a base of ours may have had float32 blocks
        backbone.config.name_or_path = ""  # a local path is nobody's business
        harmonic_config = HarmonicConfig(
            text_config=backbone.config,
            head=head,
            base_model=Path(name).name if os.path.isabs(name) else name,
            base_revision=commit_of(name, revision),  # a branch may move on; a folder has none
            base_dtype=str(dtype).removeprefix("torch."),
            tie_word_embeddings=tie,
            dtype=dtype,
        )
        with torch.device("meta"):
            model = cls(harmonic_config)
        model.model.backbone = backbone
        embeddings = backbone.get_input_embeddings().get_parameter("weight")
        if embeddings.shape[1] != backbone.config.hidden_size:
            raise ValueError(
                f"base {name}: expected input embeddings as wide as the hidden states "
                f"({backbone.config.hidden_size}), got {embeddings.shape[1]}"
            )
        model.dist_head = build_head(
            head, hidden_size=embeddings.shape[1], vocab_size=embeddings.shape[0]
        )
        if init == "base_head":
            _copy_head(old_head, model.dist_head, name)
        elif init == "input_embeddings":
            model.dist_head.initialize_(embeddings)
        else:
            raise ValueError(f"init: expected 'input_embeddings' or 'base_head', got {init!r}")
        model.config.head = model.dist_head.settings()
        model.tie_weights()
        return model.eval()

    @property
    def h_exp(self) -> float | None:
        """The head's exponent, None for heads without one."""
        return self.config.h_exp

    @h_exp.setter
    def h_exp(self, value: float) -> None:
        if self.dist_head.h_exp is None:
            raise ValueError(f"h_exp: expected a dist head, got {self.config.head['name']}")
        if not value < 0:
            raise ValueError(f"h_exp: expected a number below 0, got {value}")
        self.dist_head.h_exp = float(value)
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

    def _set_tied_keys(self) -> None:
        if self.config.tie_word_embeddings:
            embeddings = self.get_input_embeddings()
            path = next(name for name, module in self.named_modules() if module is embeddings)
            weight = self.dist_head.weight
            own = next(key for key, value in self.dist_head.named_parameters() if value is weight)
            self._tied_weights_keys = {f"dist_head.{own}": f"{path}.weight"}


def _load_base(
    name: str, source: dict[str, Any], *, with_head: bool
) -> tuple[PreTrainedModel, Head | None]:
    """Load a backbone, and the head it came with if that is one of ours in shape."""
    config = source["config"]
    if config.model_type == "harmonic":
        loaded = load_checked(HarmonicForMaskedLM, name, **source)
        return loaded.model.backbone, loaded.dist_head
    if config.model_type == "neobert" and with_head:
        loaded = load_checked(NeoBERTForMaskedLM, name, **source)
        head = LinearHead(config.hidden_size, config.vocab_size)
        head.load_state_dict(loaded.get_submodule("decoder").state_dict())
        return loaded.base_model, head
    return load_backbone(name, **source), None


def _copy_head(old: Head | None, new: Head, name: str) -> None:
    found = old.settings()["name"] if old is not None else None
    expected = new.settings()["name"]
    if old is None or found != expected:
        raise ValueError(f"init base_head: expected base {name} to have a {expected} head")
    new.load_state_dict(old.state_dict())
