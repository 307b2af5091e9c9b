"""Evaluating a folder: on its own split, on other data, never on what it was trained on."""

import csv
import json
import os
import re
import shutil
from pathlib import Path

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file

from harmonic_sft.data.batches import MaskedRows
from harmonic_sft.data.masking import ClassLabels
from harmonic_sft.models import HarmonicForMaskedLM
from harmonic_sft.training import evaluation
from harmonic_sft.training.evaluation import evaluate_folder, evaluate_suite, scored_sha256
from harmonic_sft.training.output_folder import read_run
from harmonic_sft_cli import main
from tests.conftest import write_run
from tests.saved_models import change_json
from tests.training.conftest import start

CPU = "training.use_cpu=true"


@pytest.fixture
def other(tmp_path):
    """240 lines, every tenth of them blank, one longer than a row."""
    lines = [f"a{letter} b{letter} c{letter}" for letter in "abcd"] * 60
    lines[9::10] = [""] * 24
    lines[4] = " ".join(["aa ab ac ad ba bb"] * 8)
    path = tmp_path / "other.txt"
    path.write_text("\n".join(lines))
    return path


def test_rows_that_cannot_be_read_are_counted(run_copy, other, caplog):
    caplog.set_level("INFO")
    other.write_bytes(b"\xe9 aa\n" + other.read_bytes())
    found = evaluate_folder(run_copy, [f"data={other}", "data.on_bad_row=skip", CPU])
    assert found["documents"] == 216
    assert found["data"]["rows_left_out"] == 24  # with the blank ones
    assert "Left out: 1 bad rows, such as" in caplog.text
    assert "line 1" in found["data"]["reasons"][0]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_other_data_are_scored_whole(run_copy, other, tmp_path, caplog, capsys):
    caplog.set_level("INFO")
    path = tmp_path / "l.jsonl"
    words = ["eval", str(run_copy), f"data={other}", CPU, "--per-document", str(path)]
    assert main(words) == 0
    results = json.loads((run_copy / "results" / "eval.json").read_text())
    assert results["documents"] == 216
    final = results["final"]
    assert final["documents"] < 216  # some have no masked token
    shown = f"Scored: {final['documents']} documents, {final['tokens']:.0f} masked tokens."
    assert shown in caplog.text
    captured = capsys.readouterr()
    assert "Evaluating: " in captured.err
    assert results["data"]["sources"][0]["path"] == str(other)
    assert results["data"]["context_length"] == 24  # of the run
    held_back = evaluate_folder(run_copy, [f"data={other}", "data.eval.documents=9", CPU])
    assert held_back["documents"] == 9

    lines = read(path)
    assert [line["document"] for line in lines] == [n for n in range(240) if n % 10 != 9]
    assert {line["source"] for line in lines} == {str(other)}
    assert sum(line["tokens"] for line in lines) == results["final"]["tokens"]
    total = sum(line["tokens"] * line["loss"] for line in lines if line["tokens"])
    assert total / results["final"]["tokens"] == pytest.approx(results["final"]["loss"])
    assert all((line["loss"] is None) == (line["tokens"] == 0) for line in lines)


def test_a_validation_file_of_the_run_is_left_where_other_data_are_given(run_copy, other, tmp_path):
    valid = tmp_path / "valid.txt"
    valid.write_text("za zb zc zd ya yb yc yd xa xb xc xd\n" * 7)
    run = read_run(run_copy)
    write_run(run_copy / "run.yaml", run, {"data": {"eval": {"source": {"path": str(valid)}}}})
    (run_copy / "results" / "trained_documents.npy").unlink()  # as of a stream
    found = evaluate_folder(run_copy, [CPU])
    assert found["documents"] == 7
    # The run's stream may hold any document, but not those of another place.
    assert found["data"]["held_out"]["lineage"][0]["verdict"] == "unknown"
    words = [f"data={other}", "data.eval.documents=9", CPU]
    assert evaluate_folder(run_copy, words)["documents"] == 9


