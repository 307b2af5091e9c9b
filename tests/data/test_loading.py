import copy
import itertools
import json
import re
from collections import Counter

import numpy as np
import pytest
from datasets import Dataset, concatenate_datasets
from pydantic import ValidationError
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from harmonic_sft.data import DataConfig, EvalConfig, MaskConfig, Source
from harmonic_sft.data.heldout import fingerprint
from harmonic_sft.data.masking import EVAL_EPOCH, IGNORE_INDEX
from harmonic_sft.data.sources import GivenSource
from harmonic_sft.data.streams import advance
from tests.data.conftest import NUM_DOCUMENTS, load


def originals(rows):
    """Rows as they were before masking."""
    return [np.where(r["labels"] == IGNORE_INDEX, r["input_ids"], r["labels"]) for r in rows]


def test_counts_are_those_of_the_ordinary_tokens_trained_on(tokenizer, path):
    data = load(tokenizer, Source(path=path))
    input_ids = np.concatenate(originals(data.train))
    counts = np.bincount(input_ids, minlength=len(tokenizer))
    counts[tokenizer.all_special_ids] = 0
    np.testing.assert_array_equal(data.unigram_counts, counts)
    assert data.num_tokens == counts.sum()
    assert data.num_documents == len(data.trained) == NUM_DOCUMENTS - 5  # blank lines are none
    assert data.duplicates == (0, 0)


def test_counts_are_those_of_the_tokens_that_the_loss_is_on(tokenizer, write):
    rows = [{"prompt": "word1 word2 ", "completion": f"word{index}"} for index in range(9, 19)]
    data = load(tokenizer, {"path": write(rows)}, loss_on="completion", context_length=16)
    counted = tokenizer.convert_ids_to_tokens(np.flatnonzero(data.unigram_counts))
    assert len(counted) == data.num_tokens == 5
    assert {"word1", "word2"}.isdisjoint(counted)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_column_called_document_is_read(tokenizer, write, streaming):
    cases = (
        ({"document": "word9"}, {"column": "document"}, {}, [1.0]),
        ({"text": "word9", "document": 2.5}, {}, {"weight_column": "document"}, [2.5]),
    )
    for row, source, fields, weights in cases:
        source |= {"path": write([row]), "streaming": streaming}
        data = load(tokenizer, source, eval={"documents": 0}, **fields)
        found = next(iter(data.train))
        assert tokenizer.decode(originals([found])[0][1:-1]) == "word9"
        assert found.get("label_weights", [1.0])[:1] == weights


def key(row):
    return row["input_ids"].tobytes(), row["labels"].tobytes()


@pytest.mark.parametrize("streaming", [False, True])
def test_all_training_seeds_are_evaluated_on_the_same_tokens(tokenizer, path, streaming):
    source = Source(path=path, streaming=streaming)
    first, other = (load(tokenizer, source, seed=seed).eval for seed in (0, 1))
    assert [key(row) for row in first] == [key(row) for row in other]
    chosen = load(tokenizer, source, eval=EvalConfig(documents=5, seed=1)).eval
    assert [key(row) for row in chosen] != [key(row) for row in first]


def streamed_rows(data, num_rows):
    """Items of a stream and their places, read in one process."""
    items = list(itertools.islice(data.train, num_rows))
    return [key(item) for item in items], [item["place"] for item in items]


@pytest.mark.parametrize("whole_word", [False, True])
def test_streamed_file_has_the_rows_and_masks_of_the_table(tokenizer, path, whole_word):
    mask = MaskConfig(probability=0.5, whole_word=whole_word, policy="80_10_10")
    stream = load(tokenizer, Source(path=path, streaming=True), mask=mask)
    table = load(tokenizer, Source(path=path), mask=mask)
    rows = [*table.train.rows, *table.eval.rows]
    rows.sort(key=lambda row: (row["document"], row["chunk"]))
    masker = table.train.masker
    num_eval = sum(row["document"] < 10 for row in rows)
    assert [key(row) for row in stream.eval] == [
        key(masker(row, EVAL_EPOCH)) for row in rows[:num_eval]
    ]
    trained = rows[num_eval:]
    found, _ = streamed_rows(stream, 2 * len(trained))
    for epoch in range(2):
        part = found[epoch * len(trained) : (epoch + 1) * len(trained)]
        assert Counter(part) == Counter(key(masker(row, epoch)) for row in trained)
    assert stream.num_tokens is stream.unigram_counts is stream.num_documents is None
    assert stream.fill_rate is None


