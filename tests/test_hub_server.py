"""Errors of the Hub for tests, as the real client sees them; tests/hub has the rest."""

import json
import subprocess
import sys

from tests.hub_server import HubServer

TOKEN = "hf_test_token_alice"
USERS = {TOKEN: "alice", "hf_test_token_bob": "bob"}
ERRORS = """
import json
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


def test_errors_are_the_right_exceptions_of_the_client(tmp_path):
    with HubServer(USERS) as hub:
        for repo_id in ("alice/secret", "alice/model", "bob/secret", "bob/model", "bob/gated"):
            hub.add_repo(repo_id, {"config.json": b"{}"}, private=repo_id.endswith("secret"))
        hub.repos["bob/gated"].gated = True
        hub.fail("POST", "/api/models/alice/model/commit/main", status=500)
        env = hub.environment(tmp_path)
        for expected in (ERRORS_OF_ALICE, ERRORS_OF_NOBODY):
            calls = ", ".join(f"{call!r}: outcome(lambda: {call})" for call in expected)
            command = [sys.executable, "-c", f"{ERRORS}\nprint(json.dumps({{{calls}}}))"]
            printed = subprocess.check_output(command, env=env, cwd=tmp_path, text=True)
            assert json.loads(printed.splitlines()[-1]) == expected
            env |= {"HF_HOME": str(tmp_path / "nobody")}
            env.pop("HF_TOKEN", None)
        assert len(hub.commits("alice/model")) == 1
