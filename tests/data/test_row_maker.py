import json
import re

import numpy as np
import pytest
from datasets import Dataset
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from harmonic_sft.data import rows as module
from harmonic_sft.data.files import PLACE, BadRows
from harmonic_sft.data.rows import RowMaker, check_tokenizer, table_rows, unigram_counts

TEXTS = [
    " ".join(f"word{(7 * index + length) % 200}" for index in range(length))
    for length in (1, 6, 7, 40)
]


def documents(texts):
    return [{"text": text, "document": index} for index, text in enumerate(texts)]


def row_maker(tokenizer, **settings):
    defaults = {
        "name": "data.sources[1]",
        "source": 1,
        "form": "text",
        "column": "text",
        "context_length": 8,
        "loss_on": "all",
        "word_ids": False,
        "bad_rows": BadRows(),
        "skip": False,
    }
    return RowMaker(tokenizer=tokenizer, **(defaults | settings))


@pytest.mark.parametrize("name", ["tokenizer", "byte_tokenizer"])
@pytest.mark.parametrize("context_length", [3, 8, 9, 64])
def test_no_token_is_lost_in_cutting(request, name, context_length):
    tokenizer = request.getfixturevalue(name)
    whole: dict[int, list[int]] = {index: [] for index in range(len(TEXTS))}
    for row in row_maker(tokenizer, context_length=context_length)(documents(TEXTS)):
        input_ids, document = row["input_ids"], row["document"]
        assert len(input_ids) <= context_length
        assert row["chunk"] == len(whole[document]) // (context_length - 2)
        assert row["source"] == 1
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
    rows = row_maker(bare, context_length=2)(documents(["abc"]))
    assert [bare.decode(row["input_ids"]) for row in rows] == ["ab", "c"]


def test_documents_longer_than_the_model_are_cut_without_a_warning(tokenizer, caplog, capfd):
    rows = row_maker(tokenizer, context_length=16)(documents([TEXTS[-1] * 10]))
    assert len(rows) > 10
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_text_that_spells_a_special_token_stays_text(tokenizer):
    rows = row_maker(tokenizer, context_length=16)(documents(["a [MASK]"]))
    assert tokenizer.mask_token_id not in rows[0]["input_ids"]


@pytest.mark.parametrize("name", ["tokenizer", "byte_tokenizer"])
def test_blank_documents_make_no_row_and_are_counted(request, name):
    maker = row_maker(request.getfixturevalue(name))
    assert [row["document"] for row in maker(documents(["", "  \n", "a"]))] == [2]
    assert maker.bad_rows == BadRows(blank=2)


def test_document_that_is_no_text_is_named(tokenizer):
    message = r"data\.sources\[1\]: text: expected .*None.* in document 1\. .*on_bad_row: skip"
    with pytest.raises(ValueError, match=message):
        row_maker(tokenizer)(documents(["a", None]))
    table = Dataset.from_dict({"text": ["a", None]})
    with pytest.raises(ValueError, match=message):
        table_rows(table, row_maker(tokenizer))


def test_bad_documents_are_left_out_and_counted_if_asked(tokenizer):
    texts = ["a", None, "", "b"]
    streamed, tabled = (row_maker(tokenizer, skip=True) for _ in range(2))
    rows = streamed(documents(texts))
    assert [row["document"] for row in rows] == [0, 3]
    assert table_rows(Dataset.from_dict({"text": texts}), tabled).to_list() == rows
    assert tabled.bad_rows == streamed.bad_rows
    assert list(tabled.bad_rows.places) == ["data.sources[1], document 1"]
    assert tabled.bad_rows.blank == 1


def test_bad_documents_are_counted_again_from_a_cached_table(tmp_path, tokenizer):
    Dataset.from_dict({"text": ["a", "", "b"]}).save_to_disk(tmp_path / "texts")
    for _ in range(2):
        maker = row_maker(tokenizer)
        table_rows(Dataset.load_from_disk(tmp_path / "texts"), maker)
        assert maker.bad_rows == BadRows(blank=1)


def test_bad_document_of_a_file_is_named_by_its_line(tokenizer):
    row = {"text": None, PLACE: "'a.jsonl', line 7"}
    message = r"data\.sources\[1\]: text: expected text, got NoneType None in 'a\.jsonl', line 7\. "
    with pytest.raises(ValueError, match=message):
        row_maker(tokenizer)([{**row, "document": 2}])
    with pytest.raises(ValueError, match=message):
        table_rows(Dataset.from_list([row]), row_maker(tokenizer))
    skipping = row_maker(tokenizer, skip=True)
    assert len(table_rows(Dataset.from_list([row]), skipping)) == 0
    assert list(skipping.bad_rows.places) == ["'a.jsonl', line 7"]


