"""What the loop over chunks promises beyond agreement with dense logits."""

import contextlib
import inspect
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from harmonic_sft.models import DistLayer
from harmonic_sft.ops import (
    LossOptions,
    cross_entropy,
    distance_cross_entropy,
    engine,
    workspace_bytes,
)
from harmonic_sft.ops.workers import Workers
from harmonic_sft.training.preview import LiveBytes
from tests.ops.fused import KINDS, loss_of, random_inputs

N, D, V = 9, 6, 1600  # three tiles


def make_inputs(dtype=torch.float64):
    states, prototypes, labels = random_inputs(N, V, D, torch.float64)
    return states.to(dtype).requires_grad_(), prototypes.to(dtype).requires_grad_(), labels


@pytest.mark.parametrize("zero", ["hidden state", "prototype", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_vector_without_direction_is_at_right_angles_and_gets_no_gradient(zero, dtype):
    states, prototypes, labels = make_inputs(dtype)
    with torch.no_grad():
        if zero != "prototype":
            states[2] = 0
        if zero != "hidden state":
            prototypes[labels[3]] = 0
    loss = distance_cross_entropy(states, prototypes, labels, h_exp=-7.0)
    x, w = (F.normalize(side.detach().double(), dim=-1) for side in (states, prototypes))
    logits = -7.0 * (2 - 2 * x @ w.T + 1e-6).log()
    expected = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(loss.sum(), (states, prototypes))
    for gradient, side in zip(gradients, (states, prototypes), strict=True):
        assert gradient[side.norm(dim=-1) == 0].abs().sum() == 0
        assert gradient.abs().max() < 1e3
    head = DistLayer(D, V, h_exp=-7.0).to(dtype)
    with torch.no_grad():
        head.weight.copy_(prototypes)
    torch.testing.assert_close(head.nll(states, labels), loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("place", ["its own", "a wrong one"])
@pytest.mark.parametrize("unit_sphere", [False, True])
@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_a_hidden_state_on_a_prototype_keeps_its_gradient(impl, unit_sphere, place):
    states, prototypes, labels = make_inputs(torch.float32)
    with torch.no_grad():
        states.copy_(prototypes[labels])
    if place == "a wrong one":
        labels = (labels + 1) % V
    settings = {"h_exp": -2.0, "unit_sphere": unit_sphere, "impl": impl}
    loss = distance_cross_entropy(states, prototypes, labels, **settings)
    found = torch.autograd.grad(loss.sum(), (states, prototypes))
    exact = [side.detach().double().requires_grad_() for side in (states, prototypes)]
    x, w = (side / side.norm(dim=-1, keepdim=True) if unit_sphere else side for side in exact)
    squared = (x[:, None] - w).square().sum(-1)
    expected = F.cross_entropy(-2.0 * (squared + 1e-6).log(), labels, reduction="sum")
    for gradient, wanted in zip(found, torch.autograd.grad(expected, exact), strict=True):
        assert (gradient - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize("kind", ["euclidean", "linear"])
def test_a_small_label_smoothing_is_not_lost_on_confident_tokens(kind):
    """At 1e-6 the label's slope is a difference of numbers that are equal to six digits."""
    states, prototypes, labels = make_inputs(torch.float32)
    with torch.no_grad():
        states.copy_(prototypes[labels] * (30 if kind == "linear" else 1) + 0.02)
    found = []
    for dtype in (torch.float32, torch.float64):
        x, w = (side.detach().to(dtype).requires_grad_() for side in (states, prototypes))
        loss = loss_of(kind, x, w, labels, h_exp=-20.0, label_smoothing=1e-6)
        found.append(torch.autograd.grad(loss.sum(), x)[0].double())
    assert (found[0] - found[1]).norm() < 1e-4 * found[1].norm()


@pytest.mark.parametrize("name", ["sum", "mean"])
def test_a_reduction_costs_no_second_pass(name, monkeypatch):
    states, prototypes, labels = make_inputs()
    options = LossOptions(token_weights=torch.linspace(0, 2, N))
    losses = distance_cross_entropy(states, prototypes, labels, h_exp=-3.0, options=options)
    expected = getattr(losses, name)()
    wanted = torch.autograd.grad(expected, (states, prototypes))

    def refused(*_):
        raise AssertionError("computed again")

    monkeypatch.setattr(engine, "_weighted", refused)
    found = distance_cross_entropy(
        states, prototypes, labels, h_exp=-3.0, reduction=name, options=options
    )
    torch.testing.assert_close(found, expected)
    for pair in zip(torch.autograd.grad(found, (states, prototypes)), wanted, strict=True):
        torch.testing.assert_close(*pair)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")  # PyTorch's own
@pytest.mark.parametrize("learned", ["hidden_states", "h_exp"])
def test_forward_mode_is_refused_and_the_reference_has_it(learned):
    states, prototypes, labels = make_inputs()
    with forward_ad.dual_level():
        h_exp = torch.tensor(-3.0, dtype=torch.float64)
        if learned == "h_exp":
            h_exp = forward_ad.make_dual(h_exp, torch.ones_like(h_exp))
        else:
            states = forward_ad.make_dual(states.detach(), torch.ones_like(states))
        with pytest.raises(NotImplementedError, match="expected reverse-mode gradients"):
            distance_cross_entropy(states, prototypes, labels, h_exp=h_exp)
        loss = distance_cross_entropy(states, prototypes, labels, h_exp=h_exp, impl="reference")
        assert forward_ad.unpack_dual(loss).tangent.abs().sum() > 0


@pytest.mark.parametrize(
    ("smoothing", "unit_sphere", "mean"),
    [(0.1, True, 0.0), (0.0, True, 2.0), (0.0, False, 0.0), (0.1, False, 0.0)],
)
def test_memory_is_that_of_a_chunk(monkeypatch, smoothing, unit_sphere, mean):
    # A dispatch mode looks into no custom operator, and into no other thread.
    monkeypatch.setattr("harmonic_sft.ops.cross_entropy.chunked_op", engine.forward)
    monkeypatch.setattr(engine, "cpu_workers", lambda: contextlib.nullcontext(Workers(1)))
    monkeypatch.setattr(engine, "KEPT_ROWS", 192)
    prototypes = (torch.randn(12_288, 768) + mean).requires_grad_()
    options, peaks = LossOptions(label_smoothing=smoothing), []
    for num_tokens in (engine.KEPT_ROWS, 2 * engine.KEPT_ROWS):
        states = torch.randn(num_tokens, 768, requires_grad=True)
        labels = torch.randint(12_288, (num_tokens,))
        with LiveBytes() as live:
            distance_cross_entropy(
                states, prototypes, labels, h_exp=-3.0, unit_sphere=unit_sphere, options=options
            )
        peaks.append(live.peak - states.nbytes - prototypes.nbytes)  # which are the gradients
    chunk = engine.KEPT_ROWS * 4 * 12_288
    assert chunk / 2 < peaks[0] < 3 * chunk < prototypes.nbytes
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)
    assert 0.7 < peaks[0] / workspace_bytes(engine.KEPT_ROWS, 12_288, 768, "cpu") < 2


OPTIONS = [{}, {"label_smoothing": 0.1, "z_loss": 0.01}, {"gradients": "recompute"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_off_the_cpu_no_value_is_looked_at(monkeypatch, kind, options):
    monkeypatch.setattr(cross_entropy, "chunked_op", engine.forward)
    # Which knows no meta tensors.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    states, prototypes = (torch.empty(n, 8, device="meta", requires_grad=True) for n in (600, 1000))
    labels = torch.empty(600, dtype=torch.int64, device="meta")
    assert loss_of(kind, states, prototypes, labels, impl="chunked", **options).is_meta


def digest():
    import hashlib

    import torch

    from harmonic_sft.ops import distance_cross_entropy

    torch.set_num_threads(2)
    torch.manual_seed(0)
    x, w = torch.randn(300, 32, requires_grad=True), torch.randn(5000, 32, requires_grad=True)
    labels = torch.randint(5000, (300,))
    distance_cross_entropy(x, w, labels, h_exp=-11.7, reduction="sum").backward()
    return hashlib.sha256(x.grad.numpy().tobytes() + w.grad.numpy().tobytes()).hexdigest()


def test_processes_side_by_side_make_the_same_bits():
    """No clock decides: two processes that hinder each other."""
    program = f"import harmonic_sft.ops\nprint()\n{inspect.getsource(digest)}\nprint(digest())"
    command = [sys.executable, "-u", "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        other.stdout.readline()  # it has been imported
        mine = {digest() for _ in range(3)}
        theirs = other.stdout.readline().strip()
    assert mine == {theirs}
