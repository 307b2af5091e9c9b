"""NeoBERT, backbone and masked language model, over the keys of the published checkpoint."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import (
    create_bidirectional_mask,
    find_packed_sequence_indices,
    packed_sequence_mask_function,
)
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import capture_outputs

from .configuration_neobert import NeoBERTConfig


def rotary_embedding(position_ids: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine `[B, T, D / (2 H)]` of the angles by which RoPE turns each pair.

    Pair i turns by `theta ** (-2 * i / head_dim)` radians per position; `position_ids` are `[B, T]`
    or `[1, T]`. Computed at every forward, in float32 whatever the dtype of the model: a buffer
    would be lost when the model is built on the meta device, and a complex one broken by a cast to
    bfloat16.

    Source:
        Su et al. 2021, RoFormer, arXiv:2104.09864, Eq. 15.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_ids.device)
    frequencies = 1.0 / theta ** (exponents / head_dim)  # [D / (2 H)]
    angles = position_ids[..., None].float() * frequencies  # [B, T, D / (2 H)]
    return angles.cos(), angles.sin()


def apply_rotary_embedding(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the interleaved pairs (0, 1), (2, 3), ... of `[..., D / H]` by the angles given.

    Computed in float32, as `cos` and `sin` `[..., D / (2 H)]` are; returned in the dtype of
    `states`. Half-rotated RoPE, which pairs i with i + D / (2 H), is another function of the same
    weights.
    """
    pairs = states.unflatten(-1, (-1, 2))
    if states.is_cuda and not is_tracing(states):
        rotated = turn_complex(pairs, cos, sin)
    else:
        even, odd = pairs.unbind(-1)
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).to(states.dtype)


def turn_complex(pairs: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs `[..., D / (2 H), 2]` as complex numbers, in float32.

    This takes three kernels. Real numbers take nine, which on an H100 were a sixth of a training
    step.
    """
    return torch.view_as_real(torch.view_as_complex(pairs.float()) * torch.complex(cos, sin))


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Return attention `[B, T, H, D / H]` and its weights, as transformers' interface has them."""
    scores = query @ key.transpose(-2, -1) * scaling  # [B, H, T, T]
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2), weights


def document_boundaries(attended: Tensor, position_ids: Tensor | None) -> Tensor | None:
    """Return, on the CPU, where the pieces of rows begin: each attends only to itself.

    A piece is a document, which begins where `position_ids` `[B, T]` do not continue, or padding,
    where `attended` `[B, T]` is False. Offsets run through all rows. Waits for the device.

    Returns:
        `[pieces + 1]` int32, the end of the last row included; None if attended tokens follow
        padding without beginning a document.
    """
    before, after = attended[:, :-1], attended[:, 1:]
    starts, resumed = torch.zeros_like(attended), torch.zeros_like(attended)
    starts[:, 0] = True
    if position_ids is not None:
        starts[:, 1:] = after & (position_ids.diff() != 1)
    resumed[:, 1:] = after & ~before & ~starts[:, 1:]
    starts[:, 1:] |= before != after
    starts, resumed = torch.stack([starts, resumed]).flatten(1).cpu()  # one wait for both
    if resumed.any():
        return None
    return torch.cat([starts.nonzero().flatten(), torch.tensor([len(starts)])]).int()


def document_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, pieces: tuple[Tensor, int]
) -> Tensor:
    """Return attention `[B, T, H, D / H]` within pieces of the rows, by torch's own flash kernels.

    Queries, keys and values are `[B, H, T, D / H]` in 16 bits, with products scaled by
    (D / H) ** -0.5; `pieces` are `document_boundaries`, on the device, and the tokens of the
    longest piece.
    """
    from torch.nn.attention.varlen import varlen_attn  # new in torch 2.10

    boundaries, longest = pieces
    rows = [states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)]
    output = varlen_attn(*rows, boundaries, boundaries, longest, longest)
    assert isinstance(output, Tensor), "no more was asked for"
    return output.unflatten(0, (len(query), -1))


