"""What commit 30993ac trained, published and read stays good; `fixtures/release_30993ac` has it."""

import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import TrainingArguments

from harmonic_sft import models
from harmonic_sft.models import HarmonicConfig, HarmonicForMaskedLM
from harmonic_sft.training import load_run_config
from tests.hub_server import HubServer

RELEASE = Path(__file__).parent / "fixtures" / "release_30993ac"
FORMS = ("full", "head")
MODELS = sorted(path.name for path in (RELEASE / "models").iterdir())
# What keeps to these computes the same bits on every x86 processor.
PORTABLE = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
}
PACKAGE = """
import json, os, sys
import torch
from safetensors.torch import load_file, save_file
from harmonic_sft_cli import main
from harmonic_sft.models import HarmonicForMaskedLM
inputs, output, head, commands = sys.argv[1:]
batch = {key: load_file(inputs)[key] for key in ("input_ids", "attention_mask")}
model = HarmonicForMaskedLM.from_pretrained(head).eval()
with torch.no_grad():
    save_file({"logits": model(**batch).logits, **model.state_dict()}, output)
for folder, arguments in json.loads(commands):
    os.chdir(folder)
    if main(arguments):
        sys.exit(f"{arguments} failed")
"""
REMOVED = {  # metrics, and what a refusal has to name
    "cosine": r"unit.sphere.*(2 ?\*? ?h|twice|doubl)",
    "lp": "euclidean.*mahalanobis",
    "chebyshev": "euclidean.*mahalanobis",
    "bray_curtis": "euclidean.*mahalanobis",
}
REFUSED = {  # YAML files
    **{f"metric_{name}": match for name, match in REMOVED.items()},
    "h_exp_without_end": r"h_exp\.end: expected",
}


@pytest.fixture(scope="module")
def recorded():
    """Inputs and logits of 30993ac."""
    return load_file(RELEASE / "logits.safetensors")


@pytest.fixture(scope="module")
def inputs(recorded):
    return {key: recorded[key] for key in ("input_ids", "attention_mask")}


@contextmanager
def hub():
    """A Hub with the base of the runs, at the commit that they name."""
    with HubServer() as server:
        files = {path.name: path.read_bytes() for path in (RELEASE / "base").iterdir()}
        server.add_repo("alice/base", files)
        repo = server.repos["alice/base"]
        config = json.loads((RELEASE / "pushed" / "head" / "config.json").read_text())
        repo.fixed[config["base_revision"]] = repo.branches["main"]
        yield server


def run_python(*words, environment):
    command = [sys.executable, *words]
    env = environment | PORTABLE
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def repos(shared):
    """Every model and pushed repo with the code that it carries."""
    paths = {name: RELEASE / "models" / name for name in MODELS}
    paths |= {form: RELEASE / "pushed" / form for form in FORMS}

    def make(folder):
        for name, path in paths.items():
            shutil.copytree(path, folder / name)
            with zipfile.ZipFile(RELEASE / "code.zip") as archive:
                archive.extractall(folder / name)

    folder = shared("old_repos", make)
    return {name: folder / name for name in paths}


@pytest.fixture(scope="module")
def own(repos, shared):
    """Logits and weights as every repo's own code makes them, in one process without ours."""

    def make(folder):
        words = [f"{name}={path}" for name, path in repos.items()]
        script, recorded = RELEASE / "own_code.py", RELEASE / "logits.safetensors"
        with hub() as server:
            environment = server.environment(folder / "home")
            run_python("-I", script, recorded, folder / "own", *words, environment=environment)

    return load_file(shared("old_repos_by_own_code", make) / "own")


