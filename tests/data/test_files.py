import csv
import gzip
import io
import json
import os
import re
import tracemalloc
import zlib
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, Image, Json, Value

from harmonic_sft.data import files
from harmonic_sft.data.bad_rows import BadRows
from harmonic_sft.data.files import BAD, PLACE, FileRows, file_kind, file_shards, read_shards

ROWS = [{"text": "one"}, {"text": "zwei \u00fc"}, {"text": "three"}]
CONTENTS = {
    ".txt": "\n".join(row["text"] for row in ROWS).encode(),
    ".jsonl": "\n\n".join(json.dumps(row) for row in ROWS).encode(),
    ".json": json.dumps(ROWS, indent=1).encode(),
    ".lines.json": "\n".join(json.dumps(row) for row in ROWS).encode(),
    ".csv": "\r\n".join(["text", *(row["text"] for row in ROWS)]).encode(),
}
PLACES = {
    ".txt": "line 1 2 3",
    ".jsonl": "line 1 3 5",
    ".json": "row 1 2 3",
    ".lines.json": "line 1 2 3",
    ".csv": "line 2 3 4",
    ".parquet": "row 0 1 2",
}


def compress(content, ending):
    if ending == ".gz":
        return gzip.compress(content, mtime=0)  # the time of day would be in a test's name
    return pa.Codec("zstd").compress(content, asbytes=True) if ending == ".zst" else content


def read_places(path):
    return list(read_shards(file_shards(str(path), name="s")))


def read(path):
    """The good rows, and the places of the bad ones with their reasons."""
    rows, bad_rows = [], BadRows()
    for row in read_places(path):
        place = row.pop(PLACE)
        if BAD in row:
            bad_rows.report("s", place, *row[BAD])
        else:
            rows.append(row)
    return rows, bad_rows


def only_bad(path, where, reason):
    """Check which row is bad and why, and return the good ones."""
    rows, bad_rows = read(path)
    (place,) = bad_rows.places
    assert place == repr(str(path)) + (where and f", {where}")
    assert re.match(reason, bad_rows.places[place][0])
    return rows


@pytest.mark.parametrize(
    ("ending", "compression", "mark"),
    [
        (".txt", "", b""),
        (".txt", ".gz", b"\xef\xbb\xbf"),
        (".jsonl", ".zst", b""),
        (".jsonl", "", b"\xef\xbb\xbf"),
        (".json", ".gz", b""),
        (".json", "", b"\xef\xbb\xbf"),
        (".lines.json", "", b""),
        (".csv", "", b"\xef\xbb\xbf"),
        (".csv", ".zst", b""),
        (".parquet", "", b""),
    ],
)
def test_every_kind_of_file_gives_its_rows_and_their_places(
    tmp_path, monkeypatch, ending, compression, mark
):
    path = tmp_path / f"a{ending}{compression}"
    if ending == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=2)
    else:
        path.write_bytes(compress(mark + CONTENTS[ending], compression))
    monkeypatch.chdir(tmp_path)
    unit, *numbers = PLACES[ending].split()
    assert read_places(path.name) == [
        {**row, PLACE: f"{str(path)!r}, {unit} {number}"}
        for row, number in zip(ROWS, numbers, strict=True)
    ]


def test_file_that_changes_has_another_version_whatever_its_time(tmp_path):
    path = tmp_path / "a.txt"
    versions = []
    for text in ("one", "two"):
        path.write_text(text)
        os.utime(path, (1, 1))
        versions.append(file_shards(str(path), name="s")[0].version)
    assert versions[0] != versions[1]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("a.TXT", "text"),
        ("https://x.org/a.jsonl.gz?download=true#x", "json lines"),
        ("a.parquet", "parquet"),
        ("a.parquet.gz", None),
        ("a.gz", None),
        ("a.csv.zst", "csv"),
        ("a.tsv", None),
    ],
)
def test_kind_goes_by_the_ending(path, kind):
    assert file_kind(path) == kind


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "tw', r"expected JSON, got: Unterminated string"),
        (b'{"text": "\xff\xfe"}', r"expected UTF-8, got b'\\xff'"),
        (b'["two"]', "expected an object, got list"),
        (b"[" * 100_000, "expected JSON, got: "),
    ],
)
def test_bad_line_of_json_is_named(tmp_path, line, reason):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n' + line + b'\n{"text": "three"}')
    rows = only_bad(tmp_path / "a.jsonl", "line 2", reason)
    assert rows == [{"text": "one"}, {"text": "three"}]


