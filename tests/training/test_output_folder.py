"""The output folder: one process trains in it, and a run that saved nothing does not block it."""

import fcntl
import json
import os
import re
import threading

import pytest
import yaml

from harmonic_sft.training import output_folder
from harmonic_sft.training.output_folder import (
    check_output_folder,
    check_shared,
    claim_output_folder,
    locked,
)
from harmonic_sft.training.run import check_run, train
from harmonic_sft.training.run_config import load_run_config
from tests.training.conftest import start


def claim_folder(run):
    with locked(run.output_dir):
        claim_output_folder(run)


@pytest.fixture
def again(run_copy):
    """A finished run that is resumed in its copy."""
    words = [f"training.output_dir={run_copy}", "resume=true"]
    return load_run_config(run_copy / "run.yaml", words)


EVENTS = "runs/Nov24_09-00-00_host/1764/events.out.tfevents.1764.host"


@pytest.mark.parametrize("words", [[], ["resume=true"]])
def test_a_run_that_was_killed_while_it_claimed_its_folder_starts(make_yaml, words):
    run = load_run_config(make_yaml(), words)
    run.output_dir.mkdir()
    (run.output_dir / ".run.yaml.17").write_text("head: {na")
    check_output_folder(run)
    claim_folder(run)
    check_output_folder(run)


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(
    finished_results, make_yaml, tmp_path, interrupt, caplog
):
    path, folder = make_yaml(), tmp_path / "run"
    interrupt(2, path)
    (folder / "checkpoint-3").mkdir()
    for name in ("optimizer.pt", "trainer_state.json", "running_loss_0.json"):
        (folder / "checkpoint-3" / name).write_text("half")
    half = (".run.yaml.17", "results/.before.json.17", "checkpoint-3/adapter/adapter_config.json")
    for name in (*half, f"{EVENTS}.0", f"{EVENTS}.1"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("ha")
    (folder / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(ValueError, match=r"which holds a run. Add resume=true to continue it"):
        start(path)
    (folder / "thesis.txt").unlink()
    again = start(path, "data.eval.documents=20")
    assert f"The run in {folder} ended before its first checkpoint. It starts again." in caplog.text
    assert again["final"] == finished_results["final"]
    assert (folder / f"{EVENTS}.0").exists()


@pytest.mark.parametrize(
    "own",
    [
        "a run.yaml with a comment",
        "damaged",
        "checkpoint-3-best",
        "errors_mine.txt",
        ".run.yaml.mine",
        "model.safetensors",
        "results/train.json",
    ],
)
def test_what_no_run_writes_before_a_checkpoint_is_not_written_over(make_yaml, own):
    run = load_run_config(make_yaml())
    claim_folder(run)
    claim = run.output_dir / "run.yaml"
    texts = {"a run.yaml with a comment": f"# mine\n{claim.read_text()}", "damaged": "head: ["}
    if own in texts:
        claim.write_text(texts[own])
    elif own == "checkpoint-3-best":
        (run.output_dir / own).mkdir()
    else:
        (run.output_dir / own).parent.mkdir(exist_ok=True)
        (run.output_dir / own).touch()
    before = {path.name: path.is_file() and path.read_text() for path in run.output_dir.iterdir()}
    for look in (check_output_folder, claim_folder):
        with pytest.raises(ValueError, match=r"which holds a run. Add resume=true to continue it"):
            look(run)
    assert before == {p.name: p.is_file() and p.read_text() for p in run.output_dir.iterdir()}


def test_a_folder_that_another_run_has_claimed_since_is_refused(make_yaml):
    claim_folder(load_run_config(make_yaml()))
    other = load_run_config(make_yaml(), ["resume=true", "training.learning_rate=1"])
    with pytest.raises(ValueError, match=r"got other values for training.learning_rate"):
        claim_folder(other)


def test_a_run_that_is_resumed_before_it_began_says_so(make_yaml, caplog):
    caplog.set_level("INFO")
    path = make_yaml(training={"ignore_data_skip": False})  # said, as a template may
    run = load_run_config(path, ["resume=true"])
    check_run(run)
    assert caplog.messages == [f"No run in {run.output_dir} yet: a new one starts."]
    claim_folder(run)
    check_run(run)
    assert len(caplog.messages) == 1


def test_a_folder_in_which_a_process_trains_is_refused_to_another(make_yaml, monkeypatch):
    monkeypatch.setattr(output_folder, "LOCK_SECONDS", 0)
    run = load_run_config(make_yaml())
    claim_folder(run)
    assert [path.name for path in run.output_dir.iterdir()] == ["run.yaml"]
    message = r"expected a folder for one process, got .* in which another one is training"
    with locked(run.output_dir):
        for words in ([], ["resume=true"]):
            with pytest.raises(ValueError, match=message):
                start(make_yaml(), *words)
    assert start(make_yaml(), "resume=true")["steps"] == 6


def test_kernels_without_a_gpu_are_refused_before_anything_is_loaded(make_yaml, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    terms = [{"loss": {"name": "harmonic", "impl": "triton"}}]
    for loss in ({"name": "harmonic", "impl": "triton"}, {"name": "sum", "terms": terms}):
        with pytest.raises(
            ValueError, match=r"^loss\.impl: expected auto, .* without a GPU, got tri"
        ):
            check_run(load_run_config(make_yaml(loss=loss)))


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_worker_of_a_killed_process_does_not_keep_its_lock(tmp_path):
    """As one that is forked while its parent dies would for good."""
    read, write = os.pipe()
    with locked(tmp_path):
        worker = os.fork()
        if not worker:
            os.close(write)
            os.read(read, 1)  # until the parent has looked
            os._exit(0)
    with locked(tmp_path):
        os.close(write)
    assert os.waitpid(worker, 0)[1] == 0


def test_a_folder_is_locked_while_a_run_waits_for_its_nodes(make_yaml, monkeypatch):
    """Another run would claim it before this one trains."""
    monkeypatch.setattr(output_folder, "LOCK_SECONDS", 0)
    shared = output_folder.check_shared

    def slow(folder):
        with pytest.raises(ValueError, match="in which another one is training"):
            claim_folder(load_run_config(make_yaml()))
        return shared(folder)

    monkeypatch.setattr("harmonic_sft.training.resumable_trainer.check_shared", slow)
    assert start(make_yaml())["steps"] == 6


def test_before_the_first_checkpoint_a_batch_may_be_split_otherwise(make_yaml):
    run = load_run_config(make_yaml(), ["resume=true"])
    claim_folder(run)
    split = ["training.per_device_train_batch_size=3", "training.gradient_accumulation_steps=5"]
    other = load_run_config(make_yaml(), ["resume=true", *split])
    check_output_folder(other)
    claim_folder(other)
    assert output_folder.read_run(run.output_dir)["training"]["gradient_accumulation_steps"] == 5


def test_a_folder_that_another_process_does_not_see_is_refused(make_yaml, monkeypatch):
    run = load_run_config(make_yaml())
    claim_folder(run)
    check_shared(run.output_dir)
    monkeypatch.setattr(output_folder, "SYNC_SECONDS", 0)
    monkeypatch.setattr(output_folder, "broadcast_object_list", lambda objects: ["of another"])
    message = r"expected one folder that all nodes share, got '.*run', in which processes \[0\]"
    with pytest.raises(ValueError, match=message):
        check_shared(run.output_dir)


@pytest.mark.parametrize("is_made", [True, False])
def test_a_folder_that_may_not_be_written_is_refused_at_once(
    make_yaml, tmp_path, monkeypatch, is_made
):
    run = load_run_config(make_yaml())
    if is_made:
        run.output_dir.mkdir()
    monkeypatch.setattr("os.access", lambda *_: False)  # whoever is root may write everything
    message = f"expected a folder that you may write, got '{run.output_dir}'. You may not write "
    message += f"'{run.output_dir if is_made else tmp_path}'"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_output_folder(run)


@pytest.mark.parametrize(
    ("name", "damages"),
    [
        ("model.safetensors", (None, -1)),
        ("config.json", (-5,)),
        ("tokenizer.json", (9,)),
        ("tokenizer_config.json", (None,)),
    ],
)
def test_a_model_of_which_a_file_is_missing_or_cut_is_made_again(
    again, finished_run, caplog, name, damages
):
    path, whole = again.output_dir / name, (finished_run / name).read_bytes()
    for size in damages:
        path.unlink() if size is None else path.write_bytes(whole[:size])
        train(again)
        assert path.read_bytes() == whole
    said = "The model is made again, from the last whole checkpoint."
    assert caplog.text.count(said) == len(damages)


@pytest.mark.parametrize(
    ("content", "found"), [('{"steps', "expected JSON"), ("{}", r"expected \w+.*, got no \w+")]
)
def test_damaged_results_are_made_again(again, run_copy, finished_results, caplog, content, found):
    paths = [run_copy / "results" / f"{name}.json" for name in ("train", "before", "held_out")]
    for path in paths:
        path.write_text(content)
    results = train(again)
    for path in paths:
        assert re.search(f"Damaged, and left out: {re.escape(str(path))}: {found}", caplog.text)
    for key in ("before", "final"):
        assert results[key] == finished_results[key]


def test_a_lost_list_of_held_out_documents_is_made_again(again, run_copy, finished_results):
    (run_copy / "results" / "train.json").unlink()
    path = run_copy / "results" / "held_out.json"
    before = path.read_text()
    path.unlink()
    assert train(again)["final"] == finished_results["final"]
    lists = [json.loads(text)["fingerprints"] for text in (before, path.read_text())]
    assert lists[0] == lists[1]


def test_a_damaged_run_yaml_is_an_error_that_names_it(again, run_copy):
    path = run_copy / "run.yaml"
    text = path.read_text()
    path.write_text(text[: text.index("training:")])
    message = r"run.yaml: expected a section training, got a damaged file. Restore it as the run"
    with pytest.raises(ValueError, match=message):
        train(again)
    path.write_text(text[text.index("data:") :])
    message = r"run.yaml: expected a run that this .*\nmodel: expected a value"
    with pytest.raises(ValueError, match=message):
        train(again)


def test_a_drive_without_locks_is_said(tmp_path, monkeypatch, caplog):
    def flock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(output_folder.fcntl, "flock", flock)
    with locked(tmp_path):
        assert "The folder cannot be locked ([Errno 38] Function not implemented)" in caplog.text


def test_the_lock_of_a_killed_process_is_waited_for(tmp_path):
    """It may need a moment to end."""
    worker = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(worker, fcntl.LOCK_EX)
    threading.Timer(0.3, os.close, [worker]).start()
    with locked(tmp_path):
        pass


def test_an_address_that_is_signed_again_continues_a_run(make_yaml, tmp_path):
    def run_on(address, *words):
        sources = f'data.sources=[{{path: "https://files.org/{address}"}}]'
        return load_run_config(path, [sources, *words])

    path = make_yaml()
    claim_folder(run_on("a.jsonl?X-Signature=old"))
    again = run_on("a.jsonl?X-Signature=new", "resume=true")
    check_output_folder(again)
    claim_folder(again)
    assert "X-Signature=new" in (tmp_path / "run" / "run.yaml").read_text()  # `eval` reads it
    with pytest.raises(ValueError, match=r"got other values for data.sources"):
        check_output_folder(run_on("b.jsonl?X-Signature=new", "resume=true"))


def test_a_run_of_max_steps_is_not_resumed_without_them(make_yaml):
    path = make_yaml()
    claim_folder(load_run_config(path, ["training.max_steps=5"]))
    longer = ["resume=true", "training.max_steps=9", "training.learning_rate=1.0"]
    with pytest.raises(ValueError, match=r"training.learning_rate .*, training.max_steps \(then 5"):
        check_output_folder(load_run_config(path, longer))
    settings = yaml.safe_load(path.read_text())
    del settings["training"]["max_steps"]
    path.write_text(yaml.safe_dump(settings))
    with pytest.raises(
        ValueError, match=r"got other values for training.max_steps \(then 5\). Use"
    ):
        check_output_folder(load_run_config(path, ["resume=true"]))
