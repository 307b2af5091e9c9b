"""Cost of a decoder's training step against transformers' own loss on the same backbone.

    python scripts/benchmark_causal.py [--rounds 15] [--json benchmark_causal.json]

For every vocabulary a small Llama is built with random weights, and its arms take turns on the same
rows: transformers' LlamaForCausalLM with its own loss (logits of all positions), our distance and
linear heads with fused losses, and distillation from the model as it was. The last block and the
head train, on every position. Printed are median seconds, the median of the ratios of neighboring
steps, and the peak of bytes allocated in a step, also for rows of half the length.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from harmonic_sft.experiments.head_cost import allocated_peak
from harmonic_sft.losses import CrossEntropyLoss, Distillation, DistillLoss, HarmonicLoss
from harmonic_sft.models import HarmonicForCausalLM
from harmonic_sft.models.bases import old_head
from harmonic_sft.results import environment, show_table, write_results
from harmonic_sft.training.freezing import frozen_copy

OWN = "transformers, its own loss"
VOCAB_SIZES = (50_257, 128_256)
Step = Callable[[Tensor], None]


def make_base(folder: str, vocab_size: int, hidden_size: int, num_layers: int) -> None:
    """Save a Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        intermediate_size=int(2.75 * hidden_size),
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def unfreeze(model: nn.Module, num_layers: int) -> list[nn.Parameter]:
    """Train the last block and the head, by the plan."""
    trained = (f"layers.{num_layers - 1}.", "dist_head.", "lm_head.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def stepper(model: Any, num_layers: int) -> Step:
    """Return what makes one optimizer step on rows `[B, T]`."""
    parameters = unfreeze(model.train(), num_layers)
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    distills = isinstance(getattr(model, "loss_fn", None), Distillation)

    def step(rows: Tensor) -> None:
        batch = {"input_ids": rows, "labels": rows}
        if distills:
            model.loss_fn.read(batch)
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(model, HarmonicForCausalLM):
            model.renormalize_prototypes_()

    return step


def build_arms(folder: str, num_layers: int) -> dict[str, Step]:
    """Build all arms on one base."""
    own = AutoModelForCausalLM.from_pretrained(folder)
    harmonic = HarmonicForCausalLM.from_base(folder)
    harmonic.loss_fn = HarmonicLoss().prepare(harmonic.dist_head)
    linear = HarmonicForCausalLM.from_base(
        folder, head={"name": "linear", "bias": False}, init="base_head"
    )
    linear.loss_fn = CrossEntropyLoss().prepare(linear.dist_head)
    distilled = HarmonicForCausalLM.from_base(folder)
    unfreeze(distilled, num_layers)
    distilled.loss_fn = DistillLoss().prepare(old_head(own), frozen_copy(distilled.model))
    distilled.loss_fn.anneal(0.1)
    models = {
        OWN: own,
        "harmonic head": harmonic,
        "linear head, fused": linear,
        "harmonic head, distilled": distilled,
    }
    return {name: stepper(model, num_layers) for name, model in models.items()}


def measure(arms: dict[str, Step], rows: Tensor, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every step; the arms take turns, in changing order."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for index in range(rounds):
        start = index % len(names)
        for name in names[start:] + names[:start]:
            began = time.perf_counter()
            arms[name](rows)
            seconds[name].append(time.perf_counter() - began)
    return seconds


def compare(options: argparse.Namespace, vocab_size: int) -> dict[str, Any]:
    """Measure all arms at one vocabulary."""
    with tempfile.TemporaryDirectory() as folder:
        make_base(folder, vocab_size, options.hidden_size, options.layers)
        arms = build_arms(folder, options.layers)
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch_size, options.length)
    rows = torch.randint(vocab_size, shape, generator=generator)
    for step in arms.values():  # the first step makes the optimizer's state
        step(rows[:, :16])
    lengths = [options.length // 2, options.length]
    peaks = {
        name: [allocated_peak(lambda n=length, s=step: s(rows[:, :n])) for length in lengths]
        for name, step in arms.items()
    }
    seconds = measure(arms, rows, options.rounds)
    return {
        name: {
            "median_seconds": median(times),
            "tokens_per_second": rows.numel() / median(times),
            "median_ratio": median(a / b for a, b in zip(times, seconds[OWN], strict=True)),
            "peak_bytes": dict(zip(map(str, lengths), peaks[name], strict=True)),
        }
        for name, times in seconds.items()
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="measured steps of each arm")
    parser.add_argument("--batch-size", type=int, default=2, help="rows of a step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=VOCAB_SIZES)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args(arguments)
    results = {}
    for vocab_size in options.vocab_sizes:
        results[str(vocab_size)] = found = compare(options, vocab_size)
        rows = [
            (
                name,
                f"{arm['median_seconds']:.2f}",
                round(arm["tokens_per_second"]),
                f"{arm['median_ratio']:.2f}",
                *(peak // 2**20 for peak in arm["peak_bytes"].values()),
            )
            for name, arm in found.items()
        ]
        peaks = [f"peak at {length}, MiB" for length in found[OWN]["peak_bytes"]]
        show_table(
            f"V = {vocab_size:,}: one step of {options.batch_size} x {options.length} tokens",
            ["arm", "seconds", "tokens/s", "ratio", *peaks],
            rows,
        )
    if options.json is not None:
        sizes = {key: vars(options)[key] for key in ("batch_size", "length", "hidden_size")}
        payload = {
            "rounds": options.rounds,
            **sizes,
            "layers": options.layers,
            "vocab_sizes": results,
            "environment": environment(),
        }
        write_results(options.json.parent, options.json.stem, payload)
    return results


if __name__ == "__main__":
    main()
