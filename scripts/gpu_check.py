"""What has to be measured on a GPU, in parts of a few minutes each; needs no network.

    python scripts/gpu_check.py PART [--output runs/gpu] [--small]

| part | what it does |
|---|---|
| tests | the tests that need a GPU: losses against float64, halts, equal bits |
| profile | one step of the loss: kernels by time, launches, halts, registers and spills of ours |
| loss, loss_large | time and memory of the losses against their peers, by precision |
| step | a step of configs/neobert.yaml against the plain Trainer with NeoBERT's own decoder |
| job | configs/neobert.yaml at its true shape in 24 GB: peak, tokens a second, variants |
| survival | the same through an out-of-memory error, for 200 shorter steps, and resumed |
| decoder | LoRA and head on a Llama of 1.3 billion weights, also in 4 bits, against its own loss |
| note | a step of GPT-2 medium's shape with rotation, smoothing and W2 against the plain head |
| blocks | the loss with other block sizes of our kernels |

Every part prints its table last and writes JSON files into the output folder. NeoBERT has random
weights in the published layout and reads the standard library's docstrings. `--small` runs a part
with tiny shapes, on the CPU if there is no GPU: a rehearsal.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate.utils import release_memory
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the scripts

from experiments import decoder_cost
from experiments.overhead import measure_overhead
from harmonic_sft import load_run_config, train
from harmonic_sft.data.docstrings import standard_library_docstrings
from harmonic_sft.ops import distance_cross_entropy, engine
from harmonic_sft.results import environment, show_table, write_results
from harmonic_sft.training.callbacks import StoppedError
from harmonic_sft.training.loading import load_base_config
from harmonic_sft.training.preview import estimate_step
from harmonic_sft.training.run import prepare
from scripts import benchmark_ops, benchmark_step, make_neobert, make_small_gpt
from scripts.benchmark_ops_arms import Inputs, Sizes

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "neobert.yaml"
NOTE = ROOT / "configs" / "geometry" / "gpt2_medium_wikitext103.yaml"
STATISTICS = ("2x1024x4", "4x1024x4", "4x512x4", "8x256x4", "16x128x4", "4x1024x8", "1x2048x4")
COEFFICIENTS = ("16x256x4", "8x256x4", "4x1024x4", "32x128x4")
SCORES = (2**25, 2**26, 2**27, 2**28)  # bytes of one block
GIB = 2**30
CARD = 24 * GIB  # of the GPU that the recipe is for
LARGE = "8192x4096x151936,16384x2048x248320"
ROWS = "1638x768x30522,8192x768x30522,8192x768x50257,4096x4096x128256"
DOCSTRINGS = (  # of the standard library, in place of a run's data
    "data.sources=[{path: 'python:docstrings'}]",
    "data.eval={documents: 8}",
    "data.packing=true",  # rows of full length
    "check_base=false",
    "training.disable_tqdm=true",
)
HALTS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def tests(options: argparse.Namespace) -> None:
    """Run the tests that need a GPU; here the kernels are compiled, not interpreted."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    # Others may import what is not installed there.
    which = [str(path) for path in files if "mark.cuda" in path.read_text()]
    # Kernels are compiled on one core each.
    how = ["--collect-only"] if options.small else ["--numprocesses=8", "--dist=worksteal"]
    # A plugin that refuses to work beside others; without it the option changes nothing.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "-m", "cuda"]
    command += [*how, *which]
    settings = {**os.environ, "TRITON_INTERPRET": "0"}
    subprocess.run(command, check=True, cwd=ROOT, env=settings)


