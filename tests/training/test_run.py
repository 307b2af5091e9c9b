"""A whole run, and every bad input: one line, before any training."""

import json
import random
import re
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertTokenizer, TrainerCallback

from harmonic_sft.config import to_yaml
from harmonic_sft.models import HarmonicForMaskedLM
from harmonic_sft.training.callbacks import StoppedError
from harmonic_sft.training.evaluation import evaluate_folder
from harmonic_sft.training.head_swap import check_base
from harmonic_sft.training.output_folder import read_run
from harmonic_sft.training.preview import dry_run
from harmonic_sft.training.run import check_launch, train
from harmonic_sft.training.run_config import load_run_config


def start(path, *overrides):
    return train(load_run_config(path, overrides))


def test_a_run_leaves_a_model_results_and_a_figure(finished_run):
    results, folder, printed = finished_run
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
    names = {path.name for path in folder.rglob("*")}
    assert "training_args.bin" not in names  # a pickle
    assert {"optimizer.pt", "trainer_state.json", "modeling_harmonic.py"} <= names
    for words in ("block 2, trained", "before training", "after training", "unigrams of the text"):
        assert words in printed


def test_h_exp_and_the_learning_rate_follow_their_schedules(finished_run):
    results, *_ = finished_run
    logged = [entry for entry in results["history"] if "loss" in entry]
    exponents = [entry["h_exp"] for entry in logged]
    assert exponents == pytest.approx([-12 + 8 * step / 6 for step in range(6)])
    rates = [entry["learning_rate"] for entry in logged]  # a cosine over the last two steps
    assert rates == pytest.approx([0.0, 0.01, 0.01, 0.01, 0.01, 0.005])
    assert results["head"]["h_exp"] == -4.0
    assert results["before"]["h_exp"] == -12.0
    assert results["final"]["h_exp"] == -4.0


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


def test_a_base_that_did_not_load_is_refused_before_training(make_yaml, tmp_path, tiny_base):
    """The base has random weights: its own head knows less than the frequencies of the words."""
    text = tmp_path / "six_words.txt"
    words = ["aa", "ab", "aa", "ac", "aa", "ba", "ad", "bb", "aa"]
    generator = random.Random(0)
    lines = [" ".join(generator.sample(words, k=9)) for _ in range(60)]
    text.write_text("\n".join(lines))
    base = HarmonicForMaskedLM.from_base(tiny_base, head={"name": "linear"})
    base.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(tiny_base).save_pretrained(tmp_path / "base")
    path = make_yaml(
        data={"sources": [{"path": str(text)}]}, model={"base": str(tmp_path / "base")}
    )
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
    check_base(load_run_config(make_yaml(model=scratch)), None, results["swap"], unigrams)


def test_evaluating_the_folder_gives_the_closing_numbers(finished_run, tmp_path, tiny_base):
    results, finished, _ = finished_run
    folder = shutil.copytree(finished, tmp_path / "run")
    again = evaluate_folder(folder, ["training.use_cpu=true"])
    for key in ("loss", "accuracy", "tokens", "post_hoc_loss", "h_exp"):
        assert again["final"][key] == pytest.approx(results["final"][key], rel=1e-6)
    with pytest.raises(ValueError, match=r"eval: expected overrides of \['data', 'training'\]"):
        evaluate_folder(folder, ["head.eps=1e-3"])
    with pytest.raises(ValueError, match="eval: expected a harmonic model, got a bert"):
        evaluate_folder(tiny_base)


def test_a_run_is_resumed_only_as_it_was(finished_run):
    results, folder, _ = finished_run
    path = folder.with_suffix(".yaml")
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"which holds a run. Add resume=true"):
        start(path)
    with pytest.raises(ValueError, match=r"other values for h_exp.end, schedule.decay"):
        start(path, "resume=true", "h_exp.end=-8.0", "schedule.decay_ratio=0.3")
    assert start(path, "resume=true")["final"] == results["final"]
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_run_of_an_earlier_version_keeps_its_held_out_documents(
    finished_run, make_yaml, tmp_path
):
    """There the seed of the training chose them, and its file names no other."""
    run_copy = shutil.copytree(finished_run[1], tmp_path / "copy")
    saved = yaml.safe_load((run_copy / "run.yaml").read_text())
    del saved["data"]["eval"]["seed"]
    saved["training"]["seed"] = 7
    (run_copy / "run.yaml").write_text(yaml.safe_dump(saved))
    assert read_run(run_copy)["data"]["eval"]["seed"] == 7
    again = ("resume=true", "training.seed=7", f"training.output_dir={run_copy}")
    with pytest.raises(ValueError, match=r"got other values for data.eval.seed, training.output"):
        start(make_yaml(), *again)


CONSTANT = {"h_exp": -12.0, "schedule": {"warmup_ratio": 0.0, "decay_ratio": 0.0}}


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
    """Also where it stopped on the way, which does not finish it."""
    path = make_yaml(**CONSTANT)
    first = start(path)
    longer = ("training.max_steps=12", "resume=true")
    with add_callbacks(Signal(10)), pytest.raises(StoppedError, match="expected 12 steps, got 10"):
        start(path, *longer)
    continued = start(path, *longer)
    assert continued["steps"] == 12
    assert continued["before"] == first["before"]
    rates = [entry["learning_rate"] for entry in continued["history"] if "learning_rate" in entry]
    assert rates == [0.01] * 12
    with pytest.raises(ValueError, match=r"got other values for training.max_steps"):
        start(path, "resume=true")
    whole = start(path, "training.max_steps=12", f"training.output_dir={tmp_path / 'whole'}")
    assert continued["final"] == whole["final"]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "whole")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({**CONSTANT, "h_exp": {"start": -12.0, "end": -4.0}}, "an annealed h_exp"),
        ({**CONSTANT, "schedule": {"warmup_ratio": 0.0}}, "schedule.decay_ratio above 0"),
        (
            {**CONSTANT, "schedule": {"warmup_ratio": 0.6, "decay_ratio": 0.0}},
            "a warmup of 7 steps",
        ),
        (CONSTANT, "no checkpoint"),
    ],
)
def test_a_run_whose_schedules_stretch_is_not_continued(
    finished_run, make_yaml, tmp_path, sections, reason
):
    """The folder is that of a finished run, its file says other schedules."""
    path, folder = make_yaml(**sections), shutil.copytree(finished_run[1], tmp_path / "run")
    (folder / "run.yaml").write_text(to_yaml(load_run_config(path)))
    if reason == "no checkpoint":
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
    message = rf"resume: expected 6 steps as before, or .* Got {reason}. Start a new run on this"
    with pytest.raises(ValueError, match=message):
        start(path, "resume=true", "training.max_steps=12")


