"""Plain implementations that the fused losses are tested and measured against."""

import torch
import torch.nn.functional as F
from torch import Tensor


def harmonic_float64(
    hidden_states: Tensor, prototypes: Tensor, labels: Tensor, h_exp: float, unit_sphere: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss `[N]` and the gradients of its sum in float64, distances by difference."""
    hidden, weight = hidden_states.detach().double(), prototypes.detach().double()
    hidden_norms, norms = hidden.norm(dim=-1, keepdim=True), weight.norm(dim=-1, keepdim=True)
    if unit_sphere:
        hidden, weight = hidden / hidden_norms, weight / norms
    distances = torch.cdist(hidden, weight, compute_mode="donot_use_mm_for_euclid_dist")
    squared = distances.square() + 1e-6  # [N, V]
    logits = h_exp * squared.log()
    own = F.one_hot(labels, len(weight)).bool()
    others = logits.masked_fill(own, -torch.inf).logsumexp(1)
    loss = F.softplus(others - logits[own], threshold=100)
    slopes = logits.softmax(1)
    slopes[own] = -(others - logits.logsumexp(1)).exp()
    pulls = slopes * h_exp * 2 / squared  # of a state and a prototype along their difference
    hidden_gradient = pulls.sum(1, keepdim=True) * hidden - pulls @ weight
    weight_gradient = pulls.sum(0).unsqueeze(1) * weight - pulls.T @ hidden
    if unit_sphere:
        radial = (hidden * hidden_gradient).sum(-1, keepdim=True)
        hidden_gradient = (hidden_gradient - hidden * radial) / hidden_norms
        radial = (weight * weight_gradient).sum(-1, keepdim=True)
        weight_gradient = (weight_gradient - weight * radial) / norms
    return loss, hidden_gradient, weight_gradient


def linear_full_logits(
    hidden_states: Tensor, prototypes: Tensor, labels: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """Mean cross-entropy of full logits: what transformers and plain PyTorch do."""
    logits = F.linear(hidden_states, prototypes)
    return F.cross_entropy(logits, labels, label_smoothing=label_smoothing)


def harmonic_full_logits(
    hidden_states: Tensor, prototypes: Tensor, labels: Tensor, n: float = 28.0
) -> Tensor:
    """Mean harmonic loss of full logits, written as the known optimized implementation does it.

    Distances are expanded, clamped at 1e-6, rooted and raised to -n through the logarithm.
    """
    products = torch.matmul(hidden_states, prototypes.T)
    squared = hidden_states.square().sum(-1, keepdim=True) + prototypes.square().sum(-1)
    distances = torch.sqrt(torch.clamp(squared - 2 * products, min=1e-6))
    return F.cross_entropy(-n * torch.log(distances), labels)


def transport(head, hidden_states: Tensor, labels: Tensor, points: Tensor) -> Tensor:
    """Squared 2-Wasserstein distance `[N]` to the label's point, with the matrix of all costs."""
    gaps = points[labels].unsqueeze(1) - points  # [N, V, D]
    return (head(hidden_states).softmax(-1) * gaps.square().sum(-1)).sum(-1)


def regime(name: str, num_tokens: int, vocab_size: int, hidden_size: int = 768) -> tuple:
    """Hidden states, prototypes, labels and unit_sphere of a numerical regime, at h_exp = -14."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    prototypes = normal(vocab_size, hidden_size)
    labels = torch.randint(vocab_size, (num_tokens,), generator=generator)
    noise = normal(num_tokens, hidden_size)

    def beside(probability: float) -> Tensor:
        """Hidden states about their labels' prototypes, at a distance that gives `probability`."""
        odds = vocab_size * probability / (1 - probability)
        return (2 / (odds ** (1 / 14) - 1)) ** 0.5 * noise

    unit_sphere = name.startswith("sphere")
    kind, _, value = name.removeprefix("sphere ").partition(" ")
    if kind == "random":
        hidden_states = noise
    elif kind == "p":
        hidden_states = prototypes[labels] + beside(float(value))
    elif kind == "mean":
        prototypes = prototypes + float(value) * normal(hidden_size)
        hidden_states = prototypes[labels] + beside(0.47)
    else:
        assert kind in ("captured", "both"), name
        if kind == "both":
            prototypes = prototypes + 5 * normal(hidden_size)
        wrong = prototypes[(labels + 1) % vocab_size]
        direction = F.normalize(noise, dim=-1)
        hidden_states = wrong + float(value) * wrong.norm(dim=-1, keepdim=True) * direction
    return hidden_states, prototypes, labels, unit_sphere
