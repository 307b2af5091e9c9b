import dataclasses
import itertools
import json
import re
import statistics

import numpy as np
import pytest
from torch.utils.data import DataLoader

from harmonic_sft.data import MaskConfig
from harmonic_sft.data.bad_rows import BadRows
from harmonic_sft.data.batches import (
    EpochSampler,
    PaddingCollator,
    collate_padding_free,
)
from harmonic_sft.data.inspection import STREAM_ITEMS, count_rows, inspect_data, sample_text
from harmonic_sft.data.masking import IGNORE_INDEX, RowMasker, special_tokens
from harmonic_sft.data.row_maker import row_lengths
from tests.data.conftest import NUM_DOCUMENTS, load

SEED = 3
MASKED = {"mask": MaskConfig(probability=0.5)}


@pytest.fixture
def data(tokenizer, path):
    """Rows of up to 6 words."""
    return load(tokenizer, {"path": path}, seed=SEED, **MASKED)


@pytest.fixture
def make_stream(tokenizer, tmp_path):
    """Two logical streams over documents of one word each, `num_words` in all."""

    def make(num_words, **settings):
        for part in range(2):
            # No word comes twice of those that are held out, the first ones.
            numbers = [i if i < 6 else 6 + i % 194 for i in range(part, num_words, 2)]
            words = [f"word{number}" for number in numbers]
            (tmp_path / f"part{part}.txt").write_text("\n".join(words) + "\n")
        source = {"path": str(tmp_path / "part*.txt"), "streaming": True}
        held_out = {"documents": 6, "seed": SEED + 4}
        settings = {"context_length": 12, "eval": held_out, **MASKED, **settings}
        return load(tokenizer, source, seed=SEED, **settings)

    return make


def cells(output, title):
    """The cells of the first line of a table that begins with `title`."""
    line = next(line for line in output.splitlines() if line.strip().startswith(title))
    return [cell for cell in re.split(r"\s{2,}", line.strip()) if cell]


def show(data, tokenizer, capsys, **settings):
    capsys.readouterr()
    settings = {"rows_per_step": 8, "batch_size": 8, "seed": SEED, **settings}
    inspect_data(data, tokenizer=tokenizer, **settings)
    return capsys.readouterr().out


@pytest.mark.parametrize("is_scored", [True, False])
def test_counts_equal_a_loop_over_the_rows(data, is_scored):
    table = data.train.rows
    if is_scored:
        draws = np.random.default_rng(0)
        scored = [draws.random(len(row)) < 0.4 for row in table["input_ids"]]
        table = table.add_column("scored", scored)
    table = table.select(range(len(table) - 1, 2, -1))
    rows = table.to_list()
    tokens = ordinary = allowed = 0
    for row in rows:
        for index, token in enumerate(row["input_ids"]):
            tokens += 1
            ordinary += token >= 5  # conftest's special tokens are the first five
            allowed += token >= 5 and (not is_scored or row["scored"][index])
    documents = len({row["document"] for row in rows})
    assert count_rows(table, data.train.masker) == (documents, len(rows), tokens, allowed)
    assert (allowed < ordinary) == is_scored


def test_counts_and_lengths_of_a_run_are_shown(data, tokenizer, capsys):
    data = dataclasses.replace(data, bad_rows=BadRows())
    data.bad_rows.report("s", "file.jsonl, line 7", "no JSON", rows=3)
    output = show(data, tokenizer, capsys)
    lengths = sorted(len(row["input_ids"]) for row in data.train)
    expected = [NUM_DOCUMENTS - 5, len(data.train), sum(lengths), data.num_tokens]
    assert cells(output, "train")[1:] == [f"{count:,}" for count in expected]
    assert (
        "Copies of held-out documents: 0 exact ones, left out, and 0 near ones, which data.eval."
        in output
    )
    assert "Rows left out: 3\n  file.jsonl, line 7: no JSON\n" in output
    assert cells(output, "evaluation")[1:3] == ["5", str(len(data.eval))]
    shortest, middle, _, longest = cells(output, "rows ")[1:5]
    median = int(statistics.median(lengths))
    assert [shortest, middle, longest] == [str(lengths[0]), str(median), str(lengths[-1])]