class NeoBERTRMSNorm(nn.RMSNorm):
    """RMSNorm with a weight of any dtype; the kernel computes in float32 inside."""

    def forward(self, x: Tensor) -> Tensor:
        """Divide `[..., D]` by its root mean square and scale, in the dtype given."""
        # torch warns and leaves its fused kernel if the two dtypes differ.
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class NeoBERTAttention(nn.Module):
    """Bidirectional attention with RoPE between two projections that belong to the block."""

    def __init__(self, config: NeoBERTConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = False  # SDPA would take True for granted when there is no mask

    def forward(
        self,
        qkv: Tensor,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor],
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return `[B, T, D]`, and weights `[B, H, T, T]` where the implementation has them.

        `qkv` is `[B, T, 3 D]`, head by head: query, key and value of head 0, then of head 1. With
        `pieces` in `kwargs`, `document_attention_forward` stands in for the implementation.
        """
        qkv = qkv.unflatten(-1, (self.num_heads, 3, self.head_dim))  # [B, T, H, 3, D / H]
        cos, sin = (table[:, :, None, None] for table in position_embeddings)
        query, key = apply_rotary_embedding(qkv[..., :2, :], cos, sin).unbind(-2)
        states = [x.transpose(1, 2) for x in (query, key, qkv[..., 2, :])]  # [B, H, T, D / H]
        if "pieces" in kwargs:
            return document_attention_forward(*states, kwargs["pieces"]).flatten(-2), None
        attention_fn: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attention_fn(
            self, *states, attention_mask, scaling=self.scaling, **kwargs
        )
        return output.flatten(-2), weights


class NeoBERTSwiGLU(nn.Module):
    """Gated MLP whose first projection is fused: the first half gates, the second half passes."""

    def __init__(self, config: NeoBERTConfig) -> None:
        super().__init__()
        # Two thirds, for the parameters of a plain MLP of intermediate_size, and a multiple of 8.
        width = 8 * math.ceil(int(2 * config.intermediate_size / 3) / 8)
        self.w12 = nn.Linear(config.hidden_size, 2 * width, bias=False)
        self.w3 = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map `[..., D]` to `[..., D]`."""
        gate, up = self.w12(hidden_states).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * up)


class NeoBERTBlock(GradientCheckpointingLayer):
    """Pre-norm attention and MLP, each added to the residual stream; no biases, no dropout."""

    def __init__(self, config: NeoBERTConfig) -> None:
        super().__init__()
        self.attention_norm = NeoBERTRMSNorm(config.hidden_size, config.norm_eps)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.attention = NeoBERTAttention(config)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.ffn_norm = NeoBERTRMSNorm(config.hidden_size, config.norm_eps)
        self.ffn = NeoBERTSwiGLU(config)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor],
        **kwargs: Any,
    ) -> Tensor:
        """Map `[B, T, D]` to `[B, T, D]`; the other arguments are those of the attention."""
        qkv = self.qkv(self.attention_norm(hidden_states))  # [B, T, 3 D]
        attended, _ = self.attention(qkv, attention_mask, position_embeddings, **kwargs)
        hidden_states = hidden_states + self.wo(attended)
        return hidden_states + self.ffn(self.ffn_norm(hidden_states))


class NeoBERTPreTrainedModel(PreTrainedModel):
    """What the NeoBERT classes share: names, abilities and initial weights."""

    config: NeoBERTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _input_embed_layer = "encoder"
    _no_split_modules = ["NeoBERTBlock"]  # noqa: RUF012, transformers' own form
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": NeoBERTBlock,
        "attentions": NeoBERTAttention,
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # The row of the padding token is drawn like the others, as in the published code, and the
        # decoder's bias is zero, as in the training code; neither scales with depth.
        if isinstance(module, nn.Linear):
            bound = self.config.decoder_init_range
            init.uniform_(module.weight, -bound, bound)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            bound = self.config.embedding_init_range
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, NeoBERTRMSNorm):
            init.ones_(module.weight)


