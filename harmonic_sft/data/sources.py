"""Documents from files, from the Hub and from the standard library's docstrings."""

import copy
import glob
import os
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
from datasets import (
    ClassLabel,
    Dataset,
    DatasetDict,
    IterableDataset,
    List,
    load_dataset,
    load_from_disk,
)
from datasets.exceptions import DatasetNotFoundError
from datasets.fingerprint import Hasher
from pydantic import Field
from pydantic.dataclasses import dataclass

from harmonic_sft.config import STRICT, did_you_mean
from harmonic_sft.data.bad_rows import BadRows, one_line
from harmonic_sft.data.docstrings import standard_library_docstrings
from harmonic_sft.data.files import (
    BAD,
    COMPRESSIONS,
    FILE_FORMATS,
    NUMBER,
    PLACE,
    FileRows,
    Row,
    file_kind,
    file_shards,
    file_version,
    is_url,
    read_shards,
    shown,
)
from harmonic_sft.data.sections import Source
from harmonic_sft.results import without_secrets

DOCSTRINGS = "python:docstrings"
COMPARED = 100  # rows, to see whether a transform changes the labels
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
SAVED_TABLE, SAVED_SPLITS = "state.json", "dataset_dict.json"  # of `save_to_disk`
MAX_TABLE_SHARDS = 64  # of a stream made from a table
STREAM_BITS = 40  # low bits that number documents; the high ones number logical streams
T = TypeVar("T")
Documents = Dataset | FileRows | IterableDataset


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GivenSource(Source):
    """A data set that is passed as an object; its path only names it in messages."""

    documents: Any = Field(description="the data set")


def load_documents(source: Source, *, name: str, skip: bool) -> tuple[Documents, Row]:
    """Open a source and check all that can be checked without reading it to the end.

    Rows of files are those of `read_shards`, including bad ones. Errors of the datasets library,
    which reads the Hub and `save_to_disk`, are never skipped.

    Args:
        source: What to read.
        name: Where the source stands in the configuration, for error messages.
        skip: Whether bad rows may be skipped.

    Returns:
        The documents, one row each with all its columns; a stream has one shard per file or per row
        group of a parquet file. Also the first row that is not bad, without `PLACE`.

    Raises:
        ValueError: The source does not exist, cannot be reached or read, or is empty.
    """
    is_on_hub = check_path(source, name)
    path = Path(os.path.expanduser(source.path))
    is_saved = (path / SAVED_TABLE).is_file() or (path / SAVED_SPLITS).is_file()
    if not is_on_hub:
        _refuse_settings(source, name)
    if isinstance(source, GivenSource):
        documents: Documents = source.documents
    elif source.path == DOCSTRINGS:
        texts_fn = _split(source, {"train": standard_library_docstrings}, name)
        documents = Dataset.from_dict({"text": texts_fn()})
        documents = documents.to_iterable_dataset() if source.streaming else documents
    elif is_saved:
        documents = _load_saved(source, path, name)
    elif not is_on_hub:
        documents = _load_files(source, path, name)
    else:
        with _explained(source, name):
            documents = load_dataset(
                source.path,
                source.name,
                data_files=source.data_files,
                revision=source.revision,
                split=source.split,
                streaming=source.streaming,
            )
    documents = unformatted(documents)
    # Only its first row shows whether a stream can be reached and read.
    bad_rows = BadRows(skip=skip)
    with _explained(source, name):
        # A copy, since a stream keeps its position for state_dict() after the iterator is gone.
        for row in copy.deepcopy(documents):
            if BAD not in row:
                return documents, _without_place(row)
            bad_rows.report(name, row[PLACE], *row[BAD])
    reasons = "".join(f" {reason}." for reason in bad_rows.first[:1])
    raise ValueError(f"{name}.path: expected documents, got none in {shown(source.path)}.{reasons}")


def unformatted(documents: Any) -> Any:
    """Let a data set give plain values, whatever its format; keep a transform of the user."""
    if isinstance(documents, Dataset) and documents.format["type"] not in (None, "custom"):
        columns, everything = documents.format["columns"], documents.format["output_all_columns"]
        columns = None if columns == documents.column_names else columns
        return documents.with_format(None, columns=columns, output_all_columns=everything)
    if isinstance(documents, IterableDataset) and documents._formatting is not None:
        return documents.with_format(None)
    return documents


