"""Multi-head cross-entropy on modular addition: does it grok earlier?"""

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from experiments.stacked import (
    StackedMLP,
    multi_head_log_probs,
    principal_components,
    reproduce,
    seeded_generators,
)
from harmonic_sft.results import show_table

NUM_EPOCHS = 2000
NUM_HEADS = (1, 2, 4, 8)
MODULUS = 31
NUM_EXAMPLES = 1000  # of the 961 pairs, with replacement: 56 % of the test examples are trained on
NUM_TRAINING = 800
HIDDEN_SIZE = 16
BATCH_SIZE = 32
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 1e-2
PENALTY = 1e-2  # times the mean over columns of the root mean square of the embedding
EPOCHS_BETWEEN_EVALUATIONS = 5
THRESHOLD = 0.9
NUM_ABOVE = 5  # evaluations in a row, 20 epochs from the first to the last


def draw_examples(generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
    """Return pairs `[S, 1000, 2]` and their sums modulo 31 `[S, 1000]`, drawn per seed."""
    shape = (NUM_EXAMPLES, 2)
    pairs = torch.stack([torch.randint(MODULUS, shape, generator=g) for g in generators])
    return pairs, pairs.sum(-1) % MODULUS


def token_losses(model: StackedMLP, pairs: Tensor, labels: Tensor, num_heads: int) -> Tensor:
    """Return the losses `[S, N]`, in nats, of pairs `[S, N, 2]` with labels `[S, N]`."""
    log_probs = multi_head_log_probs(model(pairs), model.embedding, num_heads)
    return -log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def train(num_heads: int, seeds: Sequence[int], num_epochs: int) -> tuple[StackedMLP, Tensor]:
    """Train one model per seed; the seeds of another number of heads see the same batches.

    Args:
        num_heads: M, a divisor of 16.
        seeds: One model each.
        num_epochs: At least 1.

    Returns:
        The models and their accuracies `[evaluations, 2, S]`, 0 to 1, on training and test
        examples.

    Source:
        Baek et al. 2025, arXiv:2502.01628, the released code's setting for their standard MLP,
        but without a bias in the output layer, and with an embedding penalty that acts: in the
        released code that of the MLPs has no gradient.
    """
    generators = seeded_generators(seeds)
    pairs, labels = draw_examples(generators)
    model = StackedMLP(generators, vocab_size=MODULUS, num_inputs=2, hidden_size=HIDDEN_SIZE)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
    )
    seed_axis = torch.arange(len(seeds)).unsqueeze(-1)
    evaluated = evaluated_epochs(num_epochs)
    accuracies = []
    for epoch in range(1, num_epochs + 1):
        order = torch.stack([torch.randperm(NUM_TRAINING, generator=g) for g in generators])
        for rows in order.split(BATCH_SIZE, dim=-1):
            batch = pairs[seed_axis, rows], labels[seed_axis, rows]
            losses = token_losses(model, *batch, num_heads).mean(-1)  # [S]
            penalties = model.embedding.square().mean(1).sqrt().mean(-1)  # [S]
            optimizer.zero_grad()
            (losses + PENALTY * penalties).sum().backward()
            optimizer.step()
        if epoch in evaluated:
            accuracies.append(_accuracies(model, pairs, labels, num_heads))
    return model, torch.stack(accuracies)


def evaluated_epochs(num_epochs: int) -> list[int]:
    """Return the epochs after which accuracies are taken: every fifth and the last."""
    regular = range(EPOCHS_BETWEEN_EVALUATIONS, num_epochs, EPOCHS_BETWEEN_EVALUATIONS)
    return [*regular, num_epochs]


def first_stable_epoch(accuracies: Sequence[float]) -> int | None:
    """Return the first evaluated epoch from which accuracy stays above 0.9 for 20 epochs.

    Args:
        accuracies: 0 to 1, one for every 5 epochs.

    Returns:
        The epoch, None if there is none.
    """
    for start in range(len(accuracies) - NUM_ABOVE + 1):
        if min(accuracies[start : start + NUM_ABOVE]) > THRESHOLD:
            return (start + 1) * EPOCHS_BETWEEN_EVALUATIONS
    return None