class NeoBERTModel(NeoBERTPreTrainedModel):
    """The encoder, from token ids to hidden states."""

    # The published checkpoint was saved from the masked language model.
    _keys_to_ignore_on_load_unexpected = [r"^decoder\."]  # noqa: RUF012

    def __init__(self, config: NeoBERTConfig) -> None:
        super().__init__(config)
        self.encoder = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.transformer_encoder = nn.ModuleList(
            NeoBERTBlock(config) for _ in range(config.num_hidden_layers)
        )
        self.layer_norm = NeoBERTRMSNorm(config.hidden_size, config.norm_eps)
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Encode token ids.

        Args:
            input_ids: `[B, T]`. Exactly one of this and `inputs_embeds`.
            attention_mask: `[B, T]`, 1 for a token that may be attended to, 0 for padding. None
                means all. Padding is hidden from the others only: it still gets outputs.
            token_type_ids: Ignored, because NeoBERT has no token types; some tokenizers make them.
            position_ids: `[B, T]` or `[1, T]`, by default counted from 0. A position that does not
                continue the one before it starts a new document (at 0), and tokens attend only to
                their own document.
            inputs_embeds: `[B, T, D]`.
            **kwargs: `output_hidden_states` (embeddings, then every block, the last after the final
                norm), `output_attentions` (eager only), and arguments of flash attention.

        Returns:
            `last_hidden_state` `[B, T, D]`, after the final norm, and what was asked for.

        Raises:
            ValueError: If the ids are missing or doubled, if the sequence is longer than
                `max_position_embeddings`, or if the boundaries of the documents are ambiguous.
        """
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither" if input_ids is None else "both"
            raise ValueError(f"input_ids: expected either this or inputs_embeds, got {given}")
        hidden_states = self.encoder(input_ids) if inputs_embeds is None else inputs_embeds
        self._check_length(hidden_states.shape[1], position_ids)
        attention_mask, packing = self._attention_mask(
            hidden_states, attention_mask, position_ids, kwargs.get("cu_seq_lens_q")
        )
        kwargs |= packing
        if position_ids is None:
            position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        head_dim = self.config.hidden_size // self.config.num_attention_heads
        position_embeddings = rotary_embedding(position_ids, head_dim, self.config.rope_theta)
        for block in self.transformer_encoder:
            hidden_states = block(hidden_states, attention_mask, position_embeddings, **kwargs)
        return BaseModelOutput(last_hidden_state=self.layer_norm(hidden_states))

    def _check_length(self, length: int, position_ids: Tensor | None) -> None:
        limit = self.config.max_position_embeddings
        # A packed row may be longer than the model as long as none of its documents is.
        if length > limit and (position_ids is None or bool(position_ids.max() >= limit)):
            raise ValueError(
                f"sequence length: expected at most {limit} tokens (max_position_embeddings), "
                f"got {length}. Truncate the input"
            )

    def _attention_mask(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cu_seq_lens: Tensor | None,
    ) -> tuple[Any, dict[str, Any]]:
        """Return the mask for the attention implementation, and its further arguments."""
        same_document = None
        if position_ids is None and cu_seq_lens is not None:
            raise ValueError("position_ids: expected one per token beside cu_seq_lens_q, got None")
        if position_ids is not None:
            position_ids = position_ids.expand(hidden_states.shape[0], -1)
        if self._has_flash_kernels(hidden_states):
            pieces = self._pieces(hidden_states, attention_mask, position_ids)
            if pieces is not None:
                return None, pieces
        if position_ids is not None:
            documents = find_packed_sequence_indices(position_ids)  # [B, T], None if not packed
            if documents is not None:
                if is_flash_attention_requested(self.config):
                    if attention_mask is not None:
                        raise ValueError(
                            "attention_mask: expected None beside packed position_ids under flash "
                            "attention, got a tensor. Make the padding a document of its own"
                        )
                    return None, flash_boundaries(position_ids)
                same_document = packed_sequence_mask_function(documents)
        mask = create_bidirectional_mask(
            self.config, hidden_states, attention_mask, and_mask_function=same_document
        )
        return mask, {}

    def _has_flash_kernels(self, hidden_states: Tensor) -> bool:
        """Whether torch's own flash kernels can run on documents of any length, and are allowed."""
        return (
            self.config._attn_implementation == "sdpa"
            and hidden_states.is_cuda
            and hidden_states.dtype.itemsize == 2
            and self.config.hidden_size // self.config.num_attention_heads in range(8, 129, 8)
            and torch.backends.cuda.is_flash_attention_available()
            and torch.cuda.get_device_capability(hidden_states.device) >= (8, 0)
            and torch.backends.cuda.flash_sdp_enabled()  # what `sdpa_kernel` allows
            and not is_tracing(hidden_states)  # a trace has no values to find boundaries in
        )

    @staticmethod
    def _pieces(
        hidden_states: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> dict[str, Any] | None:
        """Return the attention's argument for rows of several pieces, None if it needs a mask."""
        shape, device = hidden_states.shape[:2], hidden_states.device
        if attention_mask is not None:
            if attention_mask.shape != shape:
                return None
            attended = attention_mask.to(device, torch.bool)
        elif position_ids is not None:
            attended = torch.ones(shape, dtype=torch.bool, device=device)
        else:
            return {}
        boundaries = document_boundaries(attended, position_ids)
        if boundaries is None:
            return None
        if len(boundaries) == shape[0] + 1:  # whole rows, which need no mask
            return {}
        return {"pieces": (boundaries.to(device), int(boundaries.diff().max()))}


def flash_boundaries(position_ids: Tensor) -> dict[str, Any]:
    """Return where the documents of `[B, T]` positions begin, as flash attention wants it."""
    lengths, longest = prepare_fa_kwargs_from_position_ids(position_ids)
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    return dict(zip(names, lengths + longest, strict=True))


class NeoBERTForMaskedLM(NeoBERTPreTrainedModel):
    """The encoder with the published decoder, a plain biased projection to the vocabulary."""

    _tied_weights_keys = {"decoder.weight": "model.encoder.weight"}  # noqa: RUF012

    def __init__(self, config: NeoBERTConfig) -> None:
        super().__init__(config)
        self.model = NeoBERTModel(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        """Return the decoder, weight `[V, D]`."""
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the decoder, weight `[V, D]`."""
        self.decoder = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Return `logits` `[B, T, V]` and, with labels, `loss`: the mean cross-entropy in nats.

        Labels are `[B, T]`, -100 where nothing is to be predicted; `num_items_in_batch` divides the
        summed loss. All other arguments are those of `NeoBERTModel`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        logits = self.decoder(outputs.last_hidden_state)  # [B, T, V]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