def profile_loss(options: argparse.Namespace) -> None:
    """Show what one step of the distance loss is made of, for NeoBERT's head."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = Sizes(64, 16, 700) if options.small else Sizes(1638, 768, 30522)
    found: dict[str, dict[str, Any]] = {}
    for name, dtypes in benchmark_ops.DTYPES.items():
        inputs = Inputs.draw(sizes, device, *dtypes)
        for _ in range(3):
            _loss_step(inputs)
        with profile(acc_events=True) as profiler:  # all activities that this machine has
            _loss_step(inputs)
        events = profiler.key_averages()
        # An operator's own event has the time of the kernels that it launches, too.
        kernels = [event for event in events if event.device_type != DeviceType.CPU]
        kernels.sort(key=lambda event: -event.self_device_time_total)
        # One halt is the profiler's, at its end.
        halts = sum(event.count for event in events if event.key in HALTS)
        found[name] = {
            "launches": sum(event.count for event in kernels),
            "halts": max(0, halts - 1),
            "kernels": [
                {"name": e.key[:80], "microseconds": e.self_device_time_total, "count": e.count}
                for e in kernels[:40]
            ],
        }
        rows = [tuple(kernel.values()) for kernel in found[name]["kernels"]]
        title = f"{name}: {found[name]['launches']} launches, {found[name]['halts']} halts"
        show_table(title, ["kernel", "microseconds", "count"], rows)
    _write(options, "profile", {"sizes": str(sizes), "steps": found, "compiled": _compiled()})


def _loss_step(inputs: Inputs) -> None:
    inputs.clear()
    loss = distance_cross_entropy(*inputs, h_exp=-12.0, unit_sphere=True, reduction="mean")
    loss.backward()


def _compiled() -> list[dict[str, Any]]:
    """Return registers and spills of our kernels as they were compiled."""
    if not torch.cuda.is_available():
        return []
    from harmonic_sft.ops import triton_kernels, triton_rows

    modules = (triton_kernels, triton_rows)
    kernels = {name: one for part in modules for name, one in vars(part).items()}
    device = torch.cuda.current_device()
    rows = [
        (name, variant.n_regs, variant.n_spills, variant.metadata.shared)
        for name, function in kernels.items()
        if name.endswith("_kernel")
        for variant in function.device_caches[device][0].values()
    ]
    columns = ["kernel", "registers", "spills", "shared bytes"]
    show_table("As compiled", columns, rows)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def loss(options: argparse.Namespace) -> None:
    """Measure the losses and their peers at the sizes of the models, in every precision."""
    rows = "24x16x700" if options.small else ROWS
    for dtype in ("mixed", "bfloat16", "float32"):
        _measure_losses(options, rows, dtype)
    _measure_losses(options, rows, "float32", "--tf32")


def loss_large(options: argparse.Namespace) -> None:
    """Measure the losses at the sizes of TRL's issues 7244 and 6858."""
    for dtype in ("mixed", "bfloat16"):
        _measure_losses(options, "24x16x900" if options.small else LARGE, dtype, name="loss_large")


def _measure_losses(
    options: argparse.Namespace, rows: str, dtype: str, *flags: str, name: str = "loss"
) -> None:
    path = options.output / "_".join([name, dtype, *(flag.strip("-") for flag in flags)])
    arguments = ["--rows", rows, "--dtype", dtype, *flags, "--json", f"{path}.json"]
    if options.small:
        arguments += ["--repetitions", "2", "--only", "chunked|bare"]
    else:
        repetitions = "5" if name == "loss_large" else "15"
        arguments += ["--device", "cuda", "--memory", "--repetitions", repetitions]
    torch.compiler.reset()  # after eight compilations of a function it would run uncompiled
    benchmark_ops.main(arguments)


def step(options: argparse.Namespace) -> None:
    """Measure a step of the recipe against the plain Trainer with the base's own decoder."""
    arguments = ["--config", str(CONFIG), "--batch-size", "2"]
    arguments += ["--steps", "2" if options.small else "15"]
    path = ["--json", str(options.output / "step.json")]
    benchmark_step.main([*arguments, *path, *_overrides(options)])
    where = f"training.output_dir={options.output / 'shares'}"
    trainer = prepare(load_run_config(CONFIG, [*_overrides(options), where]))[0]
    following = benchmark_step.stepper(trainer, list(islice(trainer.get_train_dataloader(), 1)))
    following()
    with profile(acc_events=True) as profiler:
        following()
    shares = _shares(profiler.key_averages())
    show_table("The device's milliseconds of one step", ["part", "ms"], list(shares.items()))
    _write(options, "shares", {"milliseconds": shares})


