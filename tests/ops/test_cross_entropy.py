"""Chunked and reference losses against dense float64, through every option, dtype and shape."""

from contextlib import contextmanager
from itertools import combinations, product

import pytest
import torch
import torch.nn.functional as F

from harmonic_sft.ops import (
    LossOptions,
    TokenMetrics,
    distance_cross_entropy,
    linear_cross_entropy,
)
from harmonic_sft.ops.tiles import CPU_WIDTH
from tests.ops.fused import KINDS, loss_of, make_chunks_small, with_metrics_of

EPS = 1e-6
EXPONENTS = [-14.0, -7.3, -0.5, -1.0]
OPTIONS = [
    "plain",
    "token_weights",
    "class_bias",
    "learned class_bias",
    "label_smoothing",
    "z_loss",
    "soft target",
    "recompute",
    "learned h_exp",
    "all",
    "all hard",
]
# The fourth has three tiles of 512 columns, and five chunks where these are of 8 tokens.
SHAPES = [(0, 7, 3), (1, 2, 3), (5, 7, 3), (33, 1300, 20), (3, 2, 384)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
# Relative to the value, and to the largest of its tensor: of what is measured, of gradients.
TOLERANCES = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (2e-5, 2e-5),
    torch.bfloat16: (2e-5, 2**-7),  # arithmetic in float32, gradients rounded
}


def make_cases():
    """Every option in every shape and geometry; the other factors take turns."""
    for index, (option, shape, kind) in enumerate(product(OPTIONS, SHAPES, KINDS)):
        turn = index // 15 + index // 3 % 5 + index % 3
        rows = None if index // 4 % 2 else 8
        yield option, shape, kind, EXPONENTS[index % 4], DTYPES[turn % 3], rows


CASES = list(make_cases())


