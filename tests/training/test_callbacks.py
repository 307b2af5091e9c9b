"""Progress bars that say what they count, the exponent of a step, and the end after a signal."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import integration_utils

from harmonic_sft.losses import CrossEntropyLoss
from harmonic_sft.models import HarmonicForMaskedLM
from harmonic_sft.training import run
from harmonic_sft.training.callbacks import HeadCallback, TerminationCallback
from harmonic_sft.training.run_config import HExpConfig
from tests.training.conftest import AtStep, start, trained, weights_in


def test_evaluations_have_labeled_bars_and_the_end_says_what_to_type(
    make_yaml, tmp_path, capsys, caplog
):
    caplog.set_level("INFO")
    folder = tmp_path / "my run"
    training = {"disable_tqdm": False, "max_steps": 2, "output_dir": str(folder)}
    start(make_yaml(training=training))
    shown = capsys.readouterr().err
    bars = {line.strip() for line in re.findall(r"([A-Z][\w ]*|):? +\d+%\|", shown)}
    assert "Evaluating" in bars
    code = caplog.messages[-1].splitlines()[0].removeprefix("Load:").strip()
    found = {}
    exec(code, found)  # what is printed can be typed
    assert type(found["model"]).__name__ == "HarmonicForMaskedLM"
    assert f"harmonic-sft eval '{folder}' data=FILE" in caplog.messages[-1]
    assert f"harmonic-sft push '{folder}' --repo-id OWNER/NAME" in caplog.messages[-1]


def test_the_exponent_is_linear_and_stateless():
    callback = HeadCallback(HExpConfig(start=-12.0, end=-4.0))
    model, values = SimpleNamespace(loss_fn=CrossEntropyLoss()), []
    for step in range(10):
        state = TrainerState(global_step=step, max_steps=8)
        callback.on_step_end(None, state, None, model=model)
        values.append(model.h_exp)
    assert values == [-12, -11, -10, -9, -8, -7, -6, -5, -4, -4]


def test_a_trial_without_an_exponent_logs_none_of_the_trial_before():
    callback = HeadCallback(HExpConfig(start=-12.0, end=-4.0))
    model = SimpleNamespace(h_exp=-12.0, renormalize_prototypes_=lambda: None)
    for h_exp, last_h_exp in ((callback.h_exp, -12.0), (None, None)):  # as a search sets it
        callback.h_exp = h_exp
        callback.on_optimizer_step(None, None, None, model=model)
        assert callback.last_h_exp == last_h_exp


def trained_elsewhere(model, tmp_path, **options):
    """Train with transformers' own trainer, annealed; the first evaluation has the best score."""
    rows = [{"input_ids": torch.arange(5, 11), "labels": torch.arange(5, 11)}] * 4
    args = TrainingArguments(
        tmp_path / "out",
        max_steps=4,
        per_device_train_batch_size=1,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(
        model,
        args,
        train_dataset=rows,
        eval_dataset=rows,
        compute_metrics=lambda _: {"score": -trainer.state.global_step},
        callbacks=[HeadCallback(HExpConfig(start=-12.0, end=-4.0))],
    )
    trainer.train()
    return trainer


def test_another_trainer_ends_with_the_exponent_of_its_best_checkpoint(tiny_base, tmp_path):
    model = HarmonicForMaskedLM.from_base(tiny_base)
    with pytest.raises(ValueError, match="another metric_for_best_model than the loss, which can"):
        trained_elsewhere(model, tmp_path)
    trainer = trained_elsewhere(model, tmp_path, metric_for_best_model="score")
    best = HarmonicForMaskedLM.from_pretrained(trainer.state.best_model_checkpoint)
    assert model.h_exp == best.h_exp == -10.0
    assert torch.equal(model.dist_head.weight, best.dist_head.weight)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_an_adapter_of_peft_which_would_not_save_the_exponent_is_refused(tiny_base, tmp_path):
    lora = LoraConfig(target_modules="all-linear", modules_to_save=["dist_head"])
    model = get_peft_model(HarmonicForMaskedLM.from_base(tiny_base), lora)
    with pytest.raises(ValueError, match=r"adapter of PEFT.*Write HeadCallback\(None\)"):
        trained_elsewhere(model, tmp_path, metric_for_best_model="score")


def terminate(step=3):
    return AtStep(step, lambda: signal.raise_signal(signal.SIGTERM))


def test_a_sigterm_costs_no_step(
    finished_run, finished_results, make_yaml, tmp_path, add_callbacks, caplog
):
    """The step at work is saved, the exit status is that of shells, and the end is the same."""
    caplog.set_level("INFO")
    path, handler = make_yaml(training={"save_strategy": "no"}), signal.getsignal(signal.SIGTERM)
    with add_callbacks(terminate()), pytest.raises(SystemExit) as caught:
        start(path)
    assert caught.value.code == 143
    assert "SIGTERM: training ends with a checkpoint of step 4." in caplog.text
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not (tmp_path / "run" / "results" / "train.json").exists()
    again = start(path, "resume=true")
    assert "checkpoint-4" in caplog.text
    assert again["final"] == finished_results["final"]
    assert weights_in(tmp_path / "run") == weights_in(finished_run)


@pytest.mark.parametrize("eval_steps", [1, 3], ids=["evaluated", "not evaluated"])
def test_a_sigterm_saves_a_step_that_is_not_the_best(
    make_yaml, tmp_path, add_callbacks, eval_steps
):
    training = {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": eval_steps}
    training |= {"metric_for_best_model": "loss", "greater_is_better": True}  # the first is best
    path, saved = make_yaml(training=training, h_exp=-12.0), Saved()
    with add_callbacks(terminate(), saved), pytest.raises(SystemExit):
        start(path)
    assert saved.steps == [eval_steps, 4]


class TerminateInLastStep(TrainerCallback):
    """Sends the signal at an event of the last step."""

    def __init__(self, event):
        setattr(self, event, self.send)

    def send(self, args, state, control, **kwargs):
        if state.global_step == state.max_steps > 0:
            signal.raise_signal(signal.SIGTERM)


TWO_EPOCHS = {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 32}  # 8 steps


@pytest.mark.parametrize(
    ("event", "strategies"),
    [
        ("on_step_end", {"save_strategy": "no"}),
        ("on_prediction_step", {"save_strategy": "no", "eval_strategy": "epoch"}),
        ("on_prediction_step", {"save_strategy": "best", "eval_strategy": "epoch"}),
    ],
)
def test_a_sigterm_after_the_last_step_leaves_its_checkpoint(
    make_yaml, tmp_path, add_callbacks, event, strategies
):
    """Two epochs, the second of which is not the best."""
    training = {**TWO_EPOCHS, "metric_for_best_model": "loss", "greater_is_better": True}
    path = make_yaml(training={**training, **strategies}, h_exp=-12.0)
    with add_callbacks(TerminateInLastStep(event)), pytest.raises(SystemExit):
        start(path)
    assert (tmp_path / "run" / "checkpoint-8" / "manifest.json").is_file()


def test_a_kill_in_the_closing_evaluation_costs_no_weights(
    finished_run, make_yaml, tmp_path, monkeypatch
):
    def killed(*_):
        raise KeyboardInterrupt

    evaluate = run.evaluate
    monkeypatch.setattr(
        run, "evaluate", lambda t, name: killed() if name == "final" else evaluate(t, name)
    )
    with pytest.raises(KeyboardInterrupt):
        start(make_yaml(training={"save_strategy": "no"}))
    assert weights_in(tmp_path / "run") == weights_in(finished_run)


def test_a_sigterm_is_left_alone_on_request(make_yaml, add_callbacks):
    handler, seen = signal.getsignal(signal.SIGTERM), []

    with add_callbacks(AtStep(0, lambda: seen.append(signal.getsignal(signal.SIGTERM)))):
        trained(make_yaml(training={"enable_jit_checkpoint": False, "max_steps": 1}))
    assert seen == [handler]


@pytest.mark.parametrize("step", [1, 3], ids=["in mid-epoch", "at the end of an epoch"])
def test_a_sigterm_neither_adds_nor_loses_an_evaluation(make_yaml, tmp_path, add_callbacks, step):
    """Where a run evaluates, saves and logs after epochs."""
    strategies = {f"{name}_strategy": "epoch" for name in ("save", "eval", "logging")}
    path = make_yaml(training={**TWO_EPOCHS, **strategies})
    whole = start(path, f"training.output_dir={tmp_path / 'whole'}")
    saved = Saved()
    with add_callbacks(terminate(step), saved), pytest.raises(SystemExit):
        start(path)
    assert saved.steps == [step + 1]  # once: nothing is written over
    assert saved.evaluated == ([4] if step == 3 else [])
    again = start(path, "resume=true")
    assert compared(again) == compared(whole)


def test_a_checkpoint_of_an_epochs_last_step_has_the_evaluation_after_it(
    make_yaml, tmp_path, interrupt
):
    """A resumed run takes no part of that epoch, and would never make it."""
    strategies = {"eval_strategy": "epoch", "logging_strategy": "epoch", "save_steps": 4}
    path = make_yaml(training={**TWO_EPOCHS, **strategies})
    whole = start(path, f"training.output_dir={tmp_path / 'whole'}")
    interrupt(5, path)
    assert (tmp_path / "run" / "checkpoint-4").is_dir()
    assert compared(start(path, "resume=true")) == compared(whole)


class Saved(TrainerCallback):
    """Notes the steps of checkpoints, and those of evaluations while it trains."""

    def __init__(self):
        self.steps, self.evaluated = [], []

    def on_evaluate(self, args, state, control, **kwargs):
        if state.global_step > 0:
            self.evaluated.append(state.global_step)

    def on_save(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)


def compared(results):
    """Return what was logged of the model, without times."""
    kinds = ("runtime", "second", "flos", "train_loss")
    return [
        {key: value for key, value in row.items() if not any(kind in key for kind in kinds)}
        for row in results["history"]
    ]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_sigterm_to_a_run_and_its_workers_leaves_a_checkpoint(
    text_file, make_yaml, tmp_path, add_callbacks, streaming
):
    """Schedulers send it to all processes of a job."""

    def terminate_all():
        workers = [str(worker.pid) for worker in multiprocessing.active_children()]
        assert workers
        subprocess.run(["kill", *workers, str(os.getpid())], check=True)

    source = {"path": str(text_file), "streaming": streaming}
    path = make_yaml(data={"sources": [source]}, training={"dataloader_num_workers": 1})
    with add_callbacks(AtStep(1, terminate_all)), pytest.raises(SystemExit) as caught:
        start(path)
    assert caught.value.code == 143
    assert (tmp_path / "run" / "checkpoint-2" / "manifest.json").is_file()


def test_workers_outlive_a_sigterm_while_a_run_takes_it():
    termination = TerminationCallback(is_alone=True)
    loader = DataLoader(range(100), num_workers=1, persistent_workers=True)
    batches = iter(termination.keep_workers_(loader))
    [worker] = multiprocessing.active_children()
    with termination.listening(is_asked=True):
        next(batches)
        for process in psutil.Process().children(recursive=True):  # what starts workers, too
            process.terminate()
        worker.join(timeout=0.2)
        assert worker.is_alive()
    worker.terminate()
    worker.join(timeout=10)
    assert worker.exitcode == 0


def test_the_only_checkpoint_that_is_kept_is_not_the_one_that_a_sigterm_saved(
    make_yaml, tmp_path, add_callbacks
):
    """transformers deletes all but the best at the end, where one is kept."""
    training = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_total_limit": 1}
    training |= {"metric_for_best_model": "loss", "greater_is_better": True}  # the first is best
    with add_callbacks(terminate()), pytest.raises(SystemExit):
        start(make_yaml(training=training, h_exp=-12.0))
    found = {path.name for path in (tmp_path / "run").glob("checkpoint-*")}
    assert found == {"checkpoint-1", "checkpoint-4"}


class Writer:
    """A TensorBoard that is not installed here."""

    opened: ClassVar[list[str | None]] = []

    def __init__(self, log_dir):
        self.opened.append(log_dir)

    def add_text(self, *_):
        pass

    def add_scalar(self, *_):
        pass

    def flush(self):
        pass

    def close(self):
        pass


def test_a_run_is_one_run_of_tensorboard_in_its_own_folder(make_yaml, tmp_path, monkeypatch):
    """An evaluation comes before the training, and one after it."""
    monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: True)
    board = SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setattr(Writer, "opened", [])
    start(make_yaml(training={"max_steps": 2, "report_to": "tensorboard"}))
    assert len(Writer.opened) == 1
    assert Path(Writer.opened[0]).parent == tmp_path / "run" / "runs"
