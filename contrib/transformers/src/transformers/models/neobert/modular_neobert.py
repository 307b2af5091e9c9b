# Copyright 2026 the HuggingFace Team. All rights reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.

import math
from collections.abc import Callable

import torch
from huggingface_hub.dataclasses import strict
from torch import nn

from ... import initialization as init
from ...activations import ACT2FN
from ...configuration_utils import PreTrainedConfig
from ...masking_utils import create_bidirectional_mask
from ...modeling_layers import (
    GenericForQuestionAnswering,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from ...modeling_outputs import BaseModelOutput, MaskedLMOutput, SequenceClassifierOutput
from ...modeling_rope_utils import RopeParameters, dynamic_rope_update
from ...modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from ...processing_utils import Unpack
from ...utils import TransformersKwargs, auto_docstring
from ...utils.generic import can_return_tuple, merge_with_config_defaults
from ...utils.output_capturing import capture_outputs
from ..bert.modeling_bert import eager_attention_forward
from ..cohere.modeling_cohere import CohereRotaryEmbedding, apply_rotary_pos_emb


@auto_docstring(checkpoint="chandar-lab/NeoBERT")
@strict
class NeoBertConfig(PreTrainedConfig):
    r"""
    intermediate_size (`int`, *optional*, defaults to 3072):
        Width of a plain MLP with as many parameters as the gated one, whose own width is two thirds of this, rounded
        up to a multiple of 8.
    norm_eps (`float`, *optional*, defaults to 1e-05):
        Added to the mean square in every RMSNorm.
    embedding_init_range (`float`, *optional*, defaults to 0.02):
        New embeddings are uniform between minus and plus this value.
    decoder_init_range (`float`, *optional*, defaults to 0.02):
        New weights of linear layers are uniform between minus and plus this value.
    classifier_init_range (`float`, *optional*, defaults to 0.02):
        Standard deviation of the new weights of classification heads.

    ```python
    >>> from transformers import NeoBertConfig, NeoBertModel

    >>> # Initializing a NeoBERT chandar-lab/NeoBERT style configuration
    >>> configuration = NeoBertConfig()

    >>> # Initializing a model from the chandar-lab/NeoBERT style configuration
    >>> model = NeoBertModel(configuration)

    >>> # Accessing the model configuration
    >>> configuration = model.config
    ```"""

    model_type = "neobert"
    default_theta = 10000.0
    # The rows of `qkv` are grouped by head, so a slice of them holds whole heads.
    base_model_tp_plan = {
        "transformer_encoder.*.qkv": "colwise",
        "transformer_encoder.*.wo": "rowwise",
        "transformer_encoder.*.ffn.w12": "packed_colwise",
        "transformer_encoder.*.ffn.w3": "rowwise",
    }
    base_model_pp_plan = {
        "encoder": (["input_ids"], ["inputs_embeds"]),
        "transformer_encoder": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "layer_norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 30522
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 28
    num_attention_heads: int = 12
    hidden_act: str = "silu"
    max_position_embeddings: int = 4096
    norm_eps: float = 1e-5
    rope_parameters: RopeParameters | dict | None = None
    classifier_dropout: float | int = 0.1
    embedding_init_range: float = 0.02
    decoder_init_range: float = 0.02
    classifier_init_range: float = 0.02
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        # BC -> the checkpoints on the Hub name the longest sequence `max_length`, which is now a generation parameter,
        # and the size of a head `dim_head`, which follows from the others.
        self.max_position_embeddings = kwargs.pop("max_length", None) or self.max_position_embeddings
        kwargs.pop("dim_head", None)
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Part of `@strict`-powered validation. Validates the architecture of the config."""
        head_dim, remainder = divmod(self.hidden_size, self.num_attention_heads)
        if remainder != 0 or head_dim % 2 != 0:
            raise ValueError(
                f"The hidden size ({self.hidden_size}) is not an even multiple of the number of attention "
                f"heads ({self.num_attention_heads})."
            )


class NeoBertRotaryEmbedding(CohereRotaryEmbedding):
    @torch.no_grad()
    @dynamic_rope_update  # power user: used with advanced RoPE types (e.g. dynamic rope)
    def forward(self, x, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        emb = torch.repeat_interleave(freqs, 2, dim=-1)
        # Unlike Cohere, the angles stay in float32, as in the original code: queries and keys are rotated in it
        return emb.cos() * self.attention_scaling, emb.sin() * self.attention_scaling


class NeoBertMLP(nn.Module):
    def __init__(self, config: NeoBertConfig):
        super().__init__()
        width = 8 * math.ceil(int(2 * config.intermediate_size / 3) / 8)
        self.w12 = nn.Linear(config.hidden_size, 2 * width, bias=False)
        self.w3 = nn.Linear(width, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, up = self.w12(hidden_states).chunk(2, dim=-1)
        return self.w3(self.act_fn(gate) * up)


class NeoBertAttention(nn.Module):
    """Bidirectional attention. The projections before and after it belong to the layer, as in the checkpoints."""

    def __init__(self, config: NeoBertConfig):
        super().__init__()
        self.config = config
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = False

    def forward(
        self,
        qkv_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        input_shape = qkv_states.shape[:-1]
        # Query, key and value of the first head, then those of the second one
        qkv_states = qkv_states.view(*input_shape, -1, 3 * self.head_dim).transpose(1, 2)
        query_states, key_states, value_states = qkv_states.chunk(3, dim=-1)

        cos, sin = position_embeddings
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)

        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attn_output, attn_weights = attention_interface(
            self,
            query_states,
            key_states,
            value_states,
            attention_mask,
            dropout=0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return attn_output.reshape(*input_shape, -1).contiguous(), attn_weights


class NeoBertEncoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: NeoBertConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.attention = NeoBertAttention(config)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.ffn = NeoBertMLP(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        qkv_states = self.qkv(self.attention_norm(hidden_states))
        attn_output, _ = self.attention(
            qkv_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            **kwargs,
        )
        hidden_states = hidden_states + self.wo(attn_output)
        return hidden_states + self.ffn(self.ffn_norm(hidden_states))


@auto_docstring
class NeoBertPreTrainedModel(PreTrainedModel):
    config: NeoBertConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _input_embed_layer = "encoder"
    _no_split_modules = ["NeoBertEncoderLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    _can_record_outputs = {
        "hidden_states": NeoBertEncoderLayer,
        "attentions": NeoBertAttention,
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, nn.Linear):
            bound = self.config.decoder_init_range
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, nn.Embedding):
            # The row of the padding token is drawn like the others, as in the original code
            bound = self.config.embedding_init_range
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, NeoBertForSequenceClassification):
            init.normal_(module.dense.weight, std=self.config.classifier_init_range)
            init.normal_(module.classifier.weight, std=self.config.classifier_init_range)
        elif isinstance(module, NeoBertForTokenClassification):
            init.normal_(module.score.weight, std=self.config.classifier_init_range)
        elif isinstance(module, NeoBertForQuestionAnswering):
            init.normal_(module.qa_outputs.weight, std=self.config.classifier_init_range)


@auto_docstring
class NeoBertModel(NeoBertPreTrainedModel):
    # The checkpoints on the Hub were saved from the masked language model
    _keys_to_ignore_on_load_unexpected = [r"^decoder\."]

    def __init__(self, config: NeoBertConfig):
        super().__init__(config)
        self.encoder = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.rotary_emb = NeoBertRotaryEmbedding(config=config)
        self.transformer_encoder = nn.ModuleList([NeoBertEncoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.layer_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)

        # Initialize weights and apply final processing
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")

        if inputs_embeds is None:
            inputs_embeds = self.encoder(input_ids)

        if position_ids is None:
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device).unsqueeze(0)

        bidirectional_mask = create_bidirectional_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
        )

        hidden_states = inputs_embeds
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)

        for encoder_layer in self.transformer_encoder:
            hidden_states = encoder_layer(
                hidden_states,
                attention_mask=bidirectional_mask,
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                **kwargs,
            )

        hidden_states = self.layer_norm(hidden_states)
        return BaseModelOutput(last_hidden_state=hidden_states)


@auto_docstring(
    custom_intro="""
    The NeoBERT Model with a decoder on top that is used for masked language modeling.
    """
)
class NeoBertForMaskedLM(NeoBertPreTrainedModel):
    _tied_weights_keys = {"decoder.weight": "model.encoder.weight"}
    _tp_plan = {"decoder": "colwise_gather_output"}
    _pp_plan = {"decoder": (["hidden_states"], ["logits"])}

    def __init__(self, config: NeoBertConfig):
        super().__init__(config)
        self.model = NeoBertModel(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

        # Initialize weights and apply final processing
        self.post_init()

    def get_output_embeddings(self):
        return self.decoder

    def set_output_embeddings(self, new_embeddings):
        self.decoder = new_embeddings

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        r"""
        Example:

        ```python
        >>> from transformers import AutoTokenizer, NeoBertForMaskedLM

        >>> model = NeoBertForMaskedLM.from_pretrained("chandar-lab/NeoBERT")
        >>> tokenizer = AutoTokenizer.from_pretrained("chandar-lab/NeoBERT")

        >>> inputs = tokenizer("The capital of France is [MASK].", return_tensors="pt")
        >>> logits = model(**inputs).logits

        >>> masked_index = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
        >>> predicted_token = tokenizer.decode(logits[0, masked_index].argmax(dim=-1))
        ```"""
        outputs: BaseModelOutput = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )

        logits = self.decoder(outputs.last_hidden_state)

        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)

        return MaskedLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


@auto_docstring(
    custom_intro="""
    The NeoBERT Model with a sequence classification head on top, which reads the first token.
    """
)
class NeoBertForSequenceClassification(NeoBertPreTrainedModel):
    def __init__(self, config: NeoBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = NeoBertModel(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

        # Initialize weights and apply final processing
        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        outputs: BaseModelOutput = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )

        pooled_output = self.dropout(outputs.last_hidden_state[:, 0])
        pooled_output = self.dropout(torch.tanh(self.dense(pooled_output)))
        logits = self.classifier(pooled_output)

        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)

        return SequenceClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class NeoBertForTokenClassification(GenericForTokenClassification, NeoBertPreTrainedModel):
    pass


class NeoBertForQuestionAnswering(GenericForQuestionAnswering, NeoBertPreTrainedModel):
    def get_input_embeddings(self):
        return self.model.encoder

    def set_input_embeddings(self, value):
        self.model.encoder = value


__all__ = [
    "NeoBertConfig",
    "NeoBertPreTrainedModel",
    "NeoBertModel",
    "NeoBertForMaskedLM",
    "NeoBertForSequenceClassification",
    "NeoBertForTokenClassification",
    "NeoBertForQuestionAnswering",
]
