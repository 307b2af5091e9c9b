"""The shape of a table of prototypes: spectrum, hubs, drift, class centers, parallelograms."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import skew
from torch import Tensor

from harmonic_sft.eval.neighbors import nearest

NUM_ROWS = 2000  # of a table, whose neighbors are looked up
NUM_NEIGHBORS = 10
TINY = 1e-300  # a float64 denominator in place of 0


@torch.no_grad()
def spectrum(prototypes: Tensor) -> dict[str, float]:
    """Return how many directions the prototypes, `[V, D]`, fill.

    Returns:
        `explained_variance_2` and `explained_variance_10`, the shares of the 2 and 10 first
        principal components from 0 to 1; `effective_dimension`, the participation ratio of the
        covariance's eigenvalues; and `mean_cosine` of all pairs: 0 if they have no common
        direction, which does not make them isotropic. If all rows are equal, the first three are 0.

    Raises:
        ValueError: Fewer than 2 rows, or values that are not finite.

    Source:
        Gao et al. 2017, A theory of multineuronal dimensionality, dynamics and measurement, bioRxiv
        214262 (participation ratio); Ethayarajh 2019, arXiv:1909.00512 (mean cosine).
    """
    table = prototypes.cpu().double()
    if len(table) < 2 or not table.isfinite().all():
        got = len(table) if len(table) < 2 else "values that are not"
        raise ValueError(f"spectrum: expected at least 2 finite rows, got {got}")
    covariance = torch.atleast_2d(torch.cov(table.T))
    eigenvalues = torch.linalg.eigvalsh(covariance).flip(0).clamp_min(0)
    total, squares = eigenvalues.sum(), eigenvalues.square().sum()
    shares = eigenvalues / total.clamp_min(TINY)
    directions, count = F.normalize(table, dim=-1), len(table)
    own = directions.square().sum()  # number of rows that are not 0
    pairs = (directions.sum(0).square().sum() - own) / (count * (count - 1))
    return {
        "explained_variance_2": float(shares[:2].sum()),
        "explained_variance_10": float(shares[:10].sum()),
        "effective_dimension": float(total**2 / squares.clamp_min(TINY)),
        "mean_cosine": float(pairs),
    }


@torch.no_grad()
def hubness(prototypes: Tensor) -> dict[str, float]:
    """Return whether a few prototypes, `[V, D]`, are the Euclidean neighbors of many.

    Returns:
        `hubness`, the skewness of how often a prototype is among the 10 neighbors of others, and
        `never_neighbor`, the share that never is, from 0 to 1; both among `NUM_ROWS` of them, so
        that vocabularies of different sizes can be compared.

    Source:
        Radovanovic, Nanopoulos, Ivanovic 2010, Hubs in Space, JMLR 11.
    """
    table = prototypes.float()
    table = table[_spread(len(table)).to(table.device)]
    neighbors = nearest(table, torch.arange(len(table)), NUM_NEIGHBORS)
    counts = neighbors.flatten().bincount(minlength=len(table))
    return {
        "hubness": float(skew(counts.cpu().numpy())),
        "never_neighbor": float((counts == 0).float().mean()),
    }


@torch.no_grad()
def drift(table: Tensor, base: Tensor) -> dict[str, float]:
    """Return how far vectors, `[V, D]`, moved from those they started as.

    Returns:
        `drift_cosine`, the mean cosine of old and new, and `neighbors_kept`, the share of the 10
        nearest by cosine that stayed, from 0 to 1. Rows whose old vector is 0 do not count: it has
        no direction, and would be a neighbor of all.
    """
    known = base.any(-1)
    new, old = (F.normalize(vectors[known].float(), dim=-1) for vectors in (table, base))
    now, before = (nearest(side, _spread(len(side)), NUM_NEIGHBORS) for side in (new, old))
    kept = (now[:, :, None] == before[:, None, :]).any(-1)  # [Q, K]
    return {
        "drift_cosine": float((new * old).sum(-1).mean()),
        "neighbors_kept": float(kept.float().mean()),
    }


def _spread(count: int) -> Tensor:
    """Return the numbers of evenly spread rows, `[Q]`."""
    return torch.linspace(0, count - 1, min(NUM_ROWS, count)).long()


@torch.no_grad()
def class_center_alignment(hidden_states: Tensor, labels: Tensor, prototypes: Tensor) -> float:
    """Return the mean cosine of a class's prototype and the mean of its hidden states.

    Only classes with a hidden state count. From both, the mean over these classes is subtracted:
    what all classes share would make unrelated ones look aligned.

    Source:
        Papyan, Han, Donoho 2020, Prevalence of Neural Collapse, arXiv:2008.08186, property 3, here
        for states of norm 1.
    """
    states, table = hidden_states.cpu().double(), prototypes.cpu().double()
    present, numbers, counts = labels.cpu().unique(return_inverse=True, return_counts=True)
    sums = torch.zeros_like(table[present]).index_add_(0, numbers, F.normalize(states, dim=-1))
    centers, rows = sums / counts.unsqueeze(1), table[present]
    return float(F.cosine_similarity(centers - centers.mean(0), rows - rows.mean(0), dim=-1).mean())


@torch.no_grad()
def parallelograms(table: Tensor, pairs: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Return whether all pairs of a relation have one offset: b - a of one is d - c of another.

    Args:
        table: `[V, D]`.
        pairs: Token ids of input and output of every pair.

    Returns:
        `parallelogram_loss`, the mean of |(b - a) - (d - c)|^2 / (|b - a|^2 + |d - c|^2): 0 is
        perfect, 1 unrelated; and `shuffled`, the same with the outputs permuted, the control that a
        relation has to beat.

    Raises:
        ValueError: Fewer than 3 pairs.

    Source:
        Baek et al. 2025, arXiv:2502.01628, Sec. 5, who take two principal components; here all
        dimensions, since the scale of two is not comparable between models.
    """
    if len(pairs) < 3:
        raise ValueError(f"pairs: expected at least 3 of single tokens, got {len(pairs)}")
    inputs, outputs = table[torch.tensor(pairs).T].cpu().double()
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(pairs)))
    return {
        "parallelogram_loss": _offset_loss(outputs - inputs),
        "shuffled": _offset_loss(outputs[order] - inputs),
    }


def _offset_loss(offsets: Tensor) -> float:
    """Return the mean over all pairs of rows of |x - y|^2 / (|x|^2 + |y|^2)."""
    squares = offsets.square().sum(-1)
    sums = (squares[:, None] + squares).clamp_min(1e-30)
    losses = 1 - 2 * (offsets @ offsets.T) / sums
    first, second = torch.triu_indices(len(offsets), len(offsets), 1)
    return float(losses[first, second].mean())