@pytest.mark.parametrize(("batch_size", "multiple"), [(1, 1), (2, 1), (7, 3)])
def test_fill_rate_and_steps_are_those_of_the_first_epoch(
    data, tokenizer, capsys, batch_size, multiple
):
    data = dataclasses.replace(
        data, collator=PaddingCollator(pad_token_id=0, pad_to_multiple_of=multiple)
    )
    sampler = EpochSampler(data.train, seed=SEED)
    settings = {"batch_size": batch_size, "sampler": sampler, "collate_fn": data.collator}
    masks = [batch["attention_mask"] for batch in DataLoader(data.train, **settings)]
    rate = sum(mask.sum().item() for mask in masks) / sum(mask.numel() for mask in masks)
    output = show(data, tokenizer, capsys, rows_per_step=8, batch_size=batch_size)
    assert f"Batches of {batch_size}, 8 in a step: train" in output
    assert cells(output, "rows ")[5:] == [
        f"{100 * rate:.1f} %",
        str(round(8 * row_lengths(data.train.rows).mean())),
        str(-(-len(data.train) // 8)),
    ]
    free = dataclasses.replace(data, collator=collate_padding_free)
    assert cells(show(free, tokenizer, capsys), "rows ")[5] == "100.0 %"


@pytest.fixture
def masked_as(monkeypatch):
    """Write a row as it is with some tokens masked by hand."""

    def write(tokenizer, row, seen):
        row_ids = np.array(row["input_ids"])
        input_ids, labels = row_ids.copy(), np.full_like(row_ids, IGNORE_INDEX)
        for position, token in seen.items():
            input_ids[position], labels[position] = token, row_ids[position]
        found = {"input_ids": input_ids, "labels": labels}
        monkeypatch.setattr(RowMasker, "__call__", lambda *_: found)
        ids = {"mask_token_id": tokenizer.mask_token_id}
        ids["special_tokens"] = special_tokens(tokenizer, len(tokenizer))
        masker = RowMasker(config=MASKED["mask"], seed=SEED, **ids)
        return sample_text(row, 0, masker=masker, tokenizer=tokenizer)

    return write


def test_every_kind_of_token_is_told(tokenizer, masked_as):
    ids = tokenizer("word1 word2 word3 word4 word5 word6 word7 word8")["input_ids"]
    other, mask = tokenizer.convert_tokens_to_ids(["word9", "[MASK]"])
    row = {"input_ids": ids, "scored": [False] * 3 + [True] * 5 + [False, True]}
    assert masked_as(tokenizer, row, {5: mask, 6: other, 7: ids[7]}) == (
        "<[CLS]> (word1 word2) word3 word4 [word5] [word6 -> word9] [word7 -> word7] (word8) "
        "<[SEP]>"
    )


def test_spaces_stand_where_the_tokens_have_them_and_nothing_is_obeyed(byte_tokenizer, masked_as):
    ids = byte_tokenizer("ab cd\x1b[31m\nna\u00efve")["input_ids"]
    row = {"input_ids": ids, "scored": [True] * 5 + [False] * (len(ids) - 5)}
    text = masked_as(byte_tokenizer, row, {2: byte_tokenizer.mask_token_id, 3: ids[1]})
    assert text == "<<s>>a[b][  -> a]c(d\\x1b[31m\\nna\u00efve)<</s>>"


def test_the_first_row_is_shown_without_colors_for_a_file(data, tokenizer, capsys):
    output, row = show(data, tokenizer, capsys), data.train.rows[0]
    assert f"-- source 0, document {row['document']}, chunk {row['chunk']}: " in output
    expected = sample_text(row, 0, masker=data.train.masker, tokenizer=tokenizer)
    assert output.strip().endswith(expected)
    assert "\x1b" not in output


def test_only_the_beginning_of_a_stream_is_read_and_said_to_be(make_stream, tokenizer, capsys):
    data = make_stream(4 * STREAM_ITEMS)
    assert len(data.train.streams) == 2
    output = show(data, tokenizer, capsys)
    title = f"first {STREAM_ITEMS} rows of a stream"
    assert cells(output, title)[1:] == ["1,000", "1,000", "3,000", "1,000"]
    assert f"Batches of 8, 8 in a step: {title}" in " ".join(output.split())
    assert cells(output, "rows ")[6:] == ["24", "-"]  # how many steps an epoch has is not known
    first = next(iter(data.train))
    (_, word, _), (_, label, _) = first["input_ids"], first["labels"]
    expected = f"word{word - 5}" if label == IGNORE_INDEX else f"[word{label - 5}]"
    assert output.strip().endswith(f"<[CLS]> {expected} <[SEP]>")


def test_batches_of_a_stream_are_filled_in_its_order(tokenizer, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("\n".join("word1 " * (1 + i) + f"word{i}" for i in range(11)))
    source = {"path": str(tmp_path / "a.txt"), "streaming": True}
    data = load(tokenizer, source, seed=SEED, context_length=16)
    (stream,) = data.train.streams
    items = itertools.islice(stream.rows(None), STREAM_ITEMS)
    lengths = [len(row["input_ids"]) for pack, _ in items for row, _ in pack]
    longest = sum(2 * max(pair) for pair in zip(lengths[::2], lengths[1::2], strict=True))
    shown = cells(show(data, tokenizer, capsys, batch_size=2), "rows ")
    assert shown[5] == f"{100 * sum(lengths) / longest:.1f} %"


def test_what_a_stream_leaves_out_is_counted(tokenizer, tmp_path, capsys):
    words = [f"word{index}" for index in (*range(20), 0)]
    lines = [line for word in words for line in (json.dumps({"text": word}), "{broken")]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    for held_out, copies in ((5, 1), (0, 0)):
        source = {"path": str(tmp_path / "a.jsonl"), "streaming": True}
        settings = {"on_bad_row": "skip", "window": 4, "eval": {"documents": held_out}, **MASKED}
        output = show(load(tokenizer, source, **settings), tokenizer, capsys)
        reason = f"'{tmp_path}/a.jsonl', line 2: expected JSON, got: "
        assert f"Rows left out: 21\n  {reason}" in output
        said = f"documents: {copies} exact ones, left out, and 0 near ones, which data.eval.drop"
        assert said in output
        assert cells(output, "evaluation")[1:3] == [str(held_out)] * 2


def test_packs_of_a_stream_are_shown(make_stream, tokenizer, capsys):
    output = show(make_stream(10 * STREAM_ITEMS, packing=True), tokenizer, capsys)
    title = f"first {STREAM_ITEMS} packs of a stream"
    assert cells(output, title)[2:4] == ["4,000", "12,000"]
    assert cells(output, "packs ")[4:] == ["12", "100.0 %", "96", "-"]
    assert "The first pack of 4 rows, in the first epoch" in output
