"""Cost of a decoder's training step against transformers' own loss on the same backbone.

For every vocabulary a small Llama is built with random weights, and its arms take turns on the same
rows: transformers' LlamaForCausalLM with its own loss (logits of all positions), our distance and
linear heads with fused losses, and distillation from the model as it was. The last block and the
head train, on every position; with `--lora`, updates of rank 16 in all blocks and the head, also on
a body in 4 bits where there are a GPU and bitsandbytes. It runs on the GPU if there is one.
"""

import argparse
import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

from experiments.cost import allocated_peak, measure
from experiments.figures import check_output, positive
from harmonic_sft.losses import CrossEntropyLoss, Distillation, DistillLoss, HarmonicLoss
from harmonic_sft.models import HarmonicForCausalLM
from harmonic_sft.models.bases import old_head
from harmonic_sft.results import environment, show_table, write_results
from harmonic_sft.training.freezing import frozen_copy

OWN = "transformers, its own loss"
VOCAB_SIZES = (50_257, 128_256)
RowsStep = Callable[[Tensor], None]


def main(name: str, arguments: Sequence[str]) -> None:
    """Measure a decoder's training step with every loss."""
    parser = argparse.ArgumentParser(prog=f"python -m experiments {name}", description=main.__doc__)
    parser.add_argument("--rounds", type=positive, default=15, help="measured steps of each arm")
    parser.add_argument("--batch-size", type=positive, default=2, help="rows of a step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--lora", action="store_true", help="in all blocks, which stay frozen")
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=VOCAB_SIZES)
    parser.add_argument("--output", type=Path, default=Path("runs") / name, help="a folder")
    options = parser.parse_args(arguments)
    for key, least in {"length": 4, "hidden_size": 64}.items():
        if vars(options)[key] < least:
            raise ValueError(f"{key}: expected at least {least}, got {vars(options)[key]}")
    check_output(options.output)
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
                round(cost["model_bytes"] / 2**20),
                round(cost["peak_bytes_at_half"] / 2**20),
                round(cost["peak_bytes"] / 2**20),
            )
            for arm, cost in found.items()
        ]
        columns = ["arm", "seconds", "tokens/s", "ratio", "model, MiB"]
        title = f"V = {vocab_size:,}: one step of {options.batch_size} x {options.length} tokens"
        show_table(title, [*columns, "step at half the length, MiB", "step, MiB"], rows)
    keys = ("rounds", "batch_size", "length", "hidden_size", "layers", "dtype", "lora")
    sizes = {key: vars(options)[key] for key in keys}
    payload = {**sizes, "vocab_sizes": results, "environment": environment()}
    write_results(options.output, name, payload)


def compare(options: argparse.Namespace, vocab_size: int) -> dict[str, dict[str, Any]]:
    """Measure all arms at one vocabulary; the peak also for rows of half the length."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        make_base(options, folder, vocab_size)
        models = build_models(options, folder)
    sizes = {name: sum(one.nbytes for one in model.parameters()) for name, model in models.items()}
    arms = {name: stepper(model.to(device), lora=options.lora) for name, model in models.items()}
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch_size, options.length)
    rows = torch.randint(vocab_size, shape, generator=generator).to(device)
    halves = rows[:, : options.length // 2]
    for step in arms.values():  # the first step makes the optimizer's state
        step(rows[:, :16])
    peaks = {name: allocated_peak(partial(step, halves), device) for name, step in arms.items()}
    steps = {name: partial(step, rows) for name, step in arms.items()}
    costs = measure(steps, baseline=OWN, rounds=options.rounds, device=device)
    return {
        name: {**cost, "model_bytes": sizes[name], "peak_bytes_at_half": peaks[name]}
        for name, cost in costs.items()
    }


def make_base(options: argparse.Namespace, folder: str, vocab_size: int) -> None:
    """Save a Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden_size // 64,
        intermediate_size=int(2.75 * options.hidden_size),
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    dtype = getattr(torch, options.dtype)
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)


def build_models(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Build the models of all arms on one base."""
    dtype = getattr(torch, options.dtype)
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    harmonic = HarmonicForCausalLM.from_base(folder, dtype=dtype)
    harmonic.loss_fn = HarmonicLoss().prepare(harmonic.dist_head)
    head = {"name": "linear", "bias": False}
    linear = HarmonicForCausalLM.from_base(folder, head=head, init="base_head", dtype=dtype)
    linear.loss_fn = CrossEntropyLoss().prepare(linear.dist_head)
    models = {OWN: own, "harmonic head": harmonic, "linear head, fused": linear}
    if not options.lora:
        distilled = HarmonicForCausalLM.from_base(folder, dtype=dtype)
        unfreeze(distilled)
        distilled.loss_fn = DistillLoss().prepare(old_head(own), frozen_copy(distilled.model))
        distilled.loss_fn.anneal(0.1)
        return {**models, "harmonic head, distilled": distilled}
    if torch.cuda.is_available() and importlib.util.find_spec("bitsandbytes"):
        settings = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
        quantized = AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings)
        quantized.save_pretrained(f"{folder}/4bit")
        small = HarmonicForCausalLM.from_base(f"{folder}/4bit", dtype=dtype)
        small.loss_fn = HarmonicLoss().prepare(small.dist_head)
        models["harmonic head, 4-bit body"] = small
    return models


def stepper(model: Any, *, lora: bool) -> RowsStep:
    """Return what makes one optimizer step on rows `[B, T]`."""
    parameters = unfreeze(model.train(), lora=lora)
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


def unfreeze(model: Any, *, lora: bool = False) -> list[nn.Parameter]:
    """Train the head and the last block, or the head and updates of rank 16 in all blocks."""
    trained = ["dist_head.", "lm_head."]
    if lora:
        linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        inject_adapter_in_model(LoraConfig(r=16, lora_alpha=32, target_modules=linear), model)
        trained.append("lora_")
    else:
        trained.append(f"layers.{model.config.get_text_config().num_hidden_layers - 1}.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
