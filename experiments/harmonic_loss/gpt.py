"""Figure 5: a small GPT-2 from scratch under a linear and a distance head, loss and words."""

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model

from experiments.evidence import correct, paired_difference
from experiments.harmonic_loss.cells import kept
from experiments.harmonic_loss.words import TASKS, Pairs, measure, measure_layers, read_pairs
from harmonic_sft.eval.statistics import t_interval
from harmonic_sft.models import Head, build_head

logger = logging.getLogger(__name__)
VOCAB_SIZE, WIDTH, NUM_BLOCKS, CONTEXT, ROWS = 8192, 128, 4, 128, 4
NUM_STEPS, TUNING_STEPS, CURVE_EVERY = 700, 250, 100
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
TUNING_SEED = 100
FACTORS = [1.0, *(0.7 + 0.05 * step for step in range(13))]  # of the logits: 0.7 to 1.3
NUM_VALIDATION, NUM_TEST = 32, 128  # rows of CONTEXT + 1 tokens
TRAINING_TEXTS = ("wiki_articles.txt", "wikitext2_valid.txt")
HELD_OUT_TEXT = "wikitext2_test.txt"
END = "<|endoftext|>"
LEAST_PAIRS = 10  # of single tokens, for a task to count
EUCLID = {"name": "dist", "unit_sphere": False}
# Three models that the sources may mean, here at width 128. With 768: h_exp -14 (n = 28 on d is
# sqrt(768), the text), -28 (the same on d ** 2, a comment of the code), -768 (its script).
ARMS: dict[str, dict[str, Any]] = {
    "linear": {"name": "linear", "bias": False},
    "comment": {**EUCLID, "h_exp": -(WIDTH**0.5)},
    "script": {**EUCLID, "h_exp": -float(WIDTH)},
    "text": {**EUCLID, "h_exp": -(WIDTH**0.5) / 2},
}


class Corpus(NamedTuple):
    """Text as token ids, and what cut it.

    Attributes:
        train: `[T]`.
        validation: `[N, CONTEXT + 1]`, chooses learning rates.
        test: `[N, CONTEXT + 1]`.
        tokenizer: Byte-level BPE, trained on the training text.
    """

    train: Tensor
    validation: Tensor
    test: Tensor
    tokenizer: ByteLevelBPETokenizer


def read_corpus(folder: Path) -> Corpus:
    """Read Wikipedia text of a folder and cut it into the tokens of its own tokenizer."""
    texts = [(folder / name).read_text() for name in (*TRAINING_TEXTS, HELD_OUT_TEXT)]
    tokenizer = ByteLevelBPETokenizer()
    paths = [str(folder / name) for name in TRAINING_TEXTS]
    tokenizer.train(paths, vocab_size=VOCAB_SIZE, special_tokens=[END], show_progress=False)
    train, valid, held_out = (torch.tensor(tokenizer.encode(text).ids) for text in texts)
    rows = cut_rows(held_out, CONTEXT)
    last = NUM_VALIDATION + NUM_TEST
    return Corpus(
        torch.cat([train, valid]), rows[:NUM_VALIDATION], rows[NUM_VALIDATION:last], tokenizer
    )


