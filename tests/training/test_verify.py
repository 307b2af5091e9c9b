"""What `harmonic-sft verify` compares, that it can fail, and that it leaves a run alone."""

import json
import re

import numpy as np
import pytest
import torch

from harmonic_sft.data import batches
from harmonic_sft.training import verify
from harmonic_sft.training.run_config import load_run_config
from harmonic_sft.training.trainer import HarmonicTrainer
from harmonic_sft_cli import main
from tests.conftest import write_run

NAMES = list(verify.PAIRS)
PROCESSES = "one process = two"


@pytest.fixture
def only(monkeypatch):
    def choose(*names):
        pairs = {name: pair for name, pair in verify.PAIRS.items() if name in names}
        monkeypatch.setattr(verify, "PAIRS", pairs)

    return choose


def test_ways_of_training_agree_and_the_run_is_left_alone(make_yaml, tmp_path, only, capsys):
    only(*(name for name in NAMES if name != PROCESSES))
    held = {"start": -12, "end": -12, "calibrate": True}
    path = make_yaml(h_exp=held, data={"context_length": 12})  # rows fill it
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").touch()
    before = set(tmp_path.rglob("*"))
    assert main(["verify", str(path)]) == 0
    assert set(tmp_path.rglob("*")) - before == {tmp_path / "run.verify.json"}
    results = json.loads((tmp_path / "run.verify.json").read_text())
    resumed, *others = results["pairs"]
    assert [pair["verdict"] for pair in results["pairs"]] == ["agrees"] * 4
    nothing = {"largest": 0, "mean_signed": 0}
    assert (resumed["loss"], resumed["grad_norm"], resumed["tolerance"]) == (nothing, nothing, 0)
    assert all(0 < pair["loss"]["largest"] < 1e-5 for pair in others)
    verdicts = verify.read_verdicts(load_run_config(path))
    assert verdicts[NAMES[0]] == "agrees (losses to 0e+00)"
    assert all(re.fullmatch(r"agrees \(losses to \de[-+]\d\d\)", v) for v in verdicts.values())
    assert verify.read_verdicts(load_run_config(path, ["training.learning_rate=0.5"])) is None
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines)
    assert [line.split("  ")[1] for line in lines if "agrees" in line] == [
        name for name in NAMES if name != PROCESSES
    ]


def test_the_results_of_a_finished_run_get_the_verdicts(make_yaml, tmp_path, only):
    only("table = stream")
    steps = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    path = make_yaml(h_exp=-8.0, training=steps, early_stopping_patience=1)
    assert main(["train", str(path)]) == 0
    results = tmp_path / "run" / "results" / "train.json"
    before = json.loads(results.read_text())
    assert before["verified"] is None
    assert main(["verify", str(path)]) == 0
    after = json.loads(results.read_text())
    assert after == {**before, "verified": verify.read_verdicts(load_run_config(path))}
    verify.note_verdicts(load_run_config(path, ["training.learning_rate=0.5"]))
    assert json.loads(results.read_text()) == after


def test_a_stream_is_resumed_as_a_stream(make_yaml, text_file, only, monkeypatch):
    only(NAMES[0])
    taken, log = [], [{"loss": 1.0, "grad_norm": 1.0}]
    monkeypatch.setattr(verify, "_take", lambda _, way, *__: taken.append(way) or log)
    source = {"path": str(text_file), "streaming": True}
    path = make_yaml(data={"sources": [source]})
    assert main(["verify", str(path)]) == 0
    assert [way.streaming for way in taken] == [True, True]


def test_a_fault_of_the_trainer_is_found(make_yaml, only, monkeypatch, capsys):
    """A resumed run whose dropout draws other numbers."""
    only(NAMES[0])
    monkeypatch.setattr(HarmonicTrainer, "_load_rng_state", lambda *_: None)
    path = make_yaml(model={"dropout": 0.2})
    assert main(["verify", str(path)]) == 1
    message = f"verify: expected ways of training that agree, got {NAMES[:1]}"
    assert message in capsys.readouterr().err


