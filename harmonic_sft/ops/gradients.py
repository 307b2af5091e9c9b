"""Gradients outside the tiles: what is accumulated, the pairs, and the completion."""

from dataclasses import dataclass

import torch
from torch import Tensor

from harmonic_sft.ops.geometry import Frame, all_reduce_
from harmonic_sft.ops.request import Request
from harmonic_sft.ops.rows import Pairs
from harmonic_sft.ops.workers import Workers

TILE_ELEMENTS = 3 * 2**17  # of prototypes, 1.5 MB


@dataclass
class Gradients:
    """What is accumulated over the chunks; None where nobody needs it.

    Attributes:
        hidden_states: `[N, D]`.
        prototypes: `[V, D]`, before `finish_prototypes`.
        columns: `[V]`, sums of the weights of each class.
        class_bias: `[V]`.
        scaled: Whether `prototypes` is already divided by the prototypes' norms.
    """

    hidden_states: Tensor | None
    prototypes: Tensor | None
    columns: Tensor | None
    class_bias: Tensor | None
    scaled: bool = False


def add_pairs(
    request: Request,
    hidden_states: Tensor,
    pairs: Pairs,
    slopes: Tensor,
    gradients: Gradients,
    chunk: slice,
) -> None:
    """Add what the pairs' dL/dlogit `[T, S]` send to hidden states, prototypes and bias."""
    frame = request.frame
    for column, classes in enumerate(pairs.columns.unbind(1)):
        known, slope = classes.clamp_min(0), slopes[:, column]
        if gradients.class_bias is not None:
            _add_rows_(gradients.class_bias, known, slope)
        vectors, slope = frame.rows(known), slope.unsqueeze(1)  # [T, D], [T, 1]
        if frame.kind != "linear":
            slope = slope * (2 * request.h_exp) / pairs.squared[:, column, None]
            vectors = torch.sub(hidden_states, vectors, out=vectors)
        if gradients.hidden_states is not None:
            gradients.hidden_states[chunk].addcmul_(slope, vectors)
        if gradients.prototypes is not None:
            if frame.kind == "linear":
                found = torch.mul(hidden_states, slope, out=vectors)
            else:
                found = vectors.mul_(-slope)
            if gradients.scaled and frame.norms is not None:
                found /= frame.norms[known].unsqueeze(1)
            _add_rows_(gradients.prototypes, known, found)


def finish_hidden_states(
    request: Request,
    placed: Tensor,
    norms: Tensor | None,
    gradients: Gradients,
    chunk: slice,
) -> None:
    """Complete the gradient of a chunk's hidden states: over all ranks, tangent on the sphere."""
    if gradients.hidden_states is None:
        return
    found = all_reduce_(gradients.hidden_states[chunk], request.group)
    if norms is not None:
        units = placed if request.frame.center is None else placed + request.frame.center
        found.addcmul_(units, torch.linalg.vecdot(units, found).unsqueeze(1), value=-1)
        found /= norms


def finish_prototypes(frame: Frame, gradients: Gradients, workers: Workers) -> None:
    """Turn the accumulated products into the gradient of the prototypes, in place.

    Args:
        frame: Its prototypes complete the distances' gradient; on the sphere it is made tangent.
        gradients: Of all chunks.
        workers: Share the prototypes.
    """
    target = gradients.prototypes
    if target is None or frame.kind == "linear":
        return

    # On a CPU little enough for a core's cache, and enough for its operations to be few.
    rows = max(TILE_ELEMENTS // max(target.shape[1], 1), 1)
    size = rows if target.device.type == "cpu" else 8192
    starts = range(0, len(target), size)

    def work(worker: int) -> None:
        for start in starts[worker :: workers.count]:
            stop = min(start + size, len(target))
            tile = target[start:stop]
            if gradients.columns is not None:
                columns = gradients.columns[start:stop].unsqueeze(1)
                tile.addcmul_(frame.tile(start, stop), columns, value=-1)
            if frame.kind == "sphere" and frame.norms is not None:
                raw = frame.prototypes[start:stop].to(frame.dtype)
                inverse = 1 / frame.norms[start:stop].unsqueeze(1)
                radial = torch.linalg.vecdot(tile, raw).unsqueeze(1) * inverse.square()
                tile.addcmul_(raw, radial, value=-1)
                if not gradients.scaled:
                    tile.mul_(inverse)

    workers.run(work)


def _add_rows_(target: Tensor, index: Tensor, values: Tensor) -> None:
    """Add `values` to the rows `index` of `target`, in the same order in every run."""
    if target.device.type == "cpu":
        target.index_add_(0, index, values)
    else:  # index_add_ would use atomic additions there
        target.index_put_((index,), values, accumulate=True)
