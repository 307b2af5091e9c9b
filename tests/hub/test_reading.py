"""What other tools, and people with this package, make of a pushed repo."""

import json
import math
import re

import pytest
import torch
from transformers import AutoTokenizer

from harmonic_sft.models import HarmonicForMaskedLM
from harmonic_sft_cli import main

TEXT = "aa ab ac ad"
SENTENCES = """
import json, sys
from sentence_transformers import SentenceTransformer
found = {}
for repo in sys.argv[2:]:
    model = SentenceTransformer(repo, trust_remote_code=True)
    found[repo] = [model.max_seq_length, model.encode([sys.argv[1]])[0].tolist()]
sys.stdout.write("\\n" + json.dumps(found))
"""


def test_sentence_transformers_takes_the_mean_of_the_hidden_states(elsewhere, pushed):
    written = elsewhere(SENTENCES, TEXT, "alice/full", "alice/head")
    assert "Creating a new one" not in written
    model = HarmonicForMaskedLM.from_pretrained(pushed)
    batch = AutoTokenizer.from_pretrained(pushed)([TEXT], return_tensors="pt")
    with torch.no_grad():
        expected = model.model(**batch).last_hidden_state[0].mean(0)
    for length, embedding in json.loads(written.splitlines()[-1]).values():
        torch.testing.assert_close(torch.tensor(embedding), expected, atol=1e-5, rtol=1e-4)
        assert length == 64


SEARCH = """
import sys, torch
from sentence_transformers import CrossEncoder, SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling

repo, shift = sys.argv[1], float(sys.argv[2])
trusted = {"trust_remote_code": True}
texts = ["aa ab ac", "ba"]
counts = []
for fields in ({}, {"logit_shift": shift}):
    logits = Transformer(
        repo, transformer_task="fill-mask", model_kwargs=trusted, processor_kwargs=trusted,
        config_kwargs={**trusted, **fields},
    )
    encoder = SparseEncoder(modules=[logits, SpladePooling("max")])
    vectors = encoder.encode(texts).to_dense()
    counts.append(vectors.count_nonzero(1).min().item())
assert counts[0] < 4 < counts[1], counts
encoder.save_pretrained("sparse")
again = SparseEncoder("sparse", trust_remote_code=True).encode(texts).to_dense()
torch.testing.assert_close(again, vectors)
for fields, shape in (({}, (2,)), ({"num_labels": 3}, (2, 3))):
    encoder = CrossEncoder(repo, trust_remote_code=True, **fields)
    pairs = [("aa ab", "ac"), ("ba", "bb")]
    scores = encoder.predict(pairs)
    assert scores.shape == shape
    encoder.save_pretrained("cross")
    again = CrossEncoder("cross", trust_remote_code=True).predict(pairs)
    assert abs(again - scores).max() < 1e-6
"""


@pytest.mark.ecosystem
def test_sentence_transformers_reads_a_repo_as_splade_and_as_a_cross_encoder(
    elsewhere, pushed, tmp_path
):
    h_exp = HarmonicForMaskedLM.from_pretrained(pushed).h_exp
    shift = -h_exp * math.log(2)  # tokens up to a right angle
    for form in ("full", "head"):
        elsewhere(SEARCH, f"alice/{form}", shift, cwd=tmp_path)


