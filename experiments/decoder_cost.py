"""Cost of a decoder's training step against transformers' own loss on the same backbone.

For every vocabulary a small Llama is built with random weights, and its arms take turns on the same
rows: transformers' LlamaForCausalLM with its own loss (logits of all positions), our distance and
linear heads with fused losses, and distillation from the model as it was. The last block and the
head train, on every position.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from experiments.cost import allocated_peak, measure
from harmonic_sft.losses import CrossEntropyLoss, Distillation, DistillLoss, HarmonicLoss
from harmonic_sft.models import HarmonicForCausalLM
from harmonic_sft.models.backbones import old_head
from harmonic_sft.results import environment, show_table, write_results
from harmonic_sft.training.freezing import frozen_copy

OWN = "transformers, its own loss"
VOCAB_SIZES = (50_257, 128_256)
NUM_LAYERS = 4
RowsStep = Callable[[Tensor], None]


def main(name: str, arguments: Sequence[str]) -> None:
    """Measure a decoder's training step with every loss."""
    parser = argparse.ArgumentParser(prog=f"python -m experiments {name}", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="measured steps of each arm")
    parser.add_argument("--batch-size", type=int, default=2, help="rows of a step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=VOCAB_SIZES)
    parser.add_argument("--output", type=Path, default=Path("runs") / name, help="a folder")
    options = parser.parse_args(arguments)
    tokens = options.batch_size * options.length
    results = {}
    for vocab_size in options.vocab_sizes:
        results[str(vocab_size)] = found = compare(options, vocab_size)
        rows = [
            (
                arm,
                f"{cost['seconds']:.2f}",
                round(tokens / cost["seconds"]),
                f"{cost['time_ratio']:.2f}",
                cost["peak_bytes_at_half"] // 2**20,
                cost["peak_bytes"] // 2**20,
            )
            for arm, cost in found.items()
        ]
        columns = ["arm", "seconds", "tokens/s", "ratio", "peak at half the length, MiB"]
        title = f"V = {vocab_size:,}: one step of {options.batch_size} x {options.length} tokens"
        show_table(title, [*columns, "peak, MiB"], rows)
    sizes = {key: vars(options)[key] for key in ("rounds", "batch_size", "length", "hidden_size")}
    payload = {**sizes, "layers": NUM_LAYERS, "vocab_sizes": results, "environment": environment()}
    write_results(options.output, name, payload)


def compare(options: argparse.Namespace, vocab_size: int) -> dict[str, dict[str, Any]]:
    """Measure all arms at one vocabulary; the peak also for rows of half the length."""
    with tempfile.TemporaryDirectory() as folder:
        make_base(folder, vocab_size, options.hidden_size)
        arms = build_arms(folder)
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch_size, options.length)
    rows = torch.randint(vocab_size, shape, generator=generator)
    halves = rows[:, : options.length // 2]
    for step in arms.values():  # the first step makes the optimizer's state
        step(rows[:, :16])
    peaks = {name: allocated_peak(partial(step, halves)) for name, step in arms.items()}
    steps = {name: partial(step, rows) for name, step in arms.items()}
    costs = measure(steps, baseline=OWN, rounds=options.rounds)
    return {name: {**cost, "peak_bytes_at_half": peaks[name]} for name, cost in costs.items()}


def make_base(folder: str, vocab_size: int, hidden_size: int) -> None:
    """Save a Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=hidden_size // 64,
        intermediate_size=int(2.75 * hidden_size),
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def build_arms(folder: str) -> dict[str, RowsStep]:
    """Build all arms on one base."""
    own = AutoModelForCausalLM.from_pretrained(folder)
    harmonic = HarmonicForCausalLM.from_base(folder)
    harmonic.loss_fn = HarmonicLoss().prepare(harmonic.dist_head)
    linear = HarmonicForCausalLM.from_base(
        folder, head={"name": "linear", "bias": False}, init="base_head"
    )
    linear.loss_fn = CrossEntropyLoss().prepare(linear.dist_head)
    distilled = HarmonicForCausalLM.from_base(folder)
    unfreeze(distilled)
    distilled.loss_fn = DistillLoss().prepare(old_head(own), frozen_copy(distilled.model))
    distilled.loss_fn.anneal(0.1)
    models = {
        OWN: own,
        "harmonic head": harmonic,
        "linear head, fused": linear,
        "harmonic head, distilled": distilled,
    }
    return {name: stepper(model) for name, model in models.items()}


def stepper(model: Any) -> RowsStep:
    """Return what makes one optimizer step on rows `[B, T]`."""
    parameters = unfreeze(model.train())
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    is_ours = isinstance(model, HarmonicForCausalLM)

    def step(rows: Tensor) -> None:
        batch = {"input_ids": rows, "labels": rows}
        if is_ours and isinstance(model.loss_fn, Distillation):
            model.loss_fn.read(batch)
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_ours:
            model.renormalize_prototypes_()

    return step


def unfreeze(model: nn.Module) -> list[nn.Parameter]:
    """Train only the last block and the head."""
    trained = (f"layers.{NUM_LAYERS - 1}.", "dist_head.", "lm_head.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
