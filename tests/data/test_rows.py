import json
import re

import numpy as np
import pytest
from datasets import Dataset
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from harmonic_sft.data import rows as rows_module
from harmonic_sft.data.rows import (
    check_tokenizer,
    stream_rows,
    table_rows,
    tokenize_documents,
    unigram_counts,
)

TEXTS = [
    " ".join(f"word{(7 * index + length) % 200}" for index in range(length))
    for length in (1, 6, 7, 40)
]


def documents(texts):
    return {"text": texts, "source": [1] * len(texts), "document": list(range(len(texts)))}


@pytest.mark.parametrize("name", ["tokenizer", "byte_tokenizer"])
@pytest.mark.parametrize("context_length", [3, 8, 9, 64])
def test_no_token_is_lost_in_cutting(request, name, context_length):
    tokenizer = request.getfixturevalue(name)
    rows = tokenize_documents(documents(TEXTS), tokenizer=tokenizer, context_length=context_length)
    whole: dict[int, list[int]] = {index: [] for index in range(len(TEXTS))}
    for input_ids, document, chunk in zip(
        rows["input_ids"], rows["document"], rows["chunk"], strict=True
    ):
        assert len(input_ids) <= context_length
        assert chunk == len(whole[document]) // (context_length - 2)
        first, last = tokenizer("a")["input_ids"][0], tokenizer("a")["input_ids"][-1]
        assert (input_ids[0], input_ids[-1]) == (first, last)
        whole[document] += input_ids[1:-1]
    for index, text in enumerate(TEXTS):
        assert whole[index] == tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(whole[index]) == text


def test_tokenizer_without_special_tokens_makes_bare_rows(byte_tokenizer):
    settings = json.loads(byte_tokenizer.backend_tokenizer.to_str())
    backend = Tokenizer.from_str(json.dumps(settings | {"post_processor": None}))
    bare = PreTrainedTokenizerFast(tokenizer_object=backend)
    rows = tokenize_documents(documents(["abc"]), tokenizer=bare, context_length=2)
    assert [bare.decode(input_ids) for input_ids in rows["input_ids"]] == ["ab", "c"]


def test_documents_longer_than_the_model_are_cut_without_a_warning(tokenizer, caplog, capfd):
    tokenize_documents(documents([TEXTS[-1] * 10]), tokenizer=tokenizer, context_length=16)
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_text_that_spells_a_special_token_stays_text(tokenizer):
    rows = tokenize_documents(documents(["a [MASK]"]), tokenizer=tokenizer, context_length=16)
    assert tokenizer.mask_token_id not in rows["input_ids"][0]


@pytest.mark.parametrize("name", ["tokenizer", "byte_tokenizer"])
def test_blank_documents_make_no_row(request, name):
    rows = tokenize_documents(
        documents(["", "  \n", "a"]), tokenizer=request.getfixturevalue(name), context_length=8
    )
    assert rows["document"] == [2]


def test_document_that_is_no_text_is_named(tokenizer):
    with pytest.raises(ValueError, match=r"data\.sources\[1\]: expected text .*None in document 1"):
        tokenize_documents(documents(["a", None]), tokenizer=tokenizer, context_length=8)


def test_context_without_place_for_text_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"context_length: expected more than the 2 .*, got 2\."):
        tokenize_documents(documents(["a"]), tokenizer=tokenizer, context_length=2)


@pytest.mark.parametrize("num_proc", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_table_and_stream_give_the_same_rows(tokenizer, num_proc):
    table = table_rows(
        Dataset.from_dict({"text": TEXTS}),
        source=1,
        tokenizer=tokenizer,
        context_length=8,
        num_proc=num_proc,
    )
    stream = stream_rows(
        Dataset.from_dict(documents(TEXTS)).to_iterable_dataset(),
        tokenizer=tokenizer,
        context_length=8,
    )
    assert table.to_list() == list(stream)


def test_tokenized_rows_come_out_of_the_cache(tmp_path, tokenizer, monkeypatch):
    Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "texts")
    calls = []

    def counted(documents, **settings):
        calls.append(settings["context_length"])
        return tokenize_documents(documents, **settings)

    monkeypatch.setattr(rows_module, "tokenize_documents", counted)
    for context_length in (8, 8, 9):
        table_rows(
            Dataset.load_from_disk(tmp_path / "texts"),
            source=0,
            tokenizer=tokenizer,
            context_length=context_length,
        )
    assert calls == [8, 9]


def test_unigrams_are_counted_over_all_rows():
    rows = Dataset.from_dict({"input_ids": [[1, 2, 2], [5, 1]]}).select([1, 0])
    np.testing.assert_array_equal(unigram_counts(rows, 7), [0, 2, 2, 0, 0, 1, 0])


def check(tokenizer, **settings):
    defaults = {"vocab_size": 1000, "max_positions": 64, "context_length": 64}
    check_tokenizer(tokenizer, **(defaults | settings))


def test_tokenizer_that_fits_the_model_passes(tokenizer):
    check(tokenizer, vocab_size=len(tokenizer))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 100}, "tokenizer: expected ids below the model's vocab_size 100, got "),
        ({"max_positions": 32}, "data.context_length: expected at most the 32 positions of the "),
    ],
)
def test_tokenizer_that_does_not_fit_the_model_is_refused(tokenizer, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check(tokenizer, **settings)


@pytest.mark.parametrize("role", ["mask", "pad"])
def test_tokenizer_without_a_needed_token_is_refused(tokenizer, role):
    tokens = {"mask_token": "[MASK]", "pad_token": "[PAD]"}
    del tokens[f"{role}_token"]
    lacking = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **tokens)
    with pytest.raises(ValueError, match=f"tokenizer: expected a {role} token, got none"):
        check(lacking)
