"""The loop over chunks of tokens that every loss without the [N, V] matrix runs on."""

import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from harmonic_sft.ops.arguments import Arguments, Chunk, Results, Rows, empty_gradient
from harmonic_sft.ops.geometry import build_geometry
from harmonic_sft.ops.options import TokenMetrics
from harmonic_sft.ops.products import GradientProducts, add_rows_
from harmonic_sft.ops.rows import measure_pairs, normalize, token_metrics
from harmonic_sft.ops.stages import STAGES, CrossEntropy
from harmonic_sft.ops.tiles import TorchTiles
from harmonic_sft.ops.workers import Workers, cpu_workers

# A chunk keeps `[chunk, V]` weights for the gradients: 23 MB at 192 rows of BERT's vocabulary, a
# quarter of what the gradient [V, D] takes that each chunk reads and writes. More rows where
# vectors are long, fewer where the vocabulary or what is kept is large.
KEPT_ROWS, KEPT_BYTES, MIN_ROWS = 192, 48 * 10**6, 64
LOOSE_ROWS = 256  # of chunks that keep no weights
DEVICE_BYTES = 2**29  # of a chunk on a GPU, where small products are slow


class Gradients:
    """Where gradients are accumulated; None where nobody wants one.

    Args:
        arguments: Their shapes.
        dtype: What the gradients are summed in.
        wanted: Make any at all.

    Attributes:
        hidden_states: `[N, D]`.
        prototypes: `[V, D]`.
        class_bias: `[V]`.
        second_weight: `[V, E]`.
    """

    def __init__(self, arguments: Arguments, dtype: torch.dtype, *, wanted: bool):
        def empty(name: str, like: Tensor | None) -> Tensor | None:
            if like is None or not (wanted and arguments.needs_gradient(name)):
                return None
            # The first chunk writes these two, the others add; with no token nobody writes.
            written = name in ("hidden_states", "prototypes") and len(arguments.hidden_states)
            make = torch.empty if written else torch.zeros
            return make(like.shape, dtype=dtype, device=like.device)

        self.hidden_states = empty("hidden_states", arguments.hidden_states)
        self.prototypes = empty("prototypes", arguments.prototypes)
        self.class_bias = empty("class_bias", arguments.class_bias)
        self.second_weight = empty("second_weight", arguments.second_weight)

    def finished(self, arguments: Arguments) -> tuple[Tensor, ...]:
        """Return them in the dtypes of their leaves, empty where there is none."""
        pairs = (
            (arguments.hidden_states, self.hidden_states),
            (arguments.prototypes, self.prototypes),
            (arguments.class_bias, self.class_bias),
            (arguments.second_weight, self.second_weight),
        )
        return tuple(
            empty_gradient(arguments, leaf)
            if leaf is None or gradient is None
            else gradient.to(leaf.dtype)
            for leaf, gradient in pairs
        )


