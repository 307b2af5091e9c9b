"""Every part runs three steps by its command, and tabulates what is there."""

import json
from dataclasses import replace

import pytest
import torch
from matplotlib.image import imread

from experiments.__main__ import main
from experiments.worth_it import bottleneck, classes, command, language, masked, neobert
from harmonic_sft.results import read_results
from scripts.make_neobert import main as make_neobert


def read(folder, name):
    return read_results(folder / f"quick_{name}.json")


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_classes_train_every_arm_and_are_tabulated_again(
    data, tmp_path, tiny_base, monkeypatch, capsys
):
    few = {arm: classes.ARMS[arm] for arm in ("linear", "dist -12", "frozen", classes.CONTROL)}
    monkeypatch.setattr(classes, "ARMS", few)
    monkeypatch.setattr(classes, "STAGES", [tuple(few)])
    arguments = ["worth_it", str(data), "--part", "classes", "--regime", "head", "--quick"]
    arguments += ["--base", str(tiny_base), "--output", str(tmp_path / "out")]
    assert main(arguments) == 0
    found = read(tmp_path / "out", "classes_head")
    assert {row["arm"] for row in found["rows"]} == {"linear", "dist -12", "frozen"}
    cells = {row["cell"] for row in found["rows"]}
    assert cells == {classes.cell_name(classes.PRIMARY), classes.cell_name(classes.NOISY)}
    primary = [row for row in found["rows"] if "rejected" not in row]
    assert {row["arm"] for row in primary} == {"linear", "dist -12"}
    assert main([*arguments, "--regime", "block"]) == 0
    block = {row["arm"]: row for row in read(tmp_path / "out", "classes_block")["rows"]}
    assert block.keys() == few.keys()
    assert {arm for arm, row in block.items() if "rejected" in row} == {"frozen"}
    assert {arm for arm, row in block.items() if "over_start" in row} == {"dist -12", "frozen"}
    assert {row["verdict"] for row in found["noise"]} <= {"confirmed", "refuted", "undecided"}
    assert imread(tmp_path / "out" / "quick_classes_head.png").shape[1] > 800
    monkeypatch.setattr(classes, "run_once", None)  # nothing is trained again
    assert main([*arguments, "--minutes", "0"]) == 0
    assert read(tmp_path / "out", "classes_head")["rows"] == found["rows"]
    assert "gain, points" in capsys.readouterr().out


def test_the_bottleneck_is_probed_at_every_width_and_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(bottleneck, "NUM_STATES", 2)
    monkeypatch.setattr(bottleneck, "WIDTHS", (8,))
    arguments = ["worth_it", str(tmp_path), "--part", "bottleneck", "--quick"]
    assert main([*arguments, "--output", str(tmp_path)]) == 0
    rows = read(tmp_path, "bottleneck")["rows"]
    assert len(rows) == 2 * len(bottleneck.HEADS)
    assert all(0 < row["share"]["mean"] <= 1 for row in rows)
    assert imread(tmp_path / "quick_bottleneck.png").shape[1] > 800


