"""Documents from files, from the Hub and from the standard library's docstrings."""

import difflib
import glob
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset, Value, load_dataset
from datasets.exceptions import DatasetNotFoundError
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from harmonic_sft.data.docstrings import standard_library_docstrings

DOCSTRINGS = "python:docstrings"
FILE_FORMATS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Source:
    """One place to take documents from.

    What it is shows in the path: `python:docstrings`, a file or a glob of files ending in `.txt`,
    `.jsonl`, `.json` or `.parquet`, a folder of such files, or the `owner/name` of a data set on
    the Hub. In a `.txt` file every line is a document and blank lines are skipped.
    """

    path: str = Field(
        min_length=1, description="a file, glob or folder, owner/name on the Hub, python:docstrings"
    )
    name: str | None = Field(default=None, description="configuration of a Hub data set")
    split: str = Field(default="train", description="split, as the datasets library writes it")
    column: str = Field(default="text", description="column that holds the text")
    data_files: str | list[str] | None = Field(
        default=None, description="files to read out of a folder or a Hub data set"
    )
    revision: str | None = Field(default=None, description="commit, tag or branch on the Hub")
    streaming: bool = Field(default=False, description="read while training, download nothing else")


def load_documents(source: Source, *, name: str) -> Dataset | IterableDataset:
    """Open a source and check all that can be checked without reading it to the end.

    Args:
        source: What to read.
        name: Where the source stands in the configuration, for error messages.

    Returns:
        One row per document, its only column being `text`.

    Raises:
        ValueError: The source does not exist, cannot be reached or read, is empty, or lacks a
            column of text by that name.
    """
    if source.path == DOCSTRINGS:
        _refuse_fields(source, "name", "data_files", "revision", name=name)
        documents = Dataset.from_dict({"text": standard_library_docstrings()})
        return documents.to_iterable_dataset() if source.streaming else documents
    arguments = _load_arguments(source, name=name)
    try:
        documents = load_dataset(**arguments, split=source.split, streaming=source.streaming)
        # The first row of a stream is the first thing that has to be reachable and readable.
        first = next(iter(documents), None)
    # The library fails in dozens of ways (files, network, parsers); each is bad input here.
    except Exception as error:
        raise ValueError(_explain(error, source, name=name)) from error
    if first is None:
        raise ValueError(f"{name}.path: expected documents, got none in {source.path!r}.")
    _check_column(documents, first, source, name=name)
    documents = documents.select_columns([source.column])
    return documents if source.column == "text" else documents.rename_column(source.column, "text")


def _load_arguments(source: Source, *, name: str) -> dict[str, Any]:
    """Arguments of `load_dataset`: a folder, a list of files, or a name on the Hub."""
    path = Path(source.path).expanduser()
    if path.is_dir():
        _refuse_fields(source, "revision", name=name)
        return {"path": str(path), "name": source.name, "data_files": source.data_files}
    suffix = path.suffix.lower()
    is_glob = glob.has_magic(source.path) and not path.exists()
    looks_local = suffix in FILE_FORMATS or source.path.startswith((".", "/", "~"))
    if is_glob or looks_local or path.exists():
        _refuse_fields(source, "name", "data_files", "revision", name=name)
        files = sorted(glob.glob(str(path), recursive=True)) if is_glob else [str(path)]
        return {"path": _file_format(files, name=name), "data_files": files}
    if not HUB_NAME.fullmatch(source.path):
        raise ValueError(
            f"{name}.path: expected an existing file or folder, owner/name on the Hub or "
            f"{DOCSTRINGS!r}, got {source.path!r}."
        )
    return {
        "path": source.path,
        "name": source.name,
        "data_files": source.data_files,
        "revision": source.revision,
    }


def _file_format(files: Sequence[str], *, name: str) -> str:
    """Name of the builder that reads these files, all of them being there, filled and of a kind."""
    if not files:
        raise ValueError(f"{name}.path: expected files that match, got none.")
    for file in files:
        if not Path(file).is_file():
            raise ValueError(f"{name}.path: expected an existing file, got {file!r}.")
        if Path(file).stat().st_size == 0:
            raise ValueError(f"{name}.path: expected documents, got the empty file {file!r}.")
    suffixes = {Path(file).suffix.lower() for file in files}
    formats = {FILE_FORMATS.get(suffix) for suffix in suffixes}
    if None in formats or len(formats) > 1:
        raise ValueError(
            f"{name}.path: expected files of one kind, ending in one of {sorted(FILE_FORMATS)}, "
            f"got {sorted(suffixes)}."
        )
    return str(formats.pop())


def _refuse_fields(source: Source, *fields: str, name: str) -> None:
    """Refuse settings that this kind of path would ignore."""
    settings = asdict(source)
    for field in fields:
        if settings[field] is not None:
            raise ValueError(
                f"{name}.{field}: expected nothing for the path {source.path!r}, "
                f"got {settings[field]!r}. Leave it out."
            )


def _explain(error: Exception, source: Source, *, name: str) -> str:
    """Say in one line what a failure of the library means and what to do."""
    if isinstance(error, DatasetNotFoundError):
        return (
            f"{name}.path: expected a data set on the Hub that you may read, got {source.path!r}. "
            "Check the name, and log in if it is private or gated."
        )
    if isinstance(error, ConnectionError):
        return (
            f"{name}.path: expected a data set on the Hub, got {source.path!r}, and the Hub cannot "
            "be reached. Check the name and the network, give a local path, or set "
            "HF_HUB_OFFLINE=1 with a filled cache."
        )
    cause = error.__cause__ or error
    reason = " ".join(str(cause).split())[:300] or type(cause).__name__
    return f"{name}: expected readable documents, got {source.path!r}, which fails: {reason}"


def _check_column(
    documents: Dataset | IterableDataset, first: dict[str, Any], source: Source, *, name: str
) -> None:
    """Refuse a column that is not there or holds no text, judging a stream by its first row."""
    columns = documents.column_names or list(first)
    if source.column not in columns:
        nearest = difflib.get_close_matches(source.column, columns, n=1, cutoff=0.0)
        raise ValueError(
            f"{name}.column: expected one of {sorted(columns)}, got {source.column!r}. "
            f"Did you mean {nearest[0]!r}?"
        )
    feature = (documents.features or {}).get(source.column)
    is_text = isinstance(feature, Value) and "string" in feature.dtype
    if not (is_text or isinstance(first[source.column], str)):
        raise ValueError(
            f"{name}.column: expected a column of text, got {source.column!r}, "
            f"which holds {type(first[source.column]).__name__}."
        )
