import copy
import functools
import math

import pytest
import torch

from experiments.cost import allocated_peak
from harmonic_sft.losses import WassersteinLoss
from harmonic_sft.models import LinearHead, build_head
from tests.head_variants import D, V, moved_head
from tests.ops.baselines import transport
from tests.ops.fused import assert_same, make_chunks_small

HEADS = (
    "linear",
    "dist",
    "dist off the sphere",
    "dist mahalanobis",
    "cosine",
    "power",
    "multi_head",
)


build = functools.partial(moved_head, dtype=torch.float64)


def problem(num_tokens=5):
    states = torch.randn(num_tokens, D, dtype=torch.float64, requires_grad=True)
    return states, torch.randint(V, (num_tokens,))


@pytest.mark.parametrize("name", HEADS)
def test_it_is_the_cost_of_the_only_plan(name):
    head = build(name)
    states, labels = problem()
    found = WassersteinLoss()(head, states, labels)
    points = head.prototypes.tolist()
    for row, y, loss in zip(head(states).tolist(), labels.tolist(), found.tolist(), strict=True):
        top = max(row)
        weights = [math.exp(z - top) for z in row]
        costs = [math.dist(point, points[y]) ** 2 for point in points]
        expected = sum(w * c for w, c in zip(weights, costs, strict=True)) / sum(weights)
        assert loss == pytest.approx(expected, rel=1e-10)


def test_fixed_ground_stays_where_training_began():
    head = build("dist")
    states, labels = problem()
    loss = WassersteinLoss(ground="fixed").prepare(head)
    start = head.prototypes.detach().clone()
    with torch.no_grad():
        head.weight.mul_(3).add_(torch.randn_like(head.weight))
    expected = transport(head, states, labels, start)
    torch.testing.assert_close(loss(head, states, labels), expected)
    moving = WassersteinLoss().prepare(head)(head, states, labels)
    assert (moving - expected).abs().min() > 1e-3
    head.weight = torch.nn.Parameter(head.weight[:-1])
    message = f"expected a fixed ground for {len(start) - 1} classes, got one for {len(start)}"
    with pytest.raises(ValueError, match=message):
        loss(head, states, labels.clamp_max(len(start) - 2))


def test_top_k_is_the_cost_of_the_renormalized_head_of_the_distribution():
    head = build("dist")
    states, labels = problem()
    labels[0] = head(states)[0].argmax()  # among the top ones; the others hardly are
    found = WassersteinLoss(top_k=3)(head, states, labels)
    for row, y, loss in zip(head(states), labels.tolist(), found, strict=True):
        kept = sorted({*row.topk(3).indices.tolist(), y})
        probs = row[kept].softmax(-1)
        costs = (head.prototypes[kept] - head.prototypes[y]).square().sum(-1)
        torch.testing.assert_close(loss, (probs * costs).sum())


def test_top_k_of_all_other_classes_is_exact():
    head = build("cosine")
    states, _ = problem()
    labels = head(states).argmin(-1)  # the label is taken beside the top ones: no class is left out
    found = WassersteinLoss(top_k=V - 1).prepare(head)(head, states, labels)
    expected = WassersteinLoss().prepare(head)(head, states, labels)
    assert_same(found, expected, [states, *head.parameters()])


@pytest.mark.parametrize("name", ["dist", "multi_head of dist"])  # by tiles, densely
def test_a_certain_and_right_prediction_costs_nothing(name):
    head = build(name).float()
    labels = torch.arange(V)
    losses = WassersteinLoss()(head, head.prototypes.detach(), labels)
    assert losses.min() >= 0
    assert losses.max() < 1e-12


@pytest.mark.parametrize("name", ["linear", "multi_head"])  # by tiles, densely
def test_rounding_pushes_no_cost_below_zero(name):
    head = build(name).float()
    with torch.no_grad():
        head.weight.mul_(1e-3).add_(100)  # of costs of 1e-5, whose expansion rounds to 1e-2
    states, labels = problem(V)
    assert WassersteinLoss()(head, states.float(), labels).min() >= 0


