"""Metrics against one token at a time."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torchmetrics.functional.classification import multiclass_calibration_error

from harmonic_sft.eval import post_hoc_grid, score_rows, summarize, unigram_loss
from harmonic_sft.eval.scoring import calibration_gaps
from harmonic_sft.models import DistLayer, LinearHead

B, T, D, V = 4, 6, 16, 30
TABLE = torch.randn(V, D, generator=torch.Generator().manual_seed(1))


def calibration_error(probs, labels):
    return float(multiclass_calibration_error(probs, labels, V, n_bins=15, norm="l1"))


def batch():
    torch.manual_seed(0)
    labels = torch.randint(V, (B, T))
    labels[torch.rand(B, T) < 0.5] = -100
    labels[2] = -100  # a row with nothing to predict
    return torch.randn(B, T, D), labels


@pytest.mark.parametrize("head_class", [DistLayer, LinearHead])
def test_metrics_equal_a_loop_over_tokens(head_class):
    states, labels = batch()
    head = head_class(D, V)
    grid = post_hoc_grid(head, (-5.0,))
    metrics = summarize(score_rows(head, states, labels, grid=grid, embeddings=TABLE), head, grid)
    losses, hits, cosines, probs = [], [], [], []
    for b in range(B):
        for t in range(T):
            if labels[b, t] != -100:
                logits = head(states[b, t][None]).double()
                losses.append(F.cross_entropy(logits, labels[b, t][None]).item())
                predicted, label = int(logits.argmax()), int(labels[b, t])
                hits.append(predicted == label)
                probs.append(logits.softmax(-1)[0])
                if predicted != label:
                    one, other = TABLE[predicted].double(), TABLE[label].double()
                    cosines.append(float(one @ other / one.norm() / other.norm()))
    assert metrics["tokens"] == len(losses)
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(np.mean(hits))
    assert metrics["error_cosine"] == pytest.approx(np.mean(cosines), rel=1e-5, abs=1e-6)
    ece = calibration_error(torch.stack(probs), labels[labels != -100])
    assert metrics["ece"] == pytest.approx(ece, rel=1e-5)


def test_the_post_hoc_exponent_is_that_of_a_head_with_it():
    head = DistLayer(D, V, h_exp=-12.0)
    states, labels = batch()
    grid = post_hoc_grid(head)
    metrics = summarize(score_rows(head, states, labels, grid=grid, embeddings=TABLE), head, grid)
    by_hand = {}
    for value in grid:
        other = DistLayer(D, V, h_exp=value)
        other.load_state_dict(head.state_dict())
        scored = labels != -100
        by_hand[value] = other.nll(states[scored], labels[scored]).mean().item()
    best = min(by_hand, key=by_hand.__getitem__)
    other.h_exp = best
    ece = calibration_error(other(states[scored]).softmax(-1), labels[scored])
    assert metrics["post_hoc_ece"] == pytest.approx(ece, rel=1e-4)
    assert metrics["post_hoc_h_exp"] == best
    assert metrics["post_hoc_loss"] == pytest.approx(by_hand[best], rel=1e-5)
    assert metrics["h_exp"] == grid[0] == -12.0
    assert len(grid) == len(set(grid))


def test_certainty_belongs_to_the_last_bin():
    gaps = calibration_gaps(torch.tensor([0.0, 0.05, 1.0]), torch.tensor([False, True, False]))
    assert [row.nonzero().flatten().tolist() for row in gaps] == [[], [0], [14]]
    torch.testing.assert_close(gaps.sum(-1), torch.tensor([0.0, -0.95, 1.0]))


def test_the_best_exponent_of_long_hidden_states_is_within_the_grid():
    torch.manual_seed(0)
    head = DistLayer(D, V, h_exp=-48.0, unit_sphere=False)
    labels = torch.randint(V, (B, T))
    noise = 0.6 * torch.randn(B, T, D)
    states = 40 * F.normalize(F.normalize(head.weight.detach(), dim=-1)[labels] + noise, dim=-1)
    grid = post_hoc_grid(head)
    metrics = summarize(score_rows(head, states, labels, grid=grid, embeddings=TABLE), head, grid)
    assert min(grid) < metrics["post_hoc_h_exp"] < -64


def test_a_linear_head_gets_the_same_freedom():
    head = LinearHead(D, V)
    states, labels = batch()
    grid = post_hoc_grid(head)
    metrics = summarize(score_rows(head, states, labels, grid=grid, embeddings=TABLE), head, grid)
    assert metrics["post_hoc_loss"] <= metrics["loss"]
    assert metrics["post_hoc_inverse_temperature"] in grid
    assert "h_exp" not in metrics


def test_nothing_to_evaluate_is_an_error():
    head = LinearHead(D, V)
    states, labels = batch()
    scores = score_rows(head, states, torch.full_like(labels, -100), grid=[1.0], embeddings=TABLE)
    with pytest.raises(ValueError, match="evaluation: expected labelled tokens, got none"):
        summarize(scores, head, [1.0])


def test_unigram_loss_is_the_smoothed_frequency():
    counts = np.array([3, 0, 5])
    labels = np.array([0, 1, 2, 2])
    expected = -np.mean([math.log(4 / 11), math.log(1 / 11), *[math.log(6 / 11)] * 2])
    assert unigram_loss(labels, counts) == pytest.approx(expected)
