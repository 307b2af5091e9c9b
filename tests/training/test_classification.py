"""Whole runs of classifiers: learning, resuming, evaluating again, and settings that do not fit."""

import json
import os
import random
from pathlib import Path

import pytest
import torch

from harmonic_sft.models import (
    HarmonicForSequenceClassification,
    HarmonicForTokenClassification,
    HarmonicModel,
)
from harmonic_sft.training.evaluation import evaluate_folder, evaluate_suite
from harmonic_sft.training.preview import dry_run, show_data
from harmonic_sft.training.run_config import load_run_config
from tests.conftest import WORDS, write_run
from tests.training.conftest import losses, prepared, start

GROUPS = {"early": WORDS[:30], "late": WORDS[30:60], "last": WORDS[60:90]}


def text_rows():
    generator = random.Random(0)
    rows = []
    for _ in range(60):
        for label, words in GROUPS.items():
            rows.append({"text": " ".join(generator.choices(words, k=6)), "label": label})
    return rows


def word_rows():
    generator = random.Random(0)
    groups = {word: label for label, words in GROUPS.items() for word in words}
    texts = [generator.choices(list(groups), k=6) for _ in range(120)]
    return [{"text": text, "label": [groups[word] for word in text]} for text in texts]


TASKS = {
    "sequence_classification": (text_rows, HarmonicForSequenceClassification),
    "token_classification": (word_rows, HarmonicForTokenClassification),
}


@pytest.fixture
def make(tmp_path, labelled_settings):
    def make(task="sequence_classification", **sections):
        settings = labelled_settings(TASKS[task][0](), tmp_path, task)
        settings["data"]["eval"]["documents"] = 40
        return write_run(tmp_path / "run.yaml", settings, sections)

    return make


@pytest.mark.parametrize("task", TASKS)
def test_a_run_learns_and_its_folder_gives_the_same_numbers(make, tmp_path, task, capsys):
    overrides = ("head.init=random", "training.max_steps=24", "training.save_strategy=no")
    results = start(make(task), *overrides)
    final = results["final"]
    assert final["post_hoc_loss"] < results["before"]["post_hoc_loss"]
    assert 0 <= final["ece"] <= 1
    assert final["post_hoc_loss"] <= final["loss"]
    assert final["tokens"] == (40 if task == "sequence_classification" else 240)
    printed = capsys.readouterr().out
    expected = "texts of the evaluation" if "sequence" in task else "labeled tokens of the eval"
    assert expected in printed
    assert "class frequencies alone" in printed
    assert "Nearest prototypes" not in printed
    model = TASKS[task][1].from_pretrained(tmp_path / "run")
    assert list(model.config.id2label.values()) == ["early", "last", "late"]
    assert model.h_exp == -4.0
    again = evaluate_folder(tmp_path / "run", ["training.use_cpu=true"])["final"]
    for key in ("loss", "accuracy", "ece", "tokens", "error_cosine"):
        assert again[key] == pytest.approx(final[key], rel=1e-5, abs=1e-7), key
    rows, others = tmp_path / "rows.jsonl", tmp_path / "others.jsonl"
    with pytest.raises(ValueError, match=r"eval: expected documents that no model was trained on"):
        evaluate_folder(tmp_path / "run", [f"data={rows}", "training.use_cpu=true"])
    lines = [json.loads(line) for line in rows.read_text().splitlines()[:5]]
    for row in lines:  # read backwards they are other documents
        row["text"] = " ".join(row["text"].split()[::-1]) if "seq" in task else row["text"][::-1]
        row["label"] = row["label"] if "seq" in task else row["label"][::-1]
    others.write_text("\n".join(map(json.dumps, lines)))
    whole = evaluate_folder(tmp_path / "run", [f"data={others}", "training.use_cpu=true"])
    assert whole["documents"] == 5
    HarmonicModel.from_pretrained(tmp_path / "run").save_pretrained(tmp_path / "run")
    with pytest.raises(ValueError, match=r"eval: expected one of .* HarmonicModel in .* no head\."):
        evaluate_folder(tmp_path / "run", ["training.use_cpu=true"])


def test_a_folder_without_its_data_is_told_what_to_add(make, tmp_path):
    start(make(), "head.init=random", "training.max_steps=1", "training.save_strategy=no")
    folder, rows = tmp_path / "run", tmp_path / "rows.jsonl"
    claim = folder / "run.yaml"
    claim.write_text(claim.read_text().replace(str(rows), "train_dataset"))
    with pytest.raises(ValueError, match=r"given its rows in Python\. Add data=file.txt"):
        evaluate_folder(folder)
    claim.unlink()
    with pytest.raises(ValueError, match=r"data.label_column: expected a column for classif"):
        evaluate_folder(folder, [f"data={rows}"])
    answers = json.loads((folder / "config.json").read_text())
    answers["architectures"] = ["HarmonicForQuestionAnswering"]
    (folder / "config.json").write_text(json.dumps(answers))
    with pytest.raises(ValueError, match=r"got a HarmonicForQuestionAnswering in '[^']*'$"):
        evaluate_folder(folder, [f"data={rows}"])


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_labels_that_are_no_single_class_are_not_evaluated_as_one(make, tmp_path, problem):
    start(make(), "head.name=linear", "h_exp=null", "loss.name=cross_entropy", "head.init=random")
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "problem_type": problem}))
    for evaluate in (evaluate_folder, lambda folder: evaluate_suite([folder])):
        with pytest.raises(ValueError, match=rf"eval: expected .* one class.* got {problem}"):
            evaluate(tmp_path / "run")


