"""Trained folders to publish."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
import yaml
from huggingface_hub import constants

from tests.elsewhere import Elsewhere
from tests.hub_server import HubServer

HERE = Path(__file__).parent


@pytest.fixture(autouse=True, scope="session")
def compiled_once():
    """Compiling the template of the card takes longer than all else of it."""
    with pytest.MonkeyPatch.context() as patch:
        compiled = functools.lru_cache(jinja2.Environment.compile)
        patch.setattr(jinja2.Environment, "compile", compiled)
        yield


@pytest.fixture
def no_token(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))


class Client:
    """A process with this package that talks to the test server as alice."""

    def __init__(self, environment):
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "commands.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def send(self, job):
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def __call__(self, *arguments):
        """Run a command of harmonic-sft."""
        return self.send([str(word) for word in arguments])

    def program(self, code):
        """Run a program, which must succeed, and return what it wrote."""
        done = self.send(code)
        assert done["status"] == 0, done["err"]
        return done["out"]

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="session")
def hub(tiny_base):
    """A Hub that knows the user alice, and the base that she trains on."""
    with HubServer() as server:
        files = {path.name: path.read_bytes() for path in tiny_base.iterdir()}
        files["README.md"] = b"---\nlicense: mit\n---\n"
        server.base = server.add_repo("alice/base", files)
        yield server


@pytest.fixture(scope="session")
def client(hub, tmp_path_factory):
    client = Client(hub.environment(tmp_path_factory.mktemp("home")))
    yield client
    client.close()


@pytest.fixture(scope="session")
def elsewhere(hub, tmp_path_factory):
    """Runs programs where this package is not installed, on the test server."""
    folder = tmp_path_factory.mktemp("elsewhere")
    machine = Elsewhere(folder, hub.environment(folder / "home"))
    yield machine
    machine.close()


@pytest.fixture(scope="session")
def pushed(hub, client, tmp_path_factory, run_settings):
    """A run on the base of the Hub, pushed in every form; its folder."""
    folder = tmp_path_factory.mktemp("pushed")
    settings = run_settings("alice/base", folder / "run")
    settings["peft"] = {"r": 2, "target_modules": ["query"], "layers_to_transform": [0]}
    settings["hub"] = {"push": True, "repo_id": "alice/full", "every_save": True}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
    done = client("train", folder / "tiny.yaml")
    assert done["status"] == 0, done["err"]
    for form in ("head", "peft"):
        done = client("push", folder / "run", "--repo-id", f"alice/{form}", "--form", form)
        assert done["status"] == 0, done["err"]
    return folder / "run"
