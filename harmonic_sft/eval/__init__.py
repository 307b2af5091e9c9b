"""Evaluation: pure functions of tensors that return numbers with units."""

from harmonic_sft.eval.neighbors import nearest_prototypes
from harmonic_sft.eval.scoring import post_hoc_grid, score_rows, summarize, unigram_loss
from harmonic_sft.eval.word_similarity import WordPair, rate_prototypes, read_word_pairs

__all__ = [
    "WordPair",
    "nearest_prototypes",
    "post_hoc_grid",
    "rate_prototypes",
    "read_word_pairs",
    "score_rows",
    "summarize",
    "unigram_loss",
]
