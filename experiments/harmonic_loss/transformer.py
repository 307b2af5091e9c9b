"""The small transformer of the harmonic-loss paper, trained for many seeds at once."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.stacked import draw_uniform, embed

DROPOUT = 0.1
NUM_BLOCKS, NUM_HEADS, WIDTH = 2, 2, 64


class StackedTransformer(nn.Module):
    """Two post-norm encoder blocks per seed, read at the last position.

    Every block is `torch.nn.TransformerEncoderLayer` (2 heads, width 64, ReLU, dropout 0.1, no
    mask) with a second residual connection around the whole, and starts as that class does. Seeds
    are the leading axis S of every tensor and share nothing.

    Args:
        generators: One for each seed.
        vocab_size: V, rows of the embedding.
        num_inputs: T, tokens of an example.
        hidden_size: D.

    Attributes:
        embedding: `[S, V, D]`.

    Source:
        Baek et al. 2025, arXiv:2502.01628, as released; the paper calls the blocks decoder layers.
    """

    def __init__(
        self,
        generators: Sequence[torch.Generator],
        *,
        vocab_size: int,
        num_inputs: int,
        hidden_size: int = 16,
    ):
        super().__init__()
        draws = [
            torch.empty(vocab_size, hidden_size).normal_(0, 0.25, generator=g) for g in generators
        ]
        self.embedding = nn.Parameter(torch.stack(draws))
        draws = [torch.empty(1, num_inputs, hidden_size).normal_(generator=g) for g in generators]
        self.positions = nn.Parameter(torch.stack(draws))
        self.blocks = nn.ModuleList(
            StackedBlock(generators, hidden_size) for _ in range(NUM_BLOCKS)
        )

    def forward(self, input_ids: Tensor, generators: Sequence[torch.Generator] | None) -> Tensor:
        """Return hidden states `[S, N, D]` for input ids `[S, N, T]`.

        Args:
            input_ids: Token ids.
            generators: One for each seed, to draw the dropout from; None: no dropout.
        """
        states = embed(input_ids, self.embedding) + self.positions
        for block in self.blocks:
            states = states + block(states, generators)  # [S, N, T, D]
        return states[:, :, -1]


class StackedBlock(nn.Module):
    """One post-norm encoder block per seed; see `StackedTransformer`."""

    def __init__(self, generators: Sequence[torch.Generator], hidden_size: int):
        super().__init__()
        draw = partial(draw_uniform, generators)
        inner, outer = hidden_size**-0.5, WIDTH**-0.5
        xavier = (6 / (hidden_size + 3 * hidden_size)) ** 0.5
        self.weight_qkv = draw(hidden_size, 3 * hidden_size, bound=xavier)
        self.bias_qkv = draw(1, 3 * hidden_size, bound=0)
        self.weight_attention = draw(hidden_size, hidden_size, bound=inner)
        self.bias_attention = draw(1, hidden_size, bound=0)
        self.weight_in = draw(hidden_size, WIDTH, bound=inner)
        self.bias_in = draw(1, WIDTH, bound=inner)
        self.weight_out = draw(WIDTH, hidden_size, bound=outer)
        self.bias_out = draw(1, hidden_size, bound=outer)
        ones = torch.ones(len(generators), 2, 1, hidden_size)
        self.norm_weight = nn.Parameter(ones)
        self.norm_bias = nn.Parameter(torch.zeros_like(ones))

    def forward(self, states: Tensor, generators: Sequence[torch.Generator] | None) -> Tensor:
        """Return states `[S, N, T, D]` for states of that shape."""
        shape = states.shape
        num_seeds, num_rows, length, hidden_size = shape
        sizes = [num_rows * length * n for n in (NUM_HEADS * length, hidden_size)]
        sizes += [num_rows * length * n for n in (WIDTH, hidden_size)]
        masks = _dropout_masks(sizes, generators)
        states = states.flatten(1, 2)  # [S, N T, D]
        qkv = torch.baddbmm(self.bias_qkv, states, self.weight_qkv)
        qkv = qkv.view(num_seeds * num_rows, length, 3, NUM_HEADS, -1)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)  # [S N, H, T, D / H] each
        scores = queries @ keys.mT * values.shape[-1] ** -0.5
        mixed = _drop(scores.softmax(-1), masks) @ values
        mixed = mixed.transpose(1, 2).reshape(num_seeds, -1, hidden_size)
        mixed = torch.baddbmm(self.bias_attention, mixed, self.weight_attention)
        states = self._norm(states + _drop(mixed, masks), 0)
        inner = torch.baddbmm(self.bias_in, states, self.weight_in).relu()
        added = torch.baddbmm(self.bias_out, _drop(inner, masks), self.weight_out)
        return self._norm(states + _drop(added, masks), 1).view(shape)

    def _norm(self, states: Tensor, place: int) -> Tensor:
        normalized = F.layer_norm(states, states.shape[-1:])
        return torch.addcmul(self.norm_bias[:, place], normalized, self.norm_weight[:, place])


def _dropout_masks(
    sizes: Sequence[int], generators: Sequence[torch.Generator] | None
) -> Iterator[Tensor] | None:
    """Draw `[S, size]` factors, 0 or 1 / (1 - 0.1), for every size; a seed draws all at once."""
    if generators is None:
        return None
    draws = torch.stack([torch.rand(sum(sizes), generator=g) for g in generators])
    return iter((draws.ge(DROPOUT) / (1 - DROPOUT)).split(sizes, dim=1))


def _drop(states: Tensor, masks: Iterator[Tensor] | None) -> Tensor:
    return states if masks is None else states * next(masks).reshape(states.shape)
