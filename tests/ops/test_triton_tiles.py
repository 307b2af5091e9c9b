"""The row-wise stage as Triton kernels: in the interpreter against float64, and compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harmonic_sft.models import AffineLogits, build_head
from harmonic_sft.ops import chunked_loss, engine, geometry
from tests.ops.baselines import harmonic_float64
from tests.ops.fused import with_metrics_of

pytest.importorskip("triton")
triton_tiles = pytest.importorskip("harmonic_sft.ops.triton_tiles")
interpreter = pytest.importorskip("triton.runtime.interpreter")
N, V, D = 21, 70, 20  # rows of two blocks, classes of three
KINDS = [("euclidean", -14.0), ("sphere", -7.3), ("linear", -1.0)]
SETTINGS = {
    "plain": {},
    "all": {
        "class_bias": torch.linspace(-1, 1, V),
        "label_smoothing": 0.1,
        "token_weights": torch.linspace(0, 2, N),
        "z_loss": 1e-2,
    },
    "recompute": {"gradients": "recompute", "label_smoothing": 0.1},
    "a class ruled out": {
        "class_bias": torch.zeros(V).index_fill(0, torch.tensor([3]), -torch.inf)
    },
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    knobs = pytest.importorskip("triton.knobs")
    if not knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET was not set before the first import of triton")
    convert = interpreter._convert_float

    def to_nearest(values, source, target, mode):
        """The interpreter of triton 3.7 cuts digits off; a GPU rounds (cvt.rn.bf16)."""
        if not (source.is_fp32() and target.is_bf16()):
            return convert(values, source, target, mode)
        return torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", to_nearest)


def make_inputs(case="random", gap=1e-3):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(N, D, generator=generator)
    prototypes = torch.randn(V, D, generator=generator)
    labels = torch.randint(V, (N,), generator=generator)
    labels[3:5] = 4  # of a few tokens that are ruled out in no case
    labels[labels == 3] = 4
    if case == "about a mean":
        prototypes += 20 * torch.randn(D, generator=generator)
        states = prototypes[labels] + states
    if case == "near wrong ones":
        states = prototypes[(labels + 1) % V] + gap * states
    return states, prototypes, labels


def run(kind, h_exp, settings, inputs, impl="triton", dtype=torch.float32, prototype_dtype=None):
    states, prototypes, labels = inputs
    states = states.to(dtype).requires_grad_()
    prototypes = prototypes.to(prototype_dtype or dtype).requires_grad_()
    cast = {k: v.to(dtype) if isinstance(v, torch.Tensor) else v for k, v in settings.items()}
    bias = cast.get("class_bias")
    leaves = [states, prototypes] + ([] if bias is None else [bias.requires_grad_()])
    tensors = states, prototypes, labels
    loss, metrics = with_metrics_of(kind, *tensors, h_exp=h_exp, impl=impl, **cast)
    return [loss, *torch.autograd.grad(loss.sum(), leaves), *metrics]


class Recorder:
    """Stands for a kernel; keeps its grids and runs nothing."""

    def __init__(self, grids):
        self.grids = grids

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *_, **__: None


def check(actual, expected, tolerance):
    for found, wanted in zip(actual, expected, strict=True):
        scale = max(wanted.abs().max().item(), 1e-3)
        torch.testing.assert_close(
            found.double(), wanted.double(), rtol=tolerance, atol=tolerance * scale
        )


@pytest.mark.parametrize(
    ("kind", "h_exp", "name"),
    [
        *((kind, h_exp, "all") for kind, h_exp in KINDS),
        ("euclidean", -14.0, "recompute"),
        ("linear", -1.0, "a class ruled out"),
    ],
)
def test_the_kernels_agree_with_the_definition(kind, h_exp, name):
    inputs, settings = make_inputs(), SETTINGS[name]
    expected = run(kind, h_exp, settings, inputs, "reference", torch.float64)
    check(run(kind, h_exp, settings, inputs), expected, 1e-5)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("about a mean", "euclidean"),
        ("near wrong ones", "euclidean"),
        ("near wrong ones", "sphere"),
    ],
)
def test_distances_keep_their_digits(kind, case):
    inputs = make_inputs(case, gap=1e-1 if kind == "sphere" else 1e-3)
    loss, *gradients = run(kind, -14.0, {}, inputs)[:3]
    expected = harmonic_float64(*inputs, -14.0, kind == "sphere")
    check([loss], expected[:1], 1e-5)
    for found, wanted in zip(gradients, expected[1:], strict=True):
        rows = wanted.norm(dim=1)
        counted = rows > 1e-30  # of the others, the gradient is below float32
        errors = (found - wanted).norm(dim=1)[counted] / rows[counted]
        assert errors.median() < 1e-5


@pytest.mark.parametrize("in_blocks", [False, True])
def test_prototypes_in_two_terms_have_their_norms(monkeypatch, in_blocks):
    """The kernel that splits them writes these, also of one without a direction."""
    if in_blocks:
        monkeypatch.setattr(triton_tiles, "TERM_BYTES", 0)
    states, prototypes, labels = make_inputs()
    states[1], prototypes[2] = 0, 0
    labels[6:8] = 2
    given = states.bfloat16(), 3 * prototypes, labels
    types = {"dtype": torch.bfloat16, "prototype_dtype": torch.float32}
    found = run("sphere", -7.3, {}, given, **types)[:3]
    expected = run("sphere", -7.3, {}, given, "reference", torch.float64)[:3]
    check(found[:1], expected[:1], 1e-5)
    check(found[1:], expected[1:], 2e-2)  # of weights and states in 16 bits


def test_without_a_token_no_gradient_is_left_unwritten(monkeypatch):
    monkeypatch.setattr(
        triton_tiles, "TERM_BYTES", 0
    )  # split with the first chunk, if there is one
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    states, prototypes, labels = make_inputs()
    given = states[:0].bfloat16(), prototypes, labels[:0]
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    try:
        types = {"dtype": torch.bfloat16, "prototype_dtype": torch.float32}
        gradient = run("sphere", -7.3, {}, given, **types)[2]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(gradient, torch.zeros(V, D))


def many_near():
    states, _, labels = make_inputs()
    generator = torch.Generator().manual_seed(1)
    prototypes = torch.randn(11 * 32, D, generator=generator)
    for tile in range(10):  # more tiles than pairs of a row, and the closest stand first
        steps = torch.randn(8, D, generator=generator)
        prototypes[32 * tile : 32 * tile + 8] = states[:8] + 0.01 * (1 + tile) * steps
    return states[:8], prototypes, 10 * 32 + labels[:8] % 32


def copies():
    """Of one prototype, one in each tile."""
    states, _, _ = make_inputs()
    generator = torch.Generator().manual_seed(1)
    prototypes = torch.randn(7 * 32, D, generator=generator)
    prototypes[5::32] = states[0] + 0.1 * torch.randn(D, generator=generator)
    return states[:1], prototypes, torch.tensor([100])


def two_near():
    states, prototypes, _ = make_inputs()
    generator = torch.Generator().manual_seed(1)
    for column in (5, 9):  # far nearer than rounding leaves to expanded distances
        prototypes[column] = states[0] * (1 + 2e-4 * torch.randn(D, generator=generator))
    return states[:1], prototypes, torch.tensor([60])


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (many_near, "euclidean"),
        (many_near, "sphere"),
        (copies, "sphere"),
        (two_near, "euclidean"),
    ],
)
def test_of_near_prototypes_the_closest_count(make, kind):
    inputs = make()
    expected = harmonic_float64(*inputs, -14.0, kind == "sphere")
    check(run(kind, -14.0, {}, inputs)[:3], expected, 1e-3)


@pytest.mark.parametrize(
    ("kind", "h_exp", "prototype_dtype"),
    [
        *((kind, h_exp, torch.float32) for kind, h_exp in KINDS),
        ("sphere", -7.3, torch.bfloat16),
    ],
)
def test_states_of_16_bits_are_not_rounded_again(kind, h_exp, prototype_dtype):
    states, prototypes, labels = make_inputs()
    inputs = states.bfloat16(), prototypes.to(prototype_dtype), labels
    found = run(kind, h_exp, {}, inputs, "triton", torch.bfloat16, prototype_dtype)
    expected = run(kind, h_exp, {}, inputs, "reference", torch.float64)
    check(found[:1], expected[:1], 2e-5)  # of what the rounded states say
    check(found[3:6], expected[3:6], 1e-4)
    for gradient, wanted in zip(found[1:3], expected[1:3], strict=True):
        assert (gradient - wanted).norm() < 2**-6 * wanted.norm()


@pytest.mark.parametrize(("case", "name"), [("far", "plain"), ("about a mean", "all")])
def test_rounded_coefficients_are_multiplied_by_no_distance(case, name, monkeypatch):
    """Of states far from all prototypes, and of prototypes far from the origin."""
    monkeypatch.setattr(geometry, "DOMINANT", 2.0)  # as on a GPU, where no mean is subtracted
    _, prototypes, labels = make_inputs(case)
    states = (400 if case == "far" else 1) * make_inputs()[0].bfloat16()
    inputs, types = (states, prototypes, labels), (torch.bfloat16, torch.float32)
    found = run("euclidean", -14.0, SETTINGS[name], inputs, "triton", *types)[1]
    wanted = run("euclidean", -14.0, SETTINGS[name], inputs, "reference", torch.float64)[1]
    assert (found - wanted).norm() < 2**-7 * wanted.norm()


@pytest.mark.parametrize(
    ("inner", "dtype"),
    [("cosine", torch.float32), ("dist", torch.bfloat16)],
)
def test_the_kernels_serve_the_slices_of_a_mixture(inner, dtype):
    torch.manual_seed(0)
    settings = {"name": "multi_head", "num_heads": 2, "inner": {"name": inner}}
    head = build_head(settings, hidden_size=D, vocab_size=V)
    states, _, labels = make_inputs()
    found = []
    for impl in ("triton", "chunked"):
        leaf = states.to(dtype).requires_grad_()
        loss = chunked_loss(head.lazy_logits(leaf), labels, impl=impl).loss
        found.append([loss, *torch.autograd.grad(loss.sum(), [leaf, head.weight])])
    check(*found, 1e-4 if dtype == torch.float32 else 2**-6)


@pytest.mark.parametrize(
    ("kind", "h_exp", "dtypes"),
    [
        ("euclidean", -14.0, (torch.bfloat16, torch.float32)),
        ("sphere", -7.3, (torch.bfloat16, torch.bfloat16)),
        ("linear", -1.0, (torch.float32, torch.float32)),
    ],
)
def test_blocks_of_classes_change_no_loss(kind, h_exp, dtypes, monkeypatch):
    inputs = make_inputs()
    settings = SETTINGS["all"]
    rounded = (inputs[0].to(dtypes[0]), inputs[1].to(dtypes[1]), inputs[2])
    expected = run(kind, h_exp, settings, rounded, "reference", torch.float64)
    # One tile of scores, and too many prototypes to be converted once for all chunks.
    monkeypatch.setattr(triton_tiles, "SCORE_BYTES", 4 * N * 40)
    monkeypatch.setattr(triton_tiles, "TERM_BYTES", 4 * D * 40)
    monkeypatch.setattr(engine, "MIN_ROWS", 1)
    monkeypatch.setattr(engine, "KEPT_BYTES", 4 * V * 10)
    parts = run(kind, h_exp, settings, inputs, "triton", *dtypes)
    tolerance = 1e-5 if dtypes[0] == torch.float32 else 2**-6
    for found, wanted in zip(parts, expected, strict=True):
        assert (found.double() - wanted.double()).norm() <= tolerance * wanted.double().norm()


def test_other_numbers_of_rows_compile_no_other_kernels(monkeypatch):
    states, prototypes, labels = make_inputs()
    monkeypatch.setattr(triton_tiles, "SCORE_BYTES", 4 * N * 40)
    plans, make_plan, sizes = set(), triton_tiles.TritonTiles._plan, set()

    def record(tiles, program, chunk):
        sizes.add(tiles._block_size(len(chunk.placed)))
        plans.add(make_plan(tiles, program, chunk))
        return make_plan(tiles, program, chunk)

    monkeypatch.setattr(triton_tiles.TritonTiles, "_plan", record)
    for count in (N, N // 2):
        run("sphere", -7.3, {}, (states[:count], prototypes, labels[:count]))
    assert len(sizes) == 2  # the blocks differ, and what the kernels are compiled for does not
    assert len(plans) == 1


def columns_first(x):
    return x.T.contiguous().T


def wide(x):
    return torch.cat([x, x], 1)[:, :D]


@pytest.mark.parametrize(
    ("kind", "h_exp", "dtype", "of_states", "of_prototypes"),
    [
        ("euclidean", -14.0, torch.float32, columns_first, wide),
        ("sphere", -7.3, torch.bfloat16, wide, columns_first),
    ],
)
def test_columns_first_and_strides_change_nothing(kind, h_exp, dtype, of_states, of_prototypes):
    states, prototypes, labels = (x if x.dim() == 1 else x.to(dtype) for x in make_inputs())
    expected = run(kind, h_exp, {}, (states, prototypes, labels), dtype=dtype)
    strided = of_states(states), of_prototypes(prototypes), labels.repeat_interleave(2)[::2]
    check(run(kind, h_exp, {}, strided, dtype=dtype), expected, 1e-5)


def test_blocks_of_prototypes_start_at_aligned_classes(monkeypatch):
    starts, make = set(), triton_tiles.TritonTiles._vectors
    monkeypatch.setattr(
        triton_tiles.TritonTiles,
        "_vectors",
        lambda self, block: starts.add(block.start) or make(self, block),
    )
    monkeypatch.setattr(triton_tiles, "TERM_BYTES", 2 * D * 69)
    run("euclidean", -14.0, {}, make_inputs(), "triton", torch.bfloat16, torch.float32)
    assert starts == {0, 64}


def test_no_grid_is_too_large_for_a_gpu(monkeypatch):
    grids, many = [], 2**16
    for name in ("statistics_kernel", "coefficient_kernel"):
        monkeypatch.setattr(triton_tiles, name, Recorder(grids))
    monkeypatch.setattr(triton_tiles, "COEFFICIENTS", (1, 1, 1))
    states = torch.zeros(2, 1)
    run("linear", -1.0, {}, (states, torch.zeros(many, 1), torch.zeros(2, dtype=torch.long)))
    assert grids[-1] == (2 * many,)
    assert all(size < 2**16 for grid in grids for size in grid[1:])


def test_a_second_loss_has_no_kernels():
    states, prototypes, labels = make_inputs()
    logits, second = AffineLogits(states, prototypes), (prototypes, None, None)
    with pytest.raises(
        ValueError, match=r"^impl: expected auto or chunked for transport, got triton$"
    ):
        chunked_loss(logits, labels, stage="transport", second=second, impl="triton")


def test_a_token_that_is_not_a_number_spoils_itself_alone():
    states, prototypes, labels = make_inputs()
    states[2] = torch.nan
    loss, gradient = run("sphere", -7.3, {}, (states, prototypes, labels))[:2]
    others = torch.arange(N) != 2
    assert loss[2].isnan()
    assert loss[others].isfinite().all()
    assert gradient[others].isfinite().all()


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu(tmp_path):
    """Without one: with the types the launch functions really pass, and nothing spills."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).parents[2] / "scripts" / "kernel_resources.py"
    command = [sys.executable, "-W", "error", script, "--targets", "89", "--blocks", "4x1024x4"]
    path = tmp_path / "found.json"
    subprocess.run([*command, "--json", path], env=env, check=True)
    rows = json.loads(path.read_text())["rows"]
    names = ("coefficient", "complete", "pull", "push", "score", "split", "statistics")
    assert [row["kernel"] for row in rows] == [f"{name}_kernel" for name in names]
    assert all(row["spill stores"] == row["spill loads"] == 0 for row in rows)
    assert all(row["shared bytes"] <= 99 * 1024 for row in rows)
