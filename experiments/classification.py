"""Classifiers on SST-2 and banking77: distance, cosine and linear heads under the same budget.

Every arm trains the last block of all-MiniLM-L6-v2 and its head for the same steps on the same
rows. Prototypes start as the class means of the frozen features; the linear head both at random,
as is usual, and from the same means. It measures accuracy, the expected calibration error (ECE),
and the AUROC that tells rows in scope from rows out of it: by the distance to the nearest
prototype, or by the highest probability for the linear heads (which have no distances), with the
latter given for every head too. Out of scope are, for banking77, the last 20 of a random order of
its 77 intents, which no training row has, and for SST-2 the queries of banking77. Of SST-2 only
the first 8,000 rows of a random order are used.
"""

import argparse
import csv
import json
import logging
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy.stats import mannwhitneyu
from torch import Tensor
from transformers import AutoTokenizer

from experiments.evidence import show_spread, spread
from experiments.family import finish
from experiments.figures import keep
from harmonic_sft.models import HarmonicForSequenceClassification
from harmonic_sft.results import show_table
from harmonic_sft.training import load_run_config

logger = logging.getLogger(__name__)
CONFIGS = Path(__file__).parents[1] / "configs" / "classification"
NUM_HELD_OUT = 20  # intents of banking77
SST2_ROWS = 8_000
BATCH_ROWS = 64
METRICS = {
    "accuracy": "accuracy",
    "ece": "ECE",
    "post_hoc_ece": "best ECE",
    "scope_auroc": "out-of-scope AUROC",
    "scope_auroc_by_probability": "by probability",
    "loss": "loss, nats",
    "post_hoc_loss": "best loss, nats",
}
LINEAR = ("h_exp=null", "loss={name: cross_entropy}")
ARMS = {  # what is replaced in configs/classification/*_dist.yaml
    "linear, cross-entropy": ("head={name: linear, init: random}", *LINEAR),
    "linear from class means": ("head={name: linear, init: class_means}", *LINEAR),
    "distance, harmonic": (),
    "cosine, cross-entropy": (
        "head={name: cosine, scale: 20.0, learn_scale: true, init: class_means}",
        *LINEAR,
    ),
}
Rows = list[dict[str, str]]


class Task(NamedTuple):
    """Rows of one data set, and the file of its runs."""

    name: str
    config: Path
    train: Rows
    test: Rows
    out_of_scope: list[str]  # texts


def main(name: str, arguments: Sequence[str]) -> None:
    """Train all heads on SST-2 and banking77 and compare them."""
    parser = argparse.ArgumentParser(prog=f"python -m experiments {name}", description=main.__doc__)
    files = "a folder of sst2_train.tsv, sst2_dev.tsv, banking77_train.csv and banking77_test.csv"
    parser.add_argument("data", type=Path, help=files)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of every run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of every arm")
    parser.add_argument("--output", type=Path, default=Path("runs") / name, help="a folder")
    options = parser.parse_intermixed_args(arguments)
    tasks = load_tasks(options.data)
    runs = [
        run_once(task, arm, seed, options.overrides)
        for seed in range(options.seeds)
        for task in tasks
        for arm in ARMS
    ]
    summary = summarize(runs)
    cells = [
        (row["task"], row["arm"], *(show_spread(row[key], digits=3) for key in METRICS))
        for row in summary
    ]
    columns = ["task", "head and loss", *METRICS.values()]
    show_table(f"Mean +- standard deviation over {options.seeds} seeds", columns, cells)
    sizes = {
        task.name: {
            "train": len(task.train),
            "test": len(task.test),
            "out_of_scope": len(task.out_of_scope),
        }
        for task in tasks
    }
    keep(name, {"arms": ARMS, "rows": sizes, "summary": summary, "runs": runs}, options.output)


def read_table(path: Path, *, text: str, label: str) -> Rows:
    """Read a comma- or tab-separated file with a header."""
    separator = "\t" if path.suffix == ".tsv" else ","
    quoting = csv.QUOTE_NONE if path.suffix == ".tsv" else csv.QUOTE_MINIMAL
    with path.open(newline="") as file:
        rows = csv.DictReader(file, delimiter=separator, quoting=quoting)
        return [{"text": row[text].strip(), "label": row[label]} for row in rows]