@pytest.fixture(scope="module")
def handled(repos, shared):
    """The run evaluated, pushed and resumed by the present code; what its folders then hold."""

    def make(folder):
        for name in ("finished", "interrupted"):
            shutil.copytree(RELEASE / "run", folder / name / "run")
            with zipfile.ZipFile(RELEASE / "code.zip") as archive:
                archive.extractall(folder / name / "run")
            shutil.copyfile(RELEASE / "text.txt", folder / name / "text.txt")
        for name in ("model.safetensors", "trainer_state.json", "results/train.json"):
            (folder / "interrupted" / "run" / name).unlink()
        commands = [("finished", [command, "run"]) for command in ("eval", "compare", "export")]
        for form in FORMS:
            words = ["push", "run", "--repo-id", f"alice/{form}", "--form", form]
            commands.append(("finished", words))
        commands.append(("interrupted", ["train", "run/run.yaml", "resume=true"]))
        words = json.dumps([[str(folder / name), arguments] for name, arguments in commands])
        places = (RELEASE / "logits.safetensors", folder / "loaded_head", repos["head"])
        with hub() as server:
            environment = server.environment(folder / "home")
            run_python("-c", PACKAGE, *places, words, environment=environment)
            for form in FORMS:
                (folder / form).mkdir()
                for name, content in server.files(f"alice/{form}").items():
                    if name.endswith(".safetensors"):
                        (folder / form / name).write_bytes(content)

    return shared("old_run", make)


def same_bits(found, expected):
    """Equal on x86 with the PyTorch that recorded, else within a rounding or two."""
    with safe_open(RELEASE / "logits.safetensors", "pt") as file:
        version = file.metadata()["torch"]
    if platform.machine() == "x86_64" and torch.__version__.split("+")[0] == version:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def load(folder):
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(models, architecture).from_pretrained(folder)


def assert_same_weights(found, folder):
    expected = load_file(folder / "model.safetensors")
    assert expected.keys() <= found.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def results(folder, name):
    return json.loads((folder / "run" / "results" / f"{name}.json").read_text())


def test_the_files_of_weights_are_those_that_were_written():
    sums = json.loads((RELEASE / "sha256.json").read_text())
    assert sums == {
        str(path.relative_to(RELEASE)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in RELEASE.rglob("*.safetensors")
    }


@pytest.mark.parametrize("name", [*MODELS, "full"])
def test_a_repos_own_code_computes_the_same_bits(own, repos, recorded, name):
    same_bits(own[name], recorded[name])
    weights = {key.removeprefix(f"{name} "): value for key, value in own.items()}
    assert_same_weights(weights, repos[name])


def test_the_form_head_is_the_form_full(own, recorded, handled):
    same_bits(own["head"], recorded["full"])
    ours = load_file(handled / "loaded_head")
    torch.testing.assert_close(ours.pop("logits"), recorded["full"], rtol=1e-5, atol=1e-5)
    assert_same_weights(ours, RELEASE / "pushed" / "full")


@pytest.mark.parametrize("name", [*MODELS, "full"])
def test_the_package_computes_the_same_logits(repos, recorded, inputs, name):
    model = load(repos[name])
    assert_same_weights(model.state_dict(), repos[name])
    with torch.no_grad():
        logits = model(**inputs).logits
    torch.testing.assert_close(logits, recorded[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["dist_learned", "dist_tied", "multi_head_of_dist", "sequence"])
def test_saved_again_a_model_is_the_same(repos, tmp_path, name):
    load(repos[name]).save_pretrained(tmp_path)
    assert_same_weights(load_file(tmp_path / "model.safetensors"), repos[name])
    old = json.loads((repos[name] / "config.json").read_text())
    assert json.loads((tmp_path / "config.json").read_text())["head"] == old["head"]


# PEFT 0.21 asks transformers 5.23 for a property by its old name.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:Unexpected keyword arguments:UserWarning")  # PEFT before 0.21
@pytest.mark.parametrize(("adapter", "name"), [("peft", "full"), ("lora", "lora")])
def test_an_adapter_fits_its_base(recorded, inputs, adapter, name):
    head = {"name": "dist", "h_exp": -4.0}
    base = HarmonicForMaskedLM.from_base(str(RELEASE / "base"), head=head)
    model = PeftModel.from_pretrained(base, str(RELEASE / "pushed" / adapter))
    with torch.no_grad():
        logits = model(**inputs).logits
    torch.testing.assert_close(logits, recorded[name], rtol=1e-5, atol=1e-5)


def test_a_run_evaluates_to_its_numbers(handled):
    found = results(handled / "finished", "eval")["final"]
    expected = results(handled / "finished", "train")["final"]
    # Fitted on one half of the documents and reported on the other, since that version.
    shared = {key for key in found if key in expected and not key.startswith("post_hoc")}
    assert {"loss", "accuracy", "tokens", "ece", "error_cosine"} <= shared
    expected = {key: expected[key] for key in shared}
    assert {key: found[key] for key in shared} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_run_is_published_with_the_same_weights(handled, form):
    old = {path.name: path for path in (RELEASE / "pushed" / form).glob("*.safetensors")}
    assert {path.name for path in (handled / form).iterdir()} == old.keys()
    for name, path in old.items():
        found, expected = load_file(handled / form / name), load_file(path)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], weight) for key, weight in expected.items())


