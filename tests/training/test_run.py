"""A whole run, and every bad input: one line, before any training."""

import random
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import AutoTokenizer, TrainerCallback

from harmonic_sft.config import to_yaml
from harmonic_sft.models import HarmonicForMaskedLM
from harmonic_sft.results import read_results
from harmonic_sft.training.callbacks import StoppedError
from harmonic_sft.training.evaluation import evaluate_folder
from harmonic_sft.training.head_swap import check_base
from harmonic_sft.training.output_folder import (
    check_output_folder,
    claim_output_folder,
    read_run,
)
from harmonic_sft.training.preview import dry_run
from harmonic_sft.training.run import train
from harmonic_sft.training.run_config import load_run_config
from harmonic_sft.training.trainer import HarmonicTrainer
from tests.conftest import write_run
from tests.training.conftest import logged, start, weights_in


def test_a_run_leaves_a_model_results_and_a_figure(finished_run, finished_results):
    saved = finished_results
    assert saved["steps"] == 6
    assert saved["environment"]["versions"]["torch"] == torch.__version__
    assert saved["config"]["training"]["max_steps"] == 6
    assert saved["unigram_loss"] > 0
    assert 0 < saved["final"]["post_hoc_loss"] <= saved["final"]["loss"]
    assert saved["tokens_per_second"] > 0
    assert saved["peak_memory_bytes"] > 1e6
    assert len(saved["neighbors_before"]["aa"]) == 5
    assert (finished_run / "results" / "train.png").stat().st_size > 1000
    model = HarmonicForMaskedLM.from_pretrained(finished_run)
    assert model.h_exp == -4.0
    assert AutoTokenizer.from_pretrained(finished_run).mask_token == "[MASK]"
    names = {path.name for path in finished_run.rglob("*")}
    assert "training_args.bin" not in names  # a pickle
    assert {"optimizer.pt", "trainer_state.json", "modeling_harmonic.py"} <= names
    printed = finished_run.with_suffix(".txt").read_text()
    for words in (
        "block 2, trained",
        "before training",
        "after training",
        "token frequencies alone",
    ):
        assert words in printed


def test_h_exp_and_the_learning_rate_follow_their_schedules(finished_results):
    results = finished_results
    exponents = logged(results["history"], "h_exp")
    assert exponents == pytest.approx([-12 + 8 * step / 6 for step in range(6)])
    rates = logged(results["history"], "learning_rate")  # a cosine over the last two steps
    assert rates == pytest.approx([0.0, 0.01, 0.01, 0.01, 0.01, 0.005])
    assert results["head"]["h_exp"] == -4.0
    assert results["before"]["h_exp"] == -12.0
    assert results["final"]["h_exp"] == -4.0


def test_what_training_measured_at_its_end_is_not_measured_again(make_yaml):
    run = load_run_config(make_yaml(training={"eval_strategy": "steps", "eval_steps": 3}))
    evaluate = HarmonicTrainer.evaluate
    with patch.object(HarmonicTrainer, "evaluate", autospec=True, side_effect=evaluate) as measured:
        results = train(run)
    prefixes = [call.kwargs.get("metric_key_prefix") for call in measured.call_args_list]
    assert prefixes == ["old_head", "before", None, None]
    assert results["final"].keys() == results["before"].keys()
    assert results["final"]["h_exp"] == -4.0
    again = evaluate_folder(run.output_dir, ["training.use_cpu=true"])["final"]
    assert results["final"]["loss"] == pytest.approx(again["loss"], rel=1e-6)


@pytest.mark.slow
def test_training_learns_the_rule_of_the_text(make_yaml, tmp_path):
    """Constant exponent, enough steps: far better than before, and than the unigrams."""
    results = start(
        make_yaml(h_exp={"start": -12.0, "end": -12.0}),
        "training.max_steps=150",
        "training.logging_steps=150",
        "model.unfreeze={patterns: ['*']}",
        "training.save_strategy=no",
    )
    assert results["final"]["loss"] < results["before"]["loss"] - 1.0
    assert results["final"]["loss"] < results["unigram_loss"]
    again = start(  # it may be a base itself
        make_yaml(head={"name": "linear"}, h_exp=None, loss={"name": "cross_entropy"}),
        f"model.base={tmp_path / 'run'}",
        f"training.output_dir={tmp_path / 'again'}",
        "training.max_steps=1",
    )
    assert again["swap"]["old_head"]["post_hoc_loss"] < again["unigram_loss"]


