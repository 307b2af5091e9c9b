"""A run is made once, and none after the deadline."""

import json
import time

from experiments.worth_it import store
from experiments.worth_it.store import Store, best_rate


def test_a_finished_run_is_read_and_not_made_again(tmp_path):
    made = []

    def run():
        made.append(1)
        return {"loss": 0.5}

    path = tmp_path / "new" / "runs.jsonl"
    first = Store(path, ("arm", "seed")).get(run, arm="linear", seed=0)
    assert Store(path, ("arm", "seed")).get(run, arm="linear", seed=0) == first
    assert Store(path, ("arm", "seed")).get(run, arm="linear", seed=1)["seed"] == 1
    assert len(made) == 2


def test_a_new_row_carries_its_commit_and_an_earlier_one_stays_as_it_is(tmp_path, monkeypatch):
    state = {"git_commit": "abc", "dirty": True, "hardware": {}}
    monkeypatch.setattr(store, "environment", lambda: state)
    path = tmp_path / "runs.jsonl"
    earlier = {"seed": 0, "loss": 2.0}
    path.write_text(f"{json.dumps(earlier)}\n")
    runs = Store(path, ("seed",))
    runs.get(lambda: {"loss": 1.0}, seed=1)
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == runs.known(seed=0) == earlier
    assert (second["git_commit"], second["dirty"]) == ("abc", True)


def test_half_a_line_of_a_full_disk_costs_its_run_alone(tmp_path):
    path = tmp_path / "runs.jsonl"
    Store(path, ("seed",)).get(lambda: {"loss": 1.0}, seed=0)
    with path.open("a") as file:
        file.write('{"seed": 1, "lo')
    continued = Store(path, ("seed",))
    continued.get(lambda: {"loss": 3.0}, seed=1)
    continued.get(lambda: {"loss": 4.0}, seed=2)
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [1.0, 3.0, 4.0]
    assert len(Store(path, ("seed",)).rows) == 3


def test_no_run_starts_after_the_deadline(tmp_path):
    path = tmp_path / "runs.jsonl"
    Store(path, ("seed",)).get(lambda: {"loss": 1.0}, seed=0)
    late = Store(path, ("seed",), deadline=time.monotonic() - 1)
    assert late.get(lambda: {"loss": 2.0}, seed=0)["loss"] == 1.0
    assert late.get(lambda: {"loss": 2.0}, seed=1) is None


def test_runs_of_all_seeds_are_read_and_the_best_rate_needs_all_runs(tmp_path):
    runs_of = Store(tmp_path / "runs.jsonl", ("rate", "seed"))
    for rate, loss in ((0.1, 2.0), (0.2, 1.0)):
        runs_of.get(lambda loss=loss: {"loss": loss}, rate=rate, seed=0)
    runs_of.get(lambda: {"loss": 3.0}, rate=0.2, seed=1)
    assert [run["loss"] for run in runs_of.of_seeds(2, rate=0.2)] == [1.0, 3.0]
    assert runs_of.of_seeds(2, rate=0.1) == []
    runs = [runs_of.known(rate=rate, seed=0) for rate in (0.1, 0.2, 0.3)]
    assert best_rate(runs[:2]) == 0.2
    assert best_rate(runs) is None