def test_other_data_have_the_column_and_the_format_of_the_run(run_copy, other, tmp_path):
    run = read_run(run_copy)
    source = run["data"]["sources"][0] | {"column": "body", "format": "text"}
    write_run(run_copy / "run.yaml", run, {"data": {"sources": [source, source]}})
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join([json.dumps({"body": "aa ab ac ad ba bb"})] * 20))
    for path, column, row_format in ((rows, "body", "text"), (other, "text", "auto")):
        found = evaluate_folder(run_copy, [f"data={path}", CPU])["data"]["sources"]
        assert [(s["column"], s["format"]) for s in found] == [(column, row_format)]
    sources = [source | {"column": "text"}, source]
    write_run(run_copy / "run.yaml", run, {"data": {"sources": sources}})
    with pytest.raises(ValueError, match=r"expected one of \['body'\], got 'text'"):
        evaluate_folder(run_copy, [f"data={rows}", CPU])


def test_a_checkpoint_is_evaluated_as_its_run(run_copy, other):
    run = read_run(run_copy)
    write_run(run_copy / "run.yaml", run, {"data": {"mask": {"probability": 0.5}}})
    for words in ([CPU], [f"data={other}", CPU]):
        of_run, of_checkpoint = (
            evaluate_folder(folder, words)["final"]
            for folder in (run_copy, run_copy / "checkpoint-6")
        )
        assert of_checkpoint["loss"] == of_run["loss"]
        assert of_checkpoint["tokens"] == of_run["tokens"]


def test_the_base_of_the_suite_is_the_commit_that_was_trained_on(
    run_copy, tiny_base, cache_repo, tmp_path
):
    newer = shutil.copytree(tiny_base, tmp_path / "newer")
    weights = load_file(newer / "model.safetensors")
    save_file({k: 2 * w for k, w in weights.items()}, newer / "model.safetensors", {"format": "pt"})
    cache_repo("alice/base", newer)  # what `main` is now
    cache = Path(os.environ["HF_HUB_CACHE"], "models--alice--base", "snapshots")
    shutil.copytree(tiny_base, cache / ("a" * 40))
    change_json(run_copy / "config.json", base_revision="a" * 40)
    write_run(run_copy / "run.yaml", read_run(run_copy), {"model": {"base": "alice/base"}})
    base = evaluation._open(run_copy, [CPU]).base()
    expected = HarmonicForMaskedLM.from_base(str(tiny_base)).model.backbone.state_dict()
    assert all(torch.equal(w, expected[k]) for k, w in base.state_dict().items())


def test_losses_of_documents_are_those_of_the_model(run_copy, tmp_path):
    """Recomputed from the published model alone, on rows of tokens that predict everything."""
    rows = [[2, 7, 9, 11, 3], [2, 8, 10, 3]]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": "aa ab ac ad ba bb"}) for _ in rows))
    out = tmp_path / "losses.jsonl"
    everything = [f"data.sources=[{{path: {path}}}]", "data.mask={probability: 0.99}", CPU]
    first = evaluate_folder(run_copy, everything, out)
    lines = read(out)
    model = HarmonicForMaskedLM.from_pretrained(run_copy).eval()
    ids = torch.tensor([[2, 4, 4, 4, 4, 4, 4, 3]])  # [CLS], six masks, [SEP]
    labels = torch.tensor([5, 6, 7, 8, 9, 10])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, 1:7]
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    expected = [losses.mean().item() if line["tokens"] == 6 else None for line in lines]
    assert any(expected)
    for line, loss in zip(lines, expected, strict=True):
        assert loss is None or line["loss"] == pytest.approx(loss, rel=1e-5)
    assert first["documents"] == 2
    with pytest.raises(ValueError, match="--per-document: expected a file of its own"):
        evaluate_folder(run_copy, everything, path)
    assert path.read_text().count("aa ab") == 2