@pytest.mark.parametrize("streaming", [False, True])
def test_documents_of_another_place_are_evaluated_on(tokenizer, path, write, streaming):
    copy_of_one = " ".join(f"word{8 * j % 200}" for j in range(9))
    elsewhere = ["word100 word101 word102", "word103 word104", copy_of_one]
    other = Source(path=write([{"text": text} for text in elsewhere]))
    source = Source(path=path, streaming=streaming)
    data = load(tokenizer, source, eval=EvalConfig(source=other), context_length=16)
    texts, trained = (
        [
            tokenizer.decode(ids[1:-1])
            for ids in originals(itertools.islice(rows, 3 * NUM_DOCUMENTS))
        ]
        for rows in (data.eval, data.train)
    )
    assert texts == elsewhere
    assert len(data.held_out.fingerprints) == 3
    assert copy_of_one not in trained
    assert " ".join(f"word{9 * j % 200}" for j in range(10)) in trained
    row = {"prompt": "word1", "completion": "word2 word3"}
    prompted = {"source": {"path": write([row], "prompted.jsonl")}}
    assert "scored" in load(tokenizer, source, eval=prompted).eval.rows.column_names


def numbered(first, count):
    """Text of consecutive words, without a 13-gram in common with that of other words."""
    return " ".join(f"word{number}" for number in range(first, first + count))


LONG = [numbered(20 * index, 15) for index in range(8)]  # three 13-grams each
NEAR = numbered(40, 14) + " a"  # two of the three 13-grams of LONG[2]
FAR = numbered(60, 13) + " a b"  # one of the three of LONG[3]


def of_copies(tokenizer, tmp_path, *, streaming, **settings):
    """Eight documents, the evaluation among them, and then a copy of each, a near one and a far."""
    lines = [*LONG, *(f"  {text} " for text in LONG), NEAR, FAR]
    (tmp_path / "copies.txt").write_text("\n".join(lines))
    source = Source(path=str(tmp_path / "copies.txt"), streaming=streaming)
    return load(tokenizer, source, **settings)


@pytest.mark.parametrize(("drop_near", "expected"), [(False, 10), (True, 9)])
def test_copies_of_held_out_documents_leave_a_stream_as_they_pass(
    tokenizer, tmp_path, drop_near, expected
):
    """The first four documents are held out; their copies are numbers 8 to 11 of the stream."""
    held_out = EvalConfig(documents=4, drop_near_duplicates=drop_near)
    settings = {"streaming": True, "eval": held_out, "window": 3}
    data = of_copies(tokenizer, tmp_path, **settings)
    assert data.held_out.fingerprints == [fingerprint(text) for text in LONG[:4]]
    rows_of_one = 3  # 15 words, 6 in a row
    num_rows = expected * rows_of_one
    items = list(itertools.islice(data.train, 2 * num_rows + 1))
    copies = [row["place"].snapshot["duplicates"] for row in items]
    assert copies[0] == (0, 0)
    assert copies[num_rows] == copies[-1] == (4, 1)  # a second pass counts none again
    assert "word0" not in {tokenizer.decode(item[1]) for item in originals(items)}
    places = [item["place"] for item in items]
    again = of_copies(tokenizer, tmp_path, **settings)
    again.train.state = json.loads(json.dumps(advance(data.train.state, places[:20], 20)))
    for resumed, whole in zip(again.train, items[20:], strict=False):
        assert key(resumed) == key(whole)
        assert resumed["place"] == whole["place"]


@pytest.mark.parametrize("drop_near", [False, True])
def test_copies_of_held_out_documents_leave_a_table(tokenizer, tmp_path, drop_near):
    """Held out are 1, 4, 6, 9, 10 and 14 of 18, so 12 is a copy of 4, 2 one of 10, 16 a near one.

    FAR shares one of its three 13-grams with a document that is not held out anyway.
    """
    held_out = EvalConfig(documents=6, seed=5, drop_near_duplicates=drop_near)
    data = of_copies(tokenizer, tmp_path, streaming=False, eval=held_out)
    assert data.held_out.fingerprints == [fingerprint(LONG[i]) for i in (1, 4, 6, 1, 2, 6)]
    assert data.duplicates == (2, 1)
    stay = [0, 3, 5, 7, 8, 11, 13, 15, *([] if drop_near else [16]), 17]
    assert list(dict.fromkeys(data.train.rows["document"])) == stay
    texts = [*LONG, *LONG, NEAR, FAR]
    assert data.num_documents == len(stay)
    assert data.trained.tolist() == sorted({int(fingerprint(texts[i])[:16], 16) for i in stay})
    assert set(data.eval.rows.column_names) == set(data.train.rows.column_names)
    assert not {"fingerprint", "words"} & set(data.train.rows.column_names)


