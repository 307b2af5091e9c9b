"""From a run to the Hub and back, on any machine: against a server that speaks its protocol."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from harmonic_sft.hub import Destination, PushError, push
from harmonic_sft.hub.push import _reason
from harmonic_sft.models import HarmonicForMaskedLM

ROOT = Path(__file__).parents[2]
TEXT = "aa ab [MASK] ad ba"
FORMAT = {"format": "pt"}


READER = """
import json, sys, torch
import huggingface_hub.constants
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, pipeline

text, target, mode, *repos = sys.argv[1:]
# The variable HF_HUB_OFFLINE, which is read when the client is imported.
huggingface_hub.constants.HF_HUB_OFFLINE = mode == "offline"
tensors, found = {}, {}
for repo in repos:
    name, _, revision = repo.partition("@")
    options = {"revision": revision or None, "trust_remote_code": True}
    model = AutoModelForMaskedLM.from_pretrained(name, **options)
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    batch = tokenizer([text], return_tensors="pt")
    with torch.no_grad():
        tensors[repo] = model(**batch).logits
    found[repo] = {"h_exp": model.h_exp, "module": type(model).__module__}
    if revision or mode == "offline":
        continue
    backbone = AutoModel.from_pretrained(name, **options)
    with torch.no_grad():
        tensors[f"{repo} hidden"] = backbone(**batch).last_hidden_state
    saved = f"{target}-{name.replace('/', '-')}"
    model.save_pretrained(saved)  # of the form head, a whole checkpoint
    again = AutoModelForMaskedLM.from_pretrained(saved, trust_remote_code=True)
    with torch.no_grad():
        tensors[f"{repo} saved again"] = again(**batch).logits
    features = pipeline("feature-extraction", model=backbone, tokenizer=tokenizer)
    tensors[f"{repo} features"] = torch.tensor(features(text))