def test_a_base_that_did_not_load_is_refused_before_training(
    make_yaml, tmp_path, tiny_base, ignorant_base
):
    """Its own head knows less than the frequencies of the words."""
    text = tmp_path / "six_words.txt"
    words = ["aa", "ab", "aa", "ac", "aa", "ba", "ad", "bb", "aa"]
    generator = random.Random(0)
    lines = [" ".join(generator.sample(words, k=9)) for _ in range(60)]
    text.write_text("\n".join(lines))
    sources = [{"path": str(text)}]
    model = {"base": str(ignorant_base)}
    path = make_yaml(data={"sources": sources}, model=model, check_base=True)
    message = (
        r"model.base: expected a base whose own head does better on the held-out text than its "
        r"unigrams, (\d\.\d\d) nats, got (\d\.\d\d) at its best temperature. .*check_base: false$"
    )
    with pytest.raises(ValueError, match=message) as caught:
        start(path)
    unigrams, loss = map(float, re.search(message, str(caught.value)).groups())
    results = start(path, "check_base=false")  # in the same folder
    assert unigrams == pytest.approx(results["unigram_loss"], abs=0.005)
    assert loss == pytest.approx(results["swap"]["old_head"]["post_hoc_loss"], abs=0.005)
    assert loss > unigrams
    scratch = {"base": str(tiny_base), "from_scratch": True, "unfreeze": {"patterns": ["*"]}}
    run = load_run_config(make_yaml(model=scratch, check_base=True))
    check_base(run, None, results["swap"], unigrams)


def test_evaluating_the_folder_gives_the_closing_numbers(run_copy, finished_results, tiny_base):
    again = evaluate_folder(run_copy, ["training.use_cpu=true"])
    for key in ("loss", "accuracy", "tokens", "post_hoc_loss", "h_exp"):
        assert again["final"][key] == pytest.approx(finished_results["final"][key], rel=1e-6)
    with pytest.raises(ValueError, match=r"overrides of data or \[.*, got \['head.eps'\]"):
        evaluate_folder(run_copy, ["head.eps=1e-3"])
    with pytest.raises(ValueError, match="eval: expected a harmonic model, got a bert"):
        evaluate_folder(tiny_base)


def test_a_run_is_resumed_only_as_it_was(finished_run, finished_results):
    path = finished_run.with_suffix(".yaml")
    before = weights_in(finished_run)
    with pytest.raises(ValueError, match=r"which holds a run. Add resume=true"):
        start(path)
    with pytest.raises(ValueError, match=r"values for h_exp.end \(then -4.0\), schedule.decay"):
        start(path, "resume=true", "h_exp.end=-8.0", "schedule.decay_ratio=0.3")
    assert start(path, "resume=true")["final"] == finished_results["final"]
    assert weights_in(finished_run) == before


def test_a_run_of_an_earlier_version_keeps_its_held_out_documents(run_copy, make_yaml):
    """There the seed of the training chose them, and its file names no other."""
    saved = read_run(run_copy)
    del saved["data"]["eval"]["seed"]
    write_run(run_copy / "run.yaml", saved, {"training": {"seed": 7}})
    assert read_run(run_copy)["data"]["eval"]["seed"] == 7
    again = ("resume=true", "training.seed=7", f"training.output_dir={run_copy}")
    with pytest.raises(ValueError, match=r"got other values for data.eval.seed \(then 7\). Use"):
        start(make_yaml(), *again)


CONSTANT = {"h_exp": -12.0, "schedule": {"warmup_ratio": 0.0, "decay_ratio": 0.0}}
LATE = {**CONSTANT, "schedule": {"warmup_ratio": 0.9, "decay_ratio": 0.0}}
CONSTANT_LATE = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.6}
NOT_TAKEN = {**CONSTANT_LATE, "lr_scheduler_type": "constant"}


