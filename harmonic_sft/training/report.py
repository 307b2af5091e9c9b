"""What a run prints and draws: parameters at the start, results at the end."""

import json
import logging
import shlex
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from harmonic_sft.data.batches import MaskedRows
from harmonic_sft.data.classification import class_counts
from harmonic_sft.data.heldout import COPIES
from harmonic_sft.data.loading import LoadedData
from harmonic_sft.data.streams import StreamedRows
from harmonic_sft.eval.statistics import UNDECIDED, holm, show_interval, t_interval, verdict
from harmonic_sft.models.heads import heads_in
from harmonic_sft.plots import plot_comparison
from harmonic_sft.results import show_best, show_table
from harmonic_sft.training.freezing import Part
from harmonic_sft.training.run_config import RunConfig
from harmonic_sft.training.tasks import MODELS

logger = logging.getLogger(__name__)
PREDICTED = {
    "masked_lm": "masked tokens",
    "causal_lm": "next tokens",
    "sequence_classification": "texts",
    "token_classification": "labeled tokens",
}
ROW_NAMES = {"old_head": "the base's own head", "swapped": "new head"}
MIB, GIB = 2**20, 2**30
DEVICE_GIB = 24  # of the GPU that is assumed where there is none
METRIC_NOTE = (
    "(*) Best post-hoc h_exp; for a head without one, its best inverse temperature. The loss "
    "beside it is that of each half of the documents at the value fitted on the other half; with "
    "<= or >= the search ended there. "
    "(**) Mean cosine between the input embeddings of label and prediction where they differ; of "
    "classes, between their prototypes."
)
BEST = (
    "Losses at different exponents cannot be compared; compare the best losses, of which each is "
    "at the best exponent of its model."
)
ANNEALED = f"%s: h_exp went from %g to %g. {BEST}"
COMPARED = {  # metrics whose differences are shown: title, factor and digits
    "loss": ("loss, nats", 1, 3),
    "post_hoc_loss": ("best loss, nats", 1, 3),
    "accuracy": ("accuracy, %", 100, 2),
    "post_hoc_ece": ("best ECE, %", 100, 2),
    "post_hoc_brier": ("best Brier score", 1, 5),
}
DIFFERENCE_COLUMNS = ["run", "metric", "difference", "seeds", "p (Holm)", "verdict"]
MIN_SEEDS = 5  # with fewer a difference is undecided
DIFFERENCE_NOTE = (
    "Mean ± half of the 95 % t interval over paired seeds; p is corrected over the table by Holm; "
    f"with fewer than {MIN_SEEDS} seeds a difference is undecided. "
)
UNPAIRED = (
    "Undecided, since they share no two seeds with %s: %s. Give runs that differ only in "
    f"training.seed, each with the same {MIN_SEEDS} seeds or more."
)
COLUMNS = {  # of a table of metrics: heading, factor and format
    "loss": ("loss, nats", 1, ".2f"),
    "accuracy": ("accuracy, %", 100, ".1f"),
    "error_cosine": ("error cosine (**)", 1, ".3f"),
    "ece": ("ECE, %", 100, ".1f"),
    "h_exp": ("h_exp", 1, "g"),
    "post_hoc_loss": ("best loss, nats", 1, ".2f"),
}


def log_data(data: LoadedData) -> None:
    """Log how much there is to train and to evaluate on, and what was left out."""
    if data.labels is not None:
        logger.info("Data: %d classes.", len(data.labels))
    if isinstance(data.train, StreamedRows):
        logger.info(
            "Data: logical streams: %d; rows kept for evaluation: %d.",
            len(data.train.streams),
            len(data.eval),
        )
        return
    logger.info(
        "Data: %s documents, %s tokens in %s rows; %s rows of other documents for evaluation.",
        *map("{:,}".format, (data.num_documents, data.num_tokens, len(data.train), len(data.eval))),
    )
    if data.fill_rate is not None:
        logger.info("Packed: %.1f %% of every row are tokens, none is cut.", 100 * data.fill_rate)
    if any(data.duplicates):
        logger.info(COPIES, *data.duplicates)
    log_left_out(data)


