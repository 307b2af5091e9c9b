import itertools
import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from harmonic_sft.data import DataConfig, EvalConfig, MaskConfig, Source
from harmonic_sft.data.loading import load_data
from harmonic_sft.data.masked_dataset import MaskedRows
from harmonic_sft.data.masking import EVAL_EPOCH, IGNORE_INDEX
from harmonic_sft.data.streams import advance

NUM_DOCUMENTS = 40


@pytest.fixture
def path(tmp_path):
    lines = [" ".join(f"word{(i * j) % 200}" for j in range(1 + i)) for i in range(NUM_DOCUMENTS)]
    (tmp_path / "corpus.txt").write_text("\n\n".join(lines) + "\n")
    return str(tmp_path / "corpus.txt")


def load(tokenizer, *sources, seed=0, **settings):
    config = DataConfig(
        sources=list(sources),
        context_length=8,
        eval=EvalConfig(documents=5),
        **({"mask": MaskConfig(probability=0.5)} | settings),
    )
    return load_data(
        config, tokenizer=tokenizer, vocab_size=len(tokenizer), max_positions=16, seed=seed
    )


def originals(rows):
    """Rows as they were before masking."""
    return [
        np.where(row["labels"] == IGNORE_INDEX, row["input_ids"], row["labels"]) for row in rows
    ]


def test_blank_lines_of_a_text_file_are_no_documents(tokenizer, path):
    assert load(tokenizer, Source(path=path)).num_documents == NUM_DOCUMENTS - 5


def test_counts_are_those_of_the_ordinary_tokens_trained_on(tokenizer, path):
    data = load(tokenizer, Source(path=path))
    input_ids = np.concatenate(originals(data.train[index] for index in range(len(data.train))))
    counts = np.bincount(input_ids, minlength=len(tokenizer))
    counts[tokenizer.all_special_ids] = 0
    np.testing.assert_array_equal(data.unigram_counts, counts)
    assert data.num_tokens == counts.sum()


def test_special_tokens_are_never_labels(tokenizer, path):
    data = load(tokenizer, Source(path=path))
    labels = np.concatenate([data.train[index]["labels"] for index in range(len(data.train))])
    assert not np.isin(labels, tokenizer.all_special_ids).any()
    assert (labels != IGNORE_INDEX).sum() > 100


def key(row):
    return row["input_ids"].tobytes(), row["labels"].tobytes()


def streamed_rows(data, num_rows):
    """Items of a stream and their places, read in one process."""
    items = list(itertools.islice(data.train, num_rows))
    return [key(item) for item in items], [item["place"] for item in items]


def table_of(tokenizer, path, **settings):
    """All rows of a table, none kept from training, in the order of the documents."""
    table = load(tokenizer, Source(path=path), **settings)
    rows = [*table.train.rows, *table.eval.rows]
    return sorted(rows, key=lambda row: (row["document"], row["chunk"])), table.train.masker


@pytest.mark.parametrize("whole_word", [False, True])
def test_streamed_file_has_the_rows_and_masks_of_the_table(tokenizer, path, whole_word):
    mask = MaskConfig(probability=0.5, whole_word=whole_word, policy="80_10_10")
    stream = load(tokenizer, Source(path=path, streaming=True), mask=mask)
    rows, masker = table_of(tokenizer, path, mask=mask)
    num_eval = sum(row["document"] < 10 for row in rows)
    assert [key(row) for row in map(stream.eval.__getitem__, range(len(stream.eval)))] == [
        key(masker(row, EVAL_EPOCH)) for row in rows[:num_eval]
    ]
    trained = rows[num_eval:]
    found, _ = streamed_rows(stream, 2 * len(trained))
    for epoch in range(2):
        part = found[epoch * len(trained) : (epoch + 1) * len(trained)]
        assert Counter(part) == Counter(key(masker(row, epoch)) for row in trained)
    assert stream.num_tokens is stream.unigram_counts is stream.num_documents is None
    assert stream.fill_rate is None