def test_a_comparison_of_minutes_shows_how_far_it_is(tokenizer, path, capsys, monkeypatch):
    moments = itertools.count(step=3)  # seconds
    monkeypatch.setattr("tqdm.std.time", lambda: float(next(moments)))
    load(tokenizer, Source(path=path))
    assert "Comparing with held-out documents: 35 documents" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("odd.jsonl", '{"number": 1}\n', r"data\.sources\.0\.format: expected the columns"),
        ("blank.txt", "\n \n\n", r"sources\.0: expected documents with text"),
        (
            "same.txt",
            "word1 word2\n" * 5,
            r"data\.eval: expected training documents besides copies .* got 4 copies",
        ),
    ],
)
def test_files_that_leave_nothing_to_train_on_are_refused(
    tokenizer, tmp_path, name, content, message
):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load(tokenizer, Source(path=str(tmp_path / name)), eval=EvalConfig(documents=1))


@pytest.mark.parametrize("first", [{"text": None}, {"messages": []}, {"other": 1}])
def test_a_bad_first_row_is_as_bad_as_any(tokenizer, write, first):
    rows = [first, *({"text": f"word{index} word2"} for index in range(8))]
    source = Source(path=write(rows))
    assert load(tokenizer, source, on_bad_row="skip").bad_rows.total == 1
    with pytest.raises(ValueError, match=r"rows\.jsonl', line 1\. Repair it"):
        load(tokenizer, source)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        ([" ", 5], ". '{}', line 2: text: expected text, got int 5"),
        (["\x00\x01"] * 9, ""),  # text without a token is blank
    ],
)
def test_a_source_without_rows_says_what_is_wrong(tokenizer, write, streaming, texts, reason):
    source = Source(path=write([{"text": text} for text in texts]), streaming=streaming)
    settings = {"on_bad_row": "skip" if reason else "error", "eval": {"documents": 0}}
    message = "expected documents with text, got only blank or bad ones" + reason
    with pytest.raises(ValueError, match=re.escape(message.format(source.path))):
        next(iter(load(tokenizer, source, **settings).train))


