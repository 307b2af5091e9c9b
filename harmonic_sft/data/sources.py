"""Documents from files, from the Hub and from the standard library's docstrings."""

import copy
import difflib
import glob
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from datasets import (
    Dataset,
    DatasetDict,
    IterableDataset,
    ReadInstruction,
    Value,
    concatenate_datasets,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)
from datasets.exceptions import DatasetNotFoundError

from harmonic_sft.data.cached_table import cached_table
from harmonic_sft.data.docstrings import standard_library_docstrings
from harmonic_sft.data.files import (
    COMPRESSIONS,
    FILE_FORMATS,
    PLACE,
    BadRowPolicy,
    BadRows,
    file_kind,
    file_shards,
    is_url,
    one_line,
    read_shards,
)
from harmonic_sft.data.sections import Source

DOCSTRINGS = "python:docstrings"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
SAVED_TABLE, SAVED_SPLITS = "state.json", "dataset_dict.json"  # of `save_to_disk`
MAX_TABLE_SHARDS = 64  # of a stream made from a table


def load_documents(
    source: Source,
    *,
    name: str,
    on_bad_row: Literal["error", "skip"] = "error",
    bad_rows: BadRows | None = None,
) -> Dataset | IterableDataset:
    """Open a source and check all that can be checked without reading it to the end.

    Rows of files are checked one by one, as they are read, and say by `PLACE` where that was. What
    the Hub and `save_to_disk` hold is read by the datasets library, whose errors are never skipped.

    Args:
        source: What to read.
        name: Where the source stands in the configuration, for error messages.
        on_bad_row: Whether a row that cannot be read is an error or is left out and counted.
        bad_rows: Where rows that are left out are counted; for a stream, in the process that
            iterates it. Needed to skip any.

    Returns:
        One row per document, with all columns there are. A stream has one shard per file or per
        row group of a parquet file, and gives the columns that a row of JSON holds, while a table
        has them all, filled up with None.

    Raises:
        ValueError: The source does not exist, cannot be reached or read, or is empty.
    """
    assert on_bad_row == "error" or bad_rows is not None, "skipped rows have to be counted"
    policy = BadRowPolicy(name, bad_rows if on_bad_row == "skip" else None)
    if source.path == DOCSTRINGS:
        _refuse_fields(source, "name", "data_files", "revision", name=name)
        documents = Dataset.from_dict({"text": standard_library_docstrings()})
        return documents.to_iterable_dataset() if source.streaming else documents
    path = Path(source.path).expanduser()
    if (path / SAVED_TABLE).is_file() or (path / SAVED_SPLITS).is_file():
        _refuse_fields(source, "name", "data_files", "revision", name=name)
        documents = _load_saved(source, path, name=name)
    elif (splits := _find_files(source, path, name=name)) is not None:
        documents = _load_files(source, splits, policy)
    else:
        arguments = _hub_arguments(source, name=name)
        with _explained(source, name=name):
            documents = load_dataset(**arguments, split=source.split, streaming=source.streaming)
    # The first row of a stream is the first thing that has to be reachable and readable.
    with _explained(source, name=name):
        empty = first_row(documents) is None
    if empty:
        raise ValueError(f"{name}.path: expected documents, got none in {source.path!r}.")
    return documents


def first_row(documents: Dataset | IterableDataset) -> dict[str, Any] | None:
    """Look at the first row without moving a stream on.

    Args:
        documents: A table or a stream.

    Returns:
        The row without its `PLACE`, or None where there is none.
    """
    # A stream keeps its position for state_dict() even after the iterator is gone.
    row = next(iter(copy.deepcopy(documents)), None)
    return None if row is None else {key: row[key] for key in row if key != PLACE}


def column_names(documents: Dataset | IterableDataset) -> list[str]:
    """Name the columns of a table, or those of a stream's first row, without `PLACE`."""
    names = documents.column_names or first_row(documents) or {}
    return [name for name in names if name != PLACE]


def check_column(documents: Dataset | IterableDataset, source: Source, *, name: str) -> None:
    """Refuse a column of text that is not there or holds no text, judging by the first row.

    Args:
        documents: Of `load_documents`.
        source: Names the column.
        name: Where the source stands in the configuration, for error messages.

    Raises:
        ValueError: The column is missing or holds something else.
    """
    first = first_row(documents) or {}
    columns = column_names(documents)
    if source.column not in columns:
        nearest = difflib.get_close_matches(source.column, columns, n=1, cutoff=0.0)
        raise ValueError(
            f"{name}.column: expected one of {sorted(columns)}, got {source.column!r}. "
            f"Did you mean {nearest[0]!r}?"
        )
    value = first.get(source.column)
    feature = (documents.features or {}).get(source.column)
    is_text = isinstance(feature, Value) and "string" in feature.dtype
    if not (is_text or isinstance(value, str)):
        raise ValueError(
            f"{name}.column: expected a column of text, got {source.column!r}, "
            f"which holds {type(value).__name__}."
        )


def _load_saved(source: Source, path: Path, *, name: str) -> Dataset | IterableDataset:
    """Open what `save_to_disk` wrote."""
    with _explained(source, name=name):
        saved = load_from_disk(str(path))
    splits = saved if isinstance(saved, DatasetDict) else {"train": saved}
    documents = _take_split(
        source, {str(split): table for split, table in splits.items()}, name=name
    )
    if not source.streaming:
        return documents
    return documents.to_iterable_dataset(num_shards=max(1, min(MAX_TABLE_SHARDS, len(documents))))


