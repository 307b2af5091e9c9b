"""The five algorithmic tasks of the harmonic-loss paper, and two ways to split their examples."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from experiments.harmonic_loss.cosets import GROUP, PRODUCT

Split = Literal["released", "clean"]
NUM_EXAMPLES = 1000
GRID = 5
MODULUS = 31
NUM_NUMBERS, DIVISOR = 40, 5
NUM_NODES = 126  # the paper says 127; the released code's range(1, 127) stops before
PARENT, GRANDPARENT, SIBLING = 127, 128, 129


class Task(NamedTuple):
    """All distinct examples of a task.

    Attributes:
        inputs: `[N, num_inputs]`, token ids.
        labels: `[N]`, token ids.
        vocab_size: V.
        tokens: The rows of the embedding whose variance is explained.
        replacement: The released code draws 1,000 of these examples with replacement before it
            splits them; without, it takes them all once.
    """

    inputs: Tensor
    labels: Tensor
    vocab_size: int
    tokens: range
    replacement: bool = True


class Examples(NamedTuple):
    """Examples of every seed; the first `num_training` are trained on, the rest are the test."""

    inputs: Tensor  # [S, N, num_inputs]
    labels: Tensor  # [S, N]
    num_training: int


def in_context() -> Task:
    """Return the lattice: d = b + c - a for points of a 5 x 5 grid, where d is on the grid."""
    points = torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID))  # [25, 2]
    triples = torch.cartesian_prod(*[torch.arange(GRID**2)] * 3)  # [25 ** 3, 3]
    a, b, c = points[triples].unbind(1)
    targets = b + c - a
    inside = ((targets >= 0) & (targets < GRID)).all(-1)
    labels = targets[:, 0] * GRID + targets[:, 1]
    return Task(triples[inside], labels[inside], GRID**2, range(GRID**2))


def modular_addition() -> Task:
    """Return x + y modulo 31."""
    pairs = torch.cartesian_prod(*[torch.arange(MODULUS)] * 2)
    return Task(pairs, pairs.sum(-1) % MODULUS, MODULUS, range(MODULUS))


def equivalence() -> Task:
    """Return whether x = y modulo 5: token 40 says yes, 41 says no."""
    pairs = torch.cartesian_prod(*[torch.arange(NUM_NUMBERS)] * 2)
    labels = NUM_NUMBERS + (pairs.diff() % DIVISOR != 0).long().squeeze(-1)
    return Task(pairs, labels, NUM_NUMBERS + 2, range(NUM_NUMBERS))


def genealogy() -> Task:
    """Return parent, grandparent and sibling of the nodes 1 to 126 of a binary tree.

    As in the released code, node i has the children 2 i and 2 i + 1, and the sibling of 126 is
    127, which is also the token of the relation "parent".
    """
    nodes = range(1, NUM_NODES + 1)
    examples = [((i, PARENT), i // 2) for i in nodes if i >= 2]
    examples += [((i, GRANDPARENT), i // 4) for i in nodes if i >= 4]
    examples += [((i, SIBLING), i ^ 1) for i in nodes if i >= 2]
    inputs, labels = map(torch.tensor, zip(*examples, strict=True))
    return Task(inputs, labels, SIBLING + 1, range(1, NUM_NODES + 1))


def permutation() -> Task:
    """Return the composition of two permutations of four things, x after y."""
    size = len(GROUP)
    pairs = torch.cartesian_prod(*[torch.arange(size)] * 2)
    labels = torch.from_numpy(PRODUCT).flatten()
    return Task(pairs, labels, size, range(size), replacement=False)


TASKS: dict[str, Callable[[], Task]] = {
    "in_context": in_context,
    "modular_addition": modular_addition,
    "equivalence": equivalence,
    "genealogy": genealogy,
    "permutation": permutation,
}


def draw_examples(
    task: Task, split: Split, train_fraction: float, generators: Sequence[torch.Generator]
) -> Examples:
    """Draw and split the examples of every seed.

    Args:
        task: What to draw from.
        split: "released": 1,000 examples with replacement, then split, so that a test example may
            also be trained on. "clean": up to 1,000 distinct examples.
        train_fraction: The share that is trained on, 0 to 1.
        generators: One for each seed.
    """
    size = len(task.labels)
    if split == "released" and task.replacement:
        rows = [torch.randint(size, (NUM_EXAMPLES,), generator=g) for g in generators]
    else:
        rows = [torch.randperm(size, generator=g)[:NUM_EXAMPLES] for g in generators]
    chosen = torch.stack(rows)  # [S, N]
    num_training = int(chosen.shape[1] * train_fraction)
    return Examples(task.inputs[chosen], task.labels[chosen], num_training)


def share_seen(examples: Examples) -> list[float]:
    """Return the share of each seed's test examples that are also training examples, 0 to 1."""
    shares = []
    for inputs in examples.inputs.tolist():
        seen = {tuple(one) for one in inputs[: examples.num_training]}
        test = [tuple(one) for one in inputs[examples.num_training :]]
        shares.append(sum(one in seen for one in test) / len(test))
    return shares
