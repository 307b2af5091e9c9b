"""The data, the scores of scope, and three steps of two heads."""

import random

import pytest
import torch
from sklearn.metrics import roc_auc_score
from transformers import AutoTokenizer

from experiments import classification
from experiments.__main__ import main
from experiments.classification import ARMS, CONFIGS, auroc, load_tasks, scope_scores
from harmonic_sft.models import HarmonicForSequenceClassification
from harmonic_sft.results import read_results
from harmonic_sft.training import load_run_config


@pytest.fixture
def data(tmp_path):
    """Both data sets in miniature: 22 intents, 20 of which are held out."""
    generator = random.Random(0)
    words = ["card", "money", "refund", "bank", "rate", "good", "bad", "film"]

    def text():
        return " ".join(generator.choices(words, k=4))

    for split, count in (("train", 6), ("test", 2)):
        rows = [f'"{text()}, or not",intent{i:02d}' for i in range(22) for _ in range(count)]
        (tmp_path / f"banking77_{split}.csv").write_text("\n".join(["text,category", *rows]))
    for split, count in (("train", 30), ("dev", 8)):
        rows = [f'"{text()} \t{i % 2}' for i in range(count)]
        (tmp_path / f"sst2_{split}.tsv").write_text("\n".join(["sentence\tlabel", *rows]))
    return tmp_path


def test_out_of_scope_rows_are_never_trained_on(data):
    banking, sst2 = load_tasks(data)
    known = {row["label"] for row in banking.train}
    assert len(known) == 2
    assert {row["label"] for row in banking.test} == known
    assert (len(banking.train), len(banking.test), len(banking.out_of_scope)) == (12, 4, 40)
    assert "," in banking.train[0]["text"]
    assert sst2.train[0]["text"].startswith('"')  # quotes are text there
    assert (len(sst2.train), len(sst2.test), len(sst2.out_of_scope)) == (30, 8, 8)


def test_the_score_is_the_distance_to_the_nearest_prototype(tiny_base):
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    texts = ["aa ab", "ba bb bc", "cc"]
    for head in ("dist", "linear"):
        model = HarmonicForSequenceClassification.from_base(
            str(tiny_base), labels=["x", "y", "z"], head={"name": head}
        )
        scores = scope_scores(model, tokenizer, texts)
        for index, text in enumerate(texts):
            inputs = tokenizer([text], return_tensors="pt")
            state = model.model(**inputs).last_hidden_state[0].mean(0)
            state = state / state.norm() if head == "dist" else state
            nearest = min((state - p).norm() for p in model.dist_head.prototypes)
            torch.testing.assert_close(scores["distance"][index], nearest, atol=1e-5, rtol=1e-4)
            highest = model(**inputs).logits.softmax(-1).max()
            torch.testing.assert_close(scores["probability"][index], 1 - highest)


def test_auroc_is_that_of_scikit_learn():
    scores = torch.randint(5, (30,), generator=torch.Generator().manual_seed(0)).float()
    inside, outside = scores[:12], scores[12:]
    expected = roc_auc_score([0] * 12 + [1] * 18, scores.numpy())
    assert auroc(inside, outside) == pytest.approx(expected)


def test_three_steps_write_table_figures_and_picture(data, tiny_base, capsys, monkeypatch):
    arms = {name: ARMS[name] for name in ("linear, cross-entropy", "distance, harmonic")}
    monkeypatch.setattr(classification, "ARMS", arms)
    tasks = load_tasks(data)[:1]
    monkeypatch.setattr(classification, "load_tasks", lambda folder: tasks)
    output = data / "out"
    options = ["--seeds", "1", "--output", str(output), f"model.base={tiny_base}"]
    assert main(["classification", str(data), "training.max_steps=3", *options]) == 0
    found = read_results(output / "classification.json")
    assert [(row["task"], row["arm"]) for row in found["summary"]] == [
        ("banking77", arm) for arm in arms
    ]
    for run in found["runs"]:
        assert 0 <= run["scope_auroc"] <= 1
        assert run["scope_auroc_by"] == ("probability" if "linear" in run["arm"] else "distance")
    assert (output / "classification.png").stat().st_size > 10_000
    assert "AUROC" in capsys.readouterr().out


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_is_a_run(arm):
    for path in sorted(CONFIGS.glob("*.yaml")):
        run = load_run_config(path, ARMS[arm])
        assert run.model.task == "sequence_classification"
        assert run.head.init == ("random" if arm == "linear, cross-entropy" else "class_means")
