"""Cost of the fused losses against their peers: time, memory and error.

    python scripts/benchmark_ops.py [--rows 1638x768x30522] [--dtype mixed] [--tf32] [--memory]
        [--accuracy] [--contended] [--json docs/benchmark_ops.json]
        [--figure docs/benchmark_ops.png]

Every arm makes the mean loss and the gradients of hidden states [N, D] and prototypes [V, D]. The
arms take turns in shuffled order; ratios are medians over neighboring steps. Each arm is also
measured against its own number of bare matrix products of the same shapes, by `torch.mm`. With
`--dtype mixed` the hidden states are bfloat16 and the prototypes float32: our scores are then two
products, and the peers work on prototypes that are rounded first, as under autocast.
"""

import argparse
import ctypes
import multiprocessing
import platform
import random
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path
from statistics import mean, median
from threading import Barrier
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the experiments and the tests' baselines

from experiments.figures import draw_benchmark_ops
from harmonic_sft.results import environment, show_table, write_results
from scripts.benchmark_ops_arms import (
    ARMS,
    BASELINE,
    FLOOR,
    Arm,
    Inputs,
    LossStep,
    Sizes,
    Step,
    Unavailable,
    build_step,
)
from tests.ops.baselines import harmonic_float64, regime

ROWS = {
    "cpu": "1638x768x30522,8192x768x30522,1024x768x50257,256x4096x32000",
    "cuda": "1638x768x30522,8192x768x30522,8192x768x50257,4096x4096x128256,8192x4096x151936,"
    "16384x2048x248320",  # the last two are TRL's, trl#7244 and trl#6858
}
DTYPES = {  # of hidden states and prototypes
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "mixed": (torch.bfloat16, torch.float32),
}
CONTENDED = (BASELINE, "harmonic, chunked")
REGIMES = (
    "random",
    "p 0.47",
    "p 0.998",
    "captured 0.1",
    "captured 0.01",
    "captured 0.001",
    "mean 5",
    "mean 20",
    "sphere random",
    "sphere p 0.9996",
)
ACCURACY_SIZES = Sizes(64, 768, 2048)
PEERS = ("liger-kernel", "cut-cross-entropy", "triton")
CLEAR_REFS = Path("/proc/self/clear_refs")
PATIENCE = 1800.0  # seconds that one process waits for the other


def seconds_of(step: Step, inputs: Inputs) -> float:
    """Return how long one step takes."""
    step.prepare(inputs)
    if inputs.hidden_states.device.type == "cpu":
        start = time.perf_counter()
        step(inputs)
        return time.perf_counter() - start
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    events[0].record()
    step(inputs)
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / 1000


def warm_up(names: Sequence[str], inputs: Inputs) -> tuple[dict[str, Step], dict[str, str]]:
    """Build the steps and take each twice; return them and the reasons of those left out."""
    steps, skipped = {}, {}
    for name in names:
        try:
            step = build_step(name, inputs.hidden_states.device)
            for _ in range(2):
                seconds_of(step, inputs)
            steps[name] = step
        except Unavailable as reason:
            skipped[name] = str(reason)
        except Exception as error:  # a peer's kernels or compiler; one arm must not end the run
            skipped[name] = f"failed: {type(error).__name__}: {str(error)[:300]}"
        inputs.clear()
    for name, reason in skipped.items():
        print(f"skipped: {name}: {reason}")
    if not steps:
        raise RuntimeError(f"arms: expected at least one that runs, got none: {skipped}")
    return steps, skipped


