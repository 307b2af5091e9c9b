"""What holds for every loss on every head that it accepts."""

import dataclasses
from dataclasses import FrozenInstanceError

import pytest
import torch
import torch.nn.functional as F

from harmonic_sft.config import parse, to_plain
from harmonic_sft.losses import LOSSES
from harmonic_sft.models import build_head, mean_token_loss
from tests.head_variants import VARIANTS, D, V

CE, W2 = {"name": "cross_entropy"}, {"name": "wasserstein"}
SETTINGS = {
    "cross_entropy": CE,
    "cross_entropy with options": {**CE, "label_smoothing": 0.1, "z_loss": 1e-3},
    "harmonic": {"name": "harmonic"},
    "knn_label_smoothing": {"name": "knn_label_smoothing", "num_neighbors": 5},
    "wasserstein": W2,
    "wasserstein on fixed ground": {**W2, "ground": "fixed"},
    "wasserstein of the top": {**W2, "top_k": 5},
    "arcface": {"name": "arcface"},
    "cosface": {"name": "cosface"},
    "info_nce": {"name": "info_nce"},
    "distill": {"name": "distill"},
    "sum": {"name": "sum", "terms": [{"loss": CE}, {"weight": 0.1, "loss": W2}]},
}
HEADS = (
    "linear",
    "dist",
    "dist mahalanobis",
    "cosine",
    "power",
    "rotation of dist",
    "multi_head of dist",
)


def make(settings):
    return parse(LOSSES[settings["name"]], settings)


def accepts(name, variant):
    try:
        make(SETTINGS[name]).check(build_head(VARIANTS[variant], hidden_size=D, vocab_size=V))
    except ValueError:
        return False
    return True


PAIRS = [(name, variant) for name in SETTINGS for variant in HEADS if accepts(name, variant)]
pairs = pytest.mark.parametrize(
    ("name", "variant"), PAIRS, ids=[" on ".join(pair) for pair in PAIRS]
)
# Every loss on one head, and cross-entropy on every head.
ALONE = [
    pair for i, pair in enumerate(PAIRS) if pair[0] == CE["name"] or pair[0] != PAIRS[i - 1][0]
]
alone = pytest.mark.parametrize(
    ("name", "variant"), ALONE, ids=[" on ".join(pair) for pair in ALONE]
)
ANYWHERE = ("cross_entropy", "knn_label_smoothing", "wasserstein", "distill", "sum")


def build(name, variant):
    torch.manual_seed(0)
    head = build_head(VARIANTS[variant], hidden_size=D, vocab_size=V)
    teacher = build_head(VARIANTS["linear"], hidden_size=D, vocab_size=V)
    loss = make(SETTINGS[name]).prepare(teacher if name == "distill" else head)
    return loss, head, torch.randn(9, D), torch.randint(V, (9,))


def gradients(losses, head, states):
    return torch.autograd.grad(losses.sum(), [states, *head.parameters()], allow_unused=True)


def test_no_loss_is_left_out():
    assert {settings["name"] for settings in SETTINGS.values()} == set(LOSSES)
    for name in ANYWHERE:
        assert [variant for n, variant in PAIRS if n == name] == list(HEADS)
    for name in ("arcface", "cosface"):
        assert [variant for n, variant in PAIRS if n == name] == ["cosine"]


@pytest.mark.parametrize("name", SETTINGS)
def test_losses_are_values(name):
    loss = make(SETTINGS[name])
    assert loss == make(SETTINGS[name])
    assert parse(type(loss), to_plain(loss)) == loss
    with pytest.raises(FrozenInstanceError):
        loss.name = "other"
    with pytest.raises(ValueError, match="factor: expected one of the known keys"):
        make({**SETTINGS[name], "factor": 1.0})
    assert all(f.default.description for f in dataclasses.fields(loss) if f.name != "name")


@pairs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_one_loss_for_each_token_in_float32_or_better(name, variant, dtype):
    loss, head, states, labels = build(name, variant)
    head = head.double() if dtype == torch.float64 else head
    states = states.to(dtype).requires_grad_()
    losses = loss(head, states, labels)
    assert losses.shape == (9,)
    assert losses.dtype == torch.promote_types(dtype, torch.float32)
    assert gradients(losses, head, states)[0].dtype == dtype


