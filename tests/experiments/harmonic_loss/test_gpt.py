"""The small GPT-2: its text, its tied heads, its losses, and the command from end to end."""

import math
import shutil

import pytest
import torch
from matplotlib.image import imread

from experiments.__main__ import main
from experiments.harmonic_loss import gpt, probes, words
from harmonic_sft.models import DistLayer
from harmonic_sft.results import read_results

pytestmark = pytest.mark.usefixtures("small_language")


def test_no_token_of_the_training_texts_is_held_out(language_data):
    corpus = gpt.read_corpus(language_data / "text")
    texts = [(language_data / "text" / name).read_text() for name in gpt.TRAINING_TEXTS]
    assert corpus.tokenizer.decode(corpus.train.tolist()) == "".join(texts)
    assert corpus.validation.shape == (4, 17)
    assert corpus.test.shape == (8, 17)
    held_out = (language_data / "text" / gpt.HELD_OUT_TEXT).read_text()
    rows = [corpus.tokenizer.decode(row.tolist()) for row in (*corpus.validation, *corpus.test)]
    assert all(row in held_out for row in rows)
    assert len(set(rows)) == len(rows)


def test_a_missing_text_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"wiki_articles\.txt"):
        gpt.read_corpus(tmp_path)


def test_a_seed_has_the_same_weights_under_every_head():
    bodies, heads = zip(*(gpt.build(arm, 3) for arm in gpt.ARMS), strict=True)
    for body, head in zip(bodies, heads, strict=True):
        assert head.weight is body.wte.weight
        for one, other in zip(body.parameters(), bodies[0].parameters(), strict=True):
            assert torch.equal(one, other)
    assert [isinstance(head, DistLayer) for head in heads] == [False, True, True, True]
    exponents = [head.h_exp for head in heads[1:]]
    assert exponents == pytest.approx([-math.sqrt(128), -128, -math.sqrt(128) / 2])


def test_the_rate_rises_for_a_tenth_and_falls_to_a_twentieth():
    factors = [gpt.rate_factor(step, 100) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == factors[9] == factors[10] == 1
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[-1] == pytest.approx(0.05, abs=1e-3)


def test_losses_are_means_over_tokens(language_data):
    corpus = gpt.read_corpus(language_data / "text")
    body, head = gpt.build("comment", 0)
    found = gpt.evaluate(body, head, corpus.test, (1.0, 0.5))
    states = body(corpus.test[:, :-1]).last_hidden_state.flatten(0, 1)
    labels = corpus.test[:, 1:].flatten()
    assert found["loss"] == pytest.approx(head.nll(states, labels).mean().item(), rel=1e-5)
    half = (head(states) / 2).log_softmax(-1)[torch.arange(len(labels)), labels]
    assert found["losses"][1] == pytest.approx(-half.mean().item(), rel=1e-5)
    assert found["accuracy"] == (head(states).argmax(-1) == labels).double().mean()
    counts = {token: corpus.train.tolist().count(token) + 1 for token in range(320)}
    total = sum(counts.values())
    expected = [-math.log(counts[token] / total) for token in labels.tolist()]
    assert gpt.unigram_loss(corpus) == pytest.approx(sum(expected) / len(expected))


@pytest.mark.parametrize("arm", ["linear", "comment"])
def test_training_lowers_the_loss_below_that_of_unigrams(arm, language_data):
    corpus = gpt.read_corpus(language_data / "text")
    _, _, curve = gpt.train(arm, 1e-2, 0, corpus, 150)
    assert [step for step, _ in curve] == [100, 150]
    assert curve[-1][1] < 1.02 * gpt.unigram_loss(corpus)  # words are drawn at random


def test_arms_are_compared_seed_by_seed():
    def row(arm, seed, loss, score):
        tasks = {task: dict.fromkeys(gpt.MEASURES, score) for task in ("one", "two")}
        known = {"loss": loss, "best_loss": loss, "accuracy": 0.1, "rate": 1e-3, "tasks": tasks}
        return {"arm": arm, "seed": seed, "untrained": tasks, **known}

    rows = [row("linear", seed, 5 + seed, 1 + seed) for seed in range(3)]
    rows += [row("text", seed, 5.1 + seed + 0.01 * seed, 0.5 + 1.01 * seed) for seed in range(3)]
    linear, text = gpt.compare(rows)
    assert "behind" not in linear
    assert text["behind"]["mean"] == pytest.approx(0.11)
    assert text["behind"]["half_width"] == pytest.approx(4.303 * 0.01 / 3**0.5, rel=1e-3)
    line = text["tasks"]["ratio"]["one"]
    assert (line["mean"], line["linear"]) == (pytest.approx(1.51), 2.0)
    assert line["untrained"] == pytest.approx(1.51)
    assert line["verdict"] == "lower"


@pytest.mark.slow
def test_the_commands_run_and_draw_again(language_data, tiny_base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(probes, "ENCODER", str(tiny_base))
    monkeypatch.setattr(probes, "NUM_PROBES", 2)
    monkeypatch.setattr(probes, "MLP_EPOCHS", 2)
    monkeypatch.setattr(words, "NUM_QUADRUPLES", 100)
    monkeypatch.setattr(gpt, "TASKS", ("antonym", "capitalize", "country-capital"))
    data = ["--quick", "--data", str(language_data), "--out", str(tmp_path)]
    command = ["harmonic_loss", "--figure", "5", *data]
    assert main([*command, "--only", "comment"]) == 0
    payload = read_results(tmp_path / "figure_5.json")
    assert payload["num_pairs"] == {"antonym": 20, "capitalize": 20}  # the other has too few
    assert [(row["arm"], row["seed"]) for row in payload["rows"]] == [
        ("linear", 0),
        ("comment", 0),
        ("linear", 1),
        ("comment", 1),
    ]
    row = payload["rows"][0]
    assert row["num_tokens"] == 4 * gpt.ROWS * gpt.CONTEXT
    assert row["tasks"].keys() == row["layers"].keys() == payload["median_count"].keys()
    assert payload["median_count"]["antonym"] > 100
    untrained = payload["summary"][1]["tasks"]["full_ratio"]["antonym"]["untrained"]
    assert untrained == pytest.approx(1, abs=0.2)
    assert "behind" in capsys.readouterr().out
    monkeypatch.setattr(gpt, "train", None)
    assert main([*command, "--only", "comment"]) == 0  # nothing is trained again
    assert main(["harmonic_loss", "--figure", "probes", *data]) == 0
    found = read_results(tmp_path / "figure_probes.json")
    assert len(found["rows"]) == 3 * 2 * 3 * 2  # models, tasks, layers, probes
    assert len(found["pairs"]) == 12
    picture = tmp_path / "figure_5.png"
    assert imread(picture).std() > 0.01
    picture.unlink()
    assert main(["harmonic_loss", "--figure", "5", "--out", str(tmp_path), "--draw"]) == 0
    assert picture.is_file()
    shutil.rmtree(tmp_path / "gpt")
    assert main(["harmonic_loss", "--figure", "probes", *data]) == 1
    assert "Run --figure 5 before" in capsys.readouterr().err


@pytest.mark.parametrize("figure", ["5", "probes"])
def test_the_folder_of_texts_has_to_be_given(figure, tmp_path, capsys):
    assert main(["harmonic_loss", "--figure", figure, "--out", str(tmp_path)]) == 1
    assert "data: expected a folder of texts, got nothing. Say --data" in capsys.readouterr().err
