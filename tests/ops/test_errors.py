"""Everything that the fused losses refuse, and what they say about it."""

import pytest
import torch

from harmonic_sft.ops import (
    LossOptions,
    distance_cross_entropy,
    linear_cross_entropy,
)

N, V, D = 4, 5, 3


def call(*, hidden_states=None, prototypes=None, labels=None, linear=False, **settings):
    """The loss of inputs that are in order but for what is given."""
    hidden_states = torch.ones(N, D) if hidden_states is None else hidden_states
    prototypes = torch.eye(V, D) if prototypes is None else prototypes
    labels = torch.zeros(N, dtype=torch.int64) if labels is None else labels
    names = ("h_exp", "eps", "impl", "unit_sphere")
    arguments = {name: settings.pop(name) for name in names if name in settings}
    options = LossOptions(**settings)
    if linear:
        return linear_cross_entropy(hidden_states, prototypes, labels, options=options, **arguments)
    arguments = {"h_exp": -2.0, **arguments}
    return distance_cross_entropy(hidden_states, prototypes, labels, options=options, **arguments)


def integers(*values):
    return torch.tensor(values)


def half(*shape):
    return torch.full(shape, 0.5)


REFUSED = {
    "impl": ({"impl": "cuda"}, r"^impl: expected one of \['auto', 'reference', .*got 'cuda'$"),
    "hidden_states axes": (
        {"hidden_states": torch.ones(2, 2, D)},
        r"^hidden_states: expected \[N, D\], got \[2, 2, 3\]$",
    ),
    "prototypes axes": (
        {"prototypes": torch.ones(D)},
        r"^prototypes: expected \[V, 3\], got \[3\]$",
    ),
    "prototypes size": (
        {"prototypes": torch.ones(V, D + 1)},
        r"^prototypes: expected \[V, 3\], got \[5, 4\]$",
    ),
    "hidden_states dtype": (
        {"hidden_states": torch.ones(N, D, dtype=torch.int32)},
        r"^hidden_states: expected a floating dtype, got torch.int32$",
    ),
    "prototypes dtype": (
        {"prototypes": torch.ones(V, D, dtype=torch.bool)},
        r"^prototypes: expected a floating dtype, got torch.bool$",
    ),
    "labels dtype": (
        {"labels": torch.zeros(N, dtype=torch.int32)},
        r"^labels: expected torch.int64, got torch.int32$",
    ),
    "labels shape": (
        {"labels": torch.zeros(N + 1, dtype=torch.int64)},
        r"^labels: expected \[4\], got \[5\]$",
    ),
    "labels with an axis too many": (
        {"labels": torch.zeros(N, 2, dtype=torch.int64)},
        r"^labels: expected \[4\], got \[4, 2\]$",
    ),
    "target_weights without their axis": (
        {"target_weights": half(N)},
        r"^labels, target_weights: expected both \[4, K\], got \[4\] and \[4\]$",
    ),
    "target_weights of another shape": (
        {"labels": torch.zeros(N, 2, dtype=torch.int64), "target_weights": half(N, 3)},
        r"^labels, target_weights: expected both \[4, K\], got \[4, 2\] and \[4, 3\]$",
    ),
    "target_weights without labels": (
        {"labels": torch.zeros(N, 0, dtype=torch.int64), "target_weights": torch.zeros(N, 0)},
        r"^labels, target_weights: expected both \[4, K\], got \[4, 0\] and \[4, 0\]$",
    ),
    "target_weights of other tokens": (
        {"labels": torch.zeros(3, 2, dtype=torch.int64), "target_weights": half(3, 2)},
        r"^labels, target_weights: expected both \[4, K\], got \[3, 2\] and \[3, 2\]$",
    ),
    "token_weights": (
        {"token_weights": half(N, 1)},
        r"^token_weights: expected \[4\], got \[4, 1\]$",
    ),
    "class_bias": ({"class_bias": half(N)}, r"^class_bias: expected \[5\], got \[4\]$"),
    "token_weights requires_grad": (
        {"token_weights": half(N).requires_grad_()},
        r"^token_weights: expected a tensor without requires_grad. Detach it$",
    ),
    "target_weights requires_grad": (
        {
            "labels": torch.zeros(N, 2, dtype=torch.int64),
            "target_weights": half(N, 2).requires_grad_(),
        },
        r"^target_weights: expected a tensor without requires_grad. Detach it$",
    ),
    "gradients": (
        {"gradients": "backward"},
        r"^gradients: expected one of \['forward', 'recompute'\], got 'backward'$",
    ),
    "label_smoothing above": (
        {"label_smoothing": 1.5},
        r"^label_smoothing: expected 0 to 1, got 1.5$",
    ),
    "label_smoothing below": (
        {"label_smoothing": -0.1},
        r"^label_smoothing: expected 0 to 1, got -0.1$",
    ),
    "z_loss": ({"z_loss": -1.0}, r"^z_loss: expected 0 or more, got -1.0$"),
    "prototypes device": (
        {"prototypes": torch.ones(V, D, device="meta")},
        r"^prototypes: expected device cpu of hidden_states, got meta$",
    ),
    "labels device": (
        {"labels": torch.zeros(N, dtype=torch.int64, device="meta")},
        r"^labels: expected device cpu of hidden_states, got meta$",
    ),
    "token_weights device": (
        {"token_weights": torch.ones(N, device="meta")},
        r"^token_weights: expected device cpu of hidden_states, got meta$",
    ),
    "class_bias device": (
        {"class_bias": torch.ones(V, device="meta")},
        r"^class_bias: expected device cpu of hidden_states, got meta$",
    ),
    "target_weights device": (
        {
            "labels": torch.zeros(N, 2, dtype=torch.int64),
            "target_weights": torch.ones(N, 2, device="meta"),
        },
        r"^target_weights: expected device cpu of hidden_states, got meta$",
    ),
}
OF_DISTANCES = {
    "eps": ({"eps": 0.0}, r"^eps: expected a number above 0, got 0.0$"),
    "h_exp": ({"h_exp": 0.0}, r"^h_exp: expected a number below 0, got 0.0$"),
    "whole h_exp": ({"h_exp": 2}, r"^h_exp: expected a number below 0, got 2"),
    "infinite h_exp": ({"h_exp": -float("inf")}, r"^h_exp: expected a number below 0, got -inf"),
    "learned h_exp": (
        {"h_exp": torch.tensor(1.5, requires_grad=True)},
        r"^h_exp: expected a number below 0, got 1.5$",
    ),
}
OF_LABELS = {
    "above": (integers(0, 1, 2, V), None, r"^labels: expected values from 0 to 4, got 0 to 5. "),
    "ignored": (integers(0, 1, -1, 2), None, r"got -1 to 2. Drop ignored positions first$"),
    "ignore_index": (integers(0, 1, -100, 2), None, r"got -100 to 2. Drop ignored positions"),
    "soft above": (
        integers(0, 1, 2, V)[:, None],
        half(N, 1),
        r"^labels: expected values from -1 to 4, got 0 to 5. Drop ignored positions first$",
    ),
    "soft below": (
        integers(0, 1, -2, 4)[:, None],
        half(N, 1),
        r"^labels: expected values from -1 to 4, got -2 to 4. Drop ignored positions first$",
    ),
}


@pytest.mark.parametrize(("linear", "impl"), [(False, "chunked"), (True, "reference")])
@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_inputs_that_do_not_fit_are_refused(given, message, linear, impl):
    with pytest.raises(ValueError, match=message):
        call(linear=linear, **{"impl": impl, **given})


@pytest.mark.parametrize("impl", ["chunked", "reference"])
@pytest.mark.parametrize(("given", "message"), OF_DISTANCES.values(), ids=OF_DISTANCES)
def test_exponents_and_eps_out_of_range_are_refused(given, message, impl):
    with pytest.raises(ValueError, match=message):
        call(impl=impl, **given)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize(("labels", "weights", "message"), OF_LABELS.values(), ids=OF_LABELS)
def test_labels_out_of_range_are_refused(labels, weights, message, linear):
    with pytest.raises(ValueError, match=message):
        call(labels=labels, target_weights=weights, linear=linear, impl="chunked")


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
