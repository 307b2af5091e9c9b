"""The Hub for tests, asked by the real client in processes of its own, and by plain HTTP."""

import base64
import contextlib
import hashlib
import json
import subprocess
import sys
import textwrap
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.hub_server import HubServer

TOKEN = "hf_test_token_alice"
USERS = {TOKEN: "alice", "hf_test_token_bob": "bob"}


@pytest.fixture
def hub():
    with HubServer(USERS) as server:
        yield server


def client(hub: HubServer, tmp_path: Path, script: str, token=TOKEN, **env: str) -> dict:
    """What the script leaves in `result`; the process runs in `tmp_path`."""
    code = f"import json\nresult = {{}}\n{textwrap.dedent(script)}\nprint(json.dumps(result))"
    env = hub.environment(tmp_path / "home", token) | env
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def ask(hub: HubServer, method: str, path: str, body: object = None, **headers: str):
    """One request without the client, for what the client would never send."""
    sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection = HTTPConnection("127.0.0.1", hub.server_port, timeout=10)
    with contextlib.closing(connection):
        headers = {"Authorization": f"Bearer {TOKEN}"} | headers
        connection.request(method, path, sent, headers)
        response = connection.getresponse()
        return response, response.read()


def commit(hub: HubServer, *operations: tuple[str, dict], branch="main", **header: str):
    lines = [{"key": "header", "value": {"summary": "a change", **header}}]
    lines += [{"key": key, "value": value} for key, value in operations]
    body = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    return ask(hub, "POST", f"/api/models/alice/model/commit/{branch}", body)


def regular(path: str, data: bytes) -> tuple[str, dict]:
    content = base64.b64encode(data).decode()
    return "file", {"path": path, "content": content, "encoding": "base64"}


def test_the_client_uploads_downloads_and_deletes(hub, tmp_path):
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    weights = bytes(range(256)) * 2000
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "sub" / "notes.txt").write_text("hello")
    (folder / "empty.bin").touch()
    (folder / "README.md").write_text("---\nlicense: mit\ntags:\n- a\n---\n# A model\n")
    script = """
        from pathlib import Path
        from huggingface_hub import HfApi, hf_hub_download, snapshot_download

        api = HfApi()
        repo = "alice/model"
        result["user"] = api.whoami()["name"]
        result["url"] = str(api.create_repo(repo))
        result["again"] = str(api.create_repo(repo, exist_ok=True))
        result["first"] = first = api.upload_folder(repo_id=repo, folder_path="folder").oid
        result["unchanged"] = api.upload_folder(repo_id=repo, folder_path="folder").oid
        api.create_branch(repo, branch="pr/next")
        result["deleted"] = api.delete_file("README.md", repo).oid
        aside = dict(path_in_repo="a b.txt", repo_id=repo, revision="pr/next")
        result["aside"] = api.upload_file(path_or_fileobj=b"aside", **aside).oid

        whole = hf_hub_download(repo, "model.safetensors")
        result["whole"] = Path(whole).read_bytes() == Path("folder/model.safetensors").read_bytes()
        result["blob"] = Path(whole).resolve().name
        old = Path(snapshot_download(repo, revision=first))
        result["old"] = [old.name, sorted(str(p.relative_to(old)) for p in old.rglob("*.*"))]
        result["text"] = Path(hf_hub_download(repo, "a b.txt", revision="pr/next")).read_text()
        result["tree"] = sorted(e.path for e in api.list_repo_tree(repo))
        result["sub"] = [e.path for e in api.list_repo_tree(repo, "sub")]
        result["info"] = [s.rfilename for s in api.model_info(repo).siblings]
        """
    result = client(hub, tmp_path, script)
    assert result["user"] == "alice"
    assert result["url"] == result["again"] == f"{hub.endpoint}/alice/model"
    history = hub.commits("alice/model")
    assert len(history) == 3  # creation, upload, deletion; nothing for the unchanged upload
    assert result["unchanged"] == result["first"] == history[1]
    assert result["deleted"] == history[-1]
    assert hub.commits("alice/model", "pr/next") == [*history[:2], result["aside"]]
    uploaded = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.*")}
    attributes = {".gitattributes": hub.files("alice/model")[".gitattributes"]}
    assert hub.files("alice/model", history[1]) == uploaded | attributes
    assert result["whole"]
    assert result["blob"] == hashlib.sha256(weights).hexdigest()  # so it came as an LFS file
    assert result["old"] == [history[1], sorted(uploaded | attributes)]
    assert result["text"] == "aside"
    top = [".gitattributes", "empty.bin", "model.safetensors"]
    assert result["tree"] == [*top, "sub"]
    assert sorted(result["info"]) == sorted(hub.files("alice/model")) == [*top, "sub/notes.txt"]
    assert result["sub"] == ["sub/notes.txt"]
    # The weights, once; an empty file cannot go through LFS.
    assert [method for method, _, _ in hub.requests].count("PUT") == 1


