"""What the head takes for similar: the nearest prototypes of words and of predictions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from harmonic_sft.data.encoding import SpecialTokens
from harmonic_sft.eval.language import check_length, word_ids
from harmonic_sft.models import DistanceLogits, HarmonicLanguageModel, Head
from harmonic_sft.models.head import squared_distances


@torch.no_grad()
def nearest_prototypes(
    head: Head, tokenizer: Any, words: Sequence[str], *, num_neighbors: int = 5
) -> dict[str, list[str]]:
    """Return the tokens whose prototypes are closest to each word's, by Euclidean distance.

    Words that are not a single token of the tokenizer, or unknown to it, are left out.
    """
    prototypes = head.prototypes.float()
    neighbors = {}
    for word in words:
        ids = word_ids(tokenizer, word)
        if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
            continue
        (found,) = nearest(prototypes, torch.tensor(ids), num_neighbors).tolist()
        neighbors[word] = _texts(tokenizer, found)
    return neighbors


def _texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return every token's text, or its name for white space and parts of a character.

    Rows that only pad the vocabulary have no name, and get their number.
    """
    texts = [tokenizer.decode([index]).strip() for index in ids]
    names = tokenizer.convert_ids_to_tokens(list(ids))
    shown = [
        text if text and "\ufffd" not in text else name or f"[{index}]"
        for index, text, name in zip(ids, texts, names, strict=True)
    ]
    return [text if text.isprintable() else repr(text)[1:-1] for text in shown]  # for a terminal


def nearest(table: Tensor, queries: Tensor, num_neighbors: int) -> Tensor:
    """Return the Euclidean neighbors `[Q, K]` of some rows of a table `[V, D]`, the closest first.

    Queries `[Q]` are numbers of rows, which are not their own neighbors. K is `num_neighbors`, or
    fewer if there are not as many.
    """
    queries, count = queries.to(table.device), min(num_neighbors, len(table) - 1)
    table = table - table.mean(0)  # a common offset would cost cdist's products digits
    parts = [
        torch.cdist(table[part], table)
        .scatter(1, part[:, None], torch.inf)
        .topk(count, largest=False)
        .indices
        for part in queries.split(256)
    ]
    return torch.cat(parts)


@torch.no_grad()
def explain(
    model: HarmonicLanguageModel, tokenizer: Any, text: str, *, top: int = 5, num_neighbors: int = 5
) -> list[list[dict[str, Any]]]:
    """Return the most probable tokens at every mask of a text, for a decoder after the text.

    Returns:
        For each place its `top` tokens: `token`, `probability`, `distance`, the Euclidean distance
        of hidden state and prototype as the head sees them (None for a head without distances), and
        `neighbors`, the tokens with the nearest prototypes.

    Raises:
        ValueError: A text without a mask or longer than the model's positions, or `top` is not from
            1 to the number of tokens.
    """
    head = model.dist_head
    if not 1 <= top <= len(head.prototypes):
        raise ValueError(f"--top: expected 1 to {len(head.prototypes)} tokens, got {top}")
    batch = tokenizer(text, return_tensors="pt").to(model.device)
    # A decoder continues the text, without the tokens that the tokenizer puts after it.
    ending = len(SpecialTokens.of(tokenizer).suffix) if model.is_causal else 0
    length = batch["input_ids"].shape[1] - ending
    ids = batch["input_ids"][0, :length]  # [T]
    check_length(model, len(ids))
    mask_token_id = -1 if tokenizer.mask_token_id is None else tokenizer.mask_token_id
    is_predicted = ids == mask_token_id  # [T]
    if model.is_causal:
        is_predicted = torch.arange(len(ids), device=ids.device) == len(ids) - 1
    if not is_predicted.any():
        wanted = f"{tokenizer.mask_token} where a token is to be predicted"
        raise ValueError(f"text: expected {'a text' if model.is_causal else wanted}, got {text!r}")
    inputs = {key: batch[key][:, :length] for key in ("input_ids", "attention_mask")}
    states = model.model(**inputs).last_hidden_state[0, is_predicted]  # [P, D]
    probabilities = head(states).softmax(-1)  # [P, V]
    lazy, distances = head.lazy_logits(states), None
    if isinstance(lazy, DistanceLogits):
        hidden_states, weight = lazy.hidden_states.float(), lazy.weight.float()
        squared = squared_distances(hidden_states, weight, unit_sphere=lazy.unit_sphere)
        distances = squared.clamp_min(0).sqrt()  # [P, V]
    prototypes = head.prototypes.float()
    return [
        [
            {
                "token": _texts(tokenizer, [index])[0],
                "probability": float(probabilities[place, index]),
                "distance": None if distances is None else float(distances[place, index]),
                "neighbors": _texts(tokenizer, near),
            }
            for index, near in zip(
                chosen.tolist(), nearest(prototypes, chosen, num_neighbors).tolist(), strict=True
            )
        ]
        for place, chosen in enumerate(probabilities.topk(top).indices)
    ]