def measure(steps: dict[str, Step], inputs: Inputs, repetitions: int) -> dict[str, list[float]]:
    """Return the seconds of every step; the arms take turns, in shuffled order."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for index in range(repetitions):
        # Shuffled, since what an arm leaves behind (freed memory, busy threads) costs the next.
        for name in random.Random(index).sample(names, len(names)):
            seconds[name].append(seconds_of(steps[name], inputs))
            inputs.clear()
    return seconds


def median_ratio(seconds: Sequence[float], others: Sequence[float] | None) -> float | None:
    """Return the median ratio of neighboring steps, None where there are no others."""
    if others is None:
        return None
    return median(a / b for a, b in zip(seconds, others, strict=True))


def precision_of(name: str, dtype: str) -> str:
    """Return what an arm multiplies."""
    if dtype == "float32":
        is_tf32 = torch.get_float32_matmul_precision() != "highest"
        return "tf32" if is_tf32 and torch.cuda.is_available() else "float32"
    is_ours = name != FLOOR and ARMS[name].is_ours
    return "bfloat16, 2 terms" if dtype == "mixed" and is_ours else "bfloat16"


def summarize(seconds: dict[str, list[float]], dtype: str) -> dict[str, dict[str, Any]]:
    """Return each arm's figures; the last is of its own number of bare products."""
    arms = {}
    for name, times in seconds.items():
        products = 3 if name == FLOOR else ARMS[name].products
        if dtype == "mixed" and name != FLOOR and ARMS[name].is_ours:
            products += 1
        floor = [products / 3 * other for other in seconds.get(FLOOR, [])]
        arms[name] = {
            "group": "floor" if name == FLOOR else "ours" if ARMS[name].is_ours else "peer",
            "precision": precision_of(name, dtype),
            "median_seconds": median(times),
            "min_seconds": min(times),
            "median_ratio": median_ratio(times, seconds.get(BASELINE)),
            "products": products,
            "ratio_to_products": median_ratio(times, floor or None),
        }
    return arms


def high_water_bytes() -> int:
    """Return the most memory that was resident since the mark was last reset."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None, "Linux reports VmHWM"
    return int(found[1]) * 1024


def resident_growth(name: str, sizes: Sizes, dtype: str) -> int:
    """Return the growth of resident memory in one step of a CPU arm; for a fresh process."""
    device, dtypes = torch.device("cpu"), DTYPES[dtype]
    inputs = Inputs.draw(sizes, device, *dtypes)
    step = build_step(name, device)
    seconds_of(step, Inputs.draw(Sizes(16, sizes.hidden_size, 1024), device, *dtypes))
    if ARMS[name].compiles:  # else the compiler's own memory would count
        seconds_of(step, inputs)
    step.prepare(inputs)
    if platform.libc_ver()[0] == "glibc":  # freed memory that is kept would hide growth
        ctypes.CDLL(None).malloc_trim(0)
    CLEAR_REFS.write_text("5")
    before = high_water_bytes()
    step(inputs)
    return high_water_bytes() - before


def allocated_growth(step: Step, inputs: Inputs) -> int:
    """Return the growth of CUDA memory in one step."""
    step.prepare(inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(inputs)
    torch.cuda.synchronize()
    growth = torch.cuda.max_memory_allocated() - before
    inputs.clear()
    return growth


def add_memory(
    arms: dict[str, Any], steps: dict[str, Step], inputs: Inputs, sizes: Sizes, dtype: str
) -> None:
    """Put peak bytes above the inputs, and above the gradients too, into the arms' figures."""
    context = multiprocessing.get_context("spawn")
    for name in [name for name in arms if name != FLOOR]:
        if inputs.hidden_states.device.type == "cpu":
            with ProcessPoolExecutor(1, mp_context=context) as fresh:
                growth = fresh.submit(resident_growth, name, sizes, dtype).result()
        else:
            growth = allocated_growth(steps[name], inputs)
        arms[name]["peak_bytes"] = growth
        arms[name]["peak_bytes_above_gradients"] = growth - inputs.gradient_bytes


