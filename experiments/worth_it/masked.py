"""Part 2: heads over masked Wikipedia text, on a base made with a linear head and one with dist."""

import copy
import functools
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer
from transformers.models.bert.modeling_bert import BertLayer

from experiments.evidence import reject
from experiments.worth_it.classes import TUNING_SEED, rate_factor
from experiments.worth_it.language import EUCLID, SPHERE, Arm, BiasedDistLayer
from experiments.worth_it.store import Store, best_rate
from harmonic_sft.data.keyed_random import random_bits
from harmonic_sft.eval.calibration import LOG_SCALES, fit_inverse_temperature
from harmonic_sft.eval.scoring import score_batch
from harmonic_sft.eval.statistics import UNDECIDED, document_interval, t_interval
from harmonic_sft.losses import CrossEntropyLoss
from harmonic_sft.models import CosineHead, DistLayer, Head, LinearHead, build_head
from harmonic_sft.ops import LossOptions, chunked_loss
from harmonic_sft.training.loading import check_package, locate_base

logger = logging.getLogger(__name__)
ROW_TOKENS, NUM_MASKED, LEAST_COUNT = 126, 25, 3
BATCH_ROWS, BASE_STEPS, NUM_STEPS = 8, 400, 150
BASE_RATE, LEARNING_RATE = 5e-4, 2e-4
FACTORS = (0.3, 1, 3)  # of the learning rate of arms
FITTED_TOKENS = 2048
TRAIN_VIEW, HELD_OUT_VIEW = 1000, -1  # the base's masks are numbered by its steps
MARGIN = 0.02
SCORES = ("loss", "as_trained", "accuracy")
KEYS = ("base", "arm", "rate", "seed")
BASES = ("linear", "dist")
ARMS = {
    "linear": Arm({"name": "linear"}),
    "dist -12": Arm(SPHERE),
    "annealed fast": Arm(SPHERE, lambda done: -12 + 8 * min(1.0, 2 * done)),
    "annealed slow": Arm(SPHERE, lambda done: -12 + 8 * done),
    "euclid": Arm({**EUCLID, "learn_h_exp": True}),
    "dist -24": Arm({**SPHERE, "h_exp": -24.0}),
    "cosine": Arm({"name": "cosine", "scale": 20.0, "learn_scale": True}),
    "learned scale": Arm({**SPHERE, "learn_h_exp": True}),
    "linear, E": Arm({"name": "linear"}),
}
# Part 2b: what a bias is worth; what part 2 has chosen is not chosen again.
BIAS_ARMS = {
    "linear": ARMS["linear"],
    "dist -12": ARMS["dist -12"],
    "dist -12, bias": Arm(SPHERE),
    "linear, no bias": Arm({"name": "linear", "bias": False}),
    "euclid": ARMS["euclid"],
    "euclid, bias": ARMS["euclid"],
    "dist -12, prior": Arm(SPHERE),
    "linear, prior": ARMS["linear"],
}
WITHOUT = {
    "linear": "linear, no bias",
    "dist -12, bias": "dist -12",
    "euclid, bias": "euclid",
    "dist -12, prior": "dist -12",
    "linear, prior": "linear",
}
BIAS_RATES = {"linear": 0.3 * LEARNING_RATE, "dist -12": LEARNING_RATE}
BIAS_RATES |= {f"{arm}, prior": rate for arm, rate in BIAS_RATES.items()}
HELD = ("dist -12", "dist -24", "annealed fast", "annealed slow", "dist -12, bias")
HELD += ("dist -12, prior",)  # the exponent; the strength of the prior is free


class Rows(NamedTuple):
    """Rows of one part: token ids `[R, T]`, and the article of each `[R]`."""

    input_ids: Tensor
    articles: Tensor


class Part(NamedTuple):
    """Rows under one mask, as the frozen blocks see them.

    Attributes:
        states: `[R, T, D]`, input of the last block.
        places: `[R, S]`, which tokens are masked.
        labels: `[R, S]`, classes of the head.
        articles: `[R]`.
    """

    states: Tensor
    places: Tensor
    labels: Tensor
    articles: Tensor