def check_path(source: Source, name: str) -> bool:
    """Refuse a path that does not exist and is no name on the Hub, pattern or web address.

    A space is refused: to messages an address ends there, and a signature after it would show.

    Returns:
        Whether it is a name on the Hub.
    """
    if "://" in source.path and re.search(r"\s", source.path):
        raise ValueError(
            f"{name}.path: expected an address without spaces, got some. Write %20 for each"
        )
    if "://" in source.path and not source.path.isascii():
        raise ValueError(
            f"{name}.path: expected an address of ASCII characters, got {shown(source.path)}. "
            "Quote others, as in %C3%BC"
        )
    if is_url(source.path) and "@" in urlsplit(source.path).netloc:
        raise ValueError(
            f"{name}.path: expected an address without user and password, got {shown(source.path)} "
            "with them. Download the file, or give an address that is signed"
        )
    is_known = isinstance(source, GivenSource) or source.path == DOCSTRINGS or is_url(source.path)
    is_known |= os.path.exists(os.path.expanduser(source.path)) or glob.has_magic(source.path)
    is_local = file_kind(source.path) is not None or source.path.startswith((".", "/", "~"))
    if not is_known and (is_local or not HUB_NAME.fullmatch(source.path)):
        others = "" if is_local else f" or folder, owner/name on the Hub or {DOCSTRINGS!r}"
        raise ValueError(
            f"{name}.path: expected an existing file{others}, got {_located(source.path)}."
        )
    return not is_known


def _located(path: str) -> str:
    """Quote a path; for a relative one also say where it was looked for."""
    is_relative = not os.path.isabs(os.path.expanduser(path))
    return shown(path) + (f" in the current folder, {str(Path.cwd())!r}" if is_relative else "")


def readable_rows(documents: Documents) -> Iterator[Row]:
    """Yield the rows that can be read, without `PLACE`; a stream keeps its position."""
    return (_without_place(row) for row in copy.deepcopy(documents) if BAD not in row)


def _without_place(row: Row) -> Row:
    return {key: row[key] for key in row if key != PLACE}


def numbered_rows(rows: Iterable[Row], name: str, first: int = 0) -> Iterator[Row]:
    """Yield rows with their `NUMBER`, from `first`; a bad row has that of the next good one.

    Raises:
        ValueError: The disk, the network or a library fails; the message names the source `name`.
    """
    number = first
    try:
        for row in rows:
            yield {**row, NUMBER: number}
            number += BAD not in row
    # Disks, networks and libraries fail in dozens of ways, and none says at which row.
    except Exception as error:
        raise ValueError(
            f"{name}: expected readable rows, got {type(error).__name__} ({one_line(error)}) "
            f"in {document_name(number)}, counted from 0"
        ) from error


def document_name(number: int) -> str:
    """Spell out a document's number: its place in a pass over its logical stream, or in a table."""
    stream, document = divmod(number, 1 << STREAM_BITS)
    return f"document {document}" + (f" of logical stream {stream}" if stream else "")


def check_column(row: Row, column: str, *, name: str, is_text: bool = False) -> None:
    """Refuse a column that is not there or, judging by one row, holds no text.

    `name` is the setting that names the column, for error messages.
    """
    if column not in row:
        nearest = did_you_mean(column, list(row))
        raise ValueError(f"{name}: expected one of {sorted(row)}, got {column!r}{nearest}")
    if is_text and not isinstance(row[column], str):
        raise ValueError(
            f"{name}: expected a column of text, got {column!r}, "
            f"which holds {type(row[column]).__name__}. Lists of words need the task "
            "token_classification"
        )


