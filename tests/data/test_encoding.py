import numpy as np

from harmonic_sft.data import encoding
from harmonic_sft.data.encoding import tokenize


def test_texts_are_tokenized_in_groups_of_few_characters(tokenizer, monkeypatch):
    texts = ["word1 ab", "", "word2 " * 30, "word3", "\ud800", "word4 [MASK]", "xyz " * 20]
    settings = {"tokenizer": tokenizer, "offsets": True, "word_ids": True}
    whole = tokenize(texts, **settings)
    groups = []

    call = type(tokenizer).__call__

    def counted(self, batch, **options):
        groups.append(batch)
        return call(self, batch, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", counted)
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 20)
    parts = tokenize(texts, **settings)
    good = [text for text in texts if text != "\ud800"]
    assert groups == [good[:2], good[2:3], good[3:5], good[5:]]
    assert whole[4] is parts[4] is None
    for one, other in zip(whole, parts, strict=True):
        if one is not None:
            assert one.input_ids == other.input_ids
            assert one.word_ids == other.word_ids
            np.testing.assert_array_equal(one.offsets, other.offsets)
