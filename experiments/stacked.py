"""Small models trained for many seeds at once: seeds are the leading axis S of every tensor."""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.figures import check_output, keep, positive

WIDTH = 100  # of an MLP's layer in between


class StackedMLP(nn.Module):
    """One embedding and two-layer MLP per seed: Linear, SiLU, Linear.

    Nothing is shared between seeds, so that the gradients of a sum over seeds are those of
    separate runs. Every tensor starts as PyTorch starts a linear layer, the embedding like the
    output layer that it is tied to: U(-1 / sqrt(D), 1 / sqrt(D)).

    Args:
        generators: One for each seed.
        vocab_size: V, rows of the embedding.
        num_inputs: Tokens that are embedded and concatenated.
        hidden_size: D, of an embedding and of the output.

    Attributes:
        embedding: `[S, V, D]`, also the prototypes of the output layer.

    Source:
        The MLP of Baek et al. 2025, arXiv:2502.01628, as their released code ties and draws it.
    """

    def __init__(
        self,
        generators: Sequence[torch.Generator],
        *,
        vocab_size: int,
        num_inputs: int,
        hidden_size: int,
    ):
        super().__init__()
        draw, features = partial(draw_uniform, generators), num_inputs * hidden_size
        self.embedding = draw(vocab_size, hidden_size, bound=hidden_size**-0.5)
        self.weight_in = draw(features, WIDTH, bound=features**-0.5)
        self.bias_in = draw(1, WIDTH, bound=features**-0.5)
        self.weight_out = draw(WIDTH, hidden_size, bound=WIDTH**-0.5)
        self.bias_out = draw(1, hidden_size, bound=WIDTH**-0.5)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return hidden states `[S, N, D]` for input ids `[S, N, num_inputs]`."""
        embeddings = embed(input_ids, self.embedding).flatten(2)
        inner = torch.baddbmm(self.bias_in, embeddings, self.weight_in)
        return torch.baddbmm(self.bias_out, F.silu(inner), self.weight_out)  # [S, N, D]


def seeded_generators(seeds: Sequence[int]) -> list[torch.Generator]:
    """Return one generator for each seed, so that a seed draws the same beside any others."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def draw_uniform(generators: Sequence[torch.Generator], *shape: int, bound: float) -> nn.Parameter:
    """Return a parameter `[S, *shape]`, uniform from -bound to bound."""
    draws = [torch.empty(shape).uniform_(-bound, bound, generator=g) for g in generators]
    return nn.Parameter(torch.stack(draws))


def embed(input_ids: Tensor, embedding: Tensor) -> Tensor:
    """Return the rows `[S, N, T, D]` of `[S, V, D]` that input ids `[S, N, T]` name."""
    num_seeds, vocab_size, _ = embedding.shape
    offsets = vocab_size * torch.arange(num_seeds).view(-1, 1, 1)
    return F.embedding(input_ids + offsets, embedding.flatten(0, 1))


def multi_head_log_probs(hidden_states: Tensor, prototypes: Tensor, num_heads: int) -> Tensor:
    """Log of the mean of M softmaxes, each over its own slice of the columns, for every seed.

    Args:
        hidden_states: `[S, N, D]`.
        prototypes: `[S, V, D]`.
        num_heads: M, a divisor of D. 1 is the ordinary softmax.

    Returns:
        `[S, N, V]`, in nats: one seed is the `multi_head` head with a linear one inside.
    """
    slices = hidden_states.unflatten(-1, (num_heads, -1)).transpose(1, 2)  # [S, M, N, D / M]
    rows = prototypes.unflatten(-1, (num_heads, -1)).permute(0, 2, 3, 1)  # [S, M, D / M, V]
    parts = (slices @ rows).log_softmax(-1)  # [S, M, N, V]
    return parts.logsumexp(1) - math.log(num_heads)


def principal_components(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the first two principal components explain, and every row's place on them.

    Args:
        embeddings: `[S, V, D]`, centered here.

    Returns:
        Shares of the variance `[S, 2]`, 0 to 1, and coordinates `[S, V, 2]` in units of the
        embeddings, up to the sign of each component.
    """
    centered = embeddings.double() - embeddings.double().mean(1, keepdim=True)
    left, singular_values, _ = torch.linalg.svd(centered, full_matrices=False)
    variances = singular_values.square()  # [S, min(V, D)]
    shares = variances / variances.sum(-1, keepdim=True)
    return shares[:, :2], left[..., :2] * singular_values[:, None, :2]


def reproduce(
    name: str,
    arguments: Sequence[str],
    *,
    run: Callable[[int, int], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
    num_epochs: int,
) -> None:
    """Run an experiment on small models, print its table, and keep results and picture.

    Args:
        name: Of the experiment.
        arguments: What follows the name on the command line.
        run: From the numbers of seeds and of epochs to what was found.
        show: Prints that.
        num_epochs: The experiment's own.
    """
    parser = argparse.ArgumentParser(prog=f"python -m experiments {name}")
    parser.add_argument("--seeds", type=positive, default=10, help="how many; default: 10")
    parser.add_argument(
        "--epochs", type=positive, default=num_epochs, help=f"default: {num_epochs}"
    )
    parser.add_argument("--quick", action="store_true", help="two seeds, one epoch")
    parser.add_argument("--output", type=Path, default=Path("runs") / name, help="a folder")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seeds, options.epochs = 2, 1
    check_output(options.output)
    start = time.perf_counter()
    payload = run(options.seeds, options.epochs)
    show(payload)
    keep(name, {**payload, "seconds": round(time.perf_counter() - start, 1)}, options.output)
