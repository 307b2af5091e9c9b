import pickle

import numpy as np
import pytest
from transformers import AddedToken

from harmonic_sft.data.keyed_random import random_bits
from harmonic_sft.data.masking import (
    IGNORE_INDEX,
    NO_WORD,
    NextTokenLabels,
    RowMasker,
    special_tokens,
)
from harmonic_sft.data.sections import MaskConfig

KEY = (0, 1, 2, 3, 4)
MASK_TOKEN_ID = 4
VOCAB_SIZE = 100
NUM_ORDINARY = 95
SPECIAL_TOKENS = np.arange(VOCAB_SIZE) < 5


def masker(seed=0, **settings):
    return RowMasker(
        config=MaskConfig(**settings),
        seed=seed,
        mask_token_id=MASK_TOKEN_ID,
        special_tokens=SPECIAL_TOKENS,
    )


def mask(input_ids, key=KEY, columns=None, **settings):
    seed, epoch, source, document, chunk = key
    row = {"input_ids": input_ids, "source": source, "document": document, "chunk": chunk}
    masked = masker(seed=seed, **settings)({**row, **(columns or {})}, epoch)
    return masked["input_ids"], masked["labels"]


def three_sigma(probability, draws):
    return 3 * np.sqrt(probability * (1 - probability) / draws)


@pytest.fixture
def ordinary_ids():
    return np.random.default_rng(0).integers(5, VOCAB_SIZE, 50_000)


@pytest.fixture
def word_ids():
    """Words of 1 to 4 tokens for all of `ordinary_ids`."""
    lengths = np.random.default_rng(1).integers(1, 5, 50_000)
    return np.repeat(np.arange(50_000), lengths)[:50_000]


@pytest.mark.parametrize("position", range(5))
def test_every_part_of_the_key_changes_the_mask(ordinary_ids, position):
    other = tuple(part + (index == position) for index, part in enumerate(KEY))
    masked = mask(ordinary_ids)[1] != IGNORE_INDEX
    masked_otherwise = mask(ordinary_ids, key=other)[1] != IGNORE_INDEX
    # Independent masks agree where both or neither mask: 0.2 ** 2 + 0.8 ** 2.
    assert abs((masked == masked_otherwise).mean() - 0.68) < 0.01


every_policy = pytest.mark.parametrize(
    ("policy", "whole_word"), [("mask_only", True), ("80_10_10", False), ("80_10_10", True)]
)


@every_policy
def test_special_tokens_are_never_masked(policy, whole_word):
    input_ids = np.arange(5).repeat(1000)
    columns = {"word_ids": np.arange(5000), "scored": np.ones(5000, dtype=bool)}
    masked_ids, labels = mask(
        input_ids, columns=columns, probability=0.99, policy=policy, whole_word=whole_word
    )
    assert (masked_ids == input_ids).all()
    assert (labels == IGNORE_INDEX).all()


@every_policy
def test_only_scored_tokens_are_masked_and_those_as_without_the_column(
    ordinary_ids, word_ids, policy, whole_word
):
    settings = {"probability": 0.5, "policy": policy, "whole_word": whole_word}
    scored = np.arange(50_000) % 1000 >= 700
    all_ids, all_labels = mask(ordinary_ids, columns={"word_ids": word_ids}, **settings)
    input_ids, labels = mask(
        ordinary_ids, columns={"word_ids": word_ids, "scored": scored}, **settings
    )
    np.testing.assert_array_equal(labels, np.where(scored, all_labels, IGNORE_INDEX))
    np.testing.assert_array_equal(input_ids, np.where(scored, all_ids, ordinary_ids))
    assert (labels != IGNORE_INDEX).sum() > 5000


@every_policy
def test_a_mask_depends_on_the_row_and_its_name_alone(ordinary_ids, word_ids, policy, whole_word):
    settings = {"policy": policy, "whole_word": whole_word}
    rows = [
        {
            "input_ids": ordinary_ids[start : start + 100],
            "word_ids": word_ids[start : start + 100],
            "source": 0,
            "document": start,
            "chunk": 1,
        }
        for start in range(0, 2000, 100)
    ]
    lists = [
        {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in r}
        for r in (row.items() for row in rows)
    ]
    in_order = [masker(**settings)(row, 3) for row in rows]
    one = masker(**settings)
    backwards = [one(row, 3) for row in reversed(rows)][::-1]
    copy = pickle.loads(pickle.dumps(one))  # what a worker process gets
    elsewhere = [copy({**row, "other": 1}, 3) for row in lists]
    for expected, *others in zip(in_order, backwards, elsewhere, strict=True):
        for other in others:
            np.testing.assert_array_equal(expected["input_ids"], other["input_ids"])
            np.testing.assert_array_equal(expected["labels"], other["labels"])


