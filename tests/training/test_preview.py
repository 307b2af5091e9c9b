"""The estimate on fake tensors against a real step."""

import pytest
import torch

from harmonic_sft.training.loading import load_base_config
from harmonic_sft.training.preview import LiveBytes, estimate_step
from harmonic_sft.training.run import prepare
from harmonic_sft.training.run_config import load_run_config
from tests.encoders import FAMILIES, save_encoder


def test_live_bytes_count_what_is_alive():
    older = torch.zeros(1000)
    with LiveBytes() as live:
        older.t().add_(1)  # nothing new
        first = torch.zeros(1000)
        second = first + 1
        view = second[:10]
        del first
        third = torch.zeros(500)
        del second
    assert live.peak == 8000
    assert len(view) + len(third) == 510


def test_estimate_is_close_to_a_real_step_and_lower_with_checkpointing(make_yaml):
    plain, checkpointed = (peak_of(make_yaml, checkpointing) for checkpointing in (False, True))
    assert checkpointed < 0.8 * plain


def peak_of(make_yaml, checkpointing):
    run = load_run_config(
        make_yaml(training={"gradient_checkpointing": checkpointing}, data={"context_length": 64}),
        ["model.unfreeze={patterns: ['*']}"],
    )
    config = load_base_config(run.model)
    rows, estimate = estimate_step(run, config, batch_size=8)
    trainer = prepare(run)[0]
    model = trainer.model
    model.train()
    assert estimate["weights"] == sum(p.numel() * p.element_size() for p in model.parameters())
    assert estimate["gradients and optimizer"] == 3 * estimate["weights"]  # with two moments
    assert sum(row.trainable for row in rows) == sum(p.numel() for p in model.parameters())
    labels = torch.full((8, 64), -100)
    labels[:, : round(0.2 * 64)] = 7
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveBytes() as live:
        model(input_ids=torch.full((8, 64), 9), labels=labels).loss.backward()
    activations = estimate["activations and head, at the peak"]
    assert activations == pytest.approx(live.peak, rel=0.15)
    return activations


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_estimated(make_yaml, tmp_path, family):
    base = save_encoder(family, tmp_path / "base")
    run = load_run_config(make_yaml(model={"base": str(base)}))
    rows, estimate = estimate_step(run, load_base_config(run.model), batch_size=2)
    assert [row.parameters for row in rows if "head" in row.name or "token" in row.name] == [
        120 * 32,
        120 * 32,
    ]
    assert estimate["activations and head, at the peak"] > 0


def test_a_teacher_is_counted(make_causal_yaml):
    estimates = []
    for loss in ("harmonic", "distill"):
        run = load_run_config(make_causal_yaml(loss={"name": loss}))
        estimates.append(estimate_step(run, load_base_config(run.model), batch_size=2))
    parts, plain = estimates[0]
    trained = sum(4 * part.trainable for part in parts if part.name.startswith("block"))
    head = next(part.bytes for part in parts if part.name == "head")
    assert estimates[1][1]["weights"] - plain["weights"] == trained + head
