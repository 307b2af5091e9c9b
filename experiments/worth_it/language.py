"""Parts 3 and 4: a tiny language model under several heads and schedules of h_exp."""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model

from experiments.evidence import paired_difference, reject, tokens_to_reach
from experiments.harmonic_loss.gpt import cut_rows, states_of
from experiments.worth_it.bottleneck import probe
from experiments.worth_it.classes import (
    FACTORS,
    TUNING_SEED,
    WORTH_IT,
    fit_inverse_temperature,
    rate_factor,
    verdict,
)
from experiments.worth_it.store import Store, best_rate
from harmonic_sft.eval.statistics import UNDECIDED, t_interval
from harmonic_sft.models import DistLayer, Head, build_head
from harmonic_sft.models.head import DistanceLogits

CONTEXT, WIDTH, ROWS, NUM_STEPS, PROBE_EVERY = 64, 64, 8, 200, 50
LEARNING_RATE = 3e-3
MARGIN = 0.02  # nats
KEYS = ("arm", "rate", "seed")
ANNEALING = ("annealed", "annealed early", "there and back", "euclid annealed")
BOTTLENECK = ("linear", "dist -12", "cosine", "mixture")
NUM_PROBED, NUM_HELD_OUT = 64, 64  # states, and rows of CONTEXT + 1 tokens
SPHERE: dict[str, Any] = {"name": "dist", "h_exp": -12.0}
EUCLID = {"name": "dist", "h_exp": -12.0, "unit_sphere": False}


class Arm(NamedTuple):
    """A head, and its exponent by the share of the run that is done; None: as it is.

    Attributes:
        settings: Of the head.
        h_exp: From 0 to 1 to the exponent.
        rate_of: The arm whose learning rate this one takes; empty: its own.
    """

    settings: dict[str, Any]
    h_exp: Callable[[float], float] | None = None
    rate_of: str = ""


ARMS = {
    "linear": Arm({"name": "linear", "bias": False}),
    "dist -12": Arm(SPHERE),
    "cosine": Arm({"name": "cosine", "scale": 20.0, "learn_scale": True}),
    "mixture": Arm(
        {"name": "multi_head", "num_heads": 4, "inner": {"name": "linear", "bias": False}}
    ),
    "annealed": Arm(SPHERE, lambda done: -12 + 8 * done, "dist -12"),
    "annealed early": Arm(SPHERE, lambda done: -12 + 8 * min(1.0, 2 * done), "dist -12"),
    "there and back": Arm(SPHERE, lambda done: -4 - 8 * abs(2 * done - 1), "dist -12"),
    "euclid": Arm(EUCLID),
    "euclid annealed": Arm(EUCLID, lambda done: -12 + 8 * done, "euclid"),
}

# Part 4b: what a bias is worth, beside the same arm without.
WITHOUT = {"linear, bias": "linear", "dist -12, bias": "dist -12"}
ARMS |= {"linear, bias": Arm({"name": "linear"}), "dist -12, bias": Arm(SPHERE)}
# A control that was added after the results: rows drawn as wide as those of the other heads.
ARMS["linear, wide"] = ARMS["linear"]
# Part 3b: a scale that is learned while the exponent is annealed.
ARMS["annealed, scale"] = ARMS["annealed"]
# Part 3c: other exponents than -12, beside two arms that are made again.
LANGUAGE = tuple(ARMS)
STEEPER = {
    "dist -24": Arm({**SPHERE, "h_exp": -24.0}),
    "dist -48": Arm({**SPHERE, "h_exp": -48.0}),
    "dist, learned exponent": Arm({**SPHERE, "learn_h_exp": True}),
}
ARMS |= STEEPER
EXPONENTS = ("dist -12", "linear, wide", *STEEPER)


class BiasedDistLayer(DistLayer):
    """A distance head with a learned log prior b: p_j ~ exp(b_j) * (d_j ** 2) ** h_exp."""

    def __init__(self, hidden_size: int, vocab_size: int, **options: Any) -> None:
        super().__init__(hidden_size, vocab_size, **options)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return logits `[N, V]`."""
        return super().forward(hidden_states) + self.bias

    def nll(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each label, `[N]`, from all logits."""
        return Head.nll(self, hidden_states, labels)


class ScaledDistLayer(DistLayer):
    """A distance head with a learned scale s = exp(log_scale): p_j ~ (d_j ** 2) ** (s * h_exp)."""

    def __init__(self, hidden_size: int, vocab_size: int, **options: Any) -> None:
        super().__init__(hidden_size, vocab_size, **options)
        self.log_scale = nn.Parameter(torch.zeros(()))

    def lazy_logits(self, hidden_states: Tensor) -> DistanceLogits:
        """Return what the logits are made of, for hidden states `[N, D]`."""
        logits = super().lazy_logits(hidden_states)
        return logits._replace(h_exp=logits.h_exp * self.log_scale.exp())