@pytest.mark.slow
def test_language_compares_all_arms(tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(50, (300,), generator=generator), torch.randint(50, (4, 65))
    monkeypatch.setattr(language, "read_rows", lambda folder: texts)
    monkeypatch.setattr(language, "NUM_PROBED", 2)
    monkeypatch.setattr(command, "QUICK_STEPS", 1)
    arguments = ["worth_it", str(tmp_path), "--part", "language", "--quick"]
    assert main([*arguments, "--output", str(tmp_path)]) == 0
    found = read(tmp_path, "language")
    assert {row["arm"] for row in found["rows"]} == set(language.LANGUAGE)
    assert {row["arm"] for row in found["rows"] if "rejected" in row} == set(language.ANNEALING)
    assert len(found["ceiling"]) == 6
    assert len(found["biases"]) == 4
    assert imread(tmp_path / "quick_language.png").shape[1] > 800
    assert main([*arguments[:3], "exponents", "--quick", "--output", str(tmp_path)]) == 0
    rows = {row["arm"]: row for row in read(tmp_path, "language_exponents")["rows"]}
    assert set(rows) == set(language.EXPONENTS)
    assert {arm for arm, row in rows.items() if "verdict" in row} == set(language.STEEPER)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_masked_language_compares_all_arms_on_both_bases(
    data, tmp_path, tiny_base, monkeypatch, capsys
):
    few = {arm: masked.ARMS[arm] for arm in ("linear", "dist -12", "linear, E")}
    monkeypatch.setattr(masked, "ARMS", few)
    arguments = ["worth_it", str(data), "--part", "masked", "--quick"]
    arguments += ["--base", str(tiny_base), "--output", str(tmp_path / "out")]
    assert main(arguments) == 0
    found = read(tmp_path / "out", "language_masked")
    arms = [(row["base"], row["arm"]) for row in found["rows"]]
    on_linear = [("linear", arm) for arm in few]
    assert arms == [*on_linear, ("dist", "linear"), ("dist", "dist -12"), ("both", "dist -12")]
    assert imread(tmp_path / "out" / "quick_language_masked.png").shape[1] > 800
    monkeypatch.setattr(masked, "run_once", None)  # nothing is trained again
    assert main([*arguments, "--minutes", "0"]) == 0
    assert read(tmp_path / "out", "language_masked")["rows"] == found["rows"]
    assert "gain, nats" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(masked, "FACTORS", (1,))
    assert main([*arguments[:3], "bias", *arguments[4:]]) == 0
    rows = read(tmp_path / "out", "language_bias")["rows"]
    assert [row["arm"] for row in rows] == list(masked.BIAS_ARMS)
    assert {row["arm"] for row in rows if "bias" in row} == set(masked.WITHOUT)
    assert {row["rate"] for row in rows if row["arm"] in masked.BIAS_RATES} == set(
        masked.BIAS_RATES.values()
    )


@pytest.mark.slow
def test_neobert_trains_every_arm_on_a_stream_and_writes_its_report(
    tmp_path, text_file, monkeypatch, capsys
):
    make_neobert(["--small", str(tmp_path / "base")])
    monkeypatch.setattr(masked, "FACTORS", (0.3, 1))
    few = neobert.read_family(neobert.FILE, "neobert")
    rows = {arm: few.rows[arm] for arm in ("linear", "dist -12", "euclid")}
    monkeypatch.setattr(neobert, "read_family", lambda *_: replace(few, rows=rows))
    settings = [
        f"model.base={tmp_path / 'base'}",
        "model.revision=null",
        "check_base=false",  # the weights are random
        f"data.sources=[{{path: {text_file}, streaming: true}}]",
        "data.context_length=24",
        "data.eval.documents=10",
        "training.gradient_accumulation_steps=1",
        "training.per_device_eval_batch_size=8",
        "training.save_strategy=no",
        "training.use_cpu=true",
    ]
    arguments = ["worth_it", str(tmp_path), *settings, "--part", "neobert", "--quick"]
    arguments += ["--output", str(tmp_path / "out")]
    assert main(arguments) == 0
    found = read(tmp_path / "out", "neobert")
    assert [row["arm"] for row in found["rows"]] == list(rows)
    assert {row["arm"] for row in found["rows"] if "rejected" in row} == {"euclid"}  # not primary
    lines = (tmp_path / "out" / "quick_neobert.jsonl").read_text().splitlines()
    runs = [json.loads(line) for line in lines]
    assert len(runs) == 3 * (2 + 2)  # rates, seeds
    validation, test = ({tuple(r["tokens"]) for r in part} for part in (runs[:6], runs[6:]))
    assert len(validation) == len(test) == 1  # the same documents for all
    assert all(run["loss"] <= run["as_trained"] + 0.1 for run in runs)
    kept = {path.name.rsplit("-", 1)[1] for path in (tmp_path / "out" / "neobert").iterdir()}
    assert kept == {"0", "1"}  # what chose the rates is deleted
    assert "<html" in (tmp_path / "out" / "quick_neobert.html").read_text()
    assert imread(tmp_path / "out" / "quick_neobert.png").shape[1] > 800
    monkeypatch.setattr(neobert, "finish", None)  # nothing is trained again
    assert main([*arguments, "--minutes", "0"]) == 0
    assert read(tmp_path / "out", "neobert")["rows"] == found["rows"]
    assert "gain, nats" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("bottleneck", "bottleneck"),
        ("language", "language"),
        ("exponents", "language_exponents"),
        ("neobert", "neobert"),
    ],
)
def test_where_nothing_is_kept_and_no_time_is_given_no_results_are_replaced(
    part, name, tmp_path, capsys
):
    earlier = tmp_path / f"{name}.json"
    earlier.write_text("{}")
    arguments = ["worth_it", str(tmp_path / "no data"), "--part", part, "--minutes", "0"]
    assert main([*arguments, "--output", str(tmp_path)]) == 1
    assert "error: --minutes: expected time for one arm with all its" in capsys.readouterr().err
    assert earlier.read_text() == "{}"


def test_data_that_are_not_there_are_an_error_that_names_the_file(tmp_path, capsys):
    arguments = ["worth_it", str(tmp_path / "no data"), "--part", "language", "--quick"]
    assert main([*arguments, "--output", str(tmp_path)]) == 1
    assert "tiny_bpe_tokenizer.json" in capsys.readouterr().err
