"""Part 6: NeoBERT itself under five heads, run by run, for the machine of a user."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.family import Family, configure, finish, load_trained, quiet, read_family
from experiments.worth_it import masked
from experiments.worth_it.classes import TUNING_SEED
from experiments.worth_it.store import Store, best_rate
from harmonic_sft.eval import documents_of, score
from harmonic_sft.eval.calibration import fit_inverse_temperature
from harmonic_sft.training import RunConfig
from harmonic_sft.training.batches import batches_on, head_inputs
from harmonic_sft.training.loading import load_run_data

FILE = Path(__file__).with_name("neobert.yaml")
BASE = "linear"  # what made NeoBERT, as `masked` calls it
NUM_STEPS, TUNING_STEPS = 2000, 500
# Checkpoints to continue from, one at a time, without the frozen blocks.
KEPT = (
    "save=trainable",
    "training.save_total_limit=1",
    "training.eval_strategy=no",
    "data.eval.drop_near_duplicates=true",
)


def run_arms(
    store: Store, folder: Path, num_seeds: int, overrides: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Choose every arm's learning rate, then train all arms seed by seed, as far as the time goes.

    Args:
        store: Of the runs.
        folder: Gets a folder for every run; those that only chose a rate are deleted.
        num_seeds: How many seeds each arm has.
        overrides: `key=value`, of every run.

    Returns:
        Learning rates of the arms under `BASE`, as `masked.summarize` takes them.

    Raises:
        ValueError: Not all runs hold out the same documents.
    """
    family = read_family(FILE, "neobert")

    def kept(arm: str, rate: float, seed: int) -> dict[str, Any] | None:
        key = {"base": BASE, "arm": arm, "rate": rate, "seed": seed}
        found = store.get(lambda: _run_once(family, folder, arm, rate, seed, overrides), **key)
        if len({run["held_out"] for run in store.rows.values()}) > 1:
            raise ValueError(
                f"{store.path}: expected runs that hold out the same documents, got others. Give "
                "another --output"
            )
        return found

    rates: dict[str, float] = {}
    for arm in family.rows:
        tried = [kept(arm, factor * masked.LEARNING_RATE, TUNING_SEED) for factor in masked.FACTORS]
        rate = best_rate(tried)
        rates |= {} if rate is None else {arm: rate}
    for seed in range(num_seeds):
        for arm, rate in rates.items():
            kept(arm, rate, seed)
    return {BASE: rates}


def run_folder(folder: Path, arm: str, rate: float, seed: int) -> Path:
    """Return the folder of one run."""
    return folder / f"{arm.replace(', ', '_').replace(' ', '_')}-{rate:g}-{seed}"


def _run_once(
    family: Family, folder: Path, arm: str, rate: float, seed: int, overrides: Sequence[str]
) -> dict[str, Any]:
    place, is_tuning = run_folder(folder, arm, rate, seed), seed == TUNING_SEED
    steps = TUNING_STEPS if is_tuning else NUM_STEPS
    changes = [f"training.learning_rate={rate}", f"training.max_steps={steps}", *KEPT, *overrides]
    run = configure(family, arm, seed, place, changes)
    finish(run)
    found = measure(run, on_validation=is_tuning)
    if is_tuning:
        shutil.rmtree(place)
    return found


@torch.no_grad()
def measure(run: RunConfig, *, on_validation: bool) -> dict[str, Any]:
    """Score one half of the held-out documents at the factor that is best for the even ones.

    Args:
        run: A finished one.
        on_validation: The even ones, which choose; else the odd ones, the test part.

    Returns:
        `loss` in nats, `factor`, `losses` and `tokens` of every document; `as_trained`, the loss
        without a factor, and `accuracy`; `held_out`, the digest of the documents.
    """
    model = load_trained(run.output_dir).to(run.training_arguments().device)
    with quiet():
        _, data = load_run_data(run)
    size = run.training_arguments().per_device_eval_batch_size
    batches = batches_on(model.device, data.eval, data.collator, size)
    scores = score(model, (head_inputs(model, batch) for batch in batches))
    assert scores is not None, "the run has evaluated itself"
    documents = documents_of(data.eval, scores.num_rows)[scores.rows]  # [N]
    is_even = documents % 2 == 0
    factor = fit_inverse_temperature(scores.normalizers[is_even], scores.margins[is_even])
    half = is_even if on_validation else ~is_even
    chosen, names = scores.keep(half), np.unique(documents[half], return_inverse=True)[1]
    losses, tokens = chosen.at(factor)[0], np.bincount(names)
    return {
        "loss": float(losses.mean()),
        "as_trained": float(chosen.at(1.0)[0].mean()),
        "accuracy": float((chosen.ranks == 0).mean()),
        "factor": round(factor, 5),
        "losses": (np.bincount(names, losses) / tokens).round(5).tolist(),
        "tokens": tokens.tolist(),
        "held_out": data.held_out.digest,
    }
