"""Classifiers in a repo: what is staged, and how the card speaks of them."""

import json

import pytest
import yaml
from huggingface_hub import ModelCard

from harmonic_sft.hub import read_trained, stage
from harmonic_sft.hub.tasks import MASKED_LM, TASKS, task_words
from harmonic_sft.models import HarmonicConfig, HarmonicForSequenceClassification
from harmonic_sft.training import load_run_config
from harmonic_sft.training.run import train
from tests.conftest import WORDS


@pytest.fixture(scope="module")
def classifier_run(tmp_path_factory, tiny_base, run_settings):
    folder = tmp_path_factory.mktemp("classifier")
    rows = [{"text": word, "label": word[1]} for word in WORDS]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = run_settings(tiny_base, folder / "run")
    settings["model"]["task"] = "sequence_classification"
    settings["head"]["init"] = "class_means"
    settings["data"] = {
        "sources": [{"path": str(folder / "rows.jsonl")}],
        "context_length": 8,
        "label_column": "label",
        "eval": {"documents": 20},
    }
    settings["training"] |= {"max_steps": 2, "save_strategy": "no", "max_grad_norm": 1.0}
    settings["schedule"] = {"warmup_ratio": 0.0, "decay_ratio": 0.5}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    train(load_run_config(folder / "run.yaml"))
    return folder / "run"


def test_a_staged_classifier_loads_and_its_card_is_about_classes(classifier_run, tmp_path):
    stage(read_trained(classifier_run), tmp_path, form="full", repo_id="alice/letters")
    names = {path.name for path in tmp_path.iterdir()}
    assert {"modeling_classification.py", "modeling_backbone.py", "model.safetensors"} <= names
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["id2label"] == {"0": "a", "1": "b", "2": "c", "3": "d"}
    assert "AutoModelForSequenceClassification" in fields["auto_map"]
    model = HarmonicForSequenceClassification.from_pretrained(tmp_path)
    assert model.dist_head.weight.shape[0] == 4
    card = ModelCard((tmp_path / "README.md").read_text())
    assert card.data.pipeline_tag == "text-classification"
    assert {result.task_type for result in card.data.eval_results} == {"text-classification"}
    assert "Accuracy (share, 0 to 1)" in {result.metric_name for result in card.data.eval_results}
    assert 'pipeline("text-classification"' in card.text
    assert "AutoModelForSequenceClassification.from_pretrained" in card.text
    assert "fine-tuned to classify texts" in card.text
    assert "- Classes: 4" in card.text
    for word in ("ask token", "fill-mask", "one vector per token", "Masking:"):
        assert word not in card.text, word


def test_the_card_names_the_file_that_was_evaluated(classifier_run, tmp_path):
    trained = read_trained(classifier_run)
    trained.run["data"]["eval"]["source"] = {"path": "/home/alice/held_out.jsonl"}
    stage(trained, tmp_path, form="full", repo_id="alice/letters")
    card = ModelCard((tmp_path / "README.md").read_text())
    assert "- Evaluated on: local files, `held_out.jsonl`" in card.text
    names = {result.dataset_name for result in card.data.eval_results}
    assert names == {"Held-out rows of held_out.jsonl"}


def test_an_adapter_of_a_classifier_names_its_labels(classifier_run, tmp_path):
    stage(read_trained(classifier_run), tmp_path, form="peft", repo_id="alice/letters")
    card = (tmp_path / "README.md").read_text()
    assert "HarmonicForSequenceClassification.from_base(" in card
    assert 'labels=["a", "b", "c", "d"],' in card or "labels=['a', 'b', 'c', 'd']," in card


def test_every_task_has_words_and_old_models_fill_masks():
    for task in TASKS:
        assert task_words(HarmonicConfig(architectures=[task.architecture])) is task
        assert all(task)
    assert task_words(HarmonicConfig()) is MASKED_LM
