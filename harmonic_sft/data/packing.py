"""Which rows share one longer row, and what a row of several documents looks like."""

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Put rows into packs by best-fit decreasing, every row whole and in one pack.

    From the longest row to the shortest, each goes where it leaves the least space. Of equally long
    rows the first comes first, and of equally full packs the one that has been so for longest.

    Args:
        lengths: `[R]`, tokens of every row, integers from 1 to `capacity`.
        capacity: Most tokens of a pack.

    Returns:
        The rows' numbers in each pack, int64 and ascending; the packs in the order of their first
        rows, so that rows keep to their neighborhood and lengths are mixed.

    Raises:
        ValueError: A row is empty or does not fit into a pack.

    Source:
        Ding et al. 2024, Fewer Truncations Improve Language Modeling, arXiv:2404.10830. There rows
        that are too long for a pack are cut first; here they are refused.
    """
    lengths = np.asarray(lengths)
    _check_lengths(lengths, capacity)
    packs: list[list[int]] = []
    by_space: defaultdict[int, deque[int]] = defaultdict(deque)
    spaces: list[int] = []  # sorted, those in which a pack waits in `by_space`
    order = np.argsort(-lengths, kind="stable")
    for row, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        place = bisect_left(spaces, length)
        if place < len(spaces):
            space = spaces[place]
            waiting = by_space[space]
            number = waiting.popleft()
            packs[number].append(row)
            if not waiting:
                del spaces[place]
        else:
            space, number = capacity, len(packs)
            packs.append([row])
        left = space - length
        if left:
            if not by_space[left]:
                insort(spaces, left)
            by_space[left].append(number)
    return sorted((np.sort(np.array(rows, dtype=np.int64)) for rows in packs), key=lambda p: p[0])


def _check_lengths(lengths: np.ndarray, capacity: int) -> None:
    bad = np.flatnonzero((lengths < 1) | (lengths > capacity))
    if len(bad):
        raise ValueError(
            f"lengths: expected rows of 1 to {capacity} tokens, the capacity of a pack, "
            f"got {lengths[bad[0]]} in row {bad[0]}. Cut the rows or raise the capacity."
        )


def fill_rate(lengths: np.ndarray, packs: Sequence[np.ndarray], capacity: int) -> float:
    """Return the share of the packs' places that tokens take, from 0 to 1.

    Args:
        lengths: As in `pack`.
        packs: Of `pack`.
        capacity: As in `pack`.
    """
    tokens = sum(int(np.asarray(lengths)[rows].sum()) for rows in packs)
    return tokens / (len(packs) * capacity) if packs else 0.0


def join_rows(rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Make one row of several.

    Args:
        rows: The same columns in each, all `[T]`, `input_ids` among them.

    Returns:
        The columns, one row after the other. If there are no `position_ids` yet they are added,
        int64, starting anew at 0 in each row.
    """
    joined = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    if "position_ids" not in joined:
        positions = [np.arange(len(row["input_ids"]), dtype=np.int64) for row in rows]
        joined["position_ids"] = np.concatenate(positions)
    return joined