EXPECTED = """
import torch
from huggingface_hub import hf_hub_download
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer
from harmonic_sft import HarmonicForMaskedLM
expected = HarmonicForMaskedLM.from_pretrained({folder!r})
batch = AutoTokenizer.from_pretrained({folder!r})([{text!r}], return_tensors="pt")
expected = expected(**batch).logits
"""
WITH_PACKAGE = """
for repo in ("alice/full", "alice/head"):
    model = HarmonicForMaskedLM.from_pretrained(repo)
    assert type(model) is HarmonicForMaskedLM
    assert torch.equal(model(**batch).logits, expected), repo
    assert type(AutoModelForMaskedLM.from_pretrained(repo)) is HarmonicForMaskedLM
head = load_file(hf_hub_download("alice/head", "dist_head.safetensors"))
assert torch.equal(head["dist_head.weight"], model.dist_head.weight)
"""
PRIVATE = """
import transformers
from packaging.version import Version
where = {{"revision": "step-6", "device_map": "cpu", "cache_dir": {cache!r}}}
try:
    AutoModelForMaskedLM.from_pretrained("alice/private", token=False, **where)
    raise AssertionError("a private repo was read without a token")
except OSError:
    pass
token = "hf_test_token_alice"
# Before 5.18, transformers looks for an adapter on the Hub all the same.
offline = False if Version(transformers.__version__) >= Version("5.18") else token
for how in ({{"token": token}}, {{"token": offline, "local_files_only": True}}):
    model = AutoModelForMaskedLM.from_pretrained("alice/private", **where, **how)
    assert torch.equal(model(**batch).logits, expected), how
"""
WITHOUT_BASE = """
import sys
from transformers import AutoModelForMaskedLM
try:
    AutoModelForMaskedLM.from_pretrained("alice/head", token=False, cache_dir={cache!r})
except ValueError as error:
    sys.stdout.write(str(error))
"""


def test_with_this_package_no_remote_code_is_needed(client, pushed):
    client.program(EXPECTED.format(folder=str(pushed), text=TEXT) + WITH_PACKAGE)


def test_token_revision_and_local_files_reach_the_base_too(hub, client, pushed, tmp_path):
    words = ("--repo-id", "alice/private", "--form", "head", "--private", "--revision", "step-6")
    client.succeeds("push", pushed, *words)
    code = EXPECTED.format(folder=str(pushed), text=TEXT) + PRIVATE.format(cache=str(tmp_path))
    hub.repos["alice/base"].private = True
    try:
        client.program(code)
    finally:
        hub.repos["alice/base"].private = False


def test_a_gated_base_is_one_clear_error(hub, client, pushed, tmp_path):
    hub.repos["alice/base"].gated = True
    try:
        error = client.program(WITHOUT_BASE.format(cache=str(tmp_path)))
    finally:
        hub.repos["alice/base"].gated = False
    message = r"alice/head holds only what was trained. base: expected alice/base at revision"
    assert re.match(rf"{message} {hub.base}.*gated", error), error
    assert "\n" not in error


@pytest.mark.parametrize("repo", ["alice/full", "alice/head", "alice/peft"])
def test_the_snippets_of_the_card_run_as_printed(hub, client, pushed, repo):
    card = hub.files(repo)["README.md"].decode()
    blocks = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert blocks
    for block in blocks:
        client.program(block)


def test_bad_input_is_one_line_before_anything_is_sent(client, hub, pushed, tmp_path):
    hub.add_repo("alice/bert", {"config.json": b'{"model_type": "bert"}'})
    sent = len([call for call in hub.requests if call[0] == "POST"])
    token = next(iter(hub.users))
    for words, message in (
        ((tmp_path, "--repo-id", "alice/x"), "RUN: expected the output folder of a run"),
        ((pushed, "--repo-id", "alice"), "repo_id: expected owner/name"),
        ((pushed, "--repo-id", "alice/x", "--license", ""), "license: expected one that the Hub"),
        ((pushed, "--repo-id", "a/b/c"), "repo_id: expected owner/name"),
        ((pushed, "--repo-id", "alice/a--b"), "repo_id: expected owner/name"),
        ((pushed, "--repo-id", "alice/x", "--message", token), "message: expected what everybody"),
        ((pushed, "--repo-id", "alice/x", "--revision", token), "revision: expected what every"),
        ((pushed, "--repo-id", "alice/bert"), "with model_type 'bert' instead of 'harmonic'"),
    ):
        done = client("push", *words)
        assert done["status"] == 1
        assert message in done["err"]
        assert done["err"].startswith("error: ")
        assert done["err"].count("\n") == 1
    assert len([call for call in hub.requests if call[0] == "POST"]) == sent
    client.succeeds("push", pushed, "--repo-id", "alice/bert", "--force")


def test_without_a_token_it_says_how_to_log_in(finished_run, no_token, monkeypatch, capsys):
    assert main(["push", str(finished_run), "--repo-id", "alice/x"]) == 1
    error = capsys.readouterr().err
    assert "Run `hf auth login`, in a notebook huggingface_hub.login()" in error