def read_rows(folder: Path) -> tuple[Tensor, Tensor]:
    """Return training tokens `[T]` and held-out rows `[N, CONTEXT + 1]` of Wikipedia text."""
    path = folder / "tokenizer" / "tiny_bpe_tokenizer.json"
    tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))

    def tokens(name: str) -> Tensor:
        text = (folder / "text" / name).read_text()
        return torch.tensor(tokenizer.encode(text).ids)

    held_out = cut_rows(tokens("wikitext2_test.txt"), CONTEXT)
    train = torch.cat([tokens("wiki_articles.txt"), tokens("wikitext2_valid.txt")])
    return train, held_out[: 2 * NUM_HELD_OUT]


def build(arm: str, seed: int, vocab_size: int) -> tuple[nn.Module, Head]:
    """Return a GPT-2 of two blocks and its head, drawn from a seed."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=CONTEXT,
        n_embd=WIDTH,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    head: Head
    if arm == "dist -12, bias":
        head = BiasedDistLayer(WIDTH, vocab_size, h_exp=SPHERE["h_exp"])
    elif arm == "annealed, scale":
        head = ScaledDistLayer(WIDTH, vocab_size, h_exp=SPHERE["h_exp"])
    else:
        head = build_head(ARMS[arm].settings, hidden_size=WIDTH, vocab_size=vocab_size)
    body = GPT2Model(config)
    if arm == "linear, wide":
        nn.init.normal_(head.weight, std=WIDTH**-0.5)
    return body, head


def run_once(
    arm: str, rate: float, seed: int, train: Tensor, held_out: Tensor, num_steps: int
) -> dict[str, Any]:
    """Train one arm and probe it on the way.

    Returns:
        `curve`, a list of `step` and what `probe` returns; `loss` on the second half of the
        held-out rows, and `best_loss`, at the exponent or temperature fitted on the first half;
        `scale`, where one is learned beside the exponent; `h_exp` at the end, where it is learned.
    """
    vocab_size = int(max(train.max(), held_out.max())) + 1
    body, head = build(arm, seed, vocab_size)
    trained = [*body.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    schedule = ARMS[arm].h_exp
    curve = []
    for step in range(num_steps):
        starts = torch.randint(len(train) - CONTEXT, (ROWS,), generator=generator)
        rows = train[starts[:, None] + torch.arange(CONTEXT + 1)]
        if schedule is not None:
            head.h_exp = schedule(step / max(1, num_steps - 1))
        optimizer.param_groups[0]["lr"] = rate * rate_factor(step, num_steps)
        loss = head.nll(*states_of(body, rows)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        head.renormalize_()
        if (step + 1) % PROBE_EVERY == 0 or step + 1 == num_steps:
            curve.append({"step": step + 1, **_probe(body, head, held_out)})
    learned = {}
    if isinstance(head, ScaledDistLayer):
        learned["scale"] = head.log_scale.exp().item()
    if "learn_h_exp" in ARMS[arm].settings:
        learned["h_exp"] = head.h_exp
    return {"curve": curve, **_losses(body, head, held_out), **learned}


@torch.no_grad()
def _probe(body: nn.Module, head: Head, held_out: Tensor) -> dict[str, float]:
    states, labels = states_of(body, held_out[:NUM_PROBED])
    last = slice(CONTEXT - 1, None, CONTEXT)
    found = probe(head, states[last], labels[last])
    return {**found, "loss": head.nll(states, labels).mean().item()}


@torch.no_grad()
def _losses(body: nn.Module, head: Head, held_out: Tensor) -> dict[str, float]:
    parts = [states_of(body, rows) for rows in held_out.chunk(2)]
    (fitted, fitted_labels), (tested, labels) = [(head(x), y) for x, y in parts]
    factor = fit_inverse_temperature(fitted, fitted_labels)
    return {
        "validation_loss": F.cross_entropy(factor * fitted, fitted_labels).item(),
        "loss": F.cross_entropy(tested, labels).item(),
        "best_loss": F.cross_entropy(factor * tested, labels).item(),
        "inverse_temperature": factor,
    }


def run_arms(
    store: Store, folder: Path, num_seeds: int, num_steps: int, arms: Sequence[str] = LANGUAGE
) -> dict[str, float]:
    """Train arms, as far as the time goes, and return their learning rates.

    A rate is the best on the first half of the held-out rows, with a seed of its own.
    """
    rows = functools.cache(lambda: read_rows(folder))
    rates: dict[str, float] = {}

    def kept(arm: str, rate: float, seed: int) -> dict[str, Any] | None:
        key = {"arm": arm, "rate": rate, "seed": seed}
        return store.get(lambda: run_once(arm, rate, seed, *rows(), num_steps), **key)

    for arm in arms:
        owner = ARMS[arm].rate_of or arm
        tried = [kept(owner, factor * LEARNING_RATE, TUNING_SEED) for factor in FACTORS]
        rate = best_rate(tried, "validation_loss")
        rates |= {} if rate is None else {arm: rate}
    for seed in range(num_seeds):
        for arm, rate in rates.items():
            kept(arm, rate, seed)
    return rates


def at_loss(curve: list[dict[str, float]], key: str, loss: float) -> float:
    """Return a quantity where a falling loss curve reaches a level, between two measurements.

    A curve that starts below the level has its first value, one that ends above it its last.
    """
    values = [point[key] for point in curve]
    found = tokens_to_reach(values, [point["loss"] for point in curve], loss)
    return values[-1] if found is None else found


def needed_cosine(h_exp: float, vocab_size: int, probability: float) -> float:
    """Return the cosine that a token needs on the sphere, all others at a right angle.

    (d ** 2 / 2) ** h_exp = (V - 1) * p / (1 - p), with d ** 2 = 2 - 2 cos.
    """
    odds = (vocab_size - 1) * probability / (1 - probability)
    return 1 - math.exp(math.log(odds) / h_exp)


def ceiling() -> list[list[float]]:
    """Return rows of h_exp, V, and the cosines needed for a probability of 0.5 and 0.9."""
    return [
        [h_exp, size, *(needed_cosine(h_exp, size, probability) for probability in (0.5, 0.9))]
        for h_exp in (-4.0, -12.0, -24.0)
        for size in (2_003, 30_522)
    ]


def compare(runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the intervals of every arm over its seeds.

    Returns:
        `loss` and `best_loss`; `behind`, nats of `best_loss` behind the linear head, or behind the
        arm whose learning rate this one has; and for the arms of the bottleneck the ratios of share
        and alignment to those of the linear head at the highest final loss of that seed.
    """
    rows = []
    for arm, found in runs.items():
        row: dict[str, Any] = {"arm": arm}
        row |= {key: t_interval([run[key] for run in found]) for key in ("loss", "best_loss")}
        rival = ARMS[arm].rate_of or ("linear" if arm != "linear" else "")
        if rival in runs:
            row["behind"] = _behind(found, runs[rival])
        if arm in BOTTLENECK and all(one in runs for one in BOTTLENECK):
            row |= {f"{key}_ratio": _ratios(runs, arm, key) for key in ("share", "alignment")}
        rows.append(row)
    return rows