def cut_rows(ids: Tensor, context: int) -> Tensor:
    """Return rows `[N, context + 1]` of tokens `[T]`, in random order."""
    rows = ids[: len(ids) // (context + 1) * (context + 1)].view(-1, context + 1)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def unigram_loss(corpus: Corpus) -> float:
    """Return the test loss, in nats, of the training frequencies, each counted once more."""
    counts = corpus.train.bincount(minlength=VOCAB_SIZE).double() + 1
    return float(-(counts / counts.sum()).log()[corpus.test[:, 1:]].mean())


def build(arm: str, seed: int) -> tuple[GPT2Model, Head]:
    """Return a GPT-2 and its tied head; a seed has the same weights under every head."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_positions=CONTEXT,
        n_embd=WIDTH,
        n_layer=NUM_BLOCKS,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        scale_attn_by_inverse_layer_idx=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    body = GPT2Model(config)
    head = build_head(ARMS[arm], hidden_size=WIDTH, vocab_size=VOCAB_SIZE)
    head.weight = body.get_parameter("wte.weight")
    return body, head


def train(
    arm: str, rate: float, seed: int, corpus: Corpus, num_steps: int
) -> tuple[GPT2Model, Head, list[list[float]]]:
    """Train one model.

    Returns:
        Body, head, and the curve: pairs of a step and the validation loss (nats).

    Source:
        Baek et al. 2025, arXiv:2502.01628, as released: AdamW (0.9, 0.95) without weight decay,
        clipping at 1, warmup for a tenth, then a cosine to a twentieth of the rate.
    """
    body, head = build(arm, seed)
    return body, head, fit(nn.ModuleList([body, head]), head.nll, rate, seed, corpus, num_steps)


def fit(
    model: nn.ModuleList,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    rate: float,
    seed: int,
    corpus: Corpus,
    num_steps: int,
) -> list[list[float]]:
    """Train `model`, a body, its head and what else trains, in place; return the curve of `train`.

    Args:
        model: See above.
        loss_fn: Maps hidden states `[N, D]` and next tokens `[N]` to losses `[N]`.
        rate: The highest learning rate.
        seed: Of the order of the text.
        corpus: What it learns, and the validation text of the curve.
        num_steps: Of ROWS rows.
    """
    body: Any = model[0]
    head: Any = model[1]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    generator = torch.Generator().manual_seed(seed)
    curve = []
    for step in range(num_steps):
        starts = torch.randint(len(corpus.train) - CONTEXT, (ROWS,), generator=generator)
        rows = corpus.train[starts[:, None] + torch.arange(CONTEXT + 1)]
        optimizer.param_groups[0]["lr"] = rate * rate_factor(step, num_steps)
        loss = loss_fn(*states_of(body, rows)).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % CURVE_EVERY == 0 or step + 1 == num_steps:
            curve.append([step + 1, evaluate(body, head, corpus.validation)["loss"]])
    return curve


def rate_factor(step: int, num_steps: int) -> float:
    """Return the share of the learning rate: warmup for a tenth, a cosine down to 0.05."""
    warmup = max(1, num_steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, num_steps - warmup)
    return 0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2


def states_of(body: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states `[N, D]` and the next tokens `[N]` of rows `[B, T + 1]`."""
    return body(rows[:, :-1]).last_hidden_state.flatten(0, 1), rows[:, 1:].flatten()


@torch.no_grad()
def evaluate(
    body: nn.Module, head: nn.Module, rows: Tensor, factors: Sequence[float] = (1.0,)
) -> dict[str, Any]:
    """Return `loss` (nats a token), `accuracy` and `losses` with logits times each factor."""
    hits, totals, count = 0.0, torch.zeros(len(factors), dtype=torch.float64), 0
    for part in rows.split(ROWS):
        states, labels = states_of(body, part)
        logits = head(states)
        totals += torch.stack(
            [nn.functional.cross_entropy(f * logits, labels, reduction="sum") for f in factors]
        )
        hits += float((logits.argmax(-1) == labels).sum())
        count += len(labels)
    losses = (totals / count).tolist()
    return {"loss": losses[0], "accuracy": hits / count, "losses": losses}


def _rate(arm: str, corpus: Corpus, num_steps: int, folder: Path) -> dict[str, Any]:
    """Sweep the learning rate of an arm, or read what was swept: `rate`, `losses` by rate."""

    def curve(rate: float) -> list[list[float]]:
        return train(arm, rate, TUNING_SEED, corpus, num_steps)[2]

    path = folder / f"gpt-{arm}-rates-num_steps={num_steps}.json"
    return kept(path, lambda: {"arm": arm, **sweep(curve, RATES)})


def sweep(curve_fn: Callable[[float], list[list[float]]], rates: Sequence[float]) -> dict[str, Any]:
    """Return the `rate` whose curve ends lowest, and the `losses` that are finite, by rate."""
    losses = [[rate, curve_fn(rate)[-1][1]] for rate in rates]
    known = [pair for pair in losses if math.isfinite(pair[1])]
    return {"rate": min(known, key=lambda pair: pair[1])[0], "losses": known}


def score(body: nn.Module, head: Head, corpus: Corpus) -> dict[str, float]:
    """Return `loss` and `accuracy` on the test text, and `best_loss`, at `best_factor`.

    That is the factor of the logits which is best on the validation text.
    """
    fitted = evaluate(body, head, corpus.validation, FACTORS)["losses"]
    best = FACTORS[fitted.index(min(fitted))]
    found = evaluate(body, head, corpus.test, (1.0, best))
    loss, best_loss = found["losses"]
    accuracy = found["accuracy"]
    return {"loss": loss, "accuracy": accuracy, "best_loss": best_loss, "best_factor": best}


def _run_once(
    arm: str,
    rate: float,
    seed: int,
    corpus: Corpus,
    num_steps: int,
    tasks: dict[str, Pairs],
    weights: Path,
) -> dict[str, Any]:
    """Return what one trained model shows; its weights are kept."""
    body, head, curve = train(arm, rate, seed, corpus, num_steps)
    weights.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in body.state_dict().items()}, weights)
    return {
        "arm": arm,
        "seed": seed,
        "rate": rate,
        "num_tokens": num_steps * ROWS * CONTEXT,
        "curve": curve,
        **score(body, head, corpus),
        "tasks": measure(head.prototypes, tasks),
        "untrained": measure(build(arm, seed)[1].prototypes, tasks),
        "layers": {name: measure_layers(body, pairs) for name, pairs in tasks.items()},
    }


def load(arm: str, path: Path) -> tuple[GPT2Model, Head]:
    """Return a model that `run` has trained, from its weights."""
    body, head = build(arm, 0)
    body.load_state_dict(load_file(path))
    return body.eval(), head


