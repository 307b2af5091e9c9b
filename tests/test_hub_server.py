"""Errors of the Hub for tests, as the real client sees them; tests/hub has the rest."""

import hashlib
import json
import subprocess
import sys
import textwrap
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
    'api.delete_file("none.txt", "alice/model")': "BadRequestError 400",
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
    hub.fail("PUT", "/lfs/objects/", status=None, times=6)
    assert client(hub, tmp_path, script) == {"error": "RuntimeError"}
    assert [status for method, _, status in hub.requests if method == "PUT"] == [0] * 6
    assert hub.commits("alice/model") == [before]
    assert hub.files("alice/model") == {"model.safetensors": b"old"}
    received = [body for label, body in hub.everything() if label.startswith("PUT")]
    assert received == [weights[: len(weights) // 2]] * 6

    hub.fail("PUT", "/lfs/objects/", status=None)  # the client tries again by itself
    hub.fail("POST", "/commit/", status=None)  # but commits only once
    assert client(hub, tmp_path, script)["error"] in ("RemoteProtocolError", "ReadError")
    assert hub.commits("alice/model") == [before]
    assert any(b'{"secret": "in base' in data for _, data in hub.everything())

    hub.requests.clear()
    assert client(hub, tmp_path, script) == {}
    assert not any(method == "PUT" for method, _, _ in hub.requests)  # it is there already
    assert hub.files("alice/model")["model.safetensors"] == weights
    assert hub.files("alice/model", before) == {"model.safetensors": b"old"}
    assert not any(TOKEN.encode() in data for _, data in hub.everything())


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
