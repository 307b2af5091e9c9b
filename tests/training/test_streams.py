"""A streamed run is the same however it is cut into sessions, processes and workers."""

import json
import random
from types import SimpleNamespace

import pytest
import torch

from harmonic_sft.data.bad_rows import BadRows
from harmonic_sft.data.loading import LoadedData
from harmonic_sft.training import run
from harmonic_sft.training.batches import StreamPlace
from tests.training.conftest import logged, prepared, start


@pytest.fixture(scope="module")
def shards(tmp_path_factory, text_file):
    """Some text in four files of uneven lengths, a few documents longer than a row, some bad."""
    folder = tmp_path_factory.mktemp("shards")
    lines = text_file.read_text().splitlines()[:120]
    generator = random.Random(1)
    files = [[] for _ in range(4)]
    for index, line in enumerate(lines):
        files[generator.choice((0, 1, 1, 2, 3))].append({"text": line * (1 + 2 * (index % 7 == 0))})
    for number, rows in enumerate(files):
        good = [json.dumps(row) for row in rows]
        late = ['{"text": null}', *good[-6:]]
        lines = [*good[:5], "{cut", '{"text": " "}', *good[5:-6], *late]
        text = "".join(f"{line}\n" for line in lines)
        (folder / f"{number}.jsonl").write_text(text)
    return folder


@pytest.fixture
def stream_yaml(make_yaml, shards):
    def make(**training):
        return make_yaml(
            data={
                "sources": [{"path": f"{shards}/*.jsonl", "streaming": True}],
                "window": 16,
                "packing": True,
                "on_bad_row": "skip",
            },
            training={"max_steps": 13, "save_steps": 5, "learning_rate": 1e-3, **training},
        )

    return make


def found_by(folder):
    """Return the losses of a run with their epochs, how many rows it left out, and why."""
    results = json.loads((folder / "results" / "train.json").read_text())
    left_out = results["data"]["rows_left_out"], set(results["data"]["reasons"])
    steps = zip(*(logged(results["history"], key) for key in ("loss", "epoch")), strict=True)
    return [*steps], *left_out


def test_five_steps_a_kill_and_eight_steps_are_thirteen_steps(stream_yaml, tmp_path, launch):
    """Begun with workers, and on two processes with two streams each; one process continues."""
    path = stream_yaml()
    folders = {name: tmp_path / name for name in ("whole", "alone", "shared")}
    workers = ["training.dataloader_num_workers=2"]
    half = ["training.per_device_train_batch_size=4"]
    words = {name: [path, f"training.output_dir={folder}"] for name, folder in folders.items()}
    launch([*words["alone"], *workers], 1, 7)
    launch([*words["shared"], *half], 2, 7)
    start(path, *words["whole"][1:])
    start(path, *words["alone"][1:], "resume=true")
    start(path, *words["shared"][1:], "resume=true")
    (whole, *skipped), (alone, *skipped_alone), (shared, *skipped_shared) = map(
        found_by, folders.values()
    )
    assert len(whole) == 13
    assert skipped == skipped_alone == skipped_shared
    left_out, reasons = skipped
    assert left_out == 12
    assert len(reasons) == 5
    assert alone == whole
    # Sums in another order.
    torch.testing.assert_close(torch.tensor(shared), torch.tensor(whole), rtol=1e-5, atol=0)


def test_workers_of_a_stream_start_as_the_arguments_say(stream_yaml):
    trainer = prepared(stream_yaml(dataloader_num_workers=1))
    trainer.args.dataloader_multiprocessing_context = "spawn"
    context = trainer.get_train_dataloader().multiprocessing_context
    assert context.get_start_method() == "spawn"


def test_rows_left_out_are_counted_over_all_processes(monkeypatch):
    def window(rows, skipped, *reasons, duplicates=(0, 0)):
        found = {"skipped": skipped, "reasons": list(reasons), "duplicates": duplicates}
        return {"rows": rows, **found}

    own = {"0": window(8, 5, "b: cut", duplicates=[1, 2]), "3": window(2, 1)}
    other = {
        "3": window(7, 4, "d: cut", duplicates=[7, 0]),
        "0": window(3, 2, "b: cut", duplicates=[1, 0]),
        "1": window(5, 10, "c: cut"),
    }
    place = SimpleNamespace(state={"rows": 0, "streams": own})
    data = LoadedData(train=None, eval=None, collator=None, bad_rows=BadRows({"a": ("cut", 1)}))
    monkeypatch.setattr(run, "gather_object", lambda own: [{"rows": 0, "streams": other}, *own])
    results, duplicates = run._left_out(SimpleNamespace(stream_place=place), data)
    assert duplicates == (1 + 7, 2)
    assert results == {
        "rows_left_out": 1 + 5 + 10 + 4,
        "reasons": ["a: cut", "b: cut", "c: cut", "d: cut"],
        "fill_rate": None,
        "unscored_tokens_left_out": None,
    }


@pytest.mark.parametrize("counts", [{"left_out": {"0": [5, 1, 2]}}, {}])
def test_a_stream_of_an_earlier_version_is_refused(tmp_path, counts):
    window = {"rows": 4, "skipped": 0, "reasons": []} | ({"duplicates": [1, 0]} if counts else {})
    state = {"rows": 9, "streams": {"0": window}, **counts}
    (tmp_path / "stream_state_0.json").write_text(json.dumps(state))
    place = StreamPlace(SimpleNamespace(), SimpleNamespace())
    with pytest.raises(ValueError, match="resume: expected a stream's place as this version"):
        place.load(tmp_path)


def test_a_stream_that_is_killed_after_its_last_step_knows_what_it_left_out(stream_yaml, tmp_path):
    path = stream_yaml(max_steps=3, save_steps=3)
    whole = start(path)
    assert whole["data"]["rows_left_out"] > 0
    assert 0 < whole["data_wait_share"] < 1
    (tmp_path / "run" / "results" / "train.json").unlink()
    again = start(path, "resume=true")
    assert again["data"] == whole["data"]