def _shares(events: Any) -> dict[str, float]:
    """Return the device's milliseconds in the loss with its gradients, and in all kernels."""
    loss = [event for event in events if event.key.startswith("GeneratedBackwardFor_harmonic")]
    assert loss, "this torch has another name for it"
    kernels = [event for event in events if event.device_type != DeviceType.CPU]
    # Ranges that the optimizer names are listed among the kernels in them.
    whole = sum(e.self_device_time_total for e in kernels if not e.key.startswith("Optimizer"))
    return {
        "loss and its gradients": sum(event.device_time_total for event in loss) / 1e3,
        "all": whole / 1e3,
    }


def job(options: argparse.Namespace) -> None:
    """Train the recipe at its true shape, and variants of it, in the memory of one card."""
    _limit(CARD)
    variants = {
        "recipe": [],
        "checkpointing": ["training.gradient_checkpointing=true"],
        "padding-free": ["data.padding_free=true"],
        "one document a row": ["data.packing=false"],
    }
    found: dict[str, dict[str, Any]] = {}
    _train(options, "warm-up", ["training.max_steps=1"])  # compiles kernels, tokenizes the text
    for name, changes in variants.items():
        found[name] = _train(options, name, changes)
        _write(options, "job", {"runs": found})  # what is lent may end, or fail, before the rest
    estimate = _estimate(options)
    _show_runs(found)
    print(f"Estimated by --dry-run: {estimate / GIB:.2f} GiB")
    _write(options, "job", {"runs": found, "estimate_bytes": estimate})


def survival(options: argparse.Namespace) -> None:
    """Train through a real out-of-memory error, for 200 steps, and again from a checkpoint."""
    shorter = ["training.gradient_accumulation_steps=1", "data.context_length=1024"]
    steps = [] if options.small else ["training.max_steps=200", *shorter]
    fewer = ["training.gradient_accumulation_steps=4"]
    whole = _losses(options, "whole", fewer)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    found = {"whole": whole, "200 short steps": _losses(options, "200 short steps", steps)}
    if peak:  # a real error, of a card with less memory than the run takes
        try:
            limit = int(0.93 * peak)
            found["out of memory"] = _losses(options, "out of memory", fewer, limit=limit)
        except (StoppedError, torch.OutOfMemoryError) as error:  # no reason to lose the rest
            print(f"out of memory: {error}")
    found["resumed"] = [float(_resumes_bit_equal(options))]
    rows = [(name, len(some), some[0], some[-1]) for name, some in found.items()]
    show_table("Losses; resumed: 1 = bit-equal", ["run", "steps", "first", "last"], rows)
    _write(options, "survival", {"runs": found, "peak_bytes": peak})


def _losses(
    options: argparse.Namespace, name: str, changes: Sequence[str], limit: int | None = None
) -> list[float]:
    """Train without an evaluation, in `limit` bytes of the card, and return the losses."""
    folder = options.output / name.replace(" ", "_")
    shutil.rmtree(folder, ignore_errors=True)
    where = [f"training.output_dir={folder}", "training.save_strategy=no"]
    steps = [f"training.max_steps={3 if options.small else 4}"]
    _forget()
    trainer = prepare(load_run_config(CONFIG, [*_overrides(options), *steps, *where, *changes]))[0]
    _limit(limit or CARD)
    try:
        trainer.train()
    finally:
        _limit(CARD)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def _show_runs(found: dict[str, dict[str, Any]]) -> None:
    first = next(iter(found.values()))
    rows = [
        (
            name,
            f"{one['peak_memory_bytes'] / GIB:.2f}",
            round(one["tokens_per_second"] or 0),
            f"{100 * (one['data_wait_share'] or 0):.0f}",
            *(f"{loss:.3f}" for loss in (one["losses"][0], one["losses"][-1])),
            f"{max(map(abs, _differences(one, first)), default=0.0):.1g}",
        )
        for name, one in found.items()
    ]
    columns = ["run", "peak, GiB", "tokens/s", "data, %", "first loss", "last", "off the first"]
    show_table("configs/neobert.yaml, random weights", columns, rows)