def _load_files(
    source: Source, splits: Mapping[str, Sequence[str]], policy: BadRowPolicy
) -> Dataset | IterableDataset:
    """Open files: one shard of a stream per file or row group, or a table on disk."""
    wanted = [part.partition("[")[0].strip() for part in source.split.split("+")]
    _check_splits(wanted, splits, name=policy.name)
    shards = {}
    for split in wanted:
        _check_kinds(splits[split], name=policy.name)
        shards[split] = [
            shard for file in splits[split] for shard in file_shards(file, name=policy.name)
        ]
        if not shards[split]:
            raise ValueError(
                f"{policy.name}.path: expected documents, got none in {source.path!r}."
            )
    if not source.streaming:
        with _explained(source, name=policy.name):
            tables = {split: cached_table(parts, policy) for split, parts in shards.items()}
        return _take_split(source, tables, name=policy.name)
    if "[" in source.split:
        raise ValueError(
            f"{policy.name}.split: expected a whole split for a stream, got {source.split!r}. "
            "Set streaming: false to read a part."
        )
    return IterableDataset.from_generator(
        read_shards,
        gen_kwargs={
            "shards": [shard for split in wanted for shard in shards[split]],
            "policy": policy,
        },
    )


def _take_split(source: Source, tables: Mapping[str, Dataset], *, name: str) -> Dataset:
    """Cut splits such as `train`, `train[:100]` and `train+test` out of whole tables."""
    _check_splits(
        [part.partition("[")[0].strip() for part in source.split.split("+")], tables, name=name
    )
    if source.split in tables:
        return tables[source.split]
    with _explained(source, name=name):
        parts = ReadInstruction.from_spec(source.split).to_absolute(
            {split: len(table) for split, table in tables.items()}
        )
    return concatenate_datasets(
        [tables[part.splitname].select(range(part.from_, part.to)) for part in parts]
    )


def _check_splits(wanted: Sequence[str], splits: Mapping[str, Any], *, name: str) -> None:
    for split in wanted:
        if split not in splits:
            raise ValueError(f"{name}.split: expected one of {sorted(splits)}, got {split!r}.")


def _find_files(source: Source, path: Path, *, name: str) -> dict[str, list[str]] | None:
    """Files of every split, or None for what can only be a name on the Hub."""
    if path.is_dir():
        _refuse_fields(source, "revision", name=name)
        with _explained(source, name=name):
            builder = load_dataset_builder(
                str(path), name=source.name, data_files=source.data_files
            )
        found = builder.config.data_files or {}
        return {str(split): [str(file) for file in found[split]] for split in found}
    is_glob = glob.has_magic(source.path) and not path.exists()
    looks_local = file_kind(source.path) is not None or source.path.startswith((".", "/", "~"))
    if not (is_url(source.path) or is_glob or looks_local or path.exists()):
        return None
    _refuse_fields(source, "name", "data_files", "revision", name=name)
    if is_url(source.path):
        return {"train": [source.path]}
    files = sorted(glob.glob(str(path), recursive=True)) if is_glob else [str(path)]
    if not files:
        raise ValueError(f"{name}.path: expected files that match, got none for {source.path!r}.")
    return {"train": files}


def _check_kinds(files: Sequence[str], *, name: str) -> None:
    """Refuse missing files and files that are not read, or not together."""
    for file in files:
        if not is_url(file) and not Path(file).is_file():
            raise ValueError(f"{name}.path: expected an existing file, got {file!r}.")
    kinds = {file_kind(file) for file in files}
    if None in kinds or (len(kinds) > 1 and kinds != {"json", "json lines"}):
        raise ValueError(
            f"{name}.path: expected files of one kind, ending in one of {sorted(FILE_FORMATS)} "
            f"(text and JSON also with one of {list(COMPRESSIONS)}), "
            f"got {sorted({''.join(Path(file).suffixes[-2:]) for file in files})}."
        )


def _hub_arguments(source: Source, *, name: str) -> dict[str, Any]:
    """Arguments of `load_dataset` for a name on the Hub."""
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


def _refuse_fields(source: Source, *fields: str, name: str) -> None:
    """Refuse settings that this kind of path would ignore."""
    settings = asdict(source)
    for field in fields:
        if settings[field] is not None:
            raise ValueError(
                f"{name}.{field}: expected nothing for the path {source.path!r}, "
                f"got {settings[field]!r}. Leave it out."
            )


@contextmanager
def _explained(source: Source, *, name: str) -> Generator[None]:
    """Turn any failure into one line about the source; ours are in order already."""
    try:
        yield
    # The libraries fail in dozens of ways (files, network, parsers); each is bad input here.
    except Exception as error:
        if str(error).startswith(name):
            raise
        raise ValueError(_explain(error, source, name=name)) from error


def _explain(error: Exception, source: Source, *, name: str) -> str:
    """Say in one line what a failure of a library means and what to do."""
    if isinstance(error, DatasetNotFoundError):
        return (
            f"{name}.path: expected a data set on the Hub that you may read, got {source.path!r}. "
            "Check the name, and log in if it is private or gated."
        )
    if isinstance(error, ConnectionError) and HUB_NAME.fullmatch(source.path):
        return (
            f"{name}.path: expected a data set on the Hub, got {source.path!r}, and the Hub cannot "
            "be reached. Check the name and the network, give a local path, or set "
            "HF_HUB_OFFLINE=1 with a filled cache."
        )
    reason = one_line(error.__cause__ or error)
    return f"{name}: expected readable documents, got {source.path!r}, which fails: {reason}"
