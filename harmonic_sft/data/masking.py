"""Masks for masked language modeling, keyed by seed, epoch and example."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as config_dataclass

from harmonic_sft.data.keyed_random import random_bits

IGNORE_INDEX = -100
EVAL_EPOCH = -1  # no training epoch has this number, so evaluation masks are a stream of their own


@config_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class MaskConfig:
    """How tokens are masked; the defaults are those NeoBERT was trained with."""

    probability: float = Field(
        default=0.2, gt=0, lt=1, description="share of the ordinary tokens that is masked"
    )
    policy: Literal["mask_only"] = Field(
        default="mask_only", description="mask_only: every masked token becomes the mask token"
    )


def mask_tokens(
    input_ids: np.ndarray,
    *,
    special: np.ndarray,
    key: tuple[int, int, int, int, int],
    probability: float,
    mask_token_id: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Mask every ordinary token of one row independently with the same probability.

    The draw depends on `key` alone, so any number of processes, workers or restarts sees the same
    masks. As in NeoBERT's training a short row may end up with no masked token at all.

    Args:
        input_ids: `[T]`, integers.
        special: `[T]`, bool, true where a token must never be masked.
        key: (seed, epoch, source, document, chunk).
        probability: In (0, 1).
        mask_token_id: What a masked token becomes.

    Returns:
        `[T]` int64 input ids and `[T]` int64 labels, the labels being `IGNORE_INDEX` wherever
        nothing was masked.

    Source:
        Le Breton et al. 2025, NeoBERT: A Next-Generation BERT, arXiv:2502.19587, section 3.
    """
    bits = random_bits("mlm mask", key, len(input_ids))  # [T]
    masked = (bits < np.uint64(int(probability * 2**64))) & ~special  # [T]
    labels = np.where(masked, input_ids, IGNORE_INDEX).astype(np.int64)
    return np.where(masked, mask_token_id, input_ids).astype(np.int64), labels


@dataclass(frozen=True, kw_only=True)
class RowMasker:
    """Mask rows of one run: everything `mask_tokens` needs but the row and the epoch."""

    seed: int
    probability: float
    mask_token_id: int
    special_tokens: np.ndarray  # [V], bool, true for ids that are never masked

    def __call__(self, row: Mapping[str, Any], epoch: int) -> dict[str, np.ndarray]:
        """Mask one row.

        Args:
            row: `input_ids` `[T]` and its name: `source`, `document` and `chunk`.
            epoch: Number of the pass over the data, or `EVAL_EPOCH`.

        Returns:
            `input_ids` and `labels`, both `[T]` int64.
        """
        row_ids = np.asarray(row["input_ids"])  # [T]
        input_ids, labels = mask_tokens(
            row_ids,
            special=self.special_tokens[row_ids],
            key=(self.seed, epoch, int(row["source"]), int(row["document"]), int(row["chunk"])),
            probability=self.probability,
            mask_token_id=self.mask_token_id,
        )
        return {"input_ids": input_ids, "labels": labels}
