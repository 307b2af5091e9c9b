"""Masks for masked language modeling, keyed by seed, epoch and example."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from harmonic_sft.data.keyed_random import random_bits
from harmonic_sft.data.sections import MaskConfig

IGNORE_INDEX = -100
EVAL_EPOCH = -1  # no training epoch has this number, so evaluation masks are a stream of their own
NO_WORD = -1  # in `word_ids`, a token that belongs to no word

Policy = Literal["mask_only", "80_10_10"]
Key = tuple[int, int, int, int, int]  # (seed, epoch, source, document, chunk)


def choose_tokens(
    maskable: np.ndarray,
    *,
    key: Key,
    probability: float,
    word_ids: np.ndarray | None = None,
) -> np.ndarray:
    """Choose tokens, or whole words, of one row independently with the same probability.

    The draw depends on `key` and on the place in the row alone, so any number of processes, workers
    or restarts sees the same masks. As in NeoBERT's training a short row may end up with no masked
    token at all.

    Args:
        maskable: `[T]`, bool, false where a token must never be masked.
        key: Name of the row in this epoch.
        probability: In (0, 1).
        word_ids: `[T]`, integers, equal in neighbors that form a word and `NO_WORD` in tokens that
            stay as they are; None draws for every token. The draw of a word is the draw of its
            first token, and counts for those of its tokens that are `maskable`.

    Returns:
        `[T]` bool, true where a token is masked.

    Source:
        Le Breton et al. 2025, NeoBERT: A Next-Generation BERT, arXiv:2502.19587, section 3.
    """
    bits = random_bits("mlm mask", key, len(maskable))  # [T]
    chosen = bits < _threshold(probability)  # [T]
    if word_ids is None:
        return chosen & maskable
    is_first = np.ones(len(word_ids), dtype=bool)  # [T]
    is_first[1:] = word_ids[1:] != word_ids[:-1]
    word = np.cumsum(is_first) - 1  # [T]
    return chosen[is_first][word] & maskable & (word_ids != NO_WORD)


def replace_tokens(
    input_ids: np.ndarray,
    masked: np.ndarray,
    *,
    key: Key,
    policy: Policy,
    mask_token_id: int,
    ordinary_ids: np.ndarray,
) -> np.ndarray:
    """Put what the model shall see in the place of the masked tokens.

    Args:
        input_ids: `[T]`, integers.
        masked: `[T]`, bool.
        key: Name of the row in this epoch.
        policy: `mask_only`: the mask token. `80_10_10`: it with probability 0.8, with 0.1 any of
            `ordinary_ids`, the right one included, and with 0.1 the token itself; drawn for every
            token, also in a word that is masked as a whole.
        mask_token_id: Stands for what is hidden.
        ordinary_ids: `[R]`, every token that may be put in by `80_10_10`.

    Returns:
        `[T]` int64.

    Source:
        Devlin et al. 2019, BERT: Pre-training of Deep Bidirectional Transformers, arXiv:1810.04805,
        section 3.1. There the random token may also be a special one.
    """
    hidden = np.where(masked, mask_token_id, input_ids).astype(np.int64)  # [T]
    if policy == "mask_only":
        return hidden
    fate = random_bits("mlm fate", key, len(input_ids))  # [T]
    draws = random_bits("mlm token", key, len(input_ids))  # [T]
    # The remainder favors small numbers by R in 2 ** 64, which nothing can measure.
    other = ordinary_ids[(draws % np.uint64(len(ordinary_ids))).astype(np.int64)]  # [T]
    shown = np.where(fate < _threshold(0.9), other, input_ids)  # [T]
    return np.where(masked & (fate >= _threshold(0.8)), shown, hidden)


def _threshold(probability: float) -> np.uint64:
    """Return the number that random bits fall below with this probability."""
    return np.uint64(int(probability * 2**64))


def special_tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> np.ndarray:
    """Return `[V]` bool: special tokens, with added ones like `<|im_start|>`, and unused ids."""
    special = np.ones(vocab_size, dtype=bool)  # [V]
    special[list(tokenizer.get_vocab().values())] = False
    special[tokenizer.all_special_ids] = True
    # transformers 5.23 leaves added tokens that have no role out of `all_special_ids`.
    added = tokenizer.added_tokens_decoder.items()
    special[[index for index, token in added if token.special]] = True
    return special


@dataclass(frozen=True, kw_only=True)
class RowMasker:
    """Mask rows of one run: everything that masks depend on but the row and the epoch."""

    seed: int
    probability: float
    mask_token_id: int
    special_tokens: np.ndarray  # [V], bool, true for ids that are never masked nor put in
    policy: Policy = "mask_only"
    whole_word: bool = False

    @classmethod
    def of(
        cls,
        config: MaskConfig,
        *,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        seed: int,
    ) -> "RowMasker":
        """Make the masker of a run.

        Args:
            config: The `data.mask` part of its configuration.
            tokenizer: Of the model, with a mask token. Special are its special tokens, added ones
                such as `<|im_start|>` included, and ids that it does not use.
            vocab_size: Rows of the model's embedding table.
            seed: Of the masks.

        Raises:
            ValueError: Whole words with a tokenizer that does not know where words end.
        """
        if config.whole_word and not tokenizer.is_fast:
            raise ValueError(
                "data.mask.whole_word: expected a fast tokenizer, which knows the words, "
                f"got {type(tokenizer).__name__}. Mask single tokens, or use its fast version."
            )
        return cls(
            seed=seed,
            probability=config.probability,
            mask_token_id=tokenizer.mask_token_id,
            special_tokens=special_tokens(tokenizer, vocab_size),
            policy=config.policy,
            whole_word=config.whole_word,
        )

    @cached_property
    def ordinary_ids(self) -> np.ndarray:
        """`[R]` int64, the ids that may be masked and put in."""
        return np.flatnonzero(~self.special_tokens)

    def maskable(self, row: Mapping[str, Any]) -> np.ndarray:
        """Tell which tokens of a row can ever be masked.

        Args:
            row: `input_ids` `[T]` and perhaps `scored` `[T]`, true where a token may be predicted.

        Returns:
            `[T]` bool.
        """
        ordinary = ~self.special_tokens[np.asarray(row["input_ids"])]  # [T]
        scored = row.get("scored")
        return ordinary if scored is None else ordinary & np.asarray(scored, dtype=bool)

    def __call__(self, row: Mapping[str, Any], epoch: int) -> dict[str, np.ndarray]:
        """Mask one row.

        Args:
            row: `input_ids` `[T]` and its name: `source`, `document` and `chunk`. If there is a
                `scored` `[T]`, only tokens where it is true are masked. For whole words also
                `word_ids` `[T]`, `NO_WORD` in tokens that belong to none.
            epoch: Number of the pass over the data, or `EVAL_EPOCH`.

        Returns:
            `input_ids` and `labels`, both `[T]` int64, the labels being `IGNORE_INDEX` wherever
            nothing was masked.
        """
        assert not self.whole_word or "word_ids" in row, "whole words need rows with word_ids"
        row_ids = np.asarray(row["input_ids"])  # [T]
        key = (self.seed, epoch, int(row["source"]), int(row["document"]), int(row["chunk"]))
        masked = choose_tokens(
            self.maskable(row),
            key=key,
            probability=self.probability,
            word_ids=np.asarray(row["word_ids"]) if self.whole_word else None,
        )
        input_ids = replace_tokens(
            row_ids,
            masked,
            key=key,
            policy=self.policy,
            mask_token_id=self.mask_token_id,
            ordinary_ids=self.ordinary_ids,
        )
        labels = np.where(masked, row_ids, IGNORE_INDEX).astype(np.int64)
        return {"input_ids": input_ids, "labels": labels}
