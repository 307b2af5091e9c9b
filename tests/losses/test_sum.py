import math

import pytest
import torch

from harmonic_sft.config import parse
from harmonic_sft.losses import (
    CrossEntropyLoss,
    SumLoss,
    WassersteinLoss,
    neighbor_tables,
)
from harmonic_sft.losses.sum import TERMS, Term
from harmonic_sft.models import build_head
from harmonic_sft.ops import engine
from tests.ops.fused import assert_same

V, D = 25, 6
HEAD = {"name": "dist", "unit_sphere": False}
FAMILY = {
    "cross-entropy and transport": [("cross_entropy", 1.0, {}), ("wasserstein", 0.1, {})],
    "two grounds": [
        ("wasserstein", 0.3, {"ground": "fixed"}),
        ("wasserstein", 2.0, {}),
        ("harmonic", 1.0, {}),
    ],
    "one dense and one not": [("harmonic", 0.5, {}), ("info_nce", 2.0, {})],
    "smoothed": [
        ("knn_label_smoothing", 1.0, {"num_neighbors": 4}),
        ("wasserstein", 0.5, {"top_k": 3}),
        ("info_nce", -0.25, {}),
    ],
    "smoothed, and all classes": [
        ("knn_label_smoothing", 1.0, {"num_neighbors": 4}),
        ("wasserstein", 0.5, {}),
    ],
    "two cross-entropies": [
        ("harmonic", 1.0, {}),
        ("cross_entropy", 2.0, {}),
        ("wasserstein", 1.0, {}),
    ],
    "alone": [("harmonic", 3.0, {})],
}


def make(terms):
    made = [{"weight": w, "loss": {"name": name, **fields}} for name, w, fields in terms]
    return parse(SumLoss, {"terms": made})


def problem(settings=None):
    torch.manual_seed(0)
    head = build_head(settings or HEAD, hidden_size=D, vocab_size=V).double()
    states = torch.randn(9, D, dtype=torch.float64, requires_grad=True)
    return head, states, torch.randint(V, (9,))


@pytest.mark.parametrize("terms", FAMILY.values(), ids=FAMILY)
@pytest.mark.parametrize("uniform", [True, False])
def test_it_is_the_weighted_sum_of_its_terms(terms, uniform):
    head, states, labels = problem()
    expected = torch.zeros(9, dtype=torch.float64)
    for name, weight, fields in terms:
        term = TERMS[name](**fields).prepare(head)
        expected = expected + weight * term(head, states, labels)
    found = make(terms).prepare(head)(head, states, labels)
    assert_same(found, expected, [states, *head.parameters()], None if uniform else torch.rand(9))


@pytest.mark.parametrize(
    ("name", "passes"), [("cross-entropy and transport", 1), ("two grounds", 2), ("alone", 1)]
)
def test_terms_share_their_products_and_none_is_made_twice(name, passes, monkeypatch):
    head, states, labels = problem()
    loss, calls = make(FAMILY[name]).prepare(head), []
    build = engine._build
    monkeypatch.setattr(engine, "_build", lambda *a, **k: calls.append(a) or build(*a, **k))
    loss(head, states, labels).sum().backward()
    assert len(calls) == passes


def test_a_loss_that_stands_twice_counts_twice():
    head, states, labels = problem()
    own, transport = CrossEntropyLoss(), WassersteinLoss()
    terms = [Term(loss=own), Term(weight=2.0, loss=own), Term(loss=transport)]
    found = SumLoss(terms=terms).prepare(head)(head, states, labels)
    expected = 3 * own(head, states, labels) + transport(head, states, labels)
    torch.testing.assert_close(found, expected)


def test_a_compiled_sum_is_one_graph():
    head, states, labels = problem()
    loss = make(FAMILY["cross-entropy and transport"]).prepare(head)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(head, states, labels), loss(head, states, labels))


def test_the_head_of_every_term_is_checked():
    head, _, _ = problem({"name": "linear"})
    with pytest.raises(ValueError, match="loss harmonic: expected a dist head, got linear"):
        make(FAMILY["alone"]).check(head)
    with pytest.raises(ValueError, match="loss arcface: expected a cosine head, got linear"):
        make([("cross_entropy", 1.0, {}), ("arcface", 1.0, {})]).prepare(head)


BAD = {
    "nothing": ({"terms": []}, "terms: .*at least 1"),
    "missing": ({}, "terms: expected a value, got nothing"),
    "nested": (
        {"terms": [{"loss": {"name": "sum", "terms": []}}]},
        r"terms.0.loss.name: expected one of .*, got 'sum'",
    ),
    "mistyped": (
        {"terms": [{"loss": {"name": "wasserstein", "topk": 5}}]},
        r"terms.0.loss.topk: .* Did you mean 'top_k'\?",
    ),
    "unknown": (
        {"terms": [{"loss": {"name": "wassrstein"}}]},
        r"terms.0.loss.name: .*got 'wassrstein'. Did you mean 'wasserstein'\?",
    ),
    "factor": (
        {"terms": [{"factor": 2, "loss": {"name": "harmonic"}}]},
        "terms.0.factor: expected one of the known keys",
    ),
    "infinite": (
        {"terms": [{"weight": math.inf, "loss": {"name": "harmonic"}}]},
        "terms.0.weight: expected a finite number",
    ),
    "no loss": ({"terms": [{"weight": 1.0}]}, "terms.0.loss: expected a value, got nothing"),
}


@pytest.mark.parametrize(("data", "message"), BAD.values(), ids=BAD)
def test_bad_sums_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        parse(SumLoss, data)


def test_the_tables_of_the_terms_are_found():
    head, _, _ = problem()
    terms = [
        ("knn_label_smoothing", 1.0, {"num_neighbors": 4, "refresh_every": 5}),
        ("knn_label_smoothing", 1.0, {"num_neighbors": 2}),
        ("harmonic", 1.0, {}),
    ]
    assert [t.loss.num_neighbors for t in neighbor_tables(make(terms).prepare(head))] == [4, 2]
    single = TERMS["knn_label_smoothing"](num_neighbors=4, refresh_every=7)
    assert len(neighbor_tables(single.prepare(head))) == 1
    assert neighbor_tables(TERMS["harmonic"]()) == []
