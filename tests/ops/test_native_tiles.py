"""The tiles in C: against float64, for every width of vectors, and how they are compiled."""

import os
import platform
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch

from harmonic_sft.ops import (
    distance_cross_entropy,
    fused,
    gemm,
    linear_cross_entropy,
    native,
    native_tiles,
)
from harmonic_sft.ops.chunked import ChunkedTiles
from tests.ops.test_cross_entropy import (
    EPS,
    Inputs,
    assert_metrics_near,
    assert_near,
    gradients_of,
)

KINDS = ["euclidean", "sphere", "linear"]
OPTIONS = [
    *("plain", "token_weights", "z_loss", "soft target", "recompute", "bfloat16 products"),
    *("class_bias", "learned class_bias", "label_smoothing", "learned h_exp", "all", "all hard"),
]
# Tokens, classes, dimensions: none, one, less than a vector, several tiles and chunks, several
# panels of tokens and dimensions with a rest, more dimensions than a product takes at once.
SHAPES = [
    *[(0, 7, 3), (1, 1, 1), (5, 2, 3), (20, 1600, 8), (77, 500, 50)],
    *[(49, 385, 97), (6, 130, 1100)],
]
ON_X86 = platform.machine() in ("x86_64", "AMD64")
TARGETS = ["native", *(["x86-64", "x86-64-v3"] if ON_X86 else [])]  # vectors of 128 and 256 bits
# Of 512 bits, without instructions for bfloat16.
WIDE = ["x86-64-v4"] if torch.backends.cpu.get_cpu_capability() == "AVX512" else []