class Signal(TrainerCallback):
    """Ends training after a step, as transformers does after a SIGTERM."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_training_stop = True


def test_a_finished_run_of_constant_schedules_continues_to_more_steps(
    make_yaml, tmp_path, add_callbacks
):
    """Also where it stopped on the way, which does not finish it.

    It is evaluated after its last step, which moves no random numbers of dropout.
    """
    evaluated = {"eval_strategy": "steps", "eval_steps": 4}
    path = make_yaml(**CONSTANT, model={"dropout": 0.2}, training=evaluated)
    first = start(path)
    longer = ("training.max_steps=12", "resume=true")
    with add_callbacks(Signal(10)), pytest.raises(StoppedError, match="expected 12 steps, got 10"):
        start(path, *longer)
    continued = start(path, *longer)
    assert continued["steps"] == 12
    assert continued["before"] == first["before"]
    assert logged(continued["history"], "learning_rate") == [0.01] * 12
    with pytest.raises(ValueError, match=r"got other values for training.max_steps"):
        start(path, "resume=true")
    whole = start(path, "training.max_steps=12", f"training.output_dir={tmp_path / 'whole'}")
    assert continued["final"] == whole["final"]
    assert weights_in(tmp_path / "run") == weights_in(tmp_path / "whole")


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({**CONSTANT, "h_exp": {"start": -12.0, "end": -4.0}}, "an annealed h_exp"),
        ({**CONSTANT, "schedule": {"warmup_ratio": 0.0}}, "schedule.decay_ratio above 0"),
        (
            {**CONSTANT, "schedule": {"warmup_ratio": 0.6, "decay_ratio": 0.0}},
            "a warmup of 7 steps",
        ),
        ({**LATE, "training": {"warmup_steps": 0.6}}, "a warmup of 8 steps"),
        ({**LATE, "schedule": None, "training": CONSTANT_LATE}, "a warmup of 8 steps"),
        (CONSTANT, "no checkpoint"),
        # A warmup that is past, and one that is not taken.
        ({**LATE, "training": {"warmup_steps": 2}}, None),
        ({**LATE, "schedule": None, "training": NOT_TAKEN}, None),
    ],
)
def test_a_run_whose_schedules_stretch_is_not_continued(
    finished_run, make_yaml, tmp_path, sections, reason
):
    """The folder is that of a finished run, its file says other schedules."""
    path, folder = make_yaml(**sections), shutil.copytree(finished_run, tmp_path / "run")
    (folder / "run.yaml").write_text(to_yaml(load_run_config(path)))
    if reason == "no checkpoint":
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
    longer = load_run_config(path, ["resume=true", "training.max_steps=12"])
    message = rf"resume: expected 6 steps as before, or .* Got {reason}. Start a new run on this"
    with pytest.raises(ValueError, match=message) if reason else nullcontext():
        check_output_folder(longer)


def test_more_steps_and_another_split_of_the_batch_are_written_down(
    finished_run, make_yaml, tmp_path
):
    path, folder = make_yaml(**CONSTANT), shutil.copytree(finished_run, tmp_path / "run")
    (folder / "run.yaml").write_text(to_yaml(load_run_config(path)))
    split = ["training.per_device_train_batch_size=4", "training.gradient_accumulation_steps=2"]
    longer = load_run_config(path, ["resume=true", "training.max_steps=12", *split])
    claim_output_folder(longer)
    assert read_run(folder)["training"]["max_steps"] == 12
    check_output_folder(longer)


def test_a_run_that_ends_early_is_not_finished(
    finished_run, finished_results, make_yaml, tmp_path, monkeypatch, add_callbacks
):
    path = make_yaml(hub={"push": True, "repo_id": "me/model"})
    for name in ("check_destination", "check_model"):
        monkeypatch.setattr(f"harmonic_sft.training.run.{name}", lambda *_: None)
    pushed = []
    monkeypatch.setattr("harmonic_sft.training.run.push_run", lambda *_: pushed.append(1))
    early = pytest.raises(StoppedError, match="expected 6 steps, got 4: a signal or a callback")
    with add_callbacks(Signal(4)), early:
        start(path)
    folder = tmp_path / "run"
    assert not pushed
    assert not (folder / "results" / "train.json").exists()
    assert not (folder / "model.safetensors").exists()
    again = start(path, "resume=true")  # from the checkpoint of step 3
    assert pushed
    assert again["steps"] == 6
    assert again["final"] == finished_results["final"]
    for name in (".", "checkpoint-6"):
        assert weights_in(folder / name) == weights_in(finished_run / name)


def test_a_run_that_early_stopping_ends_is_finished(
    make_yaml, tmp_path, monkeypatch, interrupt, caplog
):
    """Also one that was interrupted on the way, which keeps the counter."""
    training = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
    training |= {"save_steps": 1, "load_best_model_at_end": True, "max_steps": 9}
    training |= {"learning_rate": 1e-30}  # nothing gets better
    path = make_yaml(
        head={"name": "linear"},  # prototypes scaled to norm 1 may move by their last bit
        loss={"name": "cross_entropy"},
        h_exp=None,
        training=training,
        early_stopping_patience=3,
        hub={"push": True, "repo_id": "me/model"},
    )
    for name in ("check_destination", "check_model"):
        monkeypatch.setattr(f"harmonic_sft.training.run.{name}", lambda *_: None)
    pushed = []
    monkeypatch.setattr("harmonic_sft.training.run.push_run", lambda *_: pushed.append(1))
    whole = start(path, f"training.output_dir={tmp_path / 'whole'}")
    assert 3 < whole["steps"] < 9
    interrupt(3, path)
    results = start(path, "resume=true")
    assert results["steps"] == whole["steps"]
    assert results["final"] == whole["final"]
    assert len(pushed) == 2
    with caplog.at_level("INFO"):
        assert start(path, "resume=true") == results
    assert f"This run is finished: {tmp_path / 'run'}" in caplog.messages
    (tmp_path / "run" / "results" / "train.json").unlink()  # killed before it was written
    assert start(path, "resume=true")["final"] == results["final"]
    assert "early stopping is disabled" not in caplog.text
    with pytest.raises(ValueError, match=r"got other values for early_stopping_patience"):
        start(path, "resume=true", "early_stopping_patience=5")


NO_BASE = "model.base=nobody/nothing"


def test_a_folder_that_holds_something_is_never_overwritten(make_yaml, tmp_path, monkeypatch):
    """transformers expands a tilde: ours must look at the same folder before writing there."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "thesis.txt").write_text("irreplaceable")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    for place, found in {
        folder: "expected an empty folder, got .* holds other files",
        "~/run": "expected an empty folder, got .*run",
        folder / "thesis.txt": "output_dir: expected a folder, got the file",
        folder / "thesis.txt" / "a" / "b": r"expected a folder, got the file '.*thesis\.txt'",
        tmp_path / "link": "output_dir: expected a folder, got the file '.*link'",
    }.items():
        for refuse in (train, dry_run):
            with pytest.raises(ValueError, match=found):
                refuse(load_run_config(make_yaml(), [f"training.output_dir={place}", NO_BASE]))
    assert [path.read_text() for path in folder.iterdir()] == ["irreplaceable"]


