"""Five claims about harmonic loss that Kitsunp's note and notebook make, one row each."""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from experiments.cost import HeadStep, allocated_peak, measure
from experiments.evidence import spread
from experiments.figures import check_output, positive
from harmonic_sft.losses import CrossEntropyLoss
from harmonic_sft.models import DistLayer, Head, LinearHead
from harmonic_sft.results import environment, show_table, write_results

SCALES = (1e-3, 1e-2, 1e-1, 1e1, 1e2, 1e3)
DISTANCES = (0.1, 1.0, 3.0, 10.0)
WIDTHS = (64, 384, 768)
DENSE = CrossEntropyLoss(impl="reference")


def main(name: str, arguments: Sequence[str]) -> None:
    """Measure the claims and write `kitsunp.json`."""
    parser = argparse.ArgumentParser(prog=f"python -m experiments {name}", description=main.__doc__)
    parser.add_argument("--seeds", type=positive, default=5, help="of the convergence; default: 5")
    parser.add_argument("--quick", action="store_true", help="three steps, small sizes")
    parser.add_argument("--output", type=Path, default=Path("runs") / name, help="a folder")
    options = parser.parse_args(arguments)
    check_output(options.output)
    rounds, vocab_size, steps = (3, 500, 3) if options.quick else (20, 30_522, 2_000)
    rows = [
        overhead(rounds, vocab_size),
        memory(256 if options.quick else 2_000),
        scale_invariance(),
        convergence(range(options.seeds), steps),
        bfloat16(),
    ]
    table = [(row["claim"], row["measured"], "holds" if row["holds"] else "fails") for row in rows]
    show_table("Claims", ["claim", "measured", "verdict"], table)
    write_results(options.output, name, {"rows": rows, "environment": environment()})


def overhead(rounds: int, vocab_size: int) -> dict[str, Any]:
    """Compare steps with a linear head, with plain distances and with ours, which take turns."""
    torch.manual_seed(0)
    ratios = {}
    nets = (("their net", 64, 10, 128), (f"V {vocab_size:,}", 384, vocab_size, 256))
    for name, width, classes, count in nets:
        steps: dict[str, Callable[[], None]] = {}
        heads: dict[str, Head] = {
            "linear": LinearHead(width, classes),
            "plain": PlainDistance(width, classes),
            "dist": DistLayer(width, classes, unit_sphere=False),
        }
        for key, head in heads.items():
            labels = torch.randint(classes, (count,))
            if name == "their net":
                steps[key] = _net_step(head, torch.rand(count, 784), labels)
            else:
                states = torch.randn(count, width, requires_grad=True)
                steps[key] = HeadStep(head, DENSE, states, labels)
        for step in steps.values():
            step()
        found = measure(steps, baseline="linear", rounds=rounds)
        ratios[name] = {key: found[key]["time_ratio"] for key in ("plain", "dist")}
    shown = [f"{r['plain']:.2f} x, ours {r['dist']:.2f} x ({name})" for name, r in ratios.items()]
    return {
        "claim": "dense overhead below 5 %",
        "ratios": ratios,
        "measured": ", ".join(shown),
        "holds": max(ratio["plain"] for ratio in ratios.values()) < 1.05,
    }


class PlainDistance(LinearHead):
    """Distances as in their notebook, -28 log d: norms less twice the dots, clamped."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return logits `[N, V]` for hidden states `[N, D]`."""
        norms = hidden_states.square().sum(-1, keepdim=True) + self.weight.square().sum(-1)
        squared = norms - 2 * hidden_states @ self.weight.T
        return -14 * squared.clamp_min(1e-6).log()


def _net_step(head: Head, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """Return a step of their net, 784-64-10 without a nonlinearity, Adam 1e-3."""
    body = nn.Linear(784, head.weight.shape[1])
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=1e-3)

    def step() -> None:
        loss = head.nll(body(images), labels).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def memory(vocab_size: int) -> dict[str, Any]:
    """Return how the peak of a dense step grows with states and with tokens of the vocabulary.

    The head is their formula.
    """
    torch.manual_seed(0)

    def peak(count: int, size: int) -> int:
        head, states = PlainDistance(64, size), torch.randn(count, 64, requires_grad=True)
        return allocated_peak(HeadStep(head, DENSE, states, torch.randint(size, (count,))))

    peaks = {str(count): peak(count, 4 * vocab_size) for count in (64, 256, 512)}
    by_size = {str(size): peak(512, size) for size in (vocab_size, 4 * vocab_size, 8 * vocab_size)}
    slopes = [_last_slope(peaks), _last_slope(by_size)]
    return {
        "claim": "memory O(B S V)",
        "bytes_by_states": peaks,
        "bytes_by_tokens": by_size,
        "slopes": slopes,
        "measured": f"log-log slope {slopes[0]:.2f} in B S, {slopes[1]:.2f} in V",
        "holds": all(abs(slope - 1) < 0.1 for slope in slopes),
    }