def test_fewer_logical_streams_may_be_asked_for(tokenizer, tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("word1\nword2\nword3\n")
    source = Source(path=str(tmp_path / "*.txt"), streaming=True)
    assert len(load(tokenizer, source, streams=2).train.streams) == 2


def test_broken_lines_of_a_stream_are_counted_once_and_through_restarts(tokenizer, tmp_path):
    lines = [json.dumps({"text": f"word{index}"}) for index in range(30)]
    for place in (0, 4, 7, 11, 12, 20, 29):  # the first two before a document for training
        lines[place] = "{broken"
    lines[15] = json.dumps({"text": None})
    lines[16] = json.dumps({"text": " "})
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    source = Source(path=str(tmp_path / "lines.jsonl"), streaming=True)

    def opened(state=None):
        data = load(tokenizer, source, on_bad_row="skip", window=4)
        data.train.state = state or data.train.state
        return data

    whole = opened()
    before = whole.bad_rows.total
    assert before == 2
    rows, places = streamed_rows(whole, 60)
    assert whole.bad_rows.total == before  # the others are counted in the places
    assert len(places[-1].snapshot["reasons"]) == 5
    assert f"'{tmp_path}/lines.jsonl', line 16: text: expected text, got NoneType" in str(
        places[-1].snapshot["reasons"]
    )
    skipped = [place.snapshot["skipped"] for place in places]
    assert skipped == sorted(skipped)
    assert skipped[-1] + before == 9
    for stop in range(1, 40, 6):
        state = advance(whole.train.state, places[:stop], stop)
        resumed = opened(json.loads(json.dumps(state)))
        assert streamed_rows(resumed, 20) == (rows[stop : stop + 20], places[stop : stop + 20])


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_conversation_is_named_by_its_file_and_line(tokenizer, tmp_path, write, streaming):
    for name in "ab":
        roles = [("user", "assistant")] * 8
        if name == "b":
            roles[6] = ("assistant", "user")
        turns = [[{"role": r, "content": f"{name} word{i}"} for r in roles[i]] for i in range(8)]
        write([{"messages": messages} for messages in turns], f"{name}.jsonl")
    source = Source(path=f"{tmp_path}/*.jsonl", streaming=streaming)
    with pytest.raises(ValueError, match=rf"got 'assistant' .* in '{tmp_path}/b.jsonl', line 7\."):
        list(itertools.islice(load(tokenizer, source, loss_on="assistant").train, 30))


def test_source_is_named_by_its_place(tokenizer, path):
    with pytest.raises(ValueError, match=r"data\.sources\.1\.path: expected an existing file"):
        load(tokenizer, Source(path=path), Source(path="missing.txt"))


def test_whole_words_need_a_tokenizer_that_tells_them_apart(tokenizer, path, monkeypatch):
    settings = {"mask": MaskConfig(whole_word=True)}
    metaspace = copy.deepcopy(tokenizer)
    metaspace.backend_tokenizer.normalizer = normalizers.Replace(" ", "_")
    metaspace.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    with pytest.raises(ValueError, match="expected a tokenizer that tells words apart"):
        load(metaspace, Source(path=path), **settings)
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    with pytest.raises(ValueError, match=r"expected a fast tokenizer for .* whole words"):
        load(tokenizer, Source(path=path), **settings)


TABLE, STREAM = {"path": "a.txt"}, {"path": "a.txt", "streaming": True}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sources": [TABLE, STREAM]}, "sources: expected streaming in all or in none"),
        ({"sources": [{**STREAM, "weight": 1}, STREAM]}, "sources: expected a weight in all or in"),
        (
            {"sources": [{**TABLE, "weight": weight} for weight in (3, 1)]},
            "sources: expected streaming: true in a mixture by weight",
        ),
        (
            {"padding_free": True, "pad_to_multiple_of": 8},
            "padding_free: expected no pad_to_multiple_of",
        ),
    ],
)
def test_bad_data_settings_are_refused(settings, message):
    defaults = {"sources": [TABLE], "context_length": 8}
    with pytest.raises(ValidationError, match=message):
        DataConfig(**(defaults | settings))


TEXTS = [" ".join([f"word{index}"] * (1 + index % 20)) for index in range(30)]


def document_names(rows):
    return {(row["source"], row["document"]) for row in rows}


def of_files(tokenizer, folder, lengths, *, streaming, **settings):
    """30 documents or fewer, in one file after another."""
    texts = iter(TEXTS)
    for number, length in enumerate(lengths):
        (folder / f"{number}.txt").write_text("\n".join(next(texts) for _ in range(length)))
    source = Source(path=f"{folder}/*.txt", streaming=streaming)
    return load(tokenizer, source, window=1, **settings)


def one_pass(stream):
    """The rows of a stream's first pass, a window being one document."""
    first = itertools.takewhile(lambda item: item[0][0][1] == 0, stream.rows(None))
    return [row for [(row, _)], _ in first]


def test_every_document_is_on_one_side_with_all_its_rows(tokenizer, tmp_path):
    held_out = []
    for seed in (0, 0, 1):
        config = EvalConfig(documents=10, seed=seed)
        data = of_files(tokenizer, tmp_path, [30], streaming=False, eval=config)
        train = document_names(data.train.rows)
        held_out.append(document_names(data.eval.rows))
        assert (len(train), len(held_out[-1]), len(train | held_out[-1])) == (20, 10, 30)
        num_chunks = sum(-(-(1 + index % 20) // 6) for index in range(30))
        assert len(data.eval.rows) + len(data.train.rows) == num_chunks
    assert held_out[0] == held_out[1] != held_out[2]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((8, 8, 14), {0: 7, 1: 7, 2: 6}),
        ((1, 28), {0: 1, 1: 19}),  # short ones leave their share to long ones
        ((3, 1, 22, 2), {0: 3, 1: 1, 2: 14, 3: 2}),
    ],
)
def test_every_logical_stream_gives_its_share_for_evaluation(
    tokenizer, tmp_path, lengths, expected
):
    settings = {"streaming": True, "eval": EvalConfig(documents=20)}
    data = of_files(tokenizer, tmp_path, lengths, **settings)
    held_out = document_names(data.eval.rows)
    assert Counter(document >> 40 for _, document in held_out) == expected
    trained = [document_names(one_pass(stream)) for stream in data.train.streams]
    assert all(trained)
    assert not held_out & set.union(*trained)
    assert len(set.union(*trained)) == sum(lengths) - 20


