import copy
import io
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features
from datasets.exceptions import DatasetNotFoundError
from pydantic import TypeAdapter, ValidationError

from harmonic_sft.data import sources
from harmonic_sft.data.files import BAD, NUMBER, PLACE
from harmonic_sft.data.sections import Source
from harmonic_sft.data.sources import (
    GivenSource,
    check_column,
    document_name,
    load_documents,
    names_of_classes,
    numbered_rows,
)

TEXTS = ["one document", "another one", "the third"]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "parquet").mkdir(parents=True)
    (folder / "a.txt").write_text("\n".join(TEXTS))
    lines = [json.dumps({"text": text, "number": index}) for index, text in enumerate(TEXTS)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "a.csv").write_text("\n".join(["text,number", *(f'"{text}",1' for text in TEXTS)]))
    Dataset.from_dict({"text": TEXTS[:2]}).to_parquet(folder / "parquet" / "0.parquet")
    Dataset.from_dict({"text": TEXTS[2:]}).to_parquet(folder / "parquet" / "1.parquet")
    return folder


def load(*, check=False, skip=False, **settings):
    source = Source(**settings)
    documents, first = load_documents(source, name="data.sources[0]", skip=skip)
    if check:
        name = "data.sources[0].column"
        check_column(first, source.column, name=name, is_text=True)
    found = next(row for row in copy.deepcopy(documents) if BAD not in row)
    assert first == {key: found[key] for key in found if key != PLACE}
    return documents


def texts(documents):
    return [row["text"] for row in documents if BAD not in row]


def test_a_folder_that_is_saved_again_has_another_fingerprint(tmp_path):
    found = []
    for text in ("one", "two"):
        data = Dataset.from_dict({"text": [text]})
        data._fingerprint = "same"
        data.save_to_disk(tmp_path / "saved")
        found.append(load(path=str(tmp_path / "saved"))._fingerprint)
    assert found[0] != found[1]


