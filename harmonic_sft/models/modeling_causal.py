"""Harmonic causal language models: any native decoder under a geometry-aware head."""

import os
from typing import Any, ClassVar

from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .modeling_harmonic import HarmonicLanguageModel


class HarmonicForCausalLM(HarmonicLanguageModel, GenerationMixin):
    """A decoder with a head that predicts the next token."""

    _auto_map: ClassVar[dict[str, str]] = {
        "AutoModelForCausalLM": "modeling_causal.HarmonicForCausalLM"
    }
    is_causal = True

    def select(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the positions that have a next token: all but the last, `[B, T - 1, D]`."""
        return hidden_states[:, :-1]

    def targets(self, labels: Tensor) -> Tensor:
        """Return the labels `[B, T - 1]` of what `select` leaves: the next tokens."""
        return labels[:, 1:]

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Save as the other models are; a trainer turns the cache off, which is not to be kept."""
        vars(self.config).pop("use_cache", None)
        super().save_pretrained(save_directory, *args, **kwargs)

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
        label_positions: Tensor | None = None,
        label_weights: Tensor | None = None,
        shift_labels: Tensor | None = None,
        output_logits: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Predict the next token at every position.

        Args:
            input_ids: `[B, T]`.
            attention_mask: `[B, T]`, 1 = attend; of the cached tokens too.
            position_ids: `[B, T]`. Without a cache, a position that does not continue the one
                before it starts a new document, and tokens attend only to their own.
            past_key_values: What earlier calls have left.
            inputs_embeds: `[B, T, D]` in place of `input_ids`.
            labels: `[B, T]`, the tokens themselves, shifted here; -100 where nothing is predicted.
                With labels only the labelled positions reach the head.
            use_cache: Return `past_key_values`; default: without labels, out of training.
            logits_to_keep: Logits of so many last positions alone, or of those with these indices;
                0 is all.
            num_items_in_batch: Divides the summed loss; see `mean_token_loss`.
            label_positions: `[N]`, from `scored_positions`; saves a wait for the device.
            label_weights: Of each label, as `labels`; each loss is multiplied by its own.
            shift_labels: `[B, T]` in place of `labels`, shifted already: position t predicts its
                own entry. Sequence parallelism cuts rows after the shift.
            output_logits: Return logits beside the loss. Default: not in training mode, where the
                logits of every position would be the largest tensor.
            kwargs: The backbone's further arguments.

        Returns:
            `loss` in nats, with labels; `logits` `[B, T, V]`, as `output_logits` says.
        """
        if use_cache is None:
            use_cache = labels is None and shift_labels is None and not self.training
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state  # [B, T, D]
        # An integer is how many at the end, a tensor which.
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        targets = labels if shift_labels is None else shift_labels
        needs_logits = self._needs_logits(targets, output_logits)
        loss = self._loss(
            hidden_states,
            targets,
            label_positions if shift_labels is None else None,  # they are those of `labels`
            label_weights,
            num_items_in_batch,
            shifts=shift_labels is None,
        )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=self._logits(hidden_states[:, kept]) if needs_logits else None,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
