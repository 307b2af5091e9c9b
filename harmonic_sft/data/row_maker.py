"""Documents as rows for the model: tokens cut to length and wrapped, with nothing lost."""

import hashlib
import itertools
import json
import logging
import math
import multiprocessing
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import tokenizers
import transformers
from datasets import config as datasets_config
from datasets.fingerprint import Hasher
from datasets.utils import tqdm
from transformers import PreTrainedTokenizerBase

from harmonic_sft.data.bad_rows import BLANK, BadRow, BadRows
from harmonic_sft.data.encoding import Encoded, SpecialTokens, batches_of, encode_pieces
from harmonic_sft.data.files import BAD, NUMBER, PLACE, Row
from harmonic_sft.data.formats import Draft, Reader
from harmonic_sft.data.heldout import fingerprint, word_hashes
from harmonic_sft.data.masking import NO_WORD, TokenLabels
from harmonic_sft.data.sources import Documents, document_name, numbered_rows
from harmonic_sft.results import file_sha256

logger = logging.getLogger(__name__)
BATCH_DOCUMENTS = 1000
COLUMN_ROWS = 10_000
BATCH_CHARACTERS = 16 << 20  # of documents; the limit for a batch of long ones
# Modules that decide what a row holds.
CODE = ("files", "row_maker", "formats", "chat", "encoding", "heldout")
FEATURES = {
    "input_ids": datasets.List(datasets.Value("int32")),
    "scored": datasets.List(datasets.Value("bool")),
    "word_ids": datasets.List(datasets.Value("int32")),
    "labels": datasets.List(datasets.Value("string")),  # classes as JSON
    "weight": datasets.Value("float32"),
    "source": datasets.Value("int32"),
    "document": datasets.Value("int64"),
    "chunk": datasets.Value("int32"),
    "fingerprint": datasets.Value("string"),
    "words": datasets.List(datasets.Value("uint32")),
}
TRACES = ("fingerprint", "words")  # columns that only the first row of a document has


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab_size: int,
    max_positions: int,
    context_length: int,
    needs_mask: bool = True,
    pad_to_multiple_of: int = 1,
) -> None:
    """Refuse a tokenizer or a length, in tokens, that the model cannot take.

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
            "Use the tokenizer the model was trained with. For new tokens call "
            "model.resize_token_embeddings(len(tokenizer)), and save both in one folder"
        )
    check_length(context_length, max_positions=max_positions, pad_to_multiple_of=pad_to_multiple_of)


def check_length(context_length: int, *, max_positions: int, pad_to_multiple_of: int = 1) -> None:
    """Raise a ValueError for rows that are longer than the model takes, padding included."""
    longest = -(-context_length // pad_to_multiple_of) * pad_to_multiple_of
    if longest > max_positions:
        rounded = f", which data.pad_to_multiple_of makes {longest}" * (longest > context_length)
        raise ValueError(
            f"data.context_length: expected at most the {max_positions} positions of the model, "
            f"got {context_length}{rounded}."
        )


@dataclass(frozen=True, kw_only=True)
class RowMaker:
    """Turns documents of one source into rows: consecutive chunks between special tokens.

    A document's tail is a row of its own. A blank document makes no row, nor does a chunk in which
    nothing is scored. A labeled document makes one row; if it is longer, it is cut.
    """

    name: str  # where the source stands in the configuration
    source: int  # the source's number
    read: Reader
    context_length: int  # of the longest row, in tokens, special tokens included
    scored: bool = False  # whether rows say which of their tokens may be predicted
    weight_column: str | None = None
    skip: bool = False  # whether unusable documents are left out instead of raising an error

    @property
    def columns(self) -> list[str]:
        """The columns of a row."""
        optional = {
            "scored": self.scored,
            "word_ids": self.read.word_ids,
            "labels": self.read.is_labeled,
            "weight": self.weight_column is not None,
        }
        return [name for name in FEATURES if optional.get(name, True)]

    def __call__(self, documents: Sequence[Row]) -> tuple[list[Row], BadRows]:
        """Return the rows of documents, which have a `NUMBER`, and the documents that make none.

        Raises:
            ValueError: A document cannot be used and none may be skipped, or no row can be made.
        """
        bad_rows = BadRows(skip=self.skip)
        drafts: list[tuple[Row, Draft]] = []
        for document in documents:
            if BAD in document:
                bad_rows.report(self.name, document[PLACE], *document[BAD])
                continue
            with bad_rows.caught(self.name, self._place(document)):
                columns = {key: document[key] for key in document if key not in (NUMBER, PLACE)}
                drafts.append((document, self.read(columns)))
        read = self.read
        encoded = encode_pieces(
            [draft.content for _, draft in drafts],
            tokenizer=read.tokenizer,
            word_ids=read.word_ids,
            # Chat templates write the first token of a row themselves.
            prefix=[] if read.is_labeled else read.special.prefix,
        )
        rows: list[Row] = []
        for (document, draft), tokens in zip(drafts, encoded, strict=True):
            with bad_rows.caught(self.name, self._place(document)):
                chunks = self._cut(tokens, document, bad_rows)
                # Only the first row of a document has the traces by which copies are found.
                traces = {"fingerprint": fingerprint(draft.text), "words": word_hashes(draft.own)}
                rows += [chunks[0] | traces, *chunks[1:]]
        return rows, bad_rows

    def _place(self, document: Row) -> str:
        return document.get(PLACE) or f"{self.name}, {document_name(document[NUMBER])}"

    def _cut(self, encoded: Encoded, document: Row, bad_rows: BadRows) -> list[Row]:
        if not encoded.input_ids:
            raise BadRow(BLANK)
        common = {"source": self.source, "document": document[NUMBER]}
        if self.weight_column is not None:
            common["weight"] = weight_of(document, self.weight_column)
        # The values at the special tokens of a row; in plain text these are predicted too.
        fills = {"scored": self.read.row_format == "text", "word_ids": NO_WORD, "labels": None}
        fills = {name: fills[name] for name in self.columns if name in fills}
        special = self._special_around(encoded)
        size = self.context_length - len(special.prefix) - len(special.suffix)
        is_text = self.read.is_causal and self.read.row_format == "text"
        if is_text and len(encoded.input_ids) % size:  # else the ending would be a row of its own
            encoded.input_ids.extend(self.read.ending)
            encoded.scored.extend([True] * len(self.read.ending))
        end = 1 if self.read.is_labeled else len(encoded.input_ids)
        # A decoder predicts no token that has none before it.
        first = int(self.read.is_causal and not special.prefix)
        rows, unscored = [], 0
        for chunk, start in enumerate(range(0, end, size)):
            part = slice(start, start + size)
            if not any(encoded.scored[start + first : start + size]):
                unscored += len(encoded.scored[part])
                continue
            row = {"input_ids": [*special.prefix, *encoded.input_ids[part], *special.suffix]}
            for name, fill in fills.items():
                before, after = [fill] * len(special.prefix), [fill] * len(special.suffix)
                row[name] = [*before, *getattr(encoded, name)[part], *after]
            rows.append({**row, **common, "chunk": chunk})
        if not rows:
            found = f"none of {len(encoded.scored)}"
            raise BadRow(f"loss_on {self.read.loss_on}: expected tokens to score, got {found}")
        bad_rows.unscored_tokens += unscored
        return rows

    def _special_around(self, encoded: Encoded) -> SpecialTokens:
        # A decoder's rows get no special tokens where ids or a chat template lack the prefix.
        read, special = self.read, self.read.special
        is_final = read.row_format == "tokens" or read.tokenizer.chat_template is not None
        if read.is_causal and read.row_format != "text" and is_final and not encoded.had_prefix:
            special = SpecialTokens([], [])
        num_special = len(special.prefix) + len(special.suffix)
        if self.context_length <= num_special:
            raise ValueError(
                f"data.context_length: expected more than the {num_special} special tokens of a "
                f"row, got {self.context_length}."
            )
        return special


def weight_of(row: Row, column: str) -> float:
    """Return the weight of a row; raise `BadRow` unless it is 0 or more and finite in float32."""
    value = row.get(column)
    try:
        weight = math.nan if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
    if not 0 <= weight <= float(np.finfo(np.float32).max):
        raise BadRow(f"{column}: expected a weight from 0 to the largest float32, got {value!r}")
    return weight


def tokenize_table(
    documents: Documents, maker: RowMaker, num_proc: int | None = None
) -> tuple[datasets.Dataset, BadRows]:
    """Tokenize all documents of a source into a table on disk, or reuse an earlier run's table.

    Args:
        documents: All rows of the source; a stream is read into memory.
        maker: Makes the rows, and raises its ValueErrors here.
        num_proc: Processes to tokenize in; None is this one, fastest below some million words.

    Returns:
        The rows in the order of the documents, mapped into memory from the library's cache, and
        the documents that made none.
    """
    # The code is part of the key: a table that another version has made must not be reused.
    code = [Path(__file__).with_name(f"{name}.py").read_text() for name in CODE]
    versions = [tokenizers.__version__, transformers.__version__]
    numbered: Iterable[Row] = numbered_rows(documents, maker.name)
    source: Any = documents
    if isinstance(documents, datasets.IterableDataset):  # may give other documents next time
        source = numbered = list(numbered)
    elif isinstance(documents, datasets.Dataset):
        has_transform = documents.format["type"] == "custom"  # its fingerprint is only a name
        source = rows_sha256(documents) if has_transform else documents._fingerprint
    key = Hasher.hash([code, versions, maker, source])
    folder = Path(datasets_config.HF_DATASETS_CACHE) / "harmonic_sft"
    table, report = folder / f"{key}.arrow", folder / f"{key}.bad_rows.json"
    bad_rows = _read_report(table, report)
    if bad_rows is None:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            # Other runs share the cache: files appear whole, and the report before the table.
            new_table, new_report = Path(scratch, "table"), Path(scratch, "report")
            bad_rows = BadRows(skip=maker.skip)
            features = datasets.Features({name: FEATURES[name] for name in maker.columns})
            with pa.ipc.new_stream(new_table, features.arrow_schema) as writer:
                limits = {"size": BATCH_CHARACTERS, "count": BATCH_DOCUMENTS}
                batches = batches_of(numbered, _characters, **limits)
                for rows, new_bad_rows in _make_rows(batches, maker, num_proc):
                    bad_rows.merge(new_bad_rows)
                    writer.write_table(pa.Table.from_pylist(rows, features.arrow_schema))
            new_report.write_text(json.dumps([file_sha256(new_table), asdict(bad_rows)]))
            os.replace(new_report, report)
            os.replace(new_table, table)
    return datasets.Dataset.from_file(str(table)), bad_rows


def rows_sha256(rows: Iterable[Row]) -> str:
    """Return a checksum of rows, in their order."""
    hasher = hashlib.sha256()
    for row in rows:
        hasher.update(Hasher.hash(row).encode())
    return hasher.hexdigest()


def _read_report(table: Path, report: Path) -> BadRows | None:
    if not table.exists():
        return None
    try:
        checksum, fields = json.loads(report.read_text())
        if checksum == file_sha256(table):
            places = {place: (reason, rows) for place, (reason, rows) in fields["places"].items()}
            return BadRows(**fields | {"places": places})
    except (OSError, KeyError, TypeError, ValueError):
        pass  # the report is damaged
    logger.warning("The cached table %s is damaged. It is made again.", table)
    return None


def _make_rows(
    batches: Iterator[list[Row]], maker: RowMaker, num_proc: int | None
) -> Iterator[tuple[list[Row], BadRows]]:
    with tqdm(desc=f"Tokenizing {maker.name}", unit=" documents") as progress:
        if num_proc is None:
            for batch in batches:
                yield maker(batch)
                progress.update(len(batch))
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(num_proc, mp_context=context) as pool:
            while group := list(itertools.islice(batches, 4 * num_proc)):
                yield from pool.map(maker, group)
                progress.update(sum(map(len, group)))


def _characters(row: Row) -> int:
    return sum(len(value) for value in row.values() if isinstance(value, str))


def rows_table(rows: Sequence[Row]) -> datasets.Dataset:
    """Make a table of rows."""
    columns = [name for name in FEATURES if any(name in row for row in rows)]
    table = {name: [row.get(name) for row in rows] for name in columns}
    features = datasets.Features({name: FEATURES[name] for name in columns})
    return datasets.Dataset.from_dict(table, features=features)


def column_batches(rows: datasets.Dataset, *names: str) -> Iterator[list[pa.Array]]:
    """Yield columns of a table, 10,000 rows at a time."""
    for first in range(0, len(rows), COLUMN_ROWS):
        places = np.arange(first, min(first + COLUMN_ROWS, len(rows)))
        if rows._indices is not None:  # the library would cut out the rows one by one
            places = rows._indices.fast_slice(first, COLUMN_ROWS)[0].to_numpy().astype(np.int64)
        runs = np.split(places, np.flatnonzero(places[1:] != places[:-1] + 1) + 1)
        table = pa.concat_tables([rows.data.fast_slice(run[0], len(run)) for run in runs])
        yield [table[name].combine_chunks() for name in names]


def row_lengths(rows: datasets.Dataset) -> np.ndarray:
    """Return the length of every row in tokens, `[rows]`."""
    batches = [ids.value_lengths().to_numpy() for (ids,) in column_batches(rows, "input_ids")]
    return np.concatenate([np.zeros(0, dtype=np.int64), *batches])


def document_numbers(rows: datasets.Dataset) -> np.ndarray:
    """Number the documents of rows from 0, `[rows]`; rows of a document must be adjacent."""
    names = document_names(rows)  # [2, rows]
    return np.append(0, (names[:, 1:] != names[:, :-1]).any(axis=0).cumsum())


def document_traces(rows: datasets.Dataset) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the fingerprint and the word hashes, `[W]`, of every document."""
    for fingerprints, words in column_batches(rows, *TRACES):
        ends, values = words.offsets.to_numpy(), words.values.to_numpy()
        for index, name in enumerate(fingerprints.to_pylist()):
            if name is not None:
                yield name, values[ends[index] : ends[index + 1]]