def refused(message, **settings):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load(**settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("path", ["a.txt", "a.jsonl", "a.csv", "parquet/*.parquet", "*/*.parquet"])
def test_local_files_give_their_texts_in_order(folder, path, streaming):
    documents = load(path=f"{folder}/{path}", streaming=streaming)
    assert texts(documents) == TEXTS


@pytest.mark.parametrize("streaming", [False, True])
def test_docstrings_of_the_standard_library_are_a_source(monkeypatch, streaming):
    monkeypatch.setattr(sources, "standard_library_docstrings", lambda: TEXTS)
    documents = load(path="python:docstrings", streaming=streaming)
    assert list(documents) == [{"text": text} for text in TEXTS]


def test_path_may_start_at_home(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    assert texts(load(path="~/a.txt")) == TEXTS


@pytest.mark.parametrize(
    ("path", "settings", "message"),
    [
        ("missing.txt", {}, "data.sources[0].path: expected an existing file, got "),
        ("./missing", {}, "data.sources[0].path: expected an existing file, got "),
        ("~/missing-folder", {}, "data.sources[0].path: expected an existing file, got "),
        ("~no-such-user/a", {}, "data.sources[0].path: expected an existing file, got "),
        ("a" * 300 + ".txt", {}, "data.sources[0].path: expected an existing file, got "),
        ("*.jsonl.gz", {}, "path: expected files that match, got none"),
        ("a.*", {}, "got ['.csv', '.jsonl', '.txt']"),
        ("script.py", {}, "path: expected files of one kind, ending in one of"),
        ("b.parquet.gz", {}, "path: expected files of one kind, ending in one of"),
        ("json", {}, "expected an existing file or folder, owner/name on the Hub"),
        ("pandas", {}, "expected an existing file or folder, owner/name on the Hub"),
        ("wiki text/a", {}, "expected an existing file or folder, owner/name on the Hub"),
        ("a.txt", {"name": "x"}, "name: expected nothing for the path 'a.txt'"),
        ("a.txt", {"data_files": "x"}, "data_files: expected nothing for the path 'a.txt'"),
        ("saved", {"name": "x"}, "name: expected nothing for the path 'saved'"),
        (
            "python:docstrings",
            {"revision": "x"},
            "revision: expected nothing for the path 'python:docstrings'",
        ),
        ("a.txt", {"split": "valid"}, "split: expected one of ['train'], got 'valid'."),
        ("parquet", {}, "got the folder 'parquet' in the current folder"),
        (".", {}, "expected a file, or a folder of save_to_disk, got the folder '.'"),
        ("parquet/", {}, "Name its files by a glob, such as 'parquet/*.jsonl'"),
        ("parquet", {"data_files": "0.parquet"}, "data_files: expected nothing for the path"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_no_source_is_refused_without_asking_the_hub(
    folder, monkeypatch, path, settings, message, streaming
):
    """`pandas` would be the library's own reader of pickles."""
    monkeypatch.setattr(sources, "load_dataset", None)
    monkeypatch.chdir(folder)
    for name in ("script.py", "b.parquet.gz"):
        Path(name).write_text("raise SystemExit")
    Dataset.from_dict({"text": TEXTS}).save_to_disk("saved")
    refused(message, path=path, streaming=streaming, **settings)


def test_a_relative_path_says_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("small.txt", "*.txt"):
        refused(f"{path!r} in the current folder, '{tmp_path}'.", path=path)


@pytest.mark.parametrize("streaming", [False, True])
def test_column_is_there_and_holds_text(folder, streaming):
    settings = {"check": True, "path": f"{folder}/a.jsonl", "streaming": streaming}
    load(**settings)
    refused(
        "column: expected one of ['number', 'text'], got 'txet'. Did you mean 'text'?",
        column="txet",
        **settings,
    )
    refused(
        "column: expected a column of text, got 'number', which holds int",
        column="number",
        **settings,
    )


def parquet_without_rows():
    content = io.BytesIO()
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), content)
    return content.getvalue()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "skip", "message"),
    [
        ("cut.jsonl", b'{"text": "tw', False, ": expected JSON, got: Unterminated string"),
        ("a.parquet", b"PAR1 but", True, ": expected a readable parquet file, got {path}, which"),
        ("bad.txt", b"\xff\xff\xfe", False, ": expected UTF-8, got b'\\xff'"),
        ("wide.txt", b"\xff\xfea\0", False, ": expected UTF-8, got UTF-16 in {path}, from line 1"),
        ("empty.txt", b"", True, ".path: expected documents, got the empty file"),
        ("empty.parquet", b"", True, ".path: expected documents, got the empty file"),
        ("a.parquet", parquet_without_rows(), True, ".path: expected documents, got none in"),
        (
            "bad.jsonl",
            b"[]\n",
            True,
            ".path: expected documents, got none in {path}. {path}, line 1: expected an object",
        ),
    ],
)
def test_file_without_a_row_is_refused_in_one_line(
    tmp_path, name, content, skip, message, streaming
):
    path = tmp_path / name
    path.write_bytes(content)
    message = message.format(path=repr(str(path)))
    refused(f"data.sources[0]{message}", path=str(path), skip=skip, streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_what_save_to_disk_wrote_is_a_source(tmp_path, streaming):
    splits = {"train": Dataset.from_dict({"text": TEXTS}), "test": Dataset.from_dict({"a": [1]})}
    splits["train"].save_to_disk(tmp_path / "table")
    DatasetDict(splits).save_to_disk(tmp_path / "splits")
    for path in ("table", "splits"):
        documents = load(path=f"{tmp_path}/{path}", streaming=streaming)
        assert list(documents) == [{"text": text} for text in TEXTS]
    path = f"{tmp_path}/splits"
    refused("split: expected one of ['test', 'train'], got 'x'", path=path, split="x")


def test_shards_of_a_stream_can_be_read_apart(tmp_path):
    pq.write_table(pa.table({"n": range(20)}), tmp_path / "a.parquet", row_group_size=7)
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes())
    stream = load(path=f"{tmp_path}/*.parquet", streaming=True)
    parts = [[row["n"] for row in stream.shard(num_shards=6, index=index)] for index in range(6)]
    assert parts == [[*range(7)], [*range(7, 14)], [*range(14, 20)]] * 2


def test_rows_of_a_table_are_numbered_but_bad_ones(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n[]\n{"text": "three"}\n')
    rows = numbered_rows(load(skip=True, path=f"{tmp_path}/a.jsonl"), "s")
    assert [(row[NUMBER], BAD in row) for row in rows] == [(0, False), (1, True), (1, False)]


def test_failure_of_a_library_is_named_by_source_and_place():
    def rows():
        yield {"text": "one"}
        raise OSError(5, "Input/output\nerror")

    message = (
        "s: expected readable rows, got OSError ([Errno 5] Input/output error) in document 1, "
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        list(numbered_rows(rows(), "s"))
    assert document_name((2 << 40) + 7) == "document 7 of logical stream 2"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionError("a\nb"), "the Hub cannot be reached. Check the name and the network"),
        (DatasetNotFoundError("x"), "expected a data set on the Hub that you may read"),
        (ValueError("BuilderConfig 'x' not found.\nAvailable: ['y']"), "Available: ['y']"),
        (RuntimeError(), "which fails: RuntimeError"),
    ],
)
def test_failure_of_the_hub_is_one_line(monkeypatch, error, message):
    def fail(*arguments, **settings):
        raise error

    monkeypatch.setattr(sources, "load_dataset", fail)
    refused(message, path="owner/corpus")


