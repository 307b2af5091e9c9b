"""The Triton kernels against dense float64, in Triton's interpreter on the CPU."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
triton = pytest.importorskip("triton")

from harmonic_sft.ops import triton_tiles as tiles  # noqa: E402
from harmonic_sft.ops.triton_kernels import RowTerms  # noqa: E402

WIDTH = tiles.TILE_WIDTH
INF = float("inf")
EPS = 1e-3
HEADS = ["euclid", "sphere", "linear"]
SHAPES = [(1, 2, 3), (5, 7, 20), (33, 130, 40)]


def test_the_interpreter_runs_these_kernels():
    reason = "TRITON_INTERPRET: expected to be set before the first import of triton (conftest.py)"
    assert not hasattr(triton.language.sum, "cache_key"), reason
    assert tiles.INTERPRETED, reason


def make_inputs(head, shape, *, h_exp=-14.0, bias=False, dtype=torch.float32, dots=False, seed=0):
    num_rows, num_classes, hidden_size = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, hidden_size, generator=generator).to(dtype)
    w = torch.randn(num_classes, hidden_size, generator=generator).to(dtype)
    if head == "sphere":
        x = torch.nn.functional.normalize(x.float(), dim=1).to(dtype)
    x64, w64 = x.double(), w.double()
    geometry = None
    if head == "euclid":
        column = (w64.square().sum(1) + EPS).float()
        geometry = tiles.TileGeometry(x64.square().sum(1).float(), column, -2.0)
    if head == "sphere":
        scale = (-2 / w64.norm(dim=1)).float()
        row = x64.square().sum(1).float()
        geometry = tiles.TileGeometry(row, torch.full((num_classes,), 1 + EPS), scale)
    class_bias = torch.randn(num_classes, generator=generator) if bias else None
    ready = (x64 @ w64.T).float() if dots else None
    return tiles.TileInputs(x, w, geometry, h_exp, class_bias, ready)


def make_labels(num_rows, num_classes, num_labels, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, num_classes, (num_rows, num_labels), generator=generator)


def dense(inputs, excluded):
    """Logits z (-inf = excluded) and distances d (inf) in float64."""
    x, w, geometry = inputs.hidden_states.double(), inputs.prototypes.double(), inputs.geometry
    dots = x @ w.T
    if geometry is None:
        logits, distances = dots, torch.ones_like(dots)
    else:
        scale = torch.as_tensor(geometry.scale).double()
        distances = geometry.row.double()[:, None] + geometry.column.double() + scale * dots
        logits = float(inputs.h_exp) * distances.log()
    if inputs.class_bias is not None:
        logits = logits + inputs.class_bias.double()
    for row, columns in enumerate(excluded.tolist()):
        for column in columns:
            if column >= 0:
                logits[row, column] = -INF
                distances[row, column] = INF
    return logits, distances


def expected_scores(inputs, excluded):
    """The fields of Scores by their definitions."""
    logits, distances = dense(inputs, excluded)
    columns = [[] for _ in range(7)]
    weights = []
    for start in range(0, logits.shape[1], WIDTH):
        z, d = logits[:, start : start + WIDTH], distances[:, start : start + WIDTH]
        scale = z.max(1).values
        smallest = d.min(1).values.nan_to_num(posinf=1.0)
        terms = (z - scale.nan_to_num(neginf=0.0)[:, None]).exp()
        weight = terms if inputs.geometry is None else terms * smallest[:, None] / d
        weights.append(weight)
        kept = z > -INF
        log_d, z = d.log().where(kept, 0), z.where(kept, 0)
        sums = [(terms * z).sum(1), (terms * log_d).sum(1), z.sum(1), log_d.sum(1)]
        for column, value in zip(columns, [scale, terms.sum(1), smallest, *sums], strict=True):
            column.append(value)
    scale, total, smallest, *moments = (torch.stack(column) for column in columns)
    if inputs.geometry is None:
        smallest = torch.ones_like(smallest)
    return torch.cat(weights, 1), scale, total, smallest, torch.stack(moments)


def close(actual, expected, tolerance=1e-5, scale=1.0):
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=tolerance, atol=tolerance * scale
    )


def check_scores(inputs, labels, store=torch.float32, excluded=None):
    result = tiles.scores(inputs, labels, store=store, moments=True, argmax=True)
    excluded = labels if excluded is None else excluded
    weights, scale, total, smallest, moments = expected_scores(inputs, excluded)
    # A logit's own rounding: h_exp times that of a distance.
    tolerance = 1e-5 if inputs.geometry is None else 1e-6 * max(10, abs(float(inputs.h_exp)))
    close(result.log_scale, scale, tolerance)
    close(result.sums, total, tolerance)
    close(result.min_distance, smallest)
    coarse = tolerance if store == torch.float32 else 2e-3
    close(result.weights, weights, coarse)
    for start in range(0, weights.shape[1], WIDTH):
        stored = result.weights[:, start : start + WIDTH].double().sum(1)
        close(result.weight_sums[start // WIDTH], stored)
    close(result.moments, moments, 2e-5, scale=10.0)
    logits, _ = dense(inputs, excluded)
    for tile, best in enumerate(result.argmax):
        rows = (scale[tile] > -INF).nonzero()[:, 0]
        close(logits[rows, best[rows]], scale[tile][rows])
    return result


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("h_exp", [-14.0, -1.0, -7.3, torch.tensor(-0.5)], ids=str)
@pytest.mark.parametrize("head", HEADS)
def test_scores_match_their_definitions(head, h_exp, bias, shape):
    inputs = make_inputs(head, shape, h_exp=h_exp, bias=bias)
    check_scores(inputs, make_labels(*shape[:2], num_labels=1))


@pytest.mark.parametrize("dots", [False, True])
@pytest.mark.parametrize("store", [torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head", HEADS)
def test_scores_take_every_type_and_ready_dots(head, dtype, store, dots):
    inputs = make_inputs(head, (33, 70, 40), dtype=dtype, dots=dots)
    check_scores(inputs, make_labels(33, 70, num_labels=3), store)


def test_mixed_types_are_multiplied_in_float32():
    inputs = make_inputs("euclid", (5, 40, 20), dtype=torch.float16)
    check_scores(replace(inputs, prototypes=inputs.prototypes.float()), make_labels(5, 40, 1))


def test_bfloat16_weights_are_summed_as_stored():
    inputs = make_inputs("euclid", (5, 40, 20))
    result = tiles.scores(inputs, make_labels(5, 40, 1), store=torch.bfloat16)
    close(result.weight_sums[0], result.weights[:, :WIDTH].double().sum(1))
    # The interpreter truncates, where a GPU rounds.
    close(result.weights, expected_scores(inputs, make_labels(5, 40, 1))[0], 2**-7)
    assert result.moments is None
    assert result.argmax is None
    assert tiles.scores(inputs, make_labels(5, 40, 1), store=None).weights is None


def test_a_number_and_a_tensor_give_the_same_power():
    inputs = make_inputs("sphere", (5, 40, 20), h_exp=-1023.0)
    labels = make_labels(5, 40, 1)
    whole = tiles.scores(inputs, labels, store=torch.float32)
    loaded = tiles.scores(replace(inputs, h_exp=torch.tensor(-1023.0)), labels, store=torch.float32)
    close(whole.sums, loaded.sums, 1e-4)
    close(whole.weights, loaded.weights, 1e-4)


@pytest.mark.parametrize("dots", [False, True])
@pytest.mark.parametrize("h_exp", [-14.0, torch.tensor(-7.3)], ids=str)
def test_one_near_pair_per_tile_is_set_aside(h_exp, dots):
    inputs = make_inputs("euclid", (5, 130, 20), h_exp=h_exp)
    planted = {1: [40], 3: [0, 129]}  # row -> near classes, in different tiles
    x, w = inputs.hidden_states, inputs.prototypes
    for row, columns in planted.items():
        w[columns] = x[row] + 1e-3
    row, column = x.square().sum(1), w.square().sum(1) + EPS
    near_row = 2**-7 * row
    geometry = tiles.TileGeometry(row, column, -2.0, near_row)
    inputs = replace(inputs, geometry=geometry, dots=x @ w.T if dots else None)
    labels = make_labels(5, 130, 1)
    expected = torch.full((tiles.num_tiles(130), 5), -1, dtype=torch.int32)
    for row, columns in planted.items():
        for column in columns:
            expected[column // WIDTH, row] = column
    excluded = torch.cat([labels, expected.T], 1)
    result = check_scores(inputs, labels, excluded=excluded)
    assert torch.equal(result.near_columns, expected)
    rows = make_row_terms(inputs, excluded, result.near_columns)
    check_coefficients(inputs, labels, rows, excluded=excluded)


def test_a_label_that_is_near_is_not_reported_twice():
    inputs = make_inputs("euclid", (5, 40, 20))
    inputs.prototypes[7] = inputs.hidden_states[2]
    column = inputs.prototypes.square().sum(1) + EPS
    near_row = torch.full((5,), 0.1)
    geometry = replace(inputs.geometry, column=column, near_row=near_row)
    labels = torch.full((5, 1), 7)
    result = tiles.scores(replace(inputs, geometry=geometry), labels, store=None)
    assert (result.near_columns == -1).all()


def test_a_second_near_pair_of_a_tile_stays_finite():
    inputs = make_inputs("euclid", (5, 40, 20))
    inputs.prototypes[[7, 8, 9]] = inputs.hidden_states[2]
    column = inputs.prototypes.square().sum(1) - 1e-3  # as if rounding made distances negative
    geometry = replace(inputs.geometry, column=column, near_row=torch.full((5,), 0.1))
    result = tiles.scores(
        replace(inputs, geometry=geometry), make_labels(5, 40, 1), store=torch.float32
    )
    assert result.weights.isfinite().all()
    assert result.sums.isfinite().all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("h_exp", [-14.0, -7.3])
@pytest.mark.parametrize("head", HEADS)
def test_a_row_without_classes_in_a_tile_has_no_mass(head, h_exp, bias):
    inputs = make_inputs(head, (5, WIDTH + 2, 20), h_exp=h_exp, bias=bias)
    labels = torch.full((5, 2), -1)
    labels[3] = torch.tensor([WIDTH, WIDTH + 1])
    result = check_scores(inputs, labels)
    assert result.log_scale[1, 3] == -INF
    assert result.sums[1, 3] == 0
    assert result.weight_sums[1, 3] == 0
    assert (result.weights[3, WIDTH:] == 0).all()


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize("h_exp", [-14.0, -7.3])
@pytest.mark.parametrize("head", HEADS)
def test_a_row_of_nan_spoils_no_other(head, h_exp, near):
    inputs = make_inputs(head, (5, 40, 20), h_exp=h_exp)
    inputs.hidden_states[2] = torch.nan
    if inputs.geometry is not None:
        row, near_row = inputs.geometry.row.clone(), torch.full((5,), 1e-3) if near else None
        row[2] = torch.nan
        inputs = replace(inputs, geometry=replace(inputs.geometry, row=row, near_row=near_row))
    result = tiles.scores(inputs, make_labels(5, 40, 1), store=torch.float32, moments=True)
    others = torch.tensor([0, 1, 3, 4])
    for field in (result.sums, result.log_scale, result.weight_sums, *result.moments[:1]):
        assert field[:, 2].isnan().all()
        assert field[:, others].isfinite().all()
    assert result.weights[2].isnan().any()
    assert result.weights[others].isfinite().all()


def make_row_terms(inputs, excluded, near_columns=None):
    logits, _ = dense(inputs, excluded)
    log_normalizer = logits.logsumexp(1).nan_to_num(neginf=0.0).float()
    mass = torch.linspace(0.5, 2, len(logits))
    return RowTerms(log_normalizer, mass, mass * 1e-3, near_columns)


def check_coefficients(inputs, labels, rows, dtype=torch.float32, excluded=None):
    excluded = labels if excluded is None else excluded
    logits, distances = dense(inputs, excluded)
    terms = [t.double()[:, None] for t in (rows.mass, rows.log_normalizer, rows.smooth)]
    gradients = terms[0] * (logits - terms[1]).exp() - terms[2]
    gradients = gradients.where(logits > -INF, 0)
    expected = gradients
    if inputs.geometry is not None:
        expected = gradients * float(inputs.h_exp) / distances
    actual, row_sums, class_sums = tiles.coefficients(
        inputs, labels, rows=rows, dtype=dtype, class_sums=True
    )
    close(actual, expected, 3e-5 if dtype == torch.float32 else 2**-7)
    for tile, sums in enumerate(row_sums):
        close(sums, actual[:, tile * WIDTH : (tile + 1) * WIDTH].double().sum(1))
    close(class_sums, gradients.sum(0), 3e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("h_exp", [-14.0, torch.tensor(-0.5)], ids=str)
@pytest.mark.parametrize("head", HEADS)
def test_coefficients_match_their_definition(head, h_exp, bias, shape):
    inputs = make_inputs(head, shape, h_exp=h_exp, bias=bias)
    labels = make_labels(*shape[:2], num_labels=1)
    check_coefficients(inputs, labels, make_row_terms(inputs, labels))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", HEADS)
def test_coefficients_take_ready_dots(head, dtype):
    inputs = make_inputs(head, (33, 70, 40), dots=True)
    labels = make_labels(33, 70, num_labels=3)
    check_coefficients(inputs, labels, make_row_terms(inputs, labels), dtype)


def test_coefficients_are_not_stored_in_float16():
    inputs, labels = make_inputs("linear", (5, 7, 3)), make_labels(5, 7, 1)
    with pytest.raises(AssertionError, match="dtype: expected float32 or bfloat16"):
        tiles.coefficients(inputs, labels, rows=make_row_terms(inputs, labels), dtype=torch.float16)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("store", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradient_sums_match_and_accumulate(dtype, store, scaled, shape):
    inputs = make_inputs("euclid", shape, dtype=dtype)
    x, w = inputs.hidden_states, inputs.prototypes
    weights = tiles.scores(inputs, make_labels(*shape[:2], 1), store=store).weights
    generator = torch.Generator().manual_seed(2)
    factors = gain = None
    scale = torch.ones(1, dtype=torch.float64)
    if scaled:
        # From 1 to 1e-12, so that float16 alone would lose most rows.
        factors = -(torch.rand(tiles.num_tiles(shape[1]), shape[0], generator=generator) ** 12)
        scale = factors.double().repeat_interleave(WIDTH, 0)[: shape[1]].T
        gain = torch.rand(shape[1], generator=generator)
    a = weights.double() * scale
    scaled_w = w.double() if gain is None else w.double() * gain.double()[:, None]
    outs = [torch.full(s, torch.nan) for s in (x.shape, w.shape, shape[1:2])]
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2**-6}[store]
    for repeats in (1, 2):
        tiles.gradient_sums(
            weights, factors, x, w, gain=gain, out=tiles.GradientSums(*outs), accumulate=repeats > 1
        )
        for out, expected in zip(outs, (a @ scaled_w, a.T @ x.double(), a.sum(0)), strict=True):
            times = 1 if out is outs[0] else repeats
            close(out, times * expected, tolerance, float(expected.abs().max()))


def test_small_factors_keep_their_digits_in_float16():
    weights, x = torch.ones(2, 3, dtype=torch.float16), torch.ones(2, 4)
    factors = torch.tensor([[1.0, 1e-7]])
    weights[0] = 0  # the row with the large factor does not touch these classes
    out = tiles.GradientSums(prototypes=torch.empty(3, 4))
    tiles.gradient_sums(weights, factors, x, torch.ones(3, 4), gain=None, out=out, accumulate=False)
    close(out.prototypes / 1e-7, torch.ones(3, 4), 1e-3)


def test_two_runs_are_equal_to_the_last_bit():
    inputs, labels = make_inputs("sphere", (33, 130, 40), h_exp=-7.3), make_labels(33, 130, 1)
    runs = []
    for _ in range(2):
        scores = tiles.scores(inputs, labels, store=torch.float16)
        out = tiles.GradientSums(torch.empty(33, 40), torch.empty(130, 40), torch.empty(130))
        x, w, factors = inputs.hidden_states, inputs.prototypes, scores.sums
        tiles.gradient_sums(scores.weights, factors, x, w, gain=None, out=out, accumulate=False)
        runs.append([scores.weights, scores.sums, out.hidden, out.prototypes, out.columns])
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Driver:
    get_current_device = get_current_stream = staticmethod(lambda *_: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

def compile_only(self, *args, run=JITFunction.run, **options):
    kernel = run(self, *args, **options | {"warmup": True})
    assert kernel.metadata.shared <= 99 * 1024, (self.fn.__name__, kernel.metadata.shared)
    names.append(self.fn.__name__)

names = []
driver.set_active(Driver())
JITFunction.run = compile_only
from harmonic_sft.ops import triton_tiles as tiles
from harmonic_sft.ops.triton_kernels import RowTerms

row, column = torch.empty(70), torch.empty(1001)
labels, factors = torch.zeros(70, 1, dtype=torch.long), torch.empty(tiles.num_tiles(1001), 70)
out = tiles.GradientSums(torch.empty(70, 256), torch.empty(1001, 256), column)
cases = [("euclid", torch.float32), ("sphere", torch.bfloat16), ("linear", torch.float16)]
for head, dtype in cases:
    x, w = torch.empty(70, 256, dtype=dtype), torch.empty(1001, 256, dtype=dtype)
    scale = {"euclid": -2.0, "sphere": column, "linear": 0.0}[head]
    geometry = None if head == "linear" else tiles.TileGeometry(row, column, scale, row)
    for h_exp in (-14.0, torch.tensor(-7.3)):
        inputs = tiles.TileInputs(x, w, geometry, h_exp, column if head == "linear" else None)
        scores = tiles.scores(inputs, labels, store=dtype, moments=True, argmax=True)
    rows = RowTerms(row, row, row, scores.near_columns)
    tiles.coefficients(inputs, labels, rows=rows, dtype=torch.bfloat16, class_sums=True)
    tiles.gradient_sums(scores.weights, factors, x, w, gain=column, out=out, accumulate=True)
inputs = tiles.TileInputs(x, w, None, dots=torch.empty(70, 1001))
tiles.scores(inputs, labels, store=torch.float32)
tiles.coefficients(inputs, labels, rows=rows, dtype=torch.float32)
print(*sorted(set(names)))
"""


def test_every_kernel_compiles_for_a_gpu(tmp_path):
    """Without one: to PTX, with the shapes and types the launch functions really pass."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-W", "error", "-c", COMPILE]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    kernels = ["coefficient", "hidden_gradient", "prototype_gradient", "score"]
    assert run.stdout.split() == [f"{name}_kernel" for name in kernels]
