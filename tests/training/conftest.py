"""Runs that several tests only read, and runs in processes of their own."""

import contextlib
import gc
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from datasets import load_dataset
from transformers import AutoTokenizer, TrainerCallback

from harmonic_sft import HarmonicForMaskedLM, HarmonicTrainingArguments
from harmonic_sft.training import run
from harmonic_sft.training.run import prepare, train
from harmonic_sft.training.run_config import load_run_config
from harmonic_sft.training.trainer import HarmonicTrainer
from tests.elsewhere import ROOT, Worker


@pytest.fixture(autouse=True, scope="module")
def undrawn(finished_run):
    """A third of a tiny run is its picture; `finished_run`, which is made before, has one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "plot_run", lambda results, path: path)
        gc.collect()
        gc.freeze()  # what was imported since; every training collects
        yield


class AtStep(TrainerCallback):
    """Calls a function before a step."""

    def __init__(self, step, call):
        self.step, self.call = step, call

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.call()


def start(path, *overrides):
    """The results of a whole run."""
    return train(load_run_config(path, overrides))


def prepared(path, *overrides):
    """The trainer of a run."""
    return prepare(load_run_config(path, overrides))[0]


def trained(path, *overrides):
    trainer = prepared(path, *overrides)
    trainer.claimed = trainer.run_config.output_dir  # several of one test share the folder
    trainer.train()
    return trainer


def logged(history, key="loss"):
    return [entry[key] for entry in history if "loss" in entry]


def losses(trainer):
    return logged(trainer.state.log_history)


def weights_in(folder):
    """The file of a model, byte by byte."""
    return (folder / "model.safetensors").read_bytes()


# Imports once, then forks the processes of one job after the other.
SCRIPT = """
import gc, json, os, signal, sys
from functools import partial
from harmonic_sft.training import run
from harmonic_sft.training.run_config import load_run_config
from harmonic_sft.training.trainer import HarmonicTrainer
from tests.training import python_session
from tests.training.processes import fork

gc.freeze()
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # where runs print
run.plot_run = lambda results, path: path
training_step = HarmonicTrainer.training_step

def train(words, kill_at, number, rank):
    def killed(self, *arguments):
        loss = training_step(self, *arguments)
        is_meant = number == signal.SIGKILL or self.args.process_index == 0
        if self.state.global_step == kill_at and is_meant:
            os.kill(os.getpid(), number)
        return loss

    HarmonicTrainer.training_step = killed
    run.train(load_run_config(words[0], words[1:]))

for line in sys.stdin:
    words, processes, kill_at, number = json.loads(line)
    work = partial(train, words, kill_at, number)
    if not words[0].endswith(".yaml"):
        work = partial(python_session.write, words)
    children = fork(processes, work)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    ended = 143 if number == signal.SIGTERM else -number
    answers.write(json.dumps(codes == [0 if kill_at is None else ended] * processes) + "\\n")
    answers.flush()
"""


@pytest.fixture(scope="session")
def launch():
    """Return a function that runs a job: words of a run, its processes, the step to kill it in.

    Every process is a fresh one. `number` is another signal, which the first process gets. Words
    that begin with no YAML file are those of `python_session.write`.
    """
    worker = Worker([sys.executable, "-c", SCRIPT], {**os.environ, "PYTHONPATH": str(ROOT)})

    def start(words, processes, kill_at=None, number=signal.SIGKILL):
        assert worker.send([[*map(str, words)], processes, kill_at, number]), words

    yield start
    worker.close()


@pytest.fixture
def add_callbacks(monkeypatch):
    """Return a context in which every trainer gets further callbacks."""

    @contextlib.contextmanager
    def context(*callbacks):
        begin = HarmonicTrainer.__init__

        def with_callbacks(self, *args, **kwargs):
            begin(self, *args, **kwargs)
            for callback in callbacks:
                self.add_callback(callback)

        with monkeypatch.context() as patch:
            patch.setattr(HarmonicTrainer, "__init__", with_callbacks)
            yield

    return context


@pytest.fixture
def interrupt(add_callbacks):
    """Return a function that starts a run, which Ctrl-C ends before a step."""

    def until(step, path, *overrides):
        # As Python does; a shell in the background has it ignored.
        ctrl_c = AtStep(step, lambda: signal.default_int_handler(signal.SIGINT, None))
        with add_callbacks(ctrl_c), pytest.raises(KeyboardInterrupt):
            start(path, *overrides)

    return until


@pytest.fixture(scope="session")
def finished_results(finished_run):
    return json.loads((finished_run / "results" / "train.json").read_text())


@pytest.fixture
def arguments(tmp_path):
    def make(name="run", **fields):
        settings = {
            "max_steps": 4,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "context_length": 24,
            "disable_tqdm": True,
            "use_cpu": True,
            "report_to": "none",
        }
        return HarmonicTrainingArguments(str(tmp_path / name), **{**settings, **fields})

    return make


@pytest.fixture
def make(tiny_base, texts, arguments, tokenizer):
    """Make a trainer on texts; a model that is loaded gets the tokenizer that reads them."""

    def trainer(args=None, model=tiny_base, trainer_class=HarmonicTrainer, **options):
        if not isinstance(model, str | Path) and "data_collator" not in options:
            options = {"processing_class": tokenizer, **options}
        return trainer_class(model, args or arguments(), **{"train_dataset": texts, **options})

    return trainer


@pytest.fixture
def ignorant_base(tiny_base, tokenizer, tmp_path):
    """A base with a head, of random weights."""
    base = HarmonicForMaskedLM.from_base(tiny_base, head={"name": "linear"})
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture(scope="module")
def tokenizer(tiny_base):
    return AutoTokenizer.from_pretrained(tiny_base)


@pytest.fixture(scope="module")
def texts(text_file):
    return load_dataset("text", data_files=str(text_file), split="train")
