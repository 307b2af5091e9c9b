"""The operator of the fused losses: a loop over chunks of tokens, with gradients of its own."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.library import custom_op

from harmonic_sft.ops.arguments import Arguments, Results, TokenMetrics, kept_dtype
from harmonic_sft.ops.geometry import Geometry, GradientProducts, add_rows_, log_ratio
from harmonic_sft.ops.stages import STAGES, Chunk, CrossEntropyStage
from harmonic_sft.ops.tiles import TorchTiles
from harmonic_sft.ops.workers import Workers, cpu_workers

# A chunk keeps `[chunk, V]` weights for the gradients. Each chunk reads and writes the gradient
# [V, D], so that few large ones are fast. 48 MB are 393 rows of BERT's vocabulary.
KEPT_ROWS, KEPT_BYTES, MIN_ROWS = 768, 48 * 10**6, 64
LOOSE_ROWS = 256  # of a chunk on a CPU that keeps no weights, since no gradients are made
# On a GPU each chunk converts all prototypes and adds to the gradient of all, so that few large
# ones are fast: see docs/performance.md.
DEVICE_BYTES, DEVICE_ROWS = 2**29, 2816
NUM_LEAVES, NUM_TENSORS = 5, 11  # the first 5 arguments may get gradients; the first 11 are tensors


class Softmax:
    """One softmax of a call: over all columns of hidden states and prototypes, or over a slice.

    Args:
        arguments: The arguments of the call.
        stage: The loss's row-wise stage.
        columns: The slice.
        gradients: Where the gradients of the whole call are summed, by name.
        workers: Share the tiles.
    """

    def __init__(
        self,
        arguments: Arguments,
        stage: CrossEntropyStage,
        columns: slice,
        gradients: dict[str, Tensor],
        workers: Workers,
    ):
        self.hidden_states = arguments.hidden_states.detach()[:, columns]
        self.stage = stage
        self.bias = arguments.class_bias
        is_16_bit = self.hidden_states.dtype.itemsize == 2
        dtype = stage.target.dtype
        # Off the CPU a look whether the mean dominates would halt the device.
        self.geometry = Geometry(
            arguments.kind,
            arguments.prototypes[:, columns],
            arguments.eps,
            dtype,
            centered=None if self.hidden_states.is_cpu else not is_16_bit,
        )
        self.hidden_gradient, prototype_gradient = (
            gradients[name][:, columns] if name in gradients else None
            for name in ("hidden_states", "prototypes")
        )
        wanted: dict[str, Any] = {
            "wants_hidden": self.hidden_gradient is not None,
            "prototype_gradient": prototype_gradient,
        }
        self.bias_gradient = gradients.get("class_bias")
        self.point_products: GradientProducts | None = None
        is_shared = stage.points is not None and arguments.second_weight is None
        moved = prototype_gradient if is_shared else gradients.get("second_weight")
        if stage.points is not None and moved is not None:
            self.point_products = GradientProducts(
                stage.points, workers, wants_hidden=True, prototype_gradient=moved
            )
        if arguments.impl == "triton":
            from harmonic_sft.ops.triton_tiles import TritonTiles  # not on every system

            self.tiles: TorchTiles | TritonTiles = TritonTiles(
                arguments, self.geometry, stage.h_exp, self.hidden_states, **wanted
            )
        else:
            products = GradientProducts(self.geometry, workers, **wanted)
            products.untouched = not is_shared  # if shared, the points have written before
            self.tiles = TorchTiles(arguments, stage, products, self.point_products)

    def place(self, tokens: slice) -> Chunk:
        """Return a chunk of tokens with their labels."""
        direct, inverse = self.geometry.direct(self.hidden_states[tokens])
        placed = self.geometry.place(direct)
        if self.geometry.linear:
            unit = near_limits = placed.new_ones(len(placed), 1)
            row_terms = None
        else:
            squared = torch.linalg.vecdot(placed, placed).unsqueeze(1)
            unit = self.geometry.unit(squared)
            row_terms = self.geometry.row_terms(squared, inverse)
            near_limits = self.geometry.near_limits(squared)
        labels = self.stage.labels[tokens]
        return Chunk(tokens, direct, placed, inverse, unit, row_terms, near_limits, labels)

    def measure_pairs(self, chunk: Chunk, near: Tensor | None) -> None:
        """Write the pairs of a chunk: its labels, and the columns `near` `[T, S]`, -1 for none."""
        geometry = self.geometry
        columns = chunk.labels if near is None else torch.cat([chunk.labels, near], 1)  # [T, S]
        chunk.columns, chunk.absent = columns, columns < 0
        logits = scores = self.tiles.pair_scores(chunk, columns)
        if not geometry.linear:
            logs = log_ratio(scores, chunk.unit).masked_fill_(chunk.absent, 0)
            chunk.squared, chunk.logs, logits = scores, logs, logs * self.stage.h_exp
        if self.bias is not None:
            logits = logits + self.bias[columns].to(logits.dtype)
        chunk.logits = logits.masked_fill(chunk.absent, -torch.inf)

    def finish(self, chunk: Chunk, slopes: Tensor, class_sums: Tensor | None) -> None:
        """Add the part of the pairs, with dL/dlogit `slopes` `[T, S]`; complete the gradients."""
        hidden = self.hidden_gradient
        if self.bias_gradient is not None and class_sums is not None:
            self.bias_gradient.add_(class_sums)
            for column, classes in enumerate(chunk.pair_classes(len(self.bias_gradient))):
                add_rows_(self.bias_gradient, classes, slopes[:, column])
        coefficients = slopes
        if not self.geometry.linear:
            floor = chunk.floor.unsqueeze(1).masked_fill(chunk.absent, 0)
            coefficients = -2 * self.stage.h_exp * (slopes - floor) / chunk.squared
        self.tiles.finish(chunk, coefficients, None if hidden is None else hidden[chunk.tokens])
        self._finish_points(chunk)

    def _finish_points(self, chunk: Chunk) -> None:
        """Add the pairs to the points' gradient, and the total pull to the labels' points."""
        if self.point_products is None:
            return
        assert chunk.second is not None, "factors are set before"
        probs = (chunk.logits - chunk.log_normalizer.unsqueeze(1)).exp()
        carried = chunk.second.unsqueeze(1) * probs
        total = self.point_products.hidden_gradient()
        for column, classes in enumerate(chunk.pair_classes(len(self.geometry.prototypes))):
            total += self.point_products.add_pairs(classes, -2 * carried[:, column])
        assert self.point_products.prototype_gradient is not None, "points get a gradient"
        add_rows_(self.point_products.prototype_gradient, chunk.labels[:, 0], total)
        self.point_products.end_chunk()

    def complete(self) -> None:
        """End the call, after its last chunk."""
        self.tiles.complete()
        if self.point_products is not None:
            self.point_products.complete()


def forward(*flat: Any) -> Results:
    """Return the losses, and beside them the gradients of their sum if `Arguments.early`."""
    arguments = Arguments(*flat)
    keep, learns_h_exp = arguments.early, arguments.needs_gradient("h_exp")
    measure = learns_h_exp or arguments.with_metrics
    with _arithmetic(arguments) as workers:
        stage, gradients, softmaxes = _build(arguments, workers)
        loss = stage.target.new_empty(len(stage.labels))
        grad_h_exp = torch.zeros_like(loss if learns_h_exp else loss[:0])
        measured: list[TokenMetrics] = []
        for tokens in _slices(arguments, softmaxes):
            weights = _token_weights(arguments, tokens, loss.dtype)
            chunks = [softmax.place(tokens) for softmax in softmaxes]
            for softmax, chunk in zip(softmaxes, chunks, strict=True):
                near = softmax.tiles.score(chunk, keep=keep, measure=measure)
                softmax.measure_pairs(chunk, near)
                chunk.normalize()
            loss[tokens] = stage.losses(chunks) * weights
            if arguments.with_metrics:
                normalizer = stage.normalizer(chunks[0])
                measured.append(chunks[0].metrics(stage.target[tokens], normalizer))
            stage.set_factors(chunks, weights)
            for softmax, chunk in zip(softmaxes, chunks, strict=True):
                slopes = stage.slopes(chunk)
                if learns_h_exp:
                    grad_h_exp[tokens] += stage.exponent_slopes(chunk, slopes, weights)
                if keep:
                    softmax.finish(chunk, slopes, softmax.tiles.accumulate(chunk))
        for softmax in softmaxes:
            softmax.complete()
    nothing = [loss.new_empty(0), loss.new_empty(0), loss.new_empty(0), stage.labels.new_empty(0)]
    metrics = map(torch.cat, zip(*measured, strict=True)) if measured else nothing
    return Results(loss, *metrics, grad_h_exp, *_finished(arguments, gradients))


def workspace_bytes(num_tokens: int, vocab_size: int, hidden_size: int, device: str) -> int:
    """Return about how many bytes a call takes beside its results.

    The estimate is for float32 on a CPU and for hidden states of 16 bits elsewhere.

    Args:
        num_tokens: N.
        vocab_size: V.
        hidden_size: D.
        device: "cpu", or the type of another device.
    """
    num_kept = 1 if device == "cpu" else 0.5
    rows = min(num_tokens, _kept_rows(vocab_size, hidden_size, num_kept, device))
    if device == "cpu":
        return 4 * rows * (vocab_size + 8 * hidden_size)
    # `SCORE_BYTES` and `TERM_BYTES` of `TritonTiles`, which is not on every system.
    products = 2**27 + min(4 * vocab_size * hidden_size, 160 * 2**20)
    return 2 * rows * (vocab_size + 16 * hidden_size) + products


def chunk_slices(num_tokens: int, rows: int) -> Iterator[slice]:
    """Yield even slices of the tokens of at most `rows`."""
    size = -(-num_tokens // max(-(-num_tokens // rows), 1))
    for start in range(0, num_tokens, max(size, 1)):
        yield slice(start, min(start + size, num_tokens))


def _slices(arguments: Arguments, softmaxes: list[Softmax]) -> Iterator[slice]:
    num_tokens, hidden_size = arguments.hidden_states.shape
    device = arguments.hidden_states.device.type
    if device == "cpu" and not arguments.early:
        return chunk_slices(num_tokens, LOOSE_ROWS)
    num_kept = sum(softmax.tiles.num_kept for softmax in softmaxes)
    rows = _kept_rows(len(arguments.prototypes), hidden_size, num_kept, device)
    return chunk_slices(num_tokens, rows)


def _kept_rows(vocab_size: int, hidden_size: int, num_kept: float, device: str) -> int:
    """Return how many tokens a chunk has if each keeps `num_kept` rows of V numbers."""
    if device != "cpu":
        budget = max(DEVICE_BYTES, 2 * DEVICE_ROWS * vocab_size)
        return max(int(budget // (4 * vocab_size * num_kept)), MIN_ROWS)
    fitting = int(KEPT_BYTES // (4 * vocab_size * num_kept))
    return max(min(max(KEPT_ROWS, hidden_size // 4), fitting), MIN_ROWS)


@contextmanager
def _arithmetic(arguments: Arguments) -> Generator[Workers]:
    """Turn autograd and autocast off, and give the threads that share the tiles."""
    device = arguments.hidden_states.device.type
    workers = cpu_workers() if device == "cpu" else nullcontext(Workers(1))
    with torch.no_grad(), torch.autocast(device, enabled=False), workers as threads:
        yield threads


def _build(
    arguments: Arguments, workers: Workers
) -> tuple[CrossEntropyStage, dict[str, Tensor], list[Softmax]]:
    """Return the stage, the tensors in which gradients are summed, by name, and the softmaxes."""
    stage, gradients = STAGES[arguments.stage](arguments), {}
    for name, leaf, needed in arguments.leaves:
        if arguments.early and needed and leaf is not None:
            # The first chunk writes these two, the others add; without tokens there is no chunk.
            written = name in ("hidden_states", "prototypes") and len(arguments.hidden_states)
            make = torch.empty if written else torch.zeros
            gradients[name] = make(leaf.shape, dtype=stage.target.dtype, device=leaf.device)
    width = arguments.prototypes.shape[1] // arguments.num_heads
    columns = [slice(m * width, (m + 1) * width) for m in range(arguments.num_heads)]
    softmaxes = [Softmax(arguments, stage, part, gradients, workers) for part in columns]
    return stage, gradients, softmaxes


def _finished(arguments: Arguments, gradients: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients in their `kept_dtype`, empty where there is none."""
    return tuple(
        arguments.empty_gradient(leaf)
        if leaf is None or name not in gradients
        else gradients[name].to(kept_dtype(leaf))
        for name, leaf, _ in arguments.leaves
    )