def test_batches_change_neither_the_metrics_nor_the_losses_of_documents(run_copy, other, tmp_path):
    expected = None
    ways = ("per_device_eval_batch_size=16", "per_device_eval_batch_size=50")
    for way in (*(f"training.{way}" for way in ways), "data.padding_free=true"):
        path = tmp_path / "losses.jsonl"
        metrics = evaluate_folder(run_copy, [f"data={other}", CPU, way], path)["final"]
        interval = metrics.pop("loss_interval")
        losses = [line["loss"] for line in read(path) if line["loss"] is not None]
        expected = expected or (metrics, interval, losses)
        assert metrics == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
        assert interval == pytest.approx(expected[1], abs=1e-5)
        assert losses == pytest.approx(expected[2], rel=1e-5)
        assert interval[0] < metrics["loss"] < interval[1]


@pytest.mark.parametrize(("words", "shown"), [([], "now"), (["--suite", "quick"], "accuracy")])
def test_figures_are_shown_also_where_they_cannot_be_written(
    run_copy, monkeypatch, capsys, words, shown
):
    def refused(*_):
        raise OSError("Read-only file system")

    monkeypatch.setattr(evaluation, "write_results", refused)
    assert main(["eval", str(run_copy), CPU, *words]) == 1
    printed = capsys.readouterr()
    assert shown in printed.out
    assert printed.err.endswith("error: Read-only file system\n")


@pytest.mark.parametrize("words", [[], ["--suite", "quick"]])
def test_a_model_of_somebody_else_keeps_no_results(run_copy, monkeypatch, caplog, words):
    monkeypatch.setattr(os, "access", lambda path, mode: path != run_copy)
    assert main(["eval", str(run_copy), CPU, *words]) == 0
    name = "suite" if words else "eval"
    assert f"{run_copy} may not be written: its {name}.json is left out" in caplog.text
    assert not (run_copy / "results" / f"{name}.json").exists()


def test_a_download_needs_only_the_path_of_data(run_copy, other):
    (run_copy / "run.yaml").unlink()
    with pytest.raises(ValueError, match=r"has no run.yaml. Add data=file.txt"):
        evaluate_folder(run_copy)
    results = evaluate_folder(run_copy, [f"data={other}", CPU])
    assert results["data"]["context_length"] == 64  # what the model takes


def test_an_unsaved_result_is_refused_with_its_checkpoint(run_copy):
    (run_copy / "config.json").unlink()
    with pytest.raises(ValueError, match=r"^eval: expected .* Name its checkpoint '.*point-6', or"):
        evaluate_folder(run_copy)


def test_a_fingerprint_is_that_of_tokens_and_labels():
    def rows(*pairs):
        table = [{"input_ids": ids, "labels": [str(label)]} for ids, label in pairs]
        numbers = {"0": 0, "1": 1}
        masker = ClassLabels(seed=0, names=["a", "b"], numbers=numbers, of_tokens=False)
        return MaskedRows(datasets.Dataset.from_list(table), masker)

    base = scored_sha256(rows(([1, 2], 0), ([3], 1)))
    assert base == scored_sha256(rows(([1, 2], 0), ([3], 1)))
    others = [
        rows(([1, 2], 1), ([3], 1)),
        rows(([1, 4], 0), ([3], 1)),
        rows(([1], 0), ([2, 3], 1)),
        rows(([1, 2], 0)),
    ]
    assert base not in [scored_sha256(other) for other in others]