def test_streamed_files_have_the_rows_of_the_table_with_names_of_their_own(tokenizer, tmp_path):
    files = []
    for number, size in enumerate((9, 4, 12)):
        lines = [" ".join(f"word{number * 50 + i}" for _ in range(1 + i)) for i in range(size)]
        files.append(lines)
        (tmp_path / f"part{number}.txt").write_text("\n".join(lines) + "\n")
    glob = str(tmp_path / "part*.txt")
    stream = load(tokenizer, Source(path=glob, streaming=True), window=4)
    assert [part.number for part in stream.train.streams] == [0, 1, 2]
    rows, masker = table_of(tokenizer, glob)
    names = [(number << 40) + i for number, lines in enumerate(files) for i in range(len(lines))]
    named = [{**row, "document": names[row["document"]]} for row in rows]
    kept = {0, 1, 1 << 40, (1 << 40) + 1, 2 << 40}
    evaluated = [key(stream.eval[index]) for index in range(len(stream.eval))]
    assert evaluated == [key(masker(row, EVAL_EPOCH)) for row in named if row["document"] in kept]
    # Every stream goes through its own part: compare one pass of each.
    for part in stream.train.streams:
        expected = Counter(
            key(masker(row, 0))
            for row in named
            if row["document"] >> 40 == part.number and row["document"] not in kept
        )
        first = itertools.islice(part.rows(None), expected.total())
        assert Counter(key(stream.train.finish(members)) for members, _ in first) == expected


