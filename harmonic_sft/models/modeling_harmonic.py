"""Harmonic models for every task: masked and next tokens, classes of texts and tokens, answers."""

import copy
import inspect
import os
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import (
    CausalLMOutputWithPast,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.utils import can_return_tuple, logging

from .backbones import CACHE, take_cache, trains
from .bases import Base, load_base
from .configuration_harmonic import HarmonicConfig
from .head import at_least_float32
from .heads import MultiHead, TransformHead, behind_transform
from .modeling_backbone import HarmonicHeadModel
from .objective import IGNORE_INDEX, mean_of

logger = logging.get_logger(__name__)
# transformers' Trainer shifts labels itself, under its label smoothing, for classes named here.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["harmonic"] = "HarmonicForCausalLM"
INITS = ("input_embeddings", "output_embeddings", "base_head")


class HarmonicLanguageModel(HarmonicHeadModel):
    """A backbone with a head over its tokens: what encoders and decoders share.

    Raises:
        ValueError: The configuration is that of a decoder for an encoder, or the other way round.
    """

    def __init__(self, config: HarmonicConfig):
        if config.is_causal != self.is_causal:
            raise ValueError(
                f"is_causal: expected {self.is_causal} for a {type(self).__name__}, got "
                f"{config.is_causal}. The saved model is of the other class"
            )
        super().__init__(config)

    def class_embeddings(self) -> Tensor:
        """Return the input embeddings `[V, D]`: the classes are tokens."""
        return self.get_input_embeddings().get_parameter("weight")

    def _logits(self, hidden_states: Tensor) -> Tensor:
        """Return logits `[B, T, V]` for hidden states `[B, T, D]`, plus `config.logit_shift`."""
        return super()._logits(hidden_states) + self.config.logit_shift

    @classmethod
    def from_base(
        cls,
        name: str | os.PathLike[str],
        *,
        revision: str | None = None,
        head: dict[str, Any] | None = None,
        init: str = "input_embeddings",
        tie: bool = False,
        dtype: torch.dtype | str = torch.float32,
        dropout: float | None = None,
    ) -> Self:
        """Put a new head on a pretrained model.

        Args:
            name: A folder or a name on the Hub; also one of our own checkpoints, whose head is
                then replaced.
            revision: A revision on the Hub.
            head: `{"name": ..., fields...}`; default: a `DistLayer` on the unit sphere, behind the
                layers that the base has before its output layer, if it has any (`transform`).
            init: `input_embeddings` copies the token embeddings into the prototypes,
                `output_embeddings` the prototypes of the base's own head; `base_head` keeps all
                weights of that head, which `head` must name (`linear` for a published decoder).
            tie: Share the head's weight with the input embeddings.
            dtype: The backbone's dtype, also by its name; the head is float32.
            dropout: Probability of every dropout of the backbone; default: the base's own.

        Raises:
            ValueError: The checkpoint does not fill the backbone, or has no such head.
        """
        base = load_base(
            name,
            revision,
            head_class=cls,
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
            ValueError: The base has no such head, or embeddings of another width; or `tie` is set
                and the weights that `init` names are not the input embeddings.
        """
        if init not in INITS:
            raise ValueError(f"init: expected one of {list(INITS)}, got {init!r}")
        table = base.backbone.get_input_embeddings().get_parameter("weight")
        hidden_size = base.backbone.config.hidden_size
        is_as_wide = table.shape[1] == hidden_size
        if not is_as_wide and (init == "input_embeddings" or base.head is None):
            way = "Use init output_embeddings"
            if base.head is None:
                way = "It can only be a classifier"
            raise ValueError(
                f"base {base.name}: expected input embeddings as wide as the hidden states "
                f"({hidden_size}), got {table.shape[1]}. {way}"
            )
        if init == "input_embeddings":
            embeddings: Tensor | None = table
        elif base.head is None:
            raise ValueError(
                f"init {init}: expected base {base.name} to have a head of its own that ends in a "
                "linear layer, got none. Use init input_embeddings"
            )
        elif tie and not torch.equal(base.head.weight, table):
            raise ValueError(
                f"init: expected input_embeddings for a tied head, got {init}, whose weights in "
                f"base {base.name} are others"
            )
        else:
            embeddings = base.head.prototypes if init == "output_embeddings" else None
        if head is None and isinstance(base.head, TransformHead):
            head = behind_transform("dist")
        _report_layers(base, head)
        model = cls._from_loaded_base(
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


def _report_layers(base: Base, head: dict[str, Any] | None) -> None:
    """Warn if layers before the base's output layer are left out, or wanted but not there."""
    has_transform = isinstance(base.head, TransformHead)
    wants_it = isinstance(head, dict) and head.get("name") == "transform"
    if wants_it and not has_transform:
        logger.warning(
            "base %s: expected a dense layer and a norm that are known here before its output "
            "layer, got none. Those of the head transform are drawn at random.",
            base.name,
        )
    if has_transform and not wants_it:
        logger.warning(
            "base %s: its own head also has a dense layer and a norm, which are left out with it. "
            "What the new head sees has not passed through them: expect a high loss before "
            "training. To keep them write head: {name: transform, inner: {name: %s, ...}}.",
            base.name,
            (head or {"name": "dist"})["name"],
        )


class HarmonicForMaskedLM(HarmonicLanguageModel):
    """An encoder with a head that predicts masked tokens."""

    _auto_map: ClassVar[dict[str, str]] = {
        **HarmonicHeadModel._auto_map,
        "AutoModelForMaskedLM": "modeling_harmonic.HarmonicForMaskedLM",
    }
    _output_class = MaskedLMOutput


class HarmonicForCausalLM(HarmonicLanguageModel, GenerationMixin):
    """A decoder with a head that predicts the next token."""

    _auto_map: ClassVar[dict[str, str]] = {
        **HarmonicHeadModel._auto_map,
        "AutoModelForCausalLM": "modeling_harmonic.HarmonicForCausalLM",
    }
    is_causal = True

    def select(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the positions that have a next token: all but the last, `[B, T - 1, D]`."""
        return hidden_states[:, :-1]

    def targets(self, labels: Tensor) -> Tensor:
        """Return the labels `[B, T - 1]` of what `select` leaves: the next tokens."""
        return labels[:, 1:]

    def prepare_inputs_for_generation(  # ty: ignore[incompatible-method-override]
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the arguments of the next step of `generate`, as in transformers.

        Long rope (Phi-3) rotates all positions by other angles once a text outgrows the original
        context. The cached keys are then dropped, and computed again.
        """
        rope = getattr(self.config.text_config, "rope_parameters", None) or {}
        cache = take_cache(kwargs)
        if cache is not None and rope.get("rope_type") == "longrope":
            limit = rope["original_max_position_embeddings"]
            if 0 < cache.get_seq_length() <= limit < input_ids.shape[1]:
                cache = next_sequence_length = None
        mixin: Any = super()  # whose types are narrower
        return mixin.prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            inputs_embeds=inputs_embeds,
            **{CACHE: cache},
            **kwargs,
        )

    def create_masks_for_generate(self, config: HarmonicConfig, **kwargs: Any) -> Any:
        """Make the masks for a static cache in the base's own way, if its class has one."""
        text_config = config.get_text_config()
        base_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text_config), None)
        own = inspect.getattr_static(base_class, "create_masks_for_generate", None)
        if own is None:
            return create_masks_for_generate(config, **kwargs)
        return own.__get__(self)(text_config, **kwargs)  # a method of BLOOM, static in others

    @can_return_tuple
    def forward(  # noqa: PLR0913 - transformers looks for these names when it generates
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        output_logits: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Predict the next token at every position.

        Args:
            input_ids: `[B, T]`.
            attention_mask: `[B, T]`, 1 = attend; of the cached tokens too.
            position_ids: `[B, T]`. Without a cache, a position that does not continue the one
                before it starts a new document, and tokens attend only to their own.
            past_key_values: The older name of `cache`.
            inputs_embeds: `[B, T, D]` in place of `input_ids`.
            labels: `[B, T]`, the tokens themselves, shifted here; -100 where nothing is predicted.
                With labels only the labelled positions reach the head.
            use_cache: Return the cache. Default: yes without labels and out of training, unless
                `config.use_cache` is False. In compiled code with `position_ids` only True returns
                one, and a row is then one document.
            logits_to_keep: Return logits of this many last positions only, or of the positions with
                these indices; 0 means all.
            num_items_in_batch: Divides the summed loss; see `mean_token_loss`.
            output_logits: Return logits beside the loss. Default: not in training mode, where the
                logits of every position would be the largest tensor.
            cache: The cache that an earlier call returned.
            kwargs: `label_positions` and `label_weights`, see `mean_token_loss`; `shift_labels`
                `[B, T]` in place of `labels`, already shifted (sequence parallelism cuts rows after
                the shift): position t predicts entry t, and weights belong to these entries; the
                backbone's further arguments.

        Returns:
            `loss` in nats, with labels; `logits` `[B, T, V]`, as `output_logits` says.
        """
        shift_labels, options = kwargs.pop("shift_labels", None), self._take_label_options(kwargs)
        causal = shift_labels is None  # else position t predicts label t
        if not causal:
            labels, options["label_positions"] = shift_labels, None  # they were of `labels`
        has_cache = cache is not None or past_key_values is not None
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and labels is None
        elif use_cache and not has_cache and torch.compiler.is_compiling():
            # Without a cache, positions whose values are unknown could start several documents.
            cache = DynamicCache(config=self.config.text_config)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state  # [B, T, D]
        # An integer counts positions from the end, a tensor lists them.
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        needs_logits = self._needs_logits(labels, output_logits)
        return CausalLMOutputWithPast(
            loss=self._loss(hidden_states, labels, num_items_in_batch, causal=causal, **options),
            logits=self._logits(hidden_states[:, kept]) if needs_logits else None,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE: outputs.get(CACHE)},
        )


class HarmonicClassifier(HarmonicHeadModel):
    """A head over the classes in `config.id2label`.

    From a checkpoint of another class, such as a language model's, only the backbone is taken. The
    head is then new: `config.classifier_head`, linear by default.

    A linear head can also predict several classes at once, or numbers (`config.problem_type`; if
    unset, `num_labels` and the labels' dtype decide, as in transformers).

    Raises:
        ValueError: Such a problem with another head, whose logits make one distribution over all
            classes; or an unknown pooling.
    """

    def __init__(self, config: HarmonicConfig):
        if not self._has_own_head(config.architectures):
            config = copy.deepcopy(config)
            config.head = dict(config.classifier_head or {"name": "linear"})
            config.architectures = [type(self).__name__]
            config.tie_word_embeddings = False
            trained = config.trained_parameters or []  # the backbone keeps what was trained in it
            config.trained_parameters = [n for n in trained if n.startswith("model.")] or None
        elif (wanted := config.classifier_head) and wanted["name"] != config.head["name"]:
            logger.warning(
                "classifier_head: %s is not used: the checkpoint has a trained %s head. "
                "%s.from_base puts a new one on its backbone",
                wanted["name"],
                config.head["name"],
                type(self).__name__,
            )
        problem = config.problem_type or "single_label_classification"
        is_single = problem == "single_label_classification" and self.num_classes(config) > 1
        if not is_single and config.head["name"] != "linear":
            raise ValueError(
                "problem_type: expected single_label_classification of two labels or more, got "
                f"{problem} of {config.num_labels}. A {config.head['name']} head gives one "
                "probability over all classes: take a linear one, of a loaded classifier with "
                'head={"name": "linear"}, ignore_mismatched_sizes=True'
            )
        if config.pooling not in ("mean", "cls"):
            raise ValueError(f"pooling: expected 'mean' or 'cls', got {config.pooling!r}")
        super().__init__(config)
        self._random_weight: Tensor | None = None  # of a new head, to see whether it trains

    def _logits(self, hidden_states: Tensor) -> Tensor:
        self._check_head_trains()
        return super()._logits(hidden_states)

    def _check_head_trains(self) -> None:
        """Refuse to train while a new head is frozen and random; once it changed, stop checking."""
        is_training = self.training and torch.is_grad_enabled()
        if not is_training or torch.compiler.is_compiling():
            return
        head, random = self.active_head, self._random_weight
        if random is None or trains(head):
            return
        weight = head.weight.detach().cpu()
        if weight.shape == random.shape and torch.equal(weight, random):
            raise ValueError(
                "dist_head: expected a new head to be trained, got a frozen one with random "
                'weights. Under PEFT pass modules_to_save=["dist_head"]'
            )
        self._random_weight = None

    def _remember_random_weight(self) -> Self:
        """Remember the random weight of a new head, to tell it from a trained one."""
        weight = self.dist_head.weight.detach()
        self._random_weight = None if weight.is_meta else weight.cpu().clone()
        return self

    @classmethod
    def _has_own_head(cls, architectures: list[str] | None) -> bool:
        """Whether a checkpoint of these classes also holds the head of this class."""
        names = {base.__name__ for base in cls.__mro__}
        return not architectures or not names.isdisjoint(architectures)

    @classmethod
    def _with_new_head(cls, loaded: Any) -> Any:
        """Put a new head on a loaded `HarmonicModel`, also in a pair with its loading report."""
        body = loaded[0] if isinstance(loaded, tuple) else loaded
        model = cls._from_backbone(body.config, body.backbone).eval()._remember_random_weight()
        logger.warning("dist_head: new in a %s: %s. Train it", cls.__name__, model.config.head)
        if not isinstance(loaded, tuple):
            return model
        report, new = loaded[1], {f"dist_head.{key}" for key in model.dist_head.state_dict()}
        return model, {**report, "missing_keys": report["missing_keys"] | new}

    @staticmethod
    def num_classes(config: HarmonicConfig) -> int:
        """Return V, the number of labels."""
        assert config.num_labels is not None, "a configuration has two labels if it names none"
        return config.num_labels

    @classmethod
    def from_base(
        cls,
        name: str | os.PathLike[str],
        *,
        labels: Sequence[str],
        revision: str | None = None,
        head: dict[str, Any] | None = None,
        init: str = "random",
        pooling: str | None = None,
        dtype: torch.dtype | str = torch.float32,
        dropout: float | None = None,
    ) -> Self:
        """Put a new head on a pretrained encoder.

        Args:
            name: A folder or a name on the Hub; also one of our own checkpoints, whose head is
                then replaced.
            labels: Names of the classes, in the order of the head's rows. With a linear head a
                single name is allowed, that of a number to predict.
            revision: A revision on the Hub.
            head: `{"name": ..., fields...}`; default: a `DistLayer` on the unit sphere.
            init: `random`, or `base_head`: the weights of the head of a base that is itself such a
                model. For class means call `dist_head.initialize_` with them.
            pooling: What stands for a whole text, see `HarmonicConfig`; default: `mean`, or what a
                `base_head` was trained with.
            dtype: The backbone's dtype, also by its name; the head is float32.
            dropout: Probability of every dropout of the backbone; default: the base's own.

        Raises:
            ValueError: Fewer than two labels, or one twice; the checkpoint does not fill the
                backbone, or has no such head over these labels.
        """
        head_class = cls if init == "base_head" else None
        base = load_base(name, revision, head_class=head_class, dtype=dtype, dropout=dropout)
        return cls.on_base(base, labels=labels, head=head, init=init, pooling=pooling)

    @classmethod
    def on_base(
        cls,
        base: Base,
        *,
        labels: Sequence[str],
        head: dict[str, Any] | None = None,
        init: str = "random",
        pooling: str | None = None,
    ) -> Self:
        """Put a new head on a loaded base, which is not copied; see `from_base`."""
        is_regression = len(labels) == 1 and (head or {}).get("name") == "linear"
        if (len(labels) < 2 and not is_regression) or len(set(labels)) < len(labels):
            raise ValueError(f"labels: expected two or more different ones, got {list(labels)}")
        if init not in ("random", "base_head"):
            raise ValueError(f"init: expected 'random' or 'base_head', got {init!r}")
        if base.head is not None and base.labels != list(labels):
            raise ValueError(
                f"init base_head: expected the labels of base {base.name} in their order, "
                f"{base.labels}, got {list(labels)}. Its rows stand for those; use init random"
            )
        model = cls._from_loaded_base(
            base,
            head,
            keep_head=init == "base_head",
            id2label=dict(enumerate(labels)),
            label2id={label: index for index, label in enumerate(labels)},
            pooling=pooling or base.pooling or "mean",
        )
        return model._remember_random_weight() if init == "random" else model

    def _needs_logits(self, labels: Tensor | None, output_logits: bool | None) -> bool:
        """Whether to return logits: also in training, unless told not to."""
        return super()._needs_logits(labels, output_logits is not False)

    def _loss(
        self,
        hidden_states: Tensor,
        labels: Tensor | None,
        num_items_in_batch: Tensor | int | None,
        **options: Any,
    ) -> Tensor | None:
        """Return the mean loss of hidden states `[B, T, D]` of tokens or `[B, 1, D]` of texts."""
        if labels is not None and self.has_free_labels(labels):
            logits = self._logits(hidden_states)
            return self._free_loss(logits, labels, options["label_weights"], num_items_in_batch)
        self._check_head_trains()
        if labels is not None and labels.numel() == hidden_states[..., 0].numel():
            labels = labels.reshape(hidden_states.shape[:2])
        return super()._loss(hidden_states, labels, num_items_in_batch, **options)

    def has_free_labels(self, labels: Tensor) -> bool:
        """Whether labels are numbers, or a yes or no for each class, by transformers' rules.

        Every logit is then a prediction of its own, which only a linear head gives.
        """
        problem, several = self.config.problem_type, self.num_classes(self.config) > 1
        if self.config.head["name"] != "linear" or problem == "single_label_classification":
            return False
        return problem is not None or not several or labels.is_floating_point()

    def _free_loss(
        self,
        logits: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        num_items_in_batch: Tensor | int | None,
    ) -> Tensor:
        """Return the mean loss of logits `[..., V]` that are numbers, or log odds of each class."""
        if labels.numel() != logits.numel():
            raise ValueError(
                f"labels: expected one number for each of {list(logits.shape)}, "
                f"got {labels.dtype} of {list(labels.shape)}"
            )
        problem, target = self.config.problem_type, labels.to(logits).reshape(logits.shape)
        is_number = problem == "regression" or (problem is None and logits.shape[-1] == 1)
        # Kept in the configuration, as transformers does, for pipelines.
        self.config.problem_type = "regression" if is_number else "multi_label_classification"
        loss_fn = F.mse_loss if is_number else F.binary_cross_entropy_with_logits
        scored = target != IGNORE_INDEX
        losses = loss_fn(logits, target, reduction="none").where(scored, 0)
        if weights is not None:
            losses = losses * weights.to(losses.device).reshape(*logits.shape[:-1], -1)
        return mean_of(losses, scored.sum() if num_items_in_batch is None else num_items_in_batch)


class HarmonicForSequenceClassification(HarmonicClassifier):
    """A backbone with a head that predicts the class, the classes or the score of a whole text."""

    _output_class = SequenceClassifierOutput

    def attended(self, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
        """Return the given mask `[B, T]`; without one, mask out the padding of a decoder's texts.

        None stands for all ones.

        Raises:
            ValueError: Several texts without a mask, and the configuration has no `pad_token_id`.
        """
        if attention_mask is not None or input_ids is None or not self.config.is_causal:
            return attention_mask
        pad_token_id = self.config.pad_token_id
        if pad_token_id is None and len(input_ids) > 1:
            raise ValueError(
                "attention_mask: expected one for several texts, as the configuration has no "
                "pad_token_id, got none"
            )
        return None if pad_token_id is None else input_ids != pad_token_id

    def select(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return one vector for each text, `[B, 1, D]`, of hidden states `[B, T, D]`.

        For a decoder this is the last attended token. For an encoder it is the first one (pooling
        `cls`) or the mean over them, in float32 or better.
        """
        if attention_mask is None:
            attention_mask = hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.int64)
        attention_mask = attention_mask.to(hidden_states.device)
        if self.config.is_causal or self.config.pooling == "cls":  # padding may be on both sides
            attended = attention_mask.to(torch.int64)
            place = attended.argmax(-1)
            if self.config.is_causal:
                place = attended.shape[1] - 1 - attended.flip(-1).argmax(-1)
            rows = torch.arange(place.shape[0], device=place.device)  # `len` would fix it in traces
            return hidden_states[rows, place].unsqueeze(1)
        hidden_states = at_least_float32(hidden_states)
        weights = attention_mask.to(hidden_states.dtype).unsqueeze(-1)  # [B, T, 1]
        total = (hidden_states * weights).sum(1, keepdim=True)
        return total / weights.sum(1, keepdim=True).clamp_min(1)

    def _logits(self, hidden_states: Tensor) -> Tensor:
        """Return logits `[B, V]` for the vectors `[B, 1, D]` of texts."""
        return super()._logits(hidden_states).squeeze(1)


class HarmonicForTokenClassification(HarmonicClassifier):
    """A backbone with a head that predicts the class of every token."""

    _output_class = TokenClassifierOutput


class HarmonicForQuestionAnswering(HarmonicClassifier):
    """A backbone with a head that predicts where an answer starts and ends.

    Raises:
        ValueError: The head is a mixture, whose logits compare only within one position.
    """

    def __init__(self, config: HarmonicConfig):
        super().__init__(config)
        if any(isinstance(part, MultiHead) for part in self.dist_head.modules()):
            raise ValueError(
                "head: expected one whose logits can be compared between the positions of a text, "
                "got a multi_head, whose probabilities of start and end add up to 1 at each. Take "
                "a linear, cosine or dist head"
            )

    @staticmethod
    def num_classes(config: HarmonicConfig) -> int:
        """Return 2: a logit for the start and one for the end."""
        return 2

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """Predict the span of the answer in rows `[B, T]` of question and text.

        `start_positions` and `end_positions` are `[B]`; one outside the row is not scored. All
        other arguments are those of `HarmonicModel`.

        Returns:
            `start_logits` and `end_logits` `[B, T]`, and with positions `loss`, the mean
            cross-entropy of both in nats; 0 if no position is scored.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            **kwargs,
        )
        start_logits, end_logits = self._logits(outputs.last_hidden_state).unbind(-1)  # [B, T]
        loss = None
        if start_positions is not None and end_positions is not None:
            start_loss = _span_loss(start_logits, start_positions)
            loss = (start_loss + _span_loss(end_logits, end_positions)) / 2
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def _span_loss(logits: Tensor, positions: Tensor) -> Tensor:
    """Return the mean cross-entropy of positions `[B]`, or `[B, 1]`, among logits `[B, T]`.

    transformers' own is NaN if all are outside of the row, and takes negative ones for 0.
    """
    positions = positions.to(logits.device).flatten()
    inside = (positions >= 0) & (positions < logits.shape[1])
    positions = positions.where(inside, IGNORE_INDEX)
    return F.cross_entropy(logits, positions, reduction="sum") / inside.sum().clamp_min(1)
