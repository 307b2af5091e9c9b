"""What a model knows of language: bits per byte, loss by frequency, and pairs of sentences."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from harmonic_sft.eval.scoring import TokenScores
from harmonic_sft.models import HarmonicLanguageModel

FREQUENCIES = (1, 10, 100, 1000)  # least count of a label in the scored text, of each bin


def bits_per_byte(scores: TokenScores, tokenizer: Any) -> float:
    """Return the loss of the scored tokens in bits, over the UTF-8 bytes that they stand for.

    Unlike nats per token, models with different tokenizers can be compared by it. Marks of
    sub-words are not counted, a space is.
    """
    labels, counts = np.unique(scores.labels, return_counts=True)
    texts = tokenizer.batch_decode([[label] for label in labels.tolist()])
    # Tokens of WordPiece come without the space before them.
    is_wordpiece = any(token.startswith("##") for token in tokenizer.get_vocab())
    lengths = [
        len(text.removeprefix("##").encode()) + (is_wordpiece and not text.startswith("##"))
        for text in texts
    ]
    return float(scores.at(1.0)[0].sum() / np.log(2) / max(1, np.dot(lengths, counts)))


def loss_by_frequency(scores: TokenScores) -> list[dict[str, float]]:
    """Return loss in nats and accuracy of labels that are rare and frequent in the scored text.

    Returns:
        For every bin that holds tokens: `least`, the lowest count in it, `loss`, `accuracy` and
        `tokens`.
    """
    _, inverse, counts = np.unique(scores.labels, return_inverse=True, return_counts=True)
    bins = np.digitize(counts[inverse], FREQUENCIES) - 1
    losses = scores.at(1.0)[0]
    return [
        {
            "least": FREQUENCIES[number],
            "loss": float(losses[bins == number].mean()),
            "accuracy": float((scores.ranks[bins == number] == 0).mean()),
            "tokens": int((bins == number).sum()),
        }
        for number in np.unique(bins)
    ]


@torch.no_grad()
def pseudo_log_likelihood(
    model: HarmonicLanguageModel, tokenizer: Any, sentence: str, *, batch_size: int = 32
) -> float:
    """Return the sum of the log-probabilities of a sentence's tokens, in nats.

    An encoder predicts every token from all others, one masked copy each; a decoder from those
    before it.

    Source:
        Salazar et al. 2020, Masked Language Model Scoring, arXiv:1910.14659.
    """
    ids = torch.tensor(tokenizer(sentence)["input_ids"], device=model.device)  # [T]
    if model.is_causal:
        logits = model(input_ids=ids[None]).logits[0, :-1]
        return -float(F.cross_entropy(logits.float(), ids[1:], reduction="sum"))
    special = tokenizer.get_special_tokens_mask(ids.tolist(), already_has_special_tokens=True)
    places = [place for place, is_special in enumerate(special) if not is_special]
    total = 0.0
    for start in range(0, len(places), batch_size):
        chosen = places[start : start + batch_size]
        rows, own = ids.repeat(len(chosen), 1), torch.arange(len(chosen))
        rows[own, chosen] = tokenizer.mask_token_id
        states = model.model(input_ids=rows).last_hidden_state[own, chosen]  # [B, D]
        total -= float(model.dist_head.nll(states, ids[chosen]).sum())
    return total


def minimal_pairs(
    model: HarmonicLanguageModel, tokenizer: Any, pairs: Sequence[tuple[str, str]]
) -> float:
    """Return the share of pairs whose acceptable sentence, the first, is the more likely one.

    Source:
        Warstadt et al. 2020, BLiMP, arXiv:1912.00582.
    """
    likely = [
        pseudo_log_likelihood(model, tokenizer, good) > pseudo_log_likelihood(model, tokenizer, bad)
        for good, bad in pairs
    ]
    return float(np.mean(likely))
