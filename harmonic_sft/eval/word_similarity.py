"""Do prototypes lie as people judge words: rank correlation with human similarity ratings."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from harmonic_sft.eval.language import word_ids

HEADER = ["word1", "word2", "score"]
MIN_PAIRS = 3


class WordPair(NamedTuple):
    """Two words and how similar people find them, on whatever scale the ratings have."""

    first: str
    second: str
    rating: float


def read_word_pairs(path: Path) -> list[WordPair]:
    """Read ratings from a tab-separated file with the header word1, word2, score.

    Raises:
        ValueError: Another header, or a row that is not two words and a number.
    """
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    if not lines or lines[0].split("\t") != HEADER:
        got = repr(lines[0]) if lines else "an empty file"
        raise ValueError(f"{path}: expected the header {HEADER}, got {got}")
    pairs = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            first, second, rating = line.split("\t")
            if not math.isfinite(float(rating)):
                raise ValueError(rating)
            pairs.append(WordPair(first, second, float(rating)))
        except ValueError:
            raise ValueError(
                f"{path} line {number}: expected two words and a number, got {line!r}"
            ) from None
    return pairs


@torch.no_grad()
def word_table(
    prototypes: Tensor,
    tokenizer: Any,
    pairs: Sequence[WordPair],
    *,
    pieces: Literal["single", "mean"],
) -> tuple[Tensor, list[tuple[int, int]], list[float], list[str]]:
    """Return a vector for every word of the pairs that has one.

    Args:
        prototypes: `[V, D]`, one for each token.
        tokenizer: Cuts the words.
        pairs: Words and ratings.
        pieces: "single": only words that are a single token have a vector; "mean": a word of
            several tokens has the mean of theirs.

    Returns:
        Vectors `[W, D]`; for each pair whose words both have one, their row numbers and the rating;
        and the words without a vector, in the order of the pairs.
    """
    rows, unknown, vectors = {}, [], []
    for word in dict.fromkeys(word for pair in pairs for word in (pair.first, pair.second)):
        ids = word_ids(tokenizer, word)
        if not ids or tokenizer.unk_token_id in ids or (pieces == "single" and len(ids) > 1):
            unknown.append(word)
            continue
        rows[word] = len(vectors)
        vectors.append(prototypes[ids].mean(0))
    known = [pair for pair in pairs if pair.first in rows and pair.second in rows]
    table = torch.stack(vectors) if vectors else prototypes[:0]
    places = [(rows[pair.first], rows[pair.second]) for pair in known]
    return table, places, [pair.rating for pair in known], unknown


def similarity(first: np.ndarray, second: np.ndarray, ratings: Sequence[float]) -> dict[str, float]:
    """Correlate the closeness of vectors, `[N, D]` each, with human ratings of what they stand for.

    Returns:
        Spearman's rank correlation of the ratings with the cosine, `spearman_cosine`, and with
        minus the Euclidean distance, `spearman_l2`: the same thing on the unit sphere.
    """
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    norms = np.linalg.norm(first, axis=-1) * np.linalg.norm(second, axis=-1)
    closeness = {
        "spearman_cosine": (first * second).sum(-1) / norms.clip(min=1e-12),
        "spearman_l2": -np.linalg.norm(first - second, axis=-1),
    }
    return {k: float(spearmanr(values, ratings).statistic) for k, values in closeness.items()}


def word_similarity(
    table: Tensor, ids: Sequence[tuple[int, int]], ratings: Sequence[float]
) -> dict[str, float]:
    """Return the `similarity` of pairs of rows of a table `[V, D]`.

    Raises:
        ValueError: Fewer than 3 pairs.
    """
    if len(ids) < MIN_PAIRS:
        raise ValueError(
            f"word pairs: expected at least {MIN_PAIRS} whose words are single tokens, "
            f"got {len(ids)}. Use more ratings, or leave them out"
        )
    vectors = table.detach().cpu().double().numpy()[np.array(ids)]  # [P, 2, D]
    return similarity(vectors[:, 0], vectors[:, 1], ratings)
