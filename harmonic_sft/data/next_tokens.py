"""Rows of a decoder: every token is predicted from those before it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from harmonic_sft.data.masking import IGNORE_INDEX, RowMasker


@dataclass(frozen=True, kw_only=True)
class NextTokenLabels:
    """Label the rows of one run; stands where a `RowMasker` stands for an encoder."""

    seed: int  # of the order of the rows; the labels do not depend on it
    special_tokens: np.ndarray  # [V], bool; they are predicted too

    def maskable(self, row: Mapping[str, Any]) -> np.ndarray:
        """Tell which tokens of rows, one after the other, may be predicted.

        Args:
            row: `input_ids` `[T]` and perhaps `scored` `[T]`.

        Returns:
            `[T]` bool; that nothing stands before the first token of a row is not looked at.
        """
        scored = row.get("scored")
        length = len(row["input_ids"])
        return np.ones(length, dtype=bool) if scored is None else np.asarray(scored, dtype=bool)

    def __call__(self, row: Mapping[str, Any], epoch: int) -> dict[str, np.ndarray]:
        """Label one row.

        Args:
            row: `input_ids` `[T]`. If there is a `scored` `[T]`, only tokens where it is true are
                predicted; the first one never is.
            epoch: Not looked at: all passes are alike.

        Returns:
            `input_ids` and `labels`, both `[T]` int64, the labels being the tokens themselves, or
            `IGNORE_INDEX`.
        """
        input_ids = np.asarray(row["input_ids"]).astype(np.int64)  # [T]
        labels = np.where(self.maskable(row), input_ids, IGNORE_INDEX)
        labels[:1] = IGNORE_INDEX
        return {"input_ids": input_ids, "labels": labels}


RowLabels = RowMasker | NextTokenLabels