@pairs
@pytest.mark.parametrize("case", ["at the prototypes", "far away", "zero", "no tokens"])
def test_losses_and_gradients_are_finite(name, variant, case):
    loss, head, states, labels = build(name, variant)
    if case == "at the prototypes":
        states = head.prototypes.detach()[labels].clone()
    elif case == "far away":
        states = 1e4 * states
    elif case == "zero":  # without a direction
        states = 0 * states
    else:
        states, labels = states[:0], labels[:0]
    losses = loss(head, states.requires_grad_(), labels)
    assert losses.isfinite().all()
    found = [g for g in gradients(losses, head, states) if g is not None]
    assert found
    assert all(g.isfinite().all() for g in found)
    if case == "zero":
        assert all(g.abs().max() < 1e4 for g in found)


@alone
def test_the_order_of_the_tokens_does_not_matter(name, variant):
    loss, head, states, labels = build(name, variant)
    order = torch.randperm(9)
    found = loss(head, states, labels)[order]
    torch.testing.assert_close(loss(head, states[order], labels[order]), found)


@alone
def test_an_uneven_upstream_gradient_weighs_the_tokens(name, variant):
    """Gradients are linear in the weights: two uneven ones that add up to an even one."""
    loss, head, states, labels = build(name, variant)
    head, states = head.double(), states.double().requires_grad_()
    losses, weights = loss(head, states, labels), torch.rand(9, dtype=torch.float64)
    found = [
        torch.autograd.grad(
            total, [states, *head.parameters()], retain_graph=True, allow_unused=True
        )
        for total in ((losses * weights).sum(), (losses * (3 - weights)).sum(), 3 * losses.sum())
    ]
    for one, other, both in zip(*found, strict=True):
        if both is not None:
            torch.testing.assert_close(one + other, both, rtol=1e-6, atol=1e-8)
            assert one.equal(other) == (not both.any())


@pairs
def test_gradients_are_those_of_finite_differences(name, variant):
    """Along one direction: gradcheck of every entry is in the tests of each loss."""
    loss, head, states, labels = build(name, variant)
    head, states = head.double(), states.double().requires_grad_()
    sources = [states, *(p for p in head.parameters() if p.requires_grad)]
    if name == "distill":  # the teacher moves with the states, and no gradient goes through it
        del sources[0]
    directions = [torch.randn_like(source) for source in sources]
    found = torch.autograd.grad(loss(head, states, labels).sum(), sources, allow_unused=True)
    slope = sum((g * d).sum() for g, d in zip(found, directions, strict=True) if g is not None)
    sides = []
    with torch.no_grad():
        for step in (1e-6, -2e-6):
            for source, direction in zip(sources, directions, strict=True):
                source.add_(step * direction)
            sides.append(loss(head, states, labels).sum())
    torch.testing.assert_close(slope, (sides[0] - sides[1]) / 2e-6, rtol=1e-5, atol=1e-6)


DIGITS = {
    "cross_entropy": {},
    "reference": {"impl": "reference"},
    "smoothed": {"label_smoothing": 0.1, "impl": "reference"},
    "knn_label_smoothing": {"name": "knn_label_smoothing", "impl": "reference"},
    "distill": {"name": "distill"},
}


@pytest.mark.parametrize("name", DIGITS)
def test_gradients_keep_their_digits_where_logits_are_far_from_zero(name):
    """Small prototypes around large states: all distances are much alike, and logits -500."""
    torch.manual_seed(0)
    settings = {"name": "dist", "unit_sphere": False}
    head = build_head({**settings, "h_exp": -96.0}, hidden_size=256, vocab_size=500)
    teacher = build_head({**settings, "h_exp": -24.0}, hidden_size=256, vocab_size=500)
    with torch.no_grad():
        head.weight.copy_(torch.randn(500, 256) * 0.02)
        teacher.weight.copy_(torch.randn(500, 256) * 0.1)
    states, labels = torch.randn(50, 256), torch.randint(500, (50,))
    prepared = make({**CE, **DIGITS[name]}).prepare(teacher if name == "distill" else head)

    def log_probs(head, states):
        squared = (states[:, None] - head.weight.detach().double()).square().sum(-1)
        return (head.h_exp * torch.log(squared + 1e-6)).log_softmax(-1)

    exact = states.double().requires_grad_()
    targets = F.one_hot(labels, 500).double()
    if name == "smoothed":
        targets = 0.9 * targets + 0.1 / 500
    elif name == "knn_label_smoothing":
        indices, weights = (part[labels] for part in prepared.table)
        targets = (0.9 * targets).scatter_add(-1, indices, 0.1 * weights.double())
    elif name == "distill":
        targets = log_probs(teacher, states.double()).exp()
    (expected,) = torch.autograd.grad(-(targets * log_probs(head, exact)).sum(), exact)
    states.requires_grad_()
    (found,) = torch.autograd.grad(prepared(head, states, labels).sum(), states)
    limit = 1e-2 if name == "distill" else 1e-4  # whose two distributions cancel for the most part
    assert (found - expected).abs().max() < limit * expected.abs().max()


