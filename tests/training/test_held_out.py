"""Held-out documents of runs: what is recorded, and which evaluations are refused."""

import json

import pytest
import yaml

from harmonic_sft.training.evaluation import evaluate_folder
from harmonic_sft.training.run import train
from harmonic_sft.training.run_config import load_run_config

CPU = "training.use_cpu=true"


def test_a_run_records_what_it_held_out_and_what_is_known_of_its_base(finished_run, tiny_base):
    results, folder, _ = finished_run
    found = results["data"]["held_out"]
    saved = json.loads((folder / "results" / "held_out.json").read_text())
    assert len(saved["fingerprints"]) == found["documents"] == 20
    assert found["sha256"] == saved["digest"]
    unknown = {"model": str(tiny_base), "verdict": "unknown", "documents_seen": 0}
    assert found["lineage"] == [unknown]
    assert (folder / "results" / "trained_documents.npy").is_file()
    published = json.dumps(results)
    assert not any(name in published for name in saved["fingerprints"])


def test_a_model_is_evaluated_on_no_document_that_it_was_trained_on(finished_run, tmp_path):
    _, folder, _ = finished_run
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    message = r"trained without holding out 1?\d of the 20 documents"
    with pytest.raises(ValueError, match=message):
        evaluate_folder(folder, ["data.eval.seed=7", CPU])
    text = load_run_config(folder / "run.yaml", ["training.output_dir=unused"]).data.sources[0].path
    with pytest.raises(ValueError, match=r"eval: expected documents that no .*data=other\.txt"):
        evaluate_folder(folder, [f"data={text}", CPU])
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_base_that_was_trained_on_the_documents_is_trained_but_not_evaluated(
    finished_run, run_settings, tmp_path, caplog
):
    """The base held out other documents, chosen by another seed."""
    _, base, _ = finished_run
    settings = run_settings(base, tmp_path / "run")
    settings["data"]["eval"]["seed"] = 7
    settings["training"]["max_steps"] = 1
    settings["check_base"] = False
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    results = train(load_run_config(path))
    assert results["steps"] == 1
    first, second = results["data"]["held_out"]["lineage"]
    assert (first["model"], first["verdict"]) == (str(base), "seen")
    assert 0 < first["documents_seen"] <= 20
    assert second["verdict"] == "unknown"
    assert "The evaluation does not count: " in caplog.text
    with pytest.raises(ValueError, match=f"{base} was trained without holding out"):
        evaluate_folder(tmp_path / "run", [CPU])


def test_runs_with_the_same_held_out_documents_are_compared(finished_run, run_copy_of):
    """A second run on the first, held out alike, is evaluated; the root stays unknown."""
    _, base, _ = finished_run
    results, folder = run_copy_of(base)
    saved = json.loads((base / "results" / "held_out.json").read_text())
    assert results["data"]["held_out"]["sha256"] == saved["digest"]
    verdicts = [entry["verdict"] for entry in results["data"]["held_out"]["lineage"]]
    assert verdicts == ["unseen", "unknown"]
    again = evaluate_folder(folder, [CPU])
    lineage = again["data"]["held_out"]["lineage"]
    assert [entry["verdict"] for entry in lineage] == ["unseen", "unseen", "unknown"]
    for name in ("held_out.json", "trained_documents.npy"):
        (folder / "results" / name).unlink()
    old = evaluate_folder(folder, [CPU])["data"]["held_out"]["lineage"]
    assert [entry["verdict"] for entry in old] == ["unknown"]


@pytest.fixture
def run_copy_of(run_settings, tmp_path):
    """Train one step on a base, with other masks and order."""

    def make(base):
        settings = run_settings(base, tmp_path / "second")
        settings["training"] |= {"max_steps": 1, "seed": 5}
        settings["check_base"] = False
        path = tmp_path / "second.yaml"
        path.write_text(yaml.safe_dump(settings))
        return train(load_run_config(path)), tmp_path / "second"

    return make


def test_the_demo_holds_out_the_same_documents_in_all_its_runs():
    parts = [
        load_run_config(f"configs/{name}.yaml").data
        for name in ("demo_base", "demo", "demo_linear", "demo_constant")
    ]
    assert all(part == parts[0] for part in parts)
    assert (parts[0].eval.documents, parts[0].eval.seed) == (32, 42)
