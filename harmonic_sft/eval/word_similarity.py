"""Do prototypes lie as people judge words: rank correlation with human similarity ratings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

HEADER = ["word1", "word2", "score"]
MIN_PAIRS = 3


class WordPair(NamedTuple):
    """Two words and how similar people find them, on whatever scale the ratings have."""

    first: str
    second: str
    rating: float


def read_word_pairs(path: str | Path) -> list[WordPair]:
    """Read ratings from a tab-separated file with the header word1, word2, score.

    Raises:
        ValueError: No such file, another header, or a row that is not two words and a number.
    """
    if not Path(path).is_file():
        raise ValueError(f"word pairs: expected an existing file, got {str(path)!r}")
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    if not lines or lines[0].split("\t") != HEADER:
        got = repr(lines[0]) if lines else "an empty file"
        raise ValueError(f"{path}: expected the header {HEADER}, got {got}")
    pairs = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            first, second, rating = line.split("\t")
            pairs.append(WordPair(first, second, float(rating)))
        except ValueError:
            raise ValueError(
                f"{path} line {number}: expected two words and a number, got {line!r}"
            ) from None
    return pairs


def single_token_pairs(
    pairs: Sequence[WordPair], tokenizer: Any
) -> tuple[list[tuple[int, int]], list[float]]:
    """Return token ids and ratings of the pairs whose words are one known token each."""
    ids, ratings = [], []
    for pair in pairs:
        tokens = [
            tokenizer(word, add_special_tokens=False)["input_ids"]
            for word in (pair.first, pair.second)
        ]
        known = all(len(token) == 1 and token[0] != tokenizer.unk_token_id for token in tokens)
        if known:
            ids.append((tokens[0][0], tokens[1][0]))
            ratings.append(pair.rating)
    return ids, ratings


@torch.no_grad()
def word_similarity(
    prototypes: Tensor, ids: Sequence[tuple[int, int]], ratings: Sequence[float]
) -> dict[str, float]:
    """Correlate the closeness of prototypes with human ratings.

    Args:
        prototypes: `[V, D]`.
        ids: Two rows of `prototypes` for each pair.
        ratings: One for each pair, higher for more similar words.

    Returns:
        Spearman's rank correlation of the ratings with the cosine, `spearman_cosine`, and with
        minus the Euclidean distance, `spearman_l2`: the same thing on the unit sphere.

    Raises:
        ValueError: Fewer than 3 pairs.
    """
    from scipy.stats import spearmanr  # takes a second, which commands need not wait for

    if len(ids) < MIN_PAIRS:
        raise ValueError(
            f"word pairs: expected at least {MIN_PAIRS} whose words are single tokens, "
            f"got {len(ids)}. Use more ratings, or leave them out"
        )
    first, second = prototypes[torch.tensor(ids).T.to(prototypes.device)].double()  # [P, D] each
    closeness = {
        "spearman_cosine": F.cosine_similarity(first, second, dim=-1),
        "spearman_l2": -torch.linalg.vector_norm(first - second, dim=-1),
    }
    return {
        key: float(spearmanr(values.cpu().numpy(), ratings).statistic)
        for key, values in closeness.items()
    }


def rate_prototypes(
    prototypes: Tensor, tokenizer: Any, ratings: dict[str, list[WordPair]]
) -> dict[str, dict[str, float]]:
    """Compare prototypes with several sets of ratings.

    Args:
        prototypes: `[V, D]`, one for each token.
        tokenizer: Pairs with a word that is not a single token of it are left out.
        ratings: Pairs by the name of the set.

    Returns:
        By name: what `word_similarity` returns, `pairs` of the set, and those `covered`.

    Raises:
        ValueError: Fewer than 3 pairs of a set are covered.
    """
    results = {}
    for name, pairs in ratings.items():
        ids, known = single_token_pairs(pairs, tokenizer)
        found = word_similarity(prototypes, ids, known)
        results[name] = {**found, "pairs": len(pairs), "covered": len(ids)}
    return results
