"""Every head and loss of a folder of YAML files on one bench: trained, measured, tabulated."""

import io
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import release_memory
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging as transformers_logging

from harmonic_sft.eval import WordPair, rate_prototypes, read_word_pairs
from harmonic_sft.experiments.evidence import spread
from harmonic_sft.experiments.family_table import add_differences, largest_set, show_family
from harmonic_sft.experiments.head_cost import Arm, measure_costs
from harmonic_sft.experiments.head_start import measure_start
from harmonic_sft.losses import CrossEntropyLoss
from harmonic_sft.models import HarmonicLanguageModel, LinearHead, load_checked
from harmonic_sft.plots import plot_family
from harmonic_sft.results import environment, read_results, write_results
from harmonic_sft.training import RunConfig, load_run_config
from harmonic_sft.training.data_view import load_run_data
from harmonic_sft.training.model_loading import LANGUAGE_MODELS
from harmonic_sft.training.output_folder import check_output_folder, is_finished, results_path
from harmonic_sft.training.run import train

logger = logging.getLogger(__name__)
SEEDS = (42, 43, 44)
ROUNDS = 20
BASELINE = "linear + cross_entropy"
Ratings = dict[str, list[WordPair]]


class Trained(NamedTuple):
    """One file with one seed: what came of it, or why nothing did."""

    name: str
    seed: int
    run: RunConfig | None = None
    results: dict[str, Any] | None = None
    word_similarity: dict[str, dict[str, float]] | None = None
    error: str | None = None


def config_files(folder: Path) -> list[Path]:
    """Return the YAML files of a folder, none if it is itself the output of a run."""
    return [] if (folder / "run.yaml").is_file() else sorted(folder.glob("*.yaml"))


