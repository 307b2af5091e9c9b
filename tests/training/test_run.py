"""A whole run, and every bad input: one line, before any training."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertTokenizer

from harmonic_sft.models import HarmonicForMaskedLM
from harmonic_sft.training import load_run_config
from harmonic_sft.training.dry_run import dry_run
from harmonic_sft.training.evaluation import evaluate_folder
from harmonic_sft.training.output_folder import claim_output_folder, last_checkpoint
from harmonic_sft.training.run import check_launch, train


def start(path, *overrides):
    return train(load_run_config(path, overrides))


def test_a_run_leaves_a_model_results_and_a_figure(make_yaml, tmp_path, capsys):
    results = start(make_yaml())
    folder = tmp_path / "run"
    saved = json.loads((folder / "results" / "train.json").read_text())
    assert saved["final"] == results["final"]
    assert saved["steps"] == 6
    assert saved["environment"]["versions"]["torch"] == torch.__version__
    assert saved["config"]["training"]["max_steps"] == 6
    assert saved["unigram_loss"] > 0
    assert 0 < saved["final"]["post_hoc_loss"] <= saved["final"]["loss"]
    assert saved["tokens_per_second"] > 0
    assert saved["peak_memory_bytes"] > 1e6
    assert len(saved["neighbors_before"]["aa"]) == 5
    assert (folder / "results" / "train.png").stat().st_size > 1000
    model = HarmonicForMaskedLM.from_pretrained(folder)
    assert model.h_exp == -4.0
    assert AutoTokenizer.from_pretrained(folder).mask_token == "[MASK]"
    printed = capsys.readouterr().out
    for words in ("block 2, trained", "before training", "after training", "unigrams of the text"):
        assert words in printed


def test_training_learns_the_rule_of_the_text(make_yaml):
    """Constant exponent, enough steps: far better than before, and than the unigrams."""
    results = start(
        make_yaml(h_exp={"start": -12.0, "end": -12.0}),
        "training.max_steps=150",
        "model.unfreeze={patterns: ['*']}",
        "training.save_strategy=no",
    )
    assert results["final"]["loss"] < results["before"]["loss"] - 1.0
    assert results["final"]["loss"] < results["unigram_loss"]


def test_evaluating_the_folder_gives_the_closing_numbers(make_yaml, tmp_path):
    results = start(make_yaml())
    again = evaluate_folder(tmp_path / "run", ["training.use_cpu=true"])
    for key in ("loss", "accuracy", "tokens", "post_hoc_loss", "h_exp"):
        assert again["final"][key] == pytest.approx(results["final"][key], rel=1e-6)
    other = tmp_path / "other.txt"
    other.write_text("aa ab ac ad ba bb bc bd\n" * 30)
    moved = evaluate_folder(
        tmp_path / "run", [f"data.sources=[{{path: {other}}}]", "data.eval.documents=9"]
    )
    assert moved["final"]["tokens"] != results["final"]["tokens"]


def test_evaluation_needs_a_model_and_data(make_yaml, tmp_path):
    with pytest.raises(ValueError, match="eval: expected a folder with a trained model"):
        evaluate_folder(tmp_path)
    start(make_yaml())
    with pytest.raises(ValueError, match=r"eval: expected overrides of \['data', 'training'\]"):
        evaluate_folder(tmp_path / "run", ["head.eps=1e-3"])
    (tmp_path / "run" / "run.yaml").unlink()
    with pytest.raises(ValueError, match="eval: expected data, got none"):
        evaluate_folder(tmp_path / "run")


def test_a_folder_that_holds_something_is_never_overwritten(make_yaml, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(ValueError, match=r"expected an empty folder, got .* holds other files"):
        start(make_yaml())
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


def test_a_run_is_resumed_only_as_it_was(make_yaml, tmp_path, capsys):
    path = make_yaml()
    results = start(path)
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"which holds a run. Add resume=true"):
        start(path)
    with pytest.raises(ValueError, match=r"other values for h_exp.end, schedule.decay"):
        start(path, "resume=true", "h_exp.end=-8.0", "schedule.decay_ratio=0.3")
    assert start(path, "resume=true")["final"] == results["final"]
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before


def test_a_tilde_is_the_home_folder(make_yaml, tmp_path, monkeypatch):
    """transformers expands it: ours must look at the same folder before writing there."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("precious")
    with pytest.raises(ValueError, match=r"expected an empty folder, got .*mine"):
        start(make_yaml(), "training.output_dir=~/mine")
    assert (tmp_path / "mine" / "config.json").read_text() == "precious"


def test_a_file_is_no_output_folder(make_yaml, tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ValueError, match=r"output_dir: expected a folder, got the file"):
        start(make_yaml())


def test_a_folder_is_claimed_once(make_yaml):
    run = load_run_config(make_yaml())
    claim_output_folder(run)
    with pytest.raises(ValueError, match="another run has just claimed"):
        claim_output_folder(run)
    assert [path.name for path in run.output_dir.iterdir()] == ["run.yaml"]