save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target)
sys.stdout.write("\\n" + json.dumps(found))
"""


@pytest.fixture(scope="session")
def loaded(hub, pushed, elsewhere, tmp_path_factory):
    """Every repo as loaded without this package: over the network, then from the cache alone."""
    folder = tmp_path_factory.mktemp("loaded")
    first = hub.commits("alice/full")[1]  # the Hub makes the first one itself
    results = {}
    for mode, more in (("online", [f"alice/full@{first}"]), ("offline", [])):
        words = (TEXT, folder / mode, mode, "alice/full", "alice/head", *more)
        num_requests = len(hub.requests)
        written = elsewhere(READER, *words)
        assert (len(hub.requests) > num_requests) == (mode == "online")
        results[mode] = (load_file(folder / mode), json.loads(written.splitlines()[-1]))
    return results


@torch.no_grad()
def outputs_of(folder):
    """Logits and hidden states of a trained model itself."""
    model = HarmonicForMaskedLM.from_pretrained(folder)
    batch = AutoTokenizer.from_pretrained(folder)([TEXT], return_tensors="pt")
    return model(**batch).logits, model.model(**batch).last_hidden_state


@pytest.fixture(scope="session")
def expected(pushed):
    return outputs_of(pushed)


@pytest.mark.parametrize("repo", ["alice/full", "alice/head"])
def test_a_repo_computes_what_was_trained_without_this_package(loaded, expected, repo):
    for tensors, found in loaded.values():
        assert found[repo]["module"].startswith("transformers_modules.")
        assert torch.equal(tensors[repo], expected[0])
        assert found[repo]["h_exp"] == -4.0
    tensors, _ = loaded["online"]
    assert torch.equal(tensors[f"{repo} saved again"], expected[0])
    assert torch.equal(tensors[f"{repo} hidden"], expected[1])
    assert torch.equal(tensors[f"{repo} features"], expected[1])


def test_a_revision_is_the_checkpoint_of_its_time(hub, loaded, pushed):
    first = hub.commits("alice/full")[1]  # the Hub makes the first one itself
    tensors, found = loaded["online"]
    assert torch.equal(tensors[f"alice/full@{first}"], outputs_of(pushed / "checkpoint-3")[0])
    assert found[f"alice/full@{first}"]["h_exp"] == -8.0


def test_the_first_push_in_mid_training_has_code_and_card(hub, pushed):
    _, first, *_, last = hub.commits("alice/full")
    files = hub.files("alice/full", first)
    assert {"modeling_harmonic.py", "heads.py", "backbones.py", "README.md"} <= files.keys()
    assert b"-8" in files["README.md"]
    assert "training.png" in hub.files("alice/full", last)


def test_the_head_alone_is_a_small_file_of_its_own(hub, pushed):
    files = hub.files("alice/head")
    assert "model.safetensors" not in files
    trained = len(files["dist_head.safetensors"]) + len(files["trained_blocks.safetensors"])
    assert trained < 0.6 * len(hub.files("alice/full")["model.safetensors"])
    assert json.loads(files["config.json"])["base_revision"] == hub.base


def test_nothing_private_is_on_the_server(hub, pushed):
    private = [b"hf_test_token_alice", f"{Path.home()}/".encode(), str(pushed.parent).encode()]
    names = set()
    for name, content in hub.everything():
        names.add(name)
        assert not [text for text in private if text in content], name
    for repo in ("alice/full", "alice/head", "alice/peft"):
        for name in hub.files(repo):
            assert not name.startswith("_"), name
            assert not name.endswith((".bin", ".pt", ".pth", ".pkl")), name


def test_an_adapter_has_its_two_files_a_card_and_the_tokenizer(hub, pushed):
    files = hub.files("alice/peft")
    always = {".gitattributes", "README.md", "training.png", "tokenizer.json"}
    adapter = {"adapter_config.json", "adapter_model.safetensors", "tokenizer_config.json"}
    assert files.keys() | {".gitattributes"} == always | adapter
    settings = json.loads(files["adapter_config.json"])
    assert settings["target_modules"] == ["model.backbone.encoder.layer.0.attention.self.query"]


def test_a_branch_is_made_and_main_stays(hub, client, pushed):
    client("push", pushed, "--repo-id", "alice/branches", "--private")
    before = hub.commits("alice/branches")
    checkpoint = pushed / "checkpoint-3"
    client.succeeds("push", checkpoint, "--repo-id", "alice/branches", "--revision", "step-3")
    assert hub.commits("alice/branches") == before
    files = hub.files("alice/branches", "step-3")
    assert json.loads(files["config.json"])["head"]["h_exp"] == -8.0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"method": "POST", "path_part": "/commit/", "status": 403}, "may not do this there"),
        ({"method": "POST", "path_part": "/commit/", "status": 409}, "changed at the same moment"),
        (
            {"method": "POST", "path_part": "/commit/", "status": 429},
            "how often an account may ask. Wait a while .HTTP 429: Too Many",
        ),
        ({"method": "POST", "path_part": "/commit/", "status": 500}, r"Hub has a problem \(HTTP 5"),
        ({"method": "POST", "path_part": "/commit/", "status": None}, "connection failed"),
        (
            {"method": "POST", "path_part": "/preupload/", "status": 401},
            "The token is not valid. Run .hf auth login",
        ),
        ({"method": "PUT", "path_part": "", "status": None}, "connection failed"),
        ({"method": "POST", "path_part": "/api/validate-yaml", "status": 400}, "HTTP 400"),
    ],
)
def test_a_failed_push_leaves_repo_and_run_whole(hub, client, pushed, fault, message):
    hub.add_repo("alice/faulty", hub.files("alice/full"))
    commits, files = hub.commits("alice/faulty"), sorted(pushed.rglob("*"))
    hub.fail(**fault, times=20)
    # What no repo has seen yet is uploaded.
    done = client("push", pushed / "checkpoint-3", "--repo-id", "alice/faulty", "--form", "head")
    hub.faults.clear()
    assert done["status"] == 1
    assert hub.commits("alice/faulty") == commits
    assert sorted(pushed.rglob("*")) == files
    said = done["err"].strip().splitlines()[-1]
    assert re.search(message, said), said
    assert "The run is as before; if the commit arrived, pushing again changes nothing." in said
    client.succeeds(*said.split("Try again: harmonic-sft ")[1].split())
    assert "dist_head.safetensors" in hub.files("alice/faulty")


@pytest.mark.parametrize(
    ("method", "path_part", "status"),
    [
        ("GET", "/api/whoami", 429),
        ("GET", "/api/models/alice/unseen", 500),
        ("GET", "/api/models/alice/unseen", None),
    ],
)
def test_what_fails_before_the_upload_can_be_tried_again(
    hub, client, pushed, method, path_part, status
):
    words = ("push", pushed, "--repo-id", "alice/unseen", "--private", "--message", "of mine")
    hub.fail(method, path_part, status=status, times=20)
    done = client(*words)
    hub.faults.clear()
    assert done["status"] == 1
    assert "alice/unseen" not in hub.repos
    said = done["err"].strip().splitlines()[-1]
    assert "Nothing was sent; the run is as before. Try again: harmonic-sft push" in said
    assert said.endswith("--private --message 'of mine'")


@pytest.mark.parametrize("status", [403, 429, 500, None])
def test_a_license_that_cannot_be_read_is_not_left_out(hub, client, pushed, tmp_path, status):
    """The card of another base: that of the run was fetched before."""
    base = f"alice/unread-{status}"  # a client keeps what it has read
    revision = hub.add_repo(base, {"README.md": b"---\nlicense: mit\n---\n"})
    folder = shutil.copytree(pushed, tmp_path / "run")
    config = json.loads((folder / "config.json").read_text())
    config |= {"base_model": base, "base_revision": revision}
    (folder / "config.json").write_text(json.dumps(config))
    words = ("push", folder, "--repo-id", f"alice/license-{status}")
    hub.fail("GET", "README.md", status=status, times=40)
    hub.fail("HEAD", "README.md", status=status, times=40)
    done = client(*words)
    assert f"error: license: expected the card of {base}, got " in done["err"]
    assert words[-1] not in hub.repos
    client.succeeds(*words, "--license", "apache-2.0")
    hub.faults.clear()
    hub.repos.pop(words[-1])
    client.succeeds(*words)
    assert ModelCard(hub.files(words[-1])["README.md"].decode()).data.license == "mit"


def test_a_license_is_asked_for_before_the_training(hub, client, tmp_path, tiny_base, run_settings):
    files = {path.name: path.read_bytes() for path in tiny_base.iterdir()}
    hub.add_repo("alice/early", {**files, "README.md": b"---\nlicense: mit\n---\n"})
    settings = run_settings("alice/early", tmp_path / "run")
    settings["hub"] = {"push": True, "repo_id": "alice/never"}
    (tmp_path / "early.yaml").write_text(yaml.safe_dump(settings))
    hub.fail("HEAD", "README.md", status=403, times=40)
    done = client("train", tmp_path / "early.yaml")
    hub.faults.clear()
    assert "error: license: expected the card of alice/early, got " in done["err"]
    assert not (tmp_path / "run" / "results").exists()


def test_an_answer_of_another_form_is_none(hub, pushed, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_token_of_this_test")
    to = Destination(repo_id="alice/proxy")
    for answer in (KeyError("id"), json.JSONDecodeError("Expecting value", "<html>", 0)):
        monkeypatch.setattr(HfApi, "whoami", Mock(side_effect=answer))
        with pytest.raises(PushError, match=r"expected an answer, got an error\. \w+Error: "):
            push(pushed, to)


def test_failed_pushes_cost_nothing_of_the_training(hub, client, tmp_path, run_settings):
    settings = run_settings("alice/base", tmp_path / "run")
    settings["hub"] = {"push": True, "repo_id": "alice/bumpy", "every_save": True}
    (tmp_path / "bumpy.yaml").write_text(yaml.safe_dump(settings))
    hub.fail("POST", "/commit/", status=403, times=99)
    done = client("train", tmp_path / "bumpy.yaml")
    hub.faults.clear()
    assert done["status"] == 1
    assert "checkpoint-3 --repo-id alice/bumpy" in done["err"]  # a warning
    assert (tmp_path / "run" / "results" / "train.json").is_file()
    assert "model.safetensors" not in hub.files("alice/bumpy")
    client.succeeds("train", tmp_path / "bumpy.yaml", "resume=true")
    assert "model.safetensors" in hub.files("alice/bumpy")


@pytest.mark.parametrize(
    ("command", "number", "status"),
    [
        ("train", signal.SIGTERM, 143),
        pytest.param("push", signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param("push", signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param("train", signal.SIGINT, 130, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_push_leaves_no_copy(
    hub, pushed, tmp_path, monkeypatch, command, number, status
):
    def interrupt(method, target):
        if "/preupload/" in target:
            process.send_signal(number)

    monkeypatch.setattr(hub, "next_fault", interrupt)
    environment = hub.environment(tmp_path / "home") | {"TMPDIR": str(tmp_path)}
    words = {
        "push": [pushed, "--repo-id", "alice/interrupted", "--license", "mit"],
        "train": [
            pushed / "run.yaml",
            "resume=true",
            "hub={push: true, repo_id: alice/interrupted}",
        ],
    }
    command = [sys.executable, "-m", "harmonic_sft", command, *words[command]]
    # A child of a shell in the background would have Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, env=environment | {"PYTHONPATH": str(ROOT)})
    finally:
        signal.signal(signal.SIGINT, before)
    process.wait()
    assert process.returncode == status
    assert not [*tmp_path.glob("harmonic-sft-push-*")]


@pytest.mark.parametrize("form", ["head", "peft"])
def test_a_base_that_does_not_complete_the_head_is_refused(hub, client, pushed, tmp_path, form):
    """Someone merged an adapter into a model of ours, say, and gave it to the trainer."""
    folder = shutil.copytree(pushed, tmp_path / "run")
    weights = load_file(folder / "model.safetensors")
    trained = json.loads((folder / "config.json").read_text())["trained_parameters"]
    frozen = next(name for name in weights if ".layer.0." in name and name not in trained)
    save_file({**weights, frozen: weights[frozen] + 1}, folder / "model.safetensors", FORMAT)
    done = client("push", folder, "--repo-id", "alice/changed", "--form", form)
    assert (
        f"--form {form}: expected what was not trained to be that of alice/base, got another "
        f"{frozen}" in done["err"]
    )
    assert "alice/changed" not in hub.repos


def test_files_of_others_stay_and_leftovers_of_ours_go(hub, client, pushed):
    client("push", pushed, "--repo-id", "alice/kept")
    mine = {"examples/demo.py": b"1", "extra/probe.safetensors": b"2", "notes.md": b"3"}
    left = {"added_tokens.json": b"{}", "dist_head.safetensors": b"4", "heads.py": b"5"}
    hub.add_repo("alice/kept", {**hub.files("alice/kept"), **mine, **left})
    client.succeeds("push", pushed, "--repo-id", "alice/kept", "--form", "peft")
    files = hub.files("alice/kept")
    assert {name: files.get(name) for name in mine} == mine
    assert not files.keys() & left.keys()
    assert not files.keys() & {"modules.json", "1_Pooling/config.json", "model.safetensors"}


def test_the_license_is_the_bases_unless_another_is_named(hub, client, pushed):
    for repo in ("alice/full", "alice/head", "alice/peft"):
        assert ModelCard(hub.files(repo)["README.md"].decode()).data.license == "mit"
    assert b"Apache License" in hub.files("alice/full")["LICENSE"]
    hub.add_repo("alice/licensed", {"LICENSE": b"my own"})
    words = ("--repo-id", "alice/licensed", "--license", "cc-by-4.0")
    client.succeeds("push", pushed, *words)
    files = hub.files("alice/licensed")
    assert ModelCard(files["README.md"].decode()).data.license == "cc-by-4.0"
    assert files["LICENSE"] == b"my own"


LOAD_TOKENIZERS = """
import sys
from transformers import AutoTokenizer

