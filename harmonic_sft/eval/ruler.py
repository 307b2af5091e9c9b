"""How near in meaning wrong predictions are, by an encoder that took no part in the training."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from harmonic_sft.eval.features import encode
from harmonic_sft.eval.scoring import TokenScores
from harmonic_sft.eval.statistics import document_interval
from harmonic_sft.models import Head


class Ruler(NamedTuple):
    """What tokens mean to an encoder."""

    vectors: Tensor  # [V, D], of norm 1; a token's text is read alone, as a sentence
    # [V], whether a token is letters that the tokenizer does not cut. With byte-level BPE some
    # pieces of words are, too.
    is_word: np.ndarray


class Judged(NamedTuple):
    """What `semantic_errors` needs of one model."""

    scores: TokenScores  # of the held-out data
    expected: np.ndarray  # [M, D], mean vector under the probabilities, at the tokens of `judge`
    labels: np.ndarray  # [M], of those tokens
    wrong: np.ndarray  # [M], whether another class is the most probable one


def read_ruler(folder: str, tokenizer: Any, vocab_size: int) -> Ruler:
    """Read every token of a vocabulary with an encoder that takes the mean of its hidden states.

    Tokens that the tokenizer does not know get a zero vector.
    """
    encoder = AutoModel.from_pretrained(folder, trust_remote_code=False).eval()
    count = min(vocab_size, len(tokenizer))
    texts = [tokenizer.decode([index]) for index in range(count)]
    words = [text.strip().removeprefix("##") for text in texts]
    encoded = encode(
        encoder,
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False),
        words,
        batch_size=256,
    )
    vectors = torch.zeros(vocab_size, encoded.shape[1])
    vectors[:count] = F.normalize(torch.from_numpy(encoded), dim=-1)
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    is_word = np.zeros(vocab_size, bool)
    is_word[:count] = [
        cut == [index] and text.strip().isalpha()
        for index, (text, cut) in enumerate(zip(texts, ids, strict=True))
    ]
    return Ruler(vectors, is_word)


@torch.no_grad()
def judge(ruler: Ruler, head: Head, states: tuple[Tensor, Tensor], scores: TokenScores) -> Judged:
    """Collect what `semantic_errors` needs of a model while the model is loaded.

    `states` are hidden states `[M, D]` and their labels `[M]`.
    """
    hidden_states, labels = states
    vectors, expected, wrong = ruler.vectors.to(hidden_states.device), [], []
    for some, targets in zip(hidden_states.split(256), labels.split(256), strict=True):
        logits = head(some).float()  # [m, V]
        expected.append(logits.softmax(-1) @ vectors[: logits.shape[-1]])
        wrong.append(logits.argmax(-1) != targets)
    return Judged(
        scores,
        torch.cat(expected).numpy(force=True),
        labels.numpy(force=True),
        torch.cat(wrong).numpy(force=True),
    )


def semantic_errors(
    ruler: Ruler, judged: Sequence[Judged], documents: np.ndarray
) -> list[dict[str, Any]]:
    """Compare models on the tokens that all of them get wrong and whose label is a word.

    Args:
        ruler: Of their vocabulary; models may have further classes, which are no tokens.
        judged: One for each model, of the same tokens.
        documents: `[N]`, the document of every scored token.

    Returns:
        For each model `guess`, the mean cosine of its most probable token and the label;
        `expected`, of the mean vector under its probabilities and the label; `guess_shuffled` and
        `expected_shuffled`, the same with the guesses in another order; the numbers `tokens` and
        `expected_tokens`; `interval`, 95 %, of `guess` over documents; and `difference`, the
        interval of `guess` minus that of the first model. Cosines are between the ruler's vectors.
    """
    vectors = ruler.vectors.numpy()
    labels = judged[0].scores.labels
    items = np.logical_and.reduce([ruler.is_word[labels], *(j.scores.ranks > 0 for j in judged)])
    others = np.logical_and.reduce([ruler.is_word[judged[0].labels], *(j.wrong for j in judged)])
    targets, other_targets = vectors[labels[items]], vectors[judged[0].labels[others]]
    documents, measured = documents[items], []
    guesses = [vectors[model.scores.predicted[items]] for model in judged]
    first = (guesses[0] * targets).sum(-1)
    for model, guess in zip(judged, guesses, strict=True):
        cosines, expected = (guess * targets).sum(-1), model.expected[others]
        measured.append(
            {
                "guess": _cosine(guess, targets),
                "guess_shuffled": _shuffled(guess, targets),
                "expected": _cosine(expected, other_targets),
                "expected_shuffled": _shuffled(expected, other_targets),
                "tokens": len(targets),
                "expected_tokens": len(other_targets),
                "interval": document_interval(cosines, documents),
                "difference": document_interval(cosines - first, documents),
            }
        )
    return measured


def _cosine(vectors: np.ndarray, targets: np.ndarray) -> float:
    """Return the mean cosine of rows with targets of norm 1."""
    if not len(vectors):
        return float("nan")
    norms = np.linalg.norm(vectors, axis=-1).clip(min=1e-12)
    return float(((vectors * targets).sum(-1) / norms).mean())


def _shuffled(vectors: np.ndarray, targets: np.ndarray) -> float:
    """Return the mean cosine of every row with another row's target, by a fixed permutation."""
    order = np.random.default_rng(0).permutation(len(vectors))
    places = np.empty_like(order)
    places[order] = np.roll(order, 1)  # one cycle, so that no row keeps its own
    return _cosine(vectors[places], targets)
