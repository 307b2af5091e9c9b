"""What is measured on a GPU, rehearsed on the CPU with tiny shapes."""

import json

import pytest
import torch

from scripts import gpu_check, make_neobert


def rehearse(part, folder):
    gpu_check.main([part, "--small", "--output", str(folder)])


def test_a_step_of_the_loss_is_profiled(tmp_path):
    rehearse("profile", tmp_path)
    found = json.loads((tmp_path / "profile.json").read_text())
    assert set(found["steps"]) == {"float32", "bfloat16", "mixed"}


@pytest.mark.slow
def test_decoder_note_and_blocks_are_rehearsed(tmp_path):
    for part in ("decoder", "note", "blocks"):
        rehearse(part, tmp_path)
    arms = json.loads((tmp_path / "decoder.json").read_text())["vocab_sizes"]["700"]
    assert {"transformers, its own loss", "harmonic head"} <= set(arms)
    rows = json.loads((tmp_path / "note.json").read_text())["rows"]
    assert "rotation of dist, harmonic" in {row["name"] for row in rows}
    steps = json.loads((tmp_path / "blocks.json").read_text())["steps"]["24x16x700"]
    assert set(steps) == {"STATISTICS", "COEFFICIENTS", "SCORE_BYTES"}
    assert len(steps["SCORE_BYTES"]) == len(gpu_check.SCORES)


@pytest.mark.slow
def test_the_losses_are_measured_in_every_precision(tmp_path):
    rehearse("loss", tmp_path)
    names = {path.stem for path in tmp_path.glob("*.json")}
    assert names == {"loss_mixed", "loss_bfloat16", "loss_float32", "loss_float32_tf32"}


@pytest.mark.slow
def test_the_recipe_is_compared_with_the_plain_trainer_and_resumed(tmp_path):
    rehearse("step", tmp_path)
    assert len(json.loads((tmp_path / "step.json").read_text())["arms"]) == 4
    rehearse("survival", tmp_path)
    found = json.loads((tmp_path / "survival.json").read_text())["runs"]
    assert found["resumed"] == [1.0]
    assert len(found["whole"]) == len(found["200 short steps"]) == 3
    rehearse("job", tmp_path)
    found = json.loads((tmp_path / "job.json").read_text())
    assert found["runs"]["checkpointing"]["losses"] == found["runs"]["recipe"]["losses"]
    assert all(run["steps"] == 3 for run in found["runs"].values())


def test_a_machine_without_a_gpu_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"GPU: expected one, got none\. Rehearse with --small"):
        gpu_check.main(["job", "--output", str(tmp_path)])


def test_a_folder_with_files_is_left_alone(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="folder: expected an empty one or none, got"):
        make_neobert.main([str(tmp_path)])