@pytest.mark.parametrize(
    ("eval_documents", "lengths", "streaming"),
    [(30, [30], False), (31, [15, 15], True)],
)
def test_too_few_documents_are_refused(tokenizer, tmp_path, eval_documents, lengths, streaming):
    message = re.escape(
        "data.eval.documents: expected fewer than the documents there are, "
        f"got {eval_documents} of 30. Keep fewer, or add sources."
    )
    settings = {"streaming": streaming, "eval": EvalConfig(documents=eval_documents)}
    with pytest.raises(ValueError, match=message):
        of_files(tokenizer, tmp_path, lengths, **settings)


@pytest.mark.parametrize("streaming", [False, True])
def test_plain_text_beside_scored_rows_is_scored_as_a_whole(tokenizer, tmp_path, write, streaming):
    (tmp_path / "text.txt").write_text("word1 word2\nword3 word4\n")
    rows = [{"input_ids": [9, 10, last], "labels": [-100, 10, -100]} for last in (11, 12)]
    paths = (str(tmp_path / "text.txt"), write(rows))
    sources = [Source(path=path, streaming=streaming) for path in paths]
    data = load(tokenizer, *sources, eval=EvalConfig(documents=2, seed=1))
    rows = [*data.eval.rows, *([] if streaming else data.train.rows)]
    assert {int(row["source"]): row["scored"].tolist() for row in rows} == {
        0: [True] * 4,
        1: [False, False, True, False, False],
    }


@pytest.fixture
def causal_tokenizer():
    vocabulary = {f"w{index}": index for index in range(40)} | {"user:": 40, "assistant:": 41}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="w1", pad_token="w1")


def load_causal(path, tokenizer, **settings):
    settings = {"eval": {"documents": 1}, **settings}
    return load(tokenizer, {"path": str(path)}, task="causal_lm", **settings)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("w2 w3 w4\nw5 w6 w7 w8 w9 w10 w11 w12 w13 w14 w15\nw16\nw17 w18\n")
    return path


def test_text_ends_in_the_eos_token_which_is_predicted(text, causal_tokenizer):
    data = load_causal(text, causal_tokenizer)
    rows = {
        tuple(row["input_ids"].tolist()): row["labels"].tolist()
        for part in (data.train, data.eval)
        for row in part
    }
    assert rows[2, 3, 4, 1] == [IGNORE_INDEX, 3, 4, 1]
    # A long document ends once, in its last chunk.
    assert rows[5, 6, 7, 8, 9, 10, 11, 12] == [IGNORE_INDEX, 6, 7, 8, 9, 10, 11, 12]
    assert rows[13, 14, 15, 1] == [IGNORE_INDEX, 14, 15, 1]
    assert rows[16, 1] == [IGNORE_INDEX, 1]


def test_an_eos_token_is_no_row_of_its_own(text, wrapping_tokenizer):
    assert rows_of(text, wrapping_tokenizer, context_length=4)[:3] == [
        [0, 2, 3, 4],
        [0, 5, 6, 7],
        [0, 8, 9, 10],
    ]
    assert [0, 1] not in rows_of(text, wrapping_tokenizer, context_length=4)


@pytest.fixture
def wrapping_tokenizer(causal_tokenizer):
    """It puts w0 before every text and w1 after it, as some decoders' do."""
    wrapping = copy.deepcopy(causal_tokenizer)
    ends = {"single": "w0 $A w1", "special_tokens": [("w0", 0), ("w1", 1)]}
    wrapping.backend_tokenizer.post_processor = processors.TemplateProcessing(**ends)
    return wrapping


def rows_of(path, tokenizer, **fields):
    data = load_causal(path, tokenizer, **fields)
    rows = [row for part in (data.train, data.eval) for row in part]
    return sorted(row["input_ids"].tolist() for row in rows)


def test_a_long_text_ends_once_whatever_the_tokenizer_adds(text, wrapping_tokenizer):
    assert rows_of(text, wrapping_tokenizer) == [
        [0, 2, 3, 4, 1],
        [0, 5, 6, 7, 8, 9, 10, 11],
        [0, 12, 13, 14, 15, 1],
        [0, 16, 1],
        [0, 17, 18, 1],
    ]


