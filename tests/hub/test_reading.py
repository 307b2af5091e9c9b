"""What other tools, and people with this package, make of a pushed repo."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoTokenizer

from harmonic_sft.models import HarmonicForMaskedLM
from tests.clean_environment import clean_environment

HERE = Path(__file__).parent
TEXT = "aa ab ac ad"


def run(python, *words, environment, **options):
    done = subprocess.run(
        [str(python), *map(str, words)], capture_output=True, text=True, env=environment, **options
    )
    assert done.returncode == 0, done.stderr
    return done


def test_sentence_transformers_takes_the_mean_of_the_hidden_states(hub, pushed, tmp_path):
    packages = ("torch", "transformers", "safetensors", "sentence-transformers")
    python = clean_environment(tmp_path / "venv", packages)
    repos = ["alice/full", "alice/head"]
    environment = hub.environment(tmp_path / "home")
    done = run(python, "-I", HERE / "embed_anywhere.py", TEXT, *repos, environment=environment)
    found = json.loads(done.stdout.splitlines()[-1])
    assert "Creating a new one" not in done.stderr
    model = HarmonicForMaskedLM.from_pretrained(pushed)
    batch = AutoTokenizer.from_pretrained(pushed)([TEXT], return_tensors="pt")
    with torch.no_grad():
        expected = model.model(**batch).last_hidden_state[0].mean(0)
    for repo in repos:
        torch.testing.assert_close(torch.tensor(found[repo]), expected, atol=1e-5, rtol=1e-4)
        assert found[f"{repo} length"] == 64


WITH_PACKAGE = """
import sys, torch
from huggingface_hub import hf_hub_download
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer
from harmonic_sft import HarmonicForMaskedLM
local, text = sys.argv[1:]
expected = HarmonicForMaskedLM.from_pretrained(local)
batch = AutoTokenizer.from_pretrained(local)([text], return_tensors="pt")
expected = expected(**batch).logits
for repo in ("alice/full", "alice/head"):
    model = HarmonicForMaskedLM.from_pretrained(repo)
    assert type(model) is HarmonicForMaskedLM
    assert torch.equal(model(**batch).logits, expected), repo
    assert type(AutoModelForMaskedLM.from_pretrained(repo)) is HarmonicForMaskedLM
head = load_file(hf_hub_download("alice/head", "dist_head.safetensors"))
assert torch.equal(head["dist_head.weight"], model.dist_head.weight)
"""


def test_with_this_package_no_remote_code_is_needed(hub, pushed, tmp_path):
    words = ("-c", WITH_PACKAGE, pushed, TEXT)
    run(sys.executable, *words, environment=hub.environment(tmp_path))


PRIVATE = """
import sys, torch
from transformers import AutoModelForMaskedLM, AutoTokenizer
local, text, token = sys.argv[1:]
from harmonic_sft import HarmonicForMaskedLM
expected = HarmonicForMaskedLM.from_pretrained(local)
batch = AutoTokenizer.from_pretrained(local)([text], return_tensors="pt")
expected = expected(**batch).logits
try:
    AutoModelForMaskedLM.from_pretrained("alice/private")
    sys.exit("a private repo was read without a token")
except OSError:
    pass
main = {"revision": "step-6", "device_map": "cpu"}
for where in ({"token": token}, {"local_files_only": True}):
    model = AutoModelForMaskedLM.from_pretrained("alice/private", **main, **where)
    assert torch.equal(model(**batch).logits, expected), where
"""


def test_token_revision_and_local_files_reach_the_base_too(hub, client, pushed, tmp_path):
    words = ("--repo-id", "alice/private", "--form", "head", "--private", "--revision", "step-6")
    done = client("push", pushed, *words)
    assert done["status"] == 0, done["err"]
    hub.repos["alice/base"].private = True
    try:
        run(
            *(sys.executable, "-c", PRIVATE, pushed, TEXT, "hf_test_token_alice"),
            environment=hub.environment(tmp_path, token=None),
        )
    finally:
        hub.repos["alice/base"].private = False


BROKEN_BASE = """
import sys
from transformers import AutoModelForMaskedLM
try:
    AutoModelForMaskedLM.from_pretrained("alice/head", trust_remote_code=True)
except ValueError as error:
    sys.stdout.write(str(error))
"""


def test_a_gated_base_is_one_clear_error(hub, pushed, tmp_path):
    environment = hub.environment(tmp_path, token=None)
    hub.gate("alice/base")
    try:
        done = run(sys.executable, "-c", BROKEN_BASE, environment=environment)
    finally:
        hub.repos["alice/base"].gated = False
    message = r"alice/head holds only what was trained. base: expected alice/base at revision"
    assert re.match(rf"{message} {hub.base}.*gated", done.stdout), done.stdout
    assert "\n" not in done.stdout


def python_blocks(card):
    return re.findall(r"```python\n(.*?)```", card, re.DOTALL)


@pytest.mark.parametrize("repo", ["alice/full", "alice/head", "alice/peft"])
def test_the_snippets_of_the_card_run_as_printed(hub, pushed, tmp_path, repo):
    card = hub.files(repo)["README.md"].decode()
    blocks = python_blocks(card)
    assert blocks
    environment = hub.environment(tmp_path)
    script = tmp_path / "snippet.py"
    script.write_text("\n".join(f"exec({block!r}, {{}})" for block in blocks))
    run(sys.executable, script, environment=environment, cwd=tmp_path)


def test_the_card_tells_of_the_run(hub, pushed):
    results = json.loads((pushed / "results" / "train.json").read_text())
    card = ModelCard(hub.files("alice/full")["README.md"].decode())
    assert card.data.library_name == "transformers"
    assert card.data.base_model == "alice/base"
    values = {result.metric_value for result in card.data.eval_results}
    assert any(abs(value - results["final"]["accuracy"]) < 1e-4 for value in values)
    assert hub.base in card.text
    assert "![" in card.text


def test_bad_input_is_one_line_before_anything_is_sent(client, hub, pushed, tmp_path):
    hub.add_repo("alice/bert", {"config.json": b'{"model_type": "bert"}'})
    sent = len([call for call in hub.requests if call[0] == "POST"])
    for words, message in (
        ((tmp_path, "--repo-id", "alice/x"), "RUN: expected the output folder of a run"),
        ((pushed, "--repo-id", "alice"), "repo_id: expected owner/name"),
        ((pushed, "--repo-id", "a/b/c"), "repo_id: expected owner/name"),
        ((pushed, "--repo-id", "alice/a--b"), "repo_id: expected owner/name"),
        ((pushed, "--repo-id", "alice/bert"), "with model_type 'bert' instead of 'harmonic'"),
    ):
        done = client("push", *words)
        assert done["status"] == 1
        assert message in done["err"]
        assert done["err"].startswith("error: ")
        assert done["err"].count("\n") == 1
    posts = [c for c in hub.requests if c[0] == "POST"]
    assert len(posts) == sent
    done = client("push", pushed, "--repo-id", "alice/bert", "--force")
    assert done["status"] == 0, done["err"]


def test_without_a_token_it_says_how_to_log_in(finished_run, no_token, monkeypatch, capsys):
    from harmonic_sft_cli import main

    assert main(["push", str(finished_run), "--repo-id", "alice/x"]) == 1
    assert "Run `hf auth login`" in capsys.readouterr().err
