"""Rows of text, JSON, CSV and parquet files; a bad row is named by file and line or row."""

import csv
import io
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast
from urllib.parse import urlsplit

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from harmonic_sft.data.bad_rows import BadRow, one_line
from harmonic_sft.data.remote_file import RemoteFile
from harmonic_sft.results import without_secrets

FILE_FORMATS = {
    ".txt": "text",
    ".jsonl": "json lines",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
BATCH_ROWS = 1000
MAX_LINE = 16 << 20  # bytes; a line of a small compressed file could fill the memory
MAX_LIST = 1 << 30  # bytes of a JSON list, which is read into memory whole
BATCH_BYTES = 16 << 20  # of a parquet file; the limit for a batch of long rows
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
PLACE = "__place__"  # column that says where a row was read: file and line or row
BAD = "__bad__"  # column of a row that cannot be read: the reason and how many rows are lost
NUMBER = "__document__"  # column that numbers a source's documents
READ_ERRORS = (OSError, ValueError, OverflowError, RecursionError, csv.Error, pa.ArrowException)

Row = dict[str, Any]


class Shard(NamedTuple):
    """A file, or one row group of a parquet file."""

    file: str
    kind: str  # a value of FILE_FORMATS
    version: str  # changes when the file's content does
    row_group: int = 0
    first_row: int = 0  # of the row group, within the file
    num_rows: int = 0  # of the row group


def is_url(path: str) -> bool:
    """Tell whether a path is the address of a file on a web server."""
    return path.startswith(("http://", "https://"))


def shown(path: str) -> str:
    """Quote a path for messages and results; a web address loses its secrets."""
    return repr(without_secrets(path))


def file_kind(path: str) -> str | None:
    """Return a value of `FILE_FORMATS`, judging by a file's ending; None if it is not read."""
    name = Path(urlsplit(path).path if is_url(path) else path).name.lower()
    plain = name.removesuffix(".gz").removesuffix(".zst")
    kind = FILE_FORMATS.get(Path(plain).suffix)
    return None if kind == "parquet" and plain != name else kind


def file_shards(file: str, *, name: str) -> list[Shard]:
    """Look at a file, a path or web address, and say in which parts it can be read.

    Returns:
        One shard per row group of a parquet file, one for any other file.

    Raises:
        ValueError: The file is empty, cannot be read, or is parquet without a readable footer.
    """
    kind = file_kind(file)
    assert kind is not None, f"file: expected a known ending, got {shown(file)}"
    file = file if is_url(file) else os.path.abspath(file)  # a cache outlives the current folder
    try:
        if is_url(file):
            with RemoteFile(file) as remote:
                size, version = remote.size, remote.version
        else:
            size, version = Path(file).stat().st_size, file_version(file)
        if size and kind == "parquet":
            with _open_parquet(file) as parquet:
                groups = range(parquet.metadata.num_row_groups)
                counts = [parquet.metadata.row_group(group).num_rows for group in groups]
    except (OSError, HTTPException, pa.ArrowException) as error:
        raise ValueError(
            f"{name}: expected a readable {kind} file, got {shown(file)}, "
            f"which fails: {one_line(error)}"
        ) from error
    if size == 0:
        raise ValueError(f"{name}.path: expected documents, got the empty file {shown(file)}.")
    if kind != "parquet":
        return [Shard(file, kind, version)]
    starts = [sum(counts[:group]) for group in groups]
    return [
        Shard(file, kind, version, group, starts[group], counts[group])
        for group in groups
        if counts[group]
    ]


def read_shards(shards: list[Shard]) -> Iterator[Row]:
    """Yield the rows of files in order, holding no more than a batch of a shard in memory.

    `shards` is a list because `datasets` splits lists among processes.

    Yields:
        Rows with the columns of the file (a line of text has `text` alone) and the column `PLACE`.
        A row that cannot be read has only the columns `PLACE` and `BAD`.
    """
    for shard in shards:
        if shard.kind == "text":
            yield from _line_rows(shard.file, _parse_text, keep_blank=True)
        elif shard.kind == "parquet":
            yield from _parquet_rows(shard)
        elif shard.kind == "csv":
            yield from _csv_rows(shard.file)
        elif shard.kind == "json":
            yield from _json_rows(shard.file)
        else:
            yield from _line_rows(shard.file, _parse_object, keep_blank=False)


@dataclass(frozen=True)
class FileRows:
    """Rows of files, read as often as they are asked for."""

    shards: list[Shard]

    @property
    def features(self) -> datasets.Features:
        """The types of the first file's columns; empty unless it is parquet."""
        return next(self.each_features())

    def each_features(self) -> Iterator[datasets.Features]:
        """Yield the types of each file's columns; empty unless it is parquet."""
        for file, kind in dict.fromkeys((shard.file, shard.kind) for shard in self.shards):
            if kind != "parquet":
                yield datasets.Features()
                continue
            with _open_parquet(file) as parquet:
                yield _features(parquet.schema_arrow)

    def __iter__(self) -> Iterator[Row]:
        """Yield rows as `read_shards` does."""
        return read_shards(self.shards)


def _line_rows(file: str, parse: Callable[[bytes], Row], *, keep_blank: bool) -> Iterator[Row]:
    number = 0
    try:
        for number, line in _lines(file):
            if keep_blank or not line.isspace():
                yield _row(f"{shown(file)}, line {number}", parse, line)
    except READ_ERRORS as error:  # after broken compression the rest is one bad place
        yield _bad_row(f"{shown(file)}, from line {number + 1} on", error)


def _csv_rows(file: str) -> Iterator[Row]:
    """Yield the records of a file that begins with the columns' names; all values are text."""
    csv.field_size_limit(MAX_LINE)  # set for the whole process: a document may be long
    lines = (_text(line, "surrogateescape") for _, line in _lines(file))
    reader = csv.reader(lines, strict=True)
    names: list[str] = []
    while True:
        first = reader.line_num + 1
        place = f"{shown(file)}, line {first}"
        try:
            values = next(reader, None)
        except csv.Error as error:  # an unclosed quote swallows the lines up to the next quote
            last = reader.line_num
            place = place if first == last else f"{shown(file)}, lines {first} to {last}"
            yield _bad_row(place, error, rows=last - first + 1)
            values = [] if names else None
        except READ_ERRORS as error:
            yield _bad_row(f"{shown(file)}, from line {first} on", error)
            values = None
        if values is None:
            return
        try:
            "".join(values).encode()  # fails for bytes that were not UTF-8
            if names and values:  # a blank line has no values
                yield {**_record(names, values), PLACE: place}
            elif not names:
                _check_names(values)
            names = names or values
        except READ_ERRORS as error:
            yield _bad_row(place, error)
            if not names:
                return


def _json_rows(file: str) -> Iterator[Row]:
    rows = None
    try:
        with _open_binary(file) as stream:
            content = stream.read(100).removeprefix(BYTE_ORDER_MARK)
            if content.lstrip().startswith(b"["):
                content += stream.read(MAX_LIST)
                if len(content) > MAX_LIST:
                    raise BadRow(f"expected at most {MAX_LIST >> 20} MiB in a list, got more")
                rows = json.loads(content.decode().rstrip())
    except READ_ERRORS as error:
        yield _bad_row(shown(file), error)
        return
    if rows is None:
        yield from _line_rows(file, _parse_object, keep_blank=False)
        return
    for number, row in enumerate(rows, 1):
        yield _row(f"{shown(file)}, row {number}", _check_object, row)


def _parquet_rows(shard: Shard) -> Iterator[Row]:
    """Yield the rows of a row group; all rows after a broken page are lost."""
    first, end = shard.first_row, shard.first_row + shard.num_rows
    try:
        with _open_parquet(shard.file) as parquet:
            _check_names(parquet.schema_arrow.names)
            features = _features(parquet.schema_arrow)
            # Decode JSON columns only: images and sounds are not used.
            encoded = datasets.Features({k: v for k, v in features.items() if "Json(" in repr(v)})

            def decode(row: Any) -> Row:
                row = row.to_pylist()[0] if isinstance(row, pa.RecordBatch) else row
                return row | encoded.decode_example({name: row[name] for name in encoded})

            size = parquet.metadata.row_group(shard.row_group).total_byte_size
            num_rows = max(1, min(BATCH_ROWS, BATCH_BYTES * shard.num_rows // max(1, size)))
            # Threads of pyarrow's own do not survive the fork of a data loader's workers.
            for batch in parquet.iter_batches(
                num_rows, row_groups=[shard.row_group], use_threads=False
            ):
                try:
                    rows: list[Any] = batch.to_pylist()
                except (UnicodeDecodeError, OverflowError):  # one row has bad UTF-8 or a bad date
                    rows = [batch.slice(index, 1) for index in range(batch.num_rows)]
                for row in rows:
                    yield _row(f"{shown(shard.file)}, row {first}", decode, row)
                    first += 1
    except GeneratorExit:  # at the end of the interpreter pa may be gone
        raise
    except READ_ERRORS as error:
        place = f"{shown(shard.file)}, rows {first} to {end - 1} (row group {shard.row_group})"
        yield _bad_row(place, error, rows=end - first)


def _features(schema: pa.Schema) -> datasets.Features:
    """Describe the columns whose types datasets knows; it knows no maps and no categories."""
    features = datasets.Features()
    for field in schema:
        with suppress(ValueError):
            column = pa.schema([field], metadata=schema.metadata)
            features.update(datasets.Features.from_arrow_schema(column))
    return features


def _check_names(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        raise BadRow(f"expected columns of different names, got {names}")


def _row(place: str, parse: Callable[[Any], Row], content: Any) -> Row:
    try:
        return {**parse(content), PLACE: place}
    except READ_ERRORS as error:
        return _bad_row(place, error)


def _bad_row(place: str, error: Exception, rows: int = 1) -> Row:
    return {PLACE: place, BAD: (_reason(error), rows)}


def _reason(error: Exception) -> str:
    """Say what is wrong with the content, or raise the error of a failing disk or connection.

    Such an error is an OSError with an errno, or of a subclass.
    """
    if isinstance(error, BadRow):
        return str(error)
    if isinstance(error, UnicodeDecodeError | UnicodeEncodeError):
        return f"expected UTF-8, got {error.object[error.start : error.end]!r}"
    if isinstance(error, pa.ArrowException) or (type(error) is OSError and error.errno is None):
        return f"expected readable content, got: {one_line(error)}"
    if isinstance(error, OSError):
        raise error
    kinds = {csv.Error: "CSV", json.JSONDecodeError: "JSON", RecursionError: "JSON"}
    return f"expected {kinds.get(type(error), 'readable content')}, got: {one_line(error)}"


def _text(line: bytes, errors: str = "strict") -> str:
    if len(line) > MAX_LINE:
        raise BadRow(f"expected at most {MAX_LINE >> 20} MiB in a line, got more")
    return line.decode(errors=errors)


def _parse_text(line: bytes) -> Row:
    return {"text": _text(line).rstrip("\r\n")}


def _record(names: Sequence[str], values: Sequence[str]) -> Row:
    if len(values) != len(names):
        raise BadRow(f"expected {len(names)} columns, got {len(values)}")
    return dict(zip(names, values, strict=True))


def _parse_object(line: bytes) -> Row:
    return _check_object(json.loads(_text(line).rstrip()))


def _check_object(value: Any) -> Row:
    if not isinstance(value, dict):
        raise BadRow(f"expected an object, got {type(value).__name__}")
    return value


def _lines(file: str) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, numbered from 1; a line too long for `_text` is cut."""
    with _open_binary(file) as stream:
        for number in itertools.count(1):
            line = stream.readline(MAX_LINE + 1)
            if not line:
                return
            rest = line
            while len(rest) > MAX_LINE and not rest.endswith(b"\n"):  # skip a refused line
                rest = stream.readline(MAX_LINE + 1)
            if number == 1 and line.startswith(UTF_16_MARKS):  # most lines of UTF-16 pass for UTF-8
                raise BadRow("expected UTF-8, got UTF-16")
            may_have_mark = number == 1 and len(line) <= MAX_LINE
            yield number, line.removeprefix(BYTE_ORDER_MARK) if may_have_mark else line


def _open_binary(file: str) -> BinaryIO:
    """Open a local or remote file and decompress what ends in .gz or .zst."""
    raw = io.BufferedReader(RemoteFile(file) if is_url(file) else io.FileIO(file), 1 << 20)
    path = urlsplit(file).path if is_url(file) else file
    compression = COMPRESSIONS.get(Path(path).suffix.lower())
    if compression is None:
        return cast(BinaryIO, raw)
    # Small reads: what a read has decompressed is lost if the file breaks off within it.
    return cast(BinaryIO, io.BufferedReader(pa.CompressedInputStream(raw, compression), 1 << 16))


def _open_parquet(file: str) -> pq.ParquetFile:
    """Open a parquet file so that a row group is read page by page."""
    return pq.ParquetFile(
        _open_binary(file) if is_url(file) else file,
        buffer_size=1 << 20,
        pre_buffer=False,
        page_checksum_verification=True,
    )


def file_version(file: str) -> str:
    """Return a text that changes when a local file does."""
    stat = Path(file).stat()
    # The ctime changes with the content even if a program sets the mtime back.
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