ERRORS = """
from huggingface_hub import HfApi, hf_hub_download
api = HfApi()

def outcome(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__} {error.response.status_code}"
    return "fine"

def get(repo, file="config.json", **kwargs):
    return hf_hub_download(repo, file, **kwargs)

def upload(repo, **kwargs):
    api.upload_file(path_or_fileobj=b"x", path_in_repo="x.txt", repo_id=repo, **kwargs)
"""
ERRORS_OF_ALICE = {
    'upload("alice/model")': "HfHubHTTPError 500",  # the test asks for one
    'get("alice/secret")': "fine",
    'get("bob/secret")': "RepositoryNotFoundError 404",
    'get("alice/none")': "RepositoryNotFoundError 404",
    'get("alice/model", "none.json")': "RemoteEntryNotFoundError 404",
    'get("alice/model", revision="v9")': "RevisionNotFoundError 404",
    'get("bob/gated")': "GatedRepoError 403",
    'list(api.list_repo_tree("bob/model", "chat"))': "RemoteEntryNotFoundError 404",
    'api.model_info("bob/gated")': "fine",
    'api.create_repo("bob/new")': "HfHubHTTPError 403",
    'api.create_repo("alice/model")': "HfHubHTTPError 409",
    'api.create_repo("alice/hidden", private=True)': "fine",
    'api.delete_file("none.txt", "alice/model")': "RemoteEntryNotFoundError 404",
    'upload("bob/model")': "HfHubHTTPError 403",
    'upload("alice/model", revision="none")': "RevisionNotFoundError 404",
    'upload("alice/model", parent_commit="0" * 40)': "HfHubHTTPError 412",
}
ERRORS_OF_NOBODY = {
    'get("alice/model")': "fine",
    'get("alice/secret")': "RepositoryNotFoundError 401",
    'get("alice/hidden")': "RepositoryNotFoundError 401",
    'get("bob/gated")': "GatedRepoError 401",
    'upload("alice/model")': "RepositoryNotFoundError 401",
    'api.create_repo("alice/new")': "HfHubHTTPError 401",
    'api.model_info("alice/model", token="hf_other")': "HfHubHTTPError 401",
    'api.whoami(token="hf_other")': "HfHubHTTPError 401",
}


def test_errors_are_the_right_exceptions_of_the_client(hub, tmp_path):
    for repo_id in ("alice/secret", "alice/model", "bob/secret", "bob/model", "bob/gated"):
        hub.add_repo(repo_id, {"config.json": b"{}"}, private=repo_id.endswith("secret"))
    hub.gate("bob/gated")
    hub.fail("POST", "/api/models/alice/model/commit/main", status=500)
    for token, expected in ((TOKEN, ERRORS_OF_ALICE), (None, ERRORS_OF_NOBODY)):
        calls = [f"result[{call!r}] = outcome(lambda: {call})" for call in expected]
        home = tmp_path / str(token)
        home.mkdir()
        assert client(hub, home, "\n".join([ERRORS, *calls]), token) == expected
    assert len(hub.commits("alice/model")) == 1


