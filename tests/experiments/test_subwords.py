"""Kinds of tokens, their neighbors and tables' overlap, by hand."""

import pytest
import torch

from experiments.subwords import (
    describe_neighbors,
    neighbor_overlap,
    plain_form,
    token_kind,
)


@pytest.mark.parametrize(
    ("token", "kind", "form"),
    [
        ("running", "word", "running"),
        ("Run", "word", "run"),
        ("1999", "word", "1999"),
        ("##run", "piece", "run"),
        ("##s", "piece", "s"),
        ("s", "character", "s"),
        ("[", "character", "["),
        ("#", "character", "#"),
        ("##", "word", "##"),
        ("[]", "word", "[]"),
        ("[MASK]", "special", "[mask]"),
        ("[unused17]", "special", "[unused17]"),
    ],
)
def test_a_token_is_of_one_kind(token, kind, form):
    assert token_kind(token) == kind
    assert plain_form(token) == form


def test_neighbors_are_counted_by_kind_and_form():
    tokens = ["run", "Run", "##run", "walk", "##ing", "a", "[PAD]"]
    neighbors = torch.tensor([[1, 2], [0, 3], [4, 3], [0, 2], [2, 5], [6, 4], [5, 4]])
    found = describe_neighbors(tokens, neighbors)
    word = found["word"]  # run: word, piece; Run: word, word; walk: word, piece
    assert word["tokens"] == 3
    shares = {"word": 4 / 6, "piece": 2 / 6, "character": 0.0, "special": 0.0}
    assert word["neighbors"] == pytest.approx(shares)
    assert word["same_form"] == pytest.approx(3 / 6)  # run has both, Run has run
    assert (word["with_twin"], word["twin_found"]) == (2, 1.0)
    piece = found["piece"]  # ##run: piece, word; ##ing: piece, character
    assert piece["neighbors"]["piece"] == pytest.approx(2 / 4)
    assert (piece["same_form"], piece["with_twin"], piece["twin_found"]) == (0.0, 1, 0.0)
    assert found["special"]["tokens"] == 1
    assert found["special"]["twin_found"] is None


def test_a_kind_that_does_not_occur_is_left_out():
    assert set(describe_neighbors(["aa", "bb"], torch.tensor([[1], [0]]))) == {"word"}


def test_overlap_is_the_share_of_neighbors_kept_in_any_order():
    first = torch.tensor([[1, 2, 3], [0, 2, 3], [0, 1, 3]])
    other = torch.tensor([[3, 2, 1], [4, 5, 0], [4, 5, 6]])
    assert neighbor_overlap(first, first) == 1
    assert neighbor_overlap(first, other) == pytest.approx((1 + 1 / 3 + 0) / 3)
    weights = torch.tensor([0, 3, 1])
    assert neighbor_overlap(first, other, weights) == pytest.approx(3 / 4 * 1 / 3)