class Softmax:
    """One softmax of a call: over all columns of hidden states and prototypes, or over a slice.

    Args:
        arguments: The arguments of the call.
        stage: The loss's row-wise stage.
        columns: The slice.
        gradients: Where the gradients of the whole call are summed.
        workers: Share the tiles.
    """

    def __init__(
        self,
        arguments: Arguments,
        stage: CrossEntropy,
        columns: slice,
        gradients: Gradients,
        workers: Workers,
    ):
        self.hidden_states = arguments.hidden_states.detach()[:, columns]
        on_cpu = self.hidden_states.device.type == "cpu"
        dtype = stage.target.dtype
        # Elsewhere a look whether the mean dominates would halt the device.
        self.geometry = build_geometry(
            arguments.kind,
            arguments.prototypes[:, columns],
            arguments.eps,
            dtype,
            centered=None if on_cpu else self.hidden_states.dtype.itemsize >= 4,
        )
        self.h_exp, self.bias, self.gradients = stage.h_exp, arguments.class_bias, gradients
        hidden, prototypes = gradients.hidden_states, gradients.prototypes
        self.hidden_gradient = None if hidden is None else hidden[:, columns]
        operand_dtype = arguments.gradient_dtype or dtype
        if on_cpu and not multiplies_bfloat16():
            operand_dtype = dtype
        if arguments.impl == "triton" and self.hidden_states.dtype.itemsize == 2:
            # What the states are rounded to is enough for what their gradients are made of.
            operand_dtype = torch.bfloat16
        self.products = GradientProducts(
            self.geometry,
            operand_dtype,
            workers,
            hidden_states=hidden is not None,
            prototypes=None if prototypes is None else prototypes[:, columns],
        )
        self.points = None
        if gradients.second_weight is not None and stage.points is not None:
            self.points = GradientProducts(
                stage.points,
                operand_dtype,
                workers,
                hidden_states=True,
                prototypes=gradients.second_weight,
            )
        if arguments.impl == "triton":
            from harmonic_sft.ops.triton_tiles import TritonTiles  # not on every system

            self.tiles: TorchTiles | TritonTiles = TritonTiles(
                arguments, self.geometry, self.h_exp, self.hidden_states
            )
        else:
            self.tiles = TorchTiles(arguments, self.geometry, stage, self.points, workers)

    def place(self, tokens: slice, labels: Tensor) -> Chunk:
        """Return a chunk of tokens with their labels `[T, K]`."""
        placed, inverse = self.geometry.place(self.hidden_states[tokens])
        unit, row = self.geometry.unit(placed), self.geometry.row(placed, inverse)
        return Chunk(tokens, placed, inverse, unit, row, labels)

    def start(self, chunk: Chunk, stage: CrossEntropy) -> None:
        """Begin to accumulate the gradients of a chunk."""
        self.products.start(chunk.placed)
        if self.points is not None:
            self.points.start(stage.targets(chunk.tokens))

    def finish(self, chunk: Chunk, slopes: Tensor, rows: Rows, class_sums: Tensor | None) -> None:
        """Add the pairs' part, with dL/dlogit `[T, S]`, and complete the chunk's gradients."""
        gradients, geometry, total = self.gradients, self.geometry, None
        if gradients.class_bias is not None and class_sums is not None:
            gradients.class_bias.add_(class_sums)
        if self.hidden_gradient is not None:
            total = self.products.hidden_gradient()
        for column, classes in enumerate(self._pair_classes(chunk)):
            slope = slopes[:, column]
            if gradients.class_bias is not None:
                add_rows_(gradients.class_bias, classes, slope)
            if not geometry.linear:
                floor = rows.floor * (chunk.columns[:, column] >= 0)
                slope = -2 * self.h_exp * (slope - floor) / chunk.squared[:, column]
            pulls = self.products.add_pairs(classes, slope)
            if total is not None:
                total += pulls
        if self.hidden_gradient is not None and total is not None:
            if chunk.inverse is not None:  # tangent to the sphere
                units = chunk.placed if geometry.center is None else chunk.placed + geometry.center
                total.addcmul_(units, torch.linalg.vecdot(units, total).unsqueeze(1), value=-1)
                total *= chunk.inverse
            self.hidden_gradient[chunk.tokens] = total
        self.products.end()

    def finish_points(self, chunk: Chunk, rows: Rows) -> None:
        """Add what the pairs carry, and what moves the labels' points."""
        if self.points is None:
            return
        assert rows.second is not None, "factors are set before"
        carried = rows.second.unsqueeze(1) * (chunk.logits - rows.log_normalizer.unsqueeze(1)).exp()
        total = self.points.hidden_gradient()
        for column, classes in enumerate(self._pair_classes(chunk)):
            total += self.points.add_pairs(classes, -2 * carried[:, column])
        assert self.points.prototypes is not None, "points get a gradient"
        add_rows_(self.points.prototypes, chunk.labels[:, 0], total)
        self.points.end()

    def _pair_classes(self, chunk: Chunk) -> Iterator[Tensor]:
        """Yield the classes `[T]` of the pairs, with distinct ones in the place of absent pairs.

        Their coefficient is 0; thousands of additions to one row would wait for each other on a
        GPU.
        """
        places = torch.arange(len(chunk.placed), device=chunk.columns.device)
        places %= len(self.geometry.prototypes)
        for classes in chunk.columns.unbind(1):
            yield torch.where(classes >= 0, classes, places)