def log_left_out(data: LoadedData) -> None:
    """Log which tokens and rows could not be used."""
    if tokens := data.bad_rows.unscored_tokens:
        logger.info("Left out: %d tokens of chunks in which nothing may be predicted.", tokens)
    if first := data.bad_rows.first:
        count = data.bad_rows.total - data.bad_rows.blank
        logger.warning("Left out: %d bad rows, such as %s", count, "; ".join(first))


def show_parts(run: RunConfig, rows: Sequence[Part]) -> None:
    """Print part, dtype, parameters, trainable and memory of the model of a run."""
    total = Part("total", "", *map(sum, zip(*(row[2:] for row in rows), strict=True)))
    table = [
        (*part[:4], f"{(part.bytes + part.training_bytes) / MIB:,.1f}") for part in (*rows, total)
    ]
    columns = ["part", "dtype", "parameters", "trainable", "memory, MiB (*)"]
    names = " of ".join(settings["name"] for settings in heads_in(run.head_settings()))
    title = f"{run.model.base} + {names} head; (*) weights, gradients, optimizer"
    show_table(title, columns, table)


def show_estimate(estimate: dict[str, int], *, batch: str) -> None:
    """Print the memory of one step and whether it fits the GPU, or 24 GiB if there is no GPU."""
    total = sum(estimate.values())
    rows = [(name, f"{size / GIB:.2f}") for name, size in {**estimate, "total": total}.items()]
    show_table(f"One step of {batch}, estimated", ["what", "GiB"], rows)
    gib, device = float(DEVICE_GIB), ""
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        gib, device = gpu.total_memory / GIB, f" of {gpu.name}"
    fits = "Fits" if total / GIB + 1 <= gib else "Does not fit"
    what = "with 1 GiB set aside for the CUDA context and fragmentation"
    logger.info("%s %.0f GiB%s, %s.", fits, gib, device, what)


def show_classes(data: LoadedData) -> None:
    """Print how many labels of each class the training and the evaluation rows have."""
    assert isinstance(data.train, MaskedRows), "only tables have labels"
    counts = [class_counts(rows).tolist() for rows in (data.train, data.eval)]  # [V] each
    rows = zip(data.train.class_names or [], *counts, strict=True)
    title = f"{data.num_documents:,} training rows of {data.num_tokens:,} tokens"
    show_table(title, ["class", "training labels", "evaluation labels"], list(rows))


def show_closing_table(results: dict[str, Any]) -> None:
    """Print loss and accuracy before and after, at the current and the best exponent."""
    task = results["config"]["model"].get("task", "masked_lm")  # earlier versions knew only one
    swap = results.get("swap", {})  # which earlier versions did not write
    rows = [
        *(_metrics_row(ROW_NAMES[name], metrics) for name, metrics in swap.items()),
        _metrics_row("calibrated" if "swapped" in swap else "before training", results["before"]),
        _metrics_row("after training", results["final"]),
    ]
    if results["unigram_loss"] is not None:
        item = "token" if task in ("masked_lm", "causal_lm") else "class"
        rows.append((f"{item} frequencies alone", f"{results['unigram_loss']:.2f}", *[None] * 6))
    title = f"{results['run']}: {PREDICTED[task]} of the evaluation split"
    _show_metrics(title, rows)
    final = results["final"]
    best = min(final["loss"], final.get("post_hoc_loss", final["loss"]))
    if results["unigram_loss"] is not None and best >= results["unigram_loss"]:
        logger.warning(
            "%s: after training it predicts no better than frequencies alone, at any temperature. "
            "It needs more steps, more trained blocks, another learning rate or another base.",
            results["run"],
        )
    before, after = results["neighbors_before"], results["neighbors_after"]
    both = [word for word in before if word in after]  # a resumed run may ask for other words
    if neighbors := [(word, " ".join(before[word]), " ".join(after[word])) for word in both]:
        show_table("Nearest prototypes", ["word", "before", "after"], neighbors)
    logger.info(
        "%d steps; this session %.0f s, %.0f tokens/s, peak memory %.1f GiB.",
        results["steps"],
        results["train_seconds"],
        results["tokens_per_second"] or 0,
        results["peak_memory_bytes"] / GIB,
    )


