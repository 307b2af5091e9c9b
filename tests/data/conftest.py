"""Small tokenizers, and a cache that leaves the user's alone."""

import json

import pytest
from tokenizers import pre_tokenizers
from transformers import BertConfig, BertTokenizer, RobertaTokenizer

from harmonic_sft.data import DataConfig
from harmonic_sft.data.bad_rows import BadRow
from harmonic_sft.data.encoding import SpecialTokens, encode_pieces
from harmonic_sft.data.formats import Reader
from harmonic_sft.data.loading import load_data

WORDS = [f"word{index}" for index in range(200)]
NUM_DOCUMENTS = 40
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def encode_rows(rows, row_format, *, tokenizer, loss_on="all", word_ids=False, column="text"):
    """What every row becomes: its tokens, or the reason why it is a bad one."""
    settings = {"loss_on": loss_on, "word_ids": word_ids, "column": column}
    read = Reader(row_format=row_format, tokenizer=tokenizer, **settings)
    found = []
    for row in rows:
        try:
            found.append(read(row))
        except BadRow as error:
            found.append(str(error))
    contents = [draft.content for draft in found if not isinstance(draft, str)]
    prefix = SpecialTokens.of(tokenizer).prefix
    encoded = iter(encode_pieces(contents, tokenizer=tokenizer, word_ids=word_ids, prefix=prefix))
    return [draft if isinstance(draft, str) else next(encoded) for draft in found]


def load(tokenizer, *sources, seed=0, task="masked_lm", labels=None, eval_only=False, **settings):
    """The data of a run, in rows of 8 tokens and with 5 documents held out if nothing is said."""
    defaults = {"context_length": 8, "eval": {"documents": 5, "seed": 0}}
    config = DataConfig(**{"sources": list(sources), **defaults, **settings})
    base = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=16)
    options = {"task": task, "labels": labels, "eval_only": eval_only}
    return load_data(config, tokenizer=tokenizer, seed=seed, base=base, **options)


def bert_like(pieces, **settings):
    """A tokenizer of BERT's arrangement, [CLS] text [SEP], over `SPECIALS` and other pieces."""
    vocabulary = {piece: index for index, piece in enumerate([*SPECIALS, *pieces])}
    return BertTokenizer(vocab=vocabulary, **settings)


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path, monkeypatch):
    folder = tmp_path / "datasets_cache"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder)
    return folder


@pytest.fixture
def write(tmp_path):
    """Write rows as lines of JSON, and return the path."""

    def lines(rows, name="rows.jsonl"):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
        return str(tmp_path / name)

    return lines


@pytest.fixture
def path(tmp_path):
    """A file of 40 documents of 1 to 40 words, with blank lines between them."""
    lines = [" ".join(f"word{(i * j) % 200}" for j in range(1 + i)) for i in range(NUM_DOCUMENTS)]
    (tmp_path / "corpus.txt").write_text("\n\n".join(lines) + "\n")
    return str(tmp_path / "corpus.txt")


@pytest.fixture(scope="session")
def tokenizer():
    """Of 200 words and single letters."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [*WORDS, *letters, "[", "]", *(f"##{letter}" for letter in letters)]
    return bert_like(pieces, model_max_length=16)


@pytest.fixture(scope="session")
def byte_tokenizer():
    """RoBERTa's arrangement, <s> text </s>, over single bytes."""
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    pieces = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    return RobertaTokenizer(vocab=vocabulary, model_max_length=16)
