"""The benchmark's data, its scores of scope, and a short run of all of it."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from harmonic_sft.models import HarmonicForSequenceClassification
from harmonic_sft.training import load_run_config
from scripts import benchmark_classification as benchmark

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "classification").glob("*.yaml"))


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
    banking, sst2 = benchmark.load_tasks(data, num_rows=None)
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
        scores = benchmark.scope_scores(model, tokenizer, texts)
        for index, text in enumerate(texts):
            inputs = tokenizer([text], return_tensors="pt")
            state = model.model(**inputs).last_hidden_state[0].mean(0)
            state = state / state.norm() if head == "dist" else state
            nearest = min((state - p).norm() for p in model.dist_head.prototypes)
            torch.testing.assert_close(scores["distance"][index], nearest, atol=1e-5, rtol=1e-4)
            highest = model(**inputs).logits.softmax(-1).max()
            torch.testing.assert_close(scores["probability"][index], 1 - highest)


def test_a_short_run_writes_table_figures_and_picture(data, tmp_path, monkeypatch, tiny_base):
    monkeypatch.setattr(benchmark, "BASE", str(tiny_base))
    words = ["--smoke", "--json", str(tmp_path / "out.json"), "--figure", str(tmp_path / "out.png")]
    monkeypatch.setattr(benchmark, "NUM_HELD_OUT", 12)
    rows = benchmark.main([str(data), *words])
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["summary"] == rows
    assert [(row["task"], row["arm"]) for row in rows] == [
        (task, arm) for task in ("banking77", "SST-2") for arm in benchmark.ARMS
    ]
    for run in saved["runs"]:
        assert 0 <= run["scope_auroc"] <= 1
        assert run["scope_auroc_by"] == ("probability" if "linear" in run["arm"] else "distance")
    assert (tmp_path / "out.png").stat().st_size > 10_000


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configurations_can_be_read_and_name_their_source(path):
    run = load_run_config(path)
    assert run.model.task == "sequence_classification"
    assert run.data.eval.source is not None
    assert "# Source: " in path.read_text()


def test_there_are_configurations():
    assert len(CONFIGS) == 4