@pytest.fixture
def sets(tmp_path):
    """Every kind of set that the suite knows, small."""
    folder = tmp_path / "sets"
    files = {
        "wordsim/tiny.tsv": "word1\tword2\tscore\n"
        + "".join(f"a{a}\tb{b}\t{i}\n" for i, (a, b) in enumerate(["ab", "bc", "cd", "da"]))
        + "aa\tunknownword\t3\n",
        "wordsim/few.tsv": "word1\tword2\tscore\naa\tbb\t1\n",
        "function_vectors/present-past.json": json.dumps(
            [{"input": f"a{letter}", "output": f"b{letter}"} for letter in "abcd"]
            + [{"input": "cc", "output": "cc"}, {"input": "aa", "output": "unknownword"}]
        ),
        "function_vectors/antonym.json": json.dumps(
            [{"input": f"a{x} a{x}", "output": f"b{x} a{x}"} for x in "abcd"]
        ),
        "minimal_pairs/order.jsonl": json.dumps(
            {"sentence_good": "aa ab ac", "sentence_bad": "ac ab aa"}
        ),
        "sts/stsb_dev.tsv": "score\tsentence1\tsentence2\n"
        + "".join(f"{i}\taa ab a{a}\tba bb b{a}\n" for i, a in enumerate("abcd")),
        "text/other.txt": "aa ab ac ad ba bb bc bd\n" * 30,
    }
    rows = [f"{name}a {name}b {name}c {end},{name}" for name in "abcdefgh" for end in ("aa", "bb")]
    tests = [*(f"{row[:2]} {row}" for row in rows * 4), rows[3], "aa bb,unknown"]
    files["probing/banking77_train.csv"] = "\n".join(["text,category", *rows * 4])
    files["probing/banking77_test.csv"] = "\n".join(["text,category", *tests])
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_losses_at_other_exponents_are_also_compared_at_the_best_ones(run_copy, tmp_path, caplog):
    """Logits are proportional to the exponent: at the best one the two models are the same."""
    caplog.set_level("INFO")
    other = shutil.copytree(run_copy, tmp_path / "other")
    head = json.loads((other / "config.json").read_text())["head"]
    change_json(other / "config.json", head=head | {"h_exp": 5 * head["h_exp"]})
    trained, best = evaluate_suite([run_copy, other], [CPU])["differences"]
    assert (trained["metric"], best["metric"]) == ("loss", "post_hoc_loss")
    assert abs(trained["mean"]) > 0.1
    assert abs(best["mean"]) < 0.01
    assert "Losses at different exponents cannot be compared" in caplog.text


def test_the_suite_measures_what_is_there_and_names_what_is_not(run_copy, sets, tmp_path, capsys):
    html = tmp_path / "new" / "report.html"
    other = shutil.copytree(run_copy, tmp_path / "other")
    base = read_run(run_copy)["model"]["base"]
    words = ["eval", str(run_copy), CPU, "--against", str(other), "--data", str(sets)]
    assert main([*words, "--ruler", base, "--html", str(html)]) == 0
    results = json.loads((run_copy / "results" / "suite.json").read_text())
    assert results["models"] == ["copy", "other"]
    rows = {(row["set"], row.get("metric")): row for row in results["rows"]}
    assert all(row["values"][0] == row["values"][1] for row in results["rows"])  # the same weights
    found = [(one["metric"], one["mean"], one["verdict"]) for one in results["differences"]]
    assert found == [("loss", 0, "undecided"), ("post_hoc_loss", 0, "undecided")]
    loss = evaluate_folder(run_copy, [CPU])["final"]["loss"]
    assert rows["held-out data", "loss, nats"]["values"][0] == pytest.approx(loss)
    missing = {row["set"]: row["missing"] for row in results["rows"] if "missing" in row}
    assert missing["sst2"] == "probing/sst2_train.tsv in --data"
    assert missing["few"] == "3 pairs of known words, 1 of 1 are"
    tiny = rows["tiny", "Spearman, cosine, single tokens"]
    assert (tiny["n"], tiny["note"]) == (4, "1 words left out: unknownword")
    assert rows["present-past", "parallelogram loss"]["n"] == 4
    probe = rows["banking77", "accuracy, logistic"]  # two of 66 are a copy, or of no known class
    assert (probe["n"], probe["note"]) == (
        64,
        "banking77: test rows left out, whose text trains, or none of their class: 2",
    )
    for key in (
        ("other", "bits per byte"),
        ("held-out data", "ECE of a perfect model"),
        ("prototypes", "effective dimension"),
        ("drift from the base", "drift cosine"),
        ("order", "minimal pairs"),
        ("stsb_dev", "Spearman, -L2"),
        ("banking77", "accuracy, logistic"),
        ("banking77", "out-of-scope AUROC, energy"),
        ("banking77", "accuracy, knn, at most 5 examples a class"),
        ("banking77", "accuracy, knn, 30% wrong labels"),
        ("stsb_dev, hidden states", "effective dimension, layer 3 of 3"),
        ("banking77", "accuracy, class means, typos in a tenth of the words"),
        ("held-out data", "class-center alignment"),
        ("held-out data", "cosine of mean under the probabilities and label, shuffled"),
    ):
        assert isinstance(rows[key]["values"][0], float), key
    assert html.read_text().startswith("<!doctype html>")
    assert missing["antonym"] == "3 pairs of single tokens, 0 of 4 are"
    assert any(name == "antonym" and "hidden states" in str(metric) for name, metric in rows)
    assert "not measured: needs probing/sst2_train.tsv" in " ".join(capsys.readouterr().out.split())


