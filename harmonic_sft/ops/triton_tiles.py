"""The Triton kernels as functions of tensors: tile scores, coefficients, gradient sums."""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs

from harmonic_sft.ops.triton_kernels import (
    Pairs,
    Plan,
    RowTerms,
    ScoreOutputs,
    Source,
    coefficient_kernel,
    hidden_gradient_kernel,
    prototype_gradient_kernel,
    score_kernel,
)

INTERPRETED = bool(knobs.runtime.interpret)
TILE_WIDTH = 32 if INTERPRETED else 128  # classes per tile; phase 2 counts tiles with it too
# Bytes per operand -> (block_t, block_v, block_d, num_warps, num_stages). All fit in the 99 KiB of
# shared memory of a consumer GPU. In phase 2 the bytes are those of weights and matrix.
SCORE_BLOCKS = {2: (128, 128, 64, 8, 3), 4: (128, 128, 32, 8, 3)}
READY_BLOCKS = (32, 128, 16, 4, 1)  # dot products given
HIDDEN_BLOCKS = {
    (2, 2): (128, 64, 128, 8, 3),
    (2, 4): (128, 64, 64, 8, 3),
    (4, 2): (128, 32, 64, 8, 3),
    (4, 4): (128, 32, 64, 8, 3),
}
PROTOTYPE_BLOCKS = {
    (2, 2): (64, 128, 128, 8, 3),
    (2, 4): (64, 128, 64, 8, 3),
    (4, 2): (32, 128, 64, 8, 3),
    (4, 4): (32, 128, 64, 8, 3),
}
Launch = tuple[Plan, list[int], dict[str, int]]  # what to compile, block sizes, options


@dataclass(frozen=True)
class TileGeometry:
    """Squared distance + eps of a pair: row_i + column_j + scale_j * dots_ij.

    Args:
        row: `[T]` float32.
        column: `[V]` float32, eps included.
        scale: `[V]` float32, or one number.
        near_row: `[T]` float32: the closest pair of a tile that lies below is left out and
            reported, because its digits are lost. None: no such check.
    """

    row: Tensor
    column: Tensor
    scale: Tensor | float
    near_row: Tensor | None = None


@dataclass(frozen=True)
class TileInputs:
    """What the logits of a chunk of rows are made of.

    Args:
        hidden_states: `[T, D]` float32, bfloat16 or float16; prototypes `[V, D]` likewise.
        geometry: None is the linear head, whose logits are dots + bias.
        h_exp: Float32 on the device, or a number, which is not compiled in either; a whole one in
            [-1023, -1] without class_bias saves an exponential and a logarithm per logit.
        class_bias: `[V]` float32.
        dots: `[T, V]` float32, contiguous: products another library computed.
    """

    hidden_states: Tensor
    prototypes: Tensor
    geometry: TileGeometry | None = None
    h_exp: Tensor | float = 1.0
    class_bias: Tensor | None = None
    dots: Tensor | None = None


@dataclass(frozen=True)
class Scores:
    """Phase 1 per (tile, row); float32 `[num_tiles, T]` unless said otherwise.

    A row with nothing left in a tile has log_scale -inf, sums and weights 0.
    """

    weights: Tensor | None  # [T, V]: e ** (z - log_scale) * min_distance / distance
    log_scale: Tensor  # largest logit
    sums: Tensor  # of e ** (z - log_scale)
    weight_sums: Tensor | None  # of weights as stored
    min_distance: Tensor
    near_columns: Tensor | None  # int32, -1 = none
    moments: Tensor | None  # [4, num_tiles, T]: sums of e z, e log d, z, log d
    argmax: Tensor | None  # int64


@dataclass(frozen=True)
class GradientSums:
    """Where phase 2 writes, float32; None = not wanted."""

    hidden: Tensor | None = None  # [T, D]
    prototypes: Tensor | None = None  # [V, D]
    columns: Tensor | None = None  # [V], only with prototypes


def num_tiles(num_classes: int) -> int:
    """Return how many tiles the classes make."""
    return _ceil(num_classes, TILE_WIDTH)


