"""A run and rows that each change something in it: trained with several seeds and compared."""

import argparse
import io
import json
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import release_memory
from pydantic.dataclasses import dataclass
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from experiments.cost import HeadStep, measure
from experiments.evidence import spread
from experiments.family_table import add_differences, largest_set, measure_start, show_family
from experiments.figures import keep
from harmonic_sft.config import STRICT, parse, read_yaml
from harmonic_sft.eval.word_similarity import (
    WordPair,
    read_word_pairs,
    word_similarity,
    word_table,
)
from harmonic_sft.losses import CrossEntropyLoss
from harmonic_sft.models import (
    HarmonicConfig,
    HarmonicForCausalLM,
    HarmonicForMaskedLM,
    HarmonicLanguageModel,
    LinearHead,
)
from harmonic_sft.training import RunConfig, load_run_config
from harmonic_sft.training.loading import load_base_config, load_run_data
from harmonic_sft.training.run import train

logger = logging.getLogger(__name__)
FILE = Path(__file__).with_name("family.yaml")
SEEDS = (42, 43, 44, 45, 46)
ROUNDS = 20  # measured steps of each head and loss
BASELINE = "linear + cross_entropy"
Ratings = dict[str, list[WordPair]]
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Family:
    """One section of a family's file.

    Attributes:
        base: The YAML file of a run, as it is found from the family's file.
        rows: By name, what each row replaces in the run: `key.key` and a value, as on the
            command line of `harmonic-sft train`.
    """

    base: str
    rows: dict[str, dict[str, Any]]


class Finished(NamedTuple):
    """One row with one seed."""

    run: RunConfig
    results: dict[str, Any]  # what its results/train.json holds


def main(name: str, arguments: Sequence[str]) -> None:
    """Train every row of a family with every seed and compare what came out.

    A finished run is not trained again, an interrupted one continues. A run that fails does not
    stop the others.
    """
    parser = argparse.ArgumentParser(prog=f"python -m experiments {name}", description=main.__doc__)
    parser.add_argument("file", type=Path, help=f"experiments/family.yaml, or another with {name}:")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of every run")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="default: all of them")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="default: 42 to 46")
    parser.add_argument("--output", type=Path, default=Path("runs") / name, help="a folder")
    parser.add_argument("--wordsim", type=Path, help="TSV files of human ratings of word pairs")
    options = parser.parse_intermixed_args(arguments)
    family = read_family(options.file, name, options.rows)
    first = configure(
        family, next(iter(family.rows)), options.seeds[0], options.output, options.overrides
    )
    load_base_config(first.model)  # once, before every run would look for it
    ratings = {} if options.wordsim is None else _read_ratings(options.wordsim)
    results = compare(
        family,
        options.output,
        seeds=options.seeds,
        overrides=options.overrides,
        ratings=ratings,
    )
    keep(name, results, options.output)
    show_family(name, results)
    if failed := [row["name"] for row in results["rows"] if row["errors"]]:
        raise ValueError(f"{name}: expected every run to finish, got errors in {failed}")


def read_family(path: Path, name: str, rows: Sequence[str] | None = None) -> Family:
    """Read one section of a family's file, or some of its rows.

    Raises:
        ValueError: No such file, section or row, or a key that is not known.
    """
    sections = read_yaml(path)
    if name not in sections:
        raise ValueError(f"{path}: expected a section {name!r}, got {list(sections)}")
    family = parse(Family, sections[name])
    for row in rows or []:
        if row not in family.rows:
            raise ValueError(f"rows: expected some of {list(family.rows)}, got {row!r}")
    chosen = {row: family.rows[row] for row in rows or family.rows}
    return Family(base=str(path.parent / family.base), rows=chosen)


def configure(
    family: Family, row: str, seed: int, folder: Path, overrides: Sequence[str] = ()
) -> RunConfig:
    """Return the run of a row with one seed in one folder; it continues what is there.

    Args:
        family: The base and its rows.
        row: The name of one.
        seed: Of masks, order and initialization.
        folder: Of the output.
        overrides: Further `key=value` pairs.

    Raises:
        ValueError: The base, the row, or an override.
    """
    changes = [f"{key}={json.dumps(value)}" for key, value in family.rows[row].items()]
    fixed = [f"training.output_dir={folder}", f"training.seed={seed}"]
    fixed += ["training.disable_tqdm=true", "resume=true"]
    return load_run_config(family.base, [*changes, *fixed, *overrides])


def finish(run: RunConfig) -> dict[str, Any]:
    """Train a run to its end, or read what it gave before; its own tables are left out.

    Returns:
        The content of its `results/train.json`.
    """
    with quiet():
        return train(run)


@contextmanager
def quiet() -> Generator[None]:
    """Leave a run's own tables out; everything in them is in its results."""
    package = logging.getLogger("harmonic_sft")
    level, bars = package.level, transformers_logging.is_progress_bar_enabled()
    package.setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        package.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()


def load_trained(folder: Path) -> HarmonicLanguageModel:
    """Load the language model of a run's folder or checkpoint, ready to be evaluated."""
    is_causal = HarmonicConfig.from_pretrained(folder).is_causal
    model_class = HarmonicForCausalLM if is_causal else HarmonicForMaskedLM
    with quiet():
        return model_class.from_pretrained(folder).eval()