def test_a_ruler_judges_models_whose_vocabularies_are_padded_otherwise(run_copy, tmp_path):
    other = shutil.copytree(run_copy, tmp_path / "other")
    model = HarmonicForMaskedLM.from_pretrained(other)
    model.resize_token_embeddings(len(model.dist_head.weight) + 3)
    model.save_pretrained(other)
    base = read_run(run_copy)["model"]["base"]
    both = [
        evaluate_suite(pair, [CPU], ruler=base) for pair in ([run_copy, other], [other, run_copy])
    ]
    title = "cosine of mean under the probabilities and label"
    found = [
        row["values"]
        for results in both
        for row in results["rows"]
        if (row["group"], row.get("metric")) == ("semantic errors", title)
    ]
    assert found[0] == pytest.approx(found[1][::-1], rel=1e-5)


def test_batches_do_not_change_what_the_suite_looks_at(run_copy, monkeypatch):
    monkeypatch.setattr(evaluation, "NUM_ROWS", 10)
    found = []
    for way in ("per_device_eval_batch_size=1", "per_device_eval_batch_size=8"):
        rows = evaluate_suite([run_copy], [CPU, f"training.{way}"])["rows"]
        found += [row for row in rows if row.get("metric") == "class-center alignment"]
    assert found[0]["n"] == found[1]["n"] > 0
    assert found[0]["values"] == pytest.approx(found[1]["values"])


def test_files_of_another_form_leave_the_others_measured(run_copy, sets):
    csv.field_size_limit(131_072)  # Python's own; tests that read CSV data raise it
    files = {
        "probing/banking77_test.csv": "text,category\naa bb,aa\naa",
        "function_vectors/antonym.json": '{"aa": "bb"}',
        "minimal_pairs/list.jsonl": '["aa", "bb"]',
        "probing/sst2_train.tsv": "sentence\tlabel\n" + "a" * 140_000 + "\t1\n",
        "probing/sst2_dev.tsv": "sentence\tlabel\naa\t1\n",
        "sts/stsb_dev.tsv": "score\tsentence1\tsentence2\n4\taa\tbb\n2\taa",
    }
    nan = "score\tsentence1\tsentence2\n4\taa\tbb\nnan\taa\tba\n3\tbb\tba\n"
    for name, text in files.items():
        (sets / name).write_text(text)
    (sets / "text" / "folder.txt").mkdir()
    rows = evaluate_suite([run_copy], [CPU], sets=sets)["rows"]
    missing = {row["set"]: row["missing"] for row in rows if "missing" in row}
    assert missing["banking77"] == "text and category in row 2 of banking77_test.csv"
    for name in ("sst2", "antonym", "list"):
        assert missing[name].startswith("other data: "), name
    assert missing["STS"].endswith("expected at least 2 finite rows, got 1")
    assert missing["folder"].startswith("a file that can be read: ")
    (sets / "sts" / "stsb_dev.tsv").write_text(nan)
    rows = evaluate_suite([run_copy], [CPU], sets=sets)["rows"]
    assert {"finite scores in stsb_dev.tsv"} == {
        row["missing"] for row in rows if row["set"] == "STS"
    }
    assert {"tiny", "present-past", "order"} <= {row["set"] for row in rows if "metric" in row}


