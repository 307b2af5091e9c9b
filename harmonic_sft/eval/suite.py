"""The sets of `harmonic-sft eval --suite`, and what is measured of a model on each of them."""

import csv
import json
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from harmonic_sft.eval import features, geometry, language
from harmonic_sft.eval.calibration import calibration_report, reliability
from harmonic_sft.eval.ruler import Judged, Ruler, semantic_errors
from harmonic_sft.eval.scoring import TokenScores, summarize
from harmonic_sft.eval.statistics import LEVEL, UNDECIDED, document_interval
from harmonic_sft.eval.word_similarity import (
    MIN_PAIRS,
    WordPair,
    read_word_pairs,
    similarity,
    word_similarity,
    word_table,
)
from harmonic_sft.models import (
    HarmonicHeadModel,
    HarmonicLanguageModel,
    MappedHead,
    max_positions,
)

Rows = Iterator[dict[str, Any]]
Scored = tuple[TokenScores, np.ndarray]  # of a text, with the document of every row
HELD_OUT = "held-out data"
SHOWN_WORDS = 5
RELATIONS = ("present-past", "singular-plural", "country-capital", "antonym")
CLASSES = {  # training and test part, columns of text and class
    "banking77": (("banking77_train.csv", "banking77_test.csv"), ("text", "category")),
    "sst2": (("sst2_train.tsv", "sst2_dev.tsv"), ("sentence", "label")),
}
LIMITS = {"quick": 500, "full": 5000}  # training texts of a probe; half as many to test on
CONTINUATIONS, NEW_TOKENS = 16, 64
SPEARMAN = {"spearman_cosine": "Spearman, cosine", "spearman_l2": "Spearman, -L2"}
TYPOS = ", typos in a tenth of the words"
SHOTS, WRONG = 5, 0.3  # examples of a class, share of wrong labels
BASE = "{}, base before training"
OF_SPECTRUM = (
    "explained variance: share in the first 2 and 10 principal components; effective dimension: "
    "participation ratio; mean cosine: of all pairs"
)
OF_HUBS = (
    "hubness: skewness of how often a prototype is among the 10 nearest of others; never neighbor: "
    "share that never is"
)
OF_DRIFT = (
    "drift cosine: mean of a prototype with the vector that it started as; neighbors kept: share "
    "of the 10 nearest that stayed"
)
MEANING = "semantic errors"
NO_RULER = {"group": MEANING, "set": HELD_OUT, "missing": "--ruler ENCODER"}


class Unmeasured(Exception):
    """A set cannot be measured; the message says what is needed."""


class Subject(NamedTuple):
    """A model under evaluation."""

    model: HarmonicHeadModel  # in evaluation mode
    tokenizer: Any
    held_out: Scored
    states: tuple[Tensor, Tensor]  # hidden states [N, D] of some held-out tokens, and their labels
    base: Any  # the body before training; None if it is unknown
    # Where the prototypes started, as in `head.init`; None if it is unknown.
    init: str | None
    score_text: Callable[[Path], Scored]  # scores another text; a ValueError if it cannot


def measure(subject: Subject, sets: Path | None, *, size: str) -> list[dict[str, Any]]:
    """Measure one model.

    Args:
        subject: The model.
        sets: A folder with `text`, `wordsim`, `function_vectors`, `sts`, `probing` and
            `minimal_pairs`; sets that are not there are reported as missing.
        size: "quick" or "full": how much of the sets is read.

    Returns:
        Rows with `group`, `set`, `metric`, `value`, `better` ("higher", "lower" or ""), and perhaps
        `n`, `note` and `unknown`, the words left out. A set that cannot be measured has `group`,
        `set` and `missing`, what is needed.
    """
    parts = _parts(subject, sets or Path(os.devnull), LIMITS[size])  # devnull holds no files
    return [
        *_text(subject, HELD_OUT, subject.held_out),
        *_shape(subject),
        *(row for part in parts for row in _rows_or_missing(*part)),
    ]