def compile_for(monkeypatch, target):
    flags = tuple(flag for flag in native.FLAGS if not flag.startswith("-march"))
    monkeypatch.setattr(native, "FLAGS", (*flags, f"-march={target}"))
    native.library.cache_clear()
    if not (os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")):
        pytest.skip("there is no C compiler")
    try:
        native.library()
    except OSError as error:
        if target == "native":
            raise
        pytest.skip(str(error))  # a compiler that names targets in another way


@pytest.fixture(scope="module")
def compiled(request):
    """Tiles for this machine, or for the instructions that a test is given."""
    with pytest.MonkeyPatch.context() as patch:
        compile_for(patch, getattr(request, "param", "native"))
        yield
    native.library.cache_clear()


@pytest.fixture(autouse=True)
def no_tiles_of_pytorch(request, monkeypatch):
    def refuse(*_):
        raise AssertionError("PyTorch's tiles were taken")

    if "others" not in request.fixturenames:
        monkeypatch.setattr(ChunkedTiles, "_scores", refuse)


@pytest.fixture
def others():
    """PyTorch's tiles may be taken."""


def run(inputs, **settings):
    """The loss `[N]` of the C tiles."""
    tensors = (inputs.hidden_states, inputs.prototypes, inputs.labels)
    options = replace(inputs.options, gemm="native", **settings)
    if inputs.kind == "linear":
        return linear_cross_entropy(*tensors, options=options)
    sphere = inputs.kind == "sphere"
    return distance_cross_entropy(
        *tensors, h_exp=inputs.h_exp, unit_sphere=sphere, eps=EPS, options=options
    )


def assert_exact(inputs, upstream=None, **settings):
    loss = run(inputs, **settings)
    assert_near(loss, inputs.dense()[0], 1e-5)
    found = gradients_of(loss, inputs.leaves, upstream)
    tolerance = 2**-6 if inputs.options.gradient_dtype else 1e-5
    for pair in zip(found, inputs.dense_gradients(upstream), strict=True):
        # Of an exponent's gradient little is left where all distances are nearly equal.
        assert_near(*pair, max(tolerance, 1e-4) if pair[0].dim() == 0 else tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("compiled", TARGETS, indirect=True)
def test_they_equal_dense_float64(compiled, shape, option, kind, monkeypatch):
    monkeypatch.setattr(fused, "STORED_ROWS", 32)
    monkeypatch.setattr(fused, "TILE_ROWS", 32)
    turn = SHAPES.index(shape) + OPTIONS.index(option)
    h_exp = (-14.0, -7.3, -1.0, -0.5, -37.0)[turn % 5]
    inputs = Inputs(option, shape, kind, h_exp, torch.float32, seed=turn)
    calm(inputs)
    assert_exact(inputs)


def calm(inputs):
    """Make linear logits small: float32 rounds one of 100 by 1e-5."""
    if inputs.kind == "linear" and inputs.prototypes.shape[1] > 1000:
        inputs.hidden_states.data /= 16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", TARGETS, indirect=True)
def test_several_panels_of_tokens_equal_dense_float64(compiled, kind):
    inputs = Inputs("plain", (101, 400, 1100), kind, -14.0, torch.float32)
    calm(inputs)
    assert_exact(inputs)


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (7, 5, 50), (24, 96, 48), (37, 383, 131), (208, 9, 1300)], ids=str
)
@pytest.mark.parametrize("compiled", [*TARGETS, *WIDE], indirect=True)
def test_products_are_of_what_pytorch_rounds(compiled, shape, dtype, add):
    (tokens, classes, size), generator = shape, torch.Generator().manual_seed(0)
    hidden_states = torch.randn(tokens, size, generator=generator)
    prototypes = torch.randn(classes, size, generator=generator)
    packed = native.pack_tokens(hidden_states, -2.0, narrow=dtype == torch.bfloat16)
    weights = torch.rand(classes, packed.padded, generator=generator)
    weights[:, tokens:] = torch.nan  # nobody may read these
    factor = torch.nn.functional.pad(torch.rand(tokens, generator=generator), (0, 64))
    factor = factor[: packed.padded].contiguous()
    gain = torch.rand(classes, generator=generator)
    totals = native.Totals(
        torch.ones(classes, size),
        torch.ones(packed.padded, size),
        torch.ones(classes),
        torch.ones(packed.padded),
    )
    scratch = torch.empty(native.scratch_size(packed, classes))
    scaled = (weights * factor * gain.unsqueeze(1))[:, :tokens].to(dtype).double()
    native.accumulate_tiles(
        *(packed, weights, native.Factors(factor, gain), prototypes, totals, scratch),
        tiles=(classes, 0, 1),
        add=add,
    )
    by_class = add + scaled @ hidden_states.to(dtype).double()
    by_token = 1 + scaled.T @ prototypes.to(dtype).double()
    expected = (by_class, by_token, 1 + scaled.sum(1), 1 + scaled.sum(0))
    found = (totals.prototypes, totals.tokens[:tokens], totals.columns, totals.rows[:tokens])
    for pair in zip(found, expected, strict=True):
        assert_near(*pair, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", ["plain", "class_bias", "learned h_exp", "all", "all hard"])
@pytest.mark.parametrize("compiled", TARGETS, indirect=True)
def test_metrics_come_from_the_same_pass(compiled, option, kind, monkeypatch):
    monkeypatch.setattr(fused, "STORED_ROWS", 16)
    inputs = Inputs(option, (37, 900, 20), kind, -7.3, torch.float32)
    inputs.options = replace(inputs.options, gemm="native")
    loss, metrics = inputs.run()
    expected, expected_metrics = inputs.dense()
    assert_near(loss, expected, 1e-5)
    assert_metrics_near(metrics, expected_metrics, inputs, 1e-5)
    assert torch.equal(metrics.predictions, expected_metrics.predictions)
    for pair in zip(gradients_of(loss, inputs.leaves), inputs.dense_gradients(), strict=True):
        assert_near(*pair, 1e-5)
    with torch.no_grad():
        assert_metrics_near(inputs.run()[1], expected_metrics, inputs, 1e-5)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("gradients", ["forward", "recompute"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_class_that_the_prior_rules_out_is_as_good_as_absent(kind, gradients):
    inputs = Inputs("plain", (20, 800, 16), kind, -3.0, torch.float32)
    inputs.labels -= inputs.labels % 2
    bias = torch.zeros(800)
    bias[1::2] = -torch.inf
    inputs.options = replace(inputs.options, class_bias=bias, gradients=gradients)
    half = Inputs("plain", (20, 800, 16), kind, -3.0, torch.float32)
    half.prototypes = half.prototypes.detach()[::2].contiguous().requires_grad_()
    half.labels = inputs.labels // 2
    loss, expected = run(inputs), half.dense()[0]
    assert_near(loss, expected, 1e-5)
    hidden, prototypes = gradients_of(loss, inputs.leaves)
    assert_near(hidden, half.dense_gradients()[0], 1e-5)
    assert_near(prototypes[::2], half.dense_gradients()[1], 1e-5)
    assert not prototypes[1::2].any()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kind", KINDS)
def test_prototypes_may_lie_in_any_order_and_inference_mode_is_served(kind):
    inputs = Inputs("plain", (20, 600, 50), kind, -3.0, torch.float32)
    inputs.prototypes = inputs.prototypes.detach().T.contiguous().T.requires_grad_()
    assert not inputs.prototypes.is_contiguous()
    assert_exact(inputs)
    with torch.inference_mode():
        found = run(inputs)
    assert_near(found, inputs.dense()[0], 1e-5)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("gradients", ["forward", "recompute"])
@pytest.mark.parametrize("option", ["plain", "label_smoothing", "all hard"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tile_may_have_nothing_but_the_label(kind, option, gradients):
    inputs = Inputs(option, (20, native_tiles.WIDTH + 1, 5), kind, -3.0, torch.float32)
    inputs.labels[::2] = native_tiles.WIDTH
    assert_exact(inputs, gradients=gradients)


@pytest.mark.usefixtures("compiled")
def test_an_exponent_that_is_learned_elsewhere_may_be_a_tensor():
    inputs = Inputs("plain", (20, 600, 5), "sphere", torch.tensor(-3.5), torch.float32)
    assert_exact(inputs)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", ["token_weights", "bfloat16 products", "all hard"])
def test_upstream_gradients_that_differ_are_followed(kind, option):
    inputs = Inputs(option, (21, 600, 5), kind, -3.0, torch.float32)
    assert_exact(inputs, upstream=torch.linspace(-1, 2, 21))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("frozen", [["hidden_states"], ["prototypes"]], ids=str)
@pytest.mark.parametrize("option", ["plain", "bfloat16 products", "all hard"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_side_gets_no_gradient(kind, option, frozen):
    inputs = Inputs(option, (21, 600, 5), kind, -3.0, torch.float32)
    learned = len(inputs.leaves)
    for name in frozen:
        getattr(inputs, name).requires_grad_(False)
    assert len(inputs.leaves) == learned - len(frozen)
    assert_exact(inputs)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("option", ["learned class_bias", "all hard"])
@pytest.mark.parametrize("kind", KINDS)
def test_bias_and_exponent_learn_beside_frozen_vectors(kind, option):
    inputs = Inputs(option, (21, 600, 5), kind, -3.0, torch.float32)
    inputs.hidden_states, inputs.prototypes = (leaf.detach() for leaf in inputs.leaves[:2])
    assert_exact(inputs)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("gradients", ["forward", "recompute"])
@pytest.mark.parametrize("option", ["learned class_bias", "all hard"])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_products_leave_the_gradient_of_a_bias_exact(kind, option, gradients):
    inputs = Inputs(option, (50, 700, 40), kind, -3.0, torch.float32)
    loss = run(inputs, gradient_dtype=torch.bfloat16, gradients=gradients)
    found, expected = gradients_of(loss, inputs.leaves), inputs.dense_gradients()
    for k, pair in enumerate(zip(found, expected, strict=True)):
        assert_near(*pair, 2**-6 if k < 2 else 1e-5)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("option", ["plain", "bfloat16 products", "all hard"])
@pytest.mark.parametrize("kind", ["euclidean", "sphere"])
def test_prototypes_about_a_mean_are_recentred(kind, option):
    inputs = Inputs(option, (21, 900, 16), kind, -7.0, torch.float32)
    with torch.no_grad():
        inputs.hidden_states += 4
        inputs.prototypes += 4
    assert_exact(inputs)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("option", ["plain", "all hard"])
@pytest.mark.parametrize("kind", KINDS)
def test_norms_that_are_not_one_and_bfloat16_are_served(kind, option):
    inputs = Inputs(option, (20, 900, 16), kind, -7.0, torch.bfloat16)
    loss = run(inputs)
    assert_near(loss, inputs.dense()[0], 1e-5)
    for pair in zip(gradients_of(loss, inputs.leaves), inputs.dense_gradients(), strict=True):
        assert_near(*pair, 2**-7)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("gradients", ["forward", "recompute"])
@pytest.mark.parametrize("option", ["plain", "label_smoothing", "all hard"])
@pytest.mark.parametrize("kind", ["euclidean", "sphere"])
def test_near_prototypes_are_measured_by_difference(kind, option, gradients):
    inputs = Inputs(option, (20, 900, 16), kind, -7.0, torch.float32)
    with torch.no_grad():
        noise = torch.randn(20, 16, generator=torch.Generator().manual_seed(1))
        inputs.hidden_states[:] = inputs.prototypes[inputs.labels - 1] + 2e-2 * noise
    assert_exact(inputs, gradients=gradients)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("h_exp", [-28.0, -200.0, -768.0, -1500.0, -7.3])
def test_far_tokens_underflow_to_zero(h_exp):
    inputs = Inputs("plain", (8, 400, 4), "euclidean", h_exp, torch.float32)
    with torch.no_grad():
        inputs.prototypes[::2] *= 1e4
    loss = run(inputs)
    assert_near(loss, inputs.dense()[0], 1e-4)
    assert all(gradient.isfinite().all() for gradient in gradients_of(loss, inputs.leaves))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", ["plain", "bfloat16 products", "all hard"])
@pytest.mark.parametrize("h_exp", [-7.0, -7.3])
@pytest.mark.parametrize("poisoned", ["hidden_states", "prototypes"])
def test_not_a_number_comes_out_where_it_went_in(kind, h_exp, option, poisoned):
    inputs = Inputs(option, (20, 900, 16), kind, h_exp, torch.float32)
    with torch.no_grad():
        getattr(inputs, poisoned)[3, 2] = torch.nan
    loss = run(inputs)
    expected = torch.ones(20, dtype=torch.bool)
    if poisoned == "hidden_states":
        expected = torch.arange(20) == 3
    assert torch.equal(loss.isnan(), expected)
    gradient = gradients_of(loss, inputs.leaves)[0]
    assert torch.equal(gradient.isnan(), expected.unsqueeze(1).expand(20, 16))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("option", ["plain", "all hard"])
@pytest.mark.parametrize("kind", KINDS)
def test_runs_are_equal_to_the_last_bit(kind, option):
    inputs = Inputs(option, (300, 2000, 24), kind, -7.3, torch.float32)
    first, second = (
        (loss.detach(), *gradients_of(loss, inputs.leaves)) for loss in (run(inputs), run(inputs))
    )
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("compiled")
def test_a_loss_without_gradients_is_the_same():
    inputs = Inputs("plain", (40, 1000, 24), "sphere", -7.3, torch.float32)
    expected = run(inputs).detach()
    with torch.no_grad():
        assert_near(run(inputs), expected, 1e-6)


def small():
    return Inputs("plain", (5, 7, 3), "sphere", -3.0, torch.float32)


@pytest.fixture
def forgotten(monkeypatch):
    """Nothing compiled yet, and nothing tried."""
    monkeypatch.setattr(gemm, "_FAST", {})
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@pytest.mark.usefixtures("forgotten", "others")
def test_without_a_compiler_pytorch_does_the_tiles(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    inputs = small()
    assert_near(
        distance_cross_entropy(
            *(inputs.hidden_states, inputs.prototypes, inputs.labels),
            h_exp=-3.0,
            unit_sphere=True,
            eps=EPS,
        ),
        inputs.dense()[0],
        1e-5,
    )
    with pytest.raises(OSError, match=r"^gemm: expected a C compiler for native, got none\. Inst"):
        run(small())
    monkeypatch.setenv("CC", "/no/such/cc -O1")
    with pytest.raises(OSError, match=r"^gemm: expected a C compiler for native, got /no/such/cc"):
        run(small())


@pytest.fixture
def compile_by(monkeypatch, tmp_path):
    """Make a line of shell the compiler."""

    def replace_compiler(line):
        compiler = tmp_path / "cc"
        compiler.write_text(f"#!/bin/sh\n{line}\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CC", str(compiler))

    return replace_compiler


@pytest.mark.usefixtures("forgotten")
def test_what_the_compiler_says_is_passed_on(compile_by):
    compile_by("echo 'no such instruction' >&2; exit 1")
    with pytest.raises(OSError, match=r"^gemm: Command .*\nno such instruction$"):
        run(small())
    assert not gemm.native_is_fast(768, narrow=False)


@pytest.mark.usefixtures("forgotten")
def test_it_is_compiled_once(monkeypatch):
    commands, compile_ = [], subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda *a, **k: (commands.append(a), compile_(*a, **k))[1]
    )
    compile_for(monkeypatch, "native")
    for _ in range(3):
        run(small())
    assert len(commands) == 1


@pytest.mark.usefixtures("forgotten")
def test_a_compiler_that_hangs_is_stopped(monkeypatch, compile_by):
    compile_by("exec sleep 60")
    monkeypatch.setattr(native, "SECONDS", 0.1)
    with pytest.raises(OSError, match=r"^gemm: Command .* timed out after"):
        native.library()


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize("option", ["plain", "all hard"])
def test_float64_is_done_by_pytorch(option):
    inputs = Inputs(option, (20, 600, 5), "sphere", -3.0, torch.float64)
    assert_near(run(inputs), inputs.dense()[0], 1e-10)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("seconds", "chosen"), [(1e-9, True), (1e9, False)])
@pytest.mark.parametrize("narrow", [False, True])
def test_a_trial_decides(monkeypatch, narrow, seconds, chosen):
    monkeypatch.setattr(gemm, "_FAST", {})
    monkeypatch.setattr(gemm, "_trial", lambda *_, narrow: seconds)
    monkeypatch.setattr(gemm, "_FASTEST", {})  # which the next line would decide for good
    monkeypatch.setattr(gemm, "trial_seconds", lambda *_: 1.0)
    assert gemm.native_is_fast(768, narrow=narrow) is chosen


@pytest.mark.usefixtures("compiled")
def test_products_stay_float32_where_nothing_multiplies_bfloat16(monkeypatch):
    monkeypatch.setattr(native_tiles, "multiplies_bfloat16", lambda: False)
    inputs = Inputs("bfloat16 products", (20, 600, 50), "sphere", -3.0, torch.float32)
    loss = run(inputs)
    for pair in zip(gradients_of(loss, inputs.leaves), inputs.dense_gradients(), strict=True):
        assert_near(*pair, 1e-5)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_is_nothing_to_them(dtype):
    torch.set_default_dtype(dtype)
    try:
        assert gemm._trial(512, narrow=False) > 0
        assert gemm._trial(512, narrow=True) > 0
        inputs = Inputs("plain", (20, 600, 5), "euclidean", -3.0, torch.float32)
        loss = run(inputs)
        expected = inputs.dense()[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert_near(loss, expected, 1e-5)
