"""What a repo will hold, before anything is sent."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig

from harmonic_sft import models
from harmonic_sft.hub import read_trained, stage
from harmonic_sft.hub.staging import copy_weights
from harmonic_sft.models import HarmonicForMaskedLM

COMMIT = "a" * 40
MODELS = Path(models.__file__).parent
# Nothing that a masked model needs imports the models for other tasks.
OTHERS = {"modeling_classification.py", "modeling_causal.py"}
CODE = {path.name for path in MODELS.glob("[!_]*.py")} - OTHERS


@pytest.fixture
def staged(finished_run, tmp_path):
    def make(form="full", folder=finished_run, **changes):
        trained = read_trained(folder)
        for name, value in changes.items():
            setattr(trained.config, name, value)
        target = tmp_path / form
        target.mkdir()
        stage(trained, target, form=form, repo_id="me/model")
        return target

    return make


def names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_full_form_is_complete_and_nothing_else(staged):
    found = names(staged())
    assert found == CODE | {
        *("config.json", "model.safetensors", "README.md", "training.png"),
        *("tokenizer.json", "tokenizer_config.json"),
        *("modules.json", "sentence_bert_config.json", "1_Pooling/config.json"),
    }
    assert not any(Path(name).name.startswith("_") for name in found)


def test_a_checkpoint_has_its_code_too(staged, finished_run):
    found = names(staged(folder=finished_run / "checkpoint-3"))
    assert found >= CODE | {"config.json", "model.safetensors", "README.md", "tokenizer.json"}
    assert not found & {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
    assert "training.png" not in found


def test_weights_are_the_same_and_their_metadata_names_format_and_step(staged, finished_run):
    target = staged()
    with safe_open(target / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "6"}
    expected = load_file(finished_run / "model.safetensors")
    found = load_file(target / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_copied_weights_stay_aligned(tmp_path, finished_run):
    for step in (None, 7, 12345):
        copy_weights(finished_run / "model.safetensors", tmp_path / "copy", step=step)
        length = int.from_bytes((tmp_path / "copy").read_bytes()[:8], "little")
        assert length % 8 == 0
        with safe_open(tmp_path / "copy", "pt") as file:
            assert file.metadata().get("step") == (None if step is None else str(step))


def test_the_configuration_maps_every_auto_class(staged):
    config = json.loads((staged() / "config.json").read_text())
    assert config["auto_map"] == {
        "AutoConfig": "configuration_harmonic.HarmonicConfig",
        "AutoModel": "modeling_backbone.HarmonicModel",
        "AutoModelForMaskedLM": "modeling_harmonic.HarmonicForMaskedLM",
    }
    assert config["partial"] is False


def test_the_form_head_holds_what_was_trained(staged, finished_run):
    target = staged("head", base_model="me/base", base_revision=COMMIT)
    assert "model.safetensors" not in names(target)
    config = AutoConfig.from_pretrained(target)
    assert config.partial
    assert (config.base_model, config.base_revision) == ("me/base", None)  # as the run saved it
    head = load_file(target / "dist_head.safetensors")
    blocks = load_file(target / "trained_blocks.safetensors")
    assert set(head) == {"dist_head.weight"}
    assert set(head) | set(blocks) == set(config.trained_parameters)
    assert all(name.startswith("model.backbone.encoder.layer.2.") for name in blocks)
    expected = load_file(finished_run / "model.safetensors")
    assert all(torch.equal(t, expected[name]) for name, t in (head | blocks).items())
    with safe_open(target / "dist_head.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "6"}


def test_the_form_head_needs_a_base_that_others_can_fetch(staged):
    with pytest.raises(ValueError, match="--form head: expected a base on the Hub, got"):
        staged("head")


@pytest.mark.parametrize("form", ["head", "peft"])
def test_a_run_that_does_not_say_what_it_trained_is_pushed_in_full(staged, form):
    with pytest.raises(ValueError, match=r"of an earlier version\. Use --form full"):
        staged(form, trained_parameters=None)


def test_an_adapter_has_its_two_files_a_card_and_the_tokenizer(staged):
    target = staged("peft", base_model="me/base", base_revision=COMMIT)
    with safe_open(target / "adapter_model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "6"}
    assert names(target) == {
        *("adapter_config.json", "adapter_model.safetensors", "README.md", "training.png"),
        *("tokenizer.json", "tokenizer_config.json"),
    }


def test_no_local_path_and_no_token_is_published(staged, tiny_base, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_this_test")
    target = staged()
    private = [str(tiny_base.parent), str(Path.home()) + "/", "hf_secret_of_this_test"]
    for path in target.rglob("*"):
        if path.is_file():
            assert not [text for text in private if text.encode() in path.read_bytes()], path
    assert json.loads((target / "config.json").read_text())["base_model"] == tiny_base.name


@pytest.mark.parametrize("secret", ["token", "run"])
def test_a_secret_stops_the_push(run_copy, tmp_path, monkeypatch, secret):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_this_test")
    text = "hf_secret_of_this_test" if secret == "token" else str(run_copy)
    with (run_copy / "heads.py").open("a") as file:
        file.write(f"# {text}\n")
    (tmp_path / "target").mkdir()
    what = "the token of the Hub" if secret == "token" else "the path of the run"
    with pytest.raises(ValueError, match=f"heads.py: expected nothing private, got {what}"):
        stage(read_trained(run_copy), tmp_path / "target", form="full", repo_id="me/model")


def test_what_is_staged_loads_and_computes_the_same(staged, finished_run):
    inputs = torch.arange(5, 15).view(2, 5)
    models = [HarmonicForMaskedLM.from_pretrained(f) for f in (finished_run, staged())]
    with torch.no_grad():
        assert torch.equal(*(model(inputs).logits for model in models))


def test_the_step_is_left_out_where_it_is_unknown(finished_run, tmp_path):
    trained = replace(read_trained(finished_run), step=None)
    stage(trained, tmp_path, form="full", repo_id="me/model")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_other_files_of_the_folder_stay_there(run_copy, tmp_path):
    (run_copy / "analysis.py").write_text("KEY = 'sk-secret'")
    (tmp_path / "target").mkdir()
    stage(read_trained(run_copy), tmp_path / "target", form="full", repo_id="me/model")
    assert "analysis.py" not in names(tmp_path / "target")


def test_a_tied_head_is_no_adapter(staged):
    with pytest.raises(ValueError, match="--form peft: expected a head of its own, got one tied"):
        staged("peft", tie_word_embeddings=True)
