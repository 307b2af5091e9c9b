"""Packed rows: what keeps the documents of one row from seeing each other in any backbone."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    find_packed_sequence_indices,
    packed_sequence_mask_function,
)
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids
from transformers.utils.generic import is_flash_attention_requested

from .backbones import OFFSET_POSITIONS, max_positions

# Backbones whose tokens meet in attention alone and which take a mask per pair of tokens: a
# convolution, an attention of their own or a mixing of all positions would leak. Every one is
# compared with its documents alone in the tests.
PACKABLE = (
    "albert",
    "bert",
    "camembert",
    "data2vec-text",
    "distilbert",
    "electra",
    "ernie",
    "eurobert",
    "modernbert",
    "neobert",
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
)
# Decoders whose masks transformers makes from the positions.
PACKABLE_DECODERS = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
)
SLIDING_WINDOWS = ("modernbert",)  # take one mask for the layers of each kind


def document_arguments(
    backbone: PreTrainedModel, attention_mask: Tensor | None, position_ids: Tensor, batch_size: int
) -> dict[str, Any]:
    """Return the arguments that show a backbone where the documents of its rows begin.

    Args:
        backbone: Any encoder.
        attention_mask: `[B, T]`, 0 for padding, or None. A mask of another shape is the caller's
            own and left as it is.
        position_ids: `[B, T]` or `[1, T]`, counted from 0 whatever the backbone: a position that
            does not continue the one before it starts a new document (at 0).
        batch_size: B.

    Returns:
        `attention_mask` and `position_ids` in the form of the backbone and of its attention
        implementation, and the boundaries that flash attention wants.

    Raises:
        ValueError: The backbone cannot keep documents apart, takes no positions, or has too few.
    """
    model_type = backbone.config.model_type
    position_ids = position_ids.expand(batch_size, -1)
    pairwise = attention_mask is not None and attention_mask.dim() != 2
    documents = None if pairwise else find_packed_sequence_indices(position_ids)  # [B, T]
    if documents is None:
        positions = _positions(backbone, position_ids)
        return {"attention_mask": attention_mask, **positions}
    if model_type not in PACKABLE:
        raise ValueError(
            f"position_ids: expected one document per row for a backbone of type {model_type!r}, "
            f"got several. Packed rows are for {list(PACKABLE)}"
        )
    if attention_mask is not None:
        # Every token of the padding becomes a document of its own, so that no other sees it and
        # it does not look at nothing, which would be NaN.
        position_ids = position_ids.masked_fill(attention_mask == 0, 0)
        documents = find_packed_sequence_indices(position_ids)
    if model_type == "neobert":  # does the rest itself
        return {"attention_mask": None, "position_ids": position_ids}
    _check_length(backbone, position_ids)
    positions = _positions(backbone, position_ids)
    if is_flash_attention_requested(backbone.config):
        return {"attention_mask": None, **positions, **_flash_boundaries(position_ids)}
    return {"attention_mask": _block_diagonal(backbone, documents), **positions}


def decoder_arguments(
    backbone: PreTrainedModel, attention_mask: Tensor | None, position_ids: Tensor
) -> dict[str, Any]:
    """Return the arguments that show a decoder where the documents of its rows begin.

    Args:
        backbone: Any decoder.
        attention_mask: `[B, T]`, 0 for padding on either side, or None. A mask of another shape is
            the caller's own and left as it is.
        position_ids: `[B, T]` or `[1, T]`. Among attended tokens, one that does not continue the
            one before it starts a new document.

    Returns:
        `attention_mask`, `position_ids`, and where there are several documents that no cache is to
        be used, and the boundaries that flash attention wants.

    Raises:
        ValueError: The backbone cannot keep documents apart.
    """
    unchanged = {"attention_mask": attention_mask, "position_ids": position_ids}
    starts = position_ids.diff(dim=-1) != 1  # [B, T - 1]
    if attention_mask is not None:
        if attention_mask.dim() != 2:
            return unchanged
        attended = attention_mask.bool()
        starts = starts & attended[:, 1:] & attended[:, :-1]
    if not bool(starts.any()):
        return unchanged
    if backbone.config.model_type not in PACKABLE_DECODERS:
        raise ValueError(
            "position_ids: expected one document per row for a backbone of type "
            f"{backbone.config.model_type!r}, got several. Packed rows are for "
            f"{list(PACKABLE_DECODERS)}"
        )
    if attention_mask is not None:  # every token of the padding becomes a document of its own
        position_ids = position_ids.masked_fill(attention_mask == 0, 0)
    flash = is_flash_attention_requested(backbone.config)
    boundaries = _flash_boundaries(position_ids) if flash else {}
    # A cache is for one document: beside one transformers looks for no boundaries.
    return {
        "attention_mask": None,
        "position_ids": position_ids,
        "use_cache": False,
        **boundaries,
    }


def _check_length(backbone: PreTrainedModel, position_ids: Tensor) -> None:
    limit = max_positions(backbone.config)
    # The row may be longer than the model as long as none of its documents is.
    if position_ids.shape[1] > limit and bool(position_ids.max() >= limit):
        raise ValueError(
            f"position_ids: expected documents of at most {limit} tokens, "
            f"got one of {int(position_ids.max()) + 1}. Cut the documents"
        )


def _positions(backbone: PreTrainedModel, position_ids: Tensor) -> dict[str, Tensor]:
    """Return the positions as the backbone counts them, nothing if it counts them itself."""
    config = backbone.config
    if config.model_type in OFFSET_POSITIONS:
        return {"position_ids": position_ids + config.pad_token_id + 1}
    # The signature is only read for strangers: compilers cannot follow it.
    if (
        config.model_type in PACKABLE
        or "position_ids" in inspect.signature(backbone.forward).parameters
    ):
        return {"position_ids": position_ids}
    counted = torch.arange(position_ids.shape[1], device=position_ids.device)
    if not torch.equal(position_ids, counted.expand_as(position_ids)):
        raise ValueError(
            f"position_ids: expected positions counted from 0, because a backbone of type "
            f"{config.model_type!r} takes no others, got {position_ids[0, :3].tolist()}..."
        )
    return {}


def _flash_boundaries(position_ids: Tensor) -> dict[str, Any]:
    lengths, longest = prepare_fa_kwargs_from_position_ids(position_ids)
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    return dict(zip(names, lengths + longest, strict=True))


def _block_diagonal(backbone: PreTrainedModel, documents: Tensor | None) -> Any:
    """Return the mask of pairs in one document, in the form of the attention implementation."""
    assert documents is not None, "padding cannot join the documents of a row"
    arguments: dict[str, Any] = {
        "config": backbone.config,
        # Stands for the embeddings: only its batch, length, dtype and device are read.
        "inputs_embeds": torch.empty(
            (*documents.shape, 0), dtype=backbone.dtype, device=documents.device
        ),
        "attention_mask": None,
        "and_mask_function": packed_sequence_mask_function(documents),
    }
    mask = create_bidirectional_mask(**arguments)
    if backbone.config.model_type not in SLIDING_WINDOWS:
        return mask
    # A document lies in one piece: a window over the row is one over the document.
    sliding = create_bidirectional_sliding_window_mask(**arguments)
    return {"full_attention": mask, "sliding_attention": sliding}
