"""Evaluation: pure functions of tensors that return numbers with units."""

from harmonic_sft.eval.masked_lm import post_hoc_grid, score_rows, summarize, unigram_loss
from harmonic_sft.eval.neighbors import nearest_prototypes

__all__ = ["nearest_prototypes", "post_hoc_grid", "score_rows", "summarize", "unigram_loss"]