def forward(arguments: Arguments) -> Results:
    """Return the losses, and beside them their gradients if `arguments.early`."""
    with _arithmetic(arguments) as workers:
        stage = _build_stage(arguments)
        gradients = Gradients(arguments, stage.target.dtype, wanted=arguments.early)
        heads = _build_heads(arguments, stage, gradients, workers)
        loss, saved, exponent = (stage.target.new_zeros(len(stage.labels)) for _ in range(3))
        log_normalizers = loss.new_empty(len(loss), len(heads))
        log_probs = loss.new_empty(len(loss), stage.labels.shape[1] * len(heads))
        learns = arguments.needs_gradient("h_exp")
        measured: list[TokenMetrics] = []
        for tokens in _slices(arguments, heads, kept=arguments.early):
            outer = _token_weights(arguments, tokens, loss.dtype)
            chunks = [head.place(tokens, stage.labels[tokens]) for head in heads]
            statistics, rows = [], []
            for head, chunk in zip(heads, chunks, strict=True):
                found, near = head.tiles.score(
                    chunk, keep=arguments.early, measure=learns or arguments.with_metrics
                )
                measure_pairs(chunk, head.geometry, head.h_exp, head.bias, near)
                statistics.append(found)
                rows.append(Rows(*normalize(chunk, found), loss.new_zeros(len(chunk.placed))))
            loss[tokens] = stage.losses(chunks, statistics, rows) * outer
            log_normalizers[tokens] = torch.stack([row.log_normalizer for row in rows], 1)
            log_probs[tokens] = torch.cat([row.log_probs for row in rows], 1)
            saved[tokens] = rows[0].saved
            if arguments.with_metrics:
                target, normalizer = stage.target[tokens], stage.normalizer(chunks[0], rows[0])
                parts = (chunks[0], statistics[0], rows[0])
                measured.append(token_metrics(*parts, target, normalizer))
            stage.set_factors(chunks, rows, outer)
            for head, chunk, found, row in zip(heads, chunks, statistics, rows, strict=True):
                slopes = stage.slopes(chunk, row)
                if learns:
                    exponent[tokens] += stage.exponent_slopes(chunk, found, row, slopes, outer)
                if arguments.early:
                    head.start(chunk, stage)
                    class_sums = head.tiles.accumulate(chunk, found, row, head.products)
                    head.finish(chunk, slopes, row, class_sums)
                    head.finish_points(chunk, row)
        _complete(heads)
    nothing = [loss.new_empty(0), loss.new_empty(0), loss.new_empty(0), stage.labels.new_empty(0)]
    metrics = map(torch.cat, zip(*measured, strict=True)) if measured else nothing
    exponent = exponent if learns else loss.new_empty(0)
    found = gradients.finished(arguments)
    return Results(loss, log_normalizers, log_probs, saved, *metrics, exponent, *found)


def backward(
    arguments: Arguments,
    log_normalizers: Tensor,
    log_probs: Tensor,
    saved: Tensor,
    upstream: Tensor,
) -> tuple[Tensor, ...]:
    """Return the gradients for any `upstream` `[N]`, with the scores computed again.

    Args:
        arguments: As in `forward`.
        log_normalizers: As in the forward pass's `Results`.
        log_probs: `label_log_probs` there.
        saved: As there.
        upstream: Gradients of the losses.
    """
    with _arithmetic(arguments) as workers:
        stage = _build_stage(arguments)
        gradients = Gradients(arguments, stage.target.dtype, wanted=True)
        heads = _build_heads(arguments, stage, gradients, workers)
        shares = log_probs.chunk(len(heads), 1)
        for tokens in _slices(arguments, heads, kept=False):
            outer = _token_weights(arguments, tokens, saved.dtype) * upstream[tokens]
            chunks = [head.place(tokens, stage.labels[tokens]) for head in heads]
            rows = [
                Rows(log_normalizers[tokens, m], share[tokens], saved[tokens])
                for m, share in enumerate(shares)
            ]
            stage.set_factors(chunks, rows, outer.to(saved.dtype))
            for head, chunk, row in zip(heads, chunks, rows, strict=True):
                head.start(chunk, stage)
                near, class_sums = head.tiles.recompute(chunk, row, head.products)
                measure_pairs(chunk, head.geometry, head.h_exp, head.bias, near)
                head.finish(chunk, stage.slopes(chunk, row), row, class_sums)
                head.finish_points(chunk, row)
        _complete(heads)
    return gradients.finished(arguments)


def multiplies_bfloat16() -> bool:
    """Return whether this processor has instructions for it: without, it takes 20 times as long."""
    there = torch.backends.mkldnn.is_available()
    return there and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def workspace_bytes(num_tokens: int, vocab_size: int, hidden_size: int, device: str) -> int:
    """Return about how much memory a call takes beside its results, in float32.

    Args:
        num_tokens: N.
        vocab_size: V.
        hidden_size: D.
        device: "cpu", or the type of another device.
    """
    rows = min(num_tokens, _kept_rows(vocab_size, hidden_size, 1, device))
    return 4 * rows * (vocab_size + 8 * hidden_size)


