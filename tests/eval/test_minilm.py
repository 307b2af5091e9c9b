"""The embeddings of all-MiniLM-L6-v2 have the figures that others measured on the same data."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from harmonic_sft.eval.geometry import parallelograms
from harmonic_sft.eval.word_similarity import (
    WordPair,
    read_word_pairs,
    word_similarity,
    word_table,
)

DATA = Path(__file__).parents[3] / "shared" / "data"
pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"the data cannot be redistributed, and {DATA} does not hold them"
)


@pytest.fixture(scope="module")
def minilm(minilm_path):
    with safe_open(minilm_path / "model.safetensors", "pt") as file:
        (name,) = (name for name in file.keys() if "word_embeddings" in name)  # noqa: SIM118
        return file.get_tensor(name), AutoTokenizer.from_pretrained(minilm_path)


@pytest.mark.parametrize(
    ("pieces", "is_centered", "num_pairs", "cosine", "l2"),
    [
        ("single", False, 2629, "0.784", "0.649"),  # both words are a single token
        ("mean", False, 3000, "0.730", "0.572"),  # the mean of a word's tokens
        ("mean", True, 3000, "0.733", "0.572"),  # and the mean of the vocabulary subtracted
    ],
)
def test_ratings_of_men(minilm, pieces, is_centered, num_pairs, cosine, l2):
    embeddings, tokenizer = minilm
    pairs = read_word_pairs(DATA / "wordsim" / "MEN-TR-3k.tsv")
    table, ids, ratings, _ = word_table(embeddings, tokenizer, pairs, pieces=pieces)
    found = word_similarity(table - embeddings.mean(0) * is_centered, ids, ratings)
    assert len(ids) == num_pairs
    assert f"{found['spearman_cosine']:.3f}" == cosine
    assert f"{found['spearman_l2']:.3f}" == l2


@pytest.mark.parametrize(
    ("relation", "num_pairs", "loss", "shuffled"),
    [
        ("present-past", 276, "0.891", 0.963),
        ("singular-plural", 99, "0.890", 0.975),
        ("country-capital", 71, "0.795", 0.892),
    ],
)
def test_parallelograms_of_relations(minilm, relation, num_pairs, loss, shuffled):
    embeddings, tokenizer = minilm
    items = json.loads((DATA / "function_vectors" / f"{relation}.json").read_text())
    pairs = [WordPair(item["input"], item["output"], 0.0) for item in items]
    table, ids, _, _ = word_table(embeddings, tokenizer, pairs, pieces="single")
    ids = [pair for pair in ids if pair[0] != pair[1]]  # as the suite does
    found = parallelograms(table, ids)
    assert len(ids) == num_pairs
    assert f"{found['parallelogram_loss']:.3f}" == loss
    assert found["shuffled"] == pytest.approx(shuffled, abs=2e-3)  # another order of the outputs
