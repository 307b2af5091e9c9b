"""What a run checks before it trains when it is to be pushed."""

import threading
import time
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError
from transformers import TrainerCallback, TrainerState

from harmonic_sft.hub import Destination
from harmonic_sft.training import publishing
from harmonic_sft.training.callbacks import StoppedError
from harmonic_sft.training.head_swap import evaluate
from harmonic_sft.training.run import train
from harmonic_sft.training.run_config import load_run_config

TOKEN = "hf_" + 34 * "a"


@pytest.mark.usefixtures("no_token")
@pytest.mark.parametrize(
    ("hub", "message"),
    [
        ({"repo_id": "me/model"}, "token: expected to be logged in"),
        ({"repo_id": "me/model.."}, "repo_id: expected owner/name"),
        ({"repo_id": "me/model", "license": " "}, "license: expected one that the Hub knows"),
    ],
)
def test_what_cannot_be_pushed_to_is_an_error_before_anything_is_made(
    make_yaml, tmp_path, hub, message
):
    run = load_run_config(make_yaml(hub={"push": True, **hub}))
    with pytest.raises(ValueError, match=message):
        train(run)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def pushed_run(make_yaml, monkeypatch):
    """A run that pushes every checkpoint, and does nothing else with the Hub."""
    for name in ("check_destination", "check_model", "push_run"):
        monkeypatch.setattr(f"harmonic_sft.training.run.{name}", lambda *_: None)
    hub = {"push": True, "repo_id": "me/model", "every_save": True}
    return load_run_config(make_yaml(hub=hub))


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("stage", OSError),
        ("stage", SafetensorError),
        ("tempfile.TemporaryDirectory", FileNotFoundError),
    ],
)
def test_a_checkpoint_that_cannot_be_staged_is_a_warning(
    pushed_run, monkeypatch, caplog, place, kind
):
    def full(*_, **__):
        raise kind(f"No space left on device. {TOKEN}")

    monkeypatch.setattr(f"harmonic_sft.training.publishing.{place}", full)
    assert train(pushed_run)["steps"] == 6
    assert "checkpoint-3 was not pushed" in caplog.text
    assert "No space left" in caplog.text
    assert TOKEN not in caplog.text  # which a Hub may repeat


def test_a_push_on_its_way_is_waited_for_when_training_stops(pushed_run, monkeypatch):
    sent, stopped = [], threading.Event()

    def upload(_, trained, __):  # of step 3; step 6 finds it on its way
        stopped.wait()
        time.sleep(0.2)
        sent.append(trained.step)

    def stop(trainer, prefix):
        if prefix == "before":
            return evaluate(trainer, prefix)
        stopped.set()
        raise StoppedError("stopped after training")

    monkeypatch.setattr(publishing, "upload", upload)
    monkeypatch.setattr("harmonic_sft.training.run.evaluate", stop)
    with pytest.raises(StoppedError):
        train(pushed_run)
    assert sent == [3]


def test_a_trainer_that_fails_waits_for_a_push_on_its_way(make, arguments, monkeypatch, caplog):
    sent, stopped = [], threading.Event()

    def upload(*_):
        stopped.wait()
        time.sleep(0.2)
        sent.append(threading.current_thread().daemon)

    class Failing(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                stopped.set()
                raise OSError("a failure")

    for name in ("read_trained", "stage"):
        monkeypatch.setattr(publishing, name, lambda *_: None)
    monkeypatch.setattr(publishing, "upload", upload)
    monkeypatch.setattr("harmonic_sft.training.trainer.check_destination", lambda _: None)
    hub = {"push_to_hub": True, "hub_model_id": "me/mine", "hub_strategy": "every_save"}
    trainer = make(arguments(save_strategy="steps", save_steps=2, **hub), callbacks=[Failing()])
    with pytest.raises(OSError, match="a failure"):
        trainer.train()
    assert sent == [True]  # one that is given up must not hold the interpreter's end
    assert "Waiting for the push" in caplog.text


def test_a_trainer_that_has_waited_pushes_again(monkeypatch):
    sent, checked = [], []
    for name in ("read_trained", "stage"):
        monkeypatch.setattr(publishing, name, lambda *_, **__: None)
    monkeypatch.setattr(publishing, "upload", lambda *_: sent.append(1))
    monkeypatch.setattr(publishing, "check_completed", lambda _, form: checked.append(form))
    callback = publishing.PushCallback(Destination(repo_id="me/model", form="head"))
    for step in (3, 6):
        state = TrainerState(global_step=step)
        callback.on_save(SimpleNamespace(output_dir="run"), state, None)
        callback.finish()
    assert sent == [1, 1]
    assert checked == ["head"]  # the base is fetched once