class Base(NamedTuple):
    """A masked model: its parts, its last block, and what heads start from."""

    parts: dict[str, Part]
    block: BertLayer
    embeddings: Tensor
    bias: Tensor


def read_articles(folder: Path) -> dict[str, list[list[str]]]:
    """Return the articles of each part, lists of documents: sections, or a whole article."""
    texts = {name: (folder / name).read_text().replace("<unk>", "[UNK]") for name in FILES}
    valid, test = (
        [re.split(SECTION, article) for article in re.split(TITLE, texts[name])]
        for name in FILES[:2]
    )
    valid, test = valid[1:], test[1:]  # nothing stands before the first title
    others = [[line] for line in texts[FILES[2]].splitlines() if line.strip()]
    numbered = [(6, valid), (5, others)]  # every sixth and every fifth is held out
    return {
        "train": [one for nth, articles in numbered for n, one in enumerate(articles) if n % nth],
        "validation": valid[::6],
        "test": test + others[::5],
    }


TITLE, SECTION = r"(?m)^ (?== [^=][^=\n]*= *$)", r"(?m)^ (?== = [^=])"
FILES = ("wikitext2_valid.txt", "wikitext2_test.txt", "wiki_articles.txt")


def read_rows(folder: Path, tokenizer: Any) -> tuple[dict[str, Rows], Tensor]:
    """Return the rows of each part, and the head's vocabulary `[V]` of token ids."""
    tokenize = functools.partial(tokenizer, add_special_tokens=False, verbose=False)
    parts = {
        name: [tokenize(article)["input_ids"] for article in articles]
        for name, articles in read_articles(folder).items()
    }
    documents = [d for articles in parts.values() for article in articles for d in article]
    counts = np.bincount(np.concatenate(documents).astype(int), minlength=len(tokenizer))
    counts[tokenizer.all_special_ids] = 0
    vocabulary = torch.from_numpy((counts >= LEAST_COUNT).nonzero()[0])
    start, end = tokenizer.cls_token_id, tokenizer.sep_token_id
    found = {}
    for name, articles in parts.items():
        rows = [
            (number, [start, *document[first : first + ROW_TOKENS], end])
            for number, article in enumerate(articles)
            for document in article
            for first in range(0, len(document) - ROW_TOKENS + 1, ROW_TOKENS)
        ]
        ids = torch.tensor([row for _, row in rows])
        enough = torch.isin(ids, vocabulary).sum(-1) >= NUM_MASKED
        found[name] = Rows(ids[enough], torch.tensor([number for number, _ in rows])[enough])
        logger.info("%s: %d articles, %d rows", name, len(articles), len(found[name].articles))
    return found, vocabulary


