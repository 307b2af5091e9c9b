"""What all harmonic models share: loading, the backbone alone, a backbone under a head."""

import functools
import os
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import can_return_tuple, logging

from .backbones import (
    CACHE,
    blocks_without_graph,
    build_backbone,
    castable,
    check_whole,
    commit_of,
    keep_float32_,
    known_blocks,
    settle_quantized_,
    take_cache,
    trains,
)
from .bases import Base, copy_head_
from .configuration_harmonic import HarmonicConfig, quantization_method
from .document_attention import document_arguments
from .head import Head, at_least_float32, check_prototypes, find_not_finite, keep_precision
from .heads import TransformHead, build_head, check_class, resized_head
from .objective import LossFunction, mean_token_loss, negative_log_likelihood
from .partial_checkpoint import (
    BLOCKS_FILE,
    HEAD_FILE,
    HUB_OPTIONS,
    PLACE_OPTIONS,
    check_not_partial,
    complete_state_dict,
)

logger = logging.get_logger(__name__)


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
    _keys_to_ignore_on_load_unexpected = [r"^dist_head\."]  # noqa: RUF012

    def __init__(self, config: HarmonicConfig):
        super().__init__(config)
        kept = (*(self._keep_in_fp32_modules_strict or ()), *(config.float32_modules or ()))
        self._keep_in_fp32_modules_strict = set(kept)

    def initialize_weights(self) -> None:
        """Fill what a checkpoint lacks, such as buffers; the body is filled by its own class.

        transformers takes our classes for custom code and skips their modules without weights.
        """
        cast("HarmonicModel", self.base_model).backbone.initialize_weights()
        super().initialize_weights()

    @property
    def dtype(self) -> torch.dtype:
        """The body's precision, which is saved: a head, and a table tied to it, stay in float32."""
        return _body_dtype(cast("HarmonicModel", self.base_model).backbone)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *model_args: Any,
        config: Any = None,
        **kwargs: Any,
    ) -> Self:
        """Load a model as transformers does; a partial checkpoint is completed from its base.

        A classifier takes only the backbone of another class's checkpoint, and gets a new head. All
        options are those of `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: The base of a partial checkpoint cannot be fetched or does not fit, a
                checkpoint is one that only its run can continue from, or a file is damaged.
        """
        name = pretrained_model_name_or_path
        if name is None or kwargs.get("state_dict") is not None:
            return super().from_pretrained(name, *model_args, config=config, **kwargs)
        folder = os.path.join(name, kwargs.get("subfolder", ""))
        check_not_partial(folder)
        partial_files = [Path(folder, file) for file in (HEAD_FILE, BLOCKS_FILE)]
        check_whole([*Path(folder).glob("model*.safetensors"), *partial_files])
        hub = {k: v for k, v in kwargs.items() if k in (*HUB_OPTIONS, *PLACE_OPTIONS)}
        fields = config.to_dict() if isinstance(config, PreTrainedConfig) else None
        if fields is None:
            fields, _ = PreTrainedConfig.get_config_dict(config or name, **hub)
        if (kind := fields.get("model_type")) != "harmonic":
            raise ValueError(
                f"{name}: expected one of our models, got one of type {kind!r}. Put a head on it "
                f"with {cls.__name__}.from_base; an adapter is put on its model by AutoModelFor..."
            )
        has_head, adapter_options = cls._has_own_head(fields.get("architectures")), {}
        if has_head and not fields.get("partial", False):
            loaded = super().from_pretrained(name, *model_args, config=config, **kwargs)
        else:
            # The inner call would put the adapter on a model that has no head or no name yet.
            adapter_options = dict(kwargs.pop("adapter_kwargs", None) or {})
            if has_head:
                loaded = cls._from_partial(str(name), hub, *model_args, config=config, **kwargs)
            else:
                bare = HarmonicModel.from_pretrained(name, *model_args, config=config, **kwargs)
                loaded = cls._with_new_head(bare)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        # Set by AutoModelFor..., which was given an adapter's folder and passes its base as `name`.
        adapter = adapter_options.pop("_adapter_model_path", None)
        if adapter is not None:
            model.load_adapter(adapter, adapter_kwargs=adapter_options)
        settle_quantized_(model)
        _report_useless(model)
        return loaded

    if tuple(map(int, transformers_version.split(".")[:2])) < (5, 18):

        @staticmethod
        def _load_pretrained_model(
            model: PreTrainedModel,
            state_dict: dict[str, Tensor] | None,
            checkpoint_files: list[str] | None,
            load_config: Any,
            expected_keys: list[str] | None = None,
        ) -> Any:
            """Load weights as transformers does, and the modules that an adapter trained whole.

            transformers 5.18 does that; older versions leave the modules as they are.
            """
            from transformers.core_model_loading import WeightRenaming

            mapping = [*(load_config.weight_mapping or ())]
            for name, module in model.named_modules():
                wrapped = getattr(module, "modules_to_save", None)  # of PEFT's wrapper
                if isinstance(wrapped, nn.ModuleDict):
                    adapter, trained = list(wrapped.items())[-1]  # the one that is being loaded
                    mapping += [
                        WeightRenaming(f"{name}.{key}", f"{name}.modules_to_save.{adapter}.{key}")
                        for key in trained.state_dict()
                    ]
            load_config = replace(load_config, weight_mapping=mapping)
            return PreTrainedModel._load_pretrained_model(
                model, state_dict, checkpoint_files, load_config, expected_keys
            )

    @classmethod
    def _from_partial(
        cls, name: str, hub: dict[str, Any], *model_args: Any, config: Any, **kwargs: Any
    ) -> Any:
        """Load a checkpoint that holds only what was trained, and the rest from its base."""
        # All files have to be of one commit, and a branch may move on between two of them.
        hub = {**hub, "revision": commit_of(name, **hub) or hub.get("revision")}
        rest = {k: v for k, v in kwargs.items() if k not in (*hub, "state_dict")}
        if not isinstance(config, PreTrainedConfig):
            options: dict[str, Any] = {**hub, **rest, "return_unused_kwargs": True}
            config, rest = HarmonicConfig.from_pretrained(config or name, **options)
        state_dict = complete_state_dict(name, config, hub)
        loaded = cls.from_pretrained(
            None, *model_args, config=config, state_dict=state_dict, **rest
        )
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.config.partial = False  # saved again, it is a whole checkpoint
        if model.can_generate():
            with suppress(OSError):  # there is none
                model.generation_config = GenerationConfig.from_pretrained(name, **hub)
        model.config.name_or_path = model.name_or_path = name
        return loaded

    @classmethod
    def _has_own_head(cls, architectures: list[str] | None) -> bool:
        """Whether a checkpoint of these classes also holds the head of this class."""
        return True

    @classmethod
    def _with_new_head(cls, loaded: Any) -> Any:
        """Put a new head on a loaded `HarmonicModel`, also in a pair with its loading report."""
        raise AssertionError("only a classifier takes other checkpoints")

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Save weights, configuration and the code that loads them without this package."""
        self.config.auto_map = {
            "AutoConfig": "configuration_harmonic.HarmonicConfig",
            "AutoModel": "modeling_backbone.HarmonicModel",
            **self._auto_map,
        }
        vars(self.config).pop("use_cache", None)  # training turns it off, which must not be saved
        if quantization_method(self.config) is not None:  # packed weights have no original form
            kwargs["save_original_format"] = False
        super().save_pretrained(save_directory, *args, **kwargs)
        for file in (HEAD_FILE, BLOCKS_FILE):  # of an older, partial checkpoint
            Path(save_directory, file).unlink(missing_ok=True)

    def dequantize(self, dtype: torch.dtype | None = None) -> Self:
        """Unpack quantized weights, to `dtype` if given, and forget that the backbone had them."""
        super().dequantize(dtype)
        vars(self.config.text_config).pop("quantization_config", None)
        # transformers 5.23 keeps how packed weights were loaded, and cannot undo it when it saves:
        # `Bnb4bitDeserialize` has no `reverse_op` (`core_model_loading.py:102`,
        # https://github.com/huggingface/transformers/pull/45743, closed). This can go when
        # test_transformers_still_cannot_save_what_it_has_unpacked fails.
        vars(self).pop("_weight_conversions", None)
        return self

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Checkpoint every block that holds a graph: from the first trainable one on.

        A frozen block below has no graph and nothing to save. transformers would make the input
        embeddings require gradients and pull all frozen blocks into the graph.

        Raises:
            ValueError: Reentrant checkpointing, transformers' further options, or a backbone
                without checkpointing.
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
        backbone = cast("HarmonicModel", self.base_model).backbone
        recompute = functools.partial(checkpoint, **options)
        try:
            self._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=recompute)
        except ValueError as error:
            raise ValueError(
                "gradient checkpointing: expected a backbone that has it, got a "
                f"{type(backbone).__name__}. Leave it out"
            ) from error
        for block in blocks_without_graph(backbone):
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
        if _body_dtype(self.backbone) != torch.float32:
            keep_float32_(self.backbone, self.backbone)
        # TRL builds a reference model with this implementation, and Gemma 2 has only eager.
        config._attn_implementation = self.backbone.config._attn_implementation
        self._supports_flex_attn = self.backbone._supports_flex_attn
        self._is_stateful = self.backbone._is_stateful
        self.post_init()

    def train(self, mode: bool = True) -> Self:
        """Set training mode, but keep a frozen backbone in evaluation mode.

        With frozen blocks before the first trained one, only the blocks from that one on are set.
        Dropout in a frozen part would only add noise to the features that the rest learns from.
        """
        super().train(mode)
        frozen = blocks_without_graph(self.backbone)
        if mode and (frozen or not trains(self.backbone)):
            self.backbone.eval()
            for block in known_blocks(self.backbone)[1][len(frozen) :]:
                block.train()
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
        inputs_embeds: Tensor | None = None,
        token_type_ids: Tensor | None = None,
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
            inputs_embeds: `[B, T, D]` in place of `input_ids`.
            token_type_ids: `[B, T]`, for backbones that have token types.
            kwargs: The backbone's further arguments. A decoder returns no cache unless told to.
        """
        for name in ("output_hidden_states", "output_attentions"):  # set in our config only
            if getattr(self.config, name, False):
                kwargs.setdefault(name, True)
        optional = {"inputs_embeds": inputs_embeds, "token_type_ids": token_type_ids}
        kwargs |= {name: value for name, value in optional.items() if value is not None}
        kwargs["attention_mask"] = attention_mask
        is_causal = self.config.is_causal
        if is_causal:
            kwargs.setdefault("use_cache", False)
        if (cache := take_cache(kwargs)) is not None:
            # Attention takes the pages of continuous batching under the name `cache` alone.
            is_paged = not isinstance(cache, Cache | tuple)
            kwargs["cache" if is_paged else CACHE] = cache
        if position_ids is not None and cache is not None:
            kwargs["position_ids"] = position_ids
        elif position_ids is not None:
            tokens = kwargs["inputs_embeds"] if input_ids is None else input_ids
            position_ids = position_ids.expand(tokens.shape[0], -1)  # exports hold `len` constant
            kwargs |= document_arguments(
                self.backbone, attention_mask, position_ids, is_causal=is_causal
            )
        dtypes = {p.dtype for p in castable(self.backbone) if p.is_floating_point()}
        mixed = len(dtypes) > 1 and (  # packed layers cast their inputs, merged ones do not
            quantization_method(self.config) is None or bool(self.config.float32_modules)
        )
        autocast = torch.autocast(self.device.type, self.dtype) if mixed else nullcontext()
        with autocast:
            return self.backbone(input_ids=input_ids, **kwargs)


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
    _output_class: ClassVar[Any]  # of `forward`
    _keep_in_fp32_modules_strict = ["dist_head"]  # noqa: RUF012
    _auto_map: ClassVar[dict[str, str]] = {  # every backbone can be fine-tuned for these tasks
        "AutoModelForQuestionAnswering": "modeling_harmonic.HarmonicForQuestionAnswering",
        "AutoModelForSequenceClassification": "modeling_harmonic.HarmonicForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_harmonic.HarmonicForTokenClassification",
    }

    def __init__(self, config: HarmonicConfig):
        super().__init__(config)
        self.model = HarmonicModel(config)
        self._supports_flex_attn = self.model._supports_flex_attn
        self._is_stateful = self.model._is_stateful
        self.dist_head: Head = self._new_head(config)
        self.loss_fn: LossFunction = negative_log_likelihood
        self._set_tied_keys()
        self.post_init()

    @staticmethod
    def num_classes(config: HarmonicConfig) -> int:
        """Return V, the number of classes of the head: the tokens, unless a task has its own."""
        return config.text_config.vocab_size

    def select(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return what the head sees, one vector for each label: every position, by default."""
        return hidden_states

    def attended(self, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
        """Return the attention mask `[B, T]` that `select` takes: the given one, by default."""
        return attention_mask

    def targets(self, labels: Tensor) -> Tensor:
        """Return the labels of the vectors that `select` returns: all of them, by default."""
        return labels

    def has_free_labels(self, labels: Tensor) -> bool:
        """Whether labels are numbers, or several classes at once, and not one class of the head."""
        return False

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_logits: bool | None = None,
        inputs_embeds: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Predict a class for each text or token.

        Args:
            input_ids: `[B, T]`.
            attention_mask: `[B, T]`, 1 = attend. Without it a decoder reads a text at the last
                token that is not `pad_token_id`.
            labels: `[B, T]` of tokens or `[B]` of texts, -100 for what is not scored. If they are
                numbers, or several classes at once: floats in the shape of the logits. A masked
                language model passes only the labelled positions to the head.
            num_items_in_batch: Divides the summed loss; see `mean_token_loss`.
            output_logits: Return logits beside the loss. Default: yes, except for a masked language
                model in training, where they would be the largest tensor.
            inputs_embeds: `[B, T, D]` in place of `input_ids`.
            token_type_ids: `[B, T]`, for backbones that have token types.
            position_ids: As in `HarmonicModel`.
            kwargs: `label_positions` and `label_weights`, see `mean_token_loss`; the backbone's
                further arguments.

        Returns:
            `loss` with labels: in nats, a squared difference for numbers; `logits` `[B, T, V]` of
            tokens or `[B, V]` of texts, as `output_logits` says.
        """
        options = self._take_label_options(kwargs)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            **kwargs,
        )
        attended = self.attended(input_ids, attention_mask)
        states = self.select(outputs.last_hidden_state, attended)  # [B, S, D], S = 1 for texts
        needs_logits = self._needs_logits(labels, output_logits)
        return self._output_class(
            loss=self._loss(states, labels, num_items_in_batch, **options),
            logits=self._logits(states) if needs_logits else None,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def class_embeddings(self) -> Tensor:
        """Return the vectors `[V, D]` that tell how alike classes are: prototypes, by default."""
        return self.dist_head.prototypes

    @classmethod
    def _from_loaded_base(
        cls,
        base: Base,
        head: dict[str, Any] | None,
        *,
        embeddings: Tensor | None = None,
        keep_head: bool = False,
        **fields: Any,
    ) -> Self:
        """Build the model around a loaded base, with a new head, in evaluation mode.

        The prototypes start at `embeddings` `[V, D]`; with `keep_head` the head starts with all
        weights of the base's own head. `fields` are further fields of the configuration.
        """
        head = {"name": "dist"} if head is None else head
        if not isinstance(head, dict):
            raise ValueError(f"head: expected {{'name': ..., fields...}}, got {head!r}")
        own = base.head if head.get("name") == "transform" else None
        if isinstance(own, TransformHead):
            head = _as_in_base(head, own.settings())
        config = HarmonicConfig(
            text_config=base.backbone.config,
            head=head,
            architectures=[cls.__name__],
            **base.origin,
            **fields,
        )
        model = cls._from_backbone(config, base.backbone)
        if keep_head:
            copy_head_(model.dist_head, base)
        elif embeddings is not None:
            model.dist_head.initialize_(embeddings)
        if isinstance(own, TransformHead):
            weights = {k: w for k, w in own.state_dict().items() if not k.startswith("inner.")}
            model.dist_head.load_state_dict(weights, strict=False)
        model.config.head = model.dist_head.settings()
        if model.config.tie_word_embeddings:
            model._prepare_tied_embeddings()
        model.tie_weights()
        return model.eval()

    @classmethod
    def _from_backbone(cls, config: HarmonicConfig, backbone: PreTrainedModel) -> Self:
        """Build the model around a backbone, which is not copied, with a new head."""
        with torch.device("meta"):
            model = cls(config)
        config = model.config
        model.model.backbone = backbone
        model.dist_head = cls._new_head(config).to(backbone.device)
        config.head = model.dist_head.settings()
        vars(model)["hf_quantizer"] = vars(backbone).get("hf_quantizer")
        settle_quantized_(model)
        return model

    @classmethod
    def _new_head(cls, config: HarmonicConfig) -> Head:
        """Build the head that a configuration names, over the classes of this task."""
        hidden_size, vocab_size = config.text_config.hidden_size, cls.num_classes(config)
        return build_head(config.head, hidden_size=hidden_size, vocab_size=vocab_size)

    @staticmethod
    def _take_label_options(kwargs: dict[str, Any]) -> dict[str, Any]:
        """Remove the options that belong to the labels from `kwargs`, and return them.

        As parameters of `forward` they would count as labels: transformers.Trainer goes by "label"
        in a name, and evaluates without a loss where a batch lacks one of them.
        """
        return {name: kwargs.pop(name, None) for name in ("label_positions", "label_weights")}

    def _loss(
        self,
        hidden_states: Tensor,
        labels: Tensor | None,
        num_items_in_batch: Tensor | int | None,
        *,
        label_positions: Tensor | None = None,
        label_weights: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor | None:
        """Return the mean loss of hidden states `[B, T, D]`, None without labels `[B, T]`."""
        if labels is None:
            return None
        return mean_token_loss(
            self.loss_fn,
            self.active_head,
            hidden_states,
            labels,
            label_positions=label_positions,
            label_weights=label_weights,
            num_items_in_batch=num_items_in_batch,
            causal=causal,
        )

    def _needs_logits(self, labels: Tensor | None, output_logits: bool | None) -> bool:
        """Whether to return logits: always without labels; by default not in training."""
        return labels is None or (not self.training if output_logits is None else output_logits)

    def _logits(self, hidden_states: Tensor) -> Tensor:
        """Return logits `[B, T, V]` for hidden states `[B, T, D]`."""
        _ = self.active_head  # raises if there is none; PEFT's wrapper refuses mixed batches
        return self.dist_head(hidden_states.flatten(0, 1)).unflatten(0, hidden_states.shape[:2])

    @property
    def active_head(self) -> Head:
        """The head that computes: PEFT wraps `dist_head` and trains a copy.

        Raises:
            ValueError: PEFT has put something else in its place.
        """
        head: Any = self.dist_head
        if hasattr(head, "modules_to_save"):
            is_off = head.disable_adapters or not head.active_adapters
            copies = head.modules_to_save
            head = head.original_module if is_off else copies[head.active_adapters[0]]
        if not hasattr(head, "nll"):
            raise ValueError(
                f"dist_head: expected a head, got PEFT's {type(head).__name__} in its place. Train "
                'it whole, modules_to_save=["dist_head"], and leave the table of a tied one alone'
            )
        return head

    @property
    def h_exp(self) -> float | None:
        """The head's exponent now, None for heads without one."""
        return self.active_head.h_exp

    @h_exp.setter
    def h_exp(self, value: float) -> None:
        self.active_head.h_exp = value
        self.config.head = self.active_head.settings()

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Save with the head's settings as they are now, also where only the head was changed.

        Raises:
            ValueError: Another head would be loaded from these settings.
        """
        check_class(self.dist_head)
        self.config.head = self.dist_head.settings()
        super().save_pretrained(save_directory, *args, **kwargs)

    def renormalize_prototypes_(self) -> None:
        """Bring the prototypes back to norm 1 on the sphere; tied ones stay as they are."""
        if not self.config.tie_word_embeddings:
            self.dist_head.renormalize_()

    def get_input_embeddings(self) -> nn.Module:
        """Return the backbone's token embeddings."""
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the backbone's token embeddings."""
        is_new = value is not self.get_input_embeddings()
        self.model.set_input_embeddings(value)
        if is_new:
            self._set_tied_keys()

    def get_output_embeddings(self) -> None:
        """Return None: callers would take any layer returned here for a linear softmax."""

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the token embeddings as transformers does, and a head over tokens with them.

        New prototypes are drawn like the old ones. transformers starts new embeddings at their
        mean, which is close to everything: a distance head would give it much probability.
        """
        vocab_size = self.config.text_config.vocab_size
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        if self.config.base_vocab_size is None and len(embeddings.weight) != vocab_size:
            self.config.base_vocab_size = vocab_size
        num_classes = self.num_classes(self.config)
        if num_classes != len(self.dist_head.weight):
            heads = {name: head for name, head in self.named_modules() if isinstance(head, Head)}
            for name, head in heads.items():  # PEFT keeps the old one beside what it trains
                if name.rpartition(".inner")[0] not in heads:  # an outer head resizes its inner one
                    self.set_submodule(name, resized_head(head, num_classes))
            self.tie_weights()
        return embeddings

    def _set_tied_keys(self) -> None:
        if self.config.tie_word_embeddings:
            embeddings = self.get_input_embeddings()
            path = next(name for name, module in self.named_modules() if module is embeddings)
            weight = self.dist_head.weight
            own = next(key for key, value in self.dist_head.named_parameters() if value is weight)
            self._tied_weights_keys = {f"dist_head.{own}": f"{path}.weight"}
            # The embeddings are the head's weight, so they stay in float32 too.
            self._keep_in_fp32_modules_strict = {*(self._keep_in_fp32_modules_strict or ()), path}
            self._prepare_tied_embeddings()

    def _prepare_tied_embeddings(self) -> None:
        """Keep the tied table in float32 or better, and round what a 16-bit body gets of it."""
        embeddings, backbone = self.get_input_embeddings(), self.model.backbone
        for buffer in embeddings.buffers():  # Gemma's factor, rounded as the body's table would be
            buffer.data = buffer.data.to(_body_dtype(backbone))
        weight = embeddings.get_parameter("weight")
        weight.data = at_least_float32(weight.data)
        embeddings.register_forward_hook(functools.partial(_in_dtype_of, backbone))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move all weights; embeddings that are tied to the head stay in float32, as it does."""
        if not self.config.tie_word_embeddings:
            return super()._apply(fn, recurse)
        weight = self.dist_head.weight

        def move(tensor: Tensor) -> Tensor:
            tied = tensor is weight or tensor is weight.grad
            return keep_precision(fn, tensor) if tied else fn(tensor)

        return super()._apply(move, recurse)


def _as_in_base(head: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return a transform's settings, all but the inner head taken from the base's own transform."""
    for key in own.keys() - {"name", "inner"}:
        if head.get(key) not in (None, own[key]):
            raise ValueError(
                f"head {key}: expected {own[key]!r}, as the base was trained, got {head[key]!r}. "
                "Leave it out"
            )
    return {**head, **own, "inner": head.get("inner") or {"name": "linear"}}


def _report_useless(model: HarmonicPreTrainedModel) -> None:
    """Warn of a head whose predictions mean nothing, and of weights that are not finite."""
    problems = []
    if isinstance(model, HarmonicHeadModel):
        is_tied = model.config.tie_word_embeddings
        problems = check_prototypes(model.dist_head, is_tied=is_tied)
    if not problems and quantization_method(model.config) is None:
        name = find_not_finite(model.named_parameters())
        problems = [] if name is None else [f"{name} is not finite"]
    for problem in problems:
        logger.warning("%s: %s. Its predictions mean nothing.", model.name_or_path, problem)


def _body_dtype(body: nn.Module) -> torch.dtype:
    """Return the lowest precision among the weights that are not packed in a byte or less."""
    dtypes = {weight.dtype for weight in body.parameters() if weight.is_floating_point()}
    return min(dtypes, key=lambda dtype: (dtype.itemsize == 1, dtype.itemsize))


def _in_dtype_of(body: nn.Module, embeddings: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Return embeddings in the lowest precision of a body: some layers take no other."""
    return output.to(_body_dtype(body))
