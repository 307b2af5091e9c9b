"""The command line: exit codes, one-line errors, entry points, and what is imported when."""

import argparse
import io
import json
import logging
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import AutoConfig

import harmonic_sft
from harmonic_sft import cli
from harmonic_sft.config import to_plain
from harmonic_sft.hub import PushError
from harmonic_sft.training.callbacks import StoppedError
from harmonic_sft.training.run_config import RunConfig, load_run_config
from harmonic_sft_cli import EXAMPLES, LastingStream, _parser, configurations, main
from tests.elsewhere import run_python

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "configs" / "demo.yaml"
COMMANDS = ("train", "init", "config", "data", "eval", "explain", "compare", "push", "export")
NO_TORCH = """
import sys
import harmonic_sft_cli
try:
    harmonic_sft_cli.main(["train", "--help"])
finally:
    sys.stderr.write(" ".join({"torch", "transformers", "yaml", "harmonic_sft"} & set(sys.modules)))
"""
MISTYPED = """
import gc, sys, time
from transformers import GenerationMixin
theirs = set(sys.modules)  # of transformers before 5.18 with pandas
import harmonic_sft
begin = time.process_time()
from harmonic_sft_cli import main
for override in ("modle.base=x", "data.mask.probabilty=0.1", "head.epss=1", "loss.impll=fused"):
    assert main(["train", sys.argv[1], override]) == 1
print(time.process_time() - begin)
print([name for name in sys.argv[2:] if name in sys.modules.keys() - theirs])
print(gc.get_freeze_count() > 100_000)
"""
BROKEN_PIPE = """
import os, sys
from harmonic_sft_cli import main
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, sys.stdout.fileno())
sys.exit(main(["init", "neobert"]))
"""
QUIET = """
import logging
from harmonic_sft_cli import main
main(["config"])
logging.getLogger("huggingface_hub.utils").warning("once")
from tqdm.auto import tqdm
list(tqdm(range(3)))
"""
HEAVY = ("datasets", "pandas", "peft", "transformers.training_args", "transformers.trainer")