def scores(
    inputs: TileInputs,
    labels: Tensor,
    *,
    store: torch.dtype | None,
    moments: bool = False,
    argmax: bool = False,
) -> Scores:
    """Return the tile scores of a chunk (phase 1).

    Args:
        inputs: The chunk.
        labels: `[T, K]` int64: pairs to leave out, -1 = none.
        store: Type of the weights; None stores none.
        moments: Whether to compute them.
        argmax: Whether to find each tile's best class.
    """
    num_rows, num_classes = len(inputs.hidden_states), len(inputs.prototypes)
    geometry, device = inputs.geometry, inputs.hidden_states.device
    shape = (num_tiles(num_classes), num_rows)
    near = geometry is not None and geometry.near_row is not None
    result = Scores(
        weights=None if store is None else _padded(num_rows, num_classes, store, device),
        log_scale=torch.empty(shape, device=device),
        sums=torch.empty(shape, device=device),
        weight_sums=None if store is None else torch.empty(shape, device=device),
        min_distance=torch.empty(shape, device=device),
        near_columns=torch.empty(shape, device=device, dtype=torch.int32) if near else None,
        moments=torch.empty((4, *shape), device=device) if moments else None,
        argmax=torch.empty(shape, device=device, dtype=torch.int64) if argmax else None,
    )
    power = _integer_power(inputs)
    plan, blocks, options = _score_plan(inputs, labels, integer=power > 0)
    stride = 0 if result.weights is None else result.weights.stride(0)
    source, pairs, out = _source(inputs), _pairs(inputs, labels), ScoreOutputs(**vars(result))
    grid = (_ceil(num_rows, blocks[0]), shape[0])
    with torch.cuda.device_of(inputs.hidden_states):
        score_kernel[grid](source, pairs, out, stride, power, num_rows, plan, **options)
    return result


