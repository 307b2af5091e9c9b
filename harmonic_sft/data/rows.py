"""Rows for the model: documents as tokens, cut to length and wrapped, with nothing lost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from harmonic_sft.data.encoding import Encoded, SpecialTokens
from harmonic_sft.data.files import PLACE, BadRows
from harmonic_sft.data.formats import BLANK, Format, encode
from harmonic_sft.data.masking import NO_WORD
from harmonic_sft.data.sections import LossOn
from harmonic_sft.data.stream_reader import document_name

# Columns of a table before its bad rows are taken out.
BAD_ROW = {
    "place": datasets.Value("string"),
    "reason": datasets.Value("string"),
    "unscored": datasets.Value("int64"),  # tokens of the document in chunks that make no row
}
BATCH_DOCUMENTS = 1000
BATCH_BYTES = 16 << 20  # of documents; decides where they are long
FEATURES = {
    "input_ids": datasets.List(datasets.Value("int32")),
    "scored": datasets.List(datasets.Value("bool")),
    "word_ids": datasets.List(datasets.Value("int32")),
    "source": datasets.Value("int32"),
    "document": datasets.Value("int64"),
    "chunk": datasets.Value("int32"),
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


@dataclass(frozen=True, kw_only=True)
class RowMaker:
    """Turns documents of one source into rows: consecutive chunks in the special tokens.

    A document's tail is a row of its own. A blank document makes no row, nor does a chunk in which
    nothing is scored.

    Attributes:
        name: Where the source stands in the configuration.
        source: Its number.
        form: Of its documents.
        column: Of the text.
        tokenizer: Of the model.
        context_length: Longest row, in tokens, special tokens included.
        loss_on: What may be predicted.
        word_ids: Whether rows number their words.
        bad_rows: Where documents that make no row are counted.
        skip: Whether bad ones are; else they are errors, and only blank ones are counted.
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
    bad_rows: BadRows
    skip: bool
    end_of_text: int | None = None

    @property
    def columns(self) -> list[str]:
        """The columns of a row."""
        optional = {"scored": self.form != "text", "word_ids": self.word_ids}
        return [name for name in FEATURES if optional.get(name, True)]

    def __call__(self, documents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows of documents, which have a `document` number.

        Raises:
            ValueError: A document cannot be used and none may be skipped.
        """
        rows = []
        for document, made in zip(documents, self.make(documents), strict=True):
            if isinstance(made, str):
                self.report(self.place(document), made)
            else:
                self.bad_rows.unscored_tokens += made[0].pop("unscored")
                rows += made
        return rows

    def make(self, documents: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]] | str]:
        """Return the rows of each document, or the reason why it makes none.

        Raises:
            ValueError: Rows have no place for ordinary tokens.
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
        made: list[list[dict[str, Any]] | str] = []
        for document, encoded in zip(documents, found, strict=True):
            if isinstance(encoded, str):
                made.append(encoded)
                continue
            if self.end_of_text is not None and self.form == "text":
                encoded.input_ids.append(self.end_of_text)
            chunks = self._cut(encoded, special, body, document["document"])
            if chunks:
                kept = sum(len(row["input_ids"]) - num_special for row in chunks)
                chunks[0]["unscored"] = len(encoded.input_ids) - kept
            made.append(chunks or BLANK)
        return made

    def place(self, document: Mapping[str, Any]) -> str:
        """Say where a document was read, by its file if it has one."""
        return document.get(PLACE) or f"{self.name}, {document_name(document['document'])}"

    def report(self, place: str, reason: str) -> None:
        """Count a document that makes no row; a blank one is never an error.

        Raises:
            ValueError: It is bad and must not be skipped.
        """
        if reason == BLANK:
            self.bad_rows.blank += 1
        elif self.skip:
            self.bad_rows.add(place, reason)
        else:
            place = place.removeprefix(f"{self.name}, ")
            raise ValueError(
                f"{self.name}: {reason} in {place}. Repair it, or set data.on_bad_row: skip."
            )

    def _cut(
        self, encoded: Encoded, special: SpecialTokens, body: int, document: int
    ) -> list[dict[str, Any]]:
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
    rows: dict[str, list[Any]] = {name: [] for name in (*maker.columns, *BAD_ROW)}
    empty = {"input_ids": [], "scored": [], "word_ids": [], "source": maker.source, "chunk": 0}
    for document, made in zip(documents, maker.make(documents), strict=True):
        name = {"document": document["document"], "place": maker.place(document)}
        bad = [{**empty, **name, "reason": made}]
        for row in bad if isinstance(made, str) else made:
            for column, values in rows.items():
                values.append(row.get(column))
    return rows


def table_rows(
    documents: datasets.Dataset, maker: RowMaker, *, num_proc: int | None = None
) -> datasets.Dataset:
    """Tokenize a table of documents, with a progress bar and the library's cache on disk.

    Args:
        documents: Of one source.
        maker: Makes its rows.
        num_proc: Processes to tokenize in; None is this one, best below some million words.

    Returns:
        The rows in the order of the documents.

    Raises:
        ValueError: As in `RowMaker`.
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
        features=datasets.Features({name: FEATURES[name] for name in maker.columns} | BAD_ROW),
        num_proc=num_proc,
        desc=f"Tokenizing {maker.name}",
        # The counter of bad rows is no part of the key either: it differs from run to run.
        fn_kwargs={"maker": replace(maker, bad_rows=BadRows()), "code": code},
    )
    is_bad = ~np.asarray(rows.data.column("reason").is_null())
    unscored = rows.data.column("unscored").drop_null().to_numpy()
    maker.bad_rows.unscored_tokens += int(unscored.sum())
    bad = rows.data.table.select(["place", "reason"]).filter(pa.array(is_bad))
    for place, reason in zip(*(column.to_pylist() for column in bad.columns), strict=True):
        maker.report(place, reason)
    rows = rows.remove_columns(list(BAD_ROW))
    return rows.select(np.flatnonzero(~is_bad)) if is_bad.any() else rows


CODE = ("rows", "formats", "chat", "encoding")


def unigram_counts(rows: datasets.Dataset, vocab_size: int) -> np.ndarray:
    """Count how often every token occurs.

    Args:
        rows: Column `input_ids`.
        vocab_size: Length of the table.

    Returns:
        `[V]`, int64.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for table in rows.select_columns(["input_ids"]).with_format("arrow").iter(batch_size=10_000):
        input_ids = table["input_ids"].combine_chunks().flatten().to_numpy()
        counts += np.bincount(input_ids, minlength=vocab_size)
    return counts
