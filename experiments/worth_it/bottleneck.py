"""Part 4: how much of the gradient of the logits reaches the body."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harmonic_sft.models import Head, build_head

NUM_CLASSES, NUM_STATES = 4096, 64
WIDTHS, LOSSES = (64, 128), (4.0, 2.0)
STEP = 1e-5  # of the central differences, as a share of the state's norm
HEADS: dict[str, tuple[dict[str, Any], float]] = {  # settings, norm of the states
    "linear": ({"name": "linear", "bias": False}, 20.0),
    "cosine": ({"name": "cosine", "scale": 20.0, "learn_scale": False}, 1.0),
    "dist -12": ({"name": "dist", "h_exp": -12.0}, 1.0),
    "euclid": ({"name": "dist", "h_exp": -12.0, "unit_sphere": False}, 1.0),
    "mixture": ({"name": "multi_head", "num_heads": 4, "inner": {"name": "linear"}}, 40.0),
}


@torch.no_grad()
def jacobian(head: Head, state: Tensor) -> Tensor:
    """Return d logits / d state `[V, D]` at one state `[D]`, by central differences.

    Columns are centered over the classes, because softmax does not see a constant.
    """
    steps = STEP * state.norm() * torch.eye(len(state), dtype=state.dtype)
    logits = head(torch.cat([state + steps, state - steps]))  # [2 D, V]
    slopes = (logits[: len(state)] - logits[len(state) :]).T / (2 * steps[0, 0])
    return slopes - slopes.mean(0)


@torch.no_grad()
def probe(head: Head, states: Tensor, labels: Tensor) -> dict[str, float]:
    """Return means over states `[N, D]` with labels `[N]`.

    Returns:
        `loss` in nats; `share`, the norm of the part of the gradient p - onehot in the columns of
        the Jacobian J over its norm; `alignment`, the cosine of J J^T g and g.
    """
    head, states = copy.deepcopy(head).double(), states.double()
    logits = head(states)
    gradients = logits.softmax(-1) - F.one_hot(labels, logits.shape[1])  # [N, V]
    shares, alignments = [], []
    for state, gradient in zip(states, gradients, strict=True):
        slopes = jacobian(head, state)
        felt = slopes.T @ gradient  # what the body gets, [D]
        sizes, directions = torch.linalg.eigh(slopes.T @ slopes)
        kept = sizes > 1e-10 * sizes[-1]
        shares.append(((directions.T @ felt)[kept] / sizes[kept].sqrt()).norm() / gradient.norm())
        change = slopes @ felt
        alignments.append(F.cosine_similarity(change, gradient, dim=0))
    return {
        "loss": F.cross_entropy(logits, labels).item(),
        "share": torch.stack(shares).mean().item(),
        "alignment": torch.stack(alignments).mean().item(),
    }


def synthetic_row(
    name: str, width: int, loss: float, seed: int, num_classes: int = NUM_CLASSES
) -> dict[str, float]:
    """Probe a head on states that are as near to their prototypes as its mean loss demands."""
    settings, norm = HEADS[name]
    generator = torch.Generator().manual_seed(seed)
    weight = F.normalize(torch.randn(num_classes, width, generator=generator), dim=-1)
    labels = torch.randint(num_classes, (NUM_STATES,), generator=generator)
    noise = F.normalize(torch.randn(NUM_STATES, width, generator=generator), dim=-1)
    head = build_head(settings, hidden_size=width, vocab_size=num_classes).initialize_(weight)

    def states(signal: float) -> Tensor:
        return norm * F.normalize(signal * weight[labels] + (1 - signal) * noise, dim=-1)

    low, high = 0.0, 1.0
    for _ in range(25):
        middle = (low + high) / 2
        with torch.no_grad():
            reached = head.nll(states(middle), labels).mean().item()
        low, high = (middle, high) if reached > loss else (low, middle)
    return probe(head, states((low + high) / 2), labels)
