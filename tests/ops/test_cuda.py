"""The fused losses on a GPU: against float64 on the CPU, without halts, the same bits twice."""

import pytest
import torch
import torch.nn.functional as F

from harmonic_sft.ops import linear_cross_entropy
from tests.ops.baselines import harmonic_float64, regime
from tests.ops.fused import loss_of

pytestmark = pytest.mark.cuda
V, D = 1000, 96
KINDS = [("linear", 0.0), ("sphere", -12.0), ("euclidean", -14.0)]
DTYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "mixed": (torch.bfloat16, torch.float32),
}
SETTINGS = {
    "plain": {},
    "all": {
        "class_bias": torch.linspace(-1, 1, V),
        "label_smoothing": 0.1,
        "z_loss": 1e-2,
    },
    "recompute": {"gradients": "recompute"},
    "soft": {"target_weights": torch.tensor([0.7, 0.3])},
}


def make_inputs(num_tokens, dtype):
    generator = torch.Generator().manual_seed(num_tokens)
    labels = torch.randint(V, (num_tokens,), generator=generator)
    prototypes = torch.randn(V, D, generator=generator)
    states = prototypes[labels] + torch.randn(num_tokens, D, generator=generator)
    return states.to(DTYPES[dtype][0]), prototypes.to(DTYPES[dtype][1]), labels


def run(kind, h_exp, inputs, settings, device, impl, dtype=None):
    """Loss `[N]` and the gradients of its sum."""
    states, prototypes = (
        tensor.detach().to(device, dtype or tensor.dtype).requires_grad_() for tensor in inputs[:2]
    )
    labels = inputs[2].to(device)
    floats = {
        key: value.to(device, dtype or torch.float32) if isinstance(value, torch.Tensor) else value
        for key, value in settings.items()
    }
    if "target_weights" in floats:
        labels = torch.stack([labels, (labels + 1) % len(prototypes)], 1)
        floats["target_weights"] = floats["target_weights"].repeat(len(labels), 1)
    loss = loss_of(kind, states, prototypes, labels, h_exp=h_exp, impl=impl, **floats)
    return [loss.detach(), *torch.autograd.grad(loss.sum(), [states, prototypes])]


@pytest.mark.parametrize("num_tokens", [1, 257, 8192])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "h_exp"), KINDS)
def test_losses_and_gradients_are_those_of_float64(kind, h_exp, dtype, name, num_tokens):
    inputs, settings = make_inputs(num_tokens, dtype), SETTINGS[name]
    expected = run(kind, h_exp, inputs, settings, "cpu", "reference", torch.float64)
    found = [tensor.cpu().double() for tensor in run(kind, h_exp, inputs, settings, "cuda", "auto")]
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    tolerance = 1e-5 if dtype == "float32" else 2**-6
    for gradient, wanted in zip(found[1:], expected[1:], strict=True):
        assert (gradient - wanted).norm() < tolerance * wanted.norm()


@pytest.mark.parametrize("name", ["captured 0.1", "captured 0.01", "mean 20", "sphere p 0.9996"])
def test_gradients_keep_their_digits_near_prototypes(name):
    states, prototypes, labels, sphere = regime(name, 64, 2048)
    kind = "sphere" if sphere else "euclidean"
    found = run(kind, -14.0, (states, prototypes, labels), {}, "cuda", "auto")[1].cpu()
    wanted = harmonic_float64(states, prototypes, labels, -14.0, sphere)[1]
    errors = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert errors.median() < 1e-4


def test_a_matrix_of_more_than_2_to_the_31_elements():
    size, hidden_size = 2**31 // 2048 + 4096, 2048
    generator = torch.Generator("cuda").manual_seed(0)
    prototypes = torch.randn(size, hidden_size, generator=generator, device="cuda").bfloat16()
    labels = torch.tensor([0, size - 1, size // 2, size - 4096], device="cuda")
    states = (prototypes[labels].float() + 1).bfloat16()
    loss = linear_cross_entropy(states, prototypes.requires_grad_(), labels)
    loss.sum().backward()
    gradient = prototypes.grad
    with torch.no_grad():
        logits = torch.cat(
            [states.double() @ block.double().T for block in prototypes.split(2**16)], 1
        )
        expected = F.cross_entropy(logits, labels, reduction="none")
        slopes = logits.softmax(1)
        slopes[torch.arange(4), labels] -= 1
        rows = slopes[:, labels].T @ states.double()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(gradient[labels].double(), rows, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "h_exp"), KINDS)
def test_two_runs_have_the_same_bits(kind, h_exp, dtype):
    inputs = make_inputs(2048, dtype)
    first, second = (run(kind, h_exp, inputs, {}, "cuda", "auto") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "h_exp"), KINDS)
def test_no_step_waits_for_the_device(kind, h_exp, dtype):
    states, prototypes, labels = (tensor.cuda() for tensor in make_inputs(512, dtype))
    moved = states.requires_grad_(), prototypes.requires_grad_(), labels

    def step():
        loss_of(kind, *moved, h_exp=h_exp, reduction="mean").backward()

    step()  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