def compare_biases(runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the gains of part 4b, the primary one first; empty until its arms are complete.

    Returns:
        `arm`, `over`, `gain` in nats (see `t_interval`), and for all but the first `rejected`,
        whether Holm's procedure rejects it.
    """
    contrasts = [("linear, bias", "dist -12"), *WITHOUT.items(), ("dist -12, bias", "linear, bias")]
    if any(arm not in runs for arm in (*WITHOUT, *WITHOUT.values())):
        return []
    rows: list[dict[str, Any]] = []
    for arm, over in contrasts:
        rows.append({"arm": arm, "over": over, "gain": _behind(runs[over], runs[arm])})
    reject(rows[1:])
    return rows


def compare_exponents(runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the gains of part 3c; empty until its arms are complete.

    Returns:
        `arm`; `gain` over dist -12 and `over_wide`, over the wide linear head, in nats (see
        `t_interval`); `rejected`, whether Holm's procedure rejects the gain; `verdict`.
    """
    if any(arm not in runs for arm in EXPONENTS):
        return []
    rows: list[dict[str, Any]] = []
    for arm in STEEPER:
        gain, over_wide = (_behind(runs[over], runs[arm]) for over in ("dist -12", "linear, wide"))
        rows.append({"arm": arm, "gain": gain, "over_wide": over_wide})
    reject(rows)
    for row in rows:
        word = verdict(row["gain"], MARGIN)
        row["verdict"] = UNDECIDED if word == WORTH_IT and not row["rejected"] else word
    return rows


def _behind(runs: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return paired_difference(*([run["best_loss"] for run in part] for part in (runs, others)))


def _ratios(runs: dict[str, list[dict[str, Any]]], arm: str, key: str) -> dict[str, Any]:
    ratios = []
    for seed, run in enumerate(runs[arm]):
        level = max(runs[one][seed]["curve"][-1]["loss"] for one in BOTTLENECK)
        linear = at_loss(runs["linear"][seed]["curve"], key, level)
        ratios.append(at_loss(run["curve"], key, level) / linear)
    return t_interval(ratios)
