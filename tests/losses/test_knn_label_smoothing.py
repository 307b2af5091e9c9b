import math

import pytest
import torch

from harmonic_sft.losses import KNNLabelSmoothingLoss
from harmonic_sft.losses.knn_label_smoothing import find_neighbors
from harmonic_sft.models import build_head

V, D = 30, 8
HEADS = {
    "fused distances": {"name": "dist", "unit_sphere": False},
    "fused products": {"name": "linear"},
    "a mixture": {"name": "multi_head", "num_heads": 2},
    "no form": {"name": "power"},
}


def build(settings):
    torch.manual_seed(0)
    return build_head(settings, hidden_size=D, vocab_size=V)


def table_by_loops(prototypes, num_neighbors, scale):
    rows = prototypes.double().tolist()
    norms = [math.sqrt(sum(x * x for x in row)) for row in rows]
    table = []
    for y, row in enumerate(rows):
        cosines = []
        for j, other in enumerate(rows):
            dot = sum(a * b for a, b in zip(row, other, strict=True))
            if j != y:
                cosines.append((dot / norms[y] / norms[j], j))
        nearest = sorted(cosines, reverse=True)[:num_neighbors]
        total = sum(math.exp(scale * cosine) for cosine, _ in nearest)
        table.append({j: math.exp(scale * cosine) / total for cosine, j in nearest})
    return table


def test_the_table_is_that_of_plain_loops(monkeypatch):
    monkeypatch.setattr("harmonic_sft.ops.dense_chunks.CPU_BYTES", 7 * 4 * V)
    torch.manual_seed(0)
    prototypes = torch.randn(V, D) * torch.rand(V, 1)
    table = find_neighbors(prototypes, 4, scale=5.0)
    for y, expected in enumerate(table_by_loops(prototypes, 4, 5.0)):
        found = dict(zip(table.indices[y].tolist(), table.weights[y].tolist(), strict=True))
        assert list(found) == list(expected)
        assert found == pytest.approx(expected, rel=1e-5)


def test_no_token_is_its_own_neighbor_even_among_equals():
    table = find_neighbors(torch.ones(6, 3), 5, scale=1.0)
    for y, row in enumerate(table.indices.tolist()):
        assert sorted(row) == [j for j in range(6) if j != y]
    torch.testing.assert_close(table.weights, torch.full((6, 5), 0.2))


@pytest.mark.parametrize("settings", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("epsilon", [0.3, 0.0])
def test_it_is_the_cross_entropy_with_the_smoothed_target(settings, epsilon):
    head = build(settings)
    states, labels = torch.randn(6, D, requires_grad=True), torch.randint(V, (6,))
    loss = KNNLabelSmoothingLoss(epsilon=epsilon, num_neighbors=4, scale=5.0).prepare(head)
    table = table_by_loops(head.prototypes.detach(), 4, 5.0)
    log_probs = head(states).log_softmax(-1)
    expected = []
    for row, y in zip(log_probs, labels.tolist(), strict=True):
        others = sum(weight * row[j] for j, weight in table[y].items())
        expected.append((epsilon - 1) * row[y] - epsilon * others)
    expected = torch.stack(expected)
    found = loss(head, states, labels)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    inputs = [states, *head.parameters()]
    gradients = [torch.autograd.grad(value.sum(), inputs) for value in (found, expected)]
    for mine, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-3, atol=1e-4 * plain.abs().max().item())


def test_the_table_changes_only_when_it_is_refreshed():
    head = build({"name": "dist"})
    loss = KNNLabelSmoothingLoss(num_neighbors=3).prepare(head)
    before = loss.table
    with torch.no_grad():
        head.weight.copy_(head.weight.flip(0).roll(1, 1))
    assert loss.table is before
    loss.refresh(head)
    expected = find_neighbors(head.prototypes, 3, scale=10.0)
    assert torch.equal(loss.table.indices, expected.indices)
    assert not torch.equal(before.indices, expected.indices)


def test_the_table_is_made_again_for_a_resized_vocabulary():
    loss = KNNLabelSmoothingLoss(num_neighbors=3).prepare(build({"name": "dist"}))
    larger = build_head({"name": "dist"}, hidden_size=D, vocab_size=V + 2)
    states, labels = torch.randn(2, D), torch.tensor([0, V + 1])
    expected = KNNLabelSmoothingLoss(num_neighbors=3).prepare(larger)(larger, states, labels)
    assert torch.equal(loss(larger, states, labels), expected)


def test_more_neighbors_than_prototypes_are_refused():
    head = build({"name": "dist"})
    with pytest.raises(ValueError, match=r"num_neighbors: expected at most 29, .* got 30"):
        KNNLabelSmoothingLoss(num_neighbors=30).prepare(head)


@pytest.mark.parametrize("name", ["dist", "linear", "power"])
def test_the_reference_has_a_second_derivative(name):
    head = build({"name": name}).double()
    states, labels = torch.randn(3, D, dtype=torch.float64), torch.randint(V, (3,))
    loss = KNNLabelSmoothingLoss(num_neighbors=4, impl="reference").prepare(head)
    fused = KNNLabelSmoothingLoss(num_neighbors=4).prepare(head)
    torch.testing.assert_close(loss(head, states, labels), fused(head, states, labels))
    assert torch.autograd.gradgradcheck(
        lambda rows: loss(head, rows, labels), states.requires_grad_()
    )
