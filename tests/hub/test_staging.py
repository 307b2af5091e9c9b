"""What a repo will hold, before anything is sent."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, PhobertTokenizer

from harmonic_sft import models
from harmonic_sft.hub import Destination, read_trained, stage
from harmonic_sft.hub.staging import (
    base_license,
    check_adapter,
    check_clean,
    check_form,
    copy_tokenizer,
)
from harmonic_sft.models import (
    HarmonicConfig,
    HarmonicForMaskedLM,
    HarmonicForSequenceClassification,
)
from harmonic_sft.training import load_run_config
from harmonic_sft.training.run import train
from tests.conftest import WORDS, write_run
from tests.saved_models import change_json, change_weights, spoil_embeddings

COMMIT = "a" * 40
CODE = {path.name for path in Path(models.__file__).parent.glob("[!_]*.py")} | {"LICENSE"}
ALWAYS = {"README.md", "training.png", "tokenizer.json", "tokenizer_config.json"}
PUBLISHED = {"base_model": "me/base", "base_revision": COMMIT}


@pytest.fixture
def staged(finished_run, tmp_path):
    def make(form="full", folder=finished_run, trained=None, **changes):
        trained = trained or read_trained(folder)
        for name, value in changes.items():
            setattr(trained.config, name, value)
        target = tmp_path / form
        shutil.rmtree(target, ignore_errors=True)  # what was refused
        target.mkdir()
        stage(trained, target, Destination(repo_id="me/model", form=form, license="mit"))
        return target

    return make


def names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def metadata(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def test_the_full_form_is_complete_and_nothing_else(staged, finished_run):
    target = staged()
    assert len(list(target.glob("*.py"))) <= 15
    sentences = {"modules.json", "sentence_bert_config.json", "1_Pooling/config.json"}
    assert names(target) == CODE | ALWAYS | sentences | {"config.json", "model.safetensors"}
    assert metadata(target / "model.safetensors") == {"format": "pt"}
    config = json.loads((target / "config.json").read_text())
    assert config["partial"] is False
    tasks = ("MaskedLM", "QuestionAnswering", "SequenceClassification", "TokenClassification")
    assert config["auto_map"] == {
        "AutoConfig": "configuration_harmonic.HarmonicConfig",
        "AutoModel": "modeling_backbone.HarmonicModel",
        **{f"AutoModelFor{task}": f"modeling_harmonic.HarmonicFor{task}" for task in tasks},
    }
    assert "Apache License" in (target / "LICENSE").read_text()
    inputs = torch.arange(5, 15).view(2, 5)
    models = [HarmonicForMaskedLM.from_pretrained(folder) for folder in (finished_run, target)]
    with torch.no_grad():
        assert torch.equal(*(model(inputs).logits for model in models))


def test_a_checkpoint_has_its_code_too(staged, finished_run):
    found = names(staged(folder=finished_run / "checkpoint-3"))
    assert found >= CODE | {"config.json", "model.safetensors", "README.md", "tokenizer.json"}
    others = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "training.png"}
    assert not found & others


def test_the_form_head_holds_what_was_trained(staged, finished_run):
    target = staged("head", **PUBLISHED)
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
    assert metadata(target / "dist_head.safetensors") == {"format": "pt"}


@pytest.mark.parametrize("form", ["full", "head"])
@pytest.mark.parametrize("inner", [False, True])
def test_a_head_whose_code_is_not_published_is_refused(staged, monkeypatch, form, inner):
    own = type("OwnHead", (models.DistLayer,), {"__module__": "mine"})
    monkeypatch.setitem(models.HEADS, "dist", own)  # a line in the table alone
    settings = {"head": {"name": "rotation", "inner": {"name": "dist"}}} if inner else {}
    with pytest.raises(ValueError, match=r"models, whose files are published, got OwnHead of mine"):
        staged(form, **PUBLISHED, **settings)


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("head", {}, "--form head: expected a base on the Hub at a commit, got"),
        ("head", {**PUBLISHED, "base_revision": "main"}, "expected a base on the Hub at a commit"),
        ("head", {"trained_parameters": None}, r"of an earlier version\. Use --form full"),
        ("peft", {}, r"--form peft: expected a run with LoRA .* in part\. Use --form full"),
        ("head", {"base_vocab_size": 9}, "expected the base's vocabulary, got 109 tokens instead"),
        (
            "head",
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "--form head: expected a base in a floating dtype, got one quantized by bitsandbytes",
        ),
    ],
)
def test_a_form_that_could_not_be_loaded_again_is_refused(staged, form, changes, message):
    with pytest.raises(ValueError, match=message):
        staged(form, **changes)


def test_an_adapter_on_weights_that_were_trained_before_is_refused(tmp_path):
    target = "model.backbone.encoder.layer.1.attention.self.query"
    fields = {"target_modules": [target], "modules_to_save": ["dist_head"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    names = ["dist_head.weight", f"{target}.weight"]
    check_adapter(HarmonicConfig(trained_parameters=names), tmp_path)
    names.append("model.backbone.encoder.layer.1.attention.self.query_norm.weight")
    with pytest.raises(ValueError, match=r"as it was published, .*query_norm\.weight\. Use"):
        check_adapter(HarmonicConfig(trained_parameters=names), tmp_path)


def test_lora_beside_a_tied_head_is_refused():
    with pytest.raises(ValueError, match="expected a head of its own, got one tied"):
        check_form(HarmonicConfig(tie_word_embeddings=True), "peft", True)


@pytest.mark.parametrize(("license", "expected"), [("mit", {"license": "mit"}), ("[", {})])
def test_the_license_is_that_of_the_bases_card(tmp_path, monkeypatch, license, expected):
    card = tmp_path / "README.md"
    card.write_text(f"---\nlicense: {license}\n---\n")
    monkeypatch.setattr("harmonic_sft.hub.staging.hf_hub_download", lambda *_, **__: card)
    assert base_license(HarmonicConfig(**PUBLISHED)) == expected


def test_the_path_of_the_run_in_a_checkpoint_stops_the_push(staged, run_copy):
    checkpoint = next(run_copy.glob("checkpoint-[0-9]*"))
    path = checkpoint / "tokenizer_config.json"
    fields = json.loads(path.read_text()) | {"note": f"{run_copy}/vocab"}
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"got the path of the run\. Not published"):
        staged(folder=checkpoint)


def test_a_folder_named_like_a_data_set_stays_a_folder_elsewhere(staged, run_copy):
    run, held_out = run_copy / "run.yaml", run_copy / "results" / "held_out.json"
    settings, saved = yaml.safe_load(run.read_text()), json.loads(held_out.read_text())
    assert saved["sources"][0].pop("is_local")
    settings["data"]["sources"][0]["path"] = "data/corpus"
    run.write_text(yaml.safe_dump(settings))
    cards = []
    for is_local in (False, True):
        saved["sources"][0]["is_local"] = is_local
        held_out.write_text(json.dumps(saved))
        cards.append((staged(folder=run_copy) / "README.md").read_text())
    assert "huggingface.co/datasets/data/corpus" in cards[0]
    assert "data/corpus" not in cards[1]
    assert "local files, `corpus`" in cards[1]


def test_a_local_evaluation_set_stays_one_elsewhere(staged, run_copy):
    run, held_out = run_copy / "run.yaml", run_copy / "results" / "held_out.json"
    settings, saved = yaml.safe_load(run.read_text()), json.loads(held_out.read_text())
    assert saved["eval_source"] is None
    settings["data"]["eval"]["source"] = {"path": "data/corpus"}
    run.write_text(yaml.safe_dump(settings))
    held_out.write_text(json.dumps(saved | {"eval_source": {"is_local": True}}))
    card = (staged(folder=run_copy) / "README.md").read_text()
    assert "data/corpus" not in card
    assert "- Evaluated on: local files, `corpus`" in card


@pytest.mark.parametrize("secret", ["token", "run"])
def test_a_secret_stops_the_push(staged, run_copy, monkeypatch, secret):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_this_test")
    text = "hf_secret_of_this_test" if secret == "token" else str(run_copy)
    with (run_copy / "heads.py").open("a") as file:
        file.write(f"# {text}\n")
    what = "the token of the Hub" if secret == "token" else "the path of the run"
    with pytest.raises(ValueError, match=f"heads.py: expected nothing private, got {what}"):
        staged(folder=run_copy)


@pytest.mark.parametrize(
    "secret",
    [
        "hf_" + 30 * "a",
        "https://x.org/a?X-Amz-Signature=1",
        "https://x.org/a?token=1",
        "https://x.org/a?sv=2024&sig=1",
        "https://x.org/a?X-Goog-Credential=me",
    ],
)
def test_what_looks_like_a_secret_stops_the_push(staged, run_copy, secret):
    path = run_copy / "tokenizer_config.json"
    fields = change_json(path, source=secret)
    (run_copy / "vocab.json").write_text(json.dumps({secret: 1}))  # this may spell anything
    (run_copy / "vocab.pkl").touch()
    message = r"tokenizer_config\.json: expected nothing private, got what looks like a secret"
    with pytest.raises(ValueError, match=message):
        staged(folder=run_copy)
    path.write_text(json.dumps(fields))
    published = names(staged(folder=run_copy))
    assert "vocab.json" in published
    assert "vocab.pkl" not in published


def test_a_secret_in_the_card_stops_the_push(staged, run_copy):
    """The card writes signs of Markdown, `=` among them, as numbers."""
    trained = read_trained(run_copy)
    trained.run["data"]["sources"][0]["path"] = "token=`1`.txt"
    with pytest.raises(ValueError, match=r"README\.md: expected nothing private, got what looks"):
        staged(trained=trained)


def test_what_is_published_is_utf_8_in_every_locale(staged, run_copy, monkeypatch):
    """In others, special tokens would have become other ones, and the Hub refuses the card."""
    path = run_copy / "tokenizer_config.json"
    fields = {**json.loads(path.read_text()), "sep_token": "<\xfc>"}
    path.write_text(json.dumps(fields, ensure_ascii=False), encoding="utf-8")
    trained = read_trained(run_copy)
    trained.run["data"]["sources"][0]["path"] = "\xfc.txt"
    monkeypatch.setattr("io.text_encoding", lambda encoding, level=2: encoding or "latin-1")
    target = staged(trained=trained)
    published = json.loads((target / path.name).read_text(encoding="utf-8"))
    assert published["sep_token"] == fields["sep_token"]
    assert "\xfc.txt" in (target / "README.md").read_text(encoding="utf-8")
    monkeypatch.setenv("HOME", "/home/\xfc")
    for text in ("/home/\xfc/notes", json.dumps("/home/\xfc/notes")):
        (target / "README.md").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match="nothing private, got the path of your home"):
            check_clean(target, trained)


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (torch.nan, "finite .* dist_head.wei"),
        (0.0, "all prototypes are equal"),
        (3.0, "109 of 109 prototypes are off the unit sphere"),
    ],
)
def test_weights_that_predict_nothing_are_not_published(
    staged, run_copy, tmp_path, factor, message
):
    path = run_copy / "model.safetensors"
    change_weights(path, lambda weights: weights["dist_head.weight"].mul_(factor))
    with pytest.raises(ValueError, match=message):
        staged(folder=run_copy)
    assert not (tmp_path / "full" / "README.md").exists()


def test_frozen_weights_that_are_not_finite_are_not_published(staged, run_copy):
    name = spoil_embeddings(run_copy / "model.safetensors")
    trained = read_trained(run_copy)
    assert name not in trained.config.trained_parameters
    with pytest.raises(ValueError, match=f"weights: expected finite numbers, got others in {name}"):
        staged(trained=trained)


@pytest.mark.parametrize("is_zero", [False, True])
def test_a_tied_head_is_checked_too(staged, run_copy, tiny_base, is_zero):
    model = HarmonicForMaskedLM.from_base(str(tiny_base), head={"name": "dist"}, tie=True)
    if is_zero:
        torch.nn.init.zeros_(model.dist_head.weight)
    model.save_pretrained(run_copy)
    message = "got one of which all prototypes are equal"
    with pytest.raises(ValueError, match=message) if is_zero else nullcontext():
        staged(folder=run_copy)


def auto_maps(value):
    """Every `auto_map` in a JSON value."""
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
        if key == "auto_map":
            yield entry
        elif isinstance(entry, dict | list):
            yield from auto_maps(entry)


@pytest.mark.parametrize("form", ["full", "head"])
@pytest.mark.parametrize(
    "names",
    [
        {"AutoTokenizer": ["tok.T", None]},
        {"AutoTokenizer": ["me/base--tok.T", "other/repo--tok.Fast"]},
        [None, "other/repo--tok.T"],  # of early versions of transformers
    ],
)
def test_no_code_that_the_base_names_is_named(staged, run_copy, form, names):
    for name, section in (("tokenizer_config.json", None), ("config.json", "text_config")):
        fields = json.loads((run_copy / name).read_text())
        (fields[section] if section else fields)["auto_map"] = names
        (run_copy / name).write_text(json.dumps(fields))
    target = staged(form, run_copy, **PUBLISHED)
    found = {
        path.name: list(auto_maps(json.loads(path.read_text()))) for path in target.glob("*.json")
    }
    ours = found.pop("config.json")
    assert len(ours) == 1
    assert not any("--" in name for name in ours[0].values())
    assert not any(found.values())
    AutoTokenizer.from_pretrained(target, trust_remote_code=True)


@pytest.mark.parametrize("name", ["{tmp}/secret.Foo", "../secret.Foo"])
def test_code_outside_the_run_is_not_published(staged, run_copy, tmp_path, name):
    (tmp_path / "secret.py").write_text("KEY = 1")
    change_json(run_copy / "config.json", auto_map={"AutoModel": name.format(tmp=tmp_path)})
    with pytest.raises(FileNotFoundError, match=r"/secret\.py"):
        staged(folder=run_copy)
    assert not (tmp_path / "full" / "secret.py").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "got special tokens alone"), ("", "expected it as it was saved")],
)
def test_a_tokenizer_that_lost_its_vocabulary_is_refused(staged, run_copy, content, message):
    path = run_copy / "tokenizer.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        staged(folder=run_copy)


def test_all_files_that_a_slow_tokenizer_reads_are_published(tmp_path):
    run, target = tmp_path / "run", tmp_path / "target"
    (tmp_path / "vocab.txt").write_text("ab 5\nre@@ 4\n")
    (tmp_path / "codes").write_text("a b</w> 5\nr e 4\n")
    tokenizer = PhobertTokenizer(str(tmp_path / "vocab.txt"), str(tmp_path / "codes"))
    tokenizer.save_pretrained(run)
    target.mkdir()
    copy_tokenizer(run, target)
    assert (
        AutoTokenizer.from_pretrained(target)("ab reab").input_ids == tokenizer("ab reab").input_ids
    )


def test_a_tokenizer_with_code_of_its_own_is_refused(staged, run_copy):
    names = {"auto_map": {"AutoTokenizer": [None, "tok.T"]}, "tokenizer_class": "T"}
    change_json(run_copy / "tokenizer_config.json", **names)
    (run_copy / "tok.py").write_text("")
    message = r"tokenizer: expected a class of transformers, got one of tok\.py, which is not publ"
    with pytest.raises(ValueError, match=message):
        staged(folder=run_copy)


def test_a_folder_named_like_the_base_does_not_hide_it(staged, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me" / "base").mkdir(parents=True)
    config = json.loads((staged("head", **PUBLISHED) / "config.json").read_text())
    assert config["base_model"] == "me/base"


def test_only_the_code_that_the_model_imports_goes_along(staged, run_copy):
    """A run of an earlier version has files of other names, and a folder files of its owner."""
    (run_copy / "analysis.py").write_text("KEY = 'sk-secret'")
    with (run_copy / "heads.py").open("a") as file:
        file.write("from .older import *\n")
    (run_copy / "older.py").write_text("from .oldest import *\n")
    (run_copy / "oldest.py").write_text("")
    found = names(staged(trained=replace(read_trained(run_copy), step=None)))
    assert {"older.py", "oldest.py"} <= found
    assert "analysis.py" not in found


@pytest.fixture
def classifier_run(tmp_path_factory, labelled_settings):
    folder = tmp_path_factory.mktemp("classifier")
    settings = labelled_settings([{"text": word, "label": word[1]} for word in WORDS], folder)
    sections = {
        "training": {"max_steps": 2, "save_strategy": "no", "max_grad_norm": 1.0},
        "schedule": {"warmup_ratio": 0.0, "decay_ratio": 0.5},
    }
    train(load_run_config(write_run(folder / "run.yaml", settings, sections)))
    return folder / "run"


def test_a_staged_classifier_loads_and_its_card_is_about_classes(classifier_run, tmp_path):
    trained = read_trained(classifier_run)
    trained.run["data"]["eval"]["source"] = {"path": "/home/alice/held_out.jsonl"}
    stage(trained, tmp_path, Destination(repo_id="alice/letters"))
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["id2label"] == {"0": "a", "1": "b", "2": "c", "3": "d"}
    assert "AutoModelForSequenceClassification" in fields["auto_map"]
    model = HarmonicForSequenceClassification.from_pretrained(tmp_path)
    assert model.dist_head.weight.shape[0] == 4
    card = ModelCard((tmp_path / "README.md").read_text())
    assert card.data.pipeline_tag == "text-classification"
    results = card.data.eval_results
    assert {result.task_type for result in results} == {"text-classification"}
    assert {result.dataset_name for result in results} == {"Held-out rows of held_out.jsonl"}
    assert "Text accuracy (share, 0 to 1)" in {result.metric_name for result in results}
    for text in (
        'pipeline("text-classification"',
        "AutoModelForSequenceClassification.from_pretrained",
        "fine-tuned to classify texts",
        "- Classes: 4",
        "- Evaluated on: local files, `held_out.jsonl`",
    ):
        assert text in card.text
    for word in ("ask token", "fill-mask", "one vector per token", "Masking:"):
        assert word not in card.text, word


def test_every_chat_template_is_published(staged, run_copy):
    tokenizer = AutoTokenizer.from_pretrained(run_copy)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(run_copy)
    target = staged("full", run_copy)
    assert AutoTokenizer.from_pretrained(target).chat_template == tokenizer.chat_template
