import json
import os
import re
import sys
import types
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from harmonic_sft.data import Source
from harmonic_sft.data import row_maker as module
from harmonic_sft.data.bad_rows import BadRows
from harmonic_sft.data.encoding import SpecialTokens
from harmonic_sft.data.files import BAD, NUMBER, PLACE, FileRows, file_shards
from harmonic_sft.data.formats import Reader
from harmonic_sft.data.heldout import fingerprint, word_hashes
from harmonic_sft.data.masking import NextTokenLabels
from harmonic_sft.data.row_maker import (
    RowMaker,
    check_tokenizer,
    document_names,
    rows_digest,
    tokenize_table,
    unigram_counts,
)
from tests.data.conftest import load

TEXTS = [
    " ".join(f"word{(7 * index + length) % 200}" for index in range(length))
    for length in (1, 6, 7, 40)
]


def documents(texts):
    return [{"text": text, NUMBER: index} for index, text in enumerate(texts)]


def row_maker(tokenizer, **settings):
    own = {key: settings.pop(key) for key in ("context_length", "scored") if key in settings}
    read = Reader(tokenizer=tokenizer, **{"row_format": "text", **settings})
    return RowMaker(name="data.sources[1]", source=1, read=read, **{"context_length": 8, **own})


def make(maker, documents, skip=False):
    """Rows, and what makes none."""
    rows, bad_rows = replace(maker, skip=skip)(documents)
    return [plain(row) for row in rows], bad_rows


def plain(row):
    """A row as JSON has it, without columns that it has not."""
    words = {} if row.get("words") is None else {"words": [int(word) for word in row["words"]]}
    return {name: value for name, value in row.items() if value is not None} | words


def make_table(maker, documents, skip=False, num_proc=None):
    table, bad_rows = tokenize_table(documents, replace(maker, skip=skip), num_proc)
    return [plain(row) for row in table.to_list()], bad_rows


def texts_table(texts):
    return Dataset.from_dict({"text": texts})


def test_what_a_transform_makes_is_found_by_its_content(tokenizer, monkeypatch):
    # As after an edit of its module: the library knows a function by its name.
    ending = types.ModuleType("ending")
    exec("def add(rows):\n    return {'text': [text + END for text in rows['text']]}", vars(ending))
    monkeypatch.setitem(sys.modules, "ending", ending)
    found = []
    for ending.END in (" word1", " word2", " word1"):
        texts = texts_table(["word9"]).with_transform(ending.add)
        table, _ = make_table(row_maker(tokenizer), texts)
        found.append(tokenizer.decode(table[0]["input_ids"], skip_special_tokens=True))
    assert found == ["word9 word1", "word9 word2", "word9 word1"]


@pytest.mark.parametrize(
    ("name", "context_length"),
    [("tokenizer", 3), ("tokenizer", 64), ("byte_tokenizer", 9)],
)
def test_no_token_is_lost_in_cutting(request, name, context_length):
    tokenizer = request.getfixturevalue(name)
    whole = [[] for _ in TEXTS]
    rows, _ = make(row_maker(tokenizer, context_length=context_length), documents(TEXTS))
    for row in rows:
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
    rows, _ = make(row_maker(bare, context_length=2), documents(["abc"]))
    assert [bare.decode(row["input_ids"]) for row in rows] == ["ab", "c"]


def test_documents_longer_than_the_model_are_cut_without_a_warning(tokenizer, caplog, capfd):
    rows, _ = make(row_maker(tokenizer, context_length=16), documents([TEXTS[-1] * 10]))
    assert len(rows) > 10
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_bad_document_is_named_by_its_file_or_its_number(tokenizer):
    maker = row_maker(tokenizer)
    message = (
        r"data\.sources\[1\]: text: expected text, got NoneType None in {}\. .*on_bad_row: skip"
    )
    with pytest.raises(ValueError, match=message.format("document 1")):
        make(maker, documents(["a", None]))
    with pytest.raises(ValueError, match=message.format("document 3 of logical stream 2")):
        make(maker, [{"text": None, NUMBER: (2 << 40) + 3}])
    row = {"text": None, PLACE: "'a.jsonl', line 7"}
    with pytest.raises(ValueError, match=message.format(r"'a\.jsonl', line 7")):
        make(maker, [{**row, NUMBER: 2}])
    with pytest.raises(ValueError, match=message.format(r"'a\.jsonl', line 7")):
        make_table(maker, Dataset.from_list([row]))
    with pytest.raises(ValueError, match=r"a column of that name, got \['txet'\] in"):
        make(maker, [{"txet": "a", PLACE: "'a.jsonl', line 7", NUMBER: 0}])
    unread = {PLACE: "'a.jsonl', line 8", BAD: ("expected JSON, got NaN", 1), NUMBER: 2}
    with pytest.raises(ValueError, match=r"expected JSON, got NaN in 'a\.jsonl', line 8\."):
        make(maker, [unread])


