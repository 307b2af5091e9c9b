"""The whole Triton path in the interpreter against the definition."""

import pytest
import torch

from harmonic_sft.ops import LossOptions, geometry
from harmonic_sft.ops import (
    distance_cross_entropy_with_metrics as distance,
)
from harmonic_sft.ops import (
    linear_cross_entropy_with_metrics as linear,
)

pytest.importorskip("triton")
N, V, D = 9, 70, 20


def make_settings(name: str) -> dict:
    settings = {
        "plain": {},
        "weights and z-loss": {"token_weights": torch.rand(N), "z_loss": 1e-2},
        "bias": {"class_bias": torch.randn(V)},
        "smoothing": {"label_smoothing": 0.1},
        "recompute": {"gradients": "recompute"},
    }
    return settings[name]


def run(kind: str, h_exp: float, settings: dict, impl: str, dtype: torch.dtype) -> list:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(N, D, generator=generator).to(dtype).requires_grad_()
    prototypes = torch.randn(V, D, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(V, (N,), generator=generator)
    cast = {k: v.to(dtype) if isinstance(v, torch.Tensor) else v for k, v in settings.items()}
    options = LossOptions(**cast)
    if kind == "linear":
        loss, metrics = linear(states, prototypes, labels, options=options, impl=impl)
    else:
        loss, metrics = distance(
            states,
            prototypes,
            labels,
            h_exp=h_exp,
            unit_sphere=kind == "sphere",
            options=options,
            impl=impl,
        )
    return [loss, *torch.autograd.grad(loss.sum(), (states, prototypes)), *metrics]


def check(kind: str, h_exp: float, settings: dict) -> None:
    expected = run(kind, h_exp, settings, "reference", torch.float64)
    actual = run(kind, h_exp, settings, "triton", torch.float32)
    for found, wanted in zip(actual, expected, strict=True):
        scale = max(wanted.abs().max().item(), 1e-3)
        torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-5, atol=1e-5 * scale)


@pytest.fixture(autouse=True)
def interpreted():
    knobs = pytest.importorskip("triton.knobs")
    if not knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET was not set before the first import of triton")
    torch.manual_seed(0)


@pytest.mark.parametrize("name", ["plain", "weights and z-loss", "bias", "smoothing", "recompute"])
@pytest.mark.parametrize(
    ("kind", "h_exp"), [("euclidean", -14.0), ("sphere", -7.3), ("linear", -1.0)]
)
def test_the_kernels_agree_with_the_definition(kind, h_exp, name):
    check(kind, h_exp, make_settings(name))


@pytest.mark.parametrize("kind", ["euclidean", "sphere", "linear"])
def test_so_does_the_route_of_large_hidden_sizes(kind, monkeypatch):
    engine = pytest.importorskip("harmonic_sft.ops.triton_engine")
    monkeypatch.setattr(engine, "LARGE_HIDDEN_SIZE", 1)
    check(kind, -14.0, {})


@pytest.mark.parametrize("kind", ["euclidean", "sphere"])
def test_so_does_a_frame_about_the_mean(kind, monkeypatch):
    monkeypatch.setattr(geometry, "DOMINANT", -1.0)  # as on a GPU, which never looks
    check(kind, -14.0, {})