def test_packed_documents_that_see_each_other_are_found(make_yaml, only, monkeypatch, capsys):
    only("padded = packed")
    join = batches.join_rows

    def joined(rows):
        found = join(rows)
        return {**found, "position_ids": np.arange(len(found["input_ids"]))}

    monkeypatch.setattr(batches, "join_rows", joined)
    assert main(["verify", str(make_yaml()), "model.dtype=bfloat16", "check_base=false"]) == 1
    assert "got ['padded = packed'], which differ" in capsys.readouterr().err


def test_a_base_that_knows_nothing_is_refused_first(make_yaml, tmp_path, ignorant_base, capsys):
    (tmp_path / "text.txt").write_text("aa aa aa ab aa aa ac aa aa\n" * 20)
    sources = [{"path": str(tmp_path / "text.txt")}]
    model = {"base": str(ignorant_base)}
    path = make_yaml(model=model, data={"sources": sources}, check_base=True)
    assert main(["verify", str(path)]) == 1
    assert "model.base: expected a base whose own head does better" in capsys.readouterr().err


def test_what_cannot_be_compared_is_skipped_with_the_reason(
    labelled_settings, tmp_path, only, caplog
):
    only("padded = packed", "table = stream")
    rows = [{"text": f"aa b{c}", "label": c} for c in "abcd" * 3]
    sections = {"data": {"eval": {"documents": 2}}}
    path = write_run(tmp_path / "run.yaml", labelled_settings(rows, tmp_path), sections)
    caplog.set_level("INFO")
    results = verify.verify(load_run_config(path))
    assert [pair["verdict"] for pair in results["pairs"]] == ["skipped"] * 2
    assert "padded = packed: skipped, a classifier's rows are neither packed nor" in caplog.text


def test_negatives_of_a_micro_batch_are_not_compared_with_those_of_another(make_yaml, only):
    only("big batch = accumulation", "one process = two")
    path = make_yaml(head={"name": "cosine"}, h_exp=None, loss={"name": "info_nce"})
    results = verify.verify(load_run_config(path))
    assert [pair["verdict"] for pair in results["pairs"]] == ["skipped"] * 2


def test_columns_that_are_not_read_may_hold_anything(make_yaml, tmp_path, only):
    only("table = stream")
    others = [1, "a", "\ud800"]  # the last is no UTF-8
    rows = [{"text": f"aa b{n} cc", "id": others[n % 3]} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"sources": [{"path": str(tmp_path / "rows.jsonl")}]}  # verify streams them too
    assert main(["verify", str(make_yaml(data=data))]) == 0


def test_too_few_rows_are_refused(make_yaml, tmp_path):
    (tmp_path / "short.txt").write_text("aa bb\nbb cc\n")
    data = {"sources": [{"path": str(tmp_path / "short.txt")}]}
    with pytest.raises(ValueError, match=r"expected 4 rows or more to verify, got 2"):
        verify.verify(load_run_config(make_yaml(data=data)))


def test_residuals_are_relative_and_keep_their_sign():
    first, second = ([{"loss": value} for value in values] for values in ((2.0, 4.0), (2.2, 3.8)))
    found = verify.residuals(first, second, "loss")
    assert found["largest"] == pytest.approx(0.1)
    assert found["mean_signed"] == pytest.approx((0.1 - 0.05) / 2)
    assert verify.residuals(first, second[:1], "loss") is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_processes_agree_with_one(make_yaml, tmp_path, only, dtype):
    only(PROCESSES)
    words = [f"model.dtype={dtype}", f"model.unfreeze.dtype={dtype}", "check_base=false"]
    if not torch.cuda.is_available():  # processes that are not told so would not work together
        words.append("training.use_cpu=false")
    assert main(["verify", str(make_yaml()), *words]) == 0
    (pair,) = json.loads((tmp_path / "run.verify.json").read_text())["pairs"]
    assert 0 < pair["loss"]["largest"] <= verify.TOLERANCES[dtype]
