"""Probes: what they are trained on, their chance level, and the comparison."""

import numpy as np
import pytest

from experiments.harmonic_loss.probes import (
    NUM_PROBES,
    NUM_TRAIN,
    chance,
    compare,
    models,
    probe,
    read_task,
    summarize,
)


def test_no_sentence_of_the_test_is_trained_on(tmp_path):
    (tmp_path / "sst2_train.tsv").write_text("sentence\tlabel\ngood \t1\nbad \t0\ngood \t1\n")
    (tmp_path / "sst2_dev.tsv").write_text("sentence\tlabel\nbad\t0\n")
    task = read_task(tmp_path, "SST-2")
    assert (task.pool, task.test) == ([("good", 1)], [("bad", 0)])
    with pytest.raises(FileNotFoundError, match=r"cola_in_domain_train\.tsv"):
        read_task(tmp_path, "CoLA")


def test_acceptability_is_read_from_a_file_without_a_header(language_data):
    task = read_task(language_data / "probing", "CoLA", 60)
    assert (len(task.pool), len(task.test)) == (60, 20)
    assert {label for _, label in task.pool} == {0, 1}
    text, label = task.test[1]
    assert (len(text.split()), label) == (6, 1)


def test_missing_models_are_refused_before_anything_is_probed(tmp_path):
    with pytest.raises(ValueError, match=r"out: expected .*linear.* got none. Run --figure 5"):
        next(models(tmp_path, 1, 4, tmp_path))


def test_the_commoner_class_is_the_chance_level():
    assert chance([1, 1, 0]) == {"accuracy": pytest.approx(2 / 3), "f1": pytest.approx(0.8)}
    assert chance([1, 0, 0]) == {"accuracy": pytest.approx(2 / 3), "f1": 0.0}


def test_probes_read_what_is_linear_and_nothing_from_noise():
    rng = np.random.default_rng(0)
    features = rng.standard_normal((600, 8))
    labels = (features[:, 0] > 0).astype(int)
    train, test = (features[:400], labels[:400]), (features[400:], labels[400:])
    found = probe(train, test, 0)
    assert found["logistic"]["accuracy"] > 0.95
    assert found["mlp"]["accuracy"] > 0.85
    noise = probe(train, (rng.standard_normal((200, 8)), labels[400:]), 0)
    assert noise["logistic"]["accuracy"] < 0.65
    assert len(train[1]) < NUM_TRAIN  # all rows: seeds differ in the MLP alone
    assert probe(train, test, 1)["logistic"] == found["logistic"]


def test_models_are_compared_by_their_seeds():
    def lines(model, seed, value):
        place = {"task": "SST-2", "layer": "layer 0 of 4", "probe": "mlp"}
        values = {"accuracy": [value] * NUM_PROBES, "f1": [0.5] * NUM_PROBES}
        return {"model": model, "seed": seed, **place, **values}

    found = [lines("MiniLM", 0, 0.8)]
    for seed, start in enumerate((0.5, 0.6, 0.7)):
        found.append(lines("GPT-2, linear", seed, start))
        found.append(lines("GPT-2, comment", seed, start + 0.01 + 0.001 * seed))
    rows = summarize(found)
    by_model = {row["model"]: row for row in rows}
    assert by_model["MiniLM"]["accuracy"]["seeds"] == NUM_PROBES
    assert by_model["GPT-2, linear"]["accuracy"]["seeds"] == 3
    assert by_model["GPT-2, linear"]["accuracy"]["mean"] == pytest.approx(0.6)
    [pair] = compare(rows)
    assert pair["difference"]["mean"] == pytest.approx(0.011)
    assert pair["verdict"] == "higher"
