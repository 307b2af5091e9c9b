"""Metrics against scipy, near 0, and their limits."""

import math

import pytest
import torch
import torch.nn.functional as F
from scipy.spatial.distance import cdist
from torch import Tensor

from harmonic_sft.models import metrics
from harmonic_sft.models.metrics import SQUARED_METRICS, check_metric, stretch

N, D, V = 7, 12, 20
SIZE = {"hidden_size": D, "vocab_size": V}
PEERS = {
    "cosine": {"metric": "cosine"},
    "lp": {"metric": "minkowski", "p": 2.5},
    "chebyshev": {"metric": "chebyshev"},
    "bray_curtis": {"metric": "braycurtis"},
}


def vectors(dtype=torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(n, D, dtype=dtype, generator=generator) for n in (N, V))


@pytest.mark.parametrize("metric", SQUARED_METRICS)
def test_metrics_equal_those_of_scipy(metric):
    states, prototypes = vectors()
    expected = torch.from_numpy(cdist(states, prototypes, **PEERS[metric])).square()
    actual = SQUARED_METRICS[metric](states, prototypes, 2.5)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("distance", [1e-1, 1e-2, 1e-3])
@pytest.mark.parametrize("metric", SQUARED_METRICS)
def test_distances_keep_their_digits_next_to_a_prototype(metric, distance):
    states, prototypes = vectors(torch.float32)
    states = prototypes[:N] + distance * F.normalize(states, dim=-1)
    expected = SQUARED_METRICS[metric](states.double(), prototypes.double(), 2.0)
    actual = SQUARED_METRICS[metric](states, prototypes, 2.0)
    torch.testing.assert_close(actual.double(), expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_rows_in_pieces_are_the_rows_and_gradients_at_once(monkeypatch, p):
    states, prototypes = (side.requires_grad_() for side in vectors())
    whole = metrics.elementwise_distances(states, prototypes, p)
    expected = torch.autograd.grad(whole.square().sum(), (states, prototypes))
    seen = []
    cdist = torch.cdist
    monkeypatch.setattr(torch, "cdist", lambda x, *rest: seen.append(len(x)) or cdist(x, *rest))
    monkeypatch.setattr(metrics, "MAX_ELEMENTS", 3 * V * D)
    pieces = metrics.elementwise_distances(states, prototypes, p)
    assert seen == [3, 3, 1]
    torch.testing.assert_close(pieces, whole, rtol=0, atol=0)
    found = torch.autograd.grad(pieces.square().sum(), (states, prototypes))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("rank", [0, 3])
def test_stretched_vectors_are_apart_by_the_mahalanobis_distance(rank):
    states, prototypes = vectors()
    diagonal = torch.rand(D, dtype=torch.float64) + 0.5
    factor = torch.randn(D, rank, dtype=torch.float64) if rank else None
    matrix = torch.diag(diagonal**2) + (factor @ factor.T if rank else 0)
    expected = cdist(states, prototypes, "mahalanobis", VI=matrix)
    sides = [stretch(side, diagonal, factor) for side in (states, prototypes)]
    assert sides[0].shape == (N, D + rank)
    torch.testing.assert_close(torch.cdist(*sides), torch.from_numpy(expected))


@pytest.mark.parametrize(
    ("metric", "fields", "message"),
    [
        ("l1", {}, "metric: expected one of .*'bray_curtis'.*, got 'l1'"),
        ("lp", {"p": 0.5}, "p: expected a number from 1 to 8, got 0.5. For more use metric"),
        ("lp", {"p": 9.0}, "p: expected a number from 1 to 8, got 9.0"),
        ("lp", {"p": math.nan}, "p: expected a number from 1 to 8, got nan"),
        ("cosine", {"p": 2.0}, "p: expected nothing for metric cosine, got 2.0"),
        ("lp", {"rank": 2}, "rank: expected nothing for metric lp, got 2"),
        ("mahalanobis", {"rank": D + 1}, "rank: expected a number from 0 to 12, got 13"),
        ("mahalanobis", {"rank": -1}, "rank: expected a number from 0 to 12, got -1"),
        ("chebyshev", {"vocab_size": 2**28}, "metric chebyshev: expected vocab_size . hidden_size"),
    ],
)
def test_what_does_not_exist_or_fit_is_refused(metric, fields, message):
    with pytest.raises(ValueError, match=message):
        check_metric(metric, **{"p": 1.0, "rank": 0, **SIZE, **fields})


@pytest.mark.parametrize("metric", ["euclidean", "cosine", "mahalanobis"])
def test_matrix_products_have_no_limit_of_size(metric):
    check_metric(metric, p=1.0, rank=0, hidden_size=8192, vocab_size=2**20)