def test_bad_document_of_a_stream_without_files_is_named_by_its_place(tokenizer):
    message = r"in document 3 of logical stream 2\. Repair"
    with pytest.raises(ValueError, match=message):
        row_maker(tokenizer)([{"text": None, "document": (2 << 40) + 3}])


def test_columns_of_our_own_are_not_shown(tokenizer):
    with pytest.raises(ValueError, match=r"a column of that name, got \['txet'\] in"):
        row_maker(tokenizer)([{"txet": "a", PLACE: "'a.jsonl', line 7", "document": 0}])


def test_long_documents_are_tokenized_in_small_batches(tokenizer, monkeypatch):
    sizes = []

    def make(maker, documents, original=RowMaker.make):
        sizes.append(len(documents))
        return original(maker, documents)

    monkeypatch.setattr(RowMaker, "make", make)
    monkeypatch.setattr(module, "BATCH_BYTES", 3000)
    table = Dataset.from_dict({"text": ["word1 " * 200] * 7})
    rows = table_rows(table, row_maker(tokenizer))
    assert sizes == [2, 2, 2, 1]
    assert [row["document"] for row in rows] == sorted([*range(7)] * (len(rows) // 7))


def test_context_without_place_for_text_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"context_length: expected more than the 2 .*, got 2\."):
        row_maker(tokenizer, context_length=2)(documents(["a"]))


def test_rows_know_their_words_if_asked(tokenizer):
    maker = row_maker(tokenizer, context_length=6, word_ids=True)
    assert "word_ids" in maker.columns
    # Letters are pieces of one word: xyz is x, ##y, ##z.
    first, second = maker(documents(["word1 xyz word2 ab"]))
    assert first["word_ids"] == [-1, 0, 1, 1, 1, -1]
    assert second["word_ids"] == [-1, 2, 3, 3, -1]


def test_tokens_of_chunks_without_a_scored_one_are_counted(tokenizer):
    prompt, answer = TEXTS[3], "word1 word2"
    row = {"prompt": prompt, "completion": answer, "document": 0}
    settings = {"form": "prompt_completion", "loss_on": "completion"}
    stream, table = (row_maker(tokenizer, bad_rows=BadRows(), **settings) for _ in range(2))
    whole = row_maker(tokenizer, context_length=512, bad_rows=BadRows(), **settings)
    rows = stream([row])
    expected = len(whole([row])[0]["input_ids"]) - 2 - sum(len(r["input_ids"]) - 2 for r in rows)
    assert expected > 0
    assert stream.bad_rows.unscored_tokens == expected
    assert len(table_rows(Dataset.from_list([row]).remove_columns("document"), table)) == len(rows)
    assert table.bad_rows.unscored_tokens == expected
    assert stream.bad_rows.total == table.bad_rows.total == whole.bad_rows.unscored_tokens == 0


def test_only_chunks_with_a_scored_token_become_rows(tokenizer):
    words = [f"word{index}" for index in range(14)]
    input_ids = tokenizer.convert_tokens_to_ids(words)
    labels = [-100] * 7 + input_ids[7:8] + [-100] * 6
    maker = row_maker(tokenizer, form="tokens")
    rows = maker([{"input_ids": input_ids, "labels": labels, "document": 5}])
    assert rows == [
        {
            "input_ids": [tokenizer.cls_token_id, *input_ids[6:12], tokenizer.sep_token_id],
            "scored": [False, False, True, False, False, False, False, False],
            "source": 1,
            "document": 5,
            "chunk": 1,
        }
    ]
    assert not maker.bad_rows.total


@pytest.mark.parametrize("num_proc", [None, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("word_ids", [False, True])
def test_table_and_stream_give_the_same_rows(tokenizer, num_proc, word_ids):
    maker = row_maker(tokenizer, word_ids=word_ids)
    table = table_rows(Dataset.from_dict({"text": TEXTS}), maker, num_proc=num_proc)
    assert table.to_list() == maker(documents(TEXTS))
    assert sorted(table.column_names) == sorted(maker.columns)


def test_tokenized_rows_come_out_of_the_cache(tmp_path, tokenizer, monkeypatch):
    Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "texts")
    calls = []
    make = RowMaker.make

    def counted(maker, documents):
        calls.append(maker.context_length)
        return make(maker, documents)

    monkeypatch.setattr(RowMaker, "make", counted)
    for context_length in (8, 8, 9):
        maker = row_maker(tokenizer, context_length=context_length)
        table_rows(Dataset.load_from_disk(tmp_path / "texts"), maker)
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
