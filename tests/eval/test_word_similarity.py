"""Rank correlations against ranks written out, and what is read and covered."""

import math

import pytest
import torch

from harmonic_sft.eval.word_similarity import (
    WordPair,
    read_word_pairs,
    word_similarity,
    word_table,
)


def ranks(values):
    """Average ranks: ties share theirs."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2
        for value in values
    ]


def pearson(a, b):
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    products = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    squares = sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b)
    return products / math.sqrt(squares)


def test_spearman_is_the_correlation_of_ranks():
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.randn(20, 5, generator=generator, dtype=torch.float64)
    ids = [(i, i + 7) for i in range(12)]
    ratings = [float(i // 2) for i in range(12)]  # with ties
    cosines, distances = [], []
    for one, other in ids:
        a, b = prototypes[one].tolist(), prototypes[other].tolist()
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        cosines.append(dot / math.hypot(*a) / math.hypot(*b))
        distances.append(-math.dist(a, b))
    found = word_similarity(prototypes, ids, ratings)
    assert found["spearman_cosine"] == pytest.approx(pearson(ranks(cosines), ranks(ratings)))
    assert found["spearman_l2"] == pytest.approx(pearson(ranks(distances), ranks(ratings)))
    unit = word_similarity(torch.nn.functional.normalize(prototypes, dim=-1), ids, ratings)
    assert unit["spearman_l2"] == pytest.approx(unit["spearman_cosine"])
    assert unit["spearman_cosine"] == pytest.approx(found["spearman_cosine"])


def test_only_known_single_tokens_count(tokenizer):
    pairs = [
        WordPair("aa", "bb", 3.0),
        WordPair("aa", "zzzz", 2.0),  # unknown: [UNK] is one token too
        WordPair("aa bb", "bb", 2.0),  # two tokens
        WordPair("AA", "cc", 1.0),  # the tokenizer lowercases
        WordPair("dd", "cc", 2.0),
    ]
    prototypes = torch.randn(len(tokenizer), 4, generator=torch.Generator().manual_seed(0))
    table, ids, ratings, unknown = word_table(prototypes, tokenizer, pairs, pieces="single")
    assert ratings == [3.0, 1.0, 2.0]
    assert unknown == ["zzzz", "aa bb"]
    tokens = tokenizer.convert_tokens_to_ids(["aa", "cc"])
    torch.testing.assert_close(table[list(ids[1])], prototypes[tokens])
    table, ids, ratings, unknown = word_table(prototypes, tokenizer, pairs, pieces="mean")
    assert ratings == [3.0, 2.0, 1.0, 2.0]
    assert unknown == ["zzzz"]
    tokens = tokenizer.convert_tokens_to_ids(["aa", "bb"])
    torch.testing.assert_close(table[ids[1][0]], prototypes[tokens].mean(0))
    with pytest.raises(ValueError, match="at least 3 whose words are single tokens, got 2"):
        word_similarity(table, ids[:2], ratings[:2])


def test_words_are_cut_as_in_a_text(byte_level):
    table = torch.eye(len(byte_level))
    pairs = [WordPair("st", "!", 1.0), WordPair("s", "sts", 0.0)]
    vectors, ids, _, unknown = word_table(table, byte_level, pairs, pieces="single")
    assert unknown == ["sts"]
    tokens = byte_level.convert_tokens_to_ids(["\u0120st", "!"])  # U+0120 is a space
    torch.testing.assert_close(vectors[list(ids[0])], table[tokens])
    vectors, ids, _, unknown = word_table(table, byte_level, pairs, pieces="mean")
    assert not unknown
    tokens = byte_level.convert_tokens_to_ids(["\u0120st", "s"])
    torch.testing.assert_close(vectors[ids[1][1]], table[tokens].mean(0))


def test_ratings_are_read_from_a_table(tmp_path):
    path = tmp_path / "set.tsv"
    path.write_text("word1\tword2\tscore\nsun\tsunlight\t50.0\nice cream\tTiger\t-1\n")
    assert read_word_pairs(path) == [("sun", "sunlight", 50.0), ("ice cream", "Tiger", -1.0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected the header .*, got an empty file"),
        ("sun\tmoon\t1\n", "expected the header .*, got 'sun"),
        ("word1\tword2\tscore\nsun\tmoon\n", "line 2: expected two words and a number, got 'sun"),
        ("word1\tword2\tscore\na\tb\t1\na\tb\tx\n", "line 3: expected two words and a number"),
        ("word1\tword2\tscore\na\tb\tnan\n", "line 2: expected two words and a number"),
    ],
)
def test_a_bad_table_is_an_error(tmp_path, text, message):
    path = tmp_path / "set.tsv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_word_pairs(path)