def test_sets_may_have_byte_order_marks_and_carriage_returns(run_copy, sets):
    names = ["wordsim/tiny.tsv", "minimal_pairs/order.jsonl", "sts/stsb_dev.tsv"]
    for path in [*map(sets.joinpath, names), sets / "function_vectors" / "present-past.json"]:
        path.write_text(path.read_text(), encoding="utf-8-sig")
    (sets / "text" / "bars.txt").write_bytes(b"aa ab\rac ad\rba bb\n" * 8)
    rows = evaluate_suite([run_copy], [CPU], sets=sets)["rows"]
    reasons = [row["missing"] for row in rows if "missing" in row]
    assert not any("other data" in reason for reason in reasons)


def test_a_bad_file_of_the_sets_leaves_the_others_measured(run_copy, sets, caplog):
    run = read_run(run_copy)
    run["head"]["init"] = "output_embeddings"
    write_run(run_copy / "run.yaml", run, {})
    files = {
        "text/empty.txt": "",
        "text/line.txt": "aa ab ac\n",
        "minimal_pairs/long.jsonl": json.dumps(
            {"sentence_good": "aa " * 70, "sentence_bad": "bb " * 70}
        ),
        "sts/stsb_dev.tsv": "score\tsentence1\tsecond\n1\taa\tbb\n",
        "wordsim/bad.tsv": "word1\tword2\tscore\naa\tbb\thigh\n",
        "function_vectors/antonym.json": "{",
        "probing/banking77_test.csv": "text,category\naa bb,unknown",
    }
    for name, before in (("train", ""), ("dev", "bd ")):  # one row of `b`, which gets another label
        rows = [f"{before}{word} {end}\ta" for word in ("aa", "ab", "ac") for end in ("bb", "bc")]
        more = [f"{before}{row}" for row in ("ca cb\tb", "ba bb\tc", "ba bc\tc")]
        rows = [*rows[:2], more[0], *rows[2:], *more[1:]]
        rows = ["sentence\tlabel", *rows]
        files[f"probing/sst2_{name}.tsv"] = "\n".join(rows)
    for name, text in files.items():
        (sets / name).write_text(text)
    results = evaluate_suite([run_copy], [CPU], sets=sets)
    missing = {row["set"]: row["missing"] for row in results["rows"] if "missing" in row}
    assert missing["empty"] == "other data: ValueError: empty.txt: expected at least 2 lines, got 0"
    assert missing["line"].endswith("expected at least 2 lines, got 1")
    assert "text: expected at most 64 tokens, got 72" in missing["long"]
    assert "bad.tsv" in missing["bad"]
    assert "Expecting property name" in missing["antonym"]
    assert missing["STS"] == "other data: KeyError: 'sentence2'"
    assert missing["banking77"].startswith("test rows of classes that stand in training")
    assert missing["drift from the base"].startswith("a head that started from the base's input")
    measured = {(row["set"], row["metric"]) for row in results["rows"] if "missing" not in row}
    assert {
        ("other", "bits per byte"),
        ("order", "minimal pairs"),
        ("tiny", "Spearman, cosine, single tokens"),
        ("present-past", "parallelogram loss"),
        ("sst2", "accuracy, knn, 30% wrong labels"),
    } <= measured


