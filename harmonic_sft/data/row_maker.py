"""Documents as rows for the model: tokens cut to length and wrapped, with nothing lost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from harmonic_sft.data.bad_rows import BLANK, BadRows
from harmonic_sft.data.chat import LossOn
from harmonic_sft.data.encoding import Encoded, SpecialTokens
from harmonic_sft.data.files import BAD, PLACE, Row
from harmonic_sft.data.formats import Format, encode
from harmonic_sft.data.masking import NO_WORD

STREAM_BITS = 40  # a document's number stands below that of its logical stream
BATCH_DOCUMENTS = 1000
BATCH_BYTES = 16 << 20  # of documents; decides where they are long
CODE = ("row_maker", "formats", "chat", "encoding")  # modules that decide what a row holds
FEATURES = {
    "input_ids": datasets.List(datasets.Value("int32")),
    "scored": datasets.List(datasets.Value("bool")),
    "word_ids": datasets.List(datasets.Value("int32")),
    "source": datasets.Value("int32"),
    "document": datasets.Value("int64"),
    "chunk": datasets.Value("int32"),
}
# Columns of a table before its bad rows are taken out.
REPORT = {
    "place": datasets.Value("string"),
    "reason": datasets.Value("string"),  # None in a row that can be used
    "unscored": datasets.Value("int64"),  # tokens of the document in chunks that make no row
}


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab_size: int,
    max_positions: int,
    context_length: int,
    needs_mask: bool = True,
) -> None:
    """Refuse a tokenizer or a length that the model cannot take.

    Args:
        tokenizer: Of the model.
        vocab_size: Rows of the model's embedding table.
        max_positions: Longest row the model takes, in tokens.
        context_length: Longest row that will be made, in tokens.
        needs_mask: Whether tokens will be masked.

    Raises:
        ValueError: No mask or pad token, an id beyond `vocab_size`, or rows longer than the model.
    """
    if needs_mask and tokenizer.mask_token_id is None:
        raise ValueError(
            "tokenizer: expected a mask token, got none. "
            "Use the tokenizer of a masked language model."
        )
    if tokenizer.pad_token_id is None:
        raise ValueError("tokenizer: expected a pad token, got none. Set one in its files.")
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ValueError(
            "tokenizer: expected ordinary tokens, got only special ones. "
            "Put the tokenizer's files beside the model"
        )
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        raise ValueError(
            f"tokenizer: expected ids below the model's vocab_size {vocab_size}, got {largest}. "
            "Use the tokenizer the model was trained with."
        )
    if context_length > max_positions:
        raise ValueError(
            f"data.context_length: expected at most the {max_positions} positions of the model, "
            f"got {context_length}."
        )


def document_name(number: int) -> str:
    """Spell out a document's number: its place in a pass over its logical stream, or in a table."""
    stream, document = divmod(number, 1 << STREAM_BITS)
    return f"document {document}" + (f" of logical stream {stream}" if stream else "")


