"""What hidden states are good for: telling classes apart, and noticing unknown classes.

Probes and `out_of_scope` need scikit-learn, which is part of the extra `eval`.
"""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from harmonic_sft.models import max_positions

MAX_TOKENS = 128
NUM_NEIGHBORS = 5
MLP_WIDTH, MLP_EPOCHS = 128, 200


def encode(
    body: PreTrainedModel, tokenizer: Any, texts: Sequence[str], *, batch_size: int = 32
) -> np.ndarray:
    """Return the last layer of `encode_layers`, `[N, D]` float32."""
    return encode_layers(body, tokenizer, texts, batch_size=batch_size, count=1)[0][1]


@torch.no_grad()
def encode_layers(
    body: PreTrainedModel,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    batch_size: int = 32,
    count: int = 5,
) -> list[tuple[str, np.ndarray]]:
    """Return the mean hidden states of every text after some of the layers.

    Texts are cut to 128 tokens, or to the positions that the body has.

    Args:
        body: A model without a head.
        tokenizer: The model's tokenizer.
        texts: At least one.
        batch_size: Changes nothing but speed and memory.
        count: How many layers, evenly spread from the embeddings to the last; 1 is the last alone.

    Returns:
        For each layer its name, as in "layer 3 of 12", and `[N, D]` float32.
    """
    if not len(texts):
        raise ValueError("texts: expected at least one, got none")
    longest = MAX_TOKENS
    with suppress(ValueError):  # some bodies have no limit
        longest = min(longest, max_positions(body.config.get_text_config()))
    encoded = tokenizer(list(texts), truncation=True, max_length=longest)["input_ids"]
    order = sorted(range(len(texts)), key=lambda index: len(encoded[index]))
    device = next(body.parameters()).device
    found: list[tuple[str, np.ndarray]] = []
    for start in range(0, len(texts), batch_size):
        chosen = order[start : start + batch_size]
        rows = [{"input_ids": encoded[index]} for index in chosen]
        # Padding on the left would move the positions of a body that counts them.
        batch = tokenizer.pad(rows, padding_side="right", return_tensors="pt").to(device)
        mask = batch["attention_mask"]
        output = body(
            input_ids=batch["input_ids"], attention_mask=mask, output_hidden_states=count > 1
        )
        states = [output.last_hidden_state] if count == 1 else list(output.hidden_states)
        last = len(states) - 1
        places = sorted({round(place) for place in np.linspace(0, last, count)})
        if not found:
            shape = (len(texts), output.last_hidden_state.shape[-1])
            found = [(f"layer {n} of {last}", np.zeros(shape, np.float32)) for n in places]
        weights = mask.unsqueeze(-1).float()
        for place, (_, vectors) in zip(places, found, strict=True):
            means = (states[place].float() * weights).sum(1) / weights.sum(1).clamp_min(1)
            vectors[chosen] = means.cpu().numpy()
    return found


