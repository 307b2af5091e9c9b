"""Two repos on a Hub, and a machine that has other people's tools but not this package."""

import json

import pytest
import yaml

from harmonic_sft.training import load_run_config
from harmonic_sft.training.run import train
from tests.decoders import save_decoder, save_tokenizer
from tests.elsewhere import Client, Elsewhere
from tests.hub_server import HubServer

TOOLS = ("sentence-transformers", "peft", "accelerate", "datasets", "trl", "lm_eval", "mteb")
# What the machine's programs share. Cards and snippets of our own are tested in tests/hub.
PRELUDE = """
import json, sys, tempfile
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, pipeline

ENCODER, DECODER = "alice/encoder", "alice/decoder"
TEXT = "w5 w6 w7 w8 w9"
WORDS = "aa ab ac ad"

def decoder(name=DECODER):
    return AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True).eval()

def say(**found):
    sys.stdout.write("\\n" + json.dumps(found))
"""


@pytest.fixture(scope="session")
def hub():
    with HubServer() as server:
        yield server


@pytest.fixture(scope="session")
def client(hub, tmp_path_factory):
    client = Client(hub.environment(tmp_path_factory.mktemp("home")))
    yield client
    client.close()


@pytest.fixture(scope="session")
def decoder_run(tmp_path_factory, causal_settings):
    """The folder of a decoder trained for 6 steps."""
    root = tmp_path_factory.mktemp("decoder")
    base = save_decoder("llama", root)
    save_tokenizer(base, eos="w119")  # of no other word a part
    settings = causal_settings(base, root / "run")
    settings["h_exp"] = {"start": -6.0, "end": -6.0}
    path = root / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    train(load_run_config(path))
    return root / "run"


@pytest.fixture(scope="session")
def repos(client, finished_run, decoder_run):
    """The folders behind alice/encoder and alice/decoder, pushed by the command."""
    folders = {"encoder": finished_run, "decoder": decoder_run}
    for name, folder in folders.items():
        done = client("push", folder, "--repo-id", f"alice/{name}")
        assert done["status"] == 0, done["err"]
    return folders


@pytest.fixture(scope="session")
def machine(hub, repos, tmp_path_factory):
    """Runs a program there and returns what it said."""
    folder = tmp_path_factory.mktemp("machine")
    there = Elsewhere(folder, hub.environment(folder / "home"), TOOLS)

    def run(code, *arguments):
        return json.loads(there(PRELUDE + code, *arguments).splitlines()[-1])

    yield run
    there.close()