def _parts(subject: Subject, folder: Path, limit: int) -> Iterator[tuple[str, str, Rows]]:
    """Yield every set's rows, with the group and name to report if it cannot be measured."""
    yield "geometry", "drift from the base", _drift(subject)
    if isinstance(subject.model, HarmonicLanguageModel):
        for path in sorted((folder / "text").glob("*.txt")):
            yield "language", path.stem, _other_text(subject, path)
        for name, path in _files(folder / "wordsim" / "*.tsv", "word ratings"):
            yield "geometry", name, _word_ratings(subject, path)
        for name in RELATIONS:
            path = folder / "function_vectors" / f"{name}.json"
            yield "geometry", name, _relation(subject, path)
        for name, path in _files(folder / "minimal_pairs" / "*.jsonl", "minimal pairs"):
            yield "language", name, _minimal_pairs(subject, path, limit // 10)
    yield "hidden states", "STS", _sentences(subject, folder / "sts" / "stsb_dev.tsv", limit)
    for name in CLASSES:
        yield "hidden states", name, _classes(subject, name, folder / "probing", limit)
    if subject.model.is_causal:
        yield "language", "samples", _continuations(subject)


def _files(pattern: Path, name: str) -> list[tuple[str, Path]]:
    """Return files by name; if there are none, the pattern, to be reported as missing."""
    files = [(path.stem, path) for path in sorted(pattern.parent.glob(pattern.name))]
    return files or [(name, pattern)]


def _rows_or_missing(group: str, name: str, rows: Rows) -> Rows:
    """Yield the rows of a set; if an error ends them, a last row says what is needed."""
    try:
        yield from rows
    except Unmeasured as error:
        yield _missing(group, name, str(error))
    except OSError as error:
        needed = f"a file that can be read: {error}"
        if isinstance(error, FileNotFoundError | NotADirectoryError) and error.filename:
            path = Path(error.filename)
            needed = f"{path.parent.name}/{path.name} in --data"
        yield _missing(group, name, needed)
    # A value, column or cell that is missing or of another form.
    except (ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
        yield _missing(group, name, f"other data: {type(error).__name__}: {error}")


def join_rows(measured: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Put the rows of several models side by side: `values` has one for each, None if missing."""
    joined: dict[tuple[str, str, str], dict[str, Any]] = {}
    for place, rows in enumerate(measured):
        for row in rows:
            key = (row["group"], row["set"], row.get("metric", ""))
            shared = {name: value for name, value in row.items() if name != "value"}
            empty = {**shared, "values": [None] * len(measured)}
            joined.setdefault(key, empty)["values"][place] = row.get("value")
    return list(joined.values())


def loss_differences(
    names: Sequence[str], losses: Sequence[np.ndarray], documents: np.ndarray, *, metric: str
) -> list[dict[str, Any]]:
    """Compare the loss of every other model with that of the first, token by token.

    Args:
        names: Names of the models.
        losses: For each model the loss of every token, `[N]`.
        documents: `[N]`, the document of every token.
        metric: Which loss it is, "loss" or "post_hoc_loss".

    Returns:
        For each other model `metric`, `model`, `against` (the first model), `mean` in nats, its
        `interval` over documents, `tokens`, `documents` and `verdict`. The intervals are 95 %
        together, by Bonferroni's correction for the number of models.
    """
    base, differences = losses[0], []
    for name, values in zip(names[1:], losses[1:], strict=True):
        level = 1 - (1 - LEVEL) / (len(names) - 1)
        interval = document_interval(values - base, documents, level=level)
        mean = float((values - base).mean())
        decided = interval is not None and not interval[0] <= 0 <= interval[1]
        differences.append(
            {
                "metric": metric,
                "model": name,
                "against": names[0],
                "mean": mean,
                "interval": interval,
                "tokens": len(base),
                "documents": len(np.unique(documents)),
                "verdict": ("higher" if mean > 0 else "lower") if decided else UNDECIDED,
            }
        )
    return differences


def semantic_rows(
    ruler: Ruler, judged: Sequence[Judged], documents: np.ndarray
) -> list[list[dict[str, Any]]]:
    """Return, for each model, how near in meaning its wrong predictions are."""
    measured = []
    for errors in semantic_errors(ruler, judged, documents):
        rows = []
        for name, what in (("guess", "wrong guess"), ("expected", "mean under the probabilities")):
            count = errors["tokens" if name == "guess" else "expected_tokens"]
            title = f"cosine of {what} and label"
            rows.append(_row(MEANING, HELD_OUT, title, errors[name], better="higher", n=count))
            rows.append(_row(MEANING, HELD_OUT, f"{title}, shuffled", errors[f"{name}_shuffled"]))
        for key, title in (("interval", "wrong guess"), ("difference", "its difference")):
            title = f"95 % interval over documents, {title}"
            rows.append(_row(MEANING, HELD_OUT, title, errors[key]))
        rows.append(_row(MEANING, HELD_OUT, "words that all models get wrong", errors["tokens"]))
        measured.append(rows)
    return measured


def figures_of(scores: TokenScores) -> dict[str, Any]:
    """Return what the figures of a report are drawn from."""
    return {
        "reliability": reliability(scores.at(1.0)[1], scores.ranks == 0),
        "frequency": language.loss_by_frequency(scores),
    }


def _row(group: str, name: str, metric: str, value: Any, **more: Any) -> dict[str, Any]:
    if isinstance(value, float) and not np.isfinite(value):
        value, more = None, {**more, "note": f"{metric}: not defined for this model on these data"}
    return {"group": group, "set": name, "metric": metric, "value": value, "better": "", **more}


def _rows(group: str, name: str, found: dict[str, Any], prefix: str = "", **more: Any) -> Rows:
    for metric, value in found.items():
        yield _row(group, name, prefix + metric.replace("_", " "), value, **more)


def _missing(group: str, name: str, needed: str, **more: Any) -> dict[str, Any]:
    return {"group": group, "set": name, "missing": needed, **more}


def _other_text(subject: Subject, path: Path) -> Rows:
    yield from _text(subject, path.stem, subject.score_text(path))


def _text(subject: Subject, name: str, scored: Scored) -> Rows:
    """Yield how well a text is predicted; for held-out data also by frequency, and calibration."""
    scores, documents = scored
    metrics = summarize(scores, subject.model.dist_head, documents)
    count = int(metrics["tokens"])
    losses = {
        "loss, nats": metrics["loss"],
        "loss at the best temperature, nats": metrics["post_hoc_loss"],
    }
    if isinstance(subject.model, HarmonicLanguageModel):
        losses["bits per byte"] = language.bits_per_byte(scores, subject.tokenizer)
    yield from _rows("language", name, losses, better="lower", n=count)
    interval = document_interval(scores.at(1.0)[0], documents[scores.rows])
    if interval is not None:
        yield _row("language", name, "95 % interval of the loss over documents", interval)
    yield _row("language", name, "documents", metrics["documents"])
    accuracies = {"accuracy": metrics["accuracy"], "top-5 accuracy": metrics["top_5_accuracy"]}
    yield from _rows("language", name, accuracies, better="higher", n=count)
    if name != HELD_OUT:
        return
    for part in language.loss_by_frequency(scores):
        title = f"loss of labels that occur {language.frequency_name(part['least'])} times, nats"
        yield _row("language", name, title, part["loss"], better="lower", n=part["tokens"])
    report = calibration_report(scores.at(1.0)[1], scores.ranks == 0)
    yield _row("calibration", HELD_OUT, "ECE of a perfect model", report["ece_floor"], n=count)
    errors = {
        "ECE": report["ece"],
        "ECE, debiased": report["ece_debiased"],
        "ECE at the other half's best temperature": metrics["post_hoc_ece"],
        "Brier score": metrics["brier"],
        "Brier score at the other half's best temperature": metrics["post_hoc_brier"],
    }
    yield from _rows("calibration", HELD_OUT, errors, better="lower", n=count)


def _shape(subject: Subject) -> Rows:
    """Yield the geometry of the prototypes alone."""
    head, (states, labels) = subject.model.dist_head, subject.states
    prototypes = head.prototypes.detach()
    count = len(prototypes)
    filled = geometry.spectrum(prototypes)
    yield from _rows("geometry", "prototypes", filled, n=count, note=OF_SPECTRUM)
    if count > 2 * geometry.NUM_NEIGHBORS:
        hubs = geometry.hubness(prototypes)
        compared = min(count, geometry.NUM_ROWS)
        yield from _rows("geometry", "prototypes", hubs, n=compared, note=OF_HUBS)
    if isinstance(head, MappedHead):  # its prototypes are compared with mapped states
        states = head.mapped(states).detach()
    value = geometry.class_center_alignment(states, labels, prototypes)
    metric, count = "class-center alignment", len(labels)
    yield _row("geometry", HELD_OUT, metric, value, better="higher", n=count)


def _drift(subject: Subject) -> Rows:
    """Yield how far the prototypes moved, from the input embeddings if nothing else is known."""
    if subject.init not in (None, "input_embeddings"):
        raise Unmeasured("a head that started from the base's input embeddings")
    prototypes, base = subject.model.dist_head.prototypes.detach(), None
    if subject.base is not None:
        base = subject.base.get_input_embeddings().weight.detach()
    if base is None or base.shape != prototypes.shape:
        raise Unmeasured("the base of the run")
    moved = geometry.drift(prototypes, base.to(prototypes))
    yield from _rows("geometry", "drift from the base", moved, note=OF_DRIFT)


def _word_ratings(subject: Subject, path: Path) -> Rows:
    """Yield correlations with human ratings, of single tokens and of all words."""
    pairs = read_word_pairs(path)
    for key, title in (("single", "single tokens"), ("mean", "mean of sub-words")):
        table, ids, ratings, unknown = word_table(
            subject.model.dist_head.prototypes, subject.tokenizer, pairs, pieces=key
        )
        words = ", ".join(unknown[:SHOWN_WORDS]) + ", ..." * (len(unknown) > SHOWN_WORDS)
        note = f"{len(unknown)} words left out: {words}"
        left_out = {"note": note, "unknown": unknown} if unknown else {}
        if len(ids) < MIN_PAIRS:
            needed = f"{MIN_PAIRS} pairs of known words, {len(ids)} of {len(pairs)} are"
            yield _missing("geometry", path.stem, needed, **left_out)
            continue
        more = {"n": len(ids), "better": "higher", **left_out}
        for metric, value in word_similarity(table, ids, ratings).items():
            yield _row("geometry", path.stem, f"{SPEARMAN[metric]}, {title}", value, **more)


def _relation(subject: Subject, path: Path) -> Rows:
    """Yield parallelogram losses of prototypes, and of hidden states of words read alone."""
    items = json.loads(path.read_text(encoding="utf-8-sig"))
    pairs = [WordPair(item["input"], item["output"], 0.0) for item in items]
    table, ids, _, _ = word_table(
        subject.model.dist_head.prototypes, subject.tokenizer, pairs, pieces="single"
    )
    ids = [pair for pair in ids if pair[0] != pair[1]]  # cut, cut has no offset
    if len(ids) < MIN_PAIRS:
        needed = f"{MIN_PAIRS} pairs of single tokens, {len(ids)} of {len(pairs)} are"
        yield _missing("geometry", path.stem, needed)
    else:
        yield from _parallelograms(path.stem, "parallelogram loss", table, ids)
    words = [*(pair.first for pair in pairs), *(pair.second for pair in pairs)]
    places = [(n, n + len(pairs)) for n, pair in enumerate(pairs) if pair.first != pair.second]
    body = subject.model.model
    for layer, vectors in features.encode_layers(body, subject.tokenizer, words, count=3):
        title = f"parallelogram loss, hidden states, {layer}"
        yield from _parallelograms(path.stem, title, torch.from_numpy(vectors), places)


def _parallelograms(
    relation: str, title: str, table: Tensor, pairs: Sequence[tuple[int, int]]
) -> Rows:
    losses, count = geometry.parallelograms(table, pairs), len(pairs)
    value = losses["parallelogram_loss"]
    yield _row("geometry", relation, title, value, better="lower", n=count)
    yield _row("geometry", relation, f"{title}, outputs shuffled", losses["shuffled"], n=count)


def _minimal_pairs(subject: Subject, path: Path, limit: int) -> Rows:
    assert isinstance(subject.model, HarmonicLanguageModel), "measure has looked"
    with path.open(encoding="utf-8-sig") as lines:
        items = [json.loads(line) for line in islice(lines, limit) if line.strip()]
    pairs = [(item["sentence_good"], item["sentence_bad"]) for item in items]
    if not pairs:
        raise Unmeasured(f"pairs in {path.name}, it has 0")
    share = language.minimal_pairs(subject.model, subject.tokenizer, pairs)
    yield _row("language", path.stem, "minimal pairs", share, better="higher", n=len(pairs))


def _bodies(subject: Subject, name: str) -> list[tuple[str, Any]]:
    """Return the bodies whose hidden states are measured, by the name of the set in their rows."""
    base = [] if subject.base is None else [(BASE.format(name), subject.base)]
    return [(name, subject.model.model), *base]


def _sentences(subject: Subject, path: Path, limit: int) -> Rows:
    """Yield similarity of sentences, as they are and with typos, and the shape of some layers."""
    rows = [row for row in _table(path) if row["sentence2"]][:limit]
    ratings = [float(row["score"]) for row in rows]
    if not np.isfinite(ratings).all():
        raise Unmeasured(f"finite scores in {path.name}")
    first, second = ([row[key] for row in rows] for key in ("sentence1", "sentence2"))
    more = {"better": "higher", "n": len(rows)}
    for name, body in _bodies(subject, path.stem):
        texts = (first, second, features.typos(second))
        encoded = [features.encode(body, subject.tokenizer, part) for part in texts]
        for metric, value in similarity(encoded[0], encoded[1], ratings).items():
            yield _row("hidden states", name, SPEARMAN[metric], value, **more)
        spoiled = similarity(encoded[0], encoded[2], ratings)["spearman_cosine"]
        yield _row("robustness", name, f"Spearman, cosine{TYPOS}", spoiled, **more)
    for layer, vectors in features.encode_layers(subject.model.model, subject.tokenizer, first):
        shape = geometry.spectrum(torch.from_numpy(vectors))
        titles = {f"{metric}, {layer}": value for metric, value in shape.items()}
        yield from _rows("geometry", f"{path.stem}, hidden states", titles, n=len(rows))


def _classes(subject: Subject, name: str, folder: Path, limit: int) -> Rows:
    """Yield probes of frozen features, also with typos, few examples and wrong labels."""
    files, columns = CLASSES[name]
    train, test = (
        _sample(folder / file, columns, count)
        for file, count in zip(files, (limit, limit // 2), strict=True)
    )
    seen, names = map(set, train)
    known = [row for row in zip(*test, strict=True) if row[1] in names and row[0] not in seen]
    if not known:
        raise Unmeasured("test rows of classes that stand in training, with other texts; 0 are")
    left_out = len(test[0]) - len(known)
    test = tuple(zip(*known, strict=True))
    note = f"{name}: test rows left out, whose text trains, or none of their class: {left_out}"
    more = {"better": "higher", "n": len(known), **({"note": note} if left_out else {})}
    texts = (train[0], test[0], features.typos(test[0]))
    for title, body in _bodies(subject, name):
        encoded = [features.encode(body, subject.tokenizer, part) for part in texts]
        yield from _probes(title, encoded, train[1], test[1], more)
        if len(names) > 7:
            yield from _out_of_scope(title, encoded, train[1], test[1], more)


def _probes(
    name: str,
    encoded: Sequence[np.ndarray],
    train: Sequence[str],
    test: Sequence[str],
    more: dict[str, Any],
) -> Rows:
    few = features.few_shots(train, SHOTS)
    clean = features.probe((encoded[0], train), encoded[1:], test)
    shots = features.probe((encoded[0][few], np.asarray(train)[few].tolist()), encoded[1:2], test)
    wrong = features.wrong_labels(train, WRONG)
    noisy = features.probe((encoded[0], wrong), encoded[1:2], test)
    for metric, values in clean.items():
        title = f"accuracy, {metric.replace('_', ' ')}"
        yield _row("hidden states", name, title, values[0], **more)
        harder = {
            f"{title}{TYPOS}": values[1],
            f"{title}, at most {SHOTS} examples a class": shots[metric][0],
            f"{title}, {WRONG:.0%} wrong labels": noisy[metric][0],
        }
        yield from _rows("robustness", name, harder, **more)


def _out_of_scope(
    name: str,
    encoded: Sequence[np.ndarray],
    train: Sequence[str],
    test: Sequence[str],
    more: dict[str, Any],
) -> Rows:
    """Yield how well texts of every fourth class are told from those of the others."""
    outside = sorted(set(train))[::4]
    kept = ~np.isin(train, outside)
    is_known = ~np.isin(test, outside)
    scores = features.out_of_scope(
        (encoded[0][kept], np.asarray(train)[kept].tolist()),
        encoded[1][is_known],
        encoded[1][~is_known],
    )
    yield from _rows("hidden states", name, scores, "out-of-scope AUROC, ", **more)


def _continuations(subject: Subject) -> Rows:
    """Yield how much sampled continuations of `first_token` repeat themselves."""
    tokenizer = subject.tokenizer
    model: Any = subject.model  # `_parts` has checked: a decoder
    longest = max_positions(model.config.get_text_config())
    if longest < NEW_TOKENS:
        raise Unmeasured(f"a model of {NEW_TOKENS} positions, it has {longest}")
    start = language.first_token(tokenizer) or 0
    prompt = torch.full((CONTINUATIONS, 1), start, device=model.device)
    own, model.generation_config = model.generation_config, GenerationConfig()  # no penalties
    with torch.random.fork_rng():
        torch.manual_seed(0)
        texts = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            top_k=0,  # not the 50 of transformers: from the whole distribution
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
        )[:, 1:]
    model.generation_config = own
    counts = {key.replace("_", "-"): value for key, value in features.repetition(texts).items()}
    yield from _rows("language", "samples", counts, n=CONTINUATIONS)


def _table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".csv":
            return list(csv.DictReader(file))
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def _sample(path: Path, columns: tuple[str, str], count: int) -> tuple[list[str], list[str]]:
    """Return texts and labels of rows chosen by a fixed seed."""
    rows = _table(path)
    chosen = np.sort(np.random.default_rng(0).permutation(len(rows))[:count])
    texts, labels = ([(rows[index][key] or "").strip() for index in chosen] for key in columns)
    for index, *cells in zip(chosen, texts, labels, strict=True):
        if not all(cells):
            raise Unmeasured(f"{' and '.join(columns)} in row {index + 1} of {path.name}")
    return texts, labels