@pytest.mark.parametrize("fused", [True, False])
def test_a_mean_of_all_points_costs_no_digits(fused):
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(200, 32, generator=generator)
    points += 100 * torch.randn(32, generator=generator)
    states, labels = torch.randn(8, 32, generator=generator) / 100, torch.arange(8)
    found = []
    for dtype in (torch.float32, torch.float64):
        head = LinearHead(32, 200).to(dtype)
        head.weight.data.copy_(points)
        leaf = states.to(dtype).requires_grad_()
        loss_fn = WassersteinLoss(ground="fixed").prepare(head)
        loss = (loss_fn if fused else loss_fn._dense)(head, leaf, labels)
        found.append([loss, *torch.autograd.grad(loss.sum(), [leaf, head.weight])])
    for actual, expected in zip(*found, strict=True):
        assert (actual - expected).norm() < 2e-3 * expected.norm()
    assert (found[0][0] - found[1][0]).norm() < 1e-5 * found[1][0].norm()


def test_gradients_at_logits_of_hundreds_are_as_good_as_the_definitions():
    head = build_head({"name": "linear"}, hidden_size=64, vocab_size=500)
    with torch.no_grad():
        head.weight.normal_(std=1 / 8)
    states, labels = 300 * torch.randn(64, 64, requires_grad=True), torch.randint(500, (64,))

    def gradients(losses, *inputs):
        return torch.autograd.grad(losses.sum(), inputs)

    wide_head, wide = copy.deepcopy(head).double(), states.detach().double().requires_grad_()
    losses = transport(wide_head, wide, labels, wide_head.prototypes)
    expected = gradients(losses, wide, wide_head.weight)
    found = gradients(WassersteinLoss()(head, states, labels), states, head.weight)
    naive = gradients(transport(head, states, labels, head.prototypes), states, head.weight)
    for one, other, exact in zip(found, naive, expected, strict=True):
        error, allowed = (one - exact).abs().max(), (other - exact).abs().max()
        assert error < 3 * allowed  # 40 times it, where probabilities are taken to sum to 1


@pytest.mark.parametrize("top_k", [None, 4])
def test_memory_is_that_of_a_few_chunks(top_k, monkeypatch):
    rows, vocab_size = 8, 2000
    monkeypatch.setattr("harmonic_sft.ops.dense_chunks.CPU_BYTES", rows * 4 * vocab_size)
    head = build_head({"name": "linear"}, hidden_size=8, vocab_size=vocab_size)
    states, labels = torch.randn(200, 8, requires_grad=True), torch.randint(vocab_size, (200,))
    loss = WassersteinLoss(top_k=top_k).prepare(head)
    make_chunks_small(monkeypatch, rows)  # of the loop that serves all classes
    # A dispatch mode would not look into the operator of that loop.
    peak = allocated_peak(lambda: loss(head, states, labels).sum().backward())
    assert peak < 12 * rows * 4 * vocab_size + 10 * head.weight.nbytes
    assert peak < 0.5 * 200 * 4 * vocab_size


@pytest.mark.parametrize("name", ["linear", "dist"])
def test_the_ground_and_the_prototypes_share_their_gradient(name, monkeypatch):
    off_sphere = {"unit_sphere": False} if name == "dist" else {}
    head = build_head({"name": name, **off_sphere}, hidden_size=64, vocab_size=5000)
    states, labels = torch.randn(50, 64, requires_grad=True), torch.randint(5000, (50,))
    make_chunks_small(monkeypatch, 4)
    peak = allocated_peak(lambda: WassersteinLoss()(head, states, labels).sum().backward())
    assert peak < 2 * head.weight.nbytes


def test_top_k_below_the_number_of_classes():
    with pytest.raises(ValueError, match=r"top_k: expected less than 40, .* got 40"):
        WassersteinLoss(top_k=40).prepare(build("dist"))
