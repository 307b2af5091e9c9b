"""Rows of several documents: what keeps one from seeing another in any backbone."""

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
from transformers.utils.generic import is_flash_attention_requested

from .backbones import max_positions, position_offset
from .modeling_neobert import flash_boundaries

# Encoders whose tokens interact only in attention and that take a mask per pair of tokens. A
# convolution, an attention of their own or a mixing of all positions would leak. For every one the
# tests compare packed rows with their documents alone.
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
    backbone: PreTrainedModel,
    attention_mask: Tensor | None,
    position_ids: Tensor,
    *,
    is_causal: bool,
) -> dict[str, Any]:
    """Return the arguments that show a backbone where the documents of its rows begin.

    Args:
        backbone: Any encoder or decoder.
        attention_mask: `[B, T]`, 0 for padding, or None. A mask of another shape is the caller's
            own and left as it is.
        position_ids: `[B, T]`, counted from 0 whatever the backbone: a position that does not
            continue the one before it starts a new document.
        is_causal: The backbone is a decoder.

    Returns:
        `attention_mask` and `position_ids` in the form of the backbone and of its attention
        implementation, and the boundaries that flash attention wants.

    Raises:
        ValueError: The backbone cannot keep documents apart, counts positions for itself, or has
            too few.
    """
    config = backbone.config
    is_pairwise = attention_mask is not None and attention_mask.dim() != 2
    if is_causal and (position_ids.is_meta or torch.compiler.is_compiling()):
        return _unseen_documents(config.model_type, attention_mask, position_ids)
    if is_pairwise or not _are_packed(attention_mask, position_ids, is_causal):
        positions = {"position_ids": position_ids}  # a decoder takes them as they are
        if not is_causal:
            positions = _positions(backbone, position_ids)
        return {"attention_mask": attention_mask, **positions}
    known = PACKABLE_DECODERS if is_causal else PACKABLE
    if config.model_type not in known:
        raise ValueError(_not_packable(config.model_type, known))
    if attention_mask is not None:
        # Every padding token becomes a document of its own: no other token sees it, and it sees
        # itself, since attention to nothing would be NaN.
        position_ids = position_ids.masked_fill(attention_mask == 0, 0)
    arguments: dict[str, Any] = {"attention_mask": None, "position_ids": position_ids}
    if config.model_type == "neobert":  # finds the documents in the positions itself
        return arguments
    if is_causal:
        arguments["use_cache"] = False  # with a cache transformers does not look for documents
    else:
        _check_length(backbone, position_ids)
        arguments["position_ids"] = position_ids + position_offset(config)
    if is_flash_attention_requested(config):
        arguments |= flash_boundaries(position_ids)
    elif not is_causal:
        arguments["attention_mask"] = _block_diagonal(backbone, position_ids)
    return arguments


def _unseen_documents(
    model_type: str, attention_mask: Tensor | None, position_ids: Tensor
) -> dict[str, Any]:
    """Return a decoder's arguments for positions that have no values yet (compiled, or meta).

    The number of documents need not be known: without a cache transformers makes the mask from the
    positions, for one document or several. Decoders that are not packable assert at run time that
    there is one.
    """
    if position_ids.is_meta:  # transformers would look at the values of positions that it is given
        return {"attention_mask": attention_mask}
    is_pairwise = attention_mask is not None and attention_mask.dim() != 2
    if model_type not in PACKABLE_DECODERS:
        if not is_pairwise and not torch.onnx.is_in_onnx_export():  # ONNX cannot assert
            is_whole = ~_starts(attention_mask, position_ids).any()
            torch._assert_async(is_whole, _not_packable(model_type, PACKABLE_DECODERS))
    elif attention_mask is not None and not is_pairwise:
        position_ids = position_ids.masked_fill(attention_mask == 0, 0)
        attention_mask = None
    return {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": False}


def _are_packed(attention_mask: Tensor | None, position_ids: Tensor, is_causal: bool) -> bool:
    """Whether a row has several documents."""
    if not is_causal:
        return find_packed_sequence_indices(position_ids) is not None
    return bool(_starts(attention_mask, position_ids).any())


def _starts(attention_mask: Tensor | None, position_ids: Tensor) -> Tensor:
    """Return where documents begin after the first token of a decoder's rows, `[B, T - 1]`."""
    starts = position_ids.diff(dim=-1) != 1
    if attention_mask is not None:  # `generate` counts padding on the left in its own way
        attended = attention_mask.bool()
        starts = starts & attended[:, 1:] & attended[:, :-1]
    return starts


def _not_packable(model_type: str, known: tuple[str, ...]) -> str:
    return (
        f"position_ids: expected one document per row for a backbone of type {model_type!r}, got "
        f"several. Packed rows are for {list(known)}"
    )


def _check_length(backbone: PreTrainedModel, position_ids: Tensor) -> None:
    limit = max_positions(backbone.config)
    # The row may be longer than the model as long as none of its documents is.
    if position_ids.shape[1] > limit and bool(position_ids.max() >= limit):
        raise ValueError(
            f"position_ids: expected documents of at most {limit} tokens, "
            f"got one of {int(position_ids.max()) + 1}. Cut the documents"
        )


def _positions(backbone: PreTrainedModel, position_ids: Tensor) -> dict[str, Tensor]:
    """Return the positions as a packable encoder counts them; others count for themselves."""
    config = backbone.config
    if config.model_type in PACKABLE:
        return {"position_ids": position_ids + position_offset(config)}
    counted = torch.arange(position_ids.shape[1], device=position_ids.device)
    if not torch.equal(position_ids, counted.expand_as(position_ids)):
        raise ValueError(
            f"position_ids: expected positions counted from 0, because a backbone of type "
            f"{config.model_type!r} counts for itself, got {position_ids[0, :3].tolist()}..."
        )
    return {}


def _block_diagonal(backbone: PreTrainedModel, position_ids: Tensor) -> Any:
    """Return the mask of pairs in one document, in the form of the attention implementation."""
    documents = find_packed_sequence_indices(position_ids)  # [B, T]
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
