"""Every token of a decoder's row is its own label, but those that are context."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from harmonic_sft.data import DataConfig
from harmonic_sft.data.loading import load_data
from harmonic_sft.data.masking import IGNORE_INDEX
from harmonic_sft.data.next_tokens import NextTokenLabels

WORDS = [f"w{index}" for index in range(40)]


@pytest.fixture
def tokenizer():
    vocabulary = {word: index for index, word in enumerate([*WORDS, "user:", "assistant:"])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="w1", pad_token="w1")


def load(path, tokenizer, **fields):
    config = DataConfig(
        **{
            "sources": [{"path": str(path)}],
            "context_length": 8,
            "eval": {"documents": 1},
            **fields,
        }
    )
    return load_data(
        config, tokenizer=tokenizer, vocab_size=42, max_positions=8, seed=0, is_causal=True
    )


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("w2 w3 w4\nw5 w6 w7 w8 w9 w10 w11 w12 w13 w14 w15\nw16\nw17 w18\n")
    return path


def rows_of(dataset):
    return {tuple(row["input_ids"].tolist()): row["labels"].tolist() for row in dataset}


def test_text_ends_in_the_eos_token_which_is_predicted(text, tokenizer):
    data = load(text, tokenizer)
    rows = rows_of([data.train[i] for i in range(len(data.train))]) | rows_of(
        [data.eval[i] for i in range(len(data.eval))]
    )
    assert rows[2, 3, 4, 1] == [IGNORE_INDEX, 3, 4, 1]
    # A long document ends once, in its last chunk.
    assert rows[5, 6, 7, 8, 9, 10, 11, 12] == [IGNORE_INDEX, 6, 7, 8, 9, 10, 11, 12]
    assert rows[13, 14, 15, 1] == [IGNORE_INDEX, 14, 15, 1]
    assert rows[16, 1] == [IGNORE_INDEX, 1]


def test_no_epoch_differs(text, tokenizer):
    data = load(text, tokenizer)
    first = [data.train[i] for i in range(len(data.train))]
    data.train.set_epoch(3)
    for before, i in zip(first, range(len(data.train)), strict=True):
        assert np.array_equal(before["labels"], data.train[i]["labels"])


def test_documents_of_a_pack_do_not_predict_each_other(text, tokenizer):
    data = load(text, tokenizer, packing=True)
    packs = [data.train[i] for i in range(len(data.train))]
    assert any((pack["position_ids"] == 0).sum() > 1 for pack in packs)
    for pack in packs:
        first = pack["position_ids"] == 0
        assert (pack["labels"][first] == IGNORE_INDEX).all()
        assert np.array_equal(pack["labels"][~first], pack["input_ids"][~first])


def test_only_the_assistant_is_predicted(tmp_path, tokenizer):
    path = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w7"}]
    path.write_text("\n".join([json.dumps({"messages": turns})] * 2))
    data = load(path, tokenizer, loss_on="assistant", context_length=8)
    row = data.train[0]
    predicted = row["labels"] != IGNORE_INDEX
    assert row["input_ids"][predicted].tolist() == [7, 1]  # and the end of its turn
    assert np.array_equal(row["labels"][predicted], row["input_ids"][predicted])


def test_counts_are_of_all_tokens(text, tokenizer):
    data = load(text, tokenizer)
    assert data.unigram_counts[1] >= 2  # the eos token is one that is predicted
    # 17 words and 4 ends; the second document has two rows.
    held_out = sum(len(data.eval[index]["input_ids"]) for index in range(len(data.eval)))
    assert data.num_tokens == 17 + 4 - held_out


def test_the_first_token_is_never_predicted():
    labels = NextTokenLabels(seed=0, special_tokens=np.zeros(9, dtype=bool))
    row = {"input_ids": [4, 5, 6], "scored": [True, False, True]}
    assert labels(row, 0)["labels"].tolist() == [IGNORE_INDEX, IGNORE_INDEX, 6]
    assert row["scored"] == [True, False, True]
    scored = np.array([True, True, True])
    labels({"input_ids": np.array([4, 5, 6]), "scored": scored}, 0)
    assert scored.all()  # what was given is not changed


def test_a_mask_token_is_not_needed(text, tokenizer):
    assert tokenizer.mask_token is None
    load(text, tokenizer)
    tokenizer.pad_token = None
    with pytest.raises(ValueError, match="expected a pad token, got none"):
        load(text, tokenizer)