@pytest.mark.parametrize(
    ("name", "content", "where", "reason", "texts"),
    [
        ("a.txt", b"1\ncaf\xe9\n3\n", "line 2", r"expected UTF-8, got b'\\xe9'", ["1", "3"]),
        ("a.json", b'[{"text": "one"}, 2]', "row 2", "expected an object, got int", ["one"]),
        (
            "a.json.gz",
            compress(b'[{"text": "1"}, {"text": "3"}]', ".gz")[:12],
            "",
            "expected readable content, got: ",
            [],
        ),
        ("a.json", b'[{"text": "one"}, {"te', "", "expected JSON, got", []),
        ("a.json", b'[{"text": "\xff"}]', "", "expected UTF-8, got", []),
        ("a.csv", b"text,b\n1,2\n1,2,3\n3,4\n", "line 3", "expected 2 columns, got 3", ["1", "3"]),
        ("a.csv", b"text,b\n1,2\n1\n3,4\n", "line 3", "expected 2 columns, got 1", ["1", "3"]),
        ("a.csv", b'text,b\n1,2\n1,"2"3\n3,4\n', "line 3", "expected CSV, got: ", ["1", "3"]),
        ("a.csv", b"text\n1\n\xff\n3\n", "line 3", r"expected UTF-8, got '\\udcff'", ["1", "3"]),
        ("a.csv", b"text,text\n1,2\n", "line 1", "expected columns of different names", []),
        ("a.csv", b'text\n1\n"2\n3\n', "lines 3 to 4", "expected CSV, got: unexpected end", ["1"]),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, where, reason, texts):
    (tmp_path / name).write_bytes(content)
    rows = only_bad(tmp_path / name, where, reason)
    assert [row["text"] for row in rows] == texts


def test_all_lines_that_an_open_quote_takes_along_are_counted(tmp_path):
    (tmp_path / "a.csv").write_text('text\n1\n"2\n3\n"x"y\n4\n')
    rows, bad_rows = read(tmp_path / "a.csv")
    assert [row["text"] for row in rows] == ["1", "4"]
    assert bad_rows.total == 3  # lines 3 to 5


def test_records_of_csv_may_be_long_and_have_several_lines(tmp_path):
    rows = [{"a": 'one "x",\n\ntwo', "b": "y" * 200_000}, {"a": "", "b": "7"}]
    content = io.StringIO(newline="")
    writer = csv.DictWriter(content, ["a", "b"])
    writer.writeheader()
    writer.writerows(rows)
    (tmp_path / "a.csv").write_text("\n" + content.getvalue() + "\n", newline="")
    assert read(tmp_path / "a.csv") == (rows, BadRows())
    places = [row[PLACE].rpartition(", ")[2] for row in read_places(tmp_path / "a.csv")]
    assert places == ["line 3", "line 6"]


@pytest.mark.parametrize("ending", [".txt.gz", ".csv.zst"])
def test_cut_compressed_file_is_named_where_it_breaks(tmp_path, ending):
    lines = [f"line {index * 2654435761 % 2**32} " * 10 for index in range(20_000)]
    whole = compress("\n".join(["text", *lines]).encode(), ending[4:])
    path = tmp_path / f"a{ending}"
    path.write_bytes(whole[: len(whole) // 2])
    rows, bad_rows = read(path)
    assert len(rows) > 1000
    if ending == ".txt.gz":  # zlib alone reads hardly more of it
        text = zlib.decompressobj(31).decompress(path.read_bytes())
        assert 0 <= text.count(b"\n") - len(rows) < (1 << 16) / 150
    (place,) = bad_rows.places
    first = len(rows) + (1 if "txt" in ending else 2)
    assert re.fullmatch(rf"{str(path)!r}, (from )?line {first}( on)?", place)
    assert bad_rows.places[place][0].startswith("expected readable content, got: ")
    assert [row["text"] for row in rows] == ["text", *lines][first - 1 - len(rows) : first - 1]


@pytest.mark.parametrize(
    ("name", "end", "limit", "place"),
    [
        ("a.txt.gz", "\n two", "MAX_LINE", ", line 2"),
        ("a.jsonl.gz", '"}\n{"text": " two"}', "MAX_LINE", ", line 2"),
        ("a.csv.gz", "", "MAX_LINE", ", from line 2 on"),
        ("a.json.gz", '"]', "MAX_LIST", ""),
    ],
)
def test_a_small_file_cannot_fill_the_memory(tmp_path, monkeypatch, name, end, limit, place):
    """Of 24 MB, which are 24 kB on the disk, only what is below the limit is read."""
    monkeypatch.setattr(files, limit, 1 << 20)
    starts = {".jsonl": '{"text": "one"}\n{"text": "', ".json": '["', ".csv": "text\n"}
    start = next((s for ending, s in starts.items() if ending + "." in name), "one\n")
    with gzip.open(tmp_path / name, "wb") as file:
        file.write(start.encode() + (24 << 20) * b"a" + end.encode())
    tracemalloc.start()
    rows = only_bad(tmp_path / name, place.removeprefix(", "), "expected at most 1 MiB in a li")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [row["text"] for row in rows] == re.findall("one| two", start + end)
    assert peak < 16 << 20


def test_a_first_line_that_is_too_long_is_refused_behind_a_byte_order_mark(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE", 10)
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + 9 * b"a" + b"\ntwo\n")
    rows = only_bad(tmp_path / "a.txt", "line 1", "expected at most 0 MiB in a line")
    assert rows == [{"text": "two"}]


def test_a_date_of_another_age_is_a_bad_row(tmp_path):
    times = pa.array([0, 9_999_999_999_999, 0], pa.timestamp("s"))
    pq.write_table(
        pa.table({"text": ["one", "two", "three"], "time": times}), tmp_path / "a.parquet"
    )
    rows = only_bad(tmp_path / "a.parquet", "row 1", "expected readable content, got: ")
    assert [row["text"] for row in rows] == ["one", "three"]


def test_broken_row_group_is_named_with_all_its_rows(tmp_path):
    """Three row groups of ten rows, the bytes of the second one being overwritten."""
    table = pa.table({"text": [f"document {index}" for index in range(30)]})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=10, use_dictionary=False)
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    start = column.data_page_offset
    content[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(content)
    rows = only_bad(path, "rows 10 to 19 (row group 1)", "expected readable content, got: ")
    numbers = [*range(10), *range(20, 30)]
    assert rows == [{"text": f"document {number}"} for number in numbers]
    assert read(path)[1].total == 10


def test_string_of_a_parquet_file_that_is_not_utf8_is_named(tmp_path):
    texts = pa.array([b"one", b"caf\xe9", b"three"], pa.binary())
    column = pa.Array.from_buffers(pa.string(), 3, texts.buffers())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    rows = only_bad(tmp_path / "a.parquet", "row 1", r"expected UTF-8, got b'\\xe9'")
    assert rows == [{"text": "one"}, {"text": "three"}]


def test_columns_of_one_name_are_refused(tmp_path):
    table = pa.table([pa.array(["one"]), pa.array(["two"])], ["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    place, reason = "rows 0 to 0 (row group 0)", "expected columns of different names, got "
    only_bad(tmp_path / "a.parquet", place, reason)


def test_columns_that_nobody_reads_may_be_of_any_type(tmp_path):
    features = Features({"text": Value("string"), "image": Image(), "turns": Json()})
    rows = [{"text": "one", "image": {"bytes": b"none", "path": None}, "turns": {"a": 1}}]
    table = Dataset.from_list(rows, features=features).with_format("arrow")[:]
    table = table.append_column("x", pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8())))
    pq.write_table(table, tmp_path / "a.parquet")
    found, bad_rows = read(tmp_path / "a.parquet")
    assert found == [rows[0] | {"x": [("a", 1)]}]
    assert not bad_rows.total


def test_json_and_categories_of_a_parquet_file_are_decoded(tmp_path):
    rows = [{"turns": {"a": 1}}, {"turns": {"b": [2]}}]
    features = Features({"turns": Json()})
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet")[0] == rows
    pq.write_table(
        pa.table({"c": pa.array(["x", "y"]).dictionary_encode()}), tmp_path / "b.parquet"
    )
    assert read(tmp_path / "b.parquet")[0] == [{"c": "x"}, {"c": "y"}]


def test_row_group_is_read_in_flat_memory(tmp_path):
    table = pa.table({"text": [f"{index} " + "x" * 2000 for index in range(10_000)]})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd")
    del table
    before, peak = pa.total_allocated_bytes(), 0
    tracemalloc.start()
    for number, _ in enumerate(read_shards(file_shards(f"{tmp_path}/a.parquet", name="s"))):
        if number % 500 == 0:
            peak = max(peak, pa.total_allocated_bytes() - before)
    python_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak + python_peak < 16e6  # the column is 20 MB


def test_long_rows_come_in_small_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BATCH_BYTES", 1000)
    rows = [{"text": str(index) * 300} for index in range(8)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", use_dictionary=False)
    iterate = pq.ParquetFile.iter_batches
    with patch.object(pq.ParquetFile, "iter_batches", autospec=True, side_effect=iterate) as called:
        assert read(tmp_path / "a.parquet")[0] == rows
    assert [call.args[1] for call in called.call_args_list] == [2]


def test_failing_disk_is_no_bad_row(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one\n")

    def fail(file):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("harmonic_sft.data.files._open_binary", fail)
    with pytest.raises(OSError, match="Input/output error"):
        read(tmp_path / "a.txt")


def test_parquet_files_say_what_their_columns_are(tmp_path):
    features = Features({"label": ClassLabel(names=["no", "yes"]), "text": Value("string")})
    rows = {"label": [0], "text": ["a"]}
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "a.parquet")
    found = FileRows(file_shards(f"{tmp_path}/a.parquet", name="s"))
    assert found.features == features
