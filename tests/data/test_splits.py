import re
from collections import Counter

import pytest
from datasets import Dataset

from harmonic_sft.data.files import BadRows
from harmonic_sft.data.rows import RowMaker, table_rows
from harmonic_sft.data.splits import split_streams, split_table
from harmonic_sft.data.streams import LogicalStream

TEXTS = [" ".join([f"word{index}"] * (1 + index % 20)) for index in range(30)]


def names(rows):
    return {(row["source"], row["document"]) for row in rows}


def row_maker(tokenizer, source=0, form="text"):
    return RowMaker(
        name=f"data.sources[{source}]",
        source=source,
        form=form,
        column="text",
        tokenizer=tokenizer,
        context_length=8,
        loss_on="all",
        word_ids=False,
        bad_rows=BadRows(),
        skip=False,
    )


@pytest.fixture
def rows(tokenizer):
    return table_rows(Dataset.from_dict({"text": TEXTS}), row_maker(tokenizer))


def streams(parts, tokenizer):
    """One logical stream per list of texts of each source: `parts[stream][source]`."""
    return [
        LogicalStream(
            [Dataset.from_dict({"text": texts}).to_iterable_dataset() for texts in sources],
            number,
            weights=None,
            make_rows=[row_maker(tokenizer, source) for source in range(len(sources))],
            bad_rows=BadRows(),
            window=1,
            seed=0,
            capacity=None,
        )
        for number, sources in enumerate(parts)
    ]


def one_pass(stream):
    """The rows of a stream's first pass, a window being one document."""
    found = []
    for [(row, epoch)], _ in stream.rows(None):
        if epoch:
            return found
        found.append(row)
    return None


def test_every_document_is_on_one_side_with_all_its_rows(rows):
    split = split_table(rows, eval_documents=10, seed=0)
    assert (len(names(split.eval)), len(names(split.train)), split.num_documents) == (10, 20, 20)
    assert not names(split.eval) & names(split.train)
    assert len(split.eval) + len(list(split.train)) == len(rows)


def test_seed_chooses_the_evaluation_documents(rows):
    chosen = [names(split_table(rows, eval_documents=10, seed=seed).eval) for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]


def test_stream_keeps_its_first_documents_for_evaluation(rows, tokenizer):
    split = split_streams(streams([[TEXTS]], tokenizer), eval_documents=10)
    assert names(split.eval) == {(0, index) for index in range(10)}
    assert split.num_documents is None
    trained = one_pass(split.train[0])
    assert names(trained) == {(0, index) for index in range(10, 30)}
    # Rows of a document are shuffled with the rest of its window.
    key = "document", "chunk"
    ordered = sorted(trained, key=lambda row: [row[name] for name in key])
    assert split.eval.to_list() + ordered == rows.to_list()


def test_streams_are_read_in_turn_to_the_end_of_the_longest(tokenizer):
    split = split_streams(streams([[TEXTS[:2], TEXTS[2:5]]], tokenizer), eval_documents=1)
    rows = split.eval.to_list() + one_pass(split.train[0])
    order = list(dict.fromkeys((row["source"], row["document"]) for row in rows))
    assert order == [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2)]


def test_blank_documents_of_a_stream_do_not_count(tokenizer):
    split = split_streams(streams([[["", " ", "a", "\t", "b"]]], tokenizer), eval_documents=1)
    assert (names(split.eval), names(one_pass(split.train[0]))) == ({(0, 2)}, {(0, 4)})


def test_every_logical_stream_gives_its_share_for_evaluation(tokenizer):
    parts = [[TEXTS[:8]], [TEXTS[8:16]], [TEXTS[16:]]]
    split = split_streams(streams(parts, tokenizer), eval_documents=5)
    assert Counter(document >> 40 for _, document in names(split.eval)) == {0: 2, 1: 2, 2: 1}


@pytest.mark.parametrize("lengths", [(1, 28), (28, 1), (3, 1, 22, 2)])
def test_short_streams_leave_their_share_to_long_ones_and_are_not_trained_on(tokenizer, lengths):
    texts = iter(TEXTS)
    parts = [[[next(texts) for _ in range(length)]] for length in lengths]
    split = split_streams(streams(parts, tokenizer), eval_documents=20)
    assert len(names(split.eval)) == 20
    trained = [names(one_pass(stream)) for stream in split.train]
    assert all(trained)
    assert not names(split.eval) & set.union(*trained)
    assert len(set.union(*trained)) == sum(lengths) - 20


def test_plain_text_beside_scored_rows_is_scored_as_a_whole(tokenizer):
    texts = Dataset.from_dict({"text": ["word1 word2"] * 2}).to_iterable_dataset()
    tokens = Dataset.from_dict({"input_ids": [[9, 10, 11]] * 2, "labels": [[-100, 10, -100]] * 2})
    stream = LogicalStream(
        [texts, tokens.to_iterable_dataset()],
        0,
        weights=None,
        make_rows=[row_maker(tokenizer), row_maker(tokenizer, 1, form="tokens")],
        bad_rows=BadRows(),
        window=1,
        seed=0,
        capacity=None,
    )
    rows = split_streams([stream], eval_documents=2).eval
    assert rows["source"][:] == [0, 1]
    assert rows["scored"][:] == [[True] * 4, [False, False, True, False, False]]


@pytest.mark.parametrize("eval_documents", [30, 31])
@pytest.mark.parametrize("count", [1, 2])
def test_too_few_documents_are_refused(rows, tokenizer, eval_documents, count):
    message = re.escape(
        "data.eval.documents: expected fewer than the documents there are, "
        f"got {eval_documents} of 30. Keep fewer, or add sources."
    )
    with pytest.raises(ValueError, match=message):
        split_table(rows, eval_documents=eval_documents, seed=0)
    parts = [[TEXTS[start::count]] for start in range(count)]
    with pytest.raises(ValueError, match=message):
        split_streams(streams(parts, tokenizer), eval_documents=eval_documents)
