"""Text as tokens: what the formats of data have in common."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
# A text's ids and, if asked for, each token's span of characters, `[T, 2]`, and word.
Tokens = tuple[list[int], np.ndarray | None, list[int]]
BATCH_CHARACTERS = 1 << 21  # a tokenizer's output takes some 200 bytes for each
BATCH_TEXTS = 10_000


class Encoded(NamedTuple):
    """A document as tokens, without those that the tokenizer puts around every row."""

    input_ids: list[int]
    scored: list[bool]  # which tokens may be predicted
    word_ids: list[int]  # tokens of a word share a number; -1 is no word; empty unless asked for
    labels: list[str | None]  # a piece's label at its first token; empty for rows of input_ids
    had_prefix: bool = False  # whether the document began with the prefix of a row


class Piece(NamedTuple):
    """A part of a document that is tokenized on its own."""

    text: str
    parses_special: bool  # whether `[MASK]` in the text is the special token, not six characters
    scored: bool | list[tuple[int, int]]  # the whole piece, or spans of its characters
    label: str | None = None


@dataclass(frozen=True)
class SpecialTokens:
    """What a tokenizer puts around one text."""

    prefix: list[int]
    suffix: list[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "SpecialTokens":
        """Find them by tokenizing a word: transformers 5 has no `build_inputs_with_special_tokens`.

        Raises:
            ValueError: No word of the tokenizer's vocabulary gives an ordinary token.
        """
        for word in ("a", *tokenizer.get_vocab()):  # a tokenizer of DNA may not know "a"
            encoded = tokenizer(word, return_special_tokens_mask=True)
            ordinary = np.flatnonzero(np.asarray(encoded["special_tokens_mask"]) == 0)
            if len(ordinary):
                input_ids = list(encoded["input_ids"])
                return cls(input_ids[: ordinary[0]], input_ids[ordinary[-1] + 1 :])
        raise ValueError("tokenizer: expected one that knows a word, got one that knows none")


def encode_pieces(
    documents: Sequence[list[Piece] | Encoded],
    *,
    tokenizer: PreTrainedTokenizerBase,
    word_ids: bool,
    prefix: Sequence[int] = (),
) -> list[Encoded]:
    """Tokenize the pieces of many documents in one batch and join them.

    Args:
        documents: The pieces of each, without surrogates. An `Encoded` document stays as it is.
        tokenizer: A fast one, if words are numbered or only spans of a piece are scored.
        word_ids: Whether to number the words; no word goes across two pieces.
        prefix: Tokens that every row gets; a document that begins with them loses them here.

    Raises:
        ValueError: Words or spans are asked for, and the tokenizer is not a fast one.
    """
    pieces = [piece for draft in documents if not isinstance(draft, Encoded) for piece in draft]
    needs_offsets = any(not isinstance(piece.scored, bool) for piece in pieces)
    if (needs_offsets or word_ids) and not tokenizer.is_fast:
        raise ValueError(
            "tokenizer: expected a fast tokenizer for masks of turns or whole words, "
            f"got {type(tokenizer).__name__}. Use one that has a tokenizer.json."
        )
    tokens_of: dict[tuple[str, bool], Tokens] = {}
    for special in (False, True):
        texts = dict.fromkeys(piece.text for piece in pieces if piece.parses_special == special)
        for group in batches_of(texts, len, size=BATCH_CHARACTERS, count=BATCH_TEXTS):
            tokens = _tokenize(group, tokenizer, special, offsets=needs_offsets, word_ids=word_ids)
            tokens_of |= {(text, special): entry for text, entry in zip(group, tokens, strict=True)}
    return [
        document
        if isinstance(document, Encoded)
        else _join([(tokens_of[p.text, p.parses_special], p) for p in document], list(prefix))
        for document in documents
    ]


def batches_of(
    items: Iterable[T], size_of: Callable[[T], int], *, size: int, count: int
) -> Iterator[list[T]]:
    """Yield lists of at most `count` items; a list ends early when its sizes sum to `size`."""
    batch: list[T] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size_of(item)
        if total >= size or len(batch) == count:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _tokenize(
    texts: list[str],
    tokenizer: PreTrainedTokenizerBase,
    parses_special: bool,
    *,
    offsets: bool,
    word_ids: bool,
) -> Iterator[Tokens]:
    encoded = tokenizer(
        texts,
        add_special_tokens=False,
        # Slow tokenizers would split ordinary added tokens too, which may be all they have.
        split_special_tokens=not parses_special and tokenizer.is_fast,
        return_attention_mask=False,
        return_token_type_ids=False,
        return_offsets_mapping=offsets,
        verbose=False,  # no warning about documents longer than the model
    )
    # A special token in the text is no word, but the unknown token stands for one.
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id} if parses_special else set()
    for index, input_ids in enumerate(encoded["input_ids"]):
        places = np.asarray(encoded["offset_mapping"][index]).reshape(-1, 2) if offsets else None
        words = encoded.word_ids(index) if word_ids else []
        numbers = [
            -1 if word is None or token in special else word
            for token, word in zip(input_ids, words, strict=False)
        ]
        yield list(input_ids), places, numbers


def _join(parts: Sequence[tuple[Tokens, Piece]], prefix: list[int]) -> Encoded:
    input_ids: list[int] = []
    scored: list[bool] = []
    word_ids: list[int] = []
    labels: list[str | None] = []
    words = 0
    for (tokens, offsets, numbers), piece in parts:
        input_ids += tokens
        if isinstance(piece.scored, bool):
            scored += [piece.scored] * len(tokens)
        else:
            assert offsets is not None, "spans need the places of tokens"
            scored += _in_spans(offsets, piece.scored)
        word_ids += [word if word < 0 else word + words for word in numbers]
        words += max(numbers, default=-1) + 1
        labels += [piece.label, *[None] * len(tokens)][: len(tokens)]
    start = len(prefix) if input_ids[: len(prefix)] == prefix else 0
    return Encoded(
        input_ids[start:], scored[start:], word_ids[start:], labels[start:], had_prefix=start > 0
    )


def _in_spans(offsets: np.ndarray, spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Find the tokens that have a character in one of the spans."""
    starts, ends = offsets[:, 0], offsets[:, 1]
    scored = np.zeros(len(offsets), dtype=bool)
    for first, last in spans:
        # Byte-level tokenizers trim whitespace off the offsets: a token of whitespace alone gets an
        # empty span, at its end.
        empty = (starts == ends) & (ends <= last)
        scored |= (ends > first) & ((starts < last) | empty)
    return scored.tolist()