def show_next_steps(folder: Path, task: str) -> None:
    """Say what to type to load, evaluate and publish a finished run."""
    model_class, quoted = MODELS[task].__name__, shlex.quote(str(folder))
    logger.info(
        "Load:      from harmonic_sft import %s; model = %s.from_pretrained(%r)\n"
        "           from transformers import AutoTokenizer; tokenizer = "
        "AutoTokenizer.from_pretrained(%r)\n"
        "Evaluate:  harmonic-sft eval %s data=FILE\n"
        "Publish:   harmonic-sft push %s --repo-id OWNER/NAME",
        model_class,
        model_class,
        str(folder),
        str(folder),
        quoted,
        quoted,
    )


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return the names of folders, or their paths if two have the same name."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def compare_runs(runs: Sequence[dict[str, Any]], figure: Path | None) -> None:
    """Print the results of several runs side by side, and draw them if a path is given.

    Each run has its own name in `run`.
    """
    _check_same_data(runs)
    rows = []
    for run in runs:
        rows.append(_metrics_row(f"{run['run']}, before", run["before"]))
        rows.append(_metrics_row(f"{run['run']}, after {run['steps']} steps", run["final"]))
    _show_metrics("Evaluation split of every run", rows)
    arms = _arms(runs)
    if len(arms) > 1:
        _show_differences(arms)
    for run in runs:
        h_exp = run["config"].get("h_exp") or {"start": None, "end": None}
        if h_exp["start"] != h_exp["end"]:
            logger.info(ANNEALED, run["run"], h_exp["start"], h_exp["end"])
        if run.get("environment", {}).get("dirty"):
            logger.info("%s: dirty, its code differs from its commit.", run["run"])
    if figure is not None:
        logger.info("Figure: %s", plot_comparison(list(runs), figure))


def _check_same_data(runs: Sequence[dict[str, Any]]) -> None:
    digests = [(run["run"], run.get("data", {}).get("eval_sha256")) for run in runs]
    first, expected = digests[0]
    others = [name for name, digest in digests[1:] if digest is None or digest != expected]
    if others:
        raise ValueError(
            f"compare: expected runs with the held-out data of {first}, got others in "
            f"{', '.join(others)}. Their losses cannot be compared; run `harmonic-sft eval` on the "
            "same data for all of them"
        )


