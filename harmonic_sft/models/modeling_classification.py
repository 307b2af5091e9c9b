"""Harmonic models with a head over classes: of whole texts, and of their tokens."""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers.modeling_outputs import SequenceClassifierOutput, TokenClassifierOutput
from transformers.utils import can_return_tuple

from .bases import Base, load_base
from .configuration_harmonic import HarmonicConfig
from .modeling_harmonic import HarmonicHeadModel


class HarmonicClassifier(HarmonicHeadModel):
    """A head over the classes in `config.id2label`, of which one is right.

    Raises:
        ValueError: The configuration asks for regression or several labels at once.
    """

    _output_class: ClassVar[type[SequenceClassifierOutput | TokenClassifierOutput]]

    def __init__(self, config: HarmonicConfig):
        problem = config.problem_type or "single_label_classification"
        if problem != "single_label_classification" or self.num_classes(config) < 2:
            raise ValueError(
                "problem_type: expected single_label_classification of two labels or more, got "
                f"{problem} of {config.num_labels}. A head gives one probability over all classes"
            )
        super().__init__(config)

    @staticmethod
    def num_classes(config: HarmonicConfig) -> int:
        """Return V, the number of labels."""
        assert config.num_labels is not None, "a configuration has two labels if it names none"
        return config.num_labels

    @classmethod
    def from_base(
        cls,
        name: str,
        *,
        labels: Sequence[str],
        revision: str | None = None,
        head: dict[str, Any] | None = None,
        init: str = "random",
        pooling: str = "mean",
        dtype: torch.dtype = torch.float32,
        dropout: float | None = None,
    ) -> Self:
        """Put a new head on a pretrained encoder.

        Args:
            name: A folder or a name on the Hub; also one of our own checkpoints, whose head is
                then replaced.
            labels: Names of the classes, in the order of the head's rows.
            revision: A revision on the Hub.
            head: `{"name": ..., fields...}`; default: a `DistLayer` on the unit sphere.
            init: `random`, or `base_head`: the weights of the head of a base that is itself such a
                model. For class means call `dist_head.initialize_` with them.
            pooling: What stands for a whole text; see `HarmonicConfig`.
            dtype: The backbone's dtype; the head is float32.
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
        pooling: str = "mean",
    ) -> Self:
        """Put a new head on a loaded base, which is not copied; see `from_base`.

        Raises:
            ValueError: Fewer than two labels, or one twice; the base has no such head over these
                labels.
        """
        if len(labels) < 2 or len(set(labels)) < len(labels):
            raise ValueError(f"labels: expected two or more different ones, got {list(labels)}")
        if init not in ("random", "base_head"):
            raise ValueError(f"init: expected 'random' or 'base_head', got {init!r}")
        if base.head is not None and base.labels != list(labels):
            raise ValueError(
                f"init base_head: expected the labels of base {base.name} in their order, "
                f"{base.labels}, got {list(labels)}. Its rows stand for those; use init random"
            )
        return cls._around(
            base,
            head,
            keep_head=init == "base_head",
            id2label=dict(enumerate(labels)),
            label2id={label: index for index, label in enumerate(labels)},
            pooling=pooling,
        )

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        label_positions: Tensor | None = None,
        label_weights: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput | TokenClassifierOutput:
        """Predict the class of each text or token.

        Args:
            input_ids: `[B, T]`.
            attention_mask: `[B, T]`, 1 = attend.
            labels: `[B]` of texts or `[B, T]` of tokens, -100 for what is not scored.
            num_items_in_batch: Divides the summed loss; see `mean_token_loss`.
            label_positions: `[N]`, from `scored_positions`; saves a wait for the device.
            label_weights: Of each label, as `labels`; each loss is multiplied by its own.
            kwargs: The backbone's further arguments.

        Returns:
            `loss` in nats with labels; `logits` `[B, V]` of texts or `[B, T, V]` of tokens.
        """
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        states = self.select(outputs.last_hidden_state, attention_mask)  # [B, S, D]
        if labels is not None:
            if labels.is_floating_point() or labels.numel() != len(states) * states.shape[1]:
                raise ValueError(
                    "labels: expected one class number for each of "
                    f"{list(states.shape[:2])}, got {labels.dtype} of {list(labels.shape)}"
                )
            labels = labels.reshape(states.shape[:2])
        return self._output_class(
            loss=self._loss(states, labels, label_positions, label_weights, num_items_in_batch),
            logits=self._logits(states),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class HarmonicForSequenceClassification(HarmonicClassifier):
    """An encoder with a head that predicts the class of a whole text."""

    _auto_map: ClassVar[dict[str, str]] = {
        "AutoModelForSequenceClassification": (
            "modeling_classification.HarmonicForSequenceClassification"
        )
    }
    _output_class = SequenceClassifierOutput

    def select(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return one vector for each text.

        Args:
            hidden_states: `[B, T, D]`.
            attention_mask: `[B, T]`, 1 = attend; None is all ones.

        Returns:
            `[B, 1, D]`, float32 or better: the mean over the attended tokens, or the first one.
        """
        if attention_mask is None:
            attention_mask = hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.int64)
        if self.config.pooling == "cls":
            first = attention_mask.to(torch.int64).argmax(-1)  # padding may be on the left
            rows = torch.arange(len(first), device=first.device)
            return hidden_states[rows, first].unsqueeze(1)
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        weights = attention_mask.to(wide).unsqueeze(-1)  # [B, T, 1]
        total = (hidden_states.to(wide) * weights).sum(1, keepdim=True)
        return total / weights.sum(1, keepdim=True).clamp_min(1)

    def _logits(self, hidden_states: Tensor) -> Tensor:
        """Return logits `[B, V]` for the vectors `[B, 1, D]` of texts."""
        return super()._logits(hidden_states).squeeze(1)


class HarmonicForTokenClassification(HarmonicClassifier):
    """An encoder with a head that predicts the class of every token."""

    _auto_map: ClassVar[dict[str, str]] = {
        "AutoModelForTokenClassification": "modeling_classification.HarmonicForTokenClassification"
    }
    _output_class = TokenClassifierOutput
