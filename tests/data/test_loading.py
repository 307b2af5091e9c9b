import itertools

import numpy as np
import pytest
from pydantic import ValidationError
from torch.utils.data import DataLoader

from harmonic_sft.data import DataConfig, EvalConfig, MaskConfig, Source, load_data
from harmonic_sft.data.masking import EVAL_EPOCH, IGNORE_INDEX

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
        mask=MaskConfig(probability=0.5),
        **settings,
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


def test_streamed_file_has_the_rows_and_masks_of_the_table(tokenizer, path):
    stream = load(tokenizer, Source(path=path, streaming=True))
    table = load(tokenizer, Source(path=path))
    rows = [*table.train.rows, *table.eval.rows]
    rows.sort(key=lambda row: (row["document"], row["chunk"]))
    num_eval = len(stream.eval)
    expected = [stream.eval[index] for index in range(num_eval)]
    expected += [table.train.masker(row, 0) for row in rows[num_eval:]]
    masked = [table.eval.masker(row, EVAL_EPOCH) for row in rows[:num_eval]]
    masked += itertools.islice(stream.train, len(rows) - num_eval)
    for row, other in zip(masked, expected, strict=True):
        np.testing.assert_array_equal(row["input_ids"], other["input_ids"])
        np.testing.assert_array_equal(row["labels"], other["labels"])
    assert stream.num_tokens is stream.unigram_counts is stream.num_documents is None


def test_two_sources_are_told_apart(tokenizer, path):
    data = load(tokenizer, Source(path=path), Source(path=path))
    assert data.num_documents == 2 * NUM_DOCUMENTS - 5
    assert set(data.train.rows["source"]) == {0, 1}


def test_batches_come_padded_as_asked(tokenizer, path):
    data = load(tokenizer, Source(path=path), pad_to_multiple_of=16)
    batch = next(iter(DataLoader(data.eval, batch_size=2, collate_fn=data.collator)))
    assert batch["input_ids"].shape == (2, 16)


def test_mixture_of_streams_and_tables_is_refused(tokenizer, path):
    with pytest.raises(ValueError, match=r"data\.sources: expected streaming in all or in none"):
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
