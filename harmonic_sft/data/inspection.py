"""What a run trains on, printed: counts, lengths, fill rate and one row, without a model."""

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import datasets
import numpy as np
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from harmonic_sft.data.batches import MaskedRows, PaddingCollator
from harmonic_sft.data.keyed_random import permutation
from harmonic_sft.data.loading import LoadedData
from harmonic_sft.data.masking import IGNORE_INDEX, RowLabels, RowMasker
from harmonic_sft.data.row_maker import document_names, row_lengths, rows_table
from harmonic_sft.data.streams import Members, StreamedRows
from harmonic_sft.results import show_table

STREAM_ITEMS = 1000  # rows, or packs of them, that are read of a stream
NUM_BINS = 10
BAR_WIDTH = 40
# How each kind of token is written, so that it is told without color, and its style.
STYLES = {
    "special": ("<{}>", "cyan"),
    "predicted": ("[{}]", "bold green"),
    "scored": ("{}", ""),
    "context": ("({})", "dim"),
}
LEGEND = (
    ("special", "special token", "never predicted"),
    ("predicted", "predicted", "the model sees the mask token"),
    ("predicted", "predicted -> seen", "the model sees another token, or the right one"),
    ("scored", "other text", "may be predicted, but not in this epoch"),
    ("context", "context", "never predicted"),
)
DECODER_LEGEND = (
    ("predicted", "predicted", "from what stands before it"),
    ("special", "special token", "not predicted"),
    ("context", "context", "not predicted"),
)


class Counts(NamedTuple):
    """What rows hold; scored are the tokens that can ever be predicted."""

    lengths: np.ndarray  # [rows], in tokens, special ones included
    num_documents: int
    num_ordinary: int
    num_scored: int


class _View(NamedTuple):
    """What is shown of a training set."""

    title: str
    counts: Counts
    pack_lengths: np.ndarray | None  # [packs]; None if every row is an item of its own
    shown: Members
    is_stream: bool = False
    repeats: bool = False  # a source has ended and begun again


def inspect_data(
    data: LoadedData,
    *,
    tokenizer: PreTrainedTokenizerBase,
    rows_per_step: int,
    batch_size: int | None = None,
    seed_row: int = 0,
) -> None:
    """Print what a run trains on, and one row as it is masked in the first epoch.

    Of a stream only the first `STREAM_ITEMS` items are read, and every title says so.

    Args:
        data: The run's data sets.
        tokenizer: The model's tokenizer.
        rows_per_step: Rows, or packs of them, in a step: batch size x accumulation x processes.
        batch_size: Rows, or packs, that are padded together; None: those of a step.
        seed_row: Number of the row, or pack, that is shown.

    Raises:
        ValueError: There is no row of this number.
    """
    masker = data.eval.masker
    num_items = len(data.train) if isinstance(data.train, MaskedRows) else STREAM_ITEMS
    if not 0 <= seed_row < num_items:
        raise ValueError(
            f"seed_row: expected the number of a row, from 0 to {num_items - 1}, got {seed_row}."
        )
    if isinstance(data.train, MaskedRows):
        view = _view_table(data.train, seed_row)
    else:
        view = _view_stream(data.train, masker, seed_row)
    _show_counts(view, data)
    _show_lengths("Lengths of rows", view.counts.lengths, view.title)
    if view.pack_lengths is not None:
        _show_lengths("Lengths of packs", view.pack_lengths, view.title)
    _show_batches(view, data, rows_per_step, batch_size or rows_per_step)
    _show_sample(view.shown, seed_row, masker=masker, tokenizer=tokenizer)