def test_what_the_suite_cannot_compare_is_refused(run_copy, tmp_path, caplog, monkeypatch):
    other = shutil.copytree(run_copy, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["aa"], vocab["bb"] = vocab["bb"], vocab["aa"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="--against: expected a model with the tokenizer of"):
        evaluate_suite([run_copy, other], [CPU])
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "_open", None)  # nothing is measured before
        with pytest.raises(ValueError, match="--against: expected a folder with a trained model"):
            evaluate_suite([run_copy, tmp_path / "nothing"], [CPU])
        with pytest.raises(ValueError, match="--against: expected every folder once, got"):
            evaluate_suite([run_copy, other, tmp_path / "x" / ".." / "other"], [CPU])
    with pytest.raises(ValueError, match="--data: expected a folder with evaluation sets"):
        evaluate_suite([run_copy], [CPU], sets=tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"expected a folder with a config\.json, got 'runs/none'"):
        evaluate_suite([run_copy], [CPU], ruler="runs/none")
    with pytest.raises(ValueError, match="--ruler: expected an encoder that can be loaded, got 'n"):
        evaluate_suite([run_copy], [CPU], ruler="nope")
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "find_spec", lambda name: None)
        with pytest.raises(ValueError, match=r"--suite: expected scikit-learn, got none. Install"):
            evaluate_suite([run_copy], [CPU])
    empty = ["data.eval.documents=0", CPU]
    with pytest.raises(ValueError, match="eval: expected rows to evaluate on, got an empty split"):
        evaluate_folder(run_copy, empty)
    model = HarmonicForMaskedLM.from_pretrained(other)
    model.dist_head.weight.data[:] = model.dist_head.weight.data[:1]
    model.save_pretrained(other)
    shutil.copy(run_copy / "tokenizer.json", other)
    collapsed = evaluate_suite([other], [CPU])
    assert collapsed["rows"][-1]["missing"] == "--ruler ENCODER"
    assert "other: all prototypes are equal: the head has collapsed." in caplog.text
    model.dist_head.weight.data[3] = torch.nan
    model.save_pretrained(other)
    with pytest.raises(ValueError, match="expected finite logits, got others for"):
        evaluate_suite([other], [CPU])
    assert "other: 1 of 109 prototypes are not finite." in caplog.text


def test_a_model_that_cannot_read_the_rows_is_not_compared(run_copy, tmp_path):
    other = shutil.copytree(run_copy, tmp_path / "other")
    body = json.loads((other / "config.json").read_text())["text_config"]
    change_json(other / "config.json", text_config=body | {"max_position_embeddings": 16})
    message = "--against: expected a model of at least 24 positions, got 16 in "
    with pytest.raises(ValueError, match=message):
        evaluate_suite([run_copy, other], [CPU])


def test_explain_prints_tokens_distances_and_neighbors(run_copy, capsys, tmp_path):
    sizes = []
    for top in ("1", "3"):
        assert main(["explain", str(run_copy), "aa [MASK] ac", "--top", top]) == 0
        printed = capsys.readouterr().out
        sizes.append(len(printed.splitlines()))
    assert sizes[1] - sizes[0] == 2
    assert "Mask 1 of 'aa [MASK] ac'" in printed
    assert all(word in printed for word in ("probability", "distance", "nearest"))
    assert main(["explain", str(tmp_path), "aa [MASK]"]) == 1
    assert "explain: expected a folder with a trained model" in capsys.readouterr().err


def test_a_run_records_what_it_held_out_and_what_is_known_of_its_base(
    finished_run, finished_results, tiny_base
):
    found = finished_results["data"]["held_out"]
    saved = json.loads((finished_run / "results" / "held_out.json").read_text())
    assert len(saved["fingerprints"]) == found["documents"] == 20
    assert found["sha256"] == saved["digest"]
    unknown = {"model": str(tiny_base), "verdict": "unknown", "documents_seen": 0}
    assert found["lineage"] == [unknown]
    assert (finished_run / "results" / "trained_documents.npy").is_file()
    published = json.dumps(finished_results)
    assert not any(name in published for name in saved["fingerprints"])