def mask_rows(
    input_ids: Tensor, vocabulary: Tensor, view: int, mask_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Hide some tokens of each row `[R, T]`; a view is a mask of its own.

    Returns:
        Rows `[R, T]`, and the places `[R, S]` and classes `[R, S]` of what is hidden.
    """
    bits = np.stack(
        [random_bits("mlm mask", (view, row), input_ids.shape[1]) for row in range(len(input_ids))]
    )
    bits[~torch.isin(input_ids, vocabulary).numpy()] = np.iinfo(np.uint64).max
    places = torch.from_numpy(np.sort(np.argsort(bits, 1)[:, :NUM_MASKED], 1))
    labels = torch.searchsorted(vocabulary, input_ids.gather(1, places))
    return input_ids.scatter(1, places, mask_id), places, labels


def descend(
    head: Head,
    body: nn.Module,
    loss_at: Callable[[int], Tensor],
    rate: float,
    betas: tuple[float, float],
    num_steps: int,
) -> None:
    """Train a head and a body by the loss of every step."""
    trained = [one for one in (*head.parameters(), *body.parameters()) if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=betas, weight_decay=0.0, fused=True)
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = rate * rate_factor(step, num_steps)
        loss = loss_at(step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        head.renormalize_()
        if step % 50 == 0 or step + 1 == num_steps:
            logger.info("step %d: %.3f nats", step, loss.item())


def draw_batches(num_rows: int, num_steps: int, seed: int) -> Tensor:
    """Return the rows of every step, `[num_steps, BATCH_ROWS]`; all come before one comes again."""
    generator = torch.Generator().manual_seed(seed)
    count = num_steps * BATCH_ROWS
    passes = [torch.randperm(num_rows, generator=generator) for _ in range(count // num_rows + 1)]
    return torch.cat(passes)[:count].view(num_steps, BATCH_ROWS)


def make_base(data: Path, made_with: str, encoder_name: str, num_steps: int) -> dict[str, Any]:
    """Teach an encoder to fill masks, and run its frozen blocks over all parts.

    Returns:
        `parts`, `block` (its weights), `embeddings` and `bias`: see `Base`.
    """
    check_package(encoder_name)
    folder = locate_base(encoder_name)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rows, vocabulary = read_rows(data, tokenizer)
    encoder = AutoModel.from_pretrained(
        folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    encoder.embeddings.requires_grad_(False)
    embeddings = encoder.get_input_embeddings().weight[vocabulary].detach().clone()
    settings = {"linear": {"name": "linear"}, "dist": SPHERE}[made_with]
    head = build_head(settings, hidden_size=embeddings.shape[1], vocab_size=len(vocabulary))
    head.initialize_(embeddings).weight.requires_grad_(False)
    hide = functools.partial(mask_rows, vocabulary=vocabulary, mask_id=tokenizer.mask_token_id)
    batches, train = draw_batches(len(rows["train"].articles), num_steps, 0), rows["train"]

    def loss_at(step: int) -> Tensor:
        hidden, places, labels = hide(train.input_ids[batches[step]], view=step)
        states = encoder(hidden).last_hidden_state
        return _loss(head, _at(states, places).flatten(0, 1), labels.flatten()).mean()

    descend(head, encoder, loss_at, BASE_RATE, (0.9, 0.98), num_steps)
    parts = {}
    for name, (input_ids, articles) in rows.items():
        view = TRAIN_VIEW if name == "train" else HELD_OUT_VIEW
        hidden, places, labels = hide(input_ids, view=view)
        with torch.no_grad():
            states = [
                encoder(some, output_hidden_states=True).hidden_states[-2]
                for some in hidden.split(4 * BATCH_ROWS)
            ]
        parts[name] = (torch.cat(states), places, labels, articles)
    bias = head.bias if isinstance(head, LinearHead) else None
    return {
        "parts": parts,
        "block": encoder.encoder.layer[-1].state_dict(),
        "embeddings": embeddings,
        "bias": torch.zeros(len(vocabulary)) if bias is None else bias.detach(),
    }


def load_base(data: Path, output: Path, made_with: str, encoder_name: str, num_steps: int) -> Base:
    """Return a base, made if it was not; it is kept on disk."""
    path = output / f"masked_{made_with}.pt"
    if not path.is_file():
        found = make_base(data / "text", made_with, encoder_name, num_steps)
        output.mkdir(parents=True, exist_ok=True)
        torch.save(found, path)
    kept = torch.load(path, weights_only=True, mmap=True)
    block = AutoModel.from_pretrained(locate_base(encoder_name)).encoder.layer[-1].eval()
    block.load_state_dict(kept["block"])
    parts = {name: Part(*values) for name, values in kept["parts"].items()}
    return Base(parts, block, kept["embeddings"], kept["bias"])


def _at(states: Tensor, places: Tensor) -> Tensor:
    """Return the states `[B, S, D]` at the places `[B, S]` of `[B, T, D]`."""
    return states[torch.arange(len(states)).unsqueeze(1), places]


def finish(block: BertLayer, states: Tensor, places: Tensor) -> Tensor:
    """Return what the last block makes of `[B, T, D]` at some places `[B, S]`, `[B * S, D]`.

    The other tokens are keys and values alone, since nothing reads their output.
    """
    attention, own = block.attention.self, _at(states, places)

    def of_heads(vectors: Tensor) -> Tensor:  # [B, H, T, D / H]
        return vectors.unflatten(-1, (attention.num_attention_heads, -1)).transpose(1, 2)

    mixed = F.scaled_dot_product_attention(
        of_heads(attention.query(own)),
        of_heads(attention.key(states)),
        of_heads(attention.value(states)),
    )
    own = block.attention.output(mixed.transpose(1, 2).flatten(2), own)
    return block.output(block.intermediate(own), own).flatten(0, 1)


def _loss(head: Head, states: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each token, `[N]`, without the logits of all."""
    if isinstance(head, BiasedDistLayer):
        options = LossOptions(class_bias=head.bias)
        return chunked_loss(head.lazy_logits(states), labels, options=options).loss
    return CrossEntropyLoss()(head, states, labels)


@torch.no_grad()
def scale_logits_(head: Head, factor: float) -> Head:
    """Multiply the logits of a head by a factor, in its own parameters."""
    if isinstance(head, LinearHead):
        for parameter in head.parameters():
            parameter.mul_(factor)
    elif isinstance(head, CosineHead):
        assert head.log_scale is not None, "the scale of every arm is learned"
        head.log_scale.add_(math.log(factor))
    else:
        assert isinstance(head, DistLayer), "every other arm has an exponent"
        head.h_exp = factor * head.h_exp
        if isinstance(head, BiasedDistLayer):
            head.bias.mul_(factor)
    return head


class Fit(NamedTuple):
    """The best factor on the logits, and what some tokens have without it."""

    factor: float
    loss: float
    accuracy: float


@torch.no_grad()
def fit(head: Head, states: Tensor, labels: Tensor) -> Fit:
    """Fit the factor on equally spaced tokens of `[N, D]`."""
    chosen = torch.linspace(0, len(labels) - 1, min(FITTED_TOKENS, len(labels))).long()
    scores = score_batch(head, states[None, chosen], labels[None, chosen], embeddings=head.weight)
    ranks, margins, normalizers = scores[0, :, 1], scores[0, :, 4].numpy(), scores[0, :, 5:].numpy()
    loss = normalizers[:, np.abs(LOG_SCALES).argmin()] - margins
    factor = fit_inverse_temperature(normalizers.astype(float), margins.astype(float))
    return Fit(factor, float(loss.mean()), float((ranks == 0).float().mean()))


def start_head(arm: str, base: Base) -> Head:
    """Return the head of an arm as its run begins, at the best factor where that is free."""
    embeddings, settings = base.embeddings, {**ARMS, **BIAS_ARMS}[arm].settings
    vocab_size, hidden_size = embeddings.shape
    if arm in ("dist -12, bias", "euclid, bias", "dist -12, prior"):
        options = {name: value for name, value in settings.items() if name != "name"}
        head: Head = BiasedDistLayer(hidden_size, vocab_size, **options)
    else:
        head = build_head(settings, hidden_size=hidden_size, vocab_size=vocab_size)
    head.initialize_(embeddings)
    if arm in ("linear", "linear, prior"):
        head.load_state_dict({"weight": embeddings, "bias": base.bias})
    if arm in HELD and not arm.endswith("prior"):
        return head
    train = base.parts["train"]
    some = slice(0, None, max(1, len(train.labels) * NUM_MASKED // FITTED_TOKENS))
    with torch.no_grad():
        states = finish(base.block, train.states[some], train.places[some])
    labels = train.labels[some].flatten()
    if arm not in HELD:
        scale_logits_(head, fit(head, states, labels).factor)
    if arm.endswith("prior"):
        add_prior_(head, states, labels, train.labels.flatten().bincount(minlength=vocab_size))
    return head


@torch.no_grad()
def add_prior_(head: Head, states: Tensor, labels: Tensor, counts: Tensor) -> float:
    """Add a share of log(1 + count) to the bias, the one that is best for `[N, D]`; return it."""
    assert isinstance(head, LinearHead | BiasedDistLayer), "the arm has a bias"
    assert head.bias is not None, "the arm has a bias"
    logits, prior = head(states), counts.log1p()
    found = minimize_scalar(
        lambda share: F.cross_entropy(logits + share * prior, labels).item(),
        bounds=(0.0, 2.0),
        method="bounded",
        options={"xatol": 1e-3},
    )
    head.bias.add_(found.x * prior)
    logger.info("prior: %.3f of log(1 + count)", found.x)
    return float(found.x)


@torch.no_grad()
def evaluate(head: Head, block: BertLayer, part: Part) -> dict[str, Any]:
    """Score a part; every half of its articles at the factor that is best for the other.

    Returns:
        `loss` in nats and `factors`; `losses` and `tokens` of every article; `as_trained`, the loss
        without a factor, and `accuracy`, of the tokens on which the factors were fitted.
    """
    rows = zip(part.states.split(64), part.places.split(64), strict=True)
    states = torch.cat([finish(block, *some) for some in rows])  # [N, D]
    labels, articles = part.labels.flatten(), part.articles.repeat_interleave(NUM_MASKED)
    even = articles % 2 == 0
    losses = torch.empty(len(labels), dtype=torch.float64)
    fits = []
    for half in (even, ~even):
        fits.append(fit(head, states[~half], labels[~half]))
        scaled = scale_logits_(copy.deepcopy(head), fits[-1].factor)
        losses[half] = _loss(scaled, states[half], labels[half]).double()
    tokens = articles.bincount()
    sums = torch.zeros(len(tokens), dtype=torch.float64).index_add_(0, articles, losses)
    return {
        "loss": losses.mean().item(),
        "as_trained": float(np.mean([one.loss for one in fits])),
        "accuracy": float(np.mean([one.accuracy for one in fits])),
        "factors": [round(one.factor, 5) for one in fits],
        "losses": [round(one, 5) for one in (sums / tokens.clamp_min(1)).tolist()],
        "tokens": tokens.tolist(),
    }


def run_once(base: Base, arm: str, rate: float, seed: int, num_steps: int) -> dict[str, Any]:
    """Train and score one arm; the tuning seed sees the validation part, others the test part."""
    head, block = start_head(arm, base), copy.deepcopy(base.block)
    train, schedule = base.parts["train"], {**ARMS, **BIAS_ARMS}[arm].h_exp
    batches = draw_batches(len(train.labels), num_steps, seed)

    def loss_at(step: int) -> Tensor:
        if schedule is not None:
            head.h_exp = schedule(step / max(1, num_steps - 1))
        rows = batches[step]
        states = finish(block, train.states[rows], train.places[rows])
        return _loss(head, states, train.labels[rows].flatten()).mean()

    descend(head, block, loss_at, rate, (0.95, 0.95), num_steps)
    part = base.parts["validation" if seed == TUNING_SEED else "test"]
    return {"h_exp": head.h_exp, **evaluate(head, block, part)}


def run_arms(
    store: Store,
    load: Callable[[str], Base],
    bases: Sequence[str],
    num_seeds: int,
    num_steps: int,
    names: Sequence[str],
    known: Mapping[str, float],
) -> dict[str, dict[str, float]]:
    """Train all arms in the protocol's order, as far as the time goes.

    Args:
        store: Of the runs; a rate of 0 is an arm as it starts, on the validation part.
        load: Gives a base by what made it.
        bases: A choice of `BASES`.
        num_seeds: How many seeds each arm has.
        num_steps: Of every arm.
        names: Of the arms, the first two take turns.
        known: Learning rates that are not chosen again.

    Returns:
        By base, the learning rates of the arms.
    """

    def kept(base: str, arm: str, rate: float, seed: int) -> dict[str, Any] | None:
        steps = num_steps if rate else 0
        key = {"base": base, "arm": arm, "rate": rate, "seed": seed}
        return store.get(lambda: run_once(load(base), arm, rate, seed, steps), **key)

    def choose(base: str, arm: str) -> dict[str, float]:
        if arm in known:
            return {arm: known[arm]}
        kept(base, arm, 0.0, TUNING_SEED)
        tried = [kept(base, arm, factor * LEARNING_RATE, TUNING_SEED) for factor in FACTORS]
        rate = best_rate(tried)
        return {} if rate is None else {arm: rate}

    rates: dict[str, dict[str, float]] = {}
    for base in bases:
        chosen = rates.setdefault(base, {})
        # "linear, E" is the linear arm on the dist base, whose own bias is 0.
        arms = [arm for arm in names if (base, arm) != ("dist", "linear, E")]
        for group in (arms[:2], *([arm] for arm in arms[2:])):
            for arm in group:
                chosen |= choose(base, arm)
            for seed in range(num_seeds):
                for arm in (arm for arm in group if arm in chosen):
                    kept(base, arm, chosen[arm], seed)
    return rates


def summarize(
    store: Store, rates: dict[str, dict[str, float]], num_seeds: int
) -> list[dict[str, Any]]:
    """Return one row for every arm of a base that has a run of each seed.

    Returns:
        `loss`, `as_trained` and `accuracy` (see `t_interval`); `gain` over linear on the same base,
        `articles`, its interval by resampling articles, and `verdict`; `bias`, what an arm gains
        over the same one without a bias, where both were run, and for spheres `reason`, the
        protocol's word for it; `rejected` says whether
        Holm's procedure rejects a gain that is not the primary one; `edge`, whether the learning
        rate is the least or largest that was tried. A last row has the mean of the primary gain
        over both bases.
    """
    rows, gains = [], {}
    for base, chosen in rates.items():
        runs = {
            arm: store.of_seeds(num_seeds, base=base, arm=arm, rate=rate)
            for arm, rate in chosen.items()
        }
        for arm, found in runs.items():
            if not found or not runs.get("linear"):
                continue
            row: dict[str, Any] = {"base": base, "arm": arm, "rate": chosen[arm]}
            row["edge"] = chosen[arm] in (FACTORS[0] * LEARNING_RATE, FACTORS[-1] * LEARNING_RATE)
            for key in SCORES:
                row[key] = t_interval([run[key] for run in found])
            if arm != "linear":
                gains[base, arm] = _differences(runs["linear"], found)
                tokens = found[0]["tokens"]
                row |= _gain(gains[base, arm], tokens)
            if without := runs.get(WITHOUT.get(arm, "")):
                row["bias"] = _gain(_differences(without, found), found[0]["tokens"])["gain"]
            rows.append(row)
    primary = [gains[base, "dist -12"] for base in BASES if (base, "dist -12") in gains]
    if len(primary) == len(BASES):
        rows.append({"base": "both", "arm": "dist -12", **_gain(sum(primary) / 2, tokens)})
    _add_verdicts(rows)
    return rows


def _add_verdicts(rows: list[dict[str, Any]]) -> None:
    gained = [row for row in rows if "gain" in row]
    reject([row for row in gained if (row["base"], row["arm"]) != (BASES[0], "dist -12")])
    for row in gained:
        row["verdict"] = verdict(row)
        if "bias" in row and row["arm"].startswith("dist"):
            row["reason"] = reason(row["bias"], row["gain"])


def _differences(runs: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> np.ndarray:
    """Return by how much the loss of the others is less, `[seeds, articles]`."""
    pairs = zip(runs, others, strict=True)
    return np.array([np.subtract(one["losses"], other["losses"]) for one, other in pairs])


def _gain(differences: np.ndarray, tokens: Sequence[int]) -> dict[str, Any]:
    """Return both intervals of a gain, of `[seeds, articles]` and the tokens of each article."""
    by_seed = np.average(differences, axis=1, weights=tokens)
    repeated = np.repeat(differences.mean(0), tokens), np.repeat(np.arange(len(tokens)), tokens)
    return {"gain": t_interval(by_seed.tolist()), "articles": document_interval(*repeated)}


def verdict(row: dict[str, Any]) -> str:
    """Return the protocol's word for a gain: worth it, not worth it, or undecided."""
    mean, half_width, articles = row["gain"]["mean"], row["gain"]["half_width"], row["articles"]
    if half_width is None or articles is None:
        return UNDECIDED
    if max(mean + half_width, articles[1]) < MARGIN:
        return "not worth it"
    above = min(mean - half_width, articles[0]) > 0 and mean >= MARGIN
    return "worth it" if above and row.get("rejected", True) else UNDECIDED


def reason(bias: dict[str, Any], gain: dict[str, Any]) -> str:
    """Return the protocol's word for a bias, from what it gains and the arm's gain over linear."""
    if bias["half_width"] is None or gain["half_width"] is None:
        return UNDECIDED
    if gain["mean"] - gain["half_width"] >= -MARGIN:
        return "the reason"
    if bias["mean"] >= MARGIN and bias["mean"] - bias["half_width"] > 0:
        return "a part of it"
    return "not it" if bias["mean"] + bias["half_width"] < MARGIN else UNDECIDED