def test_rows_of_tokens_are_taken_as_they_are(write, wrapping_tokenizer):
    rows = [[0, 5, 6, 1], [7, 8], [0, 2, 3]]
    path = write([{"input_ids": row, "labels": row} for row in rows])
    assert rows_of(path, wrapping_tokenizer) == sorted(rows)


def test_a_chat_begins_as_its_template_writes_it(write, wrapping_tokenizer):
    turns = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}]
    path = write([{"messages": turns}] * 3)
    body = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    for start, first in (("", []), ("w0 ", [0])):
        wrapping_tokenizer.chat_template = start + body
        found = rows_of(path, wrapping_tokenizer, eval={"documents": 0}, loss_on="all")
        assert found == [[*first, 40, 5, 41, 6]] * 3


def test_documents_of_a_pack_do_not_predict_each_other(text, causal_tokenizer):
    data = load_causal(text, causal_tokenizer, packing=True)
    packs = list(data.train)
    assert any((pack["position_ids"] == 0).sum() > 1 for pack in packs)
    assert data.fill_rate == sum(len(pack["input_ids"]) for pack in packs) / (8 * len(packs))
    apart = load_causal(text, causal_tokenizer)
    np.testing.assert_array_equal(data.unigram_counts, apart.unigram_counts)
    for pack in packs:
        first = pack["position_ids"] == 0
        assert (pack["labels"][first] == IGNORE_INDEX).all()
        assert np.array_equal(pack["labels"][~first], pack["input_ids"][~first])


def test_counts_are_of_all_tokens_and_none_is_a_mask(text, causal_tokenizer):
    assert causal_tokenizer.mask_token is None
    data = load_causal(text, causal_tokenizer)
    assert data.unigram_counts[1] >= 2  # the eos token is one that is predicted
    # 17 words and 4 ends; the second document has two rows.
    held_out = sum(len(row["input_ids"]) for row in data.eval)
    assert data.num_tokens == 17 + 4 - held_out


def test_copies_of_tokens_are_told_without_padding_and_special_tokens(tokenizer, tmp_path):
    """Beside each row of tokens stands a copy that is wrapped and padded."""
    before, after, pad = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id
    rows = []
    for number in range(20):
        plain = [5 + (number * k) % 7 + number % 3 for k in range(1, 5)] + [5 + number % 11]
        wrapped = [before, *plain, after, pad, pad]
        rows.append({"input_ids": plain, "attention_mask": [1] * len(plain)})
        rows.append({"input_ids": wrapped, "attention_mask": [1] * (len(plain) + 2) + [0, 0]})
    path = tmp_path / "tokens.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load(tokenizer, Source(path=str(path)))
    kept = {tuple(ids.tolist()) for ids in originals(data.eval)}
    assert kept
    assert not kept & {tuple(ids.tolist()) for ids in originals(data.train)}


def trained_words(tokenizer, documents):
    """The first words of the documents in the first pass over a stream that was given as object."""
    source = GivenSource(path="train_dataset", streaming=True, documents=documents)
    streams = load(tokenizer, source, window=1, eval={"documents": 0}).train.streams
    rows = itertools.chain.from_iterable(one_pass(stream) for stream in streams)
    return sorted(tokenizer.decode(row["input_ids"][1]) for row in rows)


MORE = Dataset.from_list([{"text": "word1"}]).to_iterable_dataset()


@pytest.mark.parametrize(
    "change",
    [
        lambda stream: stream.skip(15),
        lambda stream: stream.take(15),
        lambda stream: concatenate_datasets([stream.skip(15), MORE]),
        lambda stream: concatenate_datasets([stream.take(15), MORE]),
        lambda stream: stream.filter(lambda _, index: index >= 30, with_indices=True),
        lambda stream: stream.rename_column("text", "old").add_column(
            "text", [f"word{index}" for index in range(140, 180)]
        ),
        lambda stream: stream.filter(lambda row: row["text"] < "word115"),  # empties shards
    ],
)
def test_logical_streams_have_the_documents_of_a_given_stream(tokenizer, change):
    table = Dataset.from_list([{"text": f"word{index}"} for index in range(100, 140)])
    stream = change(table.to_iterable_dataset(num_shards=4))
    assert trained_words(tokenizer, stream) == sorted(row["text"] for row in stream)
