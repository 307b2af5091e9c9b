"""Evaluation: pure functions of tensors that return numbers with units."""

from harmonic_sft.eval.neighbors import explain, nearest_prototypes
from harmonic_sft.eval.scoring import TokenScores, documents_of, score, summarize, unigram_loss
from harmonic_sft.eval.word_similarity import WordPair, read_word_pairs

__all__ = [
    "TokenScores",
    "WordPair",
    "documents_of",
    "explain",
    "nearest_prototypes",
    "read_word_pairs",
    "score",
    "summarize",
    "unigram_loss",
]
