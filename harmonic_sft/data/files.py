"""Rows of text, JSON and parquet files, each bad one being named by file and row."""

import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Features

from harmonic_sft.data.remote_file import RemoteFile

FILE_FORMATS = {".txt": "text", ".jsonl": "json lines", ".json": "json", ".parquet": "parquet"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
BATCH_ROWS = 1000
BATCH_BYTES = 16 << 20  # of a parquet file; decides where rows are long
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SHOWN_REASONS = 5
PLACE = "__place__"  # column that says where a row was read: file and line or row
LONG_INTEGER = re.compile(rb"\d{19}")  # may need more than 64 bits


@dataclass
class BadRows:
    """How many rows were left out because they cannot be used, and why the first ones.

    A place counts once, however often it is read. Blank documents have no place: there may be
    more of them than of others.
    """

    places: dict[str, tuple[str, int]] = field(default_factory=dict)  # reason, rows
    blank: int = 0
    unscored_tokens: int = 0  # of parts of documents in which nothing may be predicted

    @property
    def total(self) -> int:
        """How many rows were left out."""
        return self.blank + sum(rows for _, rows in self.places.values())

    @property
    def first(self) -> list[str]:
        """The first few places, each with its reason."""
        shown = islice(self.places.items(), SHOWN_REASONS)
        return [f"{where}: {reason}" for where, (reason, _) in shown]

    def add(self, where: str, reason: str, rows: int = 1) -> None:
        """Count the rows of one place.

        Args:
            where: File and row.
            reason: What is wrong there.
            rows: How many rows are lost there.
        """
        self.places.setdefault(where, (reason, rows))

    def merge(self, other: "BadRows") -> None:
        """Add what another counter has found elsewhere."""
        for where, (reason, rows) in other.places.items():
            self.add(where, reason, rows)
        self.blank += other.blank
        self.unscored_tokens += other.unscored_tokens


@dataclass(frozen=True)
class BadRowPolicy:
    """What happens to a row that cannot be read: an error, or a count where there is a counter."""

    name: str  # where the source stands in the configuration
    counter: BadRows | None

    def report(self, where: str, reason: str, rows: int = 1) -> None:
        """Count a bad place, or raise ValueError."""
        if self.counter is None:
            raise ValueError(
                f"{self.name}: expected readable rows, got {reason} in {where}. "
                "Repair the file, or set on_bad_row: skip."
            )
        self.counter.add(where, reason, rows)


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


def file_kind(path: str) -> str | None:
    """Name how a file is read, judging by its ending, or None if it is not read."""
    name = Path(urlsplit(path).path if is_url(path) else path).name.lower()
    plain = name.removesuffix(".gz").removesuffix(".zst")
    kind = FILE_FORMATS.get(Path(plain).suffix)
    return None if kind == "parquet" and plain != name else kind


def file_shards(file: str, *, name: str) -> list[Shard]:
    """Look at a file and say in which parts it can be read.

    Args:
        file: Path or web address, of a kind that `file_kind` knows.
        name: Where the source stands in the configuration, for error messages.

    Returns:
        One shard per row group of a parquet file, one for any other file.

    Raises:
        ValueError: The file is missing or empty, or a parquet file without a readable footer.
    """
    kind = file_kind(file)
    assert kind is not None, f"file: expected a known ending, got {file!r}"
    file = file if is_url(file) else os.path.abspath(file)  # a cache outlives the current folder
    size, version = _size_and_version(file, name=name)
    if size == 0:
        raise ValueError(f"{name}.path: expected documents, got the empty file {file!r}.")
    if kind != "parquet":
        return [Shard(file, kind, version)]
    try:
        with open_parquet(file) as parquet:
            groups = range(parquet.metadata.num_row_groups)
            counts = [parquet.metadata.row_group(group).num_rows for group in groups]
    except (OSError, pa.ArrowException) as error:
        raise ValueError(
            f"{name}: expected a readable parquet file, got {file!r}, "
            f"which fails: {one_line(error)}"
        ) from error
    starts = [sum(counts[:group]) for group in groups]
    return [
        Shard(file, kind, version, group, starts[group], counts[group])
        for group in groups
        if counts[group]
    ]


def parquet_schema(shards: Sequence[Shard]) -> pa.Schema:
    """Join the columns of parquet files.

    Args:
        shards: Of parquet files.

    Returns:
        All columns, with the metadata of the first file.

    Raises:
        pa.ArrowException: A column has different types that no common one can hold.
    """
    schemas = []
    for file in dict.fromkeys(shard.file for shard in shards):
        with open_parquet(file) as parquet:
            schemas.append(parquet.schema_arrow)
    return pa.unify_schemas(schemas, promote_options="permissive")


def read_shards(shards: list[Shard], policy: BadRowPolicy) -> Iterator[dict[str, Any]]:
    """Yield the rows of files in order, those of one shard never needing more memory than a batch.

    Args:
        shards: Of any kinds. A list, so that `datasets` deals it out to processes and workers.
        policy: What to do about bad rows.

    Yields:
        Rows with the columns of the file, a line of text having the one column `text`, and the
        column `PLACE`.

    Raises:
        ValueError: A row cannot be read and the policy is to refuse it.
    """
    for shard in shards:
        if shard.kind == "text":
            yield from read_text(shard.file, policy)
        elif shard.kind == "parquet":
            yield from _read_parquet(shard, policy)
        elif shard.kind == "json" and _holds_list(shard.file):
            yield from read_json_list(shard.file, policy)
        else:
            yield from read_json_lines(shard.file, policy)


def read_text(file: str, policy: BadRowPolicy) -> Iterator[dict[str, str]]:
    """Yield the lines of a UTF-8 text file, blank ones included."""
    for number, line in _lines(file, policy):
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            policy.report(f"{file!r}, line {number}", _bad_bytes(error))
        else:
            yield {"text": text, PLACE: f"{file!r}, line {number}"}


def read_json_lines(file: str, policy: BadRowPolicy) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines, blank lines left out."""
    for number, line in _lines(file, policy):
        if not line.isspace():
            where = f"{file!r}, line {number}"
            row = _parse_object(line, where, policy)
            if row is not None:
                yield {**row, PLACE: where}


def read_json_list(file: str, policy: BadRowPolicy) -> Iterator[dict[str, Any]]:
    """Yield the objects of one JSON list, which is read into memory as a whole."""
    try:
        with open_binary(file) as stream:
            rows = _parse(stream.read().removeprefix(BYTE_ORDER_MARK))
    except UnicodeDecodeError as error:
        policy.report(f"{file!r}", _bad_bytes(error))
        return
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, OSError) and not _is_broken_content(error):
            raise
        policy.report(f"{file!r}", f"broken JSON ({one_line(error)})")
        return
    for number, row in enumerate(rows, 1):
        where = f"{file!r}, row {number}"
        if isinstance(row, dict):
            yield {**row, PLACE: where}
        else:
            policy.report(where, f"{type(row).__name__} instead of an object")


def parquet_batches(shard: Shard, policy: BadRowPolicy) -> Iterator[pa.RecordBatch]:
    """Yield a row group in batches of valid rows, with the column `PLACE`."""
    read = 0
    try:
        with open_parquet(shard.file) as parquet:
            size = parquet.metadata.row_group(shard.row_group).total_byte_size
            rows = max(1, min(BATCH_ROWS, BATCH_BYTES * shard.num_rows // max(1, size)))
            # Threads of pyarrow's own do not survive the fork of a data loader's workers.
            for batch in parquet.iter_batches(
                rows, row_groups=[shard.row_group], use_threads=False
            ):
                first = shard.first_row + read
                places = [f"{shard.file!r}, row {first + row}" for row in range(batch.num_rows)]
                yield from _valid_rows(batch.append_column(PLACE, pa.array(places)), policy)
                read += batch.num_rows
    except GeneratorExit:  # at the end of the interpreter pa may be gone
        raise
    except (OSError, pa.ArrowException) as error:
        if not _is_broken_content(error):
            raise
        first = shard.first_row + read
        last = shard.first_row + shard.num_rows - 1
        policy.report(
            f"{shard.file!r}, rows {first} to {last} (row group {shard.row_group})",
            f"broken content ({one_line(error)})",
            rows=shard.num_rows - read,
        )


def open_binary(file: str) -> BinaryIO:
    """Open a local or remote file and decompress what ends in .gz or .zst."""
    raw = io.BufferedReader(RemoteFile(file) if is_url(file) else io.FileIO(file), 1 << 20)
    path = urlsplit(file).path if is_url(file) else file
    compression = COMPRESSIONS.get(Path(path).suffix.lower())
    if compression is None:
        return cast(BinaryIO, raw)
    return cast(BinaryIO, io.BufferedReader(pa.CompressedInputStream(raw, compression), 1 << 20))


def open_parquet(file: str) -> pq.ParquetFile:
    """Open a parquet file so that a row group is read page by page."""
    return pq.ParquetFile(
        open_binary(file) if is_url(file) else file,
        buffer_size=1 << 20,
        pre_buffer=False,
        page_checksum_verification=True,
    )


def one_line(error: BaseException) -> str:
    """Say in one short line what an exception says."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _size_and_version(file: str, *, name: str) -> tuple[int, str]:
    if is_url(file):
        try:
            with RemoteFile(file) as remote:
                return remote.size, remote.version
        except OSError as error:
            raise ValueError(
                f"{name}.path: expected a file that can be reached, got {file!r}, "
                f"which fails: {one_line(error)}"
            ) from error
    if not Path(file).is_file():
        raise ValueError(f"{name}.path: expected an existing file, got {file!r}.")
    stat = Path(file).stat()
    # The second time changes with the content even where the first one is set back.
    return stat.st_size, f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"


def _lines(file: str, policy: BadRowPolicy) -> Iterator[tuple[int, bytes]]:
    """Number the lines of a file from 1; what follows broken compression is one bad place."""
    number = 0
    try:
        with open_binary(file) as stream:
            for number, line in enumerate(stream, 1):
                yield number, line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
    except (OSError, pa.ArrowException) as error:
        if not _is_broken_content(error):
            raise
        policy.report(
            f"{file!r}, from line {number + 1} on", f"broken compression ({one_line(error)})"
        )


def _holds_list(file: str) -> bool:
    with open_binary(file) as stream:
        return stream.read(100).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"[")


