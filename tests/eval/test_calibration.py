"""The calibration error against torchmetrics and against a loop over bins."""

import pytest
import torch
from torchmetrics.functional.classification import multiclass_calibration_error

from harmonic_sft.eval import expected_calibration_error
from harmonic_sft.eval.calibration import calibration_gaps


def predictions(sharpness):
    generator = torch.Generator().manual_seed(0)
    probs = (sharpness * torch.randn(500, 7, generator=generator, dtype=torch.float64)).softmax(-1)
    return probs, torch.randint(7, (500,), generator=generator)


@pytest.mark.parametrize("num_bins", [1, 10, 15])
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 6.0])
def test_it_equals_torchmetrics(sharpness, num_bins):
    probs, labels = predictions(sharpness)
    confidences, predicted = probs.max(-1)
    expected = multiclass_calibration_error(probs, labels, 7, n_bins=num_bins, norm="l1")
    found = expected_calibration_error(confidences, predicted == labels, num_bins)
    assert found == pytest.approx(float(expected), rel=1e-6)


def test_it_equals_a_loop_over_bins():
    confidences = [0.0, 0.05, 0.31, 0.38, 0.99, 1.0]  # 1.0 belongs to the last bin
    correct = [False, True, False, True, True, False]
    expected = 0.0
    for low in range(10):
        inside = [i for i, c in enumerate(confidences) if low <= min(c * 10, 9.5) < low + 1]
        if inside:
            confidence = sum(confidences[i] for i in inside) / len(inside)
            accuracy = sum(correct[i] for i in inside) / len(inside)
            expected += len(inside) / 6 * abs(accuracy - confidence)
    found = expected_calibration_error(torch.tensor(confidences), torch.tensor(correct), 10)
    assert found == pytest.approx(expected)


def test_gaps_of_parts_add_up():
    probs, labels = predictions(1.0)
    confidences, predicted = probs.max(-1)
    gaps = calibration_gaps(confidences, predicted == labels)  # [N, 15]
    parts = gaps[:123].sum(0) + gaps[123:].sum(0)
    found = expected_calibration_error(confidences, predicted == labels)
    assert float(parts.abs().sum() / 500) == pytest.approx(found)


def test_no_prediction_is_an_error():
    with pytest.raises(ValueError, match="confidences: expected at least one prediction"):
        expected_calibration_error(torch.empty(0), torch.empty(0, dtype=torch.bool))
