"""The nearest prototypes of a few words: what the head takes for similar."""

from collections.abc import Sequence
from typing import Any

import torch

from harmonic_sft.models import Head


@torch.no_grad()
def nearest_prototypes(
    head: Head, tokenizer: Any, words: Sequence[str], *, num_neighbors: int = 5
) -> dict[str, list[str]]:
    """Return the tokens whose prototypes are closest to each word's.

    Args:
        head: Its prototypes are compared by Euclidean distance.
        tokenizer: Words that are not a single token of it are left out.
        words: What to look up.
        num_neighbors: How many to return for each word.
    """
    prototypes = head.prototypes.float()
    neighbors = {}
    for word in words:
        ids = tokenizer(word, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            continue
        distances = (prototypes - prototypes[ids[0]]).square().sum(-1)
        distances[ids[0]] = torch.inf
        nearest = distances.topk(num_neighbors, largest=False).indices.tolist()
        neighbors[word] = tokenizer.convert_ids_to_tokens(nearest)
    return neighbors
