"""Everything that the fused losses refuse, and what they say about it."""

import math
import re
from types import SimpleNamespace
from typing import get_args
from unittest.mock import Mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from harmonic_sft.ops import LossOptions, distance_cross_entropy, linear_cross_entropy
from harmonic_sft.ops.arguments import Impl, Reduction, check_bias, read_target
from harmonic_sft.ops.cross_entropy import _resolve

N, V, D = 4, 5, 3


def call(*, hidden_states=None, prototypes=None, labels=None, linear=False, **settings):
    """The loss of inputs that are in order but for what is given."""
    hidden_states = torch.ones(N, D) if hidden_states is None else hidden_states
    prototypes = torch.eye(V, D) if prototypes is None else prototypes
    labels = torch.zeros(N, dtype=torch.int64) if labels is None else labels
    names = ("h_exp", "eps", "impl", "unit_sphere", "reduction")
    arguments = {name: settings.pop(name) for name in names if name in settings}
    options = LossOptions(**settings)
    if linear:
        return linear_cross_entropy(hidden_states, prototypes, labels, options=options, **arguments)
    arguments = {"h_exp": -2.0, **arguments}
    return distance_cross_entropy(hidden_states, prototypes, labels, options=options, **arguments)


def zeros(*shape, **options):
    return torch.zeros(shape, dtype=torch.int64, **options)


def half(*shape, **options):
    return torch.full(shape, 0.5, **options)


def soft(labels, weights):
    return {"labels": labels, "target_weights": weights}


def refused(message):
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