def compare_family(
    folder: Path,
    *,
    output_dir: Path,
    overrides: Sequence[str] = (),
    seeds: Sequence[int] = SEEDS,
    wordsim: Path | None = None,
    figure: Path | None = None,
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """Train every file of a folder with every seed and compare what came out.

    A finished run is not trained again, an interrupted one goes on. A run that fails does not
    stop the others.

    Args:
        folder: Its YAML files; they should differ in nothing but `head`, `h_exp`, `loss`, and
            what is trained.
        output_dir: Gets a folder NAME-SEED for each run, and `results/family.json`.
        overrides: Of every file, such as where its data are.
        seeds: Of masks, order and initialization.
        wordsim: A folder of TSV files with human ratings of word pairs, if there is one.
        figure: Where to draw the table.
        rounds: Steps of each head and loss whose time is measured.

    Returns:
        The content of `results/family.json`: `rows`, one for each file, the best loss first;
        `rated`, the set of ratings that covers most pairs, which table and figure show; and
        `compared_with`, in words, the file with the linear head and plain cross-entropy that
        trains the same parts, if there is one, to which a row has its `difference`, seed by seed.

    Raises:
        ValueError: No YAML file or no ratings in the folders, or some run failed; what the others
            gave is written and printed before.
    """
    files = config_files(folder)
    if not files:
        raise ValueError(f"compare: expected a folder with YAML files, got {str(folder)!r}")
    ratings = {} if wordsim is None else _read_ratings(wordsim)
    trained = []
    plan = list(product(seeds, files))  # every file with the first seed, then with the second
    for number, (seed, file) in enumerate(plan, start=1):
        logger.info("%d of %d: %s, seed %d", number, len(plan), file.stem, seed)
        trained.append(_train_one(file, seed, output_dir, ratings, overrides))
        release_memory()
    rows = [_row(file.stem, [one for one in trained if one.name == file.stem]) for file in files]
    _add_costs(rows, trained, rounds)
    rated = largest_set(rows)
    results = {
        "folder": str(folder),
        "seeds": list(seeds),
        "baseline": BASELINE,
        "rounds": rounds,
        "rated": rated,
        "compared_with": add_differences(rows, rated),
        "rows": sorted(rows, key=_post_hoc_loss),
        "environment": environment(),
    }
    logger.info("Written: %s", write_results(output_dir / "results", "family", results))
    show_family(results)
    if figure is not None and any("metrics" in row for row in rows):
        logger.info("Figure: %s", plot_family(results, figure))
    failed = {row["name"]: row["errors"] for row in rows if row["errors"]}
    if failed:
        raise ValueError(f"compare: expected every run to finish, got errors in {list(failed)}")
    return results


def _read_ratings(folder: Path) -> Ratings:
    ratings = {path.stem: read_word_pairs(path) for path in sorted(folder.glob("*.tsv"))}
    if not ratings:
        raise ValueError(f"wordsim: expected a folder with TSV files, got {str(folder)!r}")
    return ratings


def _train_one(
    file: Path, seed: int, output_dir: Path, ratings: Ratings, overrides: Sequence[str]
) -> Trained:
    trained = Trained(file.stem, seed)
    try:
        run = configure(file, seed, output_dir / f"{file.stem}-{seed}", overrides)
        results = finish(run)
        with quiet():
            similarity = _rate(run.output_dir, ratings)
    except Exception as error:  # whatever it is, the other runs go on
        logger.warning("%s, seed %d failed: %s", file.stem, seed, error)
        logger.debug("Where it failed:", exc_info=error)
        return trained._replace(error=f"{type(error).__name__}: {error}")
    final = results["final"]
    logger.info("  loss %.3f, accuracy %.1f %%", final["loss"], 100 * final["accuracy"])
    return trained._replace(run=run, results=results, word_similarity=similarity)


def configure(file: Path, seed: int, folder: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the run of a file with one seed into one folder, where it goes on if it was begun.

    Args:
        file: The YAML file.
        seed: Of masks, order and initialization.
        folder: Of its output.
        overrides: Further `key=value` pairs.

    Raises:
        ValueError: The file or an override.
    """
    fixed = [f"training.output_dir={folder}", f"training.seed={seed}"]
    return load_run_config(file, [*fixed, "training.disable_tqdm=true", "resume=true", *overrides])


def finish(run: RunConfig) -> dict[str, Any]:
    """Train a run to its end, or read what it gave before; its own tables are left out.

    Returns:
        The content of its `results/train.json`.

    Raises:
        ValueError: Its folder holds another run, or bad input.
        StoppedError: Training was stopped.
    """
    with quiet():
        check_output_folder(run)
        return read_results(results_path(run)) if is_finished(run) else train(run)


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
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model_class = LANGUAGE_MODELS["causal_lm" if config.is_causal else "masked_lm"]
    return load_checked(model_class, str(folder), config).eval()


def _rate(folder: Path, ratings: Ratings) -> dict[str, dict[str, float]]:
    if not ratings:
        return {}
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return rate_prototypes(load_trained(folder).dist_head.prototypes, tokenizer, ratings)


def _row(name: str, trained: Sequence[Trained]) -> dict[str, Any]:
    """Sum up one file over its seeds."""
    row: dict[str, Any] = {
        "name": name,
        "errors": {f"seed {one.seed}": one.error for one in trained if one.error is not None},
    }
    finished = [(one.seed, one.results) for one in trained if one.results is not None]
    if not finished:
        return row
    finals = [results["final"] for _, results in finished]
    config = finished[0][1]["config"]
    known = set.intersection(*(set(final) for final in finals))
    sets = [one.word_similarity for one in trained if one.word_similarity]
    similarity = {
        key: {what: spread([values[key][what] for values in sets]) for what in sets[0][key]}
        for key in (sets[0] if sets else ())
    }
    return {
        **row,
        "seeds": [seed for seed, _ in finished],
        "head": config["head"],
        "loss": config["loss"],
        "trains": {"unfreeze": config["model"]["unfreeze"], "peft": config.get("peft")},
        "steps": finished[0][1]["steps"],
        "metrics": {key: spread([final[key] for final in finals]) for key in sorted(known)},
        "word_similarity": similarity,
        "start": measure_start([results for _, results in finished]),
    }


def _post_hoc_loss(row: dict[str, Any]) -> float:
    return row["metrics"]["post_hoc_loss"]["mean"] if "metrics" in row else float("inf")


def _add_costs(rows: Sequence[dict[str, Any]], trained: Sequence[Trained], rounds: int) -> None:
    """Measure head and loss of every file, as its first finished run left them."""
    first: dict[str, RunConfig] = {}
    for one in trained:
        if one.run is not None:
            first.setdefault(one.name, one.run)
    if not first:
        return
    run = next(iter(first.values()))
    device = run.training_arguments().device
    batch = _evaluation_batch(run)
    arms: dict[str, Arm] = {}
    for row in rows:
        if row["name"] not in first:
            continue
        run = first[row["name"]]
        with quiet():
            model = load_trained(run.output_dir).to(device)
        if BASELINE not in arms:
            arms[BASELINE] = _baseline(model, batch)
        try:
            arm = _arm(model, run, batch)
            arm.step()
        except Exception as error:  # such as too little memory: the others are measured
            row["errors"]["cost"] = f"{type(error).__name__}: {error}"
            continue
        arms[row["name"]] = arm
    logger.info("Measuring head and loss: %d rounds of %d", rounds, len(arms))
    costs = measure_costs(arms, baseline=BASELINE, rounds=rounds)
    for row in rows:
        if row["name"] in costs:
            row["cost"] = costs[row["name"]]._asdict()


def _evaluation_batch(run: RunConfig) -> dict[str, torch.Tensor]:
    """Return as many rows of the evaluation split as a training step has, or all there are."""
    with quiet():
        _, data = load_run_data(run)
    size = min(run.training_arguments().per_device_train_batch_size, len(data.eval))
    return data.collator([data.eval[index] for index in range(size)])


def _arm(model: HarmonicLanguageModel, run: RunConfig, batch: dict[str, torch.Tensor]) -> Arm:
    head = model.dist_head.train()
    return Arm(head, run.loss.prepare(head), *_scored(model, batch))


def _baseline(model: HarmonicLanguageModel, batch: dict[str, torch.Tensor]) -> Arm:
    """Return a linear head with cross-entropy, of the same size, on what this model feeds it."""
    vocab_size, hidden_size = model.dist_head.weight.shape
    embeddings = model.get_input_embeddings().get_parameter("weight")
    head = LinearHead(hidden_size, vocab_size).to(embeddings.device).initialize_(embeddings)
    return Arm(head, CrossEntropyLoss(), *_scored(model, batch))


@torch.no_grad()
def _scored(
    model: HarmonicLanguageModel, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = {key: value.to(model.device) for key, value in batch.items()}
    labels = inputs.pop("labels")  # [B, T]
    hidden_states = model.model(**inputs).last_hidden_state  # [B, T, D]
    states = model.select(hidden_states, inputs.get("attention_mask"))
    labels = model.targets(labels)
    return states[labels != -100].requires_grad_(), labels[labels != -100]
