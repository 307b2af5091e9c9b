"""Trained folders to publish."""

import functools

import jinja2
import pytest
import yaml

from tests.elsewhere import Client, Elsewhere
from tests.hub_server import HubServer


@pytest.fixture(autouse=True, scope="session")
def compiled_once():
    """Compiling the template of the card takes longer than all else of it."""
    with pytest.MonkeyPatch.context() as patch:
        compiled = functools.lru_cache(jinja2.Environment.compile)
        patch.setattr(jinja2.Environment, "compile", compiled)
        yield


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
    client.succeeds("train", folder / "tiny.yaml")
    for form in ("head", "peft"):
        client.succeeds("push", folder / "run", "--repo-id", f"alice/{form}", "--form", form)
    return folder / "run"