def count_rows(rows: datasets.Dataset, masker: RowLabels) -> Counts:
    """Count what rows hold, some thousands of them in memory at a time."""
    num_ordinary = num_scored = 0
    for batch in rows.with_format("arrow").iter(batch_size=10_000):
        tokens = {
            name: batch[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            for name in ("input_ids", "scored")
            if name in batch.column_names
        }
        num_ordinary += int((~masker.special_tokens[tokens["input_ids"]]).sum())
        num_scored += int(masker.maskable(tokens).sum())
    num_documents = np.unique(document_names(rows), axis=1).shape[1]
    return Counts(row_lengths(rows), num_documents, num_ordinary, num_scored)


def _fill_rate(lengths: np.ndarray, data: LoadedData, batch_size: int) -> float:
    """Return the share of tokens in the batches of the first epoch, from 0 to 1."""
    if not isinstance(data.collator, PaddingCollator):
        return 1.0  # nothing is padded
    multiple = data.collator.pad_to_multiple_of or 1
    seed = data.eval.masker.seed
    shuffled = lengths[permutation("row order", (seed, 0), len(lengths))]  # [items]
    starts = np.arange(0, len(shuffled), batch_size)  # [batches]
    longest = np.maximum.reduceat(shuffled, starts)  # [batches]
    width = -(-longest // multiple) * multiple  # [batches]
    sizes = np.diff(starts, append=len(shuffled))  # [batches]
    return float(shuffled.sum() / (width * sizes).sum())


def sample_text(
    row: Mapping[str, Any], epoch: int, *, masker: RowLabels, tokenizer: PreTrainedTokenizerBase
) -> Text:
    """Write one row with every token's part in training, readable with and without color.

    Args:
        row: What `masker` takes.
        epoch: The epoch whose masks are shown.
        masker: The run's masker.
        tokenizer: The model's tokenizer.

    Returns:
        Special tokens in `<>`, predicted ones in `[]`, context in `()`, and the text in between.
    """
    masked = masker(row, epoch)
    row_ids = np.asarray(row["input_ids"])  # [T]
    kinds = np.select(
        [masked["labels"] != IGNORE_INDEX, masker.special_tokens[row_ids], masker.maskable(row)],
        ["predicted", "special", "scored"],
        "context",
    )  # [T]
    # Stretches of text read best as one, special and predicted tokens one by one.
    alone = np.isin(kinds, ["predicted", "special"])  # [T]
    starts = np.append(True, (kinds[1:] != kinds[:-1]) | alone[1:])  # [T]
    parts = np.split(np.arange(len(row_ids)), np.flatnonzero(starts)[1:])
    texts = [_decode(tokenizer, row_ids[part]) for part in parts]
    # Tokens made of bytes hold the spaces themselves; word pieces do not.
    holds_spaces = "".join(texts) == _decode(tokenizer, row_ids)
    line = Text()
    for text, part in zip(texts, parts, strict=True):
        kind, first = str(kinds[part[0]]), part[0]
        bare = text.lstrip(" ") or text
        line.append(text[: len(text) - len(bare)] if holds_spaces else " " if line else "")
        hides = isinstance(masker, RowMasker)  # a decoder sees what it has predicted
        if kind == "predicted" and hides and masked["input_ids"][first] != masker.mask_token_id:
            bare = f"{bare} -> {_decode(tokenizer, masked['input_ids'][part]).strip(' ')}"
        line.append_text(_write(kind, bare))
    return line


def _view_table(table: MaskedRows, number: int) -> _View:
    counts = count_rows(table.rows, table.masker)
    members, pack_lengths = np.array([number]), None
    if table.packs is not None:
        members = table.packs[number]
        pack_lengths = np.array([counts.lengths[pack].sum() for pack in table.packs])
    return _View("train", counts, pack_lengths, [(table.rows[int(row)], 0) for row in members])


def _view_stream(stream: StreamedRows, masker: RowLabels, number: int) -> _View:
    in_turn = zip(*(logical.rows(None) for logical in stream.streams), strict=True)
    items = itertools.islice(itertools.chain.from_iterable(in_turn), STREAM_ITEMS)
    packs = [pack for pack, _ in items]
    rows = [row for pack in packs for row, _ in pack]
    pack_lengths = None
    if len(rows) > len(packs):
        pack_lengths = np.array([sum(len(row["input_ids"]) for row, _ in pack) for pack in packs])
    title = f"first {len(packs)} {'rows' if pack_lengths is None else 'packs'} of a stream"
    repeats = any(epoch > 0 for pack in packs for _, epoch in pack)
    return _View(
        title, count_rows(rows_table(rows), masker), pack_lengths, packs[number], True, repeats
    )


def _show_counts(view: _View, data: LoadedData) -> None:
    parts = {view.title: view.counts, "evaluation": count_rows(data.eval.rows, data.eval.masker)}
    rows = [
        [
            title,
            counts.num_documents,
            len(counts.lengths),
            int(counts.lengths.sum()),
            counts.num_ordinary,
            counts.num_scored,
        ]
        for title, counts in parts.items()
    ]
    columns = ["", "documents", "rows", "tokens", "without special", "scored"]
    show_table("Data", columns, rows)
    if view.repeats:
        _console().print("A source of the stream ended within these and began again.")
    lines = [f"Rows left out: {data.bad_rows.total}", *data.bad_rows.first]
    _console().print("\n  ".join(lines), soft_wrap=True)


def _show_lengths(title: str, lengths: np.ndarray, of: str) -> None:
    """Print a histogram with bins of the same width."""
    longest = int(lengths.max())
    width = -(-longest // NUM_BINS)
    counts = np.bincount((lengths - 1) // width)  # [bins]
    rows = [
        [
            f"{index * width + 1} to {min((index + 1) * width, longest)}",
            int(count),
            "#" * int(np.ceil(BAR_WIDTH * count / counts.max())),
        ]
        for index, count in enumerate(counts)
    ]
    show_table(f"{title}: {of}", ["tokens", "number", ""], rows)


def _show_batches(view: _View, data: LoadedData, rows_per_step: int, batch_size: int) -> None:
    kinds = {"rows": view.counts.lengths}
    if view.pack_lengths is not None:
        kinds = {"rows, if not packed": view.counts.lengths, "packs": view.pack_lengths}
    table = []
    for kind, lengths in kinds.items():
        fill_rate = _fill_rate(lengths, data, batch_size)
        per_step = rows_per_step * lengths.mean()
        # A stream has no end, so neither has its epoch.
        steps = None if view.is_stream else -(-len(lengths) // rows_per_step)
        table.append([kind, f"{100 * fill_rate:.1f} %", round(float(per_step)), steps])
    show_table(
        f"Batches of {batch_size}, {rows_per_step} in a step: {view.title}",
        ["", "fill rate", "tokens per step", "steps per epoch, about"],
        table,
    )


def _show_sample(
    shown: Members, number: int, *, masker: RowLabels, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Print a row, or the rows of a pack one below the other, and what the signs mean."""
    console = _console()
    what = "Row" if len(shown) == 1 else f"Pack of {len(shown)} rows, number"
    console.print(f"{what} {number} in the first epoch", style="bold")
    for kind, text, meaning in LEGEND if isinstance(masker, RowMasker) else DECODER_LEGEND:
        console.print(Text("  ").append_text(_write(kind, text)).append(f"  {meaning}"))
    for row, epoch in shown:
        name = ", ".join(f"{key} {int(row[key])}" for key in ("source", "document", "chunk"))
        console.print(f"\n-- {name}: {len(row['input_ids'])} tokens --", style="bold")
        text = sample_text(row, epoch, masker=masker, tokenizer=tokenizer)
        console.print(text, soft_wrap=not console.is_terminal)


def _decode(tokenizer: PreTrainedTokenizerBase, input_ids: np.ndarray) -> str:
    """Return the text of tokens, with what a terminal would obey spelled out."""
    text = tokenizer.decode(input_ids.tolist(), clean_up_tokenization_spaces=False)
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


def _write(kind: str, text: str) -> Text:
    pattern, style = STYLES[kind]
    return Text(pattern.format(text), style=style)


def _console() -> Console:
    return Console(markup=False, highlight=False, emoji=False)