def load_tasks(folder: Path) -> list[Task]:
    """Load both data sets and decide what is out of scope."""
    banking = {
        split: read_table(folder / f"banking77_{split}.csv", text="text", label="category")
        for split in ("train", "test")
    }
    sst2 = {
        split: read_table(folder / f"sst2_{split}.tsv", text="sentence", label="label")
        for split in ("train", "dev")
    }
    shuffled = random.Random(0)
    shuffled.shuffle(sst2["train"])
    shuffled.shuffle(banking["train"])
    intents = sorted({row["label"] for row in banking["train"]})
    shuffled.shuffle(intents)
    outside = set(intents[-NUM_HELD_OUT:])
    inside = {
        split: [row for row in rows if row["label"] not in outside]
        for split, rows in banking.items()
    }
    unknown = [row["text"] for row in banking["test"] if row["label"] in outside]
    queries = [row["text"] for row in banking["test"]][: len(sst2["dev"])]
    return [
        Task(
            "banking77", CONFIGS / "banking77_dist.yaml", inside["train"], inside["test"], unknown
        ),
        Task("SST-2", CONFIGS / "sst2_dist.yaml", sst2["train"][:SST2_ROWS], sst2["dev"], queries),
    ]


def run_once(task: Task, arm: str, seed: int, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Train and measure one arm with one seed."""
    logger.info("%s, %s, seed %d", task.name, arm, seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for split, rows in (("train", task.train), ("test", task.test)):
            lines = (json.dumps(row) for row in rows)
            (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
        fixed = [
            f"data.sources=[{{path: {folder}/train.jsonl}}]",
            f"data.eval.source={{path: {folder}/test.jsonl}}",
            f"training.output_dir={folder}/run",
            f"training.seed={seed}",
            "training.disable_tqdm=true",
        ]
        results = finish(load_run_config(task.config, [*ARMS[arm], *fixed, *overrides]))
        model = HarmonicForSequenceClassification.from_pretrained(folder / "run").eval()
        tokenizer = AutoTokenizer.from_pretrained(folder / "run")
    scores = [
        scope_scores(model, tokenizer, texts)
        for texts in ([row["text"] for row in task.test], task.out_of_scope)
    ]
    aurocs = {key: auroc(scores[0][key], scores[1][key]) for key in scores[0]}
    chosen = "probability" if model.dist_head.settings()["name"] == "linear" else "distance"
    final = results["final"]
    return {
        "task": task.name,
        "arm": arm,
        "seed": seed,
        **{key: final[key] for key in METRICS if key in final},
        "before_accuracy": results["before"]["accuracy"],
        "scope_auroc": aurocs[chosen],
        "scope_auroc_by": chosen,
        "scope_auroc_by_probability": aurocs["probability"],
        "train_seconds": results["train_seconds"],
    }


@torch.no_grad()
def scope_scores(
    model: HarmonicForSequenceClassification, tokenizer: Any, texts: Sequence[str]
) -> dict[str, Tensor]:
    """Return how far out of scope every text seems, `[N]`: larger is further.

    Returns:
        `distance`, to the nearest prototype, on the unit sphere if the head is there; and
        `probability`, 1 minus the highest one.
    """
    distances, probabilities = [], []
    head = model.dist_head
    on_sphere = head.settings()["name"] != "linear"
    for start in range(0, len(texts), BATCH_ROWS):
        batch = tokenizer(
            list(texts[start : start + BATCH_ROWS]),
            return_tensors="pt",
            padding=True,
            truncation=True,
            max_length=64,
        ).to(model.device)
        states = model.model(**batch).last_hidden_state
        states = model.select(states, batch["attention_mask"]).squeeze(1)  # [B, D]
        probabilities.append(1 - head(states).softmax(-1).max(-1).values)
        if on_sphere:
            states = torch.nn.functional.normalize(states, dim=-1)
        distances.append(torch.cdist(states, head.prototypes).min(-1).values)
    return {"distance": torch.cat(distances), "probability": torch.cat(probabilities)}


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Return the probability that a score out of scope is above one in scope, ties a half."""
    larger = mannwhitneyu(outside.cpu().numpy(), inside.cpu().numpy()).statistic
    return float(larger) / (len(inside) * len(outside))


def summarize(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the spread over the seeds of every task and arm."""
    rows = []
    for task, arm in dict.fromkeys((run["task"], run["arm"]) for run in runs):
        same = [run for run in runs if (run["task"], run["arm"]) == (task, arm)]
        spreads = {key: spread([run[key] for run in same]) for key in METRICS}
        rows.append({"task": task, "arm": arm, "seeds": len(same), **spreads})
    return rows
