"""Kinds of sub-words, and which kinds are whose neighbors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

KINDS = ("word", "piece", "character", "special")
MARK = "##"  # WordPiece's sign of a piece that continues a word


def token_kind(token: str) -> str:
    """Return which of `KINDS` a token of a WordPiece vocabulary is.

    "[CLS]" and "[unused7]" are special, "##ing" and "##s" pieces, "q" and "%" characters. All
    others count as words, although a few, such as "electro", are only ever a beginning.
    """
    if token.startswith("[") and token.endswith("]") and len(token) > 2:
        return "special"
    if token.startswith(MARK) and len(token) > len(MARK):
        return "piece"
    return "character" if len(token) == 1 else "word"


def plain_form(token: str) -> str:
    """Return the letters of a token, without "##" and in lower case."""
    return (token.removeprefix(MARK) if token_kind(token) == "piece" else token).lower()


def describe_neighbors(tokens: Sequence[str], neighbors: Tensor) -> dict[str, Any]:
    """Sum up the neighbors of every kind of token.

    Args:
        tokens: The vocabulary, V strings in the order of their ids.
        neighbors: `[V, K]`, ids of the nearest others.

    Returns:
        By kind that occurs: `tokens`, how many; `neighbors`, the share of their neighbors of each
        kind; `same_form`, the share of neighbors with the same `plain_form`; `with_twin`, how many
        have another token of the same form, and `twin_found`, the share of these with one among
        their neighbors (None if there is none).
    """
    kinds = torch.tensor([KINDS.index(token_kind(token)) for token in tokens])  # [V]
    forms = [plain_form(token) for token in tokens]
    numbers = {form: number for number, form in enumerate(dict.fromkeys(forms))}
    form_ids = torch.tensor([numbers[form] for form in forms])  # [V]
    same = form_ids[neighbors.cpu()] == form_ids.unsqueeze(-1)  # [V, K]
    has_twin = form_ids.bincount()[form_ids] > 1  # [V]
    neighbor_kinds = kinds[neighbors.cpu()]  # [V, K]
    described = {}
    for index, kind in enumerate(KINDS):
        rows = kinds == index
        if not rows.any():
            continue
        counts = neighbor_kinds[rows].flatten().bincount(minlength=len(KINDS))
        shares = (counts / counts.sum()).tolist()
        twins = rows & has_twin
        found = same[twins].any(-1).float().mean().item() if twins.any() else None
        described[kind] = {
            "tokens": int(rows.sum()),
            "neighbors": dict(zip(KINDS, shares, strict=True)),
            "same_form": same[rows].float().mean().item(),
            "with_twin": int(twins.sum()),
            "twin_found": found,
        }
    return described


def neighbor_overlap(first: Tensor, other: Tensor, weights: Tensor | None = None) -> float:
    """Return the share of neighbors that a table has in common with another one.

    Args:
        first: `[V, K]`, ids of neighbors, none twice in a row.
        other: `[V, K]`, of the same tokens.
        weights: `[V]`, how much a token counts; default: all alike.

    Returns:
        The weighted mean over tokens, from 0 to 1.
    """
    kept = (first.unsqueeze(-1) == other.unsqueeze(-2)).any(-1).double().mean(-1)  # [V]
    weights = torch.ones_like(kept) if weights is None else weights.double()
    return float((kept * weights).sum() / weights.sum())