def test_help_names_the_commands_and_imports_no_torch(monkeypatch, capsys):
    done = run_python("-c", NO_TORCH)
    assert done.stderr == ""
    assert "--dry-run" in done.stdout
    monkeypatch.setattr("sys.argv", ["harmonic_sft", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("harmonic_sft", run_name="__main__")  # as `python -m harmonic_sft`
    printed = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n    {command} " in printed


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_help_has_examples_that_can_be_typed(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"] if command else ["--help"])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    lines = [line.strip() for line in EXAMPLES[command].strip().splitlines()]
    assert all(f"  {line}" in printed for line in lines)
    assert all(len(line) <= 80 for line in printed.splitlines())
    for line in lines:
        words = shlex.split(line.partition("   ")[0].partition(" > ")[0])
        assert words.pop(0) == "harmonic-sft"
        if words[0] != "COMMAND":
            assert words[0] == command or not command
            _parser().parse_args(words)


@pytest.mark.slow
def test_short_bars_are_not_drawn_and_the_hub_warns_once():
    assert run_python("-c", QUIET).stderr == "once\n"


def test_version_names_what_a_bug_report_needs(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"harmonic-sft {harmonic_sft.__version__} (torch ")
    assert f"transformers {transformers.__version__}" in printed


def test_init_lists_and_prints_the_shipped_configurations(capsys):
    assert main(["init"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{name}  " in listed for name in configurations())
    assert all(len(line) <= 80 for line in listed.splitlines())
    first_words = (ROOT / "configs" / "neobert.yaml").read_text()[2:40]
    assert first_words in " ".join(listed.split())
    assert main(["init", "neobert"]) == 0
    assert capsys.readouterr().out == (ROOT / "configs" / "neobert.yaml").read_text()
    assert main(["init", "neobort"]) == 1
    message = "error: config file: expected a file or a shipped configuration, got 'neobort'. "
    assert capsys.readouterr().err == f"{message}Did you mean 'neobert'?\n"
    assert main(["train", "other"]) == 1
    assert "`harmonic-sft init` lists them" in capsys.readouterr().err


def test_what_reads_no_further_ends_init_quietly():
    done = run_python("-c", BROKEN_PIPE)
    assert done.stderr == ""


def test_config_explains_keys(capsys):
    assert main(["config", "data.mask.probability"]) == 0
    assert capsys.readouterr().out.startswith("data.mask.probability: share of the ordinary tokens")
    assert main(["config", "data.msk"]) == 1
    assert "Did you mean 'mask'?" in capsys.readouterr().err


def test_debug_shows_where_an_error_comes_from(tmp_path, capsys):
    assert main(["train", str(tmp_path / "no.yaml"), "--debug"]) == 1
    shown = capsys.readouterr().err
    assert "in load_run_config" in shown
    assert "ValueError: config file: expected an existing file" in shown


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """The runs that are started while a test runs, elsewhere; a run leaves a config.json."""
    started = []
    monkeypatch.chdir(tmp_path)

    def train(run):
        started.append(run)
        run.output_dir.mkdir(parents=True, exist_ok=True)
        (run.output_dir / "config.json").touch()

    monkeypatch.setattr("harmonic_sft.training.run.train", train)
    return started


def test_a_shipped_configuration_makes_its_base_first(runs, tmp_path, caplog):
    caplog.set_level("INFO")
    assert main(["train", "demo", "training.max_steps=2"]) == 0
    assert [str(run.output_dir) for run in runs] == ["runs/demo_base", "runs/demo"]
    assert [run.training["max_steps"] for run in runs] == [400, 2]
    assert "The base runs/demo_base does not exist yet. The shipped demo_base" in caplog.text
    assert main(["train", "demo_linear"]) == 0  # the base is there
    assert main(["train", str(DEMO), f"model.base={tmp_path}"]) == 0  # a file of one's own
    assert [str(run.output_dir) for run in runs[2:]] == ["runs/demo_linear", "runs/demo"]


def test_a_taken_output_folder_is_reported_before_the_base_is_made(
    runs, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "thesis.txt").touch()
    assert main(["train", "demo"]) == 1
    assert "expected an empty folder, got 'runs/demo'" in capsys.readouterr().err
    assert not runs


def test_a_run_without_a_file_is_the_recipe(runs, tiny_base):
    flags = ["--model", str(tiny_base), "--dataset", "my.txt"]
    assert main(["train", "h_exp.end=-8.0", *flags, "training.max_steps=3"]) == 0
    [run] = runs
    recipe = load_run_config(ROOT / "configs" / "neobert.yaml")
    assert (run.model.base, run.model.task) == (str(tiny_base), "masked_lm")
    recipe_head = {key: value for key, value in recipe.head_settings().items() if key != "h_exp"}
    assert run.head.name == "transform"  # BERT's own layers stay
    assert recipe_head.items() >= run.head_settings()["inner"].items() - {("h_exp", -12.0)}
    assert (run.head.init, run.loss, run.schedule) == (
        recipe.head.init,
        recipe.loss,
        recipe.schedule,
    )
    assert (run.h_exp.start, run.h_exp.end) == (-12.0, -8.0)
    assert run.data.mask == recipe.data.mask
    assert run.model.unfreeze.last_blocks == recipe.model.unfreeze.last_blocks
    same = ("learning_rate", "adam_beta1", "adam_beta2", "weight_decay")
    assert all(run.training[key] == recipe.training[key] for key in same)
    assert run.training["max_steps"] == 3
    assert str(run.output_dir) == f"runs/{tiny_base.name}-dist"


def test_options_of_a_named_head_are_its_own_behind_a_bases_layers(runs, tiny_base, tmp_path):
    flags = ["--model", str(tiny_base), "--dataset", "my.txt"]
    words = ["head.unit_sphere=false", "head.init=output_embeddings", "head.eps=1e-5"]
    assert main(["train", *flags, *words]) == 0
    scratch = ["model.from_scratch=true", "model.unfreeze={patterns: ['*']}"]
    assert main(["train", *flags, *scratch, "head.unit_sphere=false"]) == 0
    file = str(ROOT / "configs" / "modernbert.yaml")
    assert main(["train", file, "--head", "cosine", "head.scale=7"]) == 0
    assert main(["train", str(DEMO), "--head", "cosine", "head.scale=7"]) == 0
    named, scratch, behind, alone = (run.head_settings() for run in runs)
    assert (named["inner"]["unit_sphere"], named["inner"]["eps"]) == (False, 1e-5)
    assert runs[0].head.init == "output_embeddings"
    assert (scratch["name"], scratch["unit_sphere"]) == ("dist", False)
    assert (behind["name"], behind["inner"]["scale"]) == ("transform", 7)
    assert (alone["name"], alone["scale"]) == ("cosine", 7)


@pytest.mark.parametrize(
    ("rows", "dataset", "held_out"),
    [((5,), "0.txt", 1), ((120,), "0.txt", 12), ((2000,), "0.txt", 64), ((30, 40), "*.txt", 7)],
)
def test_a_run_without_a_file_holds_out_at_most_a_tenth(
    runs, tiny_base, tmp_path, rows, dataset, held_out
):
    for number, count in enumerate(rows):
        (tmp_path / f"{number}.txt").write_text("some text\n" * count)
    assert main(["train", "--model", str(tiny_base), "--dataset", f"{tmp_path}/{dataset}"]) == 0
    assert main(["train", "--model", "x", "--dataset", "y", "data.eval.documents=3"]) == 1
    [run] = runs
    assert run.data.eval.documents == held_out


def test_a_run_without_a_file_does_what_the_base_does_as_far_as_it_reads(runs, causal_base):
    given = ["--model", str(causal_base), "--dataset", "a.txt", "--output", "runs/y"]
    assert main(["train", *given]) == 0
    [run] = runs
    assert (run.model.task, run.data.context_length) == ("causal_lm", 64)
    assert main(["train", *given[:-1], ""]) == 1  # of a variable of the shell that is not set


def test_a_base_that_says_no_task_asks_for_one(tiny_base, tmp_path, capsys):
    fields = json.loads((tiny_base / "config.json").read_text())
    fields["architectures"] = ["BertForSequenceClassification"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert main(["train", "--model", str(tmp_path), "--dataset", "a.txt"]) == 1
    assert "error: --task: expected one of ['masked_lm', " in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["t5", "vit"])
def test_a_base_that_is_not_supported_is_asked_for_no_task(kind, tmp_path, capsys):
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    assert main(["train", "--model", str(tmp_path), "--dataset", "a.txt"]) == 1
    assert f"text alone that transformers knows, got a model of type '{kind}'" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flags", "head", "loss"),
    [
        (["--head", "linear"], {"name": "transform", "inner": {"name": "linear"}}, "cross_entropy"),
        (["--task", "causal_lm"], {"name": "dist", "init": "input_embeddings"}, "harmonic"),
        (
            ["--task", "sequence_classification"],
            {"name": "dist", "init": "class_means"},
            "harmonic",
        ),
    ],
)
def test_a_run_without_a_file_takes_every_head_and_task(flags, head, loss, runs, tiny_base):
    given = ["--model", f"{tiny_base}/", "--dataset", "a.jsonl", "--output", "runs/y"]
    assert main(["train", *given, *flags]) == 0
    [run] = runs
    found = to_plain(run)["head"]
    assert {key: found[key] for key in head} == head
    assert run.loss.name == loss
    assert str(run.output_dir) == "runs/y"
    assert RunConfig is type(run)


def test_a_mistyped_key_of_ours_costs_less_than_a_second_and_no_heavy_import():
    done = run_python("-c", MISTYPED, DEMO, *HEAVY)
    places = ["modle", "data.mask.probabilty", "head.epss", "loss.impll"]
    starts = [line.split(" one of the known")[0] for line in done.stderr.splitlines()]
    assert starts == [f"error: {place}: expected" for place in places]
    seconds, imported, are_out_of_collections = done.stdout.splitlines()
    assert imported == "[]"
    assert are_out_of_collections == "True"
    assert float(seconds) < 1


def test_bad_input_is_one_line_and_status_one(tmp_path, tiny_base, capsys):
    (tmp_path / "damaged" / "results").mkdir(parents=True)
    results = tmp_path / "damaged" / "results" / "train.json"
    results.write_text('{"config": {}, "steps": 1}')
    (tmp_path / "mine").write_text("- x")  # a file without a suffix
    flags = ("--model", str(tiny_base), "--dataset", "y")
    cases = {
        ("train", str(tmp_path / "no.yaml")): "error: config file: expected an existing file",
        ("data", str(DEMO), "training.max_stepz=3"): "error: training.max_stepz: expected one of",
        ("compare", str(tmp_path), "a=b"): "error: compare: expected a finished run, got no",
        ("compare", str(tmp_path / "damaged")): f"error: {results}: expected config, steps, before",
        ("train", 300 * "x"): "error: config file: expected a file or a shipped configuration",
        ("data", str(tmp_path / "mine")): f"error: {tmp_path / 'mine'}: expected",
        ("train", *flags, "--head", "dits"): "error: head.inner.name: expected",
        ("train", *flags, "--task", "mlm"): "error: model.task: expected",
        ("train", *flags, "model=x"): "error: model: expected a base beside --model, got 'x'",
        ("train", str(DEMO), "training.output_dir=~nobody9/x"): (
            "error: training.output_dir: expected a home that exists, got '~nobody9/x'"
        ),
        ("eval", str(tmp_path)): "error: eval: expected a folder with a trained model",
    }
    for arguments, message in cases.items():
        assert main(arguments) == 1
        error = capsys.readouterr().err
        assert error.startswith(message)
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["push", "run", "--repo-id", "me/x", "a=b"],
            "push: error: expected no key=value pairs, got a=",
        ),
        (
            ["export", "run", "--output", "x", "a=b"],
            "export: error: expected no key=value pairs, got a=",
        ),
        (["train", "x.yaml", "--dry-runn"], "train: error: unrecognized arguments: --dry-runn"),
        (["reproduce", "family"], "invalid choice: 'reproduce'"),
        (["train"], "train: error: expected a file, or --model and --dataset, got neither"),
        (["train", "--model", "x"], "expected --model and --dataset together, got one of them"),
        (["train", "demo", "--model", "x", "--dataset", "y"], "a file or --model, got both: demo"),
        (["train", "demo", "--task", "causal_lm"], "--task beside --model, got it beside a file"),
    ],
)
def test_arguments_that_a_command_does_not_take_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_overrides_may_stand_after_an_option(capsys):
    assert main(["train", str(DEMO), "hub.push=true", "--dry-run", "hub.repo_idd=me/x"]) == 1
    assert "hub.repo_idd: expected one of the known keys" in capsys.readouterr().err


def test_overrides_may_stand_after_the_models_to_compare_with(monkeypatch):
    seen = []
    monkeypatch.setattr("harmonic_sft.cli.run_command", lambda options: seen.append(options) or 0)
    main(["eval", "run", "--against", "one", "two", "data=https://x.org/a.txt", "training.seed=3"])
    assert seen[0].against == [Path("one"), Path("two")]
    assert seen[0].overrides == ["data=https://x.org/a.txt", "training.seed=3"]


LOAD = "harmonic_sft.training.run_config.load_run_config"


def raising(error):
    def broken(*_, **__):
        raise error

    return broken


@pytest.mark.parametrize(
    "words",
    [
        ["verify", str(DEMO)],
        ["eval", "run"],
        ["explain", "run", "text"],
        ["export", "run"],
        ["push", "run", "--repo-id", "me/mine"],
    ],
)
def test_commands_for_one_process_are_refused_to_several(words, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(words) == 1
    message = f"error: {words[0]}: expected one process, got 2. Start it without torchrun"
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_process_tells_what_it_does(rank, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(LOAD, lambda *_, **__: 1 / 0)
    assert main(["train", "x.yaml"]) == 1
    assert logging.getLogger("harmonic_sft").isEnabledFor(logging.INFO) == (rank == "0")


@pytest.mark.parametrize("error", [StoppedError, PushError])
def test_errors_of_ours_are_one_line(error, monkeypatch, capsys):
    monkeypatch.setattr(LOAD, raising(error("no more")))
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "x.yaml"]) == 1
    assert capsys.readouterr().err == "error in process 1: no more\n"


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access\nCompile with"),
        MemoryError(),
        RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"),
        SafetensorError("Error while deserializing header: header too large"),
        EOFError("Ran out of input"),
        OSError(28, "No space left on device"),
        OSError(122, "Disk quota exceeded"),
        OSError(5, "Input/output error"),
        RuntimeError("a file name that is not UTF-8: \udce9"),
        RuntimeError("[enforce fail at inline_container.cc:626] . unexpected pos 64 vs 0"),
        SafetensorError("I/O error: Os { code: 28, kind: StorageFull }"),
        UnpicklingError("Weights only load failed. Re-running `torch.load` with"),
    ],
)
def test_other_errors_are_one_line_and_a_traceback_in_a_file(error, tmp_path, monkeypatch, capsys):
    """Before there is a run the file is a temporary one, if that can be written."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.yaml").touch()
    run = SimpleNamespace(output_dir=folder, model=SimpleNamespace(base="x"))
    monkeypatch.setattr(LOAD, lambda *_, **__: run)
    monkeypatch.setattr("harmonic_sft.training.run.train", raising(error))
    assert main(["train", "x.yaml"]) == 1
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    is_code = isinstance(error, UnpicklingError)
    start = "A checkpoint holds code, which is never run" if is_code else type(error).__name__
    assert line.startswith(f"error: {start}")
    whole = "Checkpoints that were saved are whole; add resume=true to continue." in line
    assert whole == (not is_code)
    assert line.endswith(f"The traceback is in {folder / 'error.txt'}\n")
    assert "in broken" in (folder / "error.txt").read_text()
    assert main(["train", "x.yaml", "--debug"]) == 1
    assert "in broken" in capsys.readouterr().err

    monkeypatch.setattr(LOAD, raising(error))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["train", "x.yaml"]) == 1
    (found,) = tmp_path.glob("harmonic-sft-*/error.txt")
    assert found.parent.stat().st_mode & 0o777 == 0o700  # nobody else can put a link there before
    line = capsys.readouterr().err
    assert line.endswith(f"The traceback is in {found}\n")
    assert "resume=true" not in line  # there is no run
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    assert main(["train", "x.yaml"]) == 1
    assert capsys.readouterr().err.endswith("--debug shows where it comes from\n")


def test_an_error_while_an_error_is_told_is_left_out(monkeypatch, capsys):
    """torch raises one in its signal handler for every worker that dies."""
    broken = raising(RuntimeError("DataLoader worker (pid 7) is killed by signal"))
    again = iter((False, True))
    monkeypatch.setattr(LOAD, broken)
    monkeypatch.setattr(
        "traceback.format_exception", lambda _: ["a traceback"] if next(again) else broken()
    )
    assert main(["train", "x.yaml"]) == 1
    line = capsys.readouterr().err
    assert line.startswith("error: RuntimeError: DataLoader worker (pid 7) is killed by signal.")
    assert line.count("\n") == 1


def test_an_interrupted_run_says_how_to_continue(monkeypatch, capsys, tmp_path):
    interrupted = raising(KeyboardInterrupt)
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patches:
        patches.setattr("harmonic_sft.training.run.train", interrupted)
        (tmp_path / "runs" / "demo_base" / "checkpoint-2").mkdir(parents=True)
        assert main(["train", "demo"]) == 130  # while its base is made
        assert "Interrupted. Add resume=true to continue." in capsys.readouterr().err
        assert main(["train", str(DEMO)]) == 130
        assert "Interrupted. Nothing was saved." in capsys.readouterr().err
        (tmp_path / "runs" / "demo" / "checkpoint-2").mkdir(parents=True)
        assert main(["train", str(DEMO), "model.base=x", "resume=true"]) == 130
        assert "Interrupted. Add resume=true to continue." in capsys.readouterr().err
    monkeypatch.setattr("harmonic_sft.training.run_config.load_run_config", interrupted)
    assert main(["train", "x.yaml"]) == 130
    assert "Interrupted. Nothing was saved." in capsys.readouterr().err
    assert main(["data", "x.yaml"]) == 130
    assert "resume" not in capsys.readouterr().err


def test_the_main_job_has_a_dry_run_that_prints_no_signature(capsys, caplog, tmp_path, monkeypatch):
    """It needs neither the Hub nor weights nor data nor a GPU, and leaves nothing."""
    monkeypatch.chdir(tmp_path)
    sources = 'data.sources=[{path: "https://files.org/a.jsonl?X-Signature=secret"}]'
    assert main(["train", str(ROOT / "configs" / "neobert.yaml"), "--dry-run", sources]) == 0
    printed = capsys.readouterr().out
    assert "block 27, trained" in printed
    assert "7,079,424" in printed
    assert "23,440,896" in printed
    assert not list(tmp_path.iterdir())
    assert "path: https://files.org/a.jsonl\n" in caplog.text
    assert "secret" not in caplog.text


def test_no_signature_or_token_is_in_an_error(monkeypatch, capsys, tmp_path):
    """Also where a library puts the address into its message, or a Hub the token into its."""
    monkeypatch.setenv("HF_TOKEN", "a-secret-of-mine")

    def fail(options):
        cause = OSError(f"hf_{'secret' * 6} or a-secret-of-mine is not valid")
        raise options.kind(
            "https://me:secret@files.org/a?token=secret cannot be read by a-secret-of-mine"
        ) from cause

    (tmp_path / "run.yaml").touch()
    monkeypatch.setitem(cli.COMMANDS, "push", fail)
    for kind, debug in ((ValueError, False), (ValueError, True), (KeyError, False)):
        options = argparse.Namespace(command="push", debug=debug, kind=kind, folder=tmp_path)
        assert cli.run_command(options) == 1
        shown = "https://files.org/a cannot be read"
        error = capsys.readouterr().err
        assert shown in error
        assert "secret" not in error
    traceback = (tmp_path / "error.txt").read_text()
    assert shown in traceback
    assert "secret" not in traceback
    monkeypatch.chdir(tmp_path)
    for address in ("https://files.org/a b.txt?token=secret", "https://me:secret@files.org/a.txt"):
        assert main(["train", str(DEMO), "--dry-run", f'data.sources=[{{path: "{address}"}}]']) == 1
        printed = capsys.readouterr()
        assert "error: data.sources.0.path: expected an address without " in printed.err
        assert "secret" not in printed.out + printed.err


def test_the_error_is_the_last_line_below_progress_bars(monkeypatch, capsys):
    def fail(options):
        sys.stdout.write("a table\n")
        fail.bar = tqdm(total=6)  # kept, as the Trainer does
        fail.bar.update(2)
        raise ValueError("x: expected y")

    monkeypatch.setitem(cli.COMMANDS, "train", fail)
    assert main(["train", "x.yaml"]) == 1
    fail.bar.close()
    assert capsys.readouterr().err.splitlines()[-1] == "error: x: expected y"


def test_scripts_sft_runs_under_accelerate_launch():
    launch = ["-m", "accelerate.commands.launch", "-q", "--num_processes", "1", "--num_machines=1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    # What needs no import of PyTorch.
    done = run_python(*launch, ROOT / "scripts" / "sft.py", DEMO, "--dry-runn", status=1)
    last = done.stderr.splitlines()[-1]
    assert last == "harmonic-sft train: error: unrecognized arguments: --dry-runn"


@pytest.mark.parametrize("channel", [os.pipe, os.openpty])
def test_a_stream_lasts_when_its_reader_is_gone(channel):
    """As `tee` is after a SIGTERM to all processes of a job, or the terminal of a disowned one."""
    program = (
        "import sys; from harmonic_sft_cli import LastingStream;"
        "out = LastingStream(sys.stdout); sys.stdin.read();"
        "print('a' * 100_000, file=out, flush=True); print('b', file=out, flush=True);"
        "print('end', file=sys.stderr)"
    )
    reader, writer = channel()
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=writer,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        os.close(writer)
        os.close(reader)
        process.stdin.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (0, b"end\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="expected the device of Linux")
@pytest.mark.parametrize(
    ("word", "unbuffered"), [("init", "1"), ("init", ""), ("--help", "")], ids=str
)
def test_a_full_disk_below_what_is_printed_is_one_line(word, unbuffered):
    program = "import sys; from harmonic_sft_cli import main; sys.exit(main(sys.argv[1:]))"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program, word],
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, b"error: [Errno 28] No space left on device\n")


def test_letters_that_a_terminal_does_not_have_are_escaped():
    """Such as a run's name in the closing table, before the model is pushed."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", write_through=True)
    LastingStream(stream).write("runs/\u6771 \xfc")
    assert stream.buffer.getvalue() == b"runs/\\u6771 \xfc"
