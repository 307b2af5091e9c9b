import gzip
import json
import os
import pickle
import re
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Features, Json

from harmonic_sft.data.files import (
    PLACE,
    BadRowPolicy,
    BadRows,
    file_kind,
    file_shards,
    parquet_batches,
    read_shards,
)

ROWS = [{"text": "one"}, {"text": "zwei \u00fc"}, {"text": "three"}]
CONTENTS = {
    ".txt": "\n".join(row["text"] for row in ROWS).encode(),
    ".jsonl": "\n\n".join(json.dumps(row) for row in ROWS).encode(),
    ".json": json.dumps(ROWS, indent=1).encode(),
}


def compress(content, ending):
    if ending == ".gz":
        return gzip.compress(content)
    return pa.Codec("zstd").compress(content, asbytes=True) if ending == ".zst" else content


def read_places(path, bad_rows=None):
    return list(read_shards(file_shards(str(path), name="s"), BadRowPolicy("s", bad_rows)))


def read(path, bad_rows=None):
    return [{key: row[key] for key in row if key != PLACE} for row in read_places(path, bad_rows)]


def refused_and_skipped(path, where, reason):
    """Check that a row is refused by name, and left out and counted where that is asked."""
    with pytest.raises(ValueError, match=re.escape(f"s: expected readable rows, got {reason}")):
        read(path)
    with pytest.raises(ValueError, match=re.escape(f" in {str(path)!r}, {where}. Repair")):
        read(path)
    bad_rows = BadRows()
    rows = read(path, bad_rows)
    assert bad_rows.first[0].startswith(f"{str(path)!r}, {where}: {reason}")
    assert read(path, bad_rows) == rows
    return rows, bad_rows.total


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("ending", CONTENTS)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_every_kind_of_file_gives_its_rows(tmp_path, ending, compression, mark):
    path = tmp_path / f"a{ending}{compression}"
    path.write_bytes(compress(mark + CONTENTS[ending], compression))
    assert read(path) == ROWS


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("a.txt", ["line 1", "line 2", "line 3"]),
        ("a.jsonl", ["line 1", "line 3", "line 5"]),
        ("a.json", ["row 1", "row 2", "row 3"]),
        ("a.parquet", ["row 0", "row 1", "row 2"]),
    ],
)
def test_rows_say_where_they_were_read(tmp_path, monkeypatch, name, places):
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=2)
    else:
        path.write_bytes(CONTENTS[path.suffix])
    monkeypatch.chdir(tmp_path)
    assert [row[PLACE] for row in read_places(name)] == [f"{str(path)!r}, {at}" for at in places]


def test_file_that_changes_has_another_version_whatever_its_time(tmp_path):
    path = tmp_path / "a.txt"
    versions = []
    for text in ("one", "two"):
        path.write_text(text)
        os.utime(path, (1, 1))
        versions.append(file_shards(str(path), name="s")[0].version)
    assert versions[0] != versions[1]


def test_json_lines_may_end_in_json(tmp_path):
    (tmp_path / "a.json").write_bytes(CONTENTS[".jsonl"])
    assert read(tmp_path / "a.json") == ROWS


def test_long_integers_are_read_exactly(tmp_path):
    rows = [{"n": 2**63 - 1}, {"n": -(2**63)}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert read(tmp_path / "a.jsonl") == rows


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_files_may_be_joined(tmp_path, ending):
    joined = compress(b"one\n", ending) + compress(b"two\n", ending)
    (tmp_path / f"a.txt{ending}").write_bytes(joined)
    assert read(tmp_path / f"a.txt{ending}") == [{"text": "one"}, {"text": "two"}]


def test_windows_line_ends_are_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\r\n")
    assert read(tmp_path / "a.txt") == [{"text": "one"}, {"text": "two"}]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("a.TXT", "text"),
        ("https://x.org/a.jsonl.gz?download=true#x", "json lines"),
        ("a.parquet", "parquet"),
        ("a.parquet.gz", None),
        ("a.gz", None),
        ("a.csv", None),
    ],
)
def test_kind_goes_by_the_ending(path, kind):
    assert file_kind(path) == kind


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "tw', "broken JSON (Unterminated string"),
        (b'{"text": "\xff\xfe"}', "bytes that are not UTF-8 (b'\\xff')"),
        (b'["two"]', "list instead of an object"),
        (b'{"text": NaN}', "broken JSON (NaN is not JSON"),
        (b'{"text": "\\ud83d"}', "broken JSON ('utf-8' codec"),
        (b'{"n": 9223372036854775808}', "broken JSON (9223372036854775808 has more than 64 bits"),
        (b"[" * 100_000, "broken JSON ("),
    ],
)
def test_bad_line_of_json_is_named_or_skipped(tmp_path, line, reason):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n' + line + b'\n{"text": "three"}')
    rows, total = refused_and_skipped(tmp_path / "a.jsonl", "line 2", reason)
    assert rows == [{"text": "one"}, {"text": "three"}]
    assert total == 1


