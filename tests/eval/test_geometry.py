"""Geometry of tables whose shape is known."""

import pytest
import torch
import torch.nn.functional as F

from harmonic_sft.eval.geometry import (
    class_center_alignment,
    drift,
    hubness,
    parallelograms,
    spectrum,
)
from harmonic_sft.eval.word_similarity import word_similarity
from tests.no_float64 import without_float64


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_spectrum_counts_the_directions_that_are_filled():
    found = spectrum(torch.cat([torch.eye(8), -torch.eye(8)]))
    assert found["effective_dimension"] == pytest.approx(8)
    assert found["explained_variance_2"] == pytest.approx(2 / 8)
    assert found["explained_variance_10"] == pytest.approx(1)
    assert found["mean_cosine"] == pytest.approx(-1 / 15)  # 8 of 120 pairs are opposite
    assert spectrum(normal(50, 1) * torch.ones(1, 6))["effective_dimension"] == pytest.approx(1)
    assert spectrum(normal(50, 1))["effective_dimension"] == pytest.approx(1)
    equal = {"explained_variance_2": 0, "explained_variance_10": 0, "effective_dimension": 0}
    assert spectrum(torch.ones(4, 3)) == {**equal, "mean_cosine": pytest.approx(1)}
    table = normal(30, 5)
    pairs = F.cosine_similarity(table[:, None], table, dim=-1)
    expected = float(pairs[~torch.eye(30, dtype=torch.bool)].mean())
    assert spectrum(table)["mean_cosine"] == pytest.approx(expected, abs=1e-6)
    for bad, got in ((table[:1], "1"), (table / 0, "values that are not")):
        with pytest.raises(ValueError, match=f"at least 2 finite rows, got {got}$"):
            spectrum(bad)


def test_a_point_in_the_middle_is_a_hub():
    ring = F.normalize(normal(300, 40), dim=-1)
    assert hubness(torch.cat([ring, torch.zeros(1, 40)]))["hubness"] > 3 * hubness(ring)["hubness"]
    line = torch.arange(100.0)[:, None]  # nobody is far from anybody's neighbors
    assert hubness(line)["never_neighbor"] == 0
    table = normal(500, 64)
    assert hubness(table + 200) == pytest.approx(hubness(table), rel=1e-2)
    small, large = (hubness(F.normalize(normal(count, 8), dim=-1)) for count in (2000, 20_000))
    assert large["never_neighbor"] == pytest.approx(small["never_neighbor"], abs=0.02)


def test_a_rotated_table_keeps_its_neighbors_and_loses_its_directions():
    table = normal(200, 16)
    rotation = torch.linalg.qr(normal(16, 16, seed=1))[0]
    assert drift(table, table) == pytest.approx({"drift_cosine": 1, "neighbors_kept": 1})
    moved = drift(table @ rotation, table)
    assert moved["neighbors_kept"] == pytest.approx(1, abs=0.01)
    assert abs(moved["drift_cosine"]) < 0.2
    assert drift(normal(200, 16, seed=2), table)["neighbors_kept"] < 0.2
    table[0] = 0  # as [PAD] of some bases, of which no angle is known
    assert drift(table, table)["drift_cosine"] == pytest.approx(1)
    # A row that had no direction, such as that of padding, was nobody's neighbor.
    filled = table.clone()
    filled[0] = normal(1, 16, seed=3)[0]
    assert drift(filled, table)["neighbors_kept"] == 1


def test_hidden_states_around_their_prototype_are_aligned():
    prototypes = F.normalize(normal(5, 12), dim=-1)
    labels = torch.arange(4).repeat(50)  # no state of the last class
    near = prototypes[labels] + 0.1 * normal(200, 12)
    assert class_center_alignment(near, labels, prototypes) > 0.99
    assert class_center_alignment(-near, labels, prototypes) < -0.99


def test_a_mean_that_all_classes_share_does_not_align_them():
    table, labels, shared = normal(200, 64), torch.arange(200).repeat(4), 5 * torch.ones(64)
    unrelated, related = normal(200, 64, seed=3)[labels] + shared, table[labels] + shared
    assert abs(class_center_alignment(unrelated, labels, table + shared)) < 0.05
    assert class_center_alignment(related, labels, table - shared) > 0.95


def test_one_offset_makes_a_parallelogram():
    table = torch.cat([normal(20, 8), normal(20, 8) + 3])
    table[20:] = table[:20] + torch.ones(8)
    pairs = [(index, index + 20) for index in range(20)]
    found = parallelograms(table, pairs)
    assert found["parallelogram_loss"] == pytest.approx(0, abs=1e-6)
    assert found["shuffled"] > 0.3
    unrelated = parallelograms(normal(400, 64), [(index, index + 200) for index in range(200)])
    assert unrelated["parallelogram_loss"] == pytest.approx(1, abs=0.02)
    with pytest.raises(ValueError, match="pairs: expected at least 3 of single tokens, got 2"):
        parallelograms(table, pairs[:2])


def test_the_loss_of_offsets_is_that_of_a_loop():
    table, pairs = normal(8, 3).double(), [(0, 1), (2, 3), (4, 5), (6, 7)]
    losses = []
    for place, (a, b) in enumerate(pairs):
        for c, d in pairs[place + 1 :]:
            first, second = table[b] - table[a], table[d] - table[c]
            size = first.square().sum() + second.square().sum()
            losses.append(float((first - second).square().sum() / size))
    expected = sum(losses) / len(losses)
    assert parallelograms(table, pairs)["parallelogram_loss"] == pytest.approx(expected)


def test_a_device_without_float64_measures_the_same():
    table, states, labels = normal(40, 5), normal(60, 5, seed=1), torch.arange(60) % 40
    pairs = [(0, 1), (2, 3), (4, 5), (6, 7)]
    for measure, inputs in (
        (spectrum, (table,)),
        (hubness, (table,)),
        (drift, (table, table.flip(0))),
        (class_center_alignment, (states, labels, table)),
        (lambda table: parallelograms(table, pairs), (table,)),
        (lambda table: word_similarity(table, pairs, [1.0, 3.0, 2.0, 4.0]), (table,)),
    ):
        assert measure(*map(without_float64, inputs)) == measure(*inputs)
