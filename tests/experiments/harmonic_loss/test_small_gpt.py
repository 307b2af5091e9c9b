"""The notes' pieces on a small GPT: tied arms, the leash at equal reward, the command."""

import pytest
import torch
from matplotlib.image import imread

from experiments import small_gpt
from experiments.__main__ import main
from experiments.harmonic_loss import gpt
from harmonic_sft.results import read_results

pytestmark = pytest.mark.usefixtures("small_language")
SIZES = {"CONTEXT": 32, "VOCAB_SIZE": 360}  # for prompts, and a token " war"


@pytest.fixture
def data(language_data, tmp_path):
    """The texts of the small GPT, and one of other words."""
    folder = tmp_path / "data" / "text"
    folder.mkdir(parents=True)
    for path in (language_data / "text").iterdir():
        (folder / path.name).write_text(path.read_text() + " war" * 20)
    (folder / small_gpt.OTHER_TEXT).write_text("zo zi zu za " * 2000)
    return folder.parent


@pytest.mark.parametrize("arm", small_gpt.ARMS)
def test_every_arm_is_tied_and_learns_all_it_has(arm):
    model, loss_fn = small_gpt.build(arm, 3)
    body = model[0]
    assert model[1].weight is body.wte.weight
    for one, other in zip(body.parameters(), gpt.build("linear", 3)[0].parameters(), strict=True):
        assert torch.equal(one, other)
    rows = torch.randint(gpt.VOCAB_SIZE, (2, gpt.CONTEXT + 1))
    loss_fn(*gpt.states_of(body, rows)).mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_is_forgotten_is_compared_at_the_same_reward():
    def points(penalty, pairs):
        return [{"penalty": penalty, "reward": r, "forgotten": f} for r, f in pairs]

    kl = points("kl", [(0.0, 0.0), (1.0, 2.0)])
    seeds = [kl + points("w2", [(0.5, 0.5 + extra), (1.5, 1.5 + extra)]) for extra in (0, 0.01)]
    apart = kl + points("w2", [(2.0, 0.1), (3.0, 0.2)])
    found = small_gpt.compare_leashes([*seeds, apart])
    assert found["values"] == pytest.approx([-0.75, -0.74])  # at a reward of 0.75
    assert (found["num_apart"], found["verdict"]) == (1, "lower")
    assert small_gpt.compare_leashes([apart]) == {"num_apart": 1}


@pytest.mark.slow
def test_the_command_runs_once_and_draws(data, tmp_path, monkeypatch, capsys):
    for name, value in SIZES.items():
        monkeypatch.setattr(gpt, name, value)
    monkeypatch.setattr(small_gpt, "RATES", (3e-3,))
    monkeypatch.setattr(small_gpt, "LEASH_STEPS", 2)
    monkeypatch.setattr(small_gpt, "FEW_STEPS", (1, 2))
    command = ["small_gpt", "--data", str(data), "--output", str(tmp_path), "--seeds", "2"]
    assert main([*command, "--steps", "3"]) == 0
    payload = read_results(tmp_path / "small_gpt.json")
    assert payload["arms"].keys() == small_gpt.ARMS.keys()
    assert all(one["seeds"] == 2 for one in payload["differences"] + payload["controls"])
    for arm in payload["arms"].values():
        assert arm["few_shot"]["mean"] < arm["other_loss"]["mean"]
    assert len(payload["leash"]["points"][1]) == 8
    assert imread(tmp_path / "small_gpt.png").std() > 0.01
    assert "mixture - linear" in capsys.readouterr().out
    monkeypatch.setattr(gpt, "fit", None)
    assert main([*command, "--steps", "3"]) == 0  # nothing is trained again
    (data / "text" / small_gpt.OTHER_TEXT).unlink()
    assert main([*command, "--steps", "3"]) == 1
    error = capsys.readouterr().err
    assert "No such file or directory" in error
    assert "tinyshakespeare.txt" in error
