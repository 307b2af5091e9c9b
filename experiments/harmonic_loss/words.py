"""Parallelograms of word pairs: by the paper's two components, in all dimensions, by layer."""

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn

from experiments.stacked import principal_components
from harmonic_sft.eval.geometry import parallelograms

TASKS = (  # of the paper
    "antonym",
    "synonym",
    "english-german",
    "english-french",
    "english-spanish",
    "capitalize",
    "word_length",
    "present-past",
    "prev_item",
    "next_item",
    "singular-plural",
    "country-capital",
)
NUM_QUADRUPLES = 10_000
NUM_ORDERS = 20  # of shuffled outputs
NUM_QUANTILES = 41
Pairs = list[tuple[int, int]]


def read_pairs(items: Sequence[dict[str, str]], tokenizer: ByteLevelBPETokenizer) -> Pairs:
    """Return the token ids of pairs whose words are single tokens, and not the same one.

    A word is cut as it stands in a sentence, after a space; the paper's code leaves the space out
    and takes the last token of the word.
    """
    ids = [[tokenizer.encode(f" {item[key]}").ids for key in ("input", "output")] for item in items]
    single = [(one[0], two[0]) for one, two in ids if len(one) == len(two) == 1]
    return [pair for pair in dict.fromkeys(single) if pair[0] != pair[1]]


def two_component_scores(plane: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Return how far quadruples of words are from parallelograms in two principal components.

    Args:
        plane: `[V, 2]`, the words on two components, see `principal_components`.
        pairs: Token ids of input and output, at least 2 pairs.

    Returns:
        |(b - a) - (d - c)|^2 over the mean |E_k|^2 of all rows, `[Q]`, 0 being perfect, and the
        same with the outputs permuted, in 20 orders.

    Source:
        Baek et al. 2025, arXiv:2502.01628, Eq. 3, squared as in the released code; 10,000
        quadruples of a seed, the second pair any other than the first.
    """
    scale = plane.square().sum(-1).mean()
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor(pairs)
    first = torch.randint(len(ids), (NUM_QUADRUPLES,), generator=generator)
    step = torch.randint(1, len(ids), (NUM_QUADRUPLES,), generator=generator)
    second = (first + step) % len(ids)
    count = torch.arange(len(ids)).expand(NUM_ORDERS, -1)
    orders = torch.stack([torch.randperm(len(ids), generator=generator) for _ in count])
    which = torch.arange(NUM_QUADRUPLES) % NUM_ORDERS
    actual, shuffled = (
        plane[ids[:, 1]][order] - plane[ids[:, 0]] for order in (count, orders)
    )  # [NUM_ORDERS, P, 2]
    scores = [
        (offsets[which, first] - offsets[which, second]).square().sum(-1) / scale
        for offsets in (actual, shuffled)
    ]
    return scores[0], scores[1]


def measure(table: Tensor, tasks: dict[str, Pairs]) -> dict[str, dict[str, Any]]:
    """Return how parallel the pairs of every task are in a table `[V, D]`.

    Returns:
        By task: `two_components` and `two_components_shuffled`, medians of `two_component_scores`,
        and `ratio` of the first to the second; `full` and `full_shuffled`, see
        `harmonic_sft.eval.geometry.parallelograms`, and `full_ratio`; `quantiles` and
        `quantiles_shuffled` of the scores from 0 to 1.
    """
    _, (plane,) = principal_components(table.detach().unsqueeze(0))
    return {name: _measure_task(table, plane, pairs) for name, pairs in tasks.items()}


def _measure_task(table: Tensor, plane: Tensor, pairs: Pairs) -> dict[str, Any]:
    scores, shuffled = two_component_scores(plane, pairs)
    places = torch.linspace(0, 1, NUM_QUANTILES, dtype=torch.float64)
    quantiles, control = (
        [round(value, 4) for value in found.quantile(places).tolist()]
        for found in (scores, shuffled)
    )
    whole = parallelograms(table.detach(), pairs)
    return {
        "two_components": float(scores.median()),
        "two_components_shuffled": float(shuffled.median()),
        "ratio": float(scores.median() / shuffled.median()),
        "full": whole["parallelogram_loss"],
        "full_shuffled": whole["shuffled"],
        "full_ratio": whole["parallelogram_loss"] / whole["shuffled"],
        "quantiles": quantiles,
        "quantiles_shuffled": control,
    }


@torch.no_grad()
def measure_layers(body: nn.Module, pairs: Pairs) -> list[list[float]]:
    """Return full-dimension loss and its shuffled control after every layer, words read alone."""
    words = sorted({word for pair in pairs for word in pair})
    rows = {word: row for row, word in enumerate(words)}
    output = body(torch.tensor(words)[:, None], output_hidden_states=True)
    places = [(rows[one], rows[two]) for one, two in pairs]
    found = (parallelograms(states[:, 0], places) for states in output.hidden_states)
    return [[one["parallelogram_loss"], one["shuffled"]] for one in found]
