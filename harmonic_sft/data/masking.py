"""What is predicted in a row: masked tokens, every next token, or classes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from harmonic_sft.data.keyed_random import random_bits
from harmonic_sft.data.sections import MaskConfig
from harmonic_sft.models.objective import IGNORE_INDEX

EVAL_EPOCH = -1  # no training epoch has this number, so evaluations draw masks of their own
NO_WORD = -1  # in `word_ids`, a token that belongs to no word


def special_tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> np.ndarray:
    """Return `[V]` bool: True for special tokens, also added `<|im_start|>`, and for unused ids."""
    special = np.ones(vocab_size, dtype=bool)  # [V]
    special[list(tokenizer.get_vocab().values())] = False
    special[tokenizer.all_special_ids] = True
    # transformers 5.23 leaves added tokens that have no role out of `all_special_ids`.
    added = tokenizer.added_tokens_decoder.items()
    special[[index for index, token in added if token.special]] = True
    return special


@dataclass(frozen=True, kw_only=True)
class RowMasker:
    """Mask rows of one run; it holds all that masks depend on, except the row and the epoch.

    Tokens, or whole words, of a row are chosen independently with the same probability. A draw
    depends on the key (seed, epoch, source, document, chunk) and on the place in the row alone. As
    in NeoBERT's training a short row may end up with no masked token at all.

    Source:
        Le Breton et al. 2025, NeoBERT: A Next-Generation BERT, arXiv:2502.19587, section 3. The
        policy 80_10_10 is Devlin et al. 2019, BERT: Pre-training of Deep Bidirectional
        Transformers, arXiv:1810.04805, section 3.1; there the random token may also be a special
        one.
    """

    config: MaskConfig
    seed: int
    mask_token_id: int
    special_tokens: np.ndarray  # [V] bool, ids that are never masked and never put in at random

    @cached_property
    def ordinary_ids(self) -> np.ndarray:
        """`[R]` int64, the ids that may be masked, and put in at random."""
        return np.flatnonzero(~self.special_tokens)

    def maskable(self, row: Mapping[str, Any]) -> np.ndarray:
        """Tell which tokens of a row, `[T]` bool, can ever be masked: ordinary and scored ones."""
        ordinary = ~self.special_tokens[np.asarray(row["input_ids"])]  # [T]
        return ordinary & np.asarray(row.get("scored", True), dtype=bool)

    def __call__(self, row: Mapping[str, Any], epoch: int) -> dict[str, np.ndarray]:
        """Mask one row.

        Args:
            row: `input_ids` `[T]` and its name: `source`, `document` and `chunk`. If there is a
                `scored` `[T]`, only tokens where it is true are masked. For whole words also
                `word_ids` `[T]`, equal in neighbors that form a word and `NO_WORD` in tokens that
                stay as they are.
            epoch: Number of the pass over the data, or `EVAL_EPOCH`.

        Returns:
            `input_ids` and `labels`, both `[T]` int64, the labels being `IGNORE_INDEX` wherever
            nothing was masked; and `label_weights` `[T]` float32 of a row with a `weight`.
        """
        row_ids = np.asarray(row["input_ids"])  # [T]
        key = (self.seed, epoch, int(row["source"]), int(row["document"]), int(row["chunk"]))
        chosen = random_bits("mlm mask", key, len(row_ids)) < _share(self.config.probability)  # [T]
        if self.config.whole_word:
            assert "word_ids" in row, "whole words need rows with word_ids"
            chosen = _of_words(chosen, np.asarray(row["word_ids"]))
        masked = chosen & self.maskable(row)  # [T]
        labels = np.where(masked, row_ids, IGNORE_INDEX).astype(np.int64)
        hidden = self._hidden(row_ids, masked, key)
        return {"input_ids": hidden, "labels": labels} | _weights(row, labels.shape)

    def _hidden(self, row_ids: np.ndarray, masked: np.ndarray, key: tuple[int, ...]) -> np.ndarray:
        """Replace masked tokens by what the model sees, `[T]` int64."""
        hidden = np.where(masked, self.mask_token_id, row_ids).astype(np.int64)  # [T]
        if self.config.policy == "mask_only":
            return hidden
        fate = random_bits("mlm fate", key, len(row_ids))  # [T]
        draws = random_bits("mlm token", key, len(row_ids))  # [T]
        # The remainder favors small numbers by R in 2 ** 64, which nothing can measure.
        places = (draws % np.uint64(len(self.ordinary_ids))).astype(np.int64)  # [T]
        shown = np.where(fate < _share(0.9), self.ordinary_ids[places], row_ids)  # [T]
        return np.where(masked & (fate >= _share(0.8)), shown, hidden)


def _share(probability: float) -> np.uint64:
    """Return the number that random bits fall below with this probability."""
    return np.uint64(int(probability * 2**64))


def _of_words(chosen: np.ndarray, word_ids: np.ndarray) -> np.ndarray:
    """Give every token of a word the draw of its first one, `[T]` bool."""
    is_first = np.ones(len(word_ids), dtype=bool)  # [T]
    is_first[1:] = word_ids[1:] != word_ids[:-1]
    return chosen[is_first][np.cumsum(is_first) - 1] & (word_ids != NO_WORD)


@dataclass(frozen=True, kw_only=True)
class NextTokenLabels:
    """The `RowMasker` of a decoder: every token, special ones too, is predicted."""

    seed: int  # not used: nothing is drawn
    special_tokens: np.ndarray

    def maskable(self, row: Mapping[str, Any]) -> np.ndarray:
        """Tell which tokens of one or several rows may be predicted, `[T]` bool.

        The first token of each row counts too, although nothing predicts it.
        """
        everything = np.ones(len(row["input_ids"]), dtype=bool)
        return np.asarray(row.get("scored", everything), dtype=bool)

    def __call__(self, row: Mapping[str, Any], epoch: int) -> dict[str, np.ndarray]:
        """Label one row as `RowMasker` does; the first token is never predicted."""
        input_ids = np.asarray(row["input_ids"]).astype(np.int64)  # [T]
        labels = np.where(self.maskable(row), input_ids, IGNORE_INDEX)
        labels[:1] = IGNORE_INDEX
        return {"input_ids": input_ids, "labels": labels} | _weights(row, labels.shape)


@dataclass(frozen=True, kw_only=True)
class ClassLabels:
    """The `RowMasker` of a classifier: rows get the numbers of their classes."""

    seed: int  # not used: nothing is drawn
    names: Sequence[str]  # of the classes, in the order of their numbers
    numbers: Mapping[str, int]  # the number of a class, by its label in rows
    of_tokens: bool  # whether a row has a label for each word, at its first token, or only one

    def __call__(self, row: Mapping[str, Any], epoch: int) -> dict[str, np.ndarray]:
        """Label one row as `RowMasker` does; the one label of a text is `[]`.

        If no row of the data has a label, `labels` is left out.
        """
        input_ids = np.asarray(row["input_ids"]).astype(np.int64)
        if not self.numbers:
            return {"input_ids": input_ids}
        numbers = [self.numbers.get(label, IGNORE_INDEX) for label in row["labels"]]
        labels = np.array(numbers, dtype=np.int64)  # [T]
        if not self.of_tokens:
            labels = labels[labels != IGNORE_INDEX].reshape(())
        return {"input_ids": input_ids, "labels": labels} | _weights(row, labels.shape)


def _weights(row: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return `label_weights`, float32, for a row with a `weight`, else nothing."""
    if "weight" not in row:
        return {}
    return {"label_weights": np.full(shape, row["weight"], dtype=np.float32)}


TokenLabels = RowMasker | NextTokenLabels
RowLabels = TokenLabels | ClassLabels
