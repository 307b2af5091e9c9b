"""Figure 1: where the weights of a linear and of a distance head go on points of a plane."""

from typing import Any

import torch

from experiments.harmonic_loss.bench import Head, head_logits
from experiments.stacked import draw_uniform, seeded_generators

CORNERS = ((1.0, 1.0), (-1.0, 1.0), (-1.0, -1.0), (1.0, -1.0))
POINTS = {"two": (CORNERS[0], CORNERS[2]), "five": (*CORNERS, (0.0, 0.0))}  # one class each
NUM_STEPS = 10000
LEARNING_RATE = 1e-2
EPS = 1e-6
NUM_MOMENTS = 100


def run(num_seeds: int, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """Train both heads on two and on five points.

    Args:
        num_seeds: Seeds 0, 1, ...
        num_steps: Of Adam on all points, at least 1.

    Returns:
        `rows`, one for each set of points and head (see `train`).

    Source:
        Baek et al. 2025, arXiv:2502.01628, Figure 1 and Theorem 1; the places of the points are
        ours.
    """
    heads: tuple[Head, ...] = ("linear", "dist")
    return {"rows": [train(one, head, num_seeds, num_steps) for one in POINTS for head in heads]}


def train(points: str, head: Head, num_seeds: int, num_steps: int) -> dict[str, Any]:
    """Train one head, without bias, for every seed.

    Returns:
        `points`, `head`, `steps`; `norms`, the root mean square norm of the weights at those
        steps, the mean over seeds; per seed the final `accuracy` (0 to 1), `loss` (nats),
        `distance` (the largest of a weight to its point) and `growth` of the norm in the last
        tenth of the steps (0.01: 1 %); `places` of the points, `weights` of seed 0.
    """
    places = torch.tensor(POINTS[points]).expand(num_seeds, -1, -1)  # [S, V, 2]
    labels = torch.arange(places.shape[1])
    generators = seeded_generators(range(num_seeds))
    weight = draw_uniform(generators, *places.shape[1:], bound=2**-0.5)
    optimizer = torch.optim.Adam([weight], lr=LEARNING_RATE)
    norms = []
    for _ in range(num_steps):
        log_probs = head_logits(places, weight, None, head, -1.0, EPS).log_softmax(-1)
        losses = -log_probs.diagonal(dim1=1, dim2=2).mean(-1)  # [S]
        norms.append(weight.detach().square().sum(-1).mean(-1).sqrt())
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
    logits = head_logits(places, weight.detach(), None, head, -1.0, EPS)
    last, before = norms[-1], norms[-1 - num_steps // 10]
    steps = list(range(0, num_steps, max(1, num_steps // NUM_MOMENTS)))
    return {
        "points": points,
        "head": head,
        "steps": steps,
        "norms": [norms[step].mean().item() for step in steps],
        "accuracy": (logits.argmax(-1) == labels).double().mean(-1).tolist(),
        "loss": losses.tolist(),
        "distance": (weight.detach() - places).norm(dim=-1).amax(-1).tolist(),
        "growth": (last / before - 1).tolist(),
        "places": places[0].tolist(),
        "weights": weight[0].tolist(),
    }