def test_line_that_is_not_utf8_is_named_or_skipped(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ncaf\xe9\n\xffthree\nfour\n")
    rows, total = refused_and_skipped(tmp_path / "a.txt", "line 2", "bytes that are not UTF-8")
    assert [row["text"] for row in rows] == ["one", "four"]
    assert total == 2


def test_entry_of_a_json_list_is_named_or_skipped(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "one"}, 2]')
    rows, _ = refused_and_skipped(tmp_path / "a.json", "row 2", "int instead of an object")
    assert rows == ROWS[:1]


@pytest.mark.parametrize("content", [b'[{"text": "one"}, {"te', b'[{"text": "\xff"}]'])
def test_broken_json_list_is_named_or_skipped_as_a_whole(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f" in {str(path)!r}. Repair")):
        read(path)
    bad_rows = BadRows()
    assert read(path, bad_rows) == []
    assert bad_rows.total == 1


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_cut_compressed_file_is_named_where_it_breaks(tmp_path, ending):
    lines = [f"line {index * 2654435761 % 2**32}" for index in range(50_000)]
    whole = compress("\n".join(lines).encode(), ending)
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(whole[: len(whole) // 2])
    bad_rows = BadRows()
    rows = read(path, bad_rows)
    assert bad_rows.first[0].startswith(f"{str(path)!r}, from line {len(rows) + 1} on: broken")
    assert rows == [{"text": line} for line in lines[: len(rows)]]
    with pytest.raises(ValueError, match=f"from line {len(rows) + 1} on"):
        read(path)


@pytest.fixture
def broken_row_group(tmp_path):
    """Three row groups of ten rows, the bytes of the second one being overwritten."""
    table = pa.table({"text": [f"document {index}" for index in range(30)]})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=10, use_dictionary=False)
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    start = column.data_page_offset
    content[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(content)
    return path


def test_broken_row_group_is_named_or_skipped(broken_row_group):
    rows, total = refused_and_skipped(
        broken_row_group, "rows 10 to 19 (row group 1)", "broken content ("
    )
    numbers = [*range(10), *range(20, 30)]
    assert rows == [{"text": f"document {number}"} for number in numbers]
    assert total == 10


def test_string_of_a_parquet_file_that_is_not_utf8_is_named_or_skipped(tmp_path):
    texts = pa.array([b"one", b"caf\xe9", b"three"], pa.binary())
    column = pa.Array.from_buffers(pa.string(), 3, texts.buffers())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    rows, total = refused_and_skipped(tmp_path / "a.parquet", "row 1", "bad values (")
    assert rows == [{"text": "one"}, {"text": "three"}]
    assert total == 1


def test_json_column_of_a_parquet_file_is_decoded(tmp_path):
    rows = [{"turns": {"a": 1}}, {"turns": {"b": [2]}}]
    features = Features({"turns": Json()})
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == rows


def test_row_group_is_read_in_flat_memory(tmp_path):
    table = pa.table({"text": [f"{index} " + "x" * 200 for index in range(25_000)]})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd")
    del table
    policy = BadRowPolicy("s", None)
    before = pa.total_allocated_bytes()
    peak = 0
    tracemalloc.start()
    for number, _ in enumerate(read_shards(file_shards(f"{tmp_path}/a.parquet", name="s"), policy)):
        if number % 500 == 0:
            peak = max(peak, pa.total_allocated_bytes() - before)
    python_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak + python_peak < 4e6  # the column is 5 MB


def test_long_rows_come_in_small_batches(tmp_path):
    rows = [{"text": str(index) * 5_000_000} for index in range(8)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", use_dictionary=False)
    (shard,) = file_shards(f"{tmp_path}/a.parquet", name="s")
    batches = list(parquet_batches(shard, BadRowPolicy("s", None)))
    assert [batch.num_rows for batch in batches] == [3, 3, 2]
    assert [row["text"] for batch in batches for row in batch.to_pylist()] == [
        row["text"] for row in rows
    ]


def test_failing_disk_is_no_bad_row(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one\n")

    def fail(file):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("harmonic_sft.data.files.open_binary", fail)
    with pytest.raises(OSError, match="Input/output error"):
        read(tmp_path / "a.txt", BadRows())


def test_counter_survives_pickling_and_counts_a_place_once():
    bad_rows = BadRows()
    for number in range(8):
        bad_rows.add(f"line {number}", "broken")
        bad_rows.add(f"line {number}", "broken")
    bad_rows.add("row group 1", "broken", rows=100)
    bad_rows.blank += 7
    other = BadRows({"line 1": ("broken", 1), "line 99": ("broken", 1)}, blank=3)
    bad_rows.merge(other)
    copy = pickle.loads(pickle.dumps(bad_rows))
    assert copy == bad_rows
    assert copy.total == 8 + 100 + 1 + 10
    assert copy.first == [f"line {number}: broken" for number in range(5)]