def test_blank_documents_are_left_out_and_counted_and_bad_ones_if_asked(byte_tokenizer):
    maker, texts = row_maker(byte_tokenizer), ["a", None, "", "  \n", "b"]
    rows, bad_rows = make(maker, documents(texts), skip=True)
    assert [row["document"] for row in rows] == [0, 4]
    assert list(bad_rows.places) == ["data.sources[1], document 1"]
    assert make_table(maker, texts_table(texts), skip=True) == (rows, bad_rows)
    assert make(maker, documents(["", " ", "a"]))[1] == BadRows(blank=2, skip=False)


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n[]\n{"text": " "}\n{"text": "two", "n": 1}\n{"te')
    return path


def rows_of(path):
    return FileRows(file_shards(str(path), name="s"))


def test_table_of_a_file_is_made_once_until_the_file_changes(tokenizer, lines, monkeypatch):
    maker = row_maker(tokenizer)
    first = make_table(maker, rows_of(lines), skip=True)
    assert [row["document"] for row in first[0]] == [0, 2]
    assert list(first[1].places) == [f"{str(lines)!r}, line {line}" for line in (2, 5)]
    assert first[1].blank == 1
    with monkeypatch.context() as patched:
        patched.setattr(RowMaker, "__call__", None)
        assert make_table(maker, rows_of(lines), skip=True) == first
    lines.write_text('{"text": "three"}\n')
    os.utime(lines, (1, 1))
    assert len(make_table(maker, rows_of(lines), skip=True)[0]) == 1


@pytest.mark.parametrize("damage", ["cut table", "changed byte", "cut report", "no report"])
def test_a_damaged_table_in_the_cache_is_made_again(
    tokenizer, lines, datasets_cache, caplog, damage
):
    maker = row_maker(tokenizer)
    expected = make_table(maker, rows_of(lines), skip=True)
    (table,) = datasets_cache.glob("*/*.arrow")
    (report,) = datasets_cache.glob("*/*.json")
    path = report if "report" in damage else table
    content = bytearray(path.read_bytes())
    if damage == "changed byte":
        content[len(content) // 2] ^= 1
    path.write_bytes(content[: len(content) // 2] if "cut" in damage else content)
    if damage == "no report":
        report.unlink()
    assert make_table(maker, rows_of(lines), skip=True) == expected
    assert f"The cached table {table} is damaged. It is made again." in caplog.messages
    caplog.clear()
    assert make_table(maker, rows_of(lines), skip=True) == expected
    assert not caplog.messages


def test_nothing_is_left_of_a_table_that_failed(tokenizer, lines, datasets_cache):
    make_table(row_maker(tokenizer), rows_of(lines), skip=True)
    tables = sorted((datasets_cache / "harmonic_sft").iterdir())
    for _ in range(2):
        with pytest.raises(ValueError, match=r"expected an object, got list in .*line 2\. Repair"):
            make_table(row_maker(tokenizer), rows_of(lines))
    assert sorted((datasets_cache / "harmonic_sft").iterdir()) == tables


def test_long_documents_are_tokenized_in_small_batches(tokenizer, monkeypatch):
    make_rows = RowMaker.__call__
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 2000)
    with patch.object(RowMaker, "__call__", autospec=True, side_effect=make_rows) as called:
        rows, _ = make_table(row_maker(tokenizer), texts_table(["word1 " * 200] * 7))
    assert [len(call.args[1]) for call in called.call_args_list] == [2, 2, 2, 1]
    assert [row["document"] for row in rows] == sorted([*range(7)] * (len(rows) // 7))


def test_context_without_place_for_text_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"context_length: expected more than the 2 .*, got 2\."):
        make(row_maker(tokenizer, context_length=2), documents(["a"]))


def test_rows_know_their_words_if_asked(tokenizer):
    maker = row_maker(tokenizer, context_length=6, word_ids=True)
    assert "word_ids" in maker.columns
    # Letters are pieces of one word: xyz is x, ##y, ##z.
    (first, second), _ = make(maker, documents(["word1 xyz word2 ab"]))
    assert first["word_ids"] == [-1, 0, 1, 1, 1, -1]
    assert second["word_ids"] == [-1, 2, 3, 3, -1]


def test_only_chunks_with_a_scored_token_become_rows_and_other_tokens_are_counted(tokenizer):
    words = [f"word{index}" for index in range(14)]
    input_ids = tokenizer.convert_tokens_to_ids(words)
    labels = [-100] * 7 + input_ids[7:8] + [-100] * 6
    maker = row_maker(tokenizer, row_format="tokens", scored=True)
    row = {"input_ids": input_ids, "labels": labels}
    rows, bad_rows = make(maker, [{**row, NUMBER: 0}])
    assert make_table(maker, Dataset.from_list([row])) == (rows, bad_rows)
    assert rows == [
        {
            "input_ids": [tokenizer.cls_token_id, *input_ids[6:12], tokenizer.sep_token_id],
            "scored": [False, False, True, False, False, False, False, False],
            "source": 1,
            "document": 0,
            "chunk": 1,
            "fingerprint": fingerprint(" ".join(map(str, input_ids))),
            "words": word_hashes(str(input_ids[7])).tolist(),
        }
    ]
    assert bad_rows == BadRows(unscored_tokens=14 - 6, skip=False)


@pytest.mark.parametrize(
    ("num_proc", "word_ids"), [(None, True), pytest.param(2, False, marks=pytest.mark.slow)]
)
def test_table_and_stream_give_the_same_rows(tokenizer, num_proc, word_ids):
    maker = row_maker(tokenizer, word_ids=word_ids)
    expected = make(maker, documents(TEXTS))
    assert make_table(maker, texts_table(TEXTS), num_proc=num_proc) == expected
    assert sorted(expected[0][0]) == sorted(maker.columns)


def test_table_goes_by_the_settings_of_its_maker(tokenizer, datasets_cache):
    for context_length in (8, 8, 9):
        make_table(row_maker(tokenizer, context_length=context_length), texts_table(TEXTS))
    assert len(list((datasets_cache / "harmonic_sft").glob("*.arrow"))) == 2


def test_unigrams_are_counted_over_all_rows_where_they_are_predicted():
    rows = Dataset.from_dict({"input_ids": [[1, 2, 2], [5, 1]]}).select([1, 0])
    masker = NextTokenLabels(seed=0, special_tokens=np.zeros(7, dtype=bool))
    np.testing.assert_array_equal(unigram_counts(rows, masker), [0, 2, 2, 0, 0, 1, 0])
    rows = rows.add_column("scored", [[False, True], [True, True, False]])
    np.testing.assert_array_equal(unigram_counts(rows, masker), [0, 2, 1, 0, 0, 0, 0])


def test_columns_of_chosen_rows_are_cut_in_runs_and_not_row_by_row(monkeypatch):
    places = np.delete(np.arange(25_000), [0, 7, 12_000, 24_999])
    places[:2] = places[1::-1]
    rows = Dataset.from_dict({"source": np.zeros(25_000, int), "document": np.arange(25_000)})
    rows = rows.select(places)
    monkeypatch.delattr("datasets.table.IndexedTableMixin.fast_gather")
    np.testing.assert_array_equal(document_names(rows), [np.zeros(len(places)), places])


def check(tokenizer, **settings):
    defaults = {"vocab_size": 1000, "max_positions": 64, "context_length": 64}
    check_tokenizer(tokenizer, **(defaults | settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 100}, "tokenizer: expected ids below the model's vocab_size 100, got "),
        (
            {"vocab_size": 100},
            "resize_token_embeddings(len(tokenizer)), and save both",
        ),
        ({"max_positions": 32}, "data.context_length: expected at most the 32 positions of the "),
        ({"pad_to_multiple_of": 48}, "got 64, which data.pad_to_multiple_of makes 96."),
    ],
)
def test_tokenizer_that_does_not_fit_the_model_is_refused(tokenizer, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check(tokenizer, **settings)


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        ("mask", "tokenizer: expected a mask token, got none"),
        ("pad", "tokenizer: expected a pad token, got none"),
        ("ordinary", "tokenizer: expected ordinary tokens, got only special ones"),
    ],
)
def test_tokenizer_without_needed_tokens_is_refused(lacking, message):
    roles = {name: f"[{name}]" for name in ("mask", "pad") if name != lacking}
    words = [*roles.values(), *(["word"] if lacking != "ordinary" else [])]
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    tokens = {f"{name}_token": token for name, token in roles.items()}
    with pytest.raises(ValueError, match=message):
        check(PreTrainedTokenizerFast(tokenizer_object=backend, **tokens))


def test_a_row_whose_only_scored_token_is_its_first_is_none_of_a_decoders(tmp_path):
    """Without a token that begins every row, nothing predicts it."""
    rows = [
        {"input_ids": [k, k + 1], "labels": [k, -100 if k % 2 else k + 1]} for k in range(8, 24)
    ]
    path = tmp_path / "tokens.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = Tokenizer(models.WordLevel({f"w{k}": k for k in range(40)}, unk_token="w0"))
    special = {"unk_token": "w0", "eos_token": "w1", "pad_token": "w1"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    assert not SpecialTokens.of(tokenizer).prefix
    settings = {"task": "causal_lm", "on_bad_row": "skip", "eval": {"documents": 1}}
    data = load(tokenizer, Source(path=str(path)), **settings)
    assert data.bad_rows.total == 8
    assert all((row["labels"][1:] != -100).any() for row in data.train)


@pytest.mark.parametrize(
    "change",
    [
        {"input_ids": [[1], [2, 3]]},
        {"input_ids": [[1, 2], [4]]},
        {"document": [1, 0]},
        {"fingerprint": ["a", "c"]},
    ],
)
def test_the_digest_of_rows_sees_every_column(change):
    rows = {"input_ids": [[1, 2], [3]], "document": [0, 1], "fingerprint": ["a", "b"]}
    digest = rows_digest(Dataset.from_dict(rows))
    assert rows_digest(Dataset.from_dict(rows)) == digest
    assert rows_digest(Dataset.from_dict({**rows, **change})) != digest