def test_an_interrupted_upload_leaves_the_previous_commit_and_can_be_repeated(hub, tmp_path):
    before = hub.add_repo("alice/model", {"model.safetensors": b"old"})
    weights = hashlib.sha256(b"seed").digest() * 30_000
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors").write_bytes(weights)
    (tmp_path / "folder" / "config.json").write_text('{"secret": "in base64"}')
    script = """
        import time
        import huggingface_hub
        time.sleep = lambda seconds: None  # the client waits up to 23 s between six attempts
        try:
            huggingface_hub.upload_folder(repo_id="alice/model", folder_path="folder")
        except Exception as error:
            result["error"] = type(error).__name__
        """
    hub.fail("PUT", "/lfs/objects/", drop=True, times=6)
    assert client(hub, tmp_path, script) == {"error": "RuntimeError"}
    assert [status for method, _, status in hub.requests if method == "PUT"] == [0] * 6
    assert hub.commits("alice/model") == [before]
    assert hub.files("alice/model") == {"model.safetensors": b"old"}
    received = [body for label, body in hub.everything() if label.startswith("PUT")]
    assert received == [weights[: len(weights) // 2]] * 6

    hub.fail("PUT", "/lfs/objects/", drop=True)  # the client tries again by itself
    hub.fail("POST", "/commit/", drop=True)  # but commits only once
    assert client(hub, tmp_path, script)["error"] in ("RemoteProtocolError", "ReadError")
    assert hub.commits("alice/model") == [before]
    assert any(b'{"secret": "in base' in data for _, data in hub.everything())

    hub.requests.clear()
    assert client(hub, tmp_path, script) == {}
    assert not any(method == "PUT" for method, _, _ in hub.requests)  # it is there already
    assert hub.files("alice/model")["model.safetensors"] == weights
    assert hub.files("alice/model", before) == {"model.safetensors": b"old"}
    assert not any(TOKEN.encode() in data for _, data in hub.everything())


def test_commits_are_whole_and_their_parent_is_checked(hub):
    first = hub.add_repo("alice/model", {"a.txt": b"a"})
    changes = (regular("b.txt", b"b"), ("deletedFile", {"path": "a.txt"}))
    pointer = ("lfsFile", {"path": "c.bin", "algo": "sha256", "oid": "0" * 64, "size": 1})
    assert commit(hub, *changes, parentCommit="f" * 40)[0].status == 412
    assert commit(hub, *changes, ("deletedFile", {"path": "none"}))[0].status == 404
    assert commit(hub, *changes, pointer)[0].status == 400  # nobody has uploaded it
    put = f"/alice/model.git/info/lfs/objects/{'0' * 64}"
    assert ask(hub, "PUT", put, b"other content")[0].status == 422
    assert commit(hub, *changes, branch=first)[0].status == 404  # a commit never changes
    assert hub.commits("alice/model") == [first]

    _, answer = commit(hub, *changes, parentCommit=first)
    second = json.loads(answer)["commitOid"]
    assert hub.files("alice/model") == {"b.txt": b"b"}
    third = json.loads(commit(hub)[1])["commitOid"]  # nothing in it, and still a commit
    assert hub.commits("alice/model") == [first, second, third]
    assert hub.files("alice/model", third) == hub.files("alice/model", second)


def test_the_environment_of_a_client_holds_nothing_of_the_parent_s_hub(hub, tmp_path, monkeypatch):
    for key in ("HF_HUB_CACHE", "HTTPS_PROXY", "PYTHONPATH"):
        monkeypatch.setenv(key, "of the parent")
    env = hub.environment(tmp_path)
    ours = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path), "HF_TOKEN": TOKEN}
    ours |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    assert {key: text for key, text in env.items() if key.startswith("HF_")} == ours
    assert [key for key, text in env.items() if text == "of the parent"] == ["PYTHONPATH"]
    assert "HF_TOKEN" not in hub.environment(tmp_path, None)
    assert hub.environment(tmp_path, "hf_other")["HF_TOKEN"] == "hf_other"