def _arms(runs: Sequence[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Group runs that differ only in their seed into arms, by seed; the first is the reference."""
    arms: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        config = {
            key: value for key, value in run["config"].items() if key not in ("hub", "resume")
        }
        training = {**config.get("training", {})}
        seed = training.pop("seed", 42)
        training.pop("output_dir", None)
        arm = json.dumps({**config, "training": training}, sort_keys=True)
        same = arms.setdefault(arm, {}).setdefault(seed, run)
        if same is not run:
            logger.warning(
                "%s has the settings and the seed of %s. Differences are those of the first.",
                run["run"],
                same["run"],
            )
    return {next(iter(arm.values()))["run"]: arm for arm in arms.values()}


def _show_differences(arms: dict[str, dict[int, dict[str, Any]]]) -> None:
    """Print how every arm differs from the first, over the seeds that both have."""
    reference, *others = arms
    differences, unpaired = [], []
    for name in others:
        seeds = [seed for seed in arms[name] if seed in arms[reference]]
        pairs = [(arms[name][seed]["final"], arms[reference][seed]["final"]) for seed in seeds]
        if len(pairs) < 2:
            unpaired.append(name)
            continue
        for key, (title, scale, digits) in COMPARED.items():
            if all(key in metrics for pair in pairs for metrics in pair):
                values = [metrics[key] - other[key] for metrics, other in pairs]
                differences.append((name, title, t_interval(values), scale, digits))
    corrected = holm([difference["p"] for _, _, difference, _, _ in differences])
    rows = [
        (
            name,
            title,
            show_interval(difference, scale=scale, digits=digits),
            str(difference["seeds"]),
            None if p is None else f"{p:.3f}",
            verdict(difference, p) if difference["seeds"] >= MIN_SEEDS else UNDECIDED,
        )
        for (name, title, difference, scale, digits), p in zip(differences, corrected, strict=True)
    ]
    if rows:
        show_table(f"Difference from {reference}", DIFFERENCE_COLUMNS, rows)
    if unpaired:
        logger.info(UNPAIRED, reference, ", ".join(unpaired))
    run = next(iter(arms[reference].values()))
    first, task = run["final"], run["config"].get("model", {}).get("task", "masked_lm")
    documents = first.get("documents")
    logger.info(
        "%sMeasured on %s %s%s.",
        DIFFERENCE_NOTE if rows else "",
        f"{first.get('tokens', 0):,.0f}",
        PREDICTED[task],
        "" if documents is None else f" of {documents:,} documents",
    )


def show_metrics(title: str, results: dict[str, Any], *, task: str = "masked_lm") -> None:
    """Print the metrics of one evaluation, and on how many documents they were measured."""
    final = results["final"]
    _show_metrics(title, [_metrics_row("now", final)])
    logger.info(
        "Scored: %s documents, %s %s.",
        f"{final['documents']:,}",
        f"{final['tokens']:,.0f}",
        PREDICTED[task],
    )
    if final["loss_interval"] is not None:
        low, high = final["loss_interval"]
        logger.info("Loss, 95 %% interval over documents: %.3f to %.3f.", low, high)
    logger.info(
        "ECE %.2f %%; a perfect model would show %.2f %% on as many; debiased %.2f %%.",
        *(100 * final[key] for key in ("ece", "ece_floor", "ece_debiased")),
    )


def show_suite(payload: dict[str, Any]) -> None:
    """Print the results of a suite, one table for each group, and the differences in loss."""
    names = payload["models"]
    for group in dict.fromkeys(row["group"] for row in payload["rows"]):
        rows = [row for row in payload["rows"] if row["group"] == group]
        cells = [
            (
                row["set"],
                row.get("metric", f"not measured: needs {row.get('missing')}"),
                *(_value(value) for value in row["values"]),
            )
            for row in rows
        ]
        show_table(group, ["set", "metric", *names], cells)
        for note in dict.fromkeys(row["note"] for row in rows if row.get("note")):
            logger.info("%s", note)
    level = "jointly 95 %" if len(names) > 2 else "95 %"
    for difference in payload["differences"]:
        low, high = difference["interval"] or (None, None)
        logger.info(
            "%s of %s - %s: %+.3f nats%s over %d documents: %s.",
            COMPARED[difference["metric"]][0].partition(",")[0].capitalize(),
            difference["model"],
            difference["against"],
            difference["mean"],
            "" if low is None else f" ({level} interval {low:+.3f} to {high:+.3f})",
            difference["documents"],
            difference["verdict"],
        )


def _value(value: Any) -> str | float | None:
    return f"{value[0]:.3f} to {value[1]:.3f}" if isinstance(value, list) else value


def draw(plot_fn: Callable[[Any, Path], Path], results: Any, path: Path) -> None:
    """Draw a figure; without matplotlib, say what to install."""
    try:
        logger.info("Figure: %s", plot_fn(results, path))
    except ValueError as error:
        logger.warning("No figure: %s", error)


def _show_metrics(title: str, rows: Sequence[tuple[str | None, ...]]) -> None:
    columns = ["", *(heading for heading, _, _ in COLUMNS.values()), "at h_exp (*)"]
    show_table(title, columns, rows)
    logger.info(textwrap.fill(METRIC_NOTE, 80))


def _metrics_row(name: str, metrics: dict[str, float]) -> tuple[str | None, ...]:
    cells = [
        f"{factor * metrics[key]:{spec}}" if key in metrics else None
        for key, (_, factor, spec) in COLUMNS.items()
    ]
    return name, *cells, show_best(metrics)
