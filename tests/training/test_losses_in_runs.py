"""Every loss from its YAML section to trained weights, and neighbors that are found anew."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from harmonic_sft.config import parse, read_yaml, to_yaml
from harmonic_sft.losses import LOSSES, neighbor_tables
from harmonic_sft.training.run import prepare, train
from harmonic_sft.training.run_config import RunConfig, load_run_config
from tests.training.conftest import StopAt, losses, trained

COSINE = {"head": {"name": "cosine"}, "h_exp": None}
KNN = {"name": "knn_label_smoothing", "num_neighbors": 4}
SECTIONS = {
    "cross_entropy": {"loss": {"name": "cross_entropy", "label_smoothing": 0.1}},
    "harmonic": {"loss": {"name": "harmonic"}},
    "knn_label_smoothing": {"loss": {**KNN, "refresh_every": 3}},
    "wasserstein": {"loss": {"name": "wasserstein", "top_k": 10, "ground": "fixed"}},
    "arcface": {**COSINE, "loss": {"name": "arcface", "margin": 0.3}},
    "cosface": {**COSINE, "loss": {"name": "cosface", "margin": 0.2}},
    "info_nce": {"loss": {"name": "info_nce", "scale": 10.0}},
    "sum": {
        "loss": {
            "name": "sum",
            "terms": [
                {"loss": {"name": "harmonic"}},
                {"weight": 0.1, "loss": {"name": "wasserstein"}},
                {"weight": 0.5, "loss": {**KNN, "refresh_every": 1}},
            ],
        }
    },
}


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_no_loss_is_left_out():
    # The old head's distillation is of decoders alone: see test_causal_runs.py.
    assert {*SECTIONS, "distill"} == set(LOSSES)


@pytest.mark.parametrize("name", SECTIONS)
def test_every_loss_survives_a_round_trip_and_trains_the_prototypes(make_yaml, tmp_path, name):
    path = make_yaml(**SECTIONS[name], training={"max_steps": 2, "eval_strategy": "no"})
    run = load_run_config(path)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(to_yaml(run))
    assert parse(RunConfig, read_yaml(resolved)) == run
    assert run.loss.name == name
    trainer = prepare(run).trainer
    before = trainer.model.dist_head.weight.detach().clone()
    trainer.train()
    assert len(losses(trainer)) == 2
    assert (trainer.model.dist_head.weight - before).norm() > 0.01


def test_too_many_neighbors_are_refused_before_training(make_yaml, tmp_path):
    path = make_yaml(loss={"name": "knn_label_smoothing", "num_neighbors": 1000})
    with pytest.raises(ValueError, match=r"num_neighbors: expected at most 108, .* got 1000"):
        train(load_run_config(path))
    assert not (tmp_path / "run").exists()


class Tables(TrainerCallback):
    """Notes at the start of every step which table is in use."""

    def __init__(self):
        self.seen = []

    def on_step_begin(self, args, state, control, **kwargs):
        (table,) = neighbor_tables(kwargs["model"].loss_fn)
        self.seen.append(table.table.weights)


@pytest.mark.parametrize(
    ("every", "changes"), [(None, []), (2, [2, 4]), (3, [3]), (1, [1, 2, 3, 4, 5])]
)
def test_neighbors_are_found_anew_when_it_is_time(make_yaml, every, changes):
    path = make_yaml(loss={**KNN, "refresh_every": every}, training={"save_strategy": "no"})
    trainer = prepare(load_run_config(path)).trainer
    tables = Tables()
    trainer.add_callback(tables)
    trainer.train()
    seen = tables.seen
    assert len(seen) == 6
    found = [step for step in range(1, 6) if not torch.equal(seen[step], seen[step - 1])]
    assert found == changes


RESUMED = {
    "kept": KNN,
    "found anew, and a fixed ground": {
        "name": "sum",
        "terms": [
            {"loss": {**KNN, "refresh_every": 2}},
            {"weight": 0.5, "loss": {"name": "wasserstein", "ground": "fixed"}},
        ],
    },
}


@pytest.mark.parametrize("loss", RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_has_the_tables_of_an_uninterrupted_one(
    make_yaml, tmp_path, loss, add_callbacks
):
    path = make_yaml(loss=loss, training={"save_steps": 4, "eval_strategy": "no"})
    whole = train(load_run_config(path, [f"training.output_dir={tmp_path / 'whole'}"]))
    cut = f"training.output_dir={tmp_path / 'cut'}"
    with add_callbacks(StopAt(5)), pytest.raises(KeyboardInterrupt):
        train(load_run_config(path, [cut]))
    again = train(load_run_config(path, [cut, "resume=true"]))
    assert again["final"] == whole["final"]
    expected, actual = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_neighbors_found_anew_train_other_weights(make_yaml):
    """Otherwise nothing above could tell whether a resumed run found its neighbors anew."""
    heads = []
    for every in (None, 2):
        path = make_yaml(loss={**KNN, "refresh_every": every}, training={"save_strategy": "no"})
        heads.append(trained(path).model.dist_head.weight.detach())
    assert not torch.equal(*heads)