def test_a_model_is_evaluated_on_no_document_that_it_was_trained_on(finished_run):
    before = {path: path.stat().st_mtime_ns for path in finished_run.rglob("*")}
    message = r"trained without holding out 1?\d of the 20 documents"
    with pytest.raises(ValueError, match=message):
        evaluate_folder(finished_run, ["data.eval.seed=7", CPU])
    text = read_run(finished_run)["data"]["sources"][0]["path"]
    with pytest.raises(ValueError, match=r"eval: expected documents that no .*data=other\.txt"):
        evaluate_folder(finished_run, [f"data={text}", CPU])
    assert {path: path.stat().st_mtime_ns for path in finished_run.rglob("*")} == before


def test_a_base_that_was_trained_on_the_documents_is_trained_but_not_evaluated(
    finished_run, run_copy_of, caplog
):
    """The base held out other documents, chosen by another seed."""
    base = finished_run
    results, folder = run_copy_of(base, seed=7)
    assert results["steps"] == 1
    first, second = results["data"]["held_out"]["lineage"]
    assert (first["model"], first["verdict"]) == (str(base), "seen")
    assert 0 < first["documents_seen"] <= 20
    assert second["verdict"] == "unknown"
    assert "The evaluation does not count: " in caplog.text
    with pytest.raises(ValueError, match=f"{base} was trained without holding out"):
        evaluate_folder(folder, [CPU])


def test_runs_with_the_same_held_out_documents_are_compared(finished_run, run_copy_of):
    """A second run on the first, held out alike, is evaluated; the root stays unknown."""
    base = finished_run
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

    def make(base, **held_out):
        settings = run_settings(base, tmp_path / "second")
        settings["data"]["eval"] |= held_out
        sections = {"training": {"max_steps": 1, "seed": 5}, "check_base": False}
        return start(write_run(tmp_path / "run.yaml", settings, sections)), tmp_path / "second"

    return make


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", "[1]"])
def test_a_damaged_file_is_an_error_with_its_place(run_copy, tmp_path, name, content, capsys):
    commands = [["eval", str(run_copy), CPU], ["explain", str(run_copy), "aa [MASK]"]]
    if name != "tokenizer.json":  # which an export copies
        commands.append(["export", str(run_copy), "--output", str(tmp_path / "linear")])
    (run_copy / name).write_text(content)
    for words in commands:
        assert main(words) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"error: {run_copy}")
        assert re.search(r": expected (it as it was saved|JSON|a JSON object), got \w+", error)


def test_an_export_says_where_it_is(run_copy, tmp_path, capsys, caplog):
    target = tmp_path / "linear"
    assert main(["export", str(run_copy), "--output", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    assert "Its README.md says" in caplog.text


def test_an_empty_list_of_documents_and_no_tokenizer_are_named(run_copy, capsys):
    path = run_copy / "results" / "trained_documents.npy"
    path.write_bytes(b"")
    assert main(["eval", str(run_copy), CPU]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {path}: expected it as it was saved, got an error: No data")
    (run_copy / "tokenizer.json").unlink()
    assert main(["explain", str(run_copy), "aa [MASK]"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {run_copy}: expected the files of a tokenizer, got special")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "training=3",
            r"expected overrides of data or \['training.per_dev.*, got \['training'\]",
        ),
        ("training.bf16_full_eval=true", r"got \['training.bf16_full_eval'\]"),
        ("training.per_device_eval_batch_size=0", "expected a number above 0, got 0"),
        ("data.eval=3", "^data.eval: expected"),
        ("data.sources=x", "^data.sources: expected"),
        ("data.eval={documents: x, seed: y}", "^data.eval.documents: .*\\ndata.eval.seed: "),
    ],
)
def test_overrides_that_an_evaluation_does_not_read_are_refused(run_copy, override, message):
    with pytest.raises(ValueError, match=message):
        evaluate_folder(run_copy, [override])