def test_an_interrupted_run_is_resumed(handled):
    found = results(handled / "interrupted", "train")
    expected = results(handled / "finished", "train")
    assert found["steps"] == expected["steps"] == 6
    for key in ("loss", "eval_loss", "h_exp", "learning_rate"):
        losses = [row[key] for row in found["history"] if key in row]
        assert losses == pytest.approx([row[key] for row in expected["history"] if key in row])


def keys_of(node, place=""):
    """Every key of a configuration; heads and losses are told apart by their names."""
    for item in node if isinstance(node, list) else []:
        yield from keys_of(item, place)
    for key, value in node.items() if isinstance(node, dict) else []:
        name = f"{place}.{key}" if place else key
        yield name
        if key in ("head", "inner", "loss") and isinstance(value, dict):
            name = f"{'loss' if key == 'loss' else 'head'}[{value['name']}]"
        yield from keys_of(value, name)


def yaml_files():
    return sorted(path.stem for path in (RELEASE / "yaml").iterdir())


def test_the_files_use_every_key():
    settings = [yaml.safe_load((RELEASE / "yaml" / f"{n}.yaml").read_text()) for n in yaml_files()]
    known = json.loads((RELEASE / "keys.json").read_text())
    assert sorted(set(keys_of(settings))) == known


@pytest.mark.parametrize("name", [name for name in yaml_files() if name not in REFUSED])
def test_old_files_are_read(name, tmp_path):
    text = (RELEASE / "yaml" / f"{name}.yaml").read_text()
    if "activation_checkpointing" not in {field.name for field in fields(TrainingArguments)}:
        # Before transformers 5.23 that has no other name, and is not null; 5.10 lacks the others.
        newer = "activation_checkpointing|gradient_checkpointing: null|dataloader_(in_|multip)"
        text = re.sub(rf".*({newer}).*\n", "", text)
    path = tmp_path / "run.yaml"
    path.write_text(text)
    run, settings = load_run_config(path), yaml.safe_load(path.read_text())
    assert run.head.name == settings["head"]["name"]
    assert run.training.items() >= settings["training"].items()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_gone_is_refused_with_its_replacement(name):
    with pytest.raises(ValueError, match=re.compile(REFUSED[name], re.DOTALL)):
        load_run_config(RELEASE / "yaml" / f"{name}.yaml")


@pytest.mark.parametrize("metric", REMOVED)
def test_a_model_of_a_removed_metric_is_refused_with_its_replacement(metric):
    config = HarmonicConfig.from_pretrained(RELEASE / "removed" / metric)
    with pytest.raises(ValueError, match=re.compile(REMOVED[metric], re.DOTALL)):
        HarmonicForMaskedLM(config)
