"""How well a head predicts labelled tokens or classes: scores of every token, and their metrics."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from harmonic_sft.data.batches import MaskedRows
from harmonic_sft.data.row_maker import document_names
from harmonic_sft.eval.calibration import (
    LOG_SCALES,
    PER_OCTAVE,
    brier_score,
    calibration_error,
    fit_inverse_temperature,
    normalizers_at,
)
from harmonic_sft.models import HarmonicHeadModel, Head
from harmonic_sft.models.objective import IGNORE_INDEX
from harmonic_sft.ops.dense_chunks import chunk_rows
from harmonic_sft.ops.tiles import LOWEST

CACHED_ROWS = 8
NUM_COLUMNS = 5  # before the normalizers: label, rank, prediction, cosine, margin


class DivergedError(ValueError):
    """Logits are not finite."""


class TokenScores(NamedTuple):
    """What is known of every scored token, from which all metrics are computed."""

    rows: np.ndarray  # [N], the row each token stands in, from 0 to `num_rows`
    labels: np.ndarray  # [N]
    ranks: np.ndarray  # [N], how many others have no lower logit: 0 is a correct answer
    predicted: np.ndarray  # [N], a class with the highest logit
    cosines: np.ndarray  # [N], of the embeddings of label and prediction; 0 where they are the same
    margins: np.ndarray  # [N], logit of the label minus the highest
    normalizers: np.ndarray  # [N, G] float32, log sum of exp(scale * (logit - highest))
    num_rows: int

    def at(self, inverse_temperature: float) -> tuple[np.ndarray, np.ndarray]:
        """Return loss in nats and confidence of every token at a temperature, `[N]` each."""
        normalizers = normalizers_at(self.normalizers, inverse_temperature)
        return normalizers - inverse_temperature * self.margins, np.exp(-normalizers)

    def keep(self, chosen: np.ndarray) -> "TokenScores":
        """Return the scores of some of the tokens."""
        columns = self._asdict().items()
        return self._replace(**{k: v[chosen] for k, v in columns if k != "num_rows"})


@torch.no_grad()
def score_batch(head: Head, hidden_states: Tensor, labels: Tensor, *, embeddings: Tensor) -> Tensor:
    """Score every token of a batch, with the logits of a few tokens at a time.

    Args:
        head: The output head.
        hidden_states: `[B, S, D]`.
        labels: `[B, S]`, -100 where nothing is predicted.
        embeddings: `[V, D]`, what wrong predictions are compared by.

    Returns:
        `[B, S, 5 + G]`, the columns of `TokenScores` from `labels` on; NaN where nothing is scored.
    """
    scored, size = labels != IGNORE_INDEX, chunk_rows(head.weight)  # [B, S]
    chunks = zip(hidden_states[scored].split(size), labels[scored].split(size), strict=True)
    flat = torch.cat([_score_tokens(head, *chunk, embeddings) for chunk in chunks])  # [N, 5 + G]
    scores = flat.new_full((*labels.shape, flat.shape[-1]), torch.nan)
    scores[scored] = flat
    return scores


def _score_tokens(head: Head, states: Tensor, targets: Tensor, embeddings: Tensor) -> Tensor:
    """Return the scores `[N, 5 + G]` of tokens, from hidden states `[N, D]`."""
    logits = head(states)  # [N, V]
    target_logits = logits.gather(-1, targets.unsqueeze(-1))  # [N, 1]
    # Ties count against the label: a head that gives all classes one logit is never right.
    ranks = logits.shape[-1] - 1 - (logits < target_logits).sum(-1)
    highest, predicted = logits.max(-1, keepdim=True)
    predicted = predicted.squeeze(-1)  # [N]
    tied = (ranks > 0) & (predicted == targets)  # then another class is the prediction
    others = logits[tied].scatter(-1, targets[tied].unsqueeze(-1), -torch.inf)
    predicted[tied] = others.argmax(-1)
    predictions = embeddings[predicted].float()  # [N, D]
    cosines = F.cosine_similarity(predictions, embeddings[targets].float(), dim=-1) * (ranks > 0)
    columns = [targets, ranks, predicted, cosines, (target_logits - highest).squeeze(-1)]
    return torch.cat(
        [torch.stack([column.float() for column in columns], -1), _normalizers(logits, highest)], -1
    )


def _normalizers(logits: Tensor, highest: Tensor) -> Tensor:
    """Return the log-sum-exp of the logits less the highest at every scale, `[N, G]`.

    A scale is twice the one `PER_OCTAVE` before it, so its exponentials are the squares of those.
    In every second octave, that of scale 1 included, they are computed directly, with exponents
    clamped to `LOWEST`: on a CPU subnormal numbers take up to fifty times as long. The error is
    below 1e-6. A CPU works in place on a few rows at a time, so that they stay in its cache.
    """
    size = CACHED_ROWS if logits.device.type == "cpu" else max(1, len(logits))
    scales = np.exp(LOG_SCALES).tolist()
    parts = [logits.new_zeros(0, len(scales), dtype=torch.float32)]
    for part, top in zip(logits.split(size), highest.split(size), strict=True):
        below, powers = part - top, torch.empty_like(part)
        sums = part.new_empty(len(part), len(scales))
        for first in range(PER_OCTAVE):
            for octave, index in enumerate(range(first, len(scales), PER_OCTAVE)):
                if octave % 2:
                    powers.square_()
                else:
                    torch.mul(below, scales[index], out=powers).clamp_(min=LOWEST).exp_()
                sums[:, index] = powers.sum(-1)
        parts.append(sums.log().float())
    return torch.cat(parts)


def score(
    model: HarmonicHeadModel,
    inputs: Iterable[tuple[Tensor, Tensor]],
    gather_fn: Callable[[Tensor], Tensor] | None = None,
) -> TokenScores | None:
    """Score every labelled token that a model's head is given.

    Args:
        model: Has the head and the embeddings.
        inputs: Hidden states `[B, S, D]` and labels `[B, S]` of every batch.
        gather_fn: Puts the batches `[B, S, C]` of all processes together.

    Returns:
        The scores, in the order of the rows; None if there was no batch.
    """
    rows, parts, num_rows = [], [], 0
    for hidden_states, labels in inputs:
        embeddings = model.class_embeddings()
        batch = score_batch(model.dist_head, hidden_states, labels, embeddings=embeddings)
        batch = (batch if gather_fn is None else gather_fn(batch)).cpu()  # [B, S, C]
        scored = ~batch[..., 0].isnan()
        rows.append(scored.nonzero()[:, 0].numpy() + num_rows)
        parts.append(batch[scored].numpy())  # [N, C]
        num_rows += len(batch)
    if not parts:
        return None
    table = np.concatenate(parts)
    columns = table[:, :NUM_COLUMNS].T.astype(np.float64)
    integers = [np.concatenate(rows), *columns[:3].astype(np.int64)]
    return TokenScores(*integers, *columns[3:], table[:, NUM_COLUMNS:], num_rows)


def documents_of(dataset: Any, num_rows: int) -> np.ndarray:
    """Return the number of the document that every scored row belongs to, `[num_rows]`.

    Packs and rows of other data sets count as one document each, and so does a batch that a
    padding-free collator has made one row of.
    """
    if isinstance(dataset, MaskedRows) and dataset.packs is None and len(dataset) == num_rows:
        return np.unique(document_names(dataset.rows), axis=1, return_inverse=True)[1]
    return np.arange(num_rows)


def summarize(scores: TokenScores, head: Head, documents: np.ndarray) -> dict[str, float]:
    """Turn scores into metrics.

    The post-hoc metrics are cross-fitted: every half of the `documents`, `[num_rows]`, is scored at
    the temperature that was fitted on the other half.

    Returns:
        `loss` in nats at the current exponent, `accuracy` and `top_5_accuracy` from 0 to 1,
        the numbers of `tokens` and of `documents` with any, `error_cosine`, the mean cosine between
        the embeddings of label and prediction over all errors, if there are any, `ece`, the
        expected calibration error from 0 to 1, and `brier`, from 0 to 2. Loss, ECE and Brier score
        at the best temperature have the prefix `post_hoc_`; the best on all documents is
        `post_hoc_h_exp` or `post_hoc_inverse_temperature`.

    Raises:
        ValueError: No token is labelled.
        DivergedError: Scores are not finite.

    Source:
        Guo et al. 2017, On Calibration of Modern Neural Networks, arXiv:1706.04599, Sec. 4.2.
    """
    tokens = len(scores.labels)
    if tokens == 0:
        raise ValueError("evaluation: expected labelled tokens, got none. Give more documents")
    if bad := int((~np.isfinite(scores.normalizers).all(-1)).sum()):
        raise DivergedError(
            f"evaluation: expected finite logits, got others for {bad:,} of {tokens:,} tokens. The "
            "weights have diverged (lower the learning rate), are damaged, or their precision is "
            "too low"
        )
    correct = scores.ranks == 0
    losses, confidences = scores.at(1.0)
    fitted = cross_fitted(scores, documents)
    best = fit_inverse_temperature(scores.normalizers, scores.margins)
    metrics = {
        "loss": float(losses.mean()),
        "accuracy": float(correct.mean()),
        "top_5_accuracy": float((scores.ranks < 5).mean()),
        "tokens": float(tokens),
        "documents": len(np.unique(documents[scores.rows])),
        "ece": calibration_error(confidences, correct),
        "brier": float(brier_score(scores.normalizers, scores.margins, 1.0).mean()),
        "post_hoc_loss": float(fitted[0].mean()),
        "post_hoc_ece": calibration_error(fitted[1], correct),
        "post_hoc_brier": float(fitted[2].mean()),
    }
    if not correct.all():
        metrics["error_cosine"] = float(scores.cosines.sum() / (~correct).sum())
    if head.scaled_by_h_exp and head.h_exp is not None:
        return {**metrics, "h_exp": head.h_exp, "post_hoc_h_exp": head.h_exp * best}
    return {**metrics, "post_hoc_inverse_temperature": best}


def cross_fitted(scores: TokenScores, documents: np.ndarray) -> np.ndarray:
    """Return `[3, N]`: loss, confidence and Brier score of every token at the best temperature.

    The temperature is fitted on the other half of the `documents`, `[num_rows]`. Every second
    document is in one half, or every second token of a single document. If each document has one
    label, the halves are drawn at random: files of labeled texts may alternate between two classes.
    """
    fitted = np.empty((3, len(scores.labels)))
    found, ranks = np.unique(documents[scores.rows], return_inverse=True)
    if len(found) == len(ranks):
        ranks = np.random.default_rng(0).permutation(ranks)
    even = (ranks if ranks.max() else np.arange(len(ranks))) % 2 == 0
    for half, other in ((even, ~even), (~even, even)):
        reported = scores.keep(half)
        best = fit_inverse_temperature(scores.normalizers[other], scores.margins[other])
        values = (*reported.at(best), brier_score(reported.normalizers, reported.margins, best))
        for column, value in zip(fitted, values, strict=True):
            column[half] = value
    return fitted


def unigram_loss(labels: np.ndarray, counts: np.ndarray) -> float:
    """Return the mean loss, in nats, of predicting every label `[N]` by its frequency in training.

    One is added to the counts `[V]`.
    """
    log_probs = np.log((counts + 1.0) / (counts + 1.0).sum())
    return float(-log_probs[labels].mean())