def probe(
    train: tuple[np.ndarray, Sequence[str]], tests: Sequence[np.ndarray], labels: Sequence[str]
) -> dict[str, list[float]]:
    """Return the accuracies, 0 to 1, of simple classifiers of frozen features.

    Args:
        train: Features `[N, D]` and classes.
        tests: Features of the test texts, one array for each form of them, such as with typos.
        labels: Classes of the test texts.

    Returns:
        One accuracy for each of the tests, of `logistic` regression, of an `mlp` with one hidden
        layer, of the 5 nearest neighbors, `knn`, and of the nearest of the `class_means`; the last
        two measure Euclidean distances of normalized features.

    Raises:
        ValueError: Training rows of one class only, as scikit-learn says.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neighbors import KNeighborsClassifier, NearestCentroid
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import Normalizer, StandardScaler

    mlp = MLPClassifier((MLP_WIDTH,), max_iter=MLP_EPOCHS, random_state=0)
    classifiers = {
        "logistic": _logistic(),
        "mlp": make_pipeline(StandardScaler(), mlp),
        "knn": make_pipeline(Normalizer(), KNeighborsClassifier(NUM_NEIGHBORS)),
        "class_means": make_pipeline(Normalizer(), NearestCentroid()),
    }
    with warnings.catch_warnings():  # the number of epochs is part of the probe
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = {name: classifier.fit(*train) for name, classifier in classifiers.items()}
    return {
        name: [float(classifier.score(test, labels)) for test in tests]
        for name, classifier in fitted.items()
    }


def _logistic() -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1000))


def few_shots(labels: Sequence[str], count: int) -> np.ndarray:
    """Return the places of at most `count` examples of every class, drawn by a fixed seed."""
    order = np.random.default_rng(0).permutation(len(labels))
    names = np.asarray(labels)[order]
    return np.sort(np.concatenate([order[names == name][:count] for name in np.unique(names)]))


def wrong_labels(labels: Sequence[str], share: float) -> list[str]:
    """Return the labels, with a share of them replaced by another class, drawn uniformly."""
    generator = np.random.default_rng(0)
    names, numbers = np.unique(labels, return_inverse=True)
    chosen = generator.permutation(len(labels))[: round(share * len(labels))]
    numbers[chosen] += generator.integers(1, len(names), len(chosen))
    return names[numbers % len(names)].tolist()


def out_of_scope(
    train: tuple[np.ndarray, Sequence[str]], inside: np.ndarray, outside: np.ndarray
) -> dict[str, float]:
    """Return how well features `[N, D]` of unknown classes are told from those of known ones.

    At least three known classes are needed: for two, logistic regression gives one number.

    Returns:
        The AUROC, 0.5 by chance, of the highest probability of logistic regression
        (`max_probability`) and of its `energy`, of the cosine to the nearest class mean
        (`class_mean_cosine`), of that to the nearest training text (`nearest`), and of the
        `mahalanobis` distance.

    Source:
        Hendrycks, Gimpel 2017, arXiv:1610.02136 (highest probability); Liu et al. 2020,
        arXiv:2010.03759 (energy); Lee et al. 2018, arXiv:1807.03888 (Mahalanobis).
    """
    from scipy.special import logsumexp
    from sklearn.covariance import LedoitWolf
    from sklearn.metrics import roc_auc_score
    from sklearn.preprocessing import normalize

    # In float32 the cosines of states that share a mean are nearly one number.
    inside, outside = (np.asarray(vectors, np.float64) for vectors in (inside, outside))
    features, labels = normalize(np.asarray(train[0], np.float64)), np.asarray(train[1])
    names = np.unique(labels)
    means = np.stack([features[labels == name].mean(0) for name in names])
    residuals = features - means[np.searchsorted(names, labels)]
    covariance = LedoitWolf(assume_centered=True).fit(residuals)
    queries = normalize(np.concatenate([inside, outside]))
    whiten = np.linalg.cholesky(covariance.precision_)
    white, centers = queries @ whiten, means @ whiten
    distances = np.stack([np.square(white - center).sum(-1) for center in centers]).min(0)
    known = np.repeat([1, 0], [len(inside), len(outside)])
    logits = _logistic().fit(*train).decision_function(np.concatenate([inside, outside]))
    energy = logsumexp(logits, axis=1)
    scores = {
        "max_probability": logits.max(1) - energy,
        "energy": energy,
        "class_mean_cosine": (queries @ normalize(means).T).max(-1),
        "nearest": (queries @ features.T).max(-1),
        "mahalanobis": -distances,
    }
    return {name: float(roc_auc_score(known, values)) for name, values in scores.items()}


def typos(texts: Sequence[str]) -> list[str]:
    """Swap two neighboring letters inside a tenth of the words of 4 characters or more."""
    generator = np.random.default_rng(0)
    changed = []
    for text in texts:
        words = text.split(" ")
        for index, word in enumerate(words):
            if len(word) >= 4 and generator.random() < 0.1:
                at = int(generator.integers(1, len(word) - 2))
                words[index] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        changed.append(" ".join(words))
    return changed


def repetition(continuations: Tensor) -> dict[str, float]:
    """Return how varied sampled continuations, `[B, T]` token ids, are.

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
    result["repeated_4"] = sum(len(row) - len(set(row)) for row in grams) / max(1, total)
    return result
