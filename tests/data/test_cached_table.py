import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Json, List, Value

from harmonic_sft.data import cached_table as module
from harmonic_sft.data.cached_table import cached_table
from harmonic_sft.data.files import PLACE, BadRowPolicy, BadRows, file_shards


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache" / "harmonic_sft"


def placed_table(*paths, bad_rows=None):
    shards = [shard for path in paths for shard in file_shards(str(path), name="s")]
    return cached_table(shards, BadRowPolicy("s", bad_rows))


def table(*paths, bad_rows=None):
    return placed_table(*paths, bad_rows=bad_rows).remove_columns(PLACE)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_objects_come_back_exactly_as_they_were(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "a"}], "late": None},
        {"messages": [{"role": "tool", "content": [1, "b"], "id": 7}], "late": 1.5},
        {"messages": "{}", "late": 2},
    ]
    documents = table(write(tmp_path / "a.jsonl", rows))
    assert documents.features["messages"] == Json()
    assert list(documents) == [*rows[:2], {"messages": "{}", "late": 2}]


def test_rows_keep_where_they_were_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n[]\n{"text": "two"}')
    pq.write_table(pa.table({"text": ["a", "b", "c"]}), tmp_path / "a.parquet", row_group_size=2)
    lines = placed_table(tmp_path / "a.jsonl", bad_rows=BadRows())
    assert list(lines[PLACE]) == [f"'{tmp_path}/a.jsonl', line {line}" for line in (1, 3)]
    rows = placed_table(tmp_path / "a.parquet")
    assert list(rows[PLACE]) == [f"'{tmp_path}/a.parquet', row {row}" for row in range(3)]


def test_types_of_columns_are_found_over_all_rows(tmp_path):
    rows = [{"ids": [], "n": None, "s": None, "mixed": "a"}] * 1500
    rows.append({"ids": [1], "n": 2, "s": "text", "mixed": True, "new": [["a"]]})
    documents = table(write(tmp_path / "a.jsonl", rows))
    assert documents.features == {
        "ids": List(Value("int64")),
        "n": Value("int64"),
        "s": Value("string"),
        "mixed": Json(),
        "new": List(List(Value("string"))),
    }
    assert documents[1499] == {**rows[0], "new": None}
    assert documents[1500] == rows[-1]


def test_parquet_files_with_different_columns_are_joined(tmp_path):
    category = pa.array(["x", "y"]).dictionary_encode()
    pq.write_table(pa.table({"text": ["a", "b"], "c": category}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"n": [1], "text": ["c"]}), tmp_path / "b.parquet")
    assert list(table(tmp_path / "a.parquet", tmp_path / "b.parquet")) == [
        {"text": "a", "c": "x", "n": None},
        {"text": "b", "c": "y", "n": None},
        {"text": "c", "c": None, "n": 1},
    ]


def test_table_is_made_once_until_the_file_changes(tmp_path, cache, monkeypatch):
    path = write(tmp_path / "a.jsonl", [{"text": "one"}])
    first = table(path)
    with monkeypatch.context() as patched:
        patched.setattr(module, "_write_table", None)
        again = table(path)
    assert list(again) == [{"text": "one"}]
    # The fingerprint is what the library caches tokenized rows by.
    assert again._fingerprint == first._fingerprint
    write(path, [{"text": "two"}])
    os.utime(path, (1, 1))
    assert list(table(path)) == [{"text": "two"}]
    assert len(list(cache.glob("*.arrow"))) == 2


def test_files_of_one_name_in_two_folders_are_two_tables(tmp_path, monkeypatch):
    for text in ("one", "two"):
        (tmp_path / text).mkdir()
        write(tmp_path / text / "a.jsonl", [{"text": text}])
        os.utime(tmp_path / text / "a.jsonl", (1, 1))
        monkeypatch.chdir(tmp_path / text)
        assert table("a.jsonl")[0]["text"] == text


def test_bad_rows_of_an_earlier_run_are_counted_again(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n[]\n{"te')
    for _ in range(2):
        bad_rows = BadRows()
        assert list(table(tmp_path / "a.jsonl", bad_rows=bad_rows)) == [{"text": "one"}]
        assert bad_rows.total == 2
        assert len(bad_rows.first) == 2
    with pytest.raises(ValueError, match="got list instead of an object in"):
        table(tmp_path / "a.jsonl")


def test_nothing_is_left_of_a_table_that_failed(tmp_path, cache):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n[]\n')
    with pytest.raises(ValueError, match="list instead of an object"):
        table(tmp_path / "a.jsonl")
    assert list(cache.iterdir()) == []
