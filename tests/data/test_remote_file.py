import contextlib
import functools
import http.server
import re
import threading
import urllib.error

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harmonic_sft.data import remote_file
from harmonic_sft.data.files import PLACE
from harmonic_sft.data.remote_file import RemoteFile
from harmonic_sft.data.sections import Source
from harmonic_sft.data.sources import load_documents


class Handler(http.server.SimpleHTTPRequestHandler):
    """Sends files, and parts of files as a web server of today does."""

    def do_HEAD(self):  # as an address that is signed for GET alone
        self.send_error(403)

    def do_GET(self):
        start = self.headers.get("Range", "bytes=0-")[len("bytes=") : -1]
        try:
            with open(self.translate_path(self.path), "rb") as file:
                content = file.read()
        except FileNotFoundError:
            self.send_error(404)
            return
        if self.server.failures:
            self.send_error(self.server.failures.pop(0))
            return
        start = int(start) if self.server.ranges else 0
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if self.server.tags:
            self.send_header("ETag", self.server.tags.pop(0))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(content[start:][: self.server.cut_after])

    def finish(self):
        # The client leaves in the middle of a file when it has read enough.
        with contextlib.suppress(ConnectionError):
            super().finish()

    def log_message(self, *arguments):
        pass


@pytest.fixture(autouse=True)
def waited(monkeypatch):
    """The pauses that were made, without making them."""
    pauses = []
    monkeypatch.setattr(remote_file.time, "sleep", pauses.append)
    return pauses


@pytest.fixture
def server(tmp_path):
    handler = functools.partial(Handler, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.failures = []  # statuses of the next answers
    server.tags, server.ranges = [], True  # ETags of the next answers
    server.cut_after = None  # bytes after which a connection breaks
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def load(url, *, streaming=True):
    return load_documents(Source(path=url, streaming=streaming), name="s", skip=False)[0]


@pytest.mark.parametrize(
    ("name", "streaming"), [("a.parquet", True), ("a.parquet", False), ("a.jsonl?x=1", True)]
)
def test_remote_file_is_a_source(server, tmp_path, name, streaming):
    rows = [{"text": f"document {index}"} for index in range(30)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=10)
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{row["text"]}"}}\n' for row in rows))
    url = f"{server.url}/{name}"
    found = list(load(url, streaming=streaming))
    assert [row["text"] for row in found] == [row["text"] for row in rows]
    unit = "row 29" if name == "a.parquet" else "line 30"
    assert found[-1][PLACE] == f"'{url.partition('?')[0]}', {unit}"


def test_no_signature_is_in_a_message(server):
    url = f"{server.url}/missing.jsonl?X-Signature=abc&token=def".replace("//", "//me:secret@")
    for path in (url, url.replace("jsonl", "docx")):
        with pytest.raises(ValueError, match=r"s\.\w+: expected .*(/missing\.|\.docx)") as caught:
            load(path)
        assert not re.search("abc|def|secret", str(caught.value))


def test_only_the_row_group_that_is_read_is_taken_from_the_server(server, tmp_path, monkeypatch):
    counts = []

    def counted(file, buffer, readinto=RemoteFile.readinto):
        counts.append(readinto(file, buffer))
        return counts[-1]

    monkeypatch.setattr(RemoteFile, "readinto", counted)
    noise = [str(index * 2654435761 % 2**32) * 100 for index in range(20_000)]
    table = pa.table({"text": noise})  # 20 MB
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=500, compression="none")
    stream = load(f"{server.url}/a.parquet")
    assert stream.num_shards == 40
    assert next(iter(stream))["text"] == noise[0]
    assert 0 < sum(counts) < 5e6


def test_broken_connection_is_opened_again(server, tmp_path):
    content = bytes(range(256)) * 1000
    (tmp_path / "a.bin").write_bytes(content)
    server.cut_after = 100_000
    with RemoteFile(f"{server.url}/a.bin") as file:
        assert file.readall() == content


def test_a_file_that_changes_while_it_is_read_ends_the_reading(server, tmp_path, waited):
    (tmp_path / "a.bin").write_bytes(bytes(250_000))
    server.cut_after = 100_000
    server.tags += ["old", "old", "new"]
    with RemoteFile(f"{server.url}/a.bin") as file, pytest.raises(OSError, match="was changed"):
        file.readall()
    assert waited == [0, 0]


def test_a_server_that_says_nothing_of_a_file_has_a_new_version_each_time(server, tmp_path):
    (tmp_path / "a.bin").write_bytes(b"content")
    server.tags += ["one", "one"]
    versions = {RemoteFile(f"{server.url}/a.bin").version for _ in range(2)}
    silent = {RemoteFile(f"{server.url}/a.bin").version for _ in range(2)}
    assert (len(versions), len(silent)) == (1, 2)


@pytest.mark.parametrize("busy", [429, 503])
def test_a_busy_server_is_asked_again(server, tmp_path, waited, busy):
    (tmp_path / "a.bin").write_bytes(b"content")
    server.failures = [busy] * 3
    with RemoteFile(f"{server.url}/a.bin") as file:
        server.failures = [busy]
        file.seek(3)
        assert file.readall() == b"tent"
        assert (file.size, waited) == (7, [0, 1, 5, 0])


@pytest.mark.parametrize(
    ("failures", "cut_after", "error", "pauses"),
    [
        ([403] * 2, None, "HTTP Error 403", []),  # an answer that stays the same
        ([], 0, "the connection ended at byte 0", [0, 1, 5, 30]),
    ],
)
def test_what_stays_broken_fails(server, tmp_path, waited, failures, cut_after, error, pauses):
    (tmp_path / "a.bin").write_bytes(b"content")
    server.failures, server.cut_after = failures, cut_after
    with pytest.raises(OSError, match=error), RemoteFile(f"{server.url}/a.bin") as file:
        file.read(4)
    assert waited == pauses


def test_server_without_parts_is_enough_for_reading_from_the_start(server, tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo")
    server.ranges = False
    assert [row["text"] for row in load(f"{server.url}/a.txt")] == ["one", "two"]
    with RemoteFile(f"{server.url}/a.txt") as file:
        file.seek(4)
        with pytest.raises(urllib.error.HTTPError, match="the server sends no parts of files"):
            file.read(1)


def test_file_that_cannot_be_reached_is_refused(server, monkeypatch):
    message = r"s: expected a readable .* file, got 'http://.*', which fails: .*404"
    with pytest.raises(ValueError, match=message):
        load(f"{server.url}/a.txt")
    monkeypatch.setattr(remote_file, "TIMEOUT", 1)
    with pytest.raises(ValueError, match=r"which fails: .*refused"):
        load("http://127.0.0.1:9/a.txt")
