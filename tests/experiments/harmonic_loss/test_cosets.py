"""Subgroups of S4 and their cosets are complete, and cosets that are there are found."""

from collections import Counter

import numpy as np
import pytest
from sklearn.metrics import silhouette_score

from experiments.harmonic_loss.cosets import analyze, partitions, silhouettes, subgroups


def test_s4_has_30_subgroups():
    sizes = Counter(len(subgroup) for subgroup in subgroups())
    assert sizes == {1: 1, 2: 9, 3: 4, 4: 7, 6: 4, 8: 3, 12: 1, 24: 1}


def test_left_and_right_cosets_are_the_same_only_of_the_normal_subgroups():
    found = partitions()
    assert len(found) == 2 * 28 - 2
    for partition in found:
        counts = Counter(partition).values()
        assert len(set(counts)) == 1
        assert sum(counts) == 24


@pytest.mark.parametrize("index", [0, 20, 53])
def test_silhouettes_are_those_of_scikit_learn(index):
    embeddings = np.random.default_rng(0).standard_normal((3, 24, 16))
    partition = list(partitions())[index]
    expected = [silhouette_score(one, partition) for one in embeddings]
    np.testing.assert_allclose(silhouettes(embeddings, partition), expected)


def test_clusters_by_cosets_are_found_and_random_rows_are_not_beyond_chance():
    rng = np.random.default_rng(0)
    partition, name = list(partitions().items())[30]
    centers = 5 * rng.standard_normal((max(partition) + 1, 16))
    clustered = centers[list(partition)] + 0.1 * rng.standard_normal((24, 16))
    found, chance = analyze([clustered, rng.standard_normal((24, 16))], num_shuffles=19)
    assert found["name"] == name
    assert tuple(found["partition"]) == partition
    assert found["silhouette"] > 0.9 > found["chance"]
    assert chance["silhouette"] < 0.2
    assert np.asarray(found["places"]).shape == (24, 2)
