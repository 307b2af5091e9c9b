import json
import re

import pytest
from datasets import Dataset
from datasets.exceptions import DatasetNotFoundError
from pydantic import TypeAdapter, ValidationError

from harmonic_sft.data import sources
from harmonic_sft.data.sources import Source, load_documents

TEXTS = ["one document", "another one", "the third"]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "parquet").mkdir(parents=True)
    (folder / "a.txt").write_text("\n".join(TEXTS))
    lines = [json.dumps({"text": text, "number": index}) for index, text in enumerate(TEXTS)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "a.json").write_text(json.dumps([{"text": text} for text in TEXTS]))
    Dataset.from_dict({"text": TEXTS[:2]}).to_parquet(folder / "parquet" / "0.parquet")
    Dataset.from_dict({"text": TEXTS[2:]}).to_parquet(folder / "parquet" / "1.parquet")
    return folder


def load(**settings):
    return load_documents(Source(**settings), name="data.sources[0]")


def refused(message, **settings):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load(**settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("path", ["a.txt", "a.jsonl", "a.json", "parquet", "parquet/*.parquet"])
def test_local_files_give_their_texts_in_order(folder, path, streaming):
    documents = load(path=f"{folder}/{path}", streaming=streaming)
    assert list(documents) == [{"text": text} for text in TEXTS]


@pytest.mark.parametrize("streaming", [False, True])
def test_docstrings_of_the_standard_library_are_a_source(monkeypatch, streaming):
    monkeypatch.setattr(sources, "standard_library_docstrings", lambda: TEXTS)
    documents = load(path="python:docstrings", streaming=streaming)
    assert list(documents) == [{"text": text} for text in TEXTS]


@pytest.mark.parametrize("streaming", [False, True])
def test_another_column_can_be_the_text(tmp_path, streaming):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "one", "text": 1}\n')
    documents = load(path=str(path), column="body", streaming=streaming)
    assert list(documents) == [{"text": "one"}]


def test_slice_of_a_split_can_be_read(folder):
    assert len(load(path=f"{folder}/a.txt", split="train[:2]")) == 2


def test_path_may_start_at_home(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    assert len(load(path="~/a.txt")) == 3


@pytest.mark.parametrize("path", ["missing.txt", "./missing", "~/missing-folder", "/missing/x"])
def test_missing_file_is_refused_without_asking_the_hub(path, monkeypatch):
    monkeypatch.setattr(sources, "load_dataset", None)
    refused("data.sources[0].path: expected an existing file, got ", path=path)


def test_glob_that_matches_nothing_is_refused(folder):
    refused("path: expected files that match, got none", path=f"{folder}/*.jsonl.gz")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl", "empty.parquet"])
def test_empty_file_is_refused(tmp_path, name, streaming):
    (tmp_path / name).touch()
    refused("path: expected documents, got the empty file", path=f"{tmp_path}/{name}")


@pytest.mark.parametrize("streaming", [False, True])
def test_table_without_rows_is_refused(tmp_path, streaming):
    Dataset.from_dict({"text": []}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"expected documents, got none|corresponds to no data"):
        load(path=f"{tmp_path}/a.parquet", streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_wrong_column_is_refused_with_the_nearest(folder, streaming):
    refused(
        "column: expected one of ['number', 'text'], got 'txet'. Did you mean 'text'?",
        path=f"{folder}/a.jsonl",
        column="txet",
        streaming=streaming,
    )


@pytest.mark.parametrize("streaming", [False, True])
def test_column_without_text_is_refused(folder, streaming):
    refused(
        "column: expected a column of text, got 'number', which holds int",
        path=f"{folder}/a.jsonl",
        column="number",
        streaming=streaming,
    )


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cut.jsonl", b'{"text": "one"}\n{"text": "tw'),
        ("bad.parquet", b"PAR1 but not really"),
        ("bad.txt", b"\xff\xfe\xff"),
    ],
)
def test_unreadable_file_is_refused_in_one_line(tmp_path, name, content, streaming):
    (tmp_path / name).write_bytes(content)
    refused(
        f"data.sources[0]: expected readable documents, got '{tmp_path}/{name}', which fails: ",
        path=f"{tmp_path}/{name}",
        streaming=streaming,
    )


def test_unknown_split_is_refused_with_the_splits_there_are(folder):
    message = refused("expected readable documents", path=f"{folder}/a.txt", split="valid")
    assert "['train']" in message


@pytest.mark.parametrize("name", ["script.py", "table.csv", "noending"])
def test_file_of_another_kind_is_never_read(tmp_path, name, monkeypatch):
    monkeypatch.setattr(sources, "load_dataset", None)
    (tmp_path / name).write_text("raise SystemExit")
    refused("path: expected files of one kind, ending in one of", path=f"{tmp_path}/{name}")


def test_files_of_two_kinds_are_refused(folder):
    refused("got ['.json', '.jsonl', '.txt']", path=f"{folder}/a.*")


@pytest.mark.parametrize("path", ["parquet", "pandas", "wiki text/a", "https://x.org/a"])
def test_what_is_no_name_on_the_hub_is_refused(path, monkeypatch):
    """`pandas` would be the library's own reader of pickles."""
    monkeypatch.setattr(sources, "load_dataset", None)
    refused("expected an existing file or folder, owner/name on the Hub", path=path)


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
    def fail(**arguments):
        assert arguments["path"] == "owner/corpus"
        raise error

    monkeypatch.setattr(sources, "load_dataset", fail)
    refused(message, path="owner/corpus")


@pytest.mark.parametrize("path", ["a.txt", "python:docstrings"])
@pytest.mark.parametrize("field", ["name", "data_files", "revision"])
def test_settings_of_the_hub_are_refused_for_a_file(folder, monkeypatch, path, field):
    monkeypatch.chdir(folder)
    refused(f"{field}: expected nothing for the path '{path}'", path=path, **{field: "x"})


def test_unknown_key_of_a_source_is_refused():
    with pytest.raises(ValidationError, match="colum"):
        TypeAdapter(Source).validate_python({"path": "a.txt", "colum": "text"})