@dataclass(frozen=True, kw_only=True)
class RowMaker:
    """Turns documents of one source into rows: consecutive chunks in the special tokens.

    A document's tail is a row of its own. A blank document makes no row, nor does a chunk in which
    nothing is scored.

    Attributes:
        name: Where the source stands in the configuration.
        source: Its number.
        form: Format of its documents.
        column: Of the text.
        tokenizer: Of the model.
        context_length: Longest row, in tokens, special tokens included.
        loss_on: What may be predicted.
        word_ids: Whether rows number their words.
        end_of_text: Token put after every document of plain text, None for none.
    """

    name: str
    source: int
    form: Format
    column: str
    tokenizer: PreTrainedTokenizerBase
    context_length: int
    loss_on: LossOn
    word_ids: bool
    end_of_text: int | None = None

    @property
    def columns(self) -> list[str]:
        """The columns of a row."""
        optional = {"scored": self.form != "text", "word_ids": self.word_ids}
        return [name for name in FEATURES if optional.get(name, True)]

    def __call__(self, documents: Sequence[Row], bad_rows: BadRows) -> list[Row]:
        """Return the rows of documents, which have a `document` number.

        Args:
            documents: Of the source; they may be bad rows of a file.
            bad_rows: Where documents that make no row are reported.

        Raises:
            ValueError: A document cannot be used and none may be skipped, or the settings fit none.
        """
        readable = []
        for document in documents:
            if BAD in document:
                bad_rows.report(self.name, document[PLACE], *document[BAD])
            else:
                readable.append(document)
        rows = []
        for row in self._make(readable):
            if "reason" in row:
                bad_rows.report(self.name, row["place"], row["reason"])
            else:
                bad_rows.unscored_tokens += row.pop("unscored", 0)
                rows.append(row)
        return rows

    def table(self, documents: datasets.Dataset, bad_rows: BadRows, num_proc: int | None = None):
        """Tokenize a table of documents, with a progress bar and the library's cache on disk.

        Args:
            documents: Of the source.
            bad_rows: Where documents that make no row are reported.
            num_proc: Processes to tokenize in; None is this one, best below some million words.

        Returns:
            A table of the rows in the order of the documents.

        Raises:
            ValueError: As in `__call__`.
        """
        # datasets knows an imported function by its name alone: a cache made by another version of
        # these files must not be taken for this one's.
        code = [Path(__file__).with_name(f"{name}.py").read_text() for name in CODE]
        code += [tokenizers.__version__, transformers.__version__]
        document_bytes = documents.data.nbytes // max(1, len(documents.data))
        rows = documents.map(
            _map_batch,
            with_indices=True,
            batched=True,
            batch_size=max(1, min(BATCH_DOCUMENTS, BATCH_BYTES // max(1, document_bytes))),
            remove_columns=documents.column_names,
            features=datasets.Features({name: FEATURES[name] for name in self.columns} | REPORT),
            num_proc=num_proc,
            desc=f"Tokenizing {self.name}",
            fn_kwargs={"maker": self, "code": code},
        )
        report = rows.data.table.select(list(REPORT))
        is_bad = pc.is_valid(report["reason"])
        bad_rows.unscored_tokens += pc.sum(report["unscored"]).as_py() or 0
        for row in report.filter(is_bad).to_pylist():
            bad_rows.report(self.name, row["place"], row["reason"])
        good = np.flatnonzero(~is_bad.to_numpy())
        rows = rows.remove_columns(list(REPORT))
        return rows if len(good) == len(rows) else rows.select(good)

    def _make(self, documents: Sequence[Row]) -> list[Row]:
        """Return the rows of documents; one with `place` and `reason` alone is a bad document.

        The first row of any other has `unscored`, its tokens in chunks that make no row.
        """
        special = SpecialTokens.of(self.tokenizer)
        num_special = len(special.prefix) + len(special.suffix)
        body = self.context_length - num_special
        if body < 1:
            raise ValueError(
                f"data.context_length: expected more than the {num_special} special tokens of a "
                f"row, got {self.context_length}."
            )
        found = encode(
            [{key: row[key] for key in row if key not in ("document", PLACE)} for row in documents],
            self.form,
            tokenizer=self.tokenizer,
            loss_on=self.loss_on,
            column=self.column,
            word_ids=self.word_ids,
        )
        rows: list[Row] = []
        for document, encoded in zip(documents, found, strict=True):
            number = document["document"]
            reason = encoded if isinstance(encoded, str) else BLANK
            chunks: list[Row] = []
            if not isinstance(encoded, str):
                if self.end_of_text is not None and self.form == "text":
                    encoded.input_ids.append(self.end_of_text)
                chunks = self._cut(encoded, special, body, number)
            if chunks:
                kept = sum(len(row["input_ids"]) - num_special for row in chunks)
                chunks[0]["unscored"] = len(encoded.input_ids) - kept
            else:
                place = document.get(PLACE) or f"{self.name}, {document_name(number)}"
                chunks = [{"document": number, "place": place, "reason": reason}]
            rows += chunks
        return rows

    def _cut(self, encoded: Encoded, special: SpecialTokens, body: int, document: int) -> list[Row]:
        rows = []
        for chunk, start in enumerate(range(0, len(encoded.input_ids), body)):
            part = slice(start, start + body)
            scored = None if encoded.scored is None else encoded.scored[part]
            if scored is not None and not any(scored):
                continue
            input_ids = encoded.input_ids[part]
            row = {
                "input_ids": [*special.prefix, *input_ids, *special.suffix],
                "source": self.source,
                "document": document,
                "chunk": chunk,
            }
            if "scored" in self.columns:
                row["scored"] = _wrap(scored or [True] * len(input_ids), False, special)
            if encoded.word_ids is not None:
                row["word_ids"] = _wrap(encoded.word_ids[part], NO_WORD, special)
            rows.append(row)
        return rows


def _wrap(values: Sequence[Any], fill: Any, special: SpecialTokens) -> list[Any]:
    return [*[fill] * len(special.prefix), *values, *[fill] * len(special.suffix)]


def _map_batch(
    batch: Mapping[str, Sequence[Any]],
    indices: Sequence[int],
    *,
    maker: RowMaker,
    code: Sequence[str],  # only part of the cache's key
) -> dict[str, list[Any]]:
    documents = [
        {**dict(zip(batch, values, strict=True)), "document": index}
        for index, *values in zip(indices, *batch.values(), strict=True)
    ]
    rows = maker._make(documents)
    return {name: [row.get(name) for row in rows] for name in (*maker.columns, *REPORT)}


def row_lengths(rows: datasets.Dataset) -> np.ndarray:
    """Return the length of every row in tokens, `[rows]`."""
    batches = rows.select_columns(["input_ids"]).with_format("arrow").iter(batch_size=10_000)
    lengths = [batch["input_ids"].combine_chunks().value_lengths() for batch in batches]
    return np.concatenate([part.to_numpy() for part in lengths])


def unigram_counts(rows: datasets.Dataset, vocab_size: int) -> np.ndarray:
    """Count how often every token occurs, `[V]` int64.

    Args:
        rows: Column `input_ids`.
        vocab_size: V.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for table in rows.select_columns(["input_ids"]).with_format("arrow").iter(batch_size=10_000):
        input_ids = table["input_ids"].combine_chunks().flatten().to_numpy()
        counts += np.bincount(input_ids, minlength=vocab_size)
    return counts