@pytest.mark.parametrize("name", SETTINGS)
def test_ignored_tokens_get_no_gradient(name):
    variant = next(variant for n, variant in PAIRS if n == name)
    loss, head, states, labels = build(name, variant)
    labels[[1, 4]] = -100
    states.requires_grad_()
    mean_token_loss(loss, head, states.unsqueeze(0), labels.unsqueeze(0)).backward()
    rows = states.grad.abs().sum(-1)
    assert (rows == 0).nonzero().flatten().tolist() == [1, 4]
    kept = labels != -100
    expected = loss(head, states[kept], labels[kept]).mean()
    found = mean_token_loss(loss, head, states.unsqueeze(0), labels.unsqueeze(0))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", SETTINGS)
def test_autocast_changes_nothing(name):
    variant = next(variant for n, variant in PAIRS if n == name)
    loss, head, states, labels = build(name, variant)
    states.requires_grad_()
    plain = loss(head, states, labels)
    with torch.autocast("cpu", torch.bfloat16):
        cast = loss(head, states, labels)
        cast_gradients = gradients(cast, head, states)
    torch.testing.assert_close(cast, plain)
    for found, expected in zip(cast_gradients, gradients(plain, head, states), strict=True):
        torch.testing.assert_close(found, expected)


@alone
def test_labels_that_are_no_classes_are_refused(name, variant):
    loss, head, states, labels = build(name, variant)
    labels[:2] = torch.tensor([0, -1])
    definitions = [make({**CE, "impl": "reference"})] if name == "cross_entropy" else []
    for one in (loss, *definitions):
        with pytest.raises(
            ValueError, match=rf"^labels: expected values from 0 to {V - 1}, got -1 t"
        ):
            one(head, states, labels)


def test_prepare_refuses_heads_that_do_not_fit():
    others = {(name, variant) for name in SETTINGS for variant in HEADS} - set(PAIRS)
    for name, variant in others:
        head = build_head(VARIANTS[variant], hidden_size=D, vocab_size=V)
        with pytest.raises(ValueError, match=r"^loss \w+: expected a"):
            make(SETTINGS[name]).prepare(head)


def test_the_harmonic_loss_is_computed_as_it_says():
    head = build_head(VARIANTS["dist"], hidden_size=D, vocab_size=V)
    prepared = make({"name": "harmonic", "impl": "reference"}).prepare(head)
    assert prepared == make({**CE, "impl": "reference"})


@pytest.mark.parametrize("variant", ["linear", "power"])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.1, 0.0), (0.0, 1e-3)])
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_one_option_of_cross_entropy_does_not_need_the_other(impl, smoothing, z_loss, variant):
    _, head, states, labels = build("cross_entropy", variant)
    loss = make({**CE, "label_smoothing": smoothing, "z_loss": z_loss, "impl": impl})
    logits = head(states).double()
    plain = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    expected = plain + z_loss * logits.logsumexp(-1).square()
    torch.testing.assert_close(loss(head, states, labels).double(), expected, rtol=1e-5, atol=1e-5)


UNPREPARED = {
    "knn_label_smoothing": "a table of neighbors",
    "wasserstein on fixed ground": "a copy of the prototypes for ground fixed",
    "distill": "a teacher",
    "sum": "prepared terms",
}


@pytest.mark.parametrize(("name", "needed"), UNPREPARED.items(), ids=UNPREPARED)
def test_a_loss_that_needs_something_of_the_head_says_so(name, needed):
    _, head, states, labels = build(name, "linear")
    with pytest.raises(ValueError, match=rf"{SETTINGS[name]['name']}: expected {needed}, got"):
        make(SETTINGS[name])(head, states, labels)