def coefficients(
    inputs: TileInputs,
    labels: Tensor,
    *,
    rows: RowTerms,
    dtype: torch.dtype,
    class_sums: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute gradient coefficients a_ij (phase 1b).

    Args:
        inputs: The chunk. Given dots are overwritten if dtype is float32.
        labels: As for scores.
        rows: log_normalizer, mass and smooth, `[T]` float32, and the near_columns of scores.
        dtype: float32 or bfloat16; the coefficients have no common scale that suits float16.
        class_sums: Whether to sum dL/dz over rows, the gradient of class_bias.

    Returns:
        Coefficients `[T, V]`, their sums `[num_tiles, T]` as stored, class sums `[V]` or None.
    """
    num_rows, num_classes = len(inputs.hidden_states), len(inputs.prototypes)
    assert dtype != torch.float16, f"dtype: expected float32 or bfloat16, got {dtype}"
    if inputs.dots is None or dtype != torch.float32:
        weights = _padded(num_rows, num_classes, dtype, inputs.hidden_states.device)
    else:  # a single contiguous row may have any stride
        weights = inputs.dots.flatten().unflatten(0, (num_rows, num_classes))
    row_sums = torch.empty((num_tiles(num_classes), num_rows), device=weights.device)
    plan, blocks, options = _score_plan(inputs, labels, integer=False)
    grid = (_ceil(num_rows, blocks[0]), row_sums.shape[0])
    partial = torch.empty((grid[0], num_classes), device=weights.device) if class_sums else None
    out = (weights, weights.stride(0), row_sums, partial)
    source, pairs = _source(inputs), _pairs(inputs, labels)
    with torch.cuda.device_of(weights):
        coefficient_kernel[grid](source, pairs, rows, *out, num_rows, plan, **options)
    return weights, row_sums, None if partial is None else partial.sum(0)


def gradient_sums(
    weights: Tensor,
    factors: Tensor | None,
    hidden_states: Tensor,
    prototypes: Tensor,
    *,
    gain: Tensor | None,
    out: GradientSums,
    accumulate: bool,
) -> None:
    """Multiply weights with prototypes and with hidden states (phase 2).

    Args:
        weights: `[T, V]`, as scores or coefficients return them: rows may be padded with zeros.
        factors: f, `[num_tiles, T]` float32; None is 1.
        hidden_states: `[T, D]`.
        prototypes: `[V, D]`.
        gain: `[V]` float32, multiplies prototypes; None is 1.
        out: hidden[i] = sum_j f a_ij gain_j w_j is written; prototypes[j] = sum_i f a_ij x_i and
            columns[j] = sum_i f a_ij are written or added.
        accumulate: Whether to add.
    """
    num_rows, num_classes = weights.shape
    assert 0 <= weights.stride(0) - num_classes < 16, "weights: expected rows with little padding"
    tiles = (num_tiles(num_classes), num_rows)
    if factors is None and out.prototypes is not None:
        factors = torch.ones(tiles, device=weights.device)
    assert factors is None or factors.shape == tiles, f"factors: expected {tiles}"
    left = (weights, weights.stride(0), None if factors is None else factors.contiguous())
    if out.hidden is not None:
        sizes = HIDDEN_BLOCKS[weights.element_size(), prototypes.element_size()]
        plan, blocks, options = _plan(weights, prototypes, sizes)
        grid = (_ceil(prototypes.shape[1], blocks[2]), _ceil(num_rows, blocks[0]))
        right = (prototypes.contiguous(), gain, out.hidden)
        with torch.cuda.device_of(weights):
            hidden_gradient_kernel[grid](*left, *right, num_rows, TILE_WIDTH, plan, **options)
    if out.prototypes is not None:
        peaks = torch.linalg.vector_norm(hidden_states, torch.inf, dim=1, dtype=torch.float32)
        sizes = PROTOTYPE_BLOCKS[weights.element_size(), hidden_states.element_size()]
        plan, blocks, options = _plan(weights, prototypes, sizes)
        grid = (_ceil(prototypes.shape[1], blocks[2]), tiles[0])
        right = (hidden_states.contiguous(), peaks, out.prototypes, out.columns)
        with torch.cuda.device_of(weights):
            prototype_gradient_kernel[grid](*left, *right, num_rows, accumulate, plan, **options)


def _ceil(size: int, width: int) -> int:
    return -(-size // width)


def _padded(num_rows: int, num_classes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty `[T, V]` whose rows start at multiples of 16 elements: loads are vectors then."""
    width = _ceil(num_classes, 16) * 16
    return torch.empty((num_rows, width), dtype=dtype, device=device)[:, :num_classes]


def _integer_power(inputs: TileInputs) -> int:
    """-h_exp if the integer path takes it, else 0."""
    h_exp = inputs.h_exp
    if inputs.geometry is None or inputs.class_bias is not None or isinstance(h_exp, Tensor):
        return 0
    return int(-h_exp) if -h_exp % 1 == 0 and 1 <= -h_exp <= 1023 else 0


def _source(inputs: TileInputs) -> Source:
    if inputs.dots is None:
        return Source(inputs.hidden_states.contiguous(), inputs.prototypes.contiguous(), None)
    dots = inputs.dots
    assert dots.is_contiguous(), "dots: expected contiguous rows"
    assert dots.dtype == torch.float32, f"dots: expected float32, got {dots.dtype}"
    return Source(None, None, dots)


def _pairs(inputs: TileInputs, labels: Tensor) -> Pairs:
    geometry, h_exp = inputs.geometry, inputs.h_exp
    power = (h_exp.detach().float(), None) if isinstance(h_exp, Tensor) else (None, float(h_exp))
    rest = (*power, inputs.class_bias, labels.contiguous())
    if geometry is None:
        return Pairs(None, None, None, None, None, *rest)
    scale = geometry.scale
    scales = (scale, None) if isinstance(scale, Tensor) else (None, float(scale))
    return Pairs(geometry.row, geometry.column, *scales, geometry.near_row, *rest)


def _score_plan(inputs: TileInputs, labels: Tensor, *, integer: bool) -> Launch:
    x, w = inputs.hidden_states, inputs.prototypes
    blocks = SCORE_BLOCKS[max(x.element_size(), w.element_size())]
    plan, sizes, options = _plan(x, w, blocks if inputs.dots is None else READY_BLOCKS)
    plan = plan._replace(
        num_labels=tl.constexpr(labels.shape[1]),
        distance=tl.constexpr(inputs.geometry is not None),
        integer=tl.constexpr(integer),
        upcast=tl.constexpr(x.dtype != w.dtype or plan.upcast.value),
    )
    return plan, sizes, options


def _plan(left: Tensor, prototypes: Tensor, blocks: tuple[int, ...]) -> Launch:
    """How to launch a product whose left operand is given."""
    *sizes, num_warps, num_stages = blocks
    if INTERPRETED:
        sizes = [16, sizes[1] * TILE_WIDTH // 128, 16]
    num_classes, hidden_size = prototypes.shape
    # The interpreter multiplies the bit patterns of bfloat16.
    upcast = INTERPRETED and left.dtype == torch.bfloat16
    precision = "ieee" if INTERPRETED or torch.version.hip else "tf32x3"
    fields = (num_classes, hidden_size, 0, False, False, *sizes, upcast, precision)
    # Said aloud, because triton 3.9 warns where the default of a later version will differ.
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    return Plan(*map(tl.constexpr, fields)), sizes, options