def main(name: str, arguments: Sequence[str]) -> None:
    """Run the experiment as the command line says."""
    reproduce(name, arguments, run=run, show=show, num_epochs=NUM_EPOCHS)


def run(num_seeds: int, num_epochs: int) -> dict[str, Any]:
    """Train every number of heads.

    Args:
        num_seeds: Seeds 0, 1, ... of each.
        num_epochs: At least 1.

    Returns:
        `evaluated_epochs`, and `rows`, one for each number of heads (see `_row`) with
        `num_earlier`, the seeds whose test accuracy passes 0.9 earlier than with one head.
    """
    rows: list[dict[str, Any]] = []
    for num_heads in NUM_HEADS:
        row = _row(num_heads, range(num_seeds), num_epochs)
        one_head = rows[0] if rows else row
        pairs = zip(row["test_epochs"], one_head["test_epochs"], strict=True)
        rows.append({**row, "num_earlier": sum(_is_earlier(*pair) for pair in pairs)})
    return {
        "num_seeds": num_seeds,
        "num_epochs": num_epochs,
        "evaluated_epochs": evaluated_epochs(num_epochs),
        "rows": rows,
    }


def show(payload: dict[str, Any]) -> None:
    """Print when training and test accuracy pass 0.9, over seeds."""
    columns = ["heads", "training", "test", "least", "most", "reached", "earlier than 1 head"]
    columns += ["final test accuracy", "variance in two components (%)"]
    rows = []
    for row in payload["rows"]:
        reached = [epoch for epoch in row["test_epochs"] if epoch is not None]
        rows.append(
            [
                row["num_heads"],
                row["median_train_epoch"],
                row["median_test_epoch"],
                min(reached, default=None),
                max(reached, default=None),
                len(reached),
                row["num_earlier"],
                fmean(row["final_test_accuracy"]),
                fmean(row["percent"]),
            ]
        )
    seeds = f"{payload['num_seeds']} seeds of {payload['num_epochs']} epochs"
    show_table(f"Median epoch at which accuracy passes 0.9 for good, {seeds}", columns, rows)


def _row(num_heads: int, seeds: Sequence[int], num_epochs: int) -> dict[str, Any]:
    """Return what one number of heads gives.

    Per seed: `train_epochs` and `test_epochs` (see `first_stable_epoch`), the final accuracies (0
    to 1) and `percent`, the variance of the embedding in two components. `curves` are means over
    seeds at each evaluation; a median is None if half of the seeds never arrive.
    """
    model, accuracies = train(num_heads, seeds, num_epochs)
    train_epochs, test_epochs = (
        [first_stable_epoch(curve) for curve in accuracies[:, part].T.tolist()] for part in (0, 1)
    )
    shares, _ = principal_components(model.embedding.detach())
    curves = torch.round(accuracies.mean(-1), decimals=4)  # [evaluations, 2]
    return {
        "num_heads": num_heads,
        "train_epochs": train_epochs,
        "test_epochs": test_epochs,
        "median_train_epoch": _median(train_epochs),
        "median_test_epoch": _median(test_epochs),
        "final_train_accuracy": accuracies[-1, 0].tolist(),
        "final_test_accuracy": accuracies[-1, 1].tolist(),
        "percent": torch.round(100 * shares.sum(-1), decimals=3).tolist(),
        "curves": {"train": curves[:, 0].tolist(), "test": curves[:, 1].tolist()},
    }


def _median(epochs: Sequence[int | None]) -> float | None:
    """Return the median, None where it is a seed that never arrives."""
    middle = median(math.inf if epoch is None else epoch for epoch in epochs)
    return middle if math.isfinite(middle) else None


def _is_earlier(epoch: int | None, other: int | None) -> bool:
    return epoch is not None and (other is None or epoch < other)


@torch.no_grad()
def _accuracies(model: StackedMLP, pairs: Tensor, labels: Tensor, num_heads: int) -> Tensor:
    """Return accuracies `[2, S]`, 0 to 1, on training and test examples."""
    hits = multi_head_log_probs(model(pairs), model.embedding, num_heads).argmax(-1) == labels
    training, test = hits.double().split([NUM_TRAINING, NUM_EXAMPLES - NUM_TRAINING], dim=-1)
    return torch.stack([training.mean(-1), test.mean(-1)])