@contextmanager
def one_thread():
    """Small dense operations on several cores wait for each other, a hundred times too long."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


class Inputs:
    """Leaves of one case, and what the loss makes of them."""

    def __init__(self, option, shape, kind, h_exp, dtype=torch.float64):
        num_tokens, num_classes, hidden_size = shape
        generator = torch.Generator().manual_seed(0)

        def normal(*size):
            return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

        self.kind, self.h_exp = kind, h_exp
        self.hidden_states = normal(num_tokens, hidden_size).requires_grad_()
        self.prototypes = normal(num_classes, hidden_size).requires_grad_()
        self.labels = torch.randint(num_classes, (num_tokens,), generator=generator)
        soft = torch.randint(-1, num_classes, (num_tokens, 4), generator=generator)
        soft[1:, 1] = soft[1:, 0]  # repeated
        weights = torch.rand(num_tokens, 4, generator=generator) * (soft >= 0)
        token_weights = torch.rand(num_tokens, generator=generator)
        bias = normal(num_classes)
        learned = bias.clone().requires_grad_()
        hard = {
            "token_weights": token_weights,
            "class_bias": learned,
            "label_smoothing": 0.1,
            "z_loss": 0.01,
        }
        settings = {
            "token_weights": {"token_weights": token_weights},
            "class_bias": {"class_bias": bias},
            "learned class_bias": {"class_bias": learned},
            "label_smoothing": {"label_smoothing": 0.1},
            "z_loss": {"z_loss": 0.01},
            "soft target": {"target_weights": weights},
            "recompute": {"gradients": "recompute"},
            "all": {**hard, "target_weights": weights},
            "all hard": hard,
        }
        self.options = LossOptions(**settings.get(option, {}))
        if self.options.target_weights is not None:
            self.labels = soft
        if option in ("learned h_exp", "all", "all hard") and kind != "linear":
            learned_dtype = torch.promote_types(dtype, torch.float32)
            self.h_exp = torch.tensor(h_exp, dtype=learned_dtype, requires_grad=True)

    @property
    def leaves(self):
        tensors = [self.hidden_states, self.prototypes, self.options.class_bias, self.h_exp]
        return [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]

    def run(self, impl="chunked"):
        tensors = (self.hidden_states, self.prototypes, self.labels)
        shared = {"options": self.options, "impl": impl}
        return with_metrics_of(self.kind, *tensors, h_exp=self.h_exp, **shared)

    def loss(self):
        return self.run()[0]

    def logits(self):
        x, w = self.hidden_states.double(), self.prototypes.double()
        if self.kind == "sphere":
            x, w = F.normalize(x, dim=-1), F.normalize(w, dim=-1)
        if self.kind == "linear":
            logits = x @ w.T
        else:
            h_exp = self.h_exp.double() if isinstance(self.h_exp, torch.Tensor) else self.h_exp
            logits = h_exp * ((x[:, None] - w).square().sum(-1) + EPS).log()
        bias = self.options.class_bias
        return logits if bias is None else logits + bias.double()

    @one_thread()
    def dense(self):
        """Loss and metrics by their definitions."""
        logits, options = self.logits(), self.options
        log_probs = logits.log_softmax(-1)
        labels, weights = self.labels, options.target_weights
        if weights is None:
            labels, weights = labels[:, None], torch.ones(len(labels), 1)
        target = torch.zeros_like(logits).scatter_add(1, labels.clamp_min(0), weights.double())
        smoothing = options.label_smoothing
        found = (target * log_probs).masked_fill(target == 0, 0).sum(-1)
        loss = -(1 - smoothing) * found
        if smoothing:
            loss = loss - smoothing * log_probs.mean(-1)
        normalizer = logits.logsumexp(-1)
        loss = loss + options.z_loss * normalizer.square()
        if options.token_weights is not None:
            loss = loss * options.token_weights.double()
        entropy = torch.distributions.Categorical(logits=logits, validate_args=False).entropy()
        metrics = (found, normalizer, entropy, logits.argmax(-1))
        return loss, TokenMetrics(*(metric.detach() for metric in metrics))

    @one_thread()
    def dense_gradients(self, upstream=None):
        return gradients_of(self.dense()[0], self.leaves, upstream)


def gradients_of(loss, leaves, upstream=None):
    upstream = torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype)
    return torch.autograd.grad((loss * upstream).sum(), leaves)


def assert_near(actual, expected, tolerance, floor=0.0):
    largest = expected[expected.isfinite()].abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=tolerance, atol=tolerance * largest + floor
    )


def assert_metrics_near(actual, expected, inputs, tolerance):
    assert_near(actual.log_probs, expected.log_probs, tolerance)
    assert_near(actual.log_normalizer, expected.log_normalizer, tolerance)
    assert_near(actual.entropy, expected.entropy, tolerance, floor=1e-6)
    logits = inputs.logits().detach()
    best = logits.gather(1, actual.predictions[:, None]).squeeze(1)
    assert_near(best, logits.amax(1), tolerance)


def test_the_cases_cover_every_pair_of_factors():
    levels = list(zip(*CASES, strict=True))
    for left, right in combinations(levels, 2):
        pairs = set(zip(left, right, strict=True))
        assert len(pairs) == len(set(left)) * len(set(right))


@pytest.mark.parametrize(("option", "shape", "kind", "h_exp", "dtype", "rows"), CASES)
def test_the_chunked_loss_equals_dense_float64(
    option, shape, kind, h_exp, dtype, rows, monkeypatch
):
    if rows:
        make_chunks_small(monkeypatch, rows)
    inputs = Inputs(option, shape, kind, h_exp, dtype)
    tolerance, gradient_tolerance = TOLERANCES[dtype]
    loss, metrics = inputs.run()
    expected, expected_metrics = inputs.dense()
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert_near(loss, expected, tolerance)
    assert_metrics_near(metrics, expected_metrics, inputs, tolerance)
    found = gradients_of(loss, inputs.leaves)
    for leaf, actual, wanted in zip(inputs.leaves, found, inputs.dense_gradients(), strict=True):
        assert actual.dtype == leaf.dtype
        assert_near(actual, wanted, gradient_tolerance if leaf.dim() else 10 * tolerance)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_a_row_whose_only_target_is_padding_has_no_loss(impl):
    options = LossOptions(target_weights=torch.tensor([[1.0], [0.0]]))
    states, weight = torch.randn(2, 8), torch.randn(9, 8)
    labels = torch.tensor([[3], [-1]])
    found = distance_cross_entropy(states, weight, labels, h_exp=-2.0, options=options, impl=impl)
    expected = distance_cross_entropy(states[:1], weight, labels[:1, 0], h_exp=-2.0)
    torch.testing.assert_close(found, torch.cat([expected, torch.zeros(1)]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_the_reference_equals_dense_float64(option, kind):
    inputs = Inputs(option, (5, 7, 3), kind, -7.3)
    loss, metrics = inputs.run("reference")
    expected, expected_metrics = inputs.dense()
    assert_near(loss, expected, 1e-10)
    assert_metrics_near(metrics, expected_metrics, inputs, 1e-10)
    for pair in zip(gradients_of(loss, inputs.leaves), inputs.dense_gradients(), strict=True):
        assert_near(*pair, 1e-10)


UPSTREAM = {
    "sum": torch.ones(20),
    "half": torch.full((20,), 0.5),
    "mean": torch.full((20,), 0.05, dtype=torch.float64),
    "weights": torch.linspace(-1, 2, 20),
    "mask": (torch.arange(20) % 3 > 0).float(),
    "zero": torch.zeros(20),
}


@pytest.mark.parametrize("name", UPSTREAM)
@pytest.mark.parametrize(
    ("kind", "option"), [("euclidean", "plain"), ("sphere", "recompute"), ("linear", "all")]
)
def test_any_upstream_gradient_is_followed_again_and_again(kind, option, name, monkeypatch):
    make_chunks_small(monkeypatch, 8)
    inputs = Inputs(option, (20, 600, 5), kind, -3.0)
    loss, upstream = inputs.loss(), UPSTREAM[name]
    uniform = {"sum": loss.sum(), "half": loss.sum() / 2, "mean": loss.mean()}
    reduced = uniform.get(name, (loss * upstream).sum())
    expected = inputs.dense_gradients(upstream)
    for _ in range(3):
        found = torch.autograd.grad(reduced, inputs.leaves, retain_graph=True)
        for pair in zip(found, expected, strict=True):
            assert_near(*pair, 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_derivative_is_refused(kind):
    inputs = Inputs("plain", (5, 7, 3), kind, -3.0)
    with pytest.raises(RuntimeError, match="expected one derivative, got create_graph=True"):
        torch.autograd.grad(inputs.loss().sum(), inputs.leaves, create_graph=True)


@pytest.mark.parametrize("kind", ["euclidean", "linear"])
def test_a_tile_that_holds_the_label_alone_has_no_share(kind):
    torch.manual_seed(0)
    offset = 4.0 if kind == "linear" else 0.0  # logits far below 0
    leaves = [torch.randn(4, 64) - offset, torch.randn(CPU_WIDTH + 1, 64) + offset]
    leaves = [leaf.double().requires_grad_() for leaf in leaves]
    labels = torch.tensor([CPU_WIDTH, 0, CPU_WIDTH, 0])
    gradients = {}
    for impl in ("chunked", "reference"):
        loss = loss_of(kind, *leaves, labels, h_exp=-200.0, impl=impl)
        gradients[impl] = torch.autograd.grad(loss.sum(), leaves)
    for pair in zip(*gradients.values(), strict=True):
        assert_near(*pair, 1e-7)


def test_float16_gradients_are_scaled_before_they_are_rounded():
    states = (torch.randn(4096, 8) + 30).half()
    weight = (torch.randn(50, 8) * 0.05).half().requires_grad_()
    labels = torch.zeros(4096, dtype=torch.int64)
    found, expected = (
        torch.autograd.grad(
            linear_cross_entropy(states, weight, labels, reduction="mean", impl=impl), weight
        )[0]
        for impl in ("chunked", "reference")
    )
    assert found.dtype == torch.float16
    assert_near(found, expected, 2e-3)


@pytest.mark.parametrize("option", ["learned h_exp", "learned class_bias", "all"])
def test_bias_and_exponent_learn_beside_frozen_vectors(option):
    inputs = Inputs(option, (20, 600, 5), "sphere", -3.0)
    inputs.hidden_states, inputs.prototypes = (leaf.detach() for leaf in inputs.leaves[:2])
    found = gradients_of(inputs.loss(), inputs.leaves)
    for pair in zip(found, inputs.dense_gradients(), strict=True):
        assert_near(*pair, 1e-10)
