"""Tables of rows in Arrow files on disk, made once per content and mapped into memory."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets.config import HF_DATASETS_CACHE

from harmonic_sft.data import files
from harmonic_sft.data.files import BadRowPolicy, Shard

# Holds what Arrow has no exact type for: objects, whose missing keys Arrow would fill with nulls
# in every row, and columns of several types.
JSON_TEXT = pa.json_()


def cached_table(shards: Sequence[Shard], policy: BadRowPolicy) -> datasets.Dataset:
    """Read files of one kind into a table on disk, or find the table an earlier run has made.

    Args:
        shards: What to read.
        policy: What to do about bad rows; those of an earlier run are reported again.

    Returns:
        The rows in order, mapped into memory from the cache of the `datasets` library.

    Raises:
        ValueError: A row cannot be read and the policy is to refuse it.
    """
    # Another version of the readers must not find this one's tables.
    code = [Path(module).read_text() for module in (__file__, files.__file__)]
    key = hashlib.sha256(json.dumps([code, shards]).encode()).hexdigest()[:32]
    folder = Path(HF_DATASETS_CACHE) / "harmonic_sft"
    table, report = folder / f"{key}.arrow", folder / f"{key}.bad_rows.json"
    if not table.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            # A run that shares the cache sees either nothing or the whole, the report first.
            new_table, new_report = Path(scratch, "table"), Path(scratch, "report")
            bad_rows = _write_table(list(shards), new_table, policy)
            new_report.write_text(json.dumps(bad_rows))
            os.replace(new_report, report)
            os.replace(new_table, table)
    for where, (reason, rows) in json.loads(report.read_text()).items():
        policy.report(where, reason, rows)
    return datasets.Dataset.from_file(str(table))


def _write_table(
    shards: Sequence[Shard], path: Path, policy: BadRowPolicy
) -> dict[str, tuple[str, int]]:
    """Write a table and return its bad rows."""
    recorded = files.BadRows()
    recorder = BadRowPolicy(policy.name, None if policy.counter is None else recorded)
    kinds = {shard.kind for shard in shards}
    if kinds == {"parquet"}:
        schema = _storable(files.parquet_schema(shards)).append(pa.field(files.PLACE, pa.string()))
        tables = (
            _as_schema(batch, schema)
            for shard in shards
            for batch in files.parquet_batches(shard, recorder)
        )
    else:
        schema = _row_schema(files.read_shards(list(shards), recorder))
        tables = (
            _encode(rows, schema)
            for rows in _batches(files.read_shards(list(shards), recorder), files.BATCH_ROWS)
        )
    with pa.ipc.new_stream(path, schema) as writer:
        for table in tables:
            writer.write_table(table)
    return recorded.places


def _storable(schema: pa.Schema) -> pa.Schema:
    """Spell out dictionary columns (categories of pandas), which `datasets` does not know."""
    return pa.schema(
        [
            field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
            for field in schema
        ],
        metadata=schema.metadata,
    )


def _as_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.Table:
    columns = [
        batch.column(field.name).cast(field.type)
        if field.name in batch.schema.names
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _row_schema(rows: Iterable[dict[str, Any]]) -> pa.Schema:
    """Find a type for every column; those that differ, or hold objects, are kept as JSON."""
    types: dict[str, pa.DataType] = {}
    for row in rows:
        for column, value in row.items():
            types[column] = _merge(types.get(column, pa.null()), _value_type(value))
    return pa.schema(types)


def _value_type(value: Any) -> pa.DataType:
    if isinstance(value, list):
        item = pa.null()
        for entry in value:
            item = _merge(item, _value_type(entry))
        return JSON_TEXT if item == JSON_TEXT else pa.list_(item)
    exact = {type(None): pa.null(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
    return pa.string() if isinstance(value, str) else exact.get(type(value), JSON_TEXT)


def _merge(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if pa.types.is_list(one) and pa.types.is_list(other):
        item = _merge(one.value_type, other.value_type)
        return JSON_TEXT if item == JSON_TEXT else pa.list_(item)
    return JSON_TEXT


def _encode(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    columns = []
    for field in schema:
        values = [row.get(field.name) for row in rows]
        if field.type == JSON_TEXT:
            values = [None if value is None else json.dumps(value) for value in values]
        columns.append(pa.array(values, field.type))
    return pa.table(columns, schema=schema)


def _batches(rows: Iterator[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    while batch := list(islice(rows, size)):
        yield batch
