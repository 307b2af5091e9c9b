"""Calibration against dense logits, simulated models and torchmetrics."""

import tracemalloc

import numpy as np
import pytest
import torch
from sklearn.metrics import brier_score_loss
from torchmetrics.functional.classification import binary_calibration_error

from harmonic_sft.eval.calibration import (
    LOG_SCALES,
    NUM_SIMULATIONS,
    brier_score,
    calibration_error,
    calibration_report,
    fit_inverse_temperature,
    normalizers_at,
    reliability,
)

N, V = 2000, 50


@pytest.fixture
def logits():
    """Logits whose labels were drawn at a third of them."""
    generator = torch.Generator().manual_seed(0)
    logits = 6 * torch.randn(N, V, generator=generator, dtype=torch.float64)
    labels = torch.multinomial((logits / 3).softmax(-1), 1, generator=generator).squeeze(-1)
    return logits, labels


def table(logits):
    below = logits - logits.amax(-1, keepdim=True)
    return torch.stack([(below * s).logsumexp(-1) for s in np.exp(LOG_SCALES)], -1).numpy(), below


@pytest.mark.parametrize("kind", ["drawn", "trained"])
def test_between_the_scales_the_spline_is_close_to_exact(logits, kind):
    drawn = logits[0]
    if kind == "trained":  # a large vocabulary, and for each token a few logits above all others
        drawn = (
            4 * torch.randn(N // 32, 30_000, generator=torch.Generator().manual_seed(1)).double()
        )
        drawn[:, :4] += torch.tensor([14.0, 9.0, 7.0, 5.0])
    normalizers, below = table(drawn)
    for scale in (0.07, 0.5, 0.8, 0.9, 1.0, 1.15, 1.7, 15.0):
        exact = (below * scale).logsumexp(-1).numpy()
        assert np.abs(normalizers_at(normalizers, scale) - exact).max() < 1e-3
        assert normalizers_at(normalizers, scale).mean() == pytest.approx(exact.mean(), abs=1e-4)


def test_the_temperature_that_the_labels_were_drawn_at_is_found(logits):
    normalizers, below = table(logits[0])
    margins = below.gather(-1, logits[1][:, None]).squeeze(-1).numpy()
    found = fit_inverse_temperature(normalizers, margins)
    grid = np.linspace(0.25, 0.45, 401)
    losses = [torch.nn.functional.cross_entropy(logits[0] * s, logits[1]).item() for s in grid]
    assert found == pytest.approx(grid[np.argmin(losses)], abs=3e-4)
    assert found == pytest.approx(1 / 3, abs=0.02)
    assert fit_inverse_temperature(normalizers[:0], margins[:0]) == 1.0


@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_the_brier_score_needs_only_normalizers(logits, scale):
    normalizers, below = table(logits[0])
    margins = below.gather(-1, logits[1][:, None]).squeeze(-1).numpy()
    probs = (logits[0] * scale).softmax(-1).numpy()
    expected = brier_score_loss(logits[1].numpy(), probs, labels=np.arange(V), scale_by_half=False)
    found = brier_score(normalizers, margins, scale).mean()
    assert found == pytest.approx(expected, abs=1e-6 if scale == 1 else 1e-4)


def test_a_perfect_model_has_the_error_of_its_floor():
    generator = np.random.default_rng(1)
    reports = []
    for _ in range(20):
        confidences = generator.uniform(0.05, 1, 500)
        reports.append(calibration_report(confidences, generator.random(500) < confidences))
    floor = np.mean([report["ece_floor"] for report in reports])
    assert 0.02 < floor < 0.1
    assert np.mean([report["ece"] for report in reports]) == pytest.approx(floor, rel=0.1)
    assert np.mean([report["ece_debiased"] for report in reports]) < 0.7 * floor


def test_an_overconfident_model_keeps_its_error():
    generator = np.random.default_rng(0)
    confidences = generator.uniform(0.7, 1, 20_000)
    report = calibration_report(confidences, generator.random(20_000) < confidences - 0.2)
    assert report["ece"] == pytest.approx(0.2, abs=0.01)
    assert report["ece_debiased"] == pytest.approx(0.2, abs=0.01)
    assert report["ece_floor"] < 0.01


def test_the_floor_holds_one_simulation_at_a_time():
    generator = np.random.default_rng(3)
    confidences = generator.random(101)
    draws = np.random.default_rng(0).random((NUM_SIMULATIONS, 101), dtype=np.float32)
    floor = np.mean([calibration_error(confidences, draw < confidences) for draw in draws])
    assert calibration_report(confidences, draws[0] < confidences)["ece_floor"] == floor
    confidences = generator.random(100_000)
    tracemalloc.start()
    calibration_report(confidences, confidences > 0.5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40e6


def test_the_error_is_that_of_torchmetrics():
    generator = np.random.default_rng(0)
    confidences, correct = generator.random(300), generator.random(300) < 0.5
    preds, target = torch.from_numpy(confidences), torch.from_numpy(correct).long()
    expected = float(binary_calibration_error(preds, target, n_bins=15, norm="l1"))
    assert calibration_error(confidences, correct) == pytest.approx(expected, rel=1e-5)
    bins = reliability(confidences, correct)
    gaps = [bin["tokens"] * abs(bin["confidence"] - bin["accuracy"]) for bin in bins]
    assert sum(gaps) / 300 == pytest.approx(expected, rel=1e-5)
    assert calibration_error(np.array([1.0]), np.array([False])) == 1.0