def seconds_in_step(
    name: str, sizes: Sizes, dtype: str, repetitions: int, barrier: Barrier
) -> float:
    """Return the median seconds of steps that all processes at the barrier start together."""
    try:
        device = torch.device("cpu")
        inputs = Inputs.draw(sizes, device, *DTYPES[dtype])
        step = build_step(name, device)
        seconds_of(step, inputs)
        seconds = []
        for _ in range(repetitions):
            barrier.wait(PATIENCE)
            seconds.append(seconds_of(step, inputs))
    except BaseException:
        barrier.abort()  # nobody should wait for this process
        raise
    return median(seconds)


def measure_contended(sizes: Sizes, dtype: str, repetitions: int) -> dict[str, Any]:
    """Measure one process alone, then two of the same at once; a fair share is a slowdown of 2."""
    context = multiprocessing.get_context("spawn")
    results = {}
    with context.Manager() as manager, ProcessPoolExecutor(2, mp_context=context) as processes:
        for name in CONTENDED:
            found = []
            for count in (1, 2):
                arguments = (name, sizes, dtype, repetitions, manager.Barrier(count))
                futures = [processes.submit(seconds_in_step, *arguments) for _ in range(count)]
                found.append(mean(future.result() for future in futures))
            results[name] = {
                "alone_seconds": found[0],
                "contended_seconds": found[1],
                "slowdown_over_two": found[1] / found[0] / 2,
            }
    return results


def exact_gradient(name: str, h_exp: float, inputs: Inputs) -> Tensor:
    """Return the gradient `[N, D]` of the hidden states in float64, for the sum of the losses."""
    hidden_states, prototypes, labels = (tensor.detach().cpu() for tensor in inputs)
    if name != "linear":
        unit_sphere = name.startswith("sphere")
        return harmonic_float64(hidden_states, prototypes, labels, h_exp, unit_sphere)[1]
    hidden_states = hidden_states.double().requires_grad_()
    logits = F.linear(hidden_states, prototypes.double())
    F.cross_entropy(logits, labels, reduction="sum").backward()
    assert hidden_states.grad is not None, "backward makes it"
    return hidden_states.grad


def applies(arm: Arm, name: str) -> bool:
    """Whether an arm computes the function of a regime."""
    wanted = "linear" if name == "linear" else "sphere" if "sphere" in name else "euclidean"
    return arm.head == wanted and arm.accurate and not arm.label_smoothing


def measure_accuracy(
    names: Sequence[str], device: torch.device, dtype: str
) -> dict[str, dict[str, float]]:
    """Return by arm and regime the median relative error of a hidden state's gradient."""
    errors: dict[str, dict[str, float]] = {name: {} for name in names if name in ARMS}
    num_tokens, hidden_size, vocab_size = ACCURACY_SIZES
    for name in ("linear", *REGIMES):
        if name == "linear":
            inputs = Inputs.draw(ACCURACY_SIZES, device, *DTYPES[dtype])
        else:
            tensors = regime(name, num_tokens, vocab_size, hidden_size)[:3]
            inputs = Inputs.place(*tensors, device, *DTYPES[dtype])
        exact: dict[float, Tensor] = {}
        for arm_name in errors:
            arm = ARMS[arm_name]
            if not applies(arm, name):
                continue
            if arm.h_exp not in exact:
                exact[arm.h_exp] = exact_gradient(name, arm.h_exp, inputs) / num_tokens
            wanted = exact[arm.h_exp]
            step = build_step(arm_name, device)
            assert isinstance(step, LossStep), "floors are no arms"
            step.prepare(inputs)
            step(inputs)
            gradient = inputs.hidden_states.grad
            assert gradient is not None, "the step makes it"
            differences = (gradient.cpu().double() - wanted).norm(dim=-1)
            errors[arm_name][name] = float((differences / wanted.norm(dim=-1)).median())
    return errors