def document_names(rows: datasets.Dataset) -> np.ndarray:
    """Return the source and the document of every row, `[2, rows]`."""
    batches = [np.stack(columns) for columns in column_batches(rows, "source", "document")]
    return np.concatenate([np.zeros((2, 0), dtype=np.int64), *batches], axis=1)


def rows_digest(rows: datasets.Dataset) -> str:
    """Return the sha256 of rows: of all their columns, in their order."""
    digest = hashlib.sha256(" ".join(rows.column_names).encode())
    for columns in column_batches(rows, *rows.column_names):
        for column in columns:
            if pa.types.is_list(column.type):
                lengths = column.value_lengths()
                digest.update(lengths.to_numpy(zero_copy_only=False).tobytes())
                column = column.flatten()
            if pa.types.is_string(column.type):
                digest.update(json.dumps(column.to_pylist()).encode())
            else:
                assert pa.types.is_primitive(column.type), "of others NumPy has addresses"
                digest.update(column.to_numpy(zero_copy_only=False).tobytes())
    return digest.hexdigest()


def unigram_counts(rows: datasets.Dataset, masker: TokenLabels) -> np.ndarray:
    """Count how often every token stands in rows where it can ever be predicted, `[V]` int64."""
    counts = np.zeros(len(masker.special_tokens), dtype=np.int64)
    names = [name for name in ("input_ids", "scored") if name in rows.column_names]
    for batch in column_batches(rows, *names):
        flat = (values.flatten().to_numpy(zero_copy_only=False) for values in batch)
        columns = dict(zip(names, flat, strict=True))
        predicted = columns["input_ids"][masker.maskable(columns)]
        counts += np.bincount(predicted, minlength=len(counts))
    return counts
