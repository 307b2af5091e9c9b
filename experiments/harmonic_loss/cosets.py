"""Appendix B: do the embeddings of permutations cluster by the cosets of a subgroup?"""

from collections.abc import Sequence
from itertools import permutations, product
from typing import Any

import numpy as np
from sklearn.decomposition import PCA

GROUP = list(permutations(range(4)))  # S4, in the order of the tokens
PRODUCT = np.array([[GROUP.index(tuple(x[i] for i in y)) for y in GROUP] for x in GROUP])
NUM_SHUFFLES = 100


def subgroups() -> list[frozenset[int]]:
    """Return all subgroups of S4, smallest first; two elements generate each of them."""
    found = {_generated(pair) for pair in product(range(len(GROUP)), repeat=2)}
    return sorted(found, key=lambda subgroup: (len(subgroup), sorted(subgroup)))


def partitions() -> dict[tuple[int, ...], str]:
    """Return every partition of S4 into left or right cosets of a proper nontrivial subgroup.

    Returns:
        Names by partitions, each the index of a coset for every one of the 24 elements.
    """
    found: dict[tuple[int, ...], str] = {}
    for subgroup in subgroups():
        members = sorted(subgroup)
        if 1 < len(members) < len(GROUP):
            elements = ", ".join("".join(map(str, GROUP[member])) for member in members)
            for side, table in (("left", PRODUCT), ("right", PRODUCT.T)):
                cosets = [tuple(sorted(table[x, members])) for x in range(len(GROUP))]
                numbers = {coset: index for index, coset in enumerate(dict.fromkeys(cosets))}
                partition = tuple(numbers[coset] for coset in cosets)
                found.setdefault(partition, f"{side} cosets of {{{elements}}}")
    return found


def silhouettes(embeddings: np.ndarray, partition: Sequence[int]) -> np.ndarray:
    """Return the mean silhouette coefficients `[R]` of embeddings `[R, N, D]` in one partition.

    Args:
        embeddings: R matrices at once, for which scikit-learn would need a second each.
        partition: The cluster 0, 1, ... of every row, all clusters of one size above 1.

    Source:
        Rousseeuw 1987, Silhouettes, doi:10.1016/0377-0427(87)90125-7.
    """
    norms = np.square(embeddings).sum(-1)
    dots = embeddings @ embeddings.swapaxes(1, 2)
    squared = norms[:, :, None] + norms[:, None] - 2 * dots
    members = np.eye(max(partition) + 1)[list(partition)]  # [N, clusters]
    sums = np.sqrt(squared.clip(0)) @ members  # [R, N, clusters]
    size = members[:, 0].sum()
    own = (sums * members).sum(-1) / (size - 1)
    nearest = np.where(members, np.inf, sums / size).min(-1)
    return ((nearest - own) / np.maximum(own, nearest)).mean(-1)


def analyze(embeddings: Sequence[Any], num_shuffles: int = NUM_SHUFFLES) -> list[dict[str, Any]]:
    """Find the best partition of every seed's embedding and what chance would give.

    Args:
        embeddings: `[S, 24, D]`, one row for each token of the permutation task.
        num_shuffles: Of the rows, after which the best partition is sought again.

    Returns:
        Per seed `silhouette`, `name` and `partition` of the best, `chance` (the 95 % quantile over
        shuffles) and `places`, the rows `[24, 2]` on their first two components.
    """
    rng, names = np.random.default_rng(0), partitions()
    rows = []
    for one in embeddings:
        embedding = np.asarray(one)
        shuffled = [rng.permutation(embedding) for _ in range(num_shuffles)]
        matrices = np.stack([embedding, *shuffled])
        scores = np.stack([silhouettes(matrices, partition) for partition in names])
        best = list(names)[scores[:, 0].argmax()]
        rows.append(
            {
                "silhouette": float(scores[:, 0].max()),
                "name": names[best],
                "partition": list(best),
                "chance": float(np.quantile(scores[:, 1:].max(0), 0.95)),
                "places": PCA(2).fit_transform(embedding).round(4).tolist(),
            }
        )
    return rows


def _generated(elements: Sequence[int]) -> frozenset[int]:
    """Return the subgroup that some elements generate."""
    subgroup = {0, *elements}  # 0 is the identity
    while len(larger := subgroup | {int(PRODUCT[x, y]) for x in subgroup for y in subgroup}) > len(
        subgroup
    ):
        subgroup = larger
    return frozenset(subgroup)