def test_a_half_written_checkpoint_is_passed_over(tmp_path):
    for step, state in ((3, "{}"), (12, "{}"), (20, '{"global_'), (30, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path).name == "checkpoint-12"
    assert last_checkpoint(tmp_path / "checkpoint-3") is None


def test_nothing_is_written_when_the_input_is_bad(make_yaml, tmp_path):
    with pytest.raises(ValueError, match="expected an existing file"):
        start(make_yaml(data={"sources": [{"path": "missing.txt"}]}))
    assert not (tmp_path / "run").exists()


def copy_base(tiny_base, folder, *, vocab=None):
    folder.mkdir()
    for path in tiny_base.iterdir():
        if vocab is None or path.name in ("config.json", "model.safetensors"):
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_bad_data_is_one_line(make_yaml, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    cases = [
        ({"sources": [{"path": str(tmp_path / "missing.txt")}]}, "expected an existing file"),
        ({"sources": [{"path": str(tmp_path / "empty.txt")}]}, "got the empty file"),
        ({"context_length": 65}, "data.context_length: expected at most the 64 positions"),
        ({"eval": {"documents": 500}}, "data.eval.documents: expected fewer than the documents"),
    ]
    for data, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            start(make_yaml(data=data))
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"column: expected one of .* got 'body'"):
        start(make_yaml(), "data.sources.0.column=body")
    with pytest.raises(
        ValueError, match=r"the Hub cannot be reached|expected a data set on the Hub"
    ):
        start(make_yaml(data={"sources": [{"path": "nobody/nothing"}]}))


def test_a_bad_base_is_one_line(make_yaml, tiny_base, tmp_path):
    cases = [
        (
            "nobody/nothing-here",
            "model.base: expected a model that can be loaded, got 'nobody/noth",
        ),
        (str(tmp_path / "gone"), "model.base: expected a folder with a config.json"),
        ("package:unknown", "model.base: expected one of the packages"),
    ]
    for base, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            start(make_yaml(), f"model.base={base}")
        assert "\n" not in str(caught.value)
    folder = copy_base(tiny_base, tmp_path / "damaged")
    weights = load_file(folder / "model.safetensors")
    weights.pop("bert.encoder.layer.1.output.dense.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"got 1 weights missing: encoder.layer.1.output.dense"):
        start(make_yaml(), f"model.base={folder}")


def test_a_tokenizer_that_does_not_fit_is_one_line(make_yaml, tiny_base, tmp_path):
    folder = copy_base(tiny_base, tmp_path / "vocab", vocab=False)
    vocab = folder / "vocab.txt"
    vocab.write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(200))])
    )
    BertTokenizer(vocab=str(vocab)).save_pretrained(folder)
    with pytest.raises(
        ValueError, match="tokenizer: expected ids below the model's vocab_size 109"
    ):
        start(make_yaml(), f"model.base={folder}")
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    tokenizer.mask_token = None
    tokenizer.save_pretrained(folder)
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["mask_token"] = None
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="tokenizer: expected a mask token, got none"):
        start(make_yaml(), f"model.base={folder}")


def test_a_base_without_a_tokenizer_is_one_line(make_yaml, tiny_base, tmp_path):
    folder = copy_base(tiny_base, tmp_path / "bare", vocab=False)
    with pytest.raises(
        ValueError, match=r"tokenizer: expected|model.base: expected a model"
    ) as caught:
        start(make_yaml(), f"model.base={folder}")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_freezing_that_fits_nothing_is_refused(make_yaml):
    with pytest.raises(ValueError, match=r"model.unfreeze.last_blocks: expected at most 3, got 4"):
        start(make_yaml(), "model.unfreeze.last_blocks=4")
    with pytest.raises(ValueError, match=r"model.unfreeze.patterns: expected a pattern of param"):
        start(make_yaml(), "model.unfreeze={patterns: ['blocks.*']}")


def test_what_is_not_installed_is_named(make_yaml, tmp_path):
    with pytest.raises(ValueError, match=r"training: expected what it asks for to be installed"):
        start(make_yaml(), "training.report_to=comet_ml")
    assert not (tmp_path / "run").exists()


def test_launches_that_would_not_do_what_they_say_are_refused(make_yaml, monkeypatch):
    args = load_run_config(make_yaml()).training_arguments()
    check_launch(args)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="accelerate launch: expected no FSDP"):
        check_launch(args)
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(
        ValueError, match="accelerate launch: expected --mixed_precision no, got bf16"
    ):
        check_launch(args)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="launch: expected 2 processes that work together"):
        check_launch(args)


def test_dry_run_loads_nothing_and_writes_nothing(make_yaml, tmp_path, capsys, tiny_base, caplog):
    path = make_yaml()
    folder = tmp_path / "config_only"
    folder.mkdir()
    (folder / "config.json").write_bytes((tiny_base / "config.json").read_bytes())
    caplog.set_level("INFO")
    dry_run(load_run_config(path, [f"model.base={folder}"]))
    printed = capsys.readouterr().out
    assert "block 2, trained" in printed
    assert "activations and head, at the peak" in printed
    assert "Fits 24 GiB" in caplog.text
    assert "context_length: 24" in caplog.text
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"model.base: expected a model that can be loaded"):
        dry_run(load_run_config(path, ["model.base=nobody/nothing"]))
