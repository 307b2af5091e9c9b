"""How well a head predicts labelled tokens or classes: token-weighted metrics, also post hoc."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from harmonic_sft.models import Head

# Exponents tried after training; the loss is convex in the exponent, so no minimum between the ends
# is missed. Off the sphere, where hidden states are much longer than prototypes, it is near -100.
SHALLOW = (-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0, -10.0, -12.0, -14.0, -16.0)
STEEP = (-20.0, -24.0, -28.0, -32.0, -40.0, -48.0, -64.0, -80.0, -96.0, -128.0, -192.0, -256.0)
H_EXPS = SHALLOW + STEEP
# The same freedom for heads without an exponent: factors on their logits, as far as -1 and -64 are
# from the exponent -12.
FLATTER = (0.08, 0.12, 0.18, 0.25, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9)
STEEPER = (1.1, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0, 4.0, 5.3)
INVERSE_TEMPERATURES = FLATTER + STEEPER

CACHED_ROWS = 16
NUM_BINS = 15  # of the calibration error, of equal width from 0 to 1


def post_hoc_grid(head: Head, also: Sequence[float] = ()) -> list[float]:
    """Return the exponents (or inverse temperatures) to try: the current one first.

    Logits are proportional to the exponent, so an exponent chosen after training is temperature
    scaling. `summarize` takes the best of the rows that it reports on: with few of them its loss is
    a little too good.

    Args:
        head: One whose logits are proportional to h_exp is tried at `H_EXPS`, any other at
            `INVERSE_TEMPERATURES`.
        also: Exponents of interest, added for a distance head.

    Source:
        Guo et al. 2017, On Calibration of Modern Neural Networks, arXiv:1706.04599, Sec. 4.2.
    """
    if head.h_exp is not None and head.scaled_by_h_exp:
        return [head.h_exp, *sorted({*H_EXPS, *also} - {head.h_exp}, reverse=True)]
    return [1.0, *INVERSE_TEMPERATURES]


@torch.no_grad()
def score_rows(
    head: Head,
    hidden_states: Tensor,
    labels: Tensor,
    *,
    grid: Sequence[float],
    embeddings: Tensor,
) -> Tensor:
    """Score every row of a batch.

    An exponent is an inverse temperature: the logits at another one are the same logits scaled.

    Args:
        head: The output head.
        hidden_states: `[B, T, D]`.
        labels: `[B, T]`, -100 where nothing is predicted.
        grid: G exponents or inverse temperatures, the current one first.
        embeddings: `[V, D]`, the input embeddings: what wrong predictions are compared by.

    Returns:
        `[B, 3 + G + 15 G]`: labelled tokens, correct ones, summed cosine between label and
        prediction where they differ, summed loss in nats at each value, summed
        `calibration_gaps` at each value.
    """
    scored = labels != -100
    rows = scored.nonzero()[:, 0]  # [N]
    targets = labels[scored]
    logits = head(hidden_states[scored])  # [N, V]
    target_logits = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    # torch.argmax's tie rule is unspecified, a count of better tokens is not.
    correct = (logits > target_logits.unsqueeze(-1)).sum(-1) == 0
    highest, predicted = logits.max(-1)
    predictions = embeddings[predicted].float()  # [N, D]
    cosines = F.cosine_similarity(predictions, embeddings[targets].float(), dim=-1)
    columns = [torch.ones_like(target_logits), correct, cosines * ~correct]
    gaps = []
    scales = [value / grid[0] for value in grid]
    log_normalizers = _log_normalizers(logits, scales)  # [N, G]
    for scale, log_normalizer in zip(scales, log_normalizers.unbind(-1), strict=True):
        columns.append(log_normalizer - target_logits * scale)
        gaps.append(calibration_gaps((highest * scale - log_normalizer).exp(), correct))
    sums = torch.stack([column.float() for column in columns], -1)  # [N, 3 + G]
    scores = torch.cat([sums, *(gap.float() for gap in gaps)], -1)  # [N, 3 + G + 15 G]
    return scores.new_zeros(len(labels), scores.shape[1]).index_add_(0, rows, scores)


def calibration_gaps(confidences: Tensor, correct: Tensor) -> Tensor:
    """Return confidence minus correctness of every prediction, in the column of its bin.

    Sums of these rows add up over batches and processes. Their sizes over the number of rows add
    up to the expected calibration error: the mean distance of confidence and accuracy of a bin.

    Args:
        confidences: `[N]`, probability of the predicted class.
        correct: `[N]`, whether it was the right one.

    Returns:
        `[N, 15]`, 0 outside the bin of the row.

    Source:
        Guo et al. 2017, On Calibration of Modern Neural Networks, arXiv:1706.04599, Eq. 3, of the
        most probable class.
    """
    bins = (confidences * NUM_BINS).long().clamp(0, NUM_BINS - 1)  # [N]
    gaps = confidences - correct.to(confidences.dtype)
    return F.one_hot(bins, NUM_BINS) * gaps.unsqueeze(-1)


def _log_normalizers(logits: Tensor, scales: Sequence[float]) -> Tensor:
    """Return logsumexp(scale * logits) of each row at each scale, `[N, G]`.

    A few rows at a time and in place: on a CPU they stay in its cache, twice as fast as whole.
    """
    size = CACHED_ROWS if logits.device.type == "cpu" else max(1, len(logits))
    parts = []
    for part in logits.split(size):
        highest = part.amax(-1, keepdim=True)
        below, powers = part - highest, torch.empty_like(part)
        sums = [torch.mul(below, s, out=powers).exp_().sum(-1, keepdim=True) for s in scales]
        parts.append(torch.cat(sums, -1).log() + highest * logits.new_tensor(scales))
    return torch.cat(parts)


def summarize(scores: Tensor, head: Head, grid: Sequence[float]) -> dict[str, float]:
    """Turn the scores of all rows into metrics.

    Args:
        scores: `[B, 3 + G + 15 G]` from `score_rows`.
        head: The head they came from.
        grid: The values tried, the current one first.

    Returns:
        `loss` in nats at the current exponent, `accuracy` from 0 to 1, `tokens`, `error_cosine`,
        the mean cosine between the input embeddings of label and prediction where they differ,
        `ece`, the expected calibration error from 0 to 1, and the lowest loss over the grid as
        `post_hoc_loss`, in nats, with where it was reached and the `post_hoc_ece` there.

    Raises:
        ValueError: No token is labelled.
    """
    totals = scores.sum(0)
    tokens = float(totals[0])
    if tokens == 0:
        raise ValueError("evaluation: expected labelled tokens, got none. Give more documents")
    means = totals[3:] / tokens
    losses = means[: len(grid)].tolist()
    errors = means[len(grid) :].view(len(grid), NUM_BINS).abs().sum(-1).tolist()
    best = int(np.argmin(losses))
    metrics = {
        "loss": losses[0],
        "accuracy": float(totals[1]) / tokens,
        "tokens": tokens,
        "error_cosine": float(totals[2] / (tokens - totals[1]).clamp_min(1)),
        "ece": errors[0],
        "post_hoc_loss": losses[best],
        "post_hoc_ece": errors[best],
    }
    if head.scaled_by_h_exp:
        return {**metrics, "h_exp": grid[0], "post_hoc_h_exp": grid[best]}
    return {**metrics, "post_hoc_inverse_temperature": grid[best]}


def unigram_loss(labels: np.ndarray, counts: np.ndarray) -> float:
    """Return the mean loss, in nats, of predicting every label by its frequency in training.

    Args:
        labels: `[N]`, the labelled tokens.
        counts: `[V]`, occurrences in the training text; one is added to each.
    """
    log_probs = np.log((counts + 1.0) / (counts + 1.0).sum())
    return float(-log_probs[labels].mean())