LEARNED, SOFT = half(N, 2).requires_grad_(), "labels, target_weights: expected both [4, K], got"
EMPTY = "prototypes: expected at least one class and one dimension, got"
REFUSED = [  # what is given, and the whole message
    (
        {"reduction": "average"},
        f"reduction: expected one of {list(get_args(Reduction))}, got 'average'",
    ),
    ({"impl": "cuda"}, f"impl: expected one of {list(get_args(Impl))}, got 'cuda'"),
    ({"hidden_states": half(2, 2, D)}, "hidden_states: expected [N, D], got [2, 2, 3]"),
    ({"prototypes": half(D)}, "prototypes: expected [V, 3], got [3]"),
    ({"prototypes": half(V, D + 1)}, "prototypes: expected [V, 3], got [5, 4]"),
    ({"prototypes": half(0, D)}, f"{EMPTY} [0, 3]"),
    ({"hidden_states": half(N, 0), "prototypes": half(V, 0)}, f"{EMPTY} [5, 0]"),
    ({"hidden_states": zeros(N, D)}, "hidden_states: expected a floating dtype, got torch.int64"),
    ({"prototypes": half(V, D) > 0}, "prototypes: expected a floating dtype, got torch.bool"),
    ({"labels": zeros(N).int()}, "labels: expected torch.int64, got torch.int32"),
    ({"labels": zeros(N + 1)}, "labels: expected [4], got [5]"),
    ({"labels": zeros(N, 2)}, "labels: expected [4], got [4, 2]"),
    (soft(zeros(N), half(N)), f"{SOFT} [4] and [4]"),
    (soft(zeros(N, 2), half(N, 3)), f"{SOFT} [4, 2] and [4, 3]"),
    (soft(zeros(N, 0), half(N, 0)), f"{SOFT} [4, 0] and [4, 0]"),
    (soft(zeros(3, 2), half(3, 2)), f"{SOFT} [3, 2] and [3, 2]"),
    ({"token_weights": half(N, 1)}, "token_weights: expected [4], got [4, 1]"),
    ({"class_bias": half(N)}, "class_bias: expected [5], got [4]"),
    (
        {"token_weights": LEARNED[:, 0]},
        "token_weights: expected a tensor without requires_grad. Detach it",
    ),
    (
        soft(zeros(N, 2), LEARNED),
        "target_weights: expected a tensor without requires_grad. Detach it",
    ),
    (
        {"gradients": "backward"},
        "gradients: expected one of ['forward', 'recompute'], got 'backward'",
    ),
    ({"label_smoothing": 1.5}, "label_smoothing: expected 0 to 1, got 1.5"),
    ({"label_smoothing": -0.1}, "label_smoothing: expected 0 to 1, got -0.1"),
    ({"z_loss": -1.0}, "z_loss: expected 0 or more, got -1.0"),
]
ELSEWHERE = {
    "prototypes": {"prototypes": half(V, D, device="meta")},
    "labels": {"labels": zeros(N, device="meta")},
    "token_weights": {"token_weights": half(N, device="meta")},
    "class_bias": {"class_bias": half(V, device="meta")},
    "target_weights": soft(zeros(N, 2), half(N, 2, device="meta")),
}
REFUSED += [
    (given, f"{name}: expected device cpu of hidden_states, got meta")
    for name, given in ELSEWHERE.items()
]
OF_DISTANCES = [
    ({"eps": 0.0}, "eps: expected a number above 0, got 0.0"),
    ({"h_exp": 0.0}, "h_exp: expected a number below 0, got 0.0"),
    ({"h_exp": 2}, "h_exp: expected a number below 0, got 2"),
    ({"h_exp": -math.inf}, "h_exp: expected a number below 0, got -inf"),
    ({"h_exp": torch.tensor(1.5).requires_grad_()}, "h_exp: expected a number below 0, got 1.5"),
]
OF_LABELS = [
    ([0, 1, 2, V], "from 0 to 4, got 0 to 5"),
    ([0, 1, -1, 2], "from 0 to 4, got -1 to 2"),
    ([0, 1, -100, 2], "from 0 to 4, got -100 to 2"),
    ([[0], [1], [2], [V]], "from -1 to 4, got 0 to 5"),
    ([[0], [1], [-2], [4]], "from -1 to 4, got -2 to 4"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_inputs_that_do_not_fit_are_refused(given, message):
    with refused(message):
        call(**{"impl": "chunked", **given})


def test_the_reference_and_the_linear_loss_refuse_them_too():
    given, message = REFUSED[2]
    with refused(message):
        call(linear=True, **{"impl": "reference", **given})


@pytest.mark.parametrize("impl", ["chunked", "reference"])
@pytest.mark.parametrize(("given", "message"), OF_DISTANCES)
def test_exponents_and_eps_out_of_range_are_refused(given, message, impl):
    with pytest.raises(ValueError, match=f"^{message}"):
        call(impl=impl, **given)


@pytest.mark.parametrize(("linear", "impl"), [(False, "chunked"), (True, "reference")])
@pytest.mark.parametrize(("labels", "message"), OF_LABELS)
def test_labels_out_of_range_are_refused(labels, message, linear, impl):
    labels = torch.tensor(labels)
    weights = half(N, 1) if labels.dim() == 2 else None
    threads = torch.get_num_threads()
    with refused(f"labels: expected values {message}. Drop ignored positions first"):
        call(**soft(labels, weights), linear=linear, impl=impl)
    assert torch.get_num_threads() == threads


@pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning")
@pytest.mark.parametrize("linear", [False, True])
def test_values_inside_of_transforms_are_not_looked_at(linear):
    rows, labels = torch.randn(N, D), torch.arange(N)
    given = {"linear": linear, "impl": "reference"}

    def loss(row, label):
        return call(hidden_states=row[None], labels=label[None], **given)[0]

    found = torch.func.vmap(torch.func.grad(loss))(rows, labels)
    states = rows.clone().requires_grad_()
    call(hidden_states=states, labels=labels, **given).sum().backward()
    torch.testing.assert_close(found, states.grad)
    with pytest.raises(
        NotImplementedError, match=r"got a transform of torch\.func\. Use impl='ref"
    ):
        torch.func.grad(lambda x: call(hidden_states=x, labels=labels, linear=linear).sum())(rows)


@pytest.mark.parametrize("linear", [False, True])
def test_vmap_is_refused_where_a_gradient_would_be_lost(linear):
    rows, label = torch.randn(N, D, requires_grad=True), torch.zeros(1, dtype=torch.int64)

    def loss(row):
        return call(hidden_states=row[None], labels=label, linear=linear)[0]

    with pytest.raises(NotImplementedError, match=r"^fused loss: expected no torch\.func\.vmap"):
        torch.func.vmap(loss)(rows)


@pytest.mark.parametrize("linear", [False, True])
def test_a_class_that_is_ruled_out_cannot_have_a_share_of_the_target(linear):
    bias = torch.zeros(V)
    bias[1] = -torch.inf
    message = r"^class_bias: expected no -inf beside label_smoothing, which .*, got one\. Use a fin"
    with pytest.raises(ValueError, match=message):
        call(class_bias=bias, label_smoothing=0.1, linear=linear, impl="chunked")


@pytest.mark.parametrize("shape", [[1], [2], [1, 1]])
def test_a_learned_exponent_with_an_axis_is_refused(shape):
    with pytest.raises(ValueError, match=r"^h_exp: expected"):
        call(h_exp=torch.full(shape, -2.0, requires_grad=True), impl="chunked")


def test_what_is_in_order_is_accepted():
    assert call().shape == (N,)
    assert call(linear=True).shape == (N,)
    assert call(label_smoothing=1.0, eps=1e-30).shape == (N,)


@pytest.mark.parametrize(("hip", "expected"), [(None, "triton"), ("7.1", "chunked")])
def test_only_gpus_of_nvidia_get_kernels(hip, expected, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.version, "hip", hip)
    with FakeTensorMode():
        states = torch.empty(2, 3, device="cuda")
    assert _resolve("auto", "cross_entropy", states, states) == expected


class OnApple(torch.Tensor):
    device = torch.device("mps")  # in torch 2.10 it has no asynchronous assertion


def test_a_gpu_without_asynchronous_assertions_is_waited_for(monkeypatch):
    monkeypatch.setattr(torch, "_assert_async", Mock(side_effect=NotImplementedError))
    labels, bias = torch.tensor([0, V]), torch.tensor([0.0, 0.0, -math.inf, 0.0, 0.0])
    with pytest.raises(ValueError, match="labels: expected values from 0 to 4, got 0 to 5"):
        read_target(
            SimpleNamespace(
                hidden_states=torch.ones(2, D),
                prototypes=torch.eye(V, D),
                labels=labels.as_subclass(OnApple),
                target_weights=None,
            )
        )
    with pytest.raises(ValueError, match="class_bias: expected no -inf"):
        check_bias(SimpleNamespace(class_bias=bias.as_subclass(OnApple), label_smoothing=0.1))