def compare(
    family: Family,
    output: Path,
    *,
    seeds: Sequence[int],
    overrides: Sequence[str],
    ratings: Ratings,
) -> dict[str, Any]:
    """Train every row with every seed, and measure the cost of its head and loss.

    Args:
        family: Its rows should differ in nothing but `head`, `h_exp`, `loss`, and what is trained.
        output: Gets a folder ROW-SEED for each run.
        seeds: Of masks, order and initialization.
        overrides: Of every run, such as where the data are.
        ratings: Human ratings of word pairs, by the name of their set.

    Returns:
        `rows`, one for each of the family, the best loss first; `rated`, the set of ratings that
        covers most pairs, which table and figure show; and `compared_with`, in words, the row with
        the linear head and plain cross-entropy that trains the same parts, if there is one, to
        which a row has its `difference`, seed by seed.
    """
    finished: dict[str, list[Finished]] = {name: [] for name in family.rows}
    errors: dict[str, dict[str, str]] = {name: {} for name in family.rows}
    order = list(product(seeds, family.rows))  # every row with the first seed, then the second
    for number, (seed, name) in enumerate(order, start=1):
        logger.info("%d of %d: %s, seed %d", number, len(order), name, seed)
        try:
            run = configure(family, name, seed, output / f"{name}-{seed}", overrides)
            finished[name].append(Finished(run, finish(run)))
        except Exception as error:  # whatever it is, the other runs continue
            logger.warning("%s, seed %d failed: %s", name, seed, error)
            errors[name][f"seed {seed}"] = f"{type(error).__name__}: {error}"
        release_memory()
    rows = [
        {"name": name, "errors": errors[name], **_row(finished[name], ratings)}
        for name in family.rows
    ]
    _add_costs(rows, finished)
    rated = largest_set(rows)
    return {
        "base": family.base,
        "seeds": list(seeds),
        "baseline": BASELINE,
        "rounds": ROUNDS,
        "rated": rated,
        "compared_with": add_differences(rows, rated),
        "rows": sorted(rows, key=_post_hoc_loss),
    }


def _read_ratings(folder: Path) -> Ratings:
    ratings = {path.stem: read_word_pairs(path) for path in sorted(folder.glob("*.tsv"))}
    if not ratings:
        raise ValueError(f"wordsim: expected a folder with TSV files, got {str(folder)!r}")
    return ratings


def _row(finished: Sequence[Finished], ratings: Ratings) -> Row:
    """Sum up one row over its seeds; nothing if no run was finished."""
    if not finished:
        return {}
    finals = [one.results["final"] for one in finished]
    known = set.intersection(*(set(final) for final in finals))
    config = finished[0].results["config"]
    rated = [_rate(one.run.output_dir, ratings) for one in finished]
    return {
        "seeds": [one.run.seed for one in finished],
        "head": config["head"],
        "loss": config["loss"],
        "trains": {"unfreeze": config["model"]["unfreeze"], "peft": config.get("peft")},
        "steps": finished[0].results["steps"],
        "metrics": {key: spread([final[key] for final in finals]) for key in sorted(known)},
        "word_similarity": {
            key: {what: spread([one[key][what] for one in rated]) for what in found}
            for key, found in rated[0].items()
        },
        "start": measure_start([one.results for one in finished]),
    }


def _rate(folder: Path, ratings: Ratings) -> dict[str, dict[str, float]]:
    if not ratings:
        return {}
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    prototypes, results = load_trained(folder).dist_head.prototypes, {}
    for name, pairs in ratings.items():
        table, ids, known, _ = word_table(prototypes, tokenizer, pairs, pieces="single")
        found = word_similarity(table, ids, known)
        results[name] = {**found, "pairs": len(pairs), "covered": len(ids)}
    return results


def _post_hoc_loss(row: Row) -> float:
    return row["metrics"]["post_hoc_loss"]["mean"] if "metrics" in row else float("inf")


def _add_costs(rows: Sequence[Row], finished: dict[str, list[Finished]]) -> None:
    """Measure head and loss of every row, as its first finished run left them."""
    first = {name: runs[0].run for name, runs in finished.items() if runs}
    if not first:
        return
    some = next(iter(first.values()))
    device, batch = some.training_arguments().device, _evaluation_batch(some)
    steps = {BASELINE: _baseline(load_trained(some.output_dir).to(device), batch)}
    for name, run in first.items():
        model = load_trained(run.output_dir).to(device)
        head = model.dist_head.train()
        assert run.loss is not None, "a file names its loss"
        steps[name] = HeadStep(head, run.loss.prepare(head), *_scored(model, batch))
    logger.info("Measuring head and loss: %d rounds of %d", ROUNDS, len(steps))
    costs = measure(steps, baseline=BASELINE, rounds=ROUNDS, device=device)
    for row in rows:
        if row["name"] in costs:
            row["cost"] = costs[row["name"]]


def _evaluation_batch(run: RunConfig) -> dict[str, torch.Tensor]:
    """Return as many rows of the evaluation split as a training step has, or all there are."""
    with quiet():
        _, data = load_run_data(run)
    size = min(run.training_arguments().per_device_train_batch_size, len(data.eval))
    return data.collator([data.eval[index] for index in range(size)])


def _baseline(model: HarmonicLanguageModel, batch: dict[str, torch.Tensor]) -> HeadStep:
    """Return a linear head with cross-entropy, of the same size, on what this model feeds it."""
    vocab_size, hidden_size = model.dist_head.weight.shape
    embeddings = model.get_input_embeddings().get_parameter("weight")
    head = LinearHead(hidden_size, vocab_size).to(embeddings.device).initialize_(embeddings)
    return HeadStep(head, CrossEntropyLoss(), *_scored(model, batch))


@torch.no_grad()
def _scored(
    model: HarmonicLanguageModel, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states `[N, D]` and the labels `[N]` of the labeled tokens."""
    inputs = {key: value.to(model.device) for key, value in batch.items()}
    labels = inputs.pop("labels")  # [B, T]
    hidden_states = model.model(**inputs).last_hidden_state  # [B, T, D]
    states = model.select(hidden_states, inputs.get("attention_mask"))
    labels = model.targets(labels)
    return states[labels != -100].requires_grad_(), labels[labels != -100]
