"""What hidden states are good for: classes, and what is none of them.

scikit-learn computes them; it is part of the extra `eval`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harmonic_sft.models import HarmonicHeadModel

NUM_NEIGHBORS = 5


@torch.no_grad()
def encode(
    model: HarmonicHeadModel, tokenizer: Any, texts: Sequence[str], *, batch_size: int = 32
) -> np.ndarray:
    """Return the mean of the last hidden states of every text, `[N, D]` float32.

    Args:
        model: Its backbone reads.
        tokenizer: Of the model.
        texts: Cut to 128 tokens.
        batch_size: Changes nothing but speed and memory.

    Raises:
        ValueError: There is no text.
    """
    if not len(texts):
        raise ValueError("texts: expected at least one, got none")
    encoded = tokenizer(list(texts), truncation=True, max_length=128)["input_ids"]
    order = sorted(range(len(texts)), key=lambda index: len(encoded[index]))
    width = model.config.text_config.hidden_size
    vectors = np.zeros((len(texts), width), dtype=np.float32)
    for start in range(0, len(texts), batch_size):
        chosen = order[start : start + batch_size]
        rows = [{"input_ids": encoded[index]} for index in chosen]
        batch = tokenizer.pad(rows, return_tensors="pt").to(model.device)
        states = model.model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).last_hidden_state.float()  # [B, T, D]
        weights = batch["attention_mask"].unsqueeze(-1).to(states.dtype)
        means = (states * weights).sum(1) / weights.sum(1).clamp_min(1)
        vectors[chosen] = means.cpu().numpy()
    return vectors


def probe(
    train: tuple[np.ndarray, Sequence[str]],
    tests: Sequence[np.ndarray],
    labels: Sequence[str],
) -> dict[str, list[float]]:
    """Return the accuracies, 0 to 1, of simple classifiers of frozen features.

    Args:
        train: Features `[N, D]` and classes.
        tests: Features of the same other texts, in several forms.
        labels: Classes of these texts.

    Returns:
        One accuracy for each of the tests, of
        `logistic` regression, the nearest of 5 `knn` neighbors and of `class_means`, both by
        cosine.

    Raises:
        ValueError: Training rows of one class only, or a class that stands in the test rows alone.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier, NearestCentroid
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import Normalizer, StandardScaler

    classes = sorted(set(train[1]))
    if len(classes) < 2 or (unknown := sorted(set(labels) - set(classes))):
        got = f"only {classes}" if len(classes) < 2 else f"{unknown[:3]} in the test rows alone"
        raise ValueError(f"labels: expected at least two classes, all in training, got {got}")
    classifiers = {
        "logistic": make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1000)),
        "knn": make_pipeline(Normalizer(), KNeighborsClassifier(NUM_NEIGHBORS)),
        "class_means": make_pipeline(Normalizer(), NearestCentroid()),
    }
    return {
        name: [float(fitted.score(test, labels)) for test in tests]
        for name, fitted in ((name, one.fit(*train)) for name, one in classifiers.items())
    }


def out_of_scope(
    train: tuple[np.ndarray, Sequence[str]], inside: np.ndarray, outside: np.ndarray
) -> dict[str, float]:
    """Return how well distances tell texts of unknown classes from those of known ones.

    Args:
        train: Features `[N, D]` and classes.
        inside: Features of texts of these classes.
        outside: Features of texts of others.

    Returns:
        The AUROC, 0.5 by chance, of the cosine to the nearest class mean (`class_mean_cosine`), of
        that to the nearest training text (`nearest`), and of the `mahalanobis` distance.
    """
    from sklearn.covariance import LedoitWolf
    from sklearn.metrics import roc_auc_score

    features, labels = _unit(train[0]), np.asarray(train[1])
    names = np.unique(labels)
    means = np.stack([features[labels == name].mean(0) for name in names])
    residuals = features - means[np.searchsorted(names, labels)]
    covariance = LedoitWolf(assume_centered=True).fit(residuals)
    queries = _unit(np.concatenate([inside, outside]))
    whiten = np.linalg.cholesky(covariance.precision_)
    white, centers = queries @ whiten, means @ whiten
    distances = np.stack([np.square(white - center).sum(-1) for center in centers]).min(0)
    known = np.repeat([1, 0], [len(inside), len(outside)])
    scores = {
        "class_mean_cosine": (queries @ _unit(means).T).max(-1),
        "nearest": (queries @ features.T).max(-1),
        "mahalanobis": -distances,
    }
    return {name: float(roc_auc_score(known, values)) for name, values in scores.items()}


def typos(texts: Sequence[str], *, rate: float = 0.1, seed: int = 0) -> list[str]:
    """Swap two neighboring letters inside some of the words.

    Args:
        texts: Any.
        rate: Share of the words of at least 4 characters that are changed.
        seed: Of the choice.
    """
    generator = np.random.default_rng(seed)
    changed = []
    for text in texts:
        words = text.split(" ")
        for index, word in enumerate(words):
            if len(word) >= 4 and generator.random() < rate:
                at = int(generator.integers(1, len(word) - 2))
                words[index] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        changed.append(" ".join(words))
    return changed


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True).clip(min=1e-12)


def repetition(continuations: Tensor) -> dict[str, float]:
    """Return how varied sampled continuations are.

    Args:
        continuations: `[B, T]` token ids.

    Returns:
        `distinct_1` and `distinct_2`, different n-grams over all n-grams of all continuations, and
        `repeated_4`, the share of 4-grams that stood in the same continuation before.

    Source:
        Li et al. 2016, arXiv:1510.03055 (distinct-n); Welleck et al. 2020, arXiv:1908.04319.
    """
    rows = continuations.tolist()

    def ngrams(row: list[int], size: int) -> list[tuple[int, ...]]:
        return list(zip(*(row[start:] for start in range(size)), strict=False))

    result = {}
    for size in (1, 2):
        found = [gram for row in rows for gram in ngrams(row, size)]
        result[f"distinct_{size}"] = len(set(found)) / max(1, len(found))
    grams = [ngrams(row, 4) for row in rows]
    total = sum(map(len, grams))
    result["repeated_4"] = 1 - sum(len(set(row)) for row in grams) / max(1, total)
    return result