def decoder(options: argparse.Namespace) -> None:
    """Measure a step of LoRA and head on a decoder of a billion weights, with their peers."""
    shape = {"batch-size": 4, "length": 1024, "hidden-size": 2048, "layers": 16, "rounds": 15}
    vocab_size = 128_256
    if options.small:
        shape = {"batch-size": 1, "length": 32, "hidden-size": 64, "layers": 2, "rounds": 1}
        vocab_size = 700
    arguments = [word for key, value in shape.items() for word in (f"--{key}", str(value))]
    arguments += ["--vocab-sizes", str(vocab_size), "--dtype", "bfloat16", "--lora"]
    decoder_cost.main("decoder", [*arguments, "--output", str(options.output)])


def note(options: argparse.Namespace) -> None:
    """Measure what the geometry note adds to a step: rotation, smoothing and W2."""
    base = options.output / "gpt2"
    if not base.exists():
        text = options.output / "docstrings.txt"
        lines = (" ".join(one.split()) for one in standard_library_docstrings())
        text.write_text("\n".join(lines))
        shape = ["--hidden-size", "64", "--layers", "2", "--vocab-size", "700"]
        shape = shape if options.small else ["--hidden-size", "1024", "--layers", "24"]
        make_small_gpt.main([str(text), str(base), *shape])
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
        model.save_pretrained(base)
    settings = [
        f"model.base={base.resolve()}",
        *DOCSTRINGS,
        f"data.context_length={32 if options.small else 256}",
        f"training.output_dir={options.output / 'note'}",
    ]
    vocab_sizes = [700] if options.small else [50_257]
    rounds = 1 if options.small else 15
    run = load_run_config(NOTE, settings)
    rows = measure_overhead(run, vocab_sizes=vocab_sizes, rounds=rounds)
    keys = ("name", "seconds", "overhead", "peak_bytes")
    show_table("A step of GPT-2 medium's shape", keys, [[row[key] for key in keys] for row in rows])
    _write(options, "note", {"rows": rows})


def blocks(options: argparse.Namespace) -> None:
    """Measure the loss with other block sizes of our kernels than those in use."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = "24x16x700" if options.small else "1638x768x30522,8192x4096x151936"
    found = {}
    for row in text.split(","):
        inputs = Inputs.draw(Sizes.parse(row), device, *benchmark_ops.DTYPES["mixed"])
        rounds = 1 if options.small else 9
        found[row] = {}
        for name, choices in _choices().items():
            times: dict[str, list[float]] = {str(choice): [] for choice in choices}
            for _ in range(rounds + 1):  # the first compiles
                for choice in choices:
                    with _changed(name, choice):
                        times[str(choice)].append(_seconds(inputs))
            found[row][name] = {choice: median(some[1:]) for choice, some in times.items()}
            table = [(choice, f"{1e3 * time:.3f}") for choice, time in found[row][name].items()]
            show_table(f"{row}: {name}", ["choice", "ms"], table)
    _write(options, "blocks", {"steps": found, "compiled": _compiled()})


def _choices() -> dict[str, Sequence[Any]]:
    """Return what is tried for each constant of our kernels' launches, what is in use first."""
    shapes = {"STATISTICS": STATISTICS, "COEFFICIENTS": COEFFICIENTS}
    parsed = {
        name: [tuple(map(int, text.split("x"))) for text in texts] for name, texts in shapes.items()
    }
    return {**parsed, "SCORE_BYTES": SCORES}


@contextmanager
def _changed(name: str, value: Any) -> Generator[None]:
    from harmonic_sft.ops import triton_tiles

    place = engine if hasattr(engine, name) else triton_tiles
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