def chunk_slices(num_tokens: int, rows: int) -> Iterator[slice]:
    """Yield even slices of the tokens of at most `rows`."""
    size = -(-num_tokens // max(-(-num_tokens // rows), 1))
    for start in range(0, num_tokens, max(size, 1)):
        yield slice(start, min(start + size, num_tokens))


def _slices(arguments: Arguments, heads: list[Softmax], *, kept: bool) -> Iterator[slice]:
    num_tokens, hidden_size = arguments.hidden_states.shape
    device = arguments.hidden_states.device.type
    num_kept = sum(head.tiles.num_kept for head in heads)
    rows = LOOSE_ROWS
    if kept or device != "cpu":
        rows = _kept_rows(len(arguments.prototypes), hidden_size, num_kept, device)
    return chunk_slices(num_tokens, rows)


def _kept_rows(vocab_size: int, hidden_size: int, num_kept: int, device: str) -> int:
    """Return how many tokens have `num_kept` rows of V numbers each in a chunk."""
    if device != "cpu":
        return max(DEVICE_BYTES // (4 * vocab_size * num_kept), 256)
    fitting = KEPT_BYTES // (4 * vocab_size * num_kept)
    return max(min(max(KEPT_ROWS, hidden_size // 4), fitting), MIN_ROWS)


@contextmanager
def _arithmetic(arguments: Arguments) -> Generator[Workers]:
    """Give workers, without autograd and autocast."""
    device = arguments.hidden_states.device.type
    workers = cpu_workers() if device == "cpu" else nullcontext(Workers(1))
    with torch.no_grad(), torch.autocast(device, enabled=False), workers as threads:
        yield threads


def _build_stage(arguments: Arguments) -> CrossEntropy:
    dtype = torch.promote_types(arguments.hidden_states.dtype, arguments.prototypes.dtype)
    labels, target = _read_target(arguments, torch.promote_types(dtype, torch.float32))
    _check_bias(arguments)
    return STAGES[arguments.stage](arguments, labels, target, _read_exponent(arguments))


def _check_bias(arguments: Arguments) -> None:
    """Refuse a class that is ruled out and has a share of the target all the same."""
    if arguments.class_bias is None or not arguments.label_smoothing:
        return
    finite = ~arguments.class_bias.isneginf().any()
    if finite.device.type != "cpu":  # fails later, without halting the device now
        torch._assert_async(finite)
    elif not finite:
        raise ValueError(
            "class_bias: expected no -inf beside label_smoothing, which gives every class a "
            "share of the target, got one. Use a finite number or no smoothing"
        )


def _build_heads(
    arguments: Arguments, stage: CrossEntropy, gradients: Gradients, workers: Workers
) -> list[Softmax]:
    width = arguments.prototypes.shape[1] // arguments.num_heads
    columns = [slice(m * width, (m + 1) * width) for m in range(arguments.num_heads)]
    return [Softmax(arguments, stage, part, gradients, workers) for part in columns]


def _complete(heads: list[Softmax]) -> None:
    for head in heads:
        head.products.finish()
        if head.points is not None:
            head.points.finish()


def _token_weights(arguments: Arguments, tokens: slice, dtype: torch.dtype) -> Tensor:
    """Return the weights of the chunk's tokens `[T]`."""
    if arguments.token_weights is None:
        count = len(arguments.hidden_states[tokens])
        return arguments.hidden_states.new_ones(count, dtype=dtype)
    return arguments.token_weights[tokens].to(dtype)


def _read_exponent(arguments: Arguments) -> float | Tensor:
    """Return the exponent as a number where reading it does not halt a device."""
    if arguments.h_exp.device.type != "cpu":
        return arguments.h_exp.detach()
    exponent = float(arguments.h_exp)
    if not -math.inf < exponent < 0:
        raise ValueError(f"h_exp: expected a number below 0, got {exponent}")
    return exponent


def _read_target(arguments: Arguments, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return labels and probabilities `[N, K]` of the target, repeated labels merged."""
    labels, weights = arguments.labels, arguments.target_weights
    vocab_size, lowest = len(arguments.prototypes), 0
    if weights is None:
        labels = labels.unsqueeze(1)
        weights = torch.ones_like(labels, dtype=dtype)
    else:
        lowest = -1  # pads
        weights = weights.to(dtype).where(labels >= 0, 0)
    if labels.device.type != "cpu":  # fails later, without halting the device now
        torch._assert_async(((labels >= lowest) & (labels < vocab_size)).all())
    elif labels.numel() and not lowest <= int(labels.min()) <= int(labels.max()) < vocab_size:
        raise ValueError(
            f"labels: expected values from {lowest} to {vocab_size - 1}, "
            f"got {int(labels.min())} to {int(labels.max())}. Drop ignored positions first"
        )
    return _merge_repeated(labels, weights)


def _merge_repeated(labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Add the weights of a row's repeated labels `[N, K]` up at the first, and pad the others."""
    num_labels = labels.shape[1]
    if num_labels == 1:
        return labels, weights
    same = labels.unsqueeze(2) == labels.unsqueeze(1)  # [N, K, K]
    first = same.to(torch.uint8).argmax(2)  # [N, K], where the label stands first
    merged = torch.zeros_like(weights).scatter_add_(1, first, weights)
    kept = first == torch.arange(num_labels, device=labels.device)
    kept &= labels >= 0
    return labels.where(kept, -1), merged.where(kept, 0)