def test_fewer_logical_streams_may_be_asked_for(tokenizer, tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("word1\nword2\nword3\n")
    source = Source(path=str(tmp_path / "*.txt"), streaming=True)
    assert len(load(tokenizer, source, streams=2).train.streams) == 2


def test_packed_rows_have_the_masks_of_the_same_rows_apart(tokenizer, path):
    source = Source(path=path)
    apart = load(tokenizer, source)
    packed = load(tokenizer, source, packing=True)
    rows = Counter(key(apart.train[index]) for index in range(len(apart.train)))
    items = [packed.train[index] for index in range(len(packed.train))]
    assert len(items) < len(apart.train)
    assert Counter(part for item in items for part in map(key, split_pack(item))) == rows
    assert packed.fill_rate == sum(len(item["input_ids"]) for item in items) / (8 * len(items))
    np.testing.assert_array_equal(packed.unigram_counts, apart.unigram_counts)


def test_packed_stream_has_the_masks_of_the_same_rows_apart(tokenizer, path):
    source = Source(path=path, streaming=True)
    apart, packed = load(tokenizer, source), load(tokenizer, source, packing=True)
    rows, _ = table_of(tokenizer, path)
    num_rows = sum(row["document"] >= 10 for row in rows)
    expected, _ = streamed_rows(apart, num_rows)
    parts, packs = [], 0
    for item in packed.train:
        assert len(item["input_ids"]) <= 8
        parts += map(key, split_pack(item))
        packs += 1
        if len(parts) >= num_rows:
            break
    assert packs < num_rows
    assert Counter(parts) == Counter(expected)


def split_pack(item):
    starts = np.flatnonzero(item["position_ids"] == 0)[1:]
    columns = {name: np.split(item[name], starts) for name in ("input_ids", "labels")}
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


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
    skipped = [place.skipped for place in places]
    assert skipped == sorted(skipped)
    assert skipped[-1] + before == 9
    for stop in range(1, 40):
        state = advance(whole.train.state, places[:stop], stop)
        resumed = opened(json.loads(json.dumps(state)))
        assert streamed_rows(resumed, 20) == (rows[stop : stop + 20], places[stop : stop + 20])


def test_broken_line_of_a_stream_is_an_error_unless_skipped(tokenizer, tmp_path):
    lines = [json.dumps({"text": f"word{index}"}) for index in range(20)]
    (tmp_path / "lines.jsonl").write_text("\n".join([*lines, "{broken"]))
    data = load(tokenizer, Source(path=str(tmp_path / "lines.jsonl"), streaming=True))
    with pytest.raises(ValueError, match=r"data\.sources\[0\]: .*line 21"):
        list(itertools.islice(data.train, 30))


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_conversation_is_named_by_its_file_and_line(tokenizer, tmp_path, streaming):
    turns = [{"role": role, "content": "word1"} for role in ("user", "assistant")]
    for name in ("a", "b"):
        rows = [json.dumps({"messages": turns}) for _ in range(8)]
        if name == "b":
            rows[6] = json.dumps({"messages": turns[::-1]})
        (tmp_path / f"{name}.jsonl").write_text("\n\n".join(rows))
    source = Source(path=f"{tmp_path}/*.jsonl", streaming=streaming)
    with pytest.raises(ValueError, match=rf"got 'assistant' .* in '{tmp_path}/b.jsonl', line 13\."):
        list(itertools.islice(items(load(tokenizer, source, loss_on="assistant").train), 30))


@pytest.fixture
def word_tokenizer(tokenizer):
    """The same words, but one token for any other, which is quick for long ones."""
    backend = Tokenizer(models.WordLevel(tokenizer.get_vocab(), unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **tokenizer.special_tokens_map)


@pytest.mark.parametrize(
    ("ending", "streaming", "packing"),
    [
        ("txt", False, False),
        ("jsonl", True, True),
        ("parquet", True, False),
        ("parquet", False, True),
    ],
)
def test_document_of_ten_megabytes_is_cut_and_whole(
    word_tokenizer, tmp_path, ending, streaming, packing
):
    word = "x" * 92  # unknown
    texts = ["word1"] * 30
    texts[17] = " ".join(f"word{index % 200} {word}" for index in range(102_000))
    assert len(texts[17]) > 10_000_000
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        pq.write_table(pa.table({"text": texts}), path)
    else:
        lines = texts if ending == "txt" else [json.dumps({"text": text}) for text in texts]
        path.write_text("\n".join(lines))
    config = DataConfig(
        sources=[Source(path=str(path), streaming=streaming)],
        context_length=512,
        eval=EvalConfig(documents=2),
        packing=packing,
    )
    vocab_size = len(word_tokenizer)
    data = load_data(
        config, tokenizer=word_tokenizer, vocab_size=vocab_size, max_positions=512, seed=0
    )
    num_rows = 400 + (1 if packing else 27)  # 204,000 tokens in chunks of 510
    rows = [item["input_ids"] for item in itertools.islice(items(data.train), num_rows)]
    assert sum(len(row) == 512 for row in rows) == 400
    assert sum((row == word_tokenizer.unk_token_id).sum() for row in rows) == 102_000


def test_streams_of_a_mixture_have_weights(tokenizer, path):
    sources = [Source(path=path, streaming=True, weight=weight) for weight in (3, 1)]
    data = load(tokenizer, *sources)
    assert [stream.weights for stream in data.train.streams] == [[3.0, 1.0]]


def test_mixture_by_weight_of_tables_is_refused(tokenizer, path):
    sources = [Source(path=path, weight=weight) for weight in (3, 1)]
    with pytest.raises(ValueError, match="expected streaming: true in a mixture by weight"):
        load(tokenizer, *sources)


def test_weight_is_for_all_sources_or_none(tokenizer, path):
    with pytest.raises(ValueError, match="sources: expected a weight in all or in none"):
        load(tokenizer, Source(path=path, weight=1), Source(path=path))
    for weights in ([None, None], [3.0, 0.5]):
        sources = [Source(path=path, weight=weight, streaming=True) for weight in weights]
        DataConfig(sources=sources, context_length=8)


def test_padding_free_batches_are_one_row(tokenizer, path):
    data = load(tokenizer, Source(path=path), padding_free=True)
    rows = [data.eval[index] for index in (0, 1, 2)]
    batch = data.collator(rows)
    assert batch["input_ids"].shape == (1, sum(len(row["input_ids"]) for row in rows))


def test_padding_free_batches_with_padding_are_refused(tokenizer, path):
    with pytest.raises(ValueError, match="padding_free: expected no pad_to_multiple_of"):
        load(tokenizer, Source(path=path), padding_free=True, pad_to_multiple_of=8)


@pytest.mark.parametrize("streaming", [False, True])
def test_formats_are_recognized_and_may_be_mixed_with_text(tokenizer, path, tmp_path, streaming):
    rows = [
        {"input_ids": [9, 10 + index, 11], "labels": [-100, 10 + index, -100]} for index in range(8)
    ]
    (tmp_path / "tokens.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = Source(path=path, streaming=streaming)
    tokens = Source(path=str(tmp_path / "tokens.jsonl"), streaming=streaming)
    data = load(tokenizer, text, tokens, mask=MaskConfig(probability=0.99))
    labels = [item["labels"] for item in itertools.islice(items(data.train), 60)]
    labels += [data.eval[index]["labels"] for index in range(len(data.eval))]
    scored = {tuple(np.flatnonzero(row != IGNORE_INDEX)) for row in labels if len(row) == 5}
    assert (2,) in scored  # of a row of tokens
    assert (1, 2, 3) in scored  # of a text of three words


def items(rows):
    return (rows[index] for index in range(len(rows))) if isinstance(rows, MaskedRows) else rows


def test_rows_of_no_known_format_are_refused(tokenizer, tmp_path):
    (tmp_path / "odd.jsonl").write_text('{"number": 1}\n')
    with pytest.raises(ValueError, match=r"data\.sources\[0\]\.format: expected the columns"):
        load(tokenizer, Source(path=str(tmp_path / "odd.jsonl")))


def test_two_sources_are_told_apart(tokenizer, path):
    data = load(tokenizer, Source(path=path), Source(path=path))
    assert data.num_documents == 2 * NUM_DOCUMENTS - 5
    assert set(data.train.rows["source"]) == {0, 1}


def test_batches_come_padded_as_asked(tokenizer, path):
    data = load(tokenizer, Source(path=path), pad_to_multiple_of=16)
    batch = next(iter(DataLoader(data.eval, batch_size=2, collate_fn=data.collator)))
    assert batch["input_ids"].shape == (2, 16)


def test_mixture_of_streams_and_tables_is_refused(tokenizer, path):
    with pytest.raises(ValueError, match="sources: expected streaming in all or in none"):
        load(tokenizer, Source(path=path), Source(path=path, streaming=True))


def test_file_of_blank_lines_is_refused(tokenizer, tmp_path):
    (tmp_path / "blank.txt").write_text("\n \n\n")
    with pytest.raises(ValueError, match=r"sources\[0\]\.path: expected documents with text"):
        load(tokenizer, Source(path=str(tmp_path / "blank.txt")))


def test_source_is_named_by_its_place(tokenizer, path):
    with pytest.raises(ValueError, match=r"data\.sources\[1\]\.path: expected an existing file"):
        load(tokenizer, Source(path=path), Source(path="missing.txt"))


def test_context_longer_than_the_model_is_refused_before_loading(tokenizer):
    config = DataConfig(sources=[Source(path="missing.txt")], context_length=32)
    with pytest.raises(ValueError, match="expected at most the 16 positions"):
        load_data(config, tokenizer=tokenizer, vocab_size=1000, max_positions=16, seed=0)


@pytest.mark.parametrize("settings", [{"sources": []}, {"context_length": 0}, {"contextlength": 8}])
def test_bad_data_settings_are_refused(settings):
    defaults = {"sources": [Source(path="a.txt")], "context_length": 8}
    with pytest.raises(ValidationError, match=next(iter(settings))):
        DataConfig(**(defaults | settings))
