"""What a model knows of language: bits per byte, loss by frequency, and pairs of sentences."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers.models import WordPiece

from harmonic_sft.eval.scoring import TokenScores
from harmonic_sft.models import HarmonicLanguageModel, max_positions

BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a token of SentencePiece's byte fallback
MARKS = re.compile(r"^##|@@$|</w>$")  # of a piece that continues a word, or ends one
FREQUENCIES = (1, 10, 100, 1000)  # least count in the scored text of the labels in each bin


def bits_per_byte(scores: TokenScores, tokenizer: Any) -> float:
    """Return the loss of the scored tokens in bits, over the UTF-8 bytes that they stand for.

    Unlike nats per token, it compares models with different tokenizers. Special tokens, unknown
    ones among them, stand for 0 bytes, but their loss counts. With WordPiece, and others that mark
    the pieces of words, it is an approximation: their tokens hold no spaces, so these are not
    counted.
    """
    labels, counts = np.unique(scores.labels, return_counts=True)
    lengths = _byte_lengths(tokenizer, labels.tolist())
    return float(scores.at(1.0)[0].sum() / np.log(2) / max(1, np.dot(lengths, counts)))


def _byte_lengths(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Return how many bytes of a text each token stands for."""
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
    if tokenizer.is_fast:  # its parts tell; in a vocabulary "##" can be text
        backend = tokenizer.backend_tokenizer
        is_byte_level = "ByteLevel" in str(backend.decoder)
        has_marks = isinstance(backend.model, WordPiece) or "BPEDecoder" in str(backend.decoder)
    else:
        vocabulary = tokenizer.get_vocab().keys()
        is_byte_level = vocabulary >= {chr(byte) for byte in range(256)}  # ByT5's
        has_marks = any(map(MARKS.search, vocabulary))
    lengths = []
    for index, token in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        if index in special or token is None:
            lengths.append(0)
        elif is_byte_level and index not in added:
            lengths.append(len(token))  # one character for each byte
        elif BYTE.fullmatch(token):
            lengths.append(1)
        else:
            text = MARKS.sub("", token) if has_marks else token
            lengths.append(len(text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()))
    return lengths


def frequency_name(least: float) -> str:
    """Return how often labels occur in the bin that begins with `least`: `10 to 99`."""
    following = [first for first in FREQUENCIES if first > least]
    return f"{least:,.0f} to {following[0] - 1:,}" if following else f"{least:,.0f} or more"


def loss_by_frequency(scores: TokenScores) -> list[dict[str, float]]:
    """Return loss in nats and accuracy of labels that are rare and frequent in the scored text.

    Returns:
        For every bin that holds tokens: `least`, the lowest count in it, `loss`, `accuracy` and
        `tokens`.
    """
    _, inverse, counts = np.unique(scores.labels, return_inverse=True, return_counts=True)
    bins = np.digitize(counts[inverse], FREQUENCIES) - 1
    losses = scores.at(1.0)[0]
    return [
        {
            "least": FREQUENCIES[number],
            "loss": float(losses[bins == number].mean()),
            "accuracy": float((scores.ranks[bins == number] == 0).mean()),
            "tokens": int((bins == number).sum()),
        }
        for number in np.unique(bins)
    ]


def first_token(tokenizer: Any) -> int | None:
    """Return the id of the token to put before a text: bos, else eos, None without either."""
    start = tokenizer.bos_token_id
    return tokenizer.eos_token_id if start is None else start


def word_ids(tokenizer: Any, word: str) -> list[int]:
    """Return the tokens of a word after a space, or alone if that gives known or fewer ones.

    In byte-level BPE the space before a word is part of the word's first token.
    """
    cuts = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (f" {word}", word))
    return min(cuts, key=lambda ids: (tokenizer.unk_token_id in ids, len(ids)))


def check_length(model: HarmonicLanguageModel, length: int) -> None:
    """Raise a ValueError for a text with more tokens than the model has positions."""
    longest = max_positions(model.config.get_text_config())
    if length > longest:
        raise ValueError(f"text: expected at most {longest:,} tokens, got {length:,}. Shorten it")


@torch.no_grad()
def pseudo_log_likelihood(
    model: HarmonicLanguageModel, tokenizer: Any, sentence: str, *, batch_size: int = 32
) -> float:
    """Return the sum of the log-probabilities of a sentence's tokens, in nats.

    An encoder predicts every token from all others, one masked copy each. A decoder predicts it
    from those before it; `first_token` comes first if the tokenizer adds no token there.

    Raises:
        ValueError: A sentence without a token, or longer than the model's positions.

    Source:
        Salazar et al. 2020, Masked Language Model Scoring, arXiv:1910.14659.
    """
    # The mask marks only what the tokenizer added, not unknown words, whose id is special too.
    encoded = tokenizer(sentence, return_special_tokens_mask=True)
    numbers, added = encoded["input_ids"], encoded["special_tokens_mask"]
    if all(added):  # its sum of 0 would beat every sentence
        raise ValueError(f"sentence: expected at least one token, got {sentence!r}")
    if model.is_causal and added[0] == 0:
        start = first_token(tokenizer)
        if start is not None:
            numbers, added = [start, *numbers], [1, *added]
    check_length(model, len(numbers))
    ids = torch.tensor(numbers, device=model.device)  # [T]
    if model.is_causal:
        logits = model(input_ids=ids[None]).logits[0, :-1]
        losses = F.cross_entropy(logits, ids[1:], reduction="none")
        return -float(losses[torch.tensor(added[1:]) == 0].sum())
    places = [place for place, is_added in enumerate(added) if not is_added]
    total = 0.0
    for start in range(0, len(places), batch_size):
        chosen = places[start : start + batch_size]
        rows, own = ids.repeat(len(chosen), 1), torch.arange(len(chosen))
        rows[own, chosen] = tokenizer.mask_token_id
        states = model.model(input_ids=rows).last_hidden_state[own, chosen]  # [B, D]
        total -= float(model.dist_head.nll(states, ids[chosen]).sum())
    return total


def minimal_pairs(
    model: HarmonicLanguageModel, tokenizer: Any, pairs: Sequence[tuple[str, str]]
) -> float:
    """Return the share of pairs whose acceptable sentence, the first, is the more likely one.

    Raises:
        ValueError: A sentence without a token, or longer than the model's positions.

    Source:
        Warstadt et al. 2020, BLiMP, arXiv:1912.00582.
    """
    likely = []
    for number, pair in enumerate(pairs, start=1):
        try:
            good, bad = (pseudo_log_likelihood(model, tokenizer, sentence) for sentence in pair)
        except ValueError as error:
            raise ValueError(f"pair {number}: {error}") from error
        likely.append(good > bad)
    return float(np.mean(likely))