REFUSED = {  # before the base is looked for, if there is none
    (NO_BASE,): r"model\.base: expected a model that can be loaded, got 'nobody/noth",
    ("model.base=/nowhere/at/all",): r"model\.base: expected a folder with a config\.json",
    ("model.base=package:unknown",): r"model\.base: expected one of the packages",
    ("data.context_length=65",): r"data\.context_length: expected at most the 64 positions",
    ("data.context_length=60", "data.pad_to_multiple_of=50"): r"got 60, which .* makes 100\.$",
    ("data.eval.documents=0", NO_BASE): r"data\.eval\.documents: expected at least 1, got 0",
    ("data.sources.0.path=missing.txt", NO_BASE): r"sources\.0\.path: expected an existing file",
    ("training.report_to=comet_ml", NO_BASE): (
        r"^training\.report_to: expected installed packages, got 'comet_ml'\. Run pip install "
    ),
    ("training.report_to=tensorbord", NO_BASE): (
        r"^training\.report_to: expected some of .* got 'tensorbord'\. .*'tensorboard'\?$"
    ),
}


@pytest.mark.parametrize("refuse", [train, dry_run])
@pytest.mark.parametrize("words", REFUSED, ids=lambda words: words[0])
def test_a_bad_setting_is_one_line_and_makes_no_folder(make_yaml, tmp_path, refuse, words):
    with pytest.raises(ValueError, match=REFUSED[words]) as caught:
        refuse(load_run_config(make_yaml(), words))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_base_without_a_tokenizer_is_one_line(make_yaml, tiny_base, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_base / name, tmp_path)
    message = r"tokenizer: expected|model\.base: expected a model"
    with pytest.raises(ValueError, match=message) as caught:
        start(make_yaml(), f"model.base={tmp_path}")
    assert "\n" not in str(caught.value)


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
    assert "Fits " in caplog.text
    assert "context_length: 24" in caplog.text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("head", ["{name: power}", "{name: linear, softcap: 30.0}"])
