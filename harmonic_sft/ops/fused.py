"""The chunk loop of the fused losses: forward with gradients, forward alone, and recomputation."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from harmonic_sft.ops.chunked import ChunkedTiles
from harmonic_sft.ops.gradients import Gradients, add_pairs, finish_hidden_states
from harmonic_sft.ops.native_tiles import NativeTiles, serve
from harmonic_sft.ops.options import TokenMetrics
from harmonic_sft.ops.request import Request
from harmonic_sft.ops.rows import (
    Rows,
    TileSums,
    exponent_gradients,
    log_normalizer_of,
    logit_totals,
    losses,
    mass_of,
    measure_pairs,
    metrics,
    normalize,
    pair_gradients,
)
from harmonic_sft.ops.workers import Workers, cpu_workers

if TYPE_CHECKING:
    from harmonic_sft.ops.triton_engine import TritonTiles

# A chunk's weights are [chunk, V]: 23 MB at 192 rows of BERT's vocabulary, a quarter of what the
# gradient [V, D] takes that each chunk reads and writes; and no more than 64 MB unless 96 rows
# take more.
STORED_ROWS, STORED_ELEMENTS = 192, 2**24
VECTOR = 16  # tokens: the C tiles pad a chunk to whole vectors, of 16 floats at most
TILE_ROWS = 256  # of chunks that keep no weights
DEVICE_ELEMENTS = 2**27  # of a chunk on a GPU, where small products are slow


class Needs(NamedTuple):
    """Which gradients are wanted."""

    hidden_states: bool = False
    prototypes: bool = False
    class_bias: bool = False
    h_exp: bool = False


@dataclass(frozen=True)
class Outcome:
    """What one pass gives: `[N]` each, gradients in the shape of their inputs; None if not asked.

    Attributes:
        loss: Weighted, in nats.
        log_normalizer: logsumexp of the logits, distances in `Frame.unit`.
        log_probs: `[N, K]`, of the labels.
        metrics: Of every token.
        exponent: dL/dh_exp of each token.
        gradients: Of the sum of the losses.
    """

    loss: Tensor
    log_normalizer: Tensor
    log_probs: Tensor
    metrics: TokenMetrics | None
    exponent: Tensor | None
    gradients: Gradients


def forward(request: Request, needs: Needs, *, with_metrics: bool, with_gradients: bool) -> Outcome:
    """Return the losses, and beside them their gradients if `with_gradients`."""
    hidden_states, frame = request.hidden_states, request.frame
    loss = hidden_states.new_empty(len(hidden_states), dtype=frame.dtype)
    log_normalizer = torch.empty_like(loss)
    log_probs = loss.new_empty(request.labels.shape)
    exponent = torch.empty_like(loss) if needs.h_exp else None
    found: list[TokenMetrics] = []
    smoothing, floor = request.label_smoothing > 0, request.label_smoothing / request.vocab_size
    gradients = empty_gradients(request, needs if with_gradients else Needs())
    with _tiles(request) as tiles:
        for chunk in chunks_of(request, stored=with_gradients):
            placed, norms = frame.place(hidden_states[chunk])  # [T, D]
            labels = request.labels[chunk]  # [T, K]
            moments = with_metrics or needs.h_exp or smoothing
            sums = tiles.score(placed, labels, store=with_gradients, moments=moments)
            pairs = measure_pairs(request, placed, sums.unit, labels, sums.near)
            rows = normalize(request, pairs, sums, chunk)
            log_normalizer[chunk], log_probs[chunk] = rows.log_normalizer, rows.log_probs
            totals = logit_totals(request, pairs, sums) if smoothing else None
            loss[chunk] = losses(request, rows, sums.unit, totals, chunk)
            if with_metrics:
                found.append(metrics(request, pairs, sums, rows, chunk))
            slopes = pair_gradients(request, pairs, rows, chunk)  # [T, S]
            if exponent is not None:
                slope = exponent_gradients(request, pairs, sums, rows, slopes)
                exponent[chunk] = slope * token_weights(request, chunk)
            if with_gradients:
                weights = token_weights(request, chunk)
                factors = _factors(request, sums, rows) * weights
                masses = (rows.log_normalizer, rows.mass * weights, floor * weights)
                tiles.accumulate(placed, factors, masses, gradients, chunk)
                slopes = slopes * weights[:, None]
                add_pairs(request, placed, pairs, slopes, gradients, chunk)
                finish_hidden_states(request, placed, norms, gradients, chunk)
        tiles.finish_prototypes(gradients)
    joined = TokenMetrics(*map(torch.cat, zip(*found, strict=True))) if found else None
    return Outcome(loss, log_normalizer, log_probs, joined, exponent, gradients)


def backward(
    request: Request, needs: Needs, log_normalizer: Tensor, log_probs: Tensor, upstream: Tensor
) -> Gradients:
    """Return the gradients for any `upstream` `[N]`, with the scores made anew."""
    frame = request.frame
    gradients = empty_gradients(request, needs)
    floor = request.label_smoothing / request.vocab_size
    with _tiles(request) as tiles:
        for chunk in chunks_of(request, stored=False):
            placed, norms = frame.place(request.hidden_states[chunk])
            labels, normalizer = request.labels[chunk], log_normalizer[chunk]
            outer = upstream[chunk].to(frame.dtype) * token_weights(request, chunk)
            unit = tiles.unit(placed)
            mass = mass_of(request, log_normalizer_of(request, normalizer, unit), chunk)
            rows = Rows(normalizer, log_probs[chunk], mass)
            masses = (normalizer, outer * rows.mass, outer * floor)
            near = tiles.recompute(placed, labels, masses, gradients, chunk)
            pairs = measure_pairs(request, placed, unit, labels, near)
            slopes = pair_gradients(request, pairs, rows, chunk) * outer[:, None]
            add_pairs(request, placed, pairs, slopes, gradients, chunk)
            finish_hidden_states(request, placed, norms, gradients, chunk)
        tiles.finish_prototypes(gradients)
    return gradients


def workspace_bytes(num_tokens: int, vocab_size: int, hidden_size: int, device: str) -> int:
    """Return about how much memory a call takes beside its results, in float32.

    Args:
        num_tokens: N.
        vocab_size: V.
        hidden_size: D.
        device: "cpu", or the type of another device.
    """
    rows = min(num_tokens, _chunk_rows(vocab_size, hidden_size, stored=True, device=device))
    return 4 * rows * (vocab_size + 8 * hidden_size)


def _chunk_rows(vocab_size: int, hidden_size: int, *, stored: bool, device: str) -> int:
    if device != "cpu":
        return max(DEVICE_ELEMENTS // vocab_size, 256)
    rows = max(STORED_ROWS, hidden_size // 4)
    return min(rows, max(STORED_ELEMENTS // vocab_size, 96)) if stored else TILE_ROWS


def empty_gradients(request: Request, needs: Needs) -> Gradients:
    """Return what the gradients that are needed are accumulated in."""
    frame, hidden_states = request.frame, request.hidden_states
    dtype, device = frame.dtype, hidden_states.device
    shape = frame.prototypes.shape
    prototypes = columns = bias = hidden = None
    if needs.hidden_states:
        hidden = hidden_states.new_empty(hidden_states.shape, dtype=dtype)
    if needs.prototypes:
        # The first chunk writes, the others add; with no token nobody writes.
        prototypes = torch.empty(shape, dtype=dtype, device=device)
        if not len(hidden_states):
            prototypes.zero_()
        if frame.with_sums:
            columns = torch.zeros(shape[0], dtype=dtype, device=device)
    if needs.class_bias:
        bias = torch.zeros(shape[0], dtype=dtype, device=device)
    # The PyTorch tiles fold the norms into the weights; see `ChunkedTiles.gain`.
    scaled = frame.kind == "sphere" and frame.center is None and request.impl == "chunked"
    return Gradients(hidden, prototypes, columns, bias, scaled)


@contextmanager
def _tiles(request: Request) -> Generator["ChunkedTiles | TritonTiles"]:
    device = request.hidden_states.device.type
    workers = cpu_workers() if device == "cpu" else nullcontext(Workers(1))
    with torch.no_grad(), torch.autocast(device, enabled=False), workers as threads:
        if request.impl == "triton":
            from harmonic_sft.ops.triton_engine import TritonTiles  # not on every system

            yield TritonTiles(request)
        elif serve(request):
            yield NativeTiles(request, threads)
        else:
            yield ChunkedTiles(request, threads)


def chunks_of(request: Request, *, stored: bool) -> Iterator[slice]:
    """Yield even chunks of the tokens, of whole vectors, as long as their memory allows."""
    num_tokens, hidden_size = request.hidden_states.shape
    device = request.hidden_states.device.type
    ranks = 1 if request.group is None else request.group.size()
    share = -(-request.vocab_size // ranks)  # all ranks must make the same chunks
    rows = _chunk_rows(share, hidden_size, stored=stored, device=device)
    count = -(-num_tokens // rows)
    size = rows if not count else min(-(-num_tokens // (count * VECTOR)) * VECTOR, rows)
    for start in range(0, num_tokens, size):
        yield slice(start, min(start + size, num_tokens))


def token_weights(request: Request, chunk: slice) -> Tensor:
    """Return the weights of the chunk's tokens `[T]`."""
    if request.token_weights is None:
        rows = len(request.labels[chunk])
        return request.target_weights.new_ones(rows)
    return request.token_weights[chunk]


def _factors(request: Request, sums: TileSums, rows: Rows) -> Tensor:
    """Return what makes the kept weights dL/dlogit or -2 dL/d(d2): `[tiles, T]`."""
    factors = rows.mass * (sums.log_scale - rows.log_normalizer).exp()
    if request.frame.kind == "linear":
        return factors
    return factors * (-2 * request.h_exp) / sums.scale.masked_fill(sums.scale == 0, 1)