def test_class_means_start_better_than_random_prototypes(make):
    means, at_random = (
        prepared(make(head={"name": "dist", **init})).evaluate()
        for init in ({}, {"init": "random"})
    )
    assert means["eval_accuracy"] > 0.7 > at_random["eval_accuracy"]


def test_rows_of_weight_0_have_no_part_in_a_run(make, tmp_path):
    """Neither in the prototypes that it starts from nor in what it learns."""
    found = []
    for name, label in (("right", "early"), ("wrong", "late")):
        rows = [{**row, "weight": 1.0} for row in text_rows()]
        for row in rows[::7]:
            row |= {"weight": 0.0, "label": label}
        write_rows(tmp_path / f"{name}.jsonl", rows)
        overrides = (f"data.sources.0.path={tmp_path / name}.jsonl", "data.weight_column=weight")
        trainer = prepared(make(), *overrides, f"training.output_dir={tmp_path / name}")
        start = trainer.model.dist_head.weight.detach().clone()
        trainer.train()
        found.append((start, losses(trainer)))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-6)


def test_losses_of_documents_of_an_evaluation_file(make, tmp_path):
    others = [{"text": row["text"][::-1], "label": row["label"]} for row in text_rows()[:7]]
    held_out = write_rows(tmp_path / "others.jsonl", others)
    settings = {"eval": {"source": {"path": str(held_out)}}}
    start(make(data=settings), "training.max_steps=1", "training.save_strategy=no")
    cpu, out = ["training.use_cpu=true"], tmp_path / "losses.jsonl"
    evaluate_folder(tmp_path / "run", cpu, out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["source"] for line in lines} == {str(held_out)}
    os.mkfifo(pipe := tmp_path / "pipe")
    bad = {held_out: "which is data", tmp_path: "which is none", pipe: "which is none"}
    bad[out / "below.jsonl"] = "expected a place for a file, got '.*below.jsonl': "
    bad[tmp_path / "run" / "model.safetensors"] = r"expected a name that ends in \.jsonl"
    for place, message in bad.items():
        with pytest.raises(ValueError, match=rf"--per-document: .*{message}"):
            evaluate_folder(tmp_path / "run", cpu, place)
    assert len(held_out.read_text().splitlines()) == 7
    with pytest.raises(ValueError, match=r"--html: .*which is data"):
        evaluate_suite([tmp_path / "run"], cpu, html=held_out)
    with pytest.raises(ValueError, match=r"--html: expected a name that ends in \.html, got"):
        evaluate_suite([tmp_path / "run"], cpu, html=tmp_path / "run" / "config.json")
    other = write_rows(tmp_path / "third.jsonl", others)  # beside which the run's own data is data
    with pytest.raises(ValueError, match=r"--per-document: .*which is data"):
        evaluate_folder(tmp_path / "run", [*cpu, f"data={other}"], held_out)


def write_rows(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_run_is_not_resumed_with_other_classes(make, tmp_path):
    path = make()
    start(path)
    for name in ("train", "held_out"):  # without checksums, as earlier versions
        (tmp_path / "run" / "results" / f"{name}.json").unlink()
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text().replace('"early"', '"old"'))
    with pytest.raises(
        ValueError, match=r"resume: expected the classes of .*'early'.* got .*'old'"
    ):
        start(path, "resume=true")


def test_a_linear_head_and_a_16_bit_body_train_too(make):
    path = make(head={"name": "linear", "init": "random"}, h_exp=None)
    overrides = ("loss.name=cross_entropy", "model.dtype=bfloat16", "model.pooling=cls")
    results = start(path, *overrides, "training.save_strategy=no", "training.max_steps=1")
    assert "post_hoc_inverse_temperature" in results["final"]
    assert results["head"] == {"name": "linear", "bias": True}


def test_the_classes_of_a_run_are_shown_and_what_is_left_out(make, capsys, caplog):
    caplog.set_level("INFO")
    path = make()
    rows = Path(load_run_config(path).data.sources[0].path)
    kind = json.loads(rows.read_text().splitlines()[0])
    with rows.open("a") as file:
        file.write(f"\n{json.dumps(dict.fromkeys(kind))}\n")
    show_data(load_run_config(path, ["data.on_bad_row=skip"]))
    printed = capsys.readouterr().out
    assert "140 training rows" in printed
    assert "early" in printed
    assert "Left out: 1 bad rows, such as" in caplog.text


def test_a_plan_needs_no_data(make, capsys, caplog):
    caplog.set_level("INFO")
    for task in TASKS:
        dry_run(load_run_config(make(task)))
    assert "Fits " in caplog.text