def test_what_a_masked_token_becomes_equals_a_loop_over_the_draws(ordinary_ids):
    some_ids = ordinary_ids[:500]
    input_ids, labels = mask(some_ids, probability=0.7, policy="80_10_10")
    draws = [random_bits(name, KEY, 500) for name in ("mlm mask", "mlm fate", "mlm token")]
    for index, (chance, fate, token) in enumerate(zip(*(d.tolist() for d in draws), strict=True)):
        expected = some_ids[index]
        if chance / 2**64 < 0.7:
            if fate / 2**64 < 0.8:
                expected = MASK_TOKEN_ID
            elif fate / 2**64 < 0.9:
                expected = 5 + token % NUM_ORDINARY
        assert input_ids[index] == expected
        assert (labels[index] == some_ids[index]) == (chance / 2**64 < 0.7)


def test_words_are_masked_whole_and_each_with_the_probability(ordinary_ids, word_ids):
    _, labels = mask(ordinary_ids, columns={"word_ids": word_ids}, whole_word=True)
    masked = labels != IGNORE_INDEX
    num_words = word_ids[-1] + 1
    masked_tokens = np.bincount(word_ids, weights=masked)
    lengths = np.bincount(word_ids)
    assert set(np.unique(masked_tokens / lengths)) == {0.0, 1.0}
    share = (masked_tokens > 0).mean()
    assert abs(share - 0.2) < three_sigma(0.2, num_words)
    # The share does not depend on the length of the word: every length has thousands of words.
    for length in range(1, 5):
        same = (masked_tokens > 0)[lengths == length]
        assert abs(same.mean() - 0.2) < three_sigma(0.2, len(same))


def test_neighbors_make_a_word_and_its_number_is_of_no_account(ordinary_ids, word_ids):
    # A chunk begins in the middle of a document, and every turn of a chat counts again.
    first = mask(ordinary_ids, columns={"word_ids": word_ids}, whole_word=True)
    later = mask(ordinary_ids, columns={"word_ids": word_ids + 1234}, whole_word=True)
    again = mask(ordinary_ids, columns={"word_ids": word_ids % 7}, whole_word=True)
    np.testing.assert_array_equal(first, later)
    np.testing.assert_array_equal(first, again)


def test_tokens_of_no_word_are_never_masked_and_part_words(ordinary_ids):
    word_ids = np.zeros(50_000, dtype=int)
    word_ids[::3] = NO_WORD  # the pairs between are words of their own, though all are number 0
    _, labels = mask(ordinary_ids, columns={"word_ids": word_ids}, whole_word=True)
    masked = (labels != IGNORE_INDEX)[: 50_000 // 3 * 3].reshape(-1, 3)
    assert not masked[:, 0].any()
    assert (masked[:, 1] == masked[:, 2]).all()
    assert abs(masked[:, 1].mean() - 0.2) < three_sigma(0.2, len(masked))


def test_ids_without_a_token_and_added_special_tokens_are_special(byte_tokenizer):
    tokenizer = pickle.loads(pickle.dumps(byte_tokenizer))
    tokenizer.add_tokens([AddedToken("<|im_start|>", special=True), "plain"])
    special = special_tokens(tokenizer, len(tokenizer) + 7)
    start, plain = tokenizer.convert_tokens_to_ids(["<|im_start|>", "plain"])
    assert start not in tokenizer.all_special_ids
    assert special[start]
    assert not special[plain]
    assert special[-7:].all()
    assert special[:-7].sum() == len(tokenizer.all_special_ids) + 1


def test_the_first_token_is_never_predicted():
    labels = NextTokenLabels(seed=0, special_tokens=np.zeros(9, dtype=bool))
    row = {"input_ids": [4, 5, 6], "scored": [True, False, True]}
    assert labels(row, 0)["labels"].tolist() == [IGNORE_INDEX, IGNORE_INDEX, 6]
    assert row["scored"] == [True, False, True]
    scored = np.array([True, True, True])
    labels({"input_ids": np.array([4, 5, 6]), "scored": scored}, 0)
    assert scored.all()  # what was given is not changed