def names_of_classes(documents: Documents, column: str | None) -> tuple[str, ...] | None:
    """Return the class names behind the numbers in a label column, None if there are none."""
    if column and isinstance(documents, Dataset) and documents.format["type"] == "custom":
        part, plain = slice(None, None, -(-len(documents) // COMPARED)), documents.with_format(None)
        transformed, stored = (rows[part].get(column) for rows in (documents, plain))
        if transformed is None or [np.asarray(label).tolist() for label in transformed] != stored:
            return None  # the transform makes labels of its own
    tables = documents.each_features() if isinstance(documents, FileRows) else [documents.features]
    names = {_feature_names((features or {}).get(column)) for features in tables}
    if len(names) > 1:
        raise ValueError(
            f"data.label_column: expected files whose numbers stand for the same classes, got "
            f"{list(names)}. Give each file as a source of its own"
        )
    return names.pop()


def _feature_names(feature: Any) -> tuple[str, ...] | None:
    feature = feature.feature if isinstance(feature, List) else feature
    return tuple(feature.names) if isinstance(feature, ClassLabel) else None


def _load_saved(source: Source, path: Path, name: str) -> Dataset | IterableDataset:
    with _explained(source, name):
        saved = load_from_disk(str(path))
    splits = saved if isinstance(saved, DatasetDict) else {"train": saved}
    documents = _split(source, splits, name)
    # A folder that was written again may keep its fingerprint.
    files = [file_version(file["filename"]) for file in documents.cache_files]
    documents._fingerprint = Hasher.hash([documents._fingerprint, files])
    if not source.streaming:
        return documents
    return documents.to_iterable_dataset(num_shards=max(1, min(MAX_TABLE_SHARDS, len(documents))))


def stream_steps(documents: IterableDataset) -> list[Any]:
    """Return the steps by which the datasets library makes a stream, from the last to the first."""
    steps: list[Any] = [documents._ex_iterable]
    for step in steps:  # the list grows by the sources of each step
        steps += getattr(step, "ex_iterables", [])
        steps += [step.ex_iterable] if hasattr(step, "ex_iterable") else []
    return steps


def most_streams(documents: IterableDataset) -> int:
    """Return how many parts a stream can be split into: 1 if a step of it counts documents.

    In every part datasets would count from 0 again, and skip, take or number other documents.
    """
    counting = ("SkipExamplesIterable", "TakeExamplesIterable")
    is_counted = any(
        type(step).__name__ in counting or getattr(step, "with_indices", False)
        for step in stream_steps(documents)
    )
    return 1 if is_counted else documents.num_shards


def _load_files(source: Source, path: Path, name: str) -> FileRows | IterableDataset:
    """Open files; a stream has one shard per file or row group."""
    files = _split(source, {"train": _find_files(source, path, name)}, name)
    kinds = {file_kind(file) for file in files}
    if None in kinds or (len(kinds) > 1 and kinds != {"json", "json lines"}):
        raise ValueError(
            f"{name}.path: expected files of one kind, ending in one of {sorted(FILE_FORMATS)} "
            f"(parquet apart also with one of {list(COMPRESSIONS)}), "
            f"got {sorted({''.join(Path(without_secrets(file)).suffixes[-2:]) for file in files})}."
        )
    shards = [shard for file in files for shard in file_shards(file, name=name)]
    if source.streaming and shards:
        return IterableDataset.from_generator(read_shards, gen_kwargs={"shards": shards})
    return FileRows(shards)


def _split(source: Source, splits: Mapping[Any, T], name: str) -> T:
    known = sorted(map(str, splits))
    if source.split not in known:
        raise ValueError(f"{name}.split: expected one of {known}, got {source.split!r}.")
    return splits[source.split]


def _find_files(source: Source, path: Path, name: str) -> list[str]:
    if path.is_dir():
        example = str(path / "*.jsonl")
        raise ValueError(
            f"{name}.path: expected a file, or a folder of save_to_disk, got the folder "
            f"{_located(source.path)}. Name its files by a glob, such as {example!r}"
        )
    if is_url(source.path):
        return [source.path]
    files = [str(path)] if path.exists() else sorted(glob.glob(str(path), recursive=True))
    if not files:
        raise ValueError(
            f"{name}.path: expected files that match, got none for {_located(source.path)}."
        )
    return files


def _refuse_settings(source: Source, name: str) -> None:
    """Refuse settings that only the Hub has a use for."""
    for key in ("name", "data_files", "revision"):
        value = vars(source)[key]
        if value is not None:
            raise ValueError(
                f"{name}.{key}: expected nothing for the path {shown(source.path)}, "
                f"got {value!r}. Leave it out."
            )


@contextmanager
def _explained(source: Source, name: str) -> Generator[None]:
    """Turn any failure into one line about the source; our own errors pass as they are."""
    try:
        yield
    except DatasetNotFoundError as error:
        raise ValueError(
            f"{name}.path: expected a data set on the Hub that you may read, got {source.path!r}. "
            "Check the name, and log in if it is private or gated."
        ) from error
    # The libraries fail in dozens of ways (files, network, parsers); each is bad input here.
    except Exception as error:
        if str(error).startswith(name):
            raise
        if isinstance(error, ConnectionError) and HUB_NAME.fullmatch(source.path):
            raise ValueError(
                f"{name}.path: expected a data set on the Hub, got {source.path!r}, and the Hub "
                "cannot be reached. Check the name and the network, give a local path, or set "
                "HF_HUB_OFFLINE=1 with a filled cache."
            ) from error
        reason = one_line(error.__cause__ or error)
        raise ValueError(
            f"{name}: expected readable documents, got {shown(source.path)}, which fails: {reason}"
        ) from error