def _token_weights(arguments: Arguments, tokens: slice, dtype: torch.dtype) -> Tensor:
    """Return the weights of the chunk's tokens `[T]`."""
    if arguments.token_weights is None:
        return arguments.hidden_states.new_ones(len(arguments.labels[tokens]), dtype=dtype)
    return arguments.token_weights[tokens].to(dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    arguments, results = Arguments(*inputs), Results(*output)
    ctx.mark_non_differentiable(*results[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*arguments[:NUM_TENSORS])
    ctx.settings = arguments[NUM_TENSORS:]
    ctx.grad_h_exp, ctx.h_exp_like = results.grad_h_exp, arguments.h_exp.new_empty(0)
    ctx.early_gradients = results.gradients if arguments.early else None


def is_uniform(upstream: Tensor) -> bool:
    """Whether all tokens are known to have one upstream gradient, without a look at the values.

    `loss.sum()` hands down a tensor of stride 0.
    """
    return upstream.shape[0] < 2 or upstream.stride(0) == 0


def factors_for(gradients: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    """Return the value of the uniform `upstream` `[N]` once for each gradient, with as many axes.

    PyTorch would round a scalar factor to the dtype of a 16-bit gradient first.
    """
    factor = upstream[:1].sum()  # 0 without tokens
    return [factor.reshape([1] * gradient.dim()) for gradient in gradients]


def refuse_second_derivative() -> None:
    """Refuse a second derivative: the gradients were made with the losses, without a graph.

    Raises:
        RuntimeError: The backward pass makes a graph.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "fused loss: expected one derivative, got create_graph=True. Use impl='reference' "
            "or a loss of the head's logits"
        )


def _gradient(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Any, ...]:
    nothing = (None,) * len(Arguments._fields)
    if upstream is None:
        return nothing
    refuse_second_derivative()
    arguments = Arguments(*ctx.saved_tensors, *ctx.settings)
    early, ctx.early_gradients = ctx.early_gradients, None  # scaled in place, so used once
    if early is not None and is_uniform(upstream):
        factors = factors_for(early, upstream)
        sums = [gradient.mul_(factor) for gradient, factor in zip(early, factors, strict=True)]
    else:  # also in a second backward pass: the call again, weighted by the upstream gradients
        sums = Results(*chunked_op(*_weighted(arguments, upstream))).gradients
    learns_h_exp = arguments.needs_gradient("h_exp")
    h_exp = (ctx.grad_h_exp * upstream).sum().to(ctx.h_exp_like) if learns_h_exp else None
    hidden_states, prototypes, class_bias, second_weight = (
        gradient if leaf is None else gradient.to(leaf.dtype)
        for gradient, (_, leaf, _) in zip(sums, arguments.leaves, strict=True)
    )
    gradients = [hidden_states, prototypes, class_bias, h_exp, second_weight]
    needed = zip(gradients, arguments.needs, strict=True)
    return (*(gradient if need else None for gradient, need in needed), *nothing[NUM_LEAVES:])


def _weighted(arguments: Arguments, upstream: Tensor) -> Arguments:
    """Return the arguments that make the gradients of the sum of losses times `upstream` `[N]`."""
    weights, needs = arguments.token_weights, list(arguments.needs)
    needs[Arguments._fields.index("h_exp")] = False  # its gradient was made with the losses
    return arguments._replace(
        token_weights=upstream if weights is None else weights * upstream,
        needs=tuple(needs),
        early=True,
        with_metrics=False,
    )


def _fake_forward(*flat: Any) -> Results:
    arguments = Arguments(*flat)  # .shape and not len(), which would fix a symbolic size
    hidden_states = arguments.hidden_states
    dtype = torch.promote_types(hidden_states.dtype, arguments.prototypes.dtype)
    num_tokens = hidden_states.shape[0]
    tokens = hidden_states.new_empty(num_tokens, dtype=torch.promote_types(dtype, torch.float32))
    num_measured = num_tokens if arguments.with_metrics else 0
    gradients = [
        torch.empty_like(leaf, dtype=kept_dtype(leaf), memory_format=torch.contiguous_format)
        if arguments.early and needed and leaf is not None
        else arguments.empty_gradient(leaf)
        for _, leaf, needed in arguments.leaves
    ]
    return Results(
        tokens,
        *(tokens.new_empty(num_measured) for _ in range(3)),
        arguments.labels.new_empty(num_measured),
        torch.empty_like(tokens) if arguments.needs_gradient("h_exp") else tokens.new_empty(0),
        *gradients,
    )


def _refuse_vmap(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "fused loss: expected no torch.func.vmap, under which gradients would be lost, got it. Use "
        "impl='reference'"
    )


_TYPES = {Tensor | None: "Tensor?", tuple[bool, ...]: "bool[]"}  # in a schema
_ARGUMENTS = ", ".join(
    f"{_TYPES.get(kind) or kind.__name__} {name}"
    for name, kind in Arguments.__annotations__.items()
)
_SCHEMA = f"({_ARGUMENTS}) -> ({', '.join(['Tensor'] * len(Results._fields))})"
chunked_op = custom_op("harmonic_sft::chunked_loss", forward, mutates_args=(), schema=_SCHEMA)
chunked_op.register_fake(_fake_forward)
chunked_op.register_vmap(_refuse_vmap)
chunked_op.register_autograd(_gradient, setup_context=_setup_context)