def _last_slope(values: dict[str, int]) -> float:
    (size, small), (double, large) = list(values.items())[-2:]
    return math.log(large / small) / math.log(int(double) / int(size))


@torch.no_grad()
def scale_invariance() -> dict[str, Any]:
    """Scale states and prototypes together and look how far a probability moves.

    Returns:
        `changes`, the largest of any factor from 1e-3 to 1e3, and `changes_at_1e-4`; on both the
        claim is about their formula.
    """
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(100, 64, generator=generator)
    weight = torch.randn(100, 64, generator=generator)
    states[:50] = weight[:50] + 0.01 * states[:50]  # half of them close to a prototype
    heads: dict[str, Head] = {
        "their formula": PlainDistance(64, 100),
        "ours off the sphere": DistLayer(64, 100, unit_sphere=False, h_exp=-12.0),
        "ours on the sphere": DistLayer(64, 100, h_exp=-12.0),
    }
    changes: dict[str, float] = {}
    changes_below: dict[str, float] = {}
    for name, head in heads.items():
        plain, *moved, below = [_probs(head, states, weight, s) for s in (1.0, *SCALES, 1e-4)]
        changes[name] = max((one - plain).abs().max().item() for one in moved)
        changes_below[name] = (below - plain).abs().max().item()
    return {
        "claim": "scale invariance",
        "changes": changes,
        "changes_at_1e-4": changes_below,
        "measured": ", ".join(f"{change:.1g} {name}" for name, change in changes.items()),
        "holds": changes["their formula"] < 1e-4,
    }


def _probs(head: Head, states: Tensor, weight: Tensor, scale: float) -> Tensor:
    return head.initialize_(scale * weight)(scale * states).softmax(-1)


def convergence(seeds: Sequence[int], steps: int) -> dict[str, Any]:
    """Train heads on separable points and compare the norm of their weights late and later.

    Theirs is h_exp -14, and ours here -1.
    """
    growth: dict[str, list[float]] = {"linear": [], "plain": [], "dist": []}
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        centers = 4 * torch.tensor([[math.cos(k * 1.2566), math.sin(k * 1.2566)] for k in range(5)])
        labels = torch.arange(5).repeat_interleave(20)
        points = centers[labels] + 0.3 * torch.randn(100, 2, generator=generator)
        torch.manual_seed(seed)
        heads: dict[str, Head] = {
            "linear": LinearHead(2, 5, bias=False),
            "plain": PlainDistance(2, 5, bias=False),
            "dist": DistLayer(2, 5, unit_sphere=False, h_exp=-1.0),
        }
        for name, head in heads.items():
            optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
            norms = []
            for _ in range(2):
                for _ in range(steps):
                    loss = head.nll(points, labels).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                norms.append(head.weight.detach().norm().item())
            growth[name].append(norms[1] / norms[0])
    found = {name: spread(values) for name, values in growth.items()}
    return {
        "claim": "finite convergence",
        "steps": steps,
        "growth": found,
        "measured": ", ".join(f"{name} x {one['mean']:.4f}" for name, one in found.items()),
        "holds": max(growth["plain"]) < 1.01 < min(growth["linear"]),
    }


def bfloat16() -> dict[str, Any]:
    """Expand distances in bfloat16 with a clamp; the same vectors in float64 are the truth."""
    rows = []
    for width in WIDTHS:
        for distance in DISTANCES:
            generator = torch.Generator().manual_seed(0)
            weight = torch.randn(200, width, generator=generator, dtype=torch.float64)
            offset = torch.randn(200, width, generator=generator, dtype=torch.float64)
            states = weight + distance * offset / offset.norm(dim=-1, keepdim=True)
            low_states, low_weight = states.bfloat16(), weight.bfloat16()
            squared = low_states.square().sum(-1) + low_weight.square().sum(-1)
            squared = squared - 2 * (low_states * low_weight).sum(-1)
            exact = (low_states.double() - low_weight.double()).square().sum(-1)
            errors = squared.double().clamp_min(1e-6).log() - exact.log()
            rows.append(
                {
                    "width": width,
                    "distance": distance,
                    "not_positive": (squared <= 0).double().mean().item(),
                    "median_log_error": median(errors.abs().tolist()),
                }
            )
    far = [row for row in rows if row["distance"] >= 1]
    worst = max(row["median_log_error"] for row in far)
    share = max(row["not_positive"] for row in far)
    return {
        "claim": "robust in bfloat16 by clamping",
        "rows": rows,
        "measured": f"d >= 1: up to {share:.0%} at or below 0, log d^2 off by {worst:.1f}",
        "holds": share == 0 and worst < 0.1,
    }