def weights_of(arm: str, seed: int, num_steps: int, folder: Path) -> Path:
    """Return where the weights of a trained model lie."""
    return folder / "gpt" / f"{arm}-num_steps={num_steps}-seed_{seed}.safetensors"


def run(data: Path, num_seeds: int, num_steps: int, out: Path, only: str = "") -> dict[str, Any]:
    """Train every arm whose name contains `only`, seed by seed, or read what was trained.

    Args:
        data: With `text` and `function_vectors`.
        num_seeds: Seeds 0, 1, ...
        num_steps: Of each model; at most 250 of them for each learning rate.
        out: For one file for each model, and its weights.
        only: A part of an arm's name. The linear head always counts.

    Returns:
        `rows`, see `_run_once`; `rates`; `unigram_loss` (nats); `num_pairs` by task and
        `median_count`, how often its words stand in the training text; `summary`, see `compare`.

    Raises:
        ValueError: No arm of that name, or a file is missing.
    """
    if not any(only in arm for arm in ARMS):
        raise ValueError(f"only: expected a part of one of {list(ARMS)}, got {only!r}")
    corpus = read_corpus(data / "text")
    tasks = dict(_tasks(data / "function_vectors", corpus.tokenizer))
    rows, cells = [], out / "cells"
    arms = [arm for arm in ARMS if only in arm or arm == "linear"]
    rates = {arm: _rate(arm, corpus, min(TUNING_STEPS, num_steps), cells) for arm in arms}
    for seed in range(num_seeds):
        for arm in arms:
            rate, weights = rates[arm]["rate"], weights_of(arm, seed, num_steps, out)
            run_arm = partial(_run_once, arm, rate, seed, corpus, num_steps, tasks, weights)
            path = cells / f"gpt-{arm}-num_steps={num_steps}-seed_{seed}.json"
            rows.append(kept(path, run_arm))
    counts = corpus.train.bincount(minlength=VOCAB_SIZE)
    return {
        "rows": [_compact(row) for row in rows],
        "rates": {arm: found["losses"] for arm, found in rates.items()},
        "unigram_loss": unigram_loss(corpus),
        "num_pairs": {name: len(pairs) for name, pairs in tasks.items()},
        "median_count": {
            name: int(counts[torch.tensor(pairs).unique()].median())
            for name, pairs in tasks.items()
        },
        "summary": compare(rows),
    }


def _compact(row: dict[str, Any]) -> dict[str, Any]:
    """Return what the picture needs of a row."""
    kept = {key: row[key] for key in row if key not in ("environment", "untrained")}
    layers = {
        task: [[round(loss, 4) for loss in losses] for losses in found]
        for task, found in row["layers"].items()
    }
    return kept | {"layers": layers}


def _tasks(folder: Path, tokenizer: ByteLevelBPETokenizer) -> Iterator[tuple[str, Pairs]]:
    """Yield the tasks that have enough pairs of single tokens."""
    for name in TASKS:
        path = folder / f"{name}.json"
        pairs = read_pairs(json.loads(path.read_text(encoding="utf-8")), tokenizer)
        logger.info("%s: %d pairs of single tokens", name, len(pairs))
        if len(pairs) >= LEAST_PAIRS:
            yield name, pairs


LOSSES = ("loss", "best_loss", "accuracy", "behind")
MEASURES = ("two_components", "ratio", "full", "full_ratio")


def compare(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare every distance head with the linear one, seed by seed.

    Returns:
        For each arm `loss`, `best_loss` and `accuracy`, intervals over seeds; for a distance head
        also `behind`, of the differences in loss, and `tasks`: by task and measure the interval of
        the differences, `p_holm` over the tasks of that measure, a `verdict`, and the mean of this
        head, of the `linear` one and of the `untrained` models, which are the same for both.
    """
    by_arm = {arm: [row for row in rows if row["arm"] == arm] for arm in ARMS}
    found = []
    for arm, own in by_arm.items():
        if not own:
            continue
        line: dict[str, Any] = {"arm": arm, "h_exp": ARMS[arm].get("h_exp")}
        line["rate"] = own[0]["rate"]
        for key in ("loss", "best_loss", "accuracy"):
            line[key] = t_interval([row[key] for row in own])
        if arm != "linear":
            pairs = list(zip(own, by_arm["linear"], strict=False))
            losses = ([row["loss"] for row in side] for side in zip(*pairs, strict=True))
            line["behind"] = paired_difference(*losses)
            line["tasks"] = {measure: _task_lines(pairs, measure) for measure in MEASURES}
        found.append(line)
    return found


def _task_lines(pairs: Sequence[tuple[Any, Any]], measure: str) -> dict[str, Any]:
    lines: dict[str, Any] = {}
    for task in pairs[0][0]["tasks"]:
        own, linear = (
            [row["tasks"][task][measure] for row in side] for side in zip(*pairs, strict=True)
        )
        lines[task] = {
            "mean": fmean(own),
            "linear": fmean(linear),
            "untrained": fmean(one["untrained"][task][measure] for one, _ in pairs),
            "difference": paired_difference(own, linear),
        }
    correct(list(lines.values()))
    return lines