def test_dry_run_of_heads_without_a_fused_loss(make_yaml, head, capsys):
    run = load_run_config(make_yaml(h_exp=None, loss={"name": "cross_entropy"}), [f"head={head}"])
    dry_run(run)
    assert "activations and head, at the peak" in capsys.readouterr().out


def test_dry_run_says_which_loss_it_has_estimated(make_yaml, caplog):
    caplog.set_level("INFO")
    dry_run(load_run_config(make_yaml()))
    assert "as that of cross-entropy" not in caplog.text
    dry_run(load_run_config(make_yaml(), ["loss={name: harmonic, impl: reference}"]))
    assert "the loss counts as that of cross-entropy without logits" in caplog.text


def test_dry_run_of_a_run_that_continues(finished_run, caplog):
    caplog.set_level("INFO")
    path = finished_run / "run.yaml"
    with pytest.raises(ValueError, match=r"which holds a run\. Add resume=true"):
        dry_run(load_run_config(path))
    dry_run(load_run_config(path, ["resume=true"]))
    assert "Fits " in caplog.text


def test_a_run_is_not_continued_on_other_data(run_copy, text_file, tiny_base, tmp_path):
    def refused(what):
        with pytest.raises(ValueError, match=f"resume: expected the {what} rows of .*, got others"):
            start(path, "resume=true")

    path, text, base = run_copy / "run.yaml", tmp_path / "text.txt", tmp_path / "base"
    shutil.copytree(tiny_base, base)
    sections = {"data": {"sources": [{"path": str(text)}]}, "model": {"base": str(base)}}
    sections["training"] = {"output_dir": str(run_copy)}
    write_run(path, read_run(run_copy), sections)
    (run_copy / "results" / "train.json").unlink()
    lines = text_file.read_text().split("\n")
    text.write_text("\n".join(["aa", *lines[1:]]))
    refused("training")
    text.write_text("\n".join([*reversed(lines[:2]), *lines[2:]]))
    refused("training|evaluation")
    text.write_text("\n".join(lines))
    tokenizer = (base / "tokenizer.json").read_text()
    swapped = {"aa": "bb", "bb": "aa"}
    changed = re.sub('"(aa|bb)":', lambda found: f'"{swapped[found[1]]}":', tokenizer)
    (base / "tokenizer.json").write_text(changed)
    refused("training|evaluation")
    (base / "tokenizer.json").write_text(tokenizer)
    assert start(path, "resume=true")["steps"] == 6


def test_a_run_without_a_checkpoint_begins_again_on_other_data(
    make_yaml, text_file, tmp_path, interrupt
):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(reversed(text_file.read_text().split("\n"))))
    path = make_yaml(data={"sources": [{"path": str(text)}]})
    interrupt(1, path)
    before = read_results(tmp_path / "run" / "results" / "before.json")
    shutil.copy(text_file, text)
    results = start(path, "resume=true")
    assert results["before"] != before["before"]
    whole = start(path, f"training.output_dir={tmp_path / 'whole'}")
    assert (results["before"], results["final"]) == (whole["before"], whole["final"])


def test_a_stream_is_not_continued_with_another_vocabulary_or_other_held_out_documents(
    make_yaml, text_file, tiny_base, tmp_path, interrupt
):
    text = Path(shutil.copy(text_file, tmp_path / "text.txt"))
    base = Path(shutil.copytree(tiny_base, tmp_path / "base"))
    sources = [{"path": str(text), "streaming": True}]
    path = make_yaml(data={"sources": sources}, model={"base": str(base)})
    interrupt(4, path)
    tokenizer = (base / "tokenizer.json").read_text()
    (base / "tokenizer.json").write_text(re.sub(r'"zd": (\d+)', r'"new": \1', tokenizer))
    with pytest.raises(ValueError, match=r"expected the training rows of .*, got others. Give the"):
        start(path, "resume=true")
    (base / "tokenizer.json").write_text(tokenizer)
    text.write_text("\n".join(reversed(text.read_text().split("\n"))))
    with pytest.raises(ValueError, match=r"expected the evaluation rows of .*, got others"):
        start(path, "resume=true")