for name in sys.argv[1:]:
    AutoTokenizer.from_pretrained(name, trust_remote_code=True)
"""


def test_a_tokenizer_whose_base_names_code_loads_without_it(
    hub, client, elsewhere, tmp_path, run_settings
):
    files = hub.files("alice/base")
    fields = json.loads(files["tokenizer_config.json"])
    fields["auto_map"] = {"AutoTokenizer": ["tok.T", None]}
    code = {"tokenizer_config.json": json.dumps(fields).encode(), "tok.py": b"raise OSError"}
    hub.add_repo("alice/code", {**files, **code})
    settings = run_settings("alice/code", tmp_path / "run")
    settings["hub"] = {"push": True, "repo_id": "alice/no-code"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    client.succeeds("train", tmp_path / "run.yaml")
    folder = tmp_path / "run"
    elsewhere(LOAD_TOKENIZERS, folder, folder / "checkpoint-3", "alice/no-code")


def test_the_push_says_where_the_card_is_that_it_replaced(hub, client, pushed):
    done = client("push", pushed, "--repo-id", "alice/edited")
    assert "README.md was replaced" not in done["err"]
    files = hub.files("alice/edited")
    before = hub.add_repo("alice/edited", {**files, "README.md": files["README.md"] + b"Mine."})
    done = client("push", pushed, "--repo-id", "alice/edited")
    said = "README.md was replaced by the new card; the old one is in commit"
    assert f"{said} {before} of alice/edited." in done["err"]
    assert b"Mine." not in hub.files("alice/edited")["README.md"]
    assert b"Mine." in hub.files("alice/edited", before)["README.md"]
    assert (
        "README.md was replaced" not in client("push", pushed, "--repo-id", "alice/edited")["err"]
    )


def test_the_words_of_the_hub_are_shown(hub, client, pushed):
    done = client("push", pushed, "--repo-id", "alice/words", "--license", "mine")
    said = done["err"].strip().splitlines()[-1]
    assert (
        'refused (HTTP 400: "license" must be one of [apache-2.0, mit, cc-by-4.0, other]). ' in said
    )
    done = client("push", pushed, "--repo-id", "bob/words")
    assert (
        "(HTTP 403: You don't have the rights to create a model under bob/words). " in done["err"]
    )


def test_the_words_of_the_hub_are_one_line_without_a_token(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_test_of_words")
    response: Any = SimpleNamespace(status_code=400, headers={}, request=None)
    words = "hf_test_of_words may not see https://x.org/?token=1.\nTwo"
    error = HfHubHTTPError("", response=response, server_message=words)
    assert _reason(error) == "It was refused (HTTP 400: hf_... may not see https://x.org/)."
    error.server_message = "long " * 900
    assert len(_reason(error)) < 250
    error.server_message = ""
    assert _reason(error) == "It was refused (HTTP 400)."


def test_repos_of_other_models_are_refused(hub, client, pushed):
    adapter = {"adapter_config.json": b'{"peft_type": "LORA", "modules_to_save": null}'}
    for name, files, what in (
        ("llama-lora", {**adapter, "adapter_model.safetensors": b"1"}, "an adapter of another"),
        ("weights", {"weights.safetensors": b"1"}, "weights of another model"),
        ("diffusion", {"unet/model.safetensors": b"1"}, "weights of another model"),
        ("yolo", {"best.pt": b"1"}, "weights of another model"),
        ("broken", {"config.json": b"{"}, "with model_type None instead of 'harmonic'"),
        ("list", {"adapter_config.json": b"[]"}, "an adapter of another"),
    ):
        hub.add_repo(f"alice/{name}", files)
        done = client("push", pushed, "--repo-id", f"alice/{name}")
        assert (done["status"], what in done["err"]) == (1, True), done["err"]
        assert hub.files(f"alice/{name}") == files
        done = client("push", pushed, "--repo-id", f"alice/{name}", "--revision", "exp")
        assert done["status"] == 1
        assert list(hub.repos[f"alice/{name}"].branches) == ["main"]


def test_a_hub_that_does_not_answer_is_no_empty_repo(hub, client, pushed):
    files = {"config.json": b'{"model_type": "bert"}'}
    hub.add_repo("alice/bert2", files)
    hub.fail("GET", "/alice/bert2", status=503, times=30)
    hub.fail("HEAD", "/alice/bert2", status=503, times=30)
    done = client("push", pushed, "--repo-id", "alice/bert2")
    hub.faults.clear()
    assert done["status"] == 1
    assert "expected an answer, got an error" in done["err"]
    assert hub.files("alice/bert2") == files


def test_a_public_repo_is_not_pushed_to_as_private(hub, client, pushed):
    client("push", pushed, "--repo-id", "alice/open")
    for force in ([], ["--force"]):
        done = client("push", pushed, "--repo-id", "alice/open", "--private", *force)
        assert done["status"] == 1
        assert "which is public" in done["err"]


PYTHON = """
from datasets import load_dataset
from harmonic_sft import HarmonicTrainer, HarmonicTrainingArguments

