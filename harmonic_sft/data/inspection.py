"""What a run trains on, printed: counts, lengths, fill rate and one row, without a model."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import datasets
import numpy as np
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from harmonic_sft.data.batches import MaskedRows, PaddingCollator
from harmonic_sft.data.heldout import COPIES
from harmonic_sft.data.keyed_random import permutation
from harmonic_sft.data.loading import LoadedData
from harmonic_sft.data.masking import IGNORE_INDEX, ClassLabels, RowMasker, TokenLabels
from harmonic_sft.data.row_maker import (
    document_names,
    row_lengths,
    rows_table,
    unigram_counts,
)
from harmonic_sft.data.streams import Snapshot
from harmonic_sft.results import show_table

STREAM_ITEMS = 1000  # rows, or packs of them, that are read from a stream
SIGNS = {"special": "<{}>", "predicted": "[{}]", "scored": "{}", "context": "({})"}
LEGEND = (
    "[predicted], and after -> what the model sees if not the mask token; <special token>; "
    "(context, never predicted); the rest may be predicted in another epoch"
)


def inspect_data(
    data: LoadedData,
    *,
    tokenizer: PreTrainedTokenizerBase,
    rows_per_step: int,
    batch_size: int,
    seed: int,
) -> None:
    """Print what a run trains on, and its first row as it is masked in the first epoch.

    A table is read whole; a stream only up to `STREAM_ITEMS` items, as the printed titles say.

    Args:
        data: The run's data sets.
        tokenizer: The model's tokenizer.
        rows_per_step: Rows, or packs of them, in a step: batch size x accumulation x processes.
        batch_size: Rows, or packs, that are padded together.
        seed: The training's seed, which decides masks and order.
    """
    is_stream = not isinstance(data.train, MaskedRows)
    rows, packs, epochs, windows = _items(data)
    is_packed = any(len(pack) > 1 for pack in packs)
    kind = "packs" if is_packed else "rows"
    title = f"first {len(packs)} {kind} of a stream" if is_stream else "train"
    masker = data.eval.masker
    assert not isinstance(masker, ClassLabels), "only rows of text are shown"
    masker = replace(masker, seed=seed)  # the evaluation's masker has another seed
    parts = {title: rows, "evaluation": data.eval.rows}
    counts = [[name, *count_rows(part, masker)] for name, part in parts.items()]
    show_table("Data", ["", "documents", "rows", "tokens", "scored"], counts)
    console = Console(markup=False, highlight=False, emoji=False, soft_wrap=True)
    num_left_out, reasons, (exact, near) = data.left_out(windows)
    console.print("\n  ".join([f"Rows left out: {num_left_out}", *reasons]))
    console.print(COPIES % (exact, near))
    lengths = row_lengths(rows)
    sizes = {"rows": lengths}
    if is_packed:
        packed = np.array([lengths[pack].sum() for pack in packs])
        sizes = {"rows, if not packed": lengths, "packs": packed}
    _show_sizes(title, sizes, data, rows_per_step, batch_size, seed)
    what = "row" if len(packs[0]) == 1 else f"pack of {len(packs[0])} rows"
    console.print(f"The first {what}, in the first epoch\n{LEGEND}")
    for index in packs[0]:
        row = rows[int(index)]
        name = ", ".join(f"{key} {int(row[key])}" for key in ("source", "document", "chunk"))
        console.print(f"\n-- {name}: {len(row['input_ids'])} tokens --")
        console.print(sample_text(row, epochs[int(index)], masker=masker, tokenizer=tokenizer))


def _items(
    data: LoadedData,
) -> tuple[datasets.Dataset, Sequence[np.ndarray], Sequence[int], Mapping[int, Snapshot]]:
    """Return rows, the row numbers of items, the rows' epochs, and each stream's last window."""
    if isinstance(data.train, MaskedRows):
        rows = data.train.rows
        packs = data.train.packs or list(np.arange(len(rows))[:, None])
        return rows, packs, [0] * len(rows), {}
    in_turn = zip(*(logical.rows(None) for logical in data.train.streams), strict=True)
    items = list(itertools.islice(itertools.chain.from_iterable(in_turn), STREAM_ITEMS))
    members = [pack for pack, _ in items]
    last = {place.stream: place.snapshot for _, place in items}
    ends = np.cumsum([len(pack) for pack in members])
    rows, epochs = zip(*itertools.chain.from_iterable(members), strict=True)
    table = rows_table(rows).with_format("numpy")
    return table, np.split(np.arange(len(rows)), ends[:-1]), epochs, last


def count_rows(rows: datasets.Dataset, masker: TokenLabels) -> tuple[int, int, int, int]:
    """Count documents, rows, tokens, and the tokens that can ever be predicted."""
    if not len(rows):  # there may be no columns either
        return 0, 0, 0, 0
    documents = np.unique(document_names(rows), axis=1).shape[1]
    scored = int(unigram_counts(rows, masker).sum())
    return documents, len(rows), int(row_lengths(rows).sum()), scored


def _show_sizes(
    title: str,
    sizes: Mapping[str, np.ndarray],
    data: LoadedData,
    rows_per_step: int,
    batch_size: int,
    seed: int,
) -> None:
    lines = []
    for kind, lengths in sizes.items():
        quantiles = np.quantile(lengths, [0, 0.5, 0.95, 1]).astype(int).tolist()
        rate = f"{100 * _fill_rate(lengths, data, batch_size, seed):.1f} %"
        per_step = round(float(rows_per_step * lengths.mean()))
        # A stream has no end, so neither has its epoch.
        is_table = isinstance(data.train, MaskedRows)
        steps = -(-len(lengths) // rows_per_step) if is_table else None
        lines.append([kind, *quantiles, rate, per_step, steps])
    columns = ["tokens of", "shortest", "median", "95 %", "longest"]
    columns += ["fill rate", "tokens per step", "steps per epoch, about"]
    show_table(f"Batches of {batch_size}, {rows_per_step} in a step: {title}", columns, lines)


def _fill_rate(lengths: np.ndarray, data: LoadedData, batch_size: int, seed: int) -> float:
    """Return the share of tokens in the batches of the first epoch, from 0 to 1."""
    if not isinstance(data.collator, PaddingCollator):
        return 1.0  # nothing is padded
    multiple = data.collator.pad_to_multiple_of or 1
    if isinstance(data.train, MaskedRows):  # a stream is read as it comes
        lengths = lengths[permutation("row order", (seed, 0), len(lengths))]  # [items]
    starts = np.arange(0, len(lengths), batch_size)  # [batches]
    longest = np.maximum.reduceat(lengths, starts)  # [batches]
    width = -(-longest // multiple) * multiple  # [batches]
    return float(lengths.sum() / (width * np.diff(starts, append=len(lengths))).sum())


def sample_text(
    row: Mapping[str, Any], epoch: int, *, masker: TokenLabels, tokenizer: PreTrainedTokenizerBase
) -> str:
    """Return the text of one row, with every token's part in training in this epoch.

    Special tokens stand in `<>`, predicted ones in `[]`, context in `()`, and the rest bare.
    """
    masked = masker(row, epoch)
    row_ids = np.asarray(row["input_ids"])  # [T]
    kinds = np.select(
        [masked["labels"] != IGNORE_INDEX, masker.special_tokens[row_ids], masker.maskable(row)],
        ["predicted", "special", "scored"],
        "context",
    )  # [T]
    # Show stretches of text as one, special and predicted tokens one by one.
    alone = np.isin(kinds, ["predicted", "special"])  # [T]
    starts = np.append(True, (kinds[1:] != kinds[:-1]) | alone[1:])  # [T]
    parts = np.split(np.arange(len(row_ids)), np.flatnonzero(starts)[1:])
    texts = [_decode(tokenizer, row_ids[part]) for part in parts]
    # Tokens made of bytes hold the spaces themselves; word pieces do not.
    holds_spaces = "".join(texts) == _decode(tokenizer, row_ids)
    line = ""
    for text, part in zip(texts, parts, strict=True):
        kind, first = str(kinds[part[0]]), part[0]
        bare = text.lstrip(" ") or text
        line += text[: len(text) - len(bare)] if holds_spaces else " " if line else ""
        hides = isinstance(masker, RowMasker)  # a decoder sees what it has predicted
        if kind == "predicted" and hides and masked["input_ids"][first] != masker.mask_token_id:
            bare = f"{bare} -> {_decode(tokenizer, masked['input_ids'][part]).strip(' ')}"
        line += SIGNS[kind].format(bare)
    return line


def _decode(tokenizer: PreTrainedTokenizerBase, input_ids: np.ndarray) -> str:
    """Return the text of tokens, with control characters escaped."""
    text = tokenizer.decode(input_ids.tolist(), clean_up_tokenization_spaces=False)
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )
