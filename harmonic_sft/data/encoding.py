"""Text as tokens: what the formats of data have in common."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

SURROGATE = re.compile("[\ud800-\udfff]")
BATCH_CHARACTERS = 1 << 21  # what a tokenizer knows of one takes some 200 bytes


class BadRow(ValueError):
    """Why one row of data cannot be used; the message is the reason."""


class Encoded(NamedTuple):
    """A document as tokens, without those that the tokenizer puts around every row."""

    input_ids: list[int]
    scored: list[bool] | None  # which tokens may be predicted; None is all ordinary ones
    word_ids: list[int] | None  # tokens of a word share a number; -1 is no word


@dataclass(frozen=True)
class SpecialTokens:
    """What a tokenizer puts around one text."""

    prefix: list[int]
    suffix: list[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "SpecialTokens":
        """Find them by tokenizing a word: v5 has no `build_inputs_with_special_tokens`."""
        encoded = tokenizer("a", return_special_tokens_mask=True)
        ordinary = np.flatnonzero(np.asarray(encoded["special_tokens_mask"]) == 0)
        input_ids = list(encoded["input_ids"])
        return cls(input_ids[: ordinary[0]], input_ids[ordinary[-1] + 1 :])


class TextTokens(NamedTuple):
    """One text as tokens."""

    input_ids: list[int]
    offsets: np.ndarray | None  # [T, 2], characters
    word_ids: list[int] | None


def tokenize(
    texts: Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase,
    spells: bool = False,
    offsets: bool = False,
    word_ids: bool = False,
) -> list[TextTokens | None]:
    """Tokenize texts in one batch, without the special tokens around them.

    Args:
        texts: Of any lengths.
        tokenizer: A fast one, if `offsets` or `word_ids` are wanted.
        spells: Whether a special token that a text spells is that token (else it is text).
        offsets: Whether to give the characters of every token.
        word_ids: Whether to number the words.

    Returns:
        One entry per text; None for a text with surrogates, which no tokenizer takes.

    Raises:
        ValueError: The tokenizer does not know the places of its tokens.
    """
    if (offsets or word_ids) and not tokenizer.is_fast:
        raise ValueError(
            "tokenizer: expected a fast tokenizer for masks of turns or whole words, "
            f"got {type(tokenizer).__name__}. Use one that has a tokenizer.json."
        )
    valid = [text.isascii() or not SURROGATE.search(text) for text in texts]
    good = [text for text, is_valid in zip(texts, valid, strict=True) if is_valid]
    if not good:
        return [None] * len(texts)
    # Only a special token that was spelled is no word; an unknown word is one.
    marks = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id} if spells else set()
    tokens: list[TextTokens] = []
    for group in _groups(good):
        encoded = tokenizer(
            group,
            add_special_tokens=False,
            split_special_tokens=not spells,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=offsets,
            verbose=False,  # no warning about documents longer than the model
        )
        tokens += [
            TextTokens(
                list(input_ids),
                np.asarray(encoded["offset_mapping"][i]).reshape(-1, 2) if offsets else None,
                _number_words(input_ids, encoded.word_ids(i), marks) if word_ids else None,
            )
            for i, input_ids in enumerate(encoded["input_ids"])
        ]
    in_turn = iter(tokens)
    return [next(in_turn) if is_valid else None for is_valid in valid]


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """Split texts where a tokenizer would need much memory for all of them at once."""
    group: list[str] = []
    characters = 0
    for text in texts:
        if group and characters + len(text) > BATCH_CHARACTERS:
            yield group
            group, characters = [], 0
        group.append(text)
        characters += len(text)
    yield group


def _number_words(
    input_ids: Sequence[int], words: Sequence[int | None], special: set[int]
) -> list[int]:
    return [
        -1 if word is None or token in special else word
        for token, word in zip(input_ids, words, strict=True)
    ]


class Piece(NamedTuple):
    """A part of a document that is tokenized on its own."""

    text: str
    spells: bool  # whether a special token in the text is a token (else it is text)
    scored: bool | list[tuple[int, int]]  # the whole piece, or spans of its characters


def encode_pieces(
    drafts: Sequence[list[Piece] | str], *, tokenizer: PreTrainedTokenizerBase, word_ids: bool
) -> list[Encoded | str]:
    """Tokenize the pieces of many documents in one batch and join them.

    Args:
        drafts: Pieces of each document; a string is returned as it stands.
        tokenizer: As in `tokenize`.
        word_ids: As in `tokenize`; no word goes across two pieces.

    Returns:
        One entry per document, a string being the reason why it cannot be used.
    """
    pieces = [piece for draft in drafts if not isinstance(draft, str) for piece in draft]
    offsets = any(not isinstance(piece.scored, bool) for piece in pieces)
    table: dict[tuple[str, bool], TextTokens | None] = {}
    for spells in (False, True):
        texts = dict.fromkeys(piece.text for piece in pieces if piece.spells == spells)
        tokens = tokenize(
            list(texts), tokenizer=tokenizer, spells=spells, offsets=offsets, word_ids=word_ids
        )
        table |= {(text, spells): entry for text, entry in zip(texts, tokens, strict=True)}
    encoded: list[Encoded | str] = []
    for draft in drafts:
        if isinstance(draft, str):
            encoded.append(draft)
            continue
        parts = [(table[piece.text, piece.spells], piece.scored) for piece in draft]
        known = [(tokens, scored) for tokens, scored in parts if tokens is not None]
        good = len(known) == len(parts)
        encoded.append(
            _join(known, word_ids) if good else "messages: expected text, got surrogates"
        )
    return encoded


def _join(
    parts: Iterable[tuple[TextTokens, bool | list[tuple[int, int]]]], word_ids: bool
) -> Encoded:
    whole = Encoded([], [], [])
    assert whole.scored is not None
    assert whole.word_ids is not None
    words = 0
    for tokens, scored in parts:
        whole.input_ids.extend(tokens.input_ids)
        if isinstance(scored, bool):
            whole.scored.extend([scored] * len(tokens.input_ids))
        else:
            assert tokens.offsets is not None
            whole.scored.extend(_in_spans(tokens.offsets, scored))
        numbers = tokens.word_ids or []
        whole.word_ids.extend(number if number < 0 else number + words for number in numbers)
        words += max(numbers, default=-1) + 1
    return whole if word_ids else whole._replace(word_ids=None)


def _in_spans(offsets: np.ndarray, spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Find the tokens that have a character in one of the spans."""
    starts, ends = offsets[:, 0], offsets[:, 1]
    scored = np.zeros(len(offsets), dtype=bool)
    for first, last in spans:
        # Byte-level tokenizers trim whitespace off the offsets: a token of nothing else comes out
        # empty, at its end.
        empty = (starts == ends) & (ends <= last)
        scored |= (ends > first) & ((starts < last) | empty)
    return scored.tolist()