trainer = HarmonicTrainer(
    model="alice/base",
    args=HarmonicTrainingArguments({folder!r}, max_steps=4, h_exp=-12.0, {hub}, {quiet}),
    train_dataset=load_dataset("text", data_files={text!r}, split="train"),
)
trainer.train()
{rest}
"""
# The last checkpoint may have been pushed: a commit of the same files would be left out.
CHANGED = "trainer.model.dist_head.weight.data[0].neg_()\n"
QUIET = "use_cpu=True, report_to='none', save_steps=2, disable_tqdm=True, context_length=24"


def test_a_trainer_made_in_python_pushes_what_loads_elsewhere(
    hub, client, elsewhere, text_file, tmp_path
):
    fields = {"text": str(text_file), "quiet": QUIET}
    client.program(
        PYTHON.format(
            folder=str(tmp_path / "run"),
            hub="hub_model_id='alice/python', hub_form='head', hub_license='mit', push_to_hub=True",
            rest=CHANGED + "trainer.push_to_hub('First try')",
            **fields,
        )
    )
    assert hub.repos["alice/python"].at("main").message == "First try"
    assert "dist_head.safetensors" in hub.files("alice/python")
    assert b"\nlicense: mit\n" in hub.files("alice/python")["README.md"]
    elsewhere(READER, TEXT, tmp_path / "tensors", "online", "alice/python")
    expected, _ = outputs_of(tmp_path / "run")
    assert torch.equal(load_file(tmp_path / "tensors")["alice/python"], expected)
    assert len(hub.commits("alice/python")) > 2  # also in mid-training


def test_python_prints_no_token_below_a_failed_push(hub, client, pushed, monkeypatch):
    """As causes of the error, in which a Hub may repeat the token."""
    monkeypatch.setattr("tests.hub_server.BAD_TOKEN", f"Not valid: {next(iter(hub.users))}")
    code = "from harmonic_sft.hub import Destination, push\n"
    code += f"push(__import__('pathlib').Path({str(pushed)!r}), Destination(repo_id='alice/told'))"
    for method, path_part, status in (
        ("GET", "/api/whoami", 401),
        ("GET", "/api/models/alice/told", 401),
        ("POST", "/preupload/", 401),
    ):
        hub.fail(method, path_part, status=status)
        done = client.send(code)
        hub.faults.clear()
        assert "Error: " in done["err"]
        assert "hf_test_token_alice" not in done["err"]


def test_a_trainer_without_a_repo_or_a_token_says_so(client, tmp_path, text_file):
    fields = {"folder": str(tmp_path / "run"), "text": str(text_file), "quiet": QUIET}
    code = PYTHON.format(hub="seed=1", rest="trainer.push_to_hub()", **fields)
    done = client.send(code)
    assert done["status"] != 0
    assert "hub_model_id: expected owner/name, got nothing" in done["err"]