def test_a_run_that_ends_early_is_not_finished(
    finished_run, make_yaml, tmp_path, monkeypatch, add_callbacks
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
    results, whole, _ = finished_run
    assert again["final"] == results["final"]
    names = ("model.safetensors", "checkpoint-6/model.safetensors")
    assert all((folder / n).read_bytes() == (whole / n).read_bytes() for n in names)


def test_a_folder_that_holds_something_is_never_overwritten(make_yaml, tmp_path, monkeypatch):
    """transformers expands a tilde: ours must look at the same folder before writing there."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(ValueError, match=r"expected an empty folder, got .* holds other files"):
        start(make_yaml())
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"expected an empty folder, got .*run"):
        start(make_yaml(), "training.output_dir=~/run")
    assert [path.read_text() for path in folder.iterdir()] == ["irreplaceable"]
    with pytest.raises(ValueError, match=r"output_dir: expected a folder, got the file"):
        start(make_yaml(), f"training.output_dir={folder / 'thesis.txt'}")
    with pytest.raises(ValueError, match=r"expected a folder, got the file '.*thesis\.txt'"):
        start(make_yaml(), f"training.output_dir={folder / 'thesis.txt' / 'a' / 'b'}")


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
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"column: expected one of .* got 'body'"):
        start(make_yaml(), "data.sources.0.column=body")
    with pytest.raises(
        ValueError, match=r"the Hub cannot be reached|expected a data set on the Hub"
    ):
        start(make_yaml(data={"sources": [{"path": "nobody/nothing"}]}))
    with pytest.raises(ValueError, match=r"sources\[0\]\.path: expected an existing file"):
        start(make_yaml(), "model.base=nobody/none", "data.sources=[{path: missing.txt}]")


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
    folder = copy_base(tiny_base, tmp_path / "bare", vocab=False)
    none = r"tokenizer: expected|model.base: expected a model"
    with pytest.raises(ValueError, match=none) as caught:
        start(make_yaml(), f"model.base={folder}")
    assert "\n" not in str(caught.value)
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


def test_a_missing_reporter_is_named_before_data_are_read(make_yaml, tmp_path, monkeypatch):
    monkeypatch.setattr("harmonic_sft.training.run.prepare", lambda run: pytest.fail("data read"))
    message = r"^training.report_to: expected installed packages, got 'comet_ml'. Run pip install "
    with pytest.raises(ValueError, match=message):
        start(make_yaml(), "training.report_to=comet_ml")
    assert not (tmp_path / "run").exists()


def test_an_epoch_without_a_batch_is_refused(make_yaml, tmp_path):
    words = ["training.dataloader_drop_last=true", "training.per_device_train_batch_size=500"]
    message = r"dataloader_drop_last: expected false, got true with \d+ rows and 500 in a batch\."
    with pytest.raises(ValueError, match=message):
        start(make_yaml(), *words)
    assert not (tmp_path / "run").exists()


def test_launches_that_would_not_do_what_they_say_are_refused(make_yaml, monkeypatch):
    args = load_run_config(make_yaml()).training_arguments()
    check_launch(args)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"launch: expected no FSDP.*shards of the head"):
        check_launch(args)
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match=r"expected no DEEPSPEED.*prototypes would lose norm 1"):
        check_launch(args)
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(
        ValueError, match="accelerate launch: expected --mixed_precision no, got bf16"
    ):
        check_launch(args)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    monkeypatch.setattr(args, "_n_gpu", 2)
    with pytest.raises(ValueError, match="launch: expected one GPU per process, got 2"):
        check_launch(args)
    monkeypatch.setattr(args, "_n_gpu", 0)
    dispatch = "training.accelerator_config={dispatch_batches: true}"
    with pytest.raises(ValueError, match="dispatch_batches: expected false, got true"):
        start(make_yaml(), dispatch)
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


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.sources.0.path=missing.txt", r"sources\[0\]\.path: expected an existing file"),
        ("data.eval.documents=0", r"data\.eval\.documents: expected at least 1, got 0"),
        ("training.report_to=comet_ml", r"training\.report_to: expected installed packages"),
        ("model.base=nobody/nothing", r"output_dir: expected an empty folder, got .* other files"),
    ],
)
def test_dry_run_refuses_what_train_refuses_before_loading(make_yaml, tmp_path, word, message):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").touch()
    with pytest.raises(ValueError, match=message):
        dry_run(load_run_config(make_yaml(), [word]))


def test_dry_run_of_a_run_that_continues(finished_run, caplog):
    caplog.set_level("INFO")
    path = finished_run[1] / "run.yaml"
    with pytest.raises(ValueError, match=r"which holds a run\. Add resume=true"):
        dry_run(load_run_config(path))
    dry_run(load_run_config(path, ["resume=true"]))
    assert "Fits 24 GiB" in caplog.text
