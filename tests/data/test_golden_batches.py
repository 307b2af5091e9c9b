"""Order, masks and packs never change: runs of an earlier version can be repeated and resumed."""

import functools
import hashlib
import itertools
import json

import pytest
from datasets import Dataset
from torch.utils.data import DataLoader

from harmonic_sft.data import MaskConfig
from harmonic_sft.data.batches import EpochSampler
from harmonic_sft.data.streams import advance, collate_placed
from tests.data.conftest import load

WORDS = MaskConfig(probability=0.3, whole_word=True, policy="80_10_10")


@pytest.fixture
def folder(tmp_path):
    texts = [
        " ".join(f"word{(7 * i + i * j) % 200} ab" for j in range(1 + i % 9)) for i in range(60)
    ]
    (tmp_path / "a.txt").write_text("\n".join([*texts[:30], "", *texts[30:]]))
    for part in range(3):
        rows = [json.dumps({"text": text, "n": [part]}) for text in texts[part::3]]
        (tmp_path / f"part{part}.jsonl").write_text("\n".join([*rows[:4], "{cut", *rows[4:]]))
    longer = [f"cd {text}" for text in texts]  # copies of held-out documents would leave
    Dataset.from_dict({"text": longer}).to_parquet(tmp_path / "a.parquet", batch_size=16)
    turns = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": text[:20]}]
        for text in texts
    ]
    lines = [json.dumps({"messages": messages, "id": i}) for i, messages in enumerate(turns)]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    return tmp_path


def digest(batches):
    found = hashlib.blake2b(digest_size=8)
    for batch in batches:
        for name in sorted(batch):
            found.update(name.encode() + batch[name].numpy().tobytes())
    return found.hexdigest()


def load_weighted(tokenizer, folder, names, *, streaming=False, **settings):
    """Load files of a folder, each with its weight."""
    sources = [
        {"path": str(folder / name), "streaming": streaming, "weight": weight}
        for name, weight in names.items()
    ]
    held_out = {"documents": 5, "seed": 3}
    return load(tokenizer, *sources, seed=3, context_length=14, eval=held_out, **settings)


@pytest.mark.parametrize(
    ("name", "names", "settings", "expected"),
    [
        ("tokenizer", {"a.txt": None}, {"mask": WORDS}, "31fec1d764b19ac7"),
        ("tokenizer", {"a.parquet": None, "a.txt": None}, {"packing": True}, "3674606c0c0edc56"),
        (
            "byte_tokenizer",
            {"chat.jsonl": None},
            {"task": "causal_lm", "loss_on": "assistant", "padding_free": True},
            "76d29dc4f48c022a",  # another one until 2026-11-23: rows ended in </s> </s>
        ),
    ],
)
def test_batches_of_tables(request, folder, name, names, settings, expected):
    data = load_weighted(request.getfixturevalue(name), folder, names, **settings)
    batches = list(DataLoader(data.eval, batch_size=4, collate_fn=data.collator))
    for epoch in range(2):
        sampler = EpochSampler(data.train, seed=3)
        sampler.set_epoch(epoch)
        loader = DataLoader(data.train, batch_size=4, sampler=sampler, collate_fn=data.collator)
        batches += list(loader)
    assert digest(batches) == expected


@pytest.mark.parametrize(
    ("names", "settings", "expected"),
    [
        ({"a.txt": None}, {"mask": WORDS}, "2aad8857fcc60f1d"),
        (
            {"part*.jsonl": 3.0, "a.parquet": 1.0},
            {"packing": True, "on_bad_row": "skip"},
            "4c49de9d80841f78",
        ),
        ({"part*.jsonl": None, "chat.jsonl": None}, {"on_bad_row": "skip"}, "5ead64c9e4967d0b"),
    ],
)
def test_batches_of_streams_also_after_a_restart(tokenizer, folder, names, settings, expected):
    settings = {"streaming": True, "window": 7, **settings}
    data = load_weighted(tokenizer, folder, names, **settings)
    collator = functools.partial(collate_placed, data.collator)
    loader = DataLoader(data.train, batch_size=4, collate_fn=collator)
    batches = list(itertools.islice(loader, 40))
    places = [place for batch in batches for place in batch.pop("places")]
    again = load_weighted(tokenizer, folder, names, **settings)
    again.train.state = advance(again.train.state, places[:60], 60)
    loader = DataLoader(again.train, batch_size=4, collate_fn=collator)
    resumed = list(itertools.islice(loader, 25))
    for batch in resumed:
        del batch["places"]
    assert digest(resumed) == digest(batches[15:])
    assert digest(batches) == expected


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("sequence_classification", "616b6b7c4ee61a41"),
        ("token_classification", "958810c1e8bb1220"),
    ],
)
def test_labeled_rows(tokenizer, tmp_path, task, expected):
    """Some texts are cut, four are copies, one spells a special token."""
    texts = [[f"word{(7 * i + i * j) % 200}ab" for j in range(1 + i % 9)] for i in range(30)]
    texts[3].append("[MASK]")
    texts[9:13] = [texts[8]] * 4
    for part in range(2):
        lines = []
        for i, words in enumerate(texts[part::2]):
            labels = [f"class {(i + j) % 3}" for j in range(len(words))]
            row = {"text": words, "label": labels, "weight": i / 2}
            if task == "sequence_classification":
                row |= {"text": " ".join(words), "label": labels[0]}
            lines.append(json.dumps(row))
        (tmp_path / f"{part}.jsonl").write_text("\n".join([*lines, '{"cut']))
    columns = {"label_column": "label", "weight_column": "weight"}
    settings = {"eval": {"documents": 5, "seed": 2}, "on_bad_row": "skip", **columns}
    sources = [{"path": str(tmp_path / f"{part}.jsonl")} for part in range(2)]
    data = load(tokenizer, *sources, seed=3, task=task, context_length=14, **settings)
    assert (data.bad_rows.total, data.num_documents, data.num_tokens) == (2, 21, 246)
    assert digest(data.collator([row]) for row in [*data.train, *data.eval]) == expected