def show_row(sizes: Sizes, row: dict[str, Any], repetitions: int) -> None:
    """Print the figures of one size."""
    title = f"{sizes} (N x D x V), forward and backward, {repetitions} interleaved steps"
    columns = ["arm", "precision", "ms", "min ms", "ratio", "products", "to them"]
    columns += ["MB", "above gradients"]
    table = [
        (
            name,
            arm["precision"],
            f"{1e3 * arm['median_seconds']:.2f}",
            f"{1e3 * arm['min_seconds']:.2f}",
            _ratio(arm["median_ratio"]),
            arm["products"],
            _ratio(arm["ratio_to_products"]),
            *(_megabytes(arm.get(key)) for key in ("peak_bytes", "peak_bytes_above_gradients")),
        )
        for name, arm in row["arms"].items()
    ]
    show_table(title, columns, table)
    if "contended" in row:
        columns = ["arm", "alone, s", "two at once, s", "slowdown / 2"]
        table = [(name, *figures.values()) for name, figures in row["contended"].items()]
        show_table("Two identical processes at once", columns, table)


def show_accuracy(errors: dict[str, dict[str, float]]) -> None:
    """Print the errors of the arms that have any, by regime."""
    columns = [name for name in ("linear", *REGIMES) if any(name in row for row in errors.values())]
    table = [(arm, *(found.get(name) for name in columns)) for arm, found in errors.items()]
    title = f"Median relative error of a hidden state's gradient, {ACCURACY_SIZES}"
    show_table(title, ["arm", *columns], table)


def measure_row(sizes: Sizes, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all that is wanted at one size, and print it."""
    dtype = options.dtype
    inputs = Inputs.draw(sizes, device, *DTYPES[dtype])
    names = [name for name in [*ARMS, FLOOR] if name == BASELINE or options.only.search(name)]
    steps, skipped = warm_up(names, inputs)
    row: dict[str, Any] = sizes._asdict() | {"floor": FLOOR if FLOOR in steps else None}
    row["arms"] = summarize(measure(steps, inputs, options.repetitions), dtype)
    row["skipped"] = skipped
    if options.memory:
        add_memory(row["arms"], steps, inputs, sizes, dtype)
    if options.contended:
        row["contended"] = measure_contended(sizes, dtype, options.repetitions)
    show_row(sizes, row, options.repetitions)
    return row


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, torch.device, list[Sizes]]:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", help="sizes NxDxV with commas between")
    parser.add_argument("--repetitions", type=int, default=7, help="measured steps of each arm")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--tf32", action="store_true", help="float32 products of 10 bits (CUDA)")
    parser.add_argument("--only", type=re.compile, default="", help="regular expression of arms")
    parser.add_argument("--memory", action="store_true", help="peak memory of every arm")
    parser.add_argument("--accuracy", action="store_true", help="gradients against float64")
    parser.add_argument("--contended", action="store_true", help="two processes at once (CPU)")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--figure", type=Path, help="where to draw them")
    options = parser.parse_args(arguments)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.contended and device != "cpu":
        parser.error("--contended: expected the CPU, got cuda")
    if options.memory and device == "cpu" and not CLEAR_REFS.exists():
        parser.error("--memory: expected Linux or CUDA, got another system's CPU")
    try:
        rows = [Sizes.parse(text) for text in (options.rows or ROWS[device]).split(",")]
    except ValueError as error:
        parser.error(str(error))
    return options, torch.device(device), rows


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print its tables, write its figures."""
    options, device, sizes = parse(arguments)
    torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    results: dict[str, Any] = {
        "device": device.type,
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "repetitions": options.repetitions,
        "baseline": BASELINE,
        "rows": [measure_row(one, device, options) for one in sizes],
    }
    if options.accuracy:
        names = list(results["rows"][0]["arms"])
        results["accuracy"] = measure_accuracy(names, device, options.dtype)
        show_accuracy(results["accuracy"])
    results["peer_versions"] = {name: _version(name) for name in PEERS}
    results["environment"] = environment()
    if options.json is not None:
        write_results(options.json.parent, options.json.stem, results)
    if options.figure is not None:
        draw_benchmark_ops(results, options.figure)
    return results


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:.0f}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