def _parse_object(line: bytes, where: str, policy: BadRowPolicy) -> dict[str, Any] | None:
    try:
        row = _parse(line)
    except UnicodeDecodeError as error:
        policy.report(where, _bad_bytes(error))
    except (ValueError, RecursionError) as error:
        policy.report(where, f"broken JSON ({one_line(error)})")
    else:
        if isinstance(row, dict):
            return row
        policy.report(where, f"{type(row).__name__} instead of an object")
    return None


def _read_parquet(shard: Shard, policy: BadRowPolicy) -> Iterator[dict[str, Any]]:
    features: Features | None = None
    for batch in parquet_batches(shard, policy):
        if features is None:
            features = Features.from_arrow_schema(batch.schema)
        for row in batch.to_pylist():
            yield features.decode_example(row)


def _valid_rows(batch: pa.RecordBatch, policy: BadRowPolicy) -> Iterator[pa.RecordBatch]:
    """Split off the rows whose strings are not UTF-8."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        for index in range(batch.num_rows):
            # A slice would share, and validate, the buffers of the whole batch.
            row = batch.take(pa.array([index]))
            try:
                row.validate(full=True)
            except pa.ArrowInvalid as error:
                policy.report(row.column(PLACE)[0].as_py(), f"bad values ({one_line(error)})")
            else:
                yield row
    else:
        yield batch


def _is_broken_content(error: BaseException) -> bool:
    """Tell what pyarrow finds broken from a failing disk or connection, never a bad row.

    The latter have an errno, or a type of their own.
    """
    return isinstance(error, pa.ArrowException) or (type(error) is OSError and error.errno is None)


def _bad_bytes(error: UnicodeDecodeError) -> str:
    return f"bytes that are not UTF-8 ({error.object[error.start : error.end]!r})"


def _parse(content: bytes) -> Any:
    """Parse JSON, refusing what the table and the tokenizer could not take."""
    value = json.loads(
        content.decode().rstrip(),
        parse_constant=_refuse_constant,
        parse_int=_int64 if LONG_INTEGER.search(content) else None,
    )
    if b"\\ud" in content.lower():
        json.dumps(value, ensure_ascii=False).encode()  # fails for half a surrogate pair
    return value


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _int64(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{text[:30]} has more than 64 bits")
    return value