@pytest.mark.parametrize(
    "key",
    [{"colum": "text"}, *({"weight": bad} for bad in (0.0, -1.0, float("nan"), float("inf")))],
)
def test_unknown_keys_and_weights_that_are_no_share_are_refused(key):
    with pytest.raises(ValidationError, match=next(iter(key))):
        TypeAdapter(Source).validate_python({"path": "a.txt", **key})


@pytest.mark.parametrize("form", ["torch", "numpy", "pandas", "arrow"])
def test_the_format_of_a_data_set_does_not_matter_and_a_transform_stays(form):
    data = Dataset.from_dict({"input_ids": [[1, 2]], "other": [3]})

    def rows(documents):
        source = GivenSource(path="x", documents=documents)
        return list(load_documents(source, name="x", skip=False)[0])

    assert rows(data.with_format(form)) == list(data)
    assert rows(data.with_format(form, columns=["input_ids"])) == [{"input_ids": [1, 2]}]
    if form in ("torch", "numpy"):
        assert rows(data.to_iterable_dataset().with_format(form)) == list(data)
    assert rows(data.with_transform(lambda batch: {"text": [form]})) == [{"text": form}]


def test_the_columns_are_those_that_a_transform_makes():
    data = Dataset.from_dict({"other": [3]}).with_transform(lambda batch: {"text": ["aa"]})
    _, first = load_documents(GivenSource(path="x", documents=data), name="x", skip=False)
    check_column(first, "text", name="x.column", is_text=True)
    with pytest.raises(ValueError, match=r"x\.column: expected one of \['text'\], got 'other'"):
        check_column(first, "other", name="x.column")


def test_files_that_number_their_classes_differently_are_refused(tmp_path):
    for name, names in (("a", ["no", "yes"]), ("b", ["yes", "no"])):
        features = Features({"label": ClassLabel(names=names)})
        Dataset.from_dict({"label": [0]}, features=features).to_parquet(
            tmp_path / f"{name}.parquet"
        )
    alike = load(path=str(tmp_path / "a.parquet"))
    assert names_of_classes(alike, "label") == ("no", "yes")
    with pytest.raises(ValueError, match=r"data\.label_column: expected files whose numbers stand"):
        names_of_classes(load(path=str(tmp_path / "*.parquet")), "label")


def test_a_transform_may_give_the_numbers_of_labels_another_meaning():
    features = Features({"label": ClassLabel(names=["1 star", "2 stars", "3 stars"])})
    data = Dataset.from_dict({"label": [0, 2]}, features=features)
    assert names_of_classes(data, "label") == ("1 star", "2 stars", "3 stars")
    other = data.with_transform(lambda batch: {"label": [label > 1 for label in batch["label"]]})
    assert names_of_classes(other, "label") is None
    same = data.with_transform(lambda batch: {"text": ["aa"] * len(batch["label"]), **batch})
    assert names_of_classes(same, "label") == ("1 star", "2 stars", "3 stars")
