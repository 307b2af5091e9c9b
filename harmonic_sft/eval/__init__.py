"""Evaluation: pure functions of tensors that return numbers with units."""

from harmonic_sft.eval.neighbors import explain, nearest_prototypes
from harmonic_sft.eval.scoring import TokenScores, documents_of, score, summarize, unigram_loss

__all__ = [
    "TokenScores",
    "documents_of",
    "explain",
    "nearest_prototypes",
    "score",
    "summarize",
    "unigram_loss",
]
