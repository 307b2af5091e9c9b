"""What a head and a loss add to a whole training step, next to a plain distance head."""

import copy
import time
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from experiments.cost import Step, measure
from harmonic_sft.config import parse
from harmonic_sft.losses import LOSSES
from harmonic_sft.models import HarmonicHeadModel, Head, build_head
from harmonic_sft.training import RunConfig
from harmonic_sft.training.run import prepare

LINEAR, COSINE, DIST = {"name": "linear"}, {"name": "cosine"}, {"name": "dist"}
CROSS_ENTROPY, HARMONIC = {"name": "cross_entropy"}, {"name": "harmonic"}
BASELINE = "dist, harmonic"


def with_transport(**fields: Any) -> dict[str, Any]:
    """Return the settings of harmonic loss + 0.1 W2 ** 2."""
    transport = {"weight": 0.1, "loss": {"name": "wasserstein", **fields}}
    return {"name": "sum", "terms": [{"loss": HARMONIC}, transport]}


ARMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear, cross_entropy": (LINEAR, CROSS_ENTROPY),
    "cosine, cross_entropy": (COSINE, CROSS_ENTROPY),
    BASELINE: (DIST, HARMONIC),
    "rotation of dist, harmonic": ({"name": "rotation", "inner": DIST}, HARMONIC),
    "dist, knn_label_smoothing": (DIST, {"name": "knn_label_smoothing"}),
    "dist, harmonic + 0.1 W2": (DIST, with_transport()),
    "dist, harmonic + 0.1 W2, fixed ground": (DIST, with_transport(ground="fixed")),
    "dist, harmonic + 0.1 W2, top 50": (DIST, with_transport(top_k=50)),
}


def measure_overhead(
    run: RunConfig, *, vocab_sizes: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Let all arms take turns on the batches of a run, each on a copy of its model.

    Classes beyond the base's own have random prototypes and no labels; with fewer classes, labels
    wrap around.

    Args:
        run: Its head and loss are replaced; nothing is trained in its folder.
        vocab_sizes: Numbers of classes.
        rounds: Measured steps of each arm.

    Returns:
        One row for each vocabulary and arm: `vocab_size`, `name`, `seconds`, `overhead`, the median
        of the ratios to plain harmonic loss in the same round, minus 1, `peak_bytes`,
        `memory_ratio`, and `prepare_seconds`, what the loss did before the first step.
    """
    trainer = prepare(run)[0]
    model = trainer.model.train()
    batches = list(islice(trainer.get_train_dataloader(), rounds))
    rows = []
    for vocab_size in vocab_sizes:
        numbered = [_with_labels_below(batch, vocab_size) for batch in batches]
        steps: dict[str, Step] = {}
        prepared: dict[str, float] = {}
        for name, (head, loss) in ARMS.items():
            built = _build_head(model, head, vocab_size)
            start = time.perf_counter()
            loss_fn = parse(LOSSES[loss["name"]], loss).prepare(built)
            prepared[name] = time.perf_counter() - start
            steps[name] = _stepper(model, built, loss_fn, numbered)
            steps[name]()  # makes the optimizer's state
        costs = measure(steps, baseline=BASELINE, rounds=rounds, device=model.device)
        rows += [
            {
                "vocab_size": vocab_size,
                "name": name,
                "overhead": cost.pop("time_ratio") - 1,
                "prepare_seconds": prepared[name],
                **cost,
            }
            for name, cost in costs.items()
        ]
    return rows


def _stepper(
    model: HarmonicHeadModel, head: Head, loss_fn: Any, batches: Sequence[dict[str, Tensor]]
) -> Step:
    """Return a step on the next batch, for a copy of the model with this head and loss."""
    model = copy.deepcopy(model)
    model.dist_head, model.loss_fn = head, loss_fn
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.95, 0.95))
    following = cycle(batches)

    def step() -> None:
        """Forward, backward, clip, step, prototypes, clear: what the Trainer's loop does."""
        model(**next(following)).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        head.renormalize_()
        optimizer.zero_grad()

    return step


def _build_head(model: HarmonicHeadModel, settings: dict[str, Any], vocab_size: int) -> Head:
    """Build a head whose first prototypes are the input embeddings, the others random."""
    embeddings = model.get_input_embeddings().get_parameter("weight").detach()[:vocab_size]
    generator = torch.Generator().manual_seed(0)
    count, hidden_size = vocab_size - len(embeddings), embeddings.shape[1]
    others = torch.randn(count, hidden_size, generator=generator).to(embeddings)
    head = build_head(settings, hidden_size=hidden_size, vocab_size=vocab_size)
    prototypes = torch.cat([embeddings, embeddings.std() * others])
    return head.to(embeddings.device).initialize_(prototypes)


def _with_labels_below(batch: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Return the batch with every label a class."""
    labels = batch["labels"]
    return {**batch, "labels": torch.where(labels < 0, labels, labels % vocab_size)}