def _seconds(inputs: Inputs) -> float:
    """Return how long a step of the loss takes where the host is ahead."""
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        _loss_step(inputs)
        return time.perf_counter() - begin
    return benchmark_ops.on_gpu(partial(_loss_step, inputs))


def _overrides(options: argparse.Namespace) -> list[str]:
    """Return what fits the recipe's file to what is at hand."""
    base = options.output / "neobert"
    if not base.exists():
        make_neobert.main([str(base), *(["--small"] if options.small else [])])
    settings = [
        f"model.base={base.resolve()}",
        "model.revision=null",
        *DOCSTRINGS,
        "neighbors=[]",
        "training.report_to=none",
        "training.logging_steps=1",
        "training.eval_strategy=no",
    ]
    if options.small:
        settings += ["data.context_length=64", "training.gradient_accumulation_steps=2"]
    return settings


def _train(options: argparse.Namespace, name: str, changes: Sequence[str]) -> dict[str, Any]:
    """Run a variant in a new folder, and return its figures."""
    folder = options.output / name.replace(" ", "_")
    shutil.rmtree(folder, ignore_errors=True)
    where = [f"training.output_dir={folder}", "training.save_strategy=no"]
    steps = [f"training.max_steps={3 if options.small else 20}"]
    _forget()
    results = train(load_run_config(CONFIG, [*_overrides(options), *steps, *where, *changes]))
    keys = ("peak_memory_bytes", "tokens_per_second", "data_wait_share", "train_seconds", "steps")
    losses = [row["loss"] for row in results["history"] if "loss" in row]
    return {**{key: results[key] for key in keys}, "losses": losses}


def _resumes_bit_equal(options: argparse.Namespace) -> bool:
    """Whether a run that lost its second half and was resumed has the weights it had."""
    folder = options.output / "resumed"
    shutil.rmtree(folder, ignore_errors=True)
    settings = ["training.max_steps=4", "training.save_steps=2", f"training.output_dir={folder}"]
    settings.append("training.gradient_accumulation_steps=2")
    settings = [*_overrides(options), *settings]
    with sdpa_kernel(SDPBackend.MATH):  # the gradients of the others differ from run to run
        train(load_run_config(CONFIG, settings))
        whole = _digest(folder / "model.safetensors")
        for lost in ("checkpoint-4", "results/train.json", "model.safetensors"):
            path = folder / lost
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        _forget()
        train(load_run_config(CONFIG, [*settings, "resume=true"]))
    return _digest(folder / "model.safetensors") == whole


def _estimate(options: argparse.Namespace) -> int:
    run = load_run_config(CONFIG, _overrides(options))
    batch_size = run.training["per_device_train_batch_size"]
    _, estimate = estimate_step(run, load_base_config(run.model), batch_size=batch_size)
    return sum(estimate.values())


def _differences(one: dict[str, Any], other: dict[str, Any]) -> list[float]:
    return [a - b for a, b in zip(one["losses"], other["losses"], strict=False)]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _forget() -> None:
    """Let the next run's peak be its own."""
    release_memory()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _limit(size: int) -> None:
    """Let this process have no more of the card than `size` bytes."""
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, size / total))


def _write(options: argparse.Namespace, name: str, payload: dict[str, Any]) -> None:
    write_results(options.output, name, {**payload, "environment": environment()})


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "tests": tests,
    "profile": profile_loss,
    "loss": loss,
    "loss_large": loss_large,
    "step": step,
    "job": job,
    "survival": survival,
    "decoder": decoder,
    "note": note,
    "blocks": blocks,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a part.

    Raises:
        ValueError: There is no GPU, and no rehearsal was asked for.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="a folder")
    parser.add_argument("--small", action="store_true", help="tiny shapes: a rehearsal")
    options = parser.parse_args(arguments)
    if not (options.small or torch.cuda.is_available()):
        raise ValueError("GPU: expected one, got none. Rehearse with --small")
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        PARTS[options.part](options)
    finally:
        _limit(sys.maxsize)  # of other parts in this process


if __name__ == "__main__":
    main()
