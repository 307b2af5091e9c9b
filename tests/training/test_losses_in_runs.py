"""Every loss from its YAML section to trained weights, and neighbors that are found anew."""

import pytest
import torch
from transformers import TrainerCallback

from harmonic_sft.config import parse, read_yaml, to_yaml
from harmonic_sft.losses import LOSSES, neighbor_tables
from harmonic_sft.training.run import prepare
from harmonic_sft.training.run_config import RunConfig, load_run_config
from tests.training.conftest import losses, prepared, start

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


# The old head's distillation is of decoders alone: see test_causal_runs.py.
@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"distill"}))
def test_every_loss_survives_a_round_trip_and_trains_the_prototypes(make_yaml, tmp_path, name):
    path = make_yaml(**SECTIONS[name], training={"max_steps": 2, "eval_strategy": "no"})
    run = load_run_config(path)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(to_yaml(run))
    assert parse(RunConfig, read_yaml(resolved)) == run
    assert run.loss.name == name
    trainer = prepare(run)[0]
    before = trainer.model.dist_head.weight.detach().clone()
    trainer.train()
    assert len(losses(trainer)) == 2
    assert (trainer.model.dist_head.weight - before).norm() > 0.01


def test_too_many_neighbors_are_refused_before_training(make_yaml, tmp_path):
    path = make_yaml(loss={"name": "knn_label_smoothing", "num_neighbors": 1000})
    with pytest.raises(ValueError, match=r"num_neighbors: expected at most 108, .* got 1000"):
        start(path)
    assert not (tmp_path / "run").exists()


class Tables(TrainerCallback):
    """Notes at the start of every step which table is in use."""

    def __init__(self):
        self.seen = []

    def on_step_begin(self, args, state, control, **kwargs):
        (table,) = neighbor_tables(kwargs["model"].loss_fn)
        self.seen.append(table.table.weights)


def test_neighbors_are_found_anew_when_it_is_time_and_train_other_weights(make_yaml):
    """Otherwise test_trainer.py could not tell whether a resumed run found its neighbors again."""
    heads = []
    for every, changes in ((None, []), (2, [2, 4])):
        path = make_yaml(loss={**KNN, "refresh_every": every}, training={"save_strategy": "no"})
        trainer = prepared(path)
        tables = Tables()
        trainer.add_callback(tables)
        trainer.claimed = trainer.run_config.output_dir  # both share the folder
        trainer.train()
        seen = tables.seen
        assert len(seen) == 6
        found = [step for step in range(1, 6) if not torch.equal(seen[step], seen[step - 1])]
        assert found == changes
        heads.append(trainer.model.dist_head.weight.detach())
    assert not torch.equal(*heads)
