"""Every loss from its YAML section to trained weights, and neighbors that are found anew."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from harmonic_sft.config import parse, read_yaml, to_yaml
from harmonic_sft.losses import LOSSES, neighbor_tables
from harmonic_sft.training.run import prepare, train
from harmonic_sft.training.run_config import RunConfig, load_run_config

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
def test_every_loss_is_read_from_a_run_and_survives_a_round_trip(make_yaml, tmp_path, name):
    run = load_run_config(make_yaml(**SECTIONS[name]))
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(to_yaml(run))
    assert parse(RunConfig, read_yaml(resolved)) == run
    assert run.loss.name == name


@pytest.mark.parametrize("name", SECTIONS)
def test_every_loss_trains_the_prototypes(make_yaml, tmp_path, name):
    path = make_yaml(**SECTIONS[name], training={"max_steps": 2, "eval_strategy": "no"})
    trainer = prepare(load_run_config(path)).trainer
    before = trainer.model.dist_head.weight.detach().clone()
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 2
    assert (trainer.model.dist_head.weight - before).norm() > 0.01


BAD = [
    (["loss.epsilon=0.1"], r"loss.epsilon: expected one of the known keys, got 'epsilon'"),
    (["loss={name: wasserstein, topk: 5}"], r"loss.topk: .* Did you mean 'top_k'\?"),
    (["loss={name: wasserstein, ground: moved}"], "loss.ground: expected one of .* got 'moved'"),
    (["loss={name: knn_label_smothing}"], r"loss.name: .* Did you mean 'knn_label_smoothing'\?"),
    (["loss={name: knn_label_smoothing, epsilon: 1.0}"], "loss.epsilon: expected a number below 1"),
    (["loss={name: arcface}"], "loss arcface: expected a cosine head, got dist"),
    (
        ["loss={name: sum, terms: [{loss: {name: harmonic}}, {loss: {name: cosface}}]}"],
        "loss cosface: expected a cosine head, got dist",
    ),
    (
        ["loss={name: sum, terms: [{loss: {name: harmonic, margn: 1}}]}"],
        "loss.terms.0.loss.margn: expected one of the known keys",
    ),
    (
        ["head={name: multi_head}", "h_exp=null", "loss={name: info_nce}"],
        "loss info_nce: expected a head of dot products",
    ),
    (
        ["loss={name: knn_label_smoothing, refresh_every: 2}"],
        "training.save_steps: expected a multiple of the loss's refresh_every 2, got 3",
    ),
    (
        ["loss={name: knn_label_smoothing, refresh_every: 3}", "training.save_steps=0.5"],
        "training.save_steps: expected a multiple of the loss's refresh_every 3, got 0.5",
    ),
    (
        [
            "loss={name: sum, terms: [{loss: {name: knn_label_smoothing, refresh_every: 3}}]}",
            "training.save_strategy=epoch",
        ],
        "training.save_strategy: expected 'steps' or 'no' with refresh_every .* got 'epoch'",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), BAD, ids=lambda value: str(value)[:60])
def test_bad_losses_are_refused_before_anything_is_loaded(make_yaml, overrides, message):
    with pytest.raises(ValueError, match=message):
        load_run_config(make_yaml(), overrides)


def test_without_checkpoints_any_interval_will_do(make_yaml):
    load_run_config(
        make_yaml(),
        ["loss={name: knn_label_smoothing, refresh_every: 7}", "training.save_strategy=no"],
    )


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


STOP_AT = 5
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


class Stop(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == STOP_AT:  # a step after the last checkpoint
            raise KeyboardInterrupt


@pytest.mark.parametrize("loss", RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_has_the_tables_of_an_uninterrupted_one(
    make_yaml, tmp_path, loss, add_callbacks
):
    path = make_yaml(loss=loss, training={"save_steps": 4, "eval_strategy": "no"})
    whole = train(load_run_config(path, [f"training.output_dir={tmp_path / 'whole'}"]))
    cut = f"training.output_dir={tmp_path / 'cut'}"
    with add_callbacks(Stop()), pytest.raises(KeyboardInterrupt):
        train(load_run_config(path, [cut]))
    again = train(load_run_config(path, [cut, "resume=true"]))
    assert again["final"] == whole["final"]
    expected, actual = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_neighbors_found_anew_train_other_weights(make_yaml):
    """Otherwise nothing above could tell whether a resumed run found its neighbors anew."""
    trained = []
    for every in (None, 2):
        path = make_yaml(loss={**KNN, "refresh_every": every}, training={"save_strategy": "no"})
        trainer = prepare(load_run_config(path)).trainer
        trainer.claimed = True  # both share the folder
        trainer.train()
        trained.append(trainer.model.dist_head.weight.detach())
    assert not torch.equal(*trained)
