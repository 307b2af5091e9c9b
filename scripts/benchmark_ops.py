"""Cost of the fused losses against their peers: time and memory.

    python scripts/benchmark_ops.py [--rows 1638x768x30522] [--dtype mixed] [--tf32] [--memory]
        [--json docs/benchmark_ops.json]

Every arm makes the mean loss and the gradients of hidden states [N, D] and prototypes [V, D]. The
arms take turns in shuffled order; ratios are medians over neighboring steps. Each arm is also
measured against its own number of bare matrix products of the same shapes, by `torch.mm`. With
`--dtype mixed` the hidden states are bfloat16 and the prototypes float32: our scores are then two
products, and the peers work on prototypes that are rounded first, as under autocast.
On a GPU the host is ahead, as it is in training, where the layers below have been queued before.
`python -m experiments draw benchmark_ops` draws the JSON file.
"""

import argparse
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the experiments and the tests' baselines

from experiments.cost import allocated_peak
from harmonic_sft.results import environment, package_version, show_table, write_results
from scripts.benchmark_ops_arms import ARMS, BARE, BASELINE, FLOOR, Inputs, Sizes, Unavailable

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
AHEAD = 2 * 10**7  # clock cycles of a GPU, about 10 ms
PEAKS = ("peak_bytes", "peak_bytes_above_gradients")
PEERS = ("liger-kernel", "cut-cross-entropy", "triton")


def seconds_of(name: str, inputs: Inputs) -> float:
    """Return how long one step of an arm takes."""
    step = ARMS[name]
    step.prepare(inputs)
    if inputs.hidden_states.device.type == "cpu":
        start = time.perf_counter()
        step(inputs)
        return time.perf_counter() - start
    return on_gpu(partial(step, inputs))


def on_gpu(step: Callable[[], None]) -> float:
    """Return how long a step takes a GPU whose host is ahead of it."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD)  # launches that follow are queued before the first one runs
    events[0].record()
    step()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / 1000


def warm_up(names: Sequence[str], inputs: Inputs) -> dict[str, str]:
    """Take every step twice; return the arms that cannot be measured, with the reason."""
    skipped = {}
    for name in names:
        devices = ARMS[name].devices
        try:
            if inputs.hidden_states.device.type not in devices:
                raise Unavailable(f"only on {' and '.join(devices)}")
            for _ in range(2):
                seconds_of(name, inputs)
        except Unavailable as reason:
            skipped[name] = str(reason)
        except Exception as error:  # a peer's kernels or compiler; one arm must not end the run
            skipped[name] = f"failed: {type(error).__name__}: {str(error)[:300]}"
        inputs.clear()
    for name, reason in skipped.items():
        print(f"skipped: {name}: {reason}")
    if len(skipped) == len(names):
        raise RuntimeError(f"arms: expected at least one that runs, got none: {skipped}")
    return skipped


def measure(names: Sequence[str], inputs: Inputs, repetitions: int) -> dict[str, list[float]]:
    """Return the seconds of every step; the arms take turns, in shuffled order."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(repetitions):
        # Shuffled, since what an arm leaves behind (freed memory, busy threads) costs the next.
        for name in random.Random(index).sample(names, len(names)):
            seconds[name].append(seconds_of(name, inputs))
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
    return "bfloat16, 2 terms" if dtype == "mixed" and ARMS[name].is_ours else "bfloat16"


def summarize(seconds: dict[str, list[float]], dtype: str) -> dict[str, dict[str, Any]]:
    """Return each arm's figures; the last is of its own number of bare products."""
    arms = {}
    for name, times in seconds.items():
        products = ARMS[name].products + (dtype == "mixed" and ARMS[name].is_ours)
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


def add_memory(arms: dict[str, Any], inputs: Inputs) -> None:
    """Put peak bytes above the inputs, and above the gradients too, into the arms' figures."""
    for name in [name for name in arms if name != FLOOR]:
        ARMS[name].prepare(inputs)
        peak = allocated_peak(partial(ARMS[name], inputs), inputs.hidden_states.device)
        inputs.clear()
        arms[name] |= zip(PEAKS, (peak, peak - inputs.gradient_bytes), strict=True)


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
            arm["median_ratio"],
            arm["products"],
            arm["ratio_to_products"],
            *(arm[key] // 10**6 if key in arm else None for key in PEAKS),
        )
        for name, arm in row["arms"].items()
    ]
    show_table(title, columns, table)


def measure_row(sizes: Sizes, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all that is wanted at one size, and print it."""
    dtype = options.dtype
    inputs = Inputs.draw(sizes, device, *DTYPES[dtype])
    names = [name for name in ARMS if name == BASELINE or options.only.search(name)]
    skipped = warm_up(names, inputs)
    names = [name for name in names if name not in skipped]
    row: dict[str, Any] = sizes._asdict() | {"floor": FLOOR if FLOOR in names else None}
    row["arms"] = summarize(measure(names, inputs, options.repetitions), dtype)
    row["skipped"] = skipped
    if options.memory:
        add_memory(row["arms"], inputs)
    BARE.release()
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
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args(arguments)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
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
    results["peer_versions"] = {name: package_version(name) for name in PEERS}
    results["environment"] = environment()
    if options.json is not None:
        write_results(options.json.parent, options.json.stem, results)
    return results


if __name__ == "__main__":
    main()
