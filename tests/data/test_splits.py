import re

import pytest
from datasets import Dataset

from harmonic_sft.data.rows import table_rows
from harmonic_sft.data.splits import split_stream, split_table

TEXTS = [" ".join([f"word{index}"] * (1 + index % 20)) for index in range(30)]


def names(rows):
    return {(row["source"], row["document"]) for row in rows}


@pytest.fixture
def rows(tokenizer):
    return table_rows(
        Dataset.from_dict({"text": TEXTS}), source=0, tokenizer=tokenizer, context_length=8
    )


def stream(texts, tokenizer, eval_documents=10):
    return split_stream(
        [Dataset.from_dict({"text": part}).to_iterable_dataset() for part in texts],
        tokenizer=tokenizer,
        context_length=8,
        eval_documents=eval_documents,
    )


def test_every_document_is_on_one_side_with_all_its_rows(rows):
    split = split_table(rows, eval_documents=10, seed=0)
    assert (len(names(split.eval)), len(names(split.train)), split.num_documents) == (10, 20, 20)
    assert not names(split.eval) & names(split.train)
    assert len(split.eval) + len(list(split.train)) == len(rows)


def test_seed_chooses_the_evaluation_documents(rows):
    chosen = [names(split_table(rows, eval_documents=10, seed=seed).eval) for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]


def test_stream_keeps_its_first_documents_for_evaluation(rows, tokenizer):
    split = stream([TEXTS], tokenizer)
    assert split.eval.to_list() + list(split.train) == rows.to_list()
    assert names(split.eval) == {(0, index) for index in range(10)}
    assert split.num_documents is None


def test_streams_are_read_in_turn_to_the_end_of_the_longest(tokenizer):
    split = stream([TEXTS[:2], TEXTS[2:5]], tokenizer, eval_documents=1)
    rows = split.eval.to_list() + list(split.train)
    order = list(dict.fromkeys((row["source"], row["document"]) for row in rows))
    assert order == [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2)]


def test_blank_documents_of_a_stream_do_not_count(tokenizer):
    split = stream([["", " ", "a", "\t", "b"]], tokenizer, eval_documents=1)
    assert (names(split.eval), names(split.train)) == ({(0, 2)}, {(0, 4)})


@pytest.mark.parametrize("eval_documents", [30, 31])
def test_too_few_documents_are_refused(rows, tokenizer, eval_documents):
    message = re.escape(
        "data.eval.documents: expected fewer than the documents there are, "
        f"got {eval_documents} of 30. Keep fewer, or add sources."
    )
    with pytest.raises(ValueError, match=message):
        split_table(rows, eval_documents=eval_documents, seed=0)
    with pytest.raises(ValueError, match=message):
        stream([TEXTS], tokenizer, eval_documents=eval_documents)
