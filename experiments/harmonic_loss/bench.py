"""Training of one cell of a figure: one small model per seed, all seeds at once."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.decomposition import PCA
from torch import Tensor, nn

from experiments.harmonic_loss.compiled import BATCH_SIZE, CompiledTrainer, library
from experiments.harmonic_loss.data import (
    TASKS,
    Examples,
    Split,
    Task,
    draw_examples,
    share_seen,
)
from experiments.harmonic_loss.transformer import StackedTransformer
from experiments.multi_head_modular_addition import evaluated_epochs, first_stable_epoch
from experiments.stacked import StackedMLP, draw_uniform, seeded_generators

HIDDEN_SIZE = 16
EPS = 1e-4
MARGIN = 1.0  # of the contrastive loss
TEMPERATURE = 0.1  # of the soft nearest neighbor loss
NUM_COMPONENTS = 10  # of which the variance is kept

Head = Literal["linear", "dist", "l2", "l2_squared", "dot_harmonic"]
Loss = Literal["nll", "contrastive", "soft_nn", "spherical"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is trained, once for every seed. The defaults are those of the released code.

    Attributes:
        task: One of `TASKS`.
        model: The tied MLP or the transformer.
        head: See `head_logits`.
        loss: See `losses`.
        split: See `draw_examples`.
        h_exp: Of the harmonic law, below 0; acts on the squared distance.
        train_fraction: The share of the examples that is trained on.
        num_epochs: At least 1.
        learning_rate: Of AdamW.
        weight_decay: Of AdamW.
        penalty: Times the mean over columns of the root mean square of the embedding. The released
            code's is 0.01, but acts on the transformers alone.
    """

    task: str
    model: Literal["mlp", "transformer"] = "mlp"
    head: Head = "linear"
    loss: Loss = "nll"
    split: Split = "released"
    h_exp: float = -1.0
    train_fraction: float = 0.8
    num_epochs: int = 7000
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    penalty: float = 0.0


class Network(nn.Module):
    """The small model of a cell, one for each seed.

    The MLP's output layer is its embedding, with a bias if the head is linear. The transformer
    shares them only if the head is linear; else the prototypes are weights of their own, drawn as
    PyTorch draws a linear layer.
    """

    def __init__(self, cell: Cell, task: Task, generators: Sequence[torch.Generator]):
        super().__init__()
        draw = partial(draw_uniform, generators, bound=HIDDEN_SIZE**-0.5)
        self.cell = cell
        self.bias = self.prototypes = None
        sizes = {"vocab_size": task.vocab_size, "num_inputs": task.inputs.shape[1]}
        if cell.model == "mlp":
            self.body = StackedMLP(generators, **sizes, hidden_size=HIDDEN_SIZE)
            if cell.head == "linear":
                self.bias = draw(1, task.vocab_size)
        else:
            self.body = StackedTransformer(generators, **sizes, hidden_size=HIDDEN_SIZE)
            if cell.head != "linear":
                self.prototypes = draw(task.vocab_size, HIDDEN_SIZE)

    def forward(self, input_ids: Tensor, generators: Sequence[torch.Generator] | None) -> Tensor:
        """Return outputs `[S, N, V]` for input ids `[S, N, T]`.

        They are logits, and log-probabilities where a distance head has another loss than the
        negative log-likelihood, because the released code computes its losses from those.
        """
        if isinstance(self.body, StackedMLP):
            hidden_states = self.body(input_ids)
        else:
            hidden_states = self.body(input_ids, generators)
        prototypes = self.body.embedding if self.prototypes is None else self.prototypes
        cell = self.cell
        logits = head_logits(hidden_states, prototypes, self.bias, cell.head, cell.h_exp)
        return logits.log_softmax(-1) if cell.head == "dist" and cell.loss != "nll" else logits


def head_logits(
    hidden_states: Tensor,
    prototypes: Tensor,
    bias: Tensor | None,
    head: Head,
    h_exp: float,
    eps: float = EPS,
) -> Tensor:
    """Return the logits of a head, for every seed.

    Args:
        hidden_states: `[S, N, D]`.
        prototypes: `[S, V, D]`.
        bias: `[S, 1, V]`, of the linear head.
        head: "linear": the dot product. "dist": h_exp * log(d ** 2 + eps), which is `DistLayer`.
            "l2": -d. "l2_squared": -d ** 2. "dot_harmonic": h_exp * log(dot ** 2 + eps), our
            reading of a dot product under the harmonic law, which the paper leaves open.
        h_exp: Below 0.
        eps: In squared units of the hidden states.

    Returns:
        `[S, N, V]`.
    """
    if head == "linear" and bias is not None:
        return torch.baddbmm(bias, hidden_states, prototypes.mT)
    if head in ("linear", "dot_harmonic"):
        dots = hidden_states @ prototypes.mT
        return dots if head == "linear" else h_exp * torch.log(dots.square() + eps)
    norms = hidden_states.square().sum(-1, keepdim=True) + prototypes.square().sum(-1).unsqueeze(1)
    # Rounding can push a tiny squared distance below zero.
    squared = torch.baddbmm(norms, hidden_states, prototypes.mT, alpha=-2).clamp_min(0)
    if head == "dist":
        return h_exp * torch.log(squared + eps)
    return -squared if head == "l2_squared" else -(squared + eps).sqrt()


def losses(outputs: Tensor, labels: Tensor, loss: Loss) -> Tensor:
    """Return the mean loss `[S]` of a batch, for outputs `[S, N, V]` and labels `[S, N]`.

    Args:
        outputs: Of the network.
        labels: Token ids.
        loss: "nll": cross-entropy. "spherical": that of p proportional to u ** 2 + 1e-4, u being
            the outputs at unit length. The other two compare the outputs of a batch with each
            other: "contrastive" pulls those of one label together and pushes the others beyond a
            distance of 1; "soft_nn" is the soft nearest neighbor loss of the outputs at unit
            length, temperature 0.1.

    Source:
        The released code of Baek et al. 2025, arXiv:2502.01628, April 2025. As there, an example
        counts as a pair of its own in the contrastive loss, which adds a constant, and one without
        a second example of its label has the soft nearest neighbor loss -log(1e-8).
    """
    if loss in ("nll", "spherical"):
        if loss == "spherical":
            outputs = torch.log(F.normalize(outputs, dim=-1).square() + EPS)
        each = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none")
        return each.view(labels.shape).mean(-1)
    same = labels.unsqueeze(-1) == labels.unsqueeze(-2)  # [S, N, N]
    others = ~torch.eye(labels.shape[1], dtype=torch.bool)
    positive = same & others
    if loss == "contrastive":
        distances = torch.cdist(outputs, outputs)
        pull = (distances.square() * positive).sum((1, 2)) / (positive.sum((1, 2)) + 1e-8)
        negative = ~positive
        push = (MARGIN - distances).relu().square() * negative
        return pull + push.sum((1, 2)) / (negative.sum((1, 2)) + 1e-8)
    units = F.normalize(outputs, dim=-1)
    kernel = torch.exp((2 * units @ units.mT - 2) / TEMPERATURE)
    ratios = (kernel * positive).sum(-1) / (kernel * others).sum(-1)
    return -torch.where(positive.any(-1), ratios, 1e-8).log().mean(-1)


@torch.no_grad()
def accuracies(
    network: Network, examples: Examples, generators: Sequence[torch.Generator] | None
) -> Tensor:
    """Return accuracies `[2, S]`, 0 to 1, on training and test examples.

    The label predicted is the most probable one; of a loss that only compares examples, the label
    of the nearest mean of the training outputs, the outputs of "soft_nn" being at unit length.
    """
    outputs = network(examples.inputs, generators)
    loss = network.cell.loss
    if loss in ("contrastive", "soft_nn"):
        if loss == "soft_nn":
            outputs = F.normalize(outputs, dim=-1)
        part = slice(examples.num_training)
        members = F.one_hot(examples.labels[:, part], outputs.shape[-1]).mT.float()  # [S, V, N]
        counts = members.sum(-1, keepdim=True)
        means = members @ outputs[:, part] / counts.clamp_min(1)
        outputs = -torch.cdist(outputs, means).masked_fill(counts.mT == 0, math.inf)
    scores = outputs.square() if loss == "spherical" else outputs
    hits = (scores.argmax(-1) == examples.labels).double()
    training, test = hits.split(
        [examples.num_training, hits.shape[1] - examples.num_training], dim=1
    )
    return torch.stack([training.mean(-1), test.mean(-1)])


def train(cell: Cell, seeds: Sequence[int]) -> tuple[Network, Examples, Tensor, Tensor]:
    """Train one model for each seed; a seed gives the same beside any others, up to rounding.

    Args:
        cell: What to train.
        seeds: Of examples, weights, order and dropout.

    Returns:
        The models, their examples, accuracies `[evaluations, 2, S]` on training and test examples
        (with dropout, as released: the released code never leaves training mode), and those at
        the end without dropout, `[2, S]`.
    """
    torch.set_flush_denormal(True)  # late epochs would take twice as long
    task, generators = TASKS[cell.task](), seeded_generators(seeds)
    examples = draw_examples(task, cell.split, cell.train_fraction, generators)
    network = Network(cell, task, generators)
    advance = _trainer(network, examples, generators)
    history, before = [], 0
    for epoch in evaluated_epochs(cell.num_epochs):
        draws = [
            torch.stack(
                [torch.randperm(examples.num_training, generator=g) for _ in range(before, epoch)]
            )
            for g in generators
        ]
        advance(torch.stack(draws))  # [S, epochs, examples]
        before = epoch
        history.append(accuracies(network, examples, generators).tolist())
    at_the_end = accuracies(network, examples, None)
    return network, examples, torch.tensor(history, dtype=torch.float64), at_the_end


def _trainer(
    network: Network, examples: Examples, generators: Sequence[torch.Generator]
) -> Callable[[Tensor], None]:
    """Return what trains for the epochs of `[S, epochs, N']`, rows of the examples.

    It is compiled code where that is written: MLPs and the negative log-likelihood.
    """
    cell, body = network.cell, network.body
    if isinstance(body, StackedMLP) and cell.loss == "nll" and (code := library()):
        return CompiledTrainer(code, cell, body, network.bias, examples).train
    embedding = body.embedding
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=cell.learning_rate, weight_decay=cell.weight_decay, fused=True
    )
    seed_axis = torch.arange(len(generators)).unsqueeze(-1)

    def advance(orders: Tensor) -> None:
        for order in orders.unbind(1):
            for rows in order.split(BATCH_SIZE, dim=-1):
                outputs = network(examples.inputs[seed_axis, rows], generators)
                loss = losses(outputs, examples.labels[seed_axis, rows], cell.loss)  # [S]
                penalties = embedding.square().mean(1).sqrt().mean(-1)  # [S]
                optimizer.zero_grad()
                (loss + cell.penalty * penalties).sum().backward()
                optimizer.step()

    return advance


def run(cell: Cell, seeds: Sequence[int]) -> dict[str, Any]:
    """Train a cell for some seeds and return what is kept of it.

    Returns:
        `cell`, `seeds`; per seed `variance` (explained by the first 1, 2, ... components, 0 to 1),
        `train_epochs` and `test_epochs` (from which accuracy stays above 0.9 for 20 epochs, None:
        never), `train_accuracy`, `test_accuracy`, `test_accuracy_without_dropout`, `share_seen`
        and `embedding` (the rows whose variance is explained); `chance_variance`
        and `chance_accuracy` (of always saying the commonest label); `cpu_seconds`.
    """
    start = time.process_time()
    network, examples, history, without_dropout = train(cell, seeds)
    task = TASKS[cell.task]()
    embedding = network.body.embedding.detach()[:, list(task.tokens)]  # [S, tokens, D]
    commonest = int(examples.labels.flatten().bincount().max())
    train_curves, test_curves = history.unbind(1)  # [evaluations, S]
    return {
        "cell": asdict(cell),
        "seeds": list(seeds),
        "variance": [explained_variance(rows) for rows in embedding.double().numpy()],
        "train_epochs": [first_stable_epoch(curve) for curve in train_curves.T.tolist()],
        "test_epochs": [first_stable_epoch(curve) for curve in test_curves.T.tolist()],
        "train_accuracy": _rounded(train_curves[-1]),
        "test_accuracy": _rounded(test_curves[-1]),
        "test_accuracy_without_dropout": _rounded(without_dropout[1]),
        "share_seen": share_seen(examples),
        "embedding": _rounded(embedding),
        "chance_variance": chance_cumulative(*embedding.shape[1:])[1],
        "chance_accuracy": round(commonest / examples.labels.numel(), 4),
        "cpu_seconds": round(time.process_time() - start, 1),
    }


def explained_variance(rows: np.ndarray) -> list[float]:
    """Return the share of the variance of `[V, D]` in the first 1, 2, ..., 10 components."""
    shares = PCA().fit(rows).explained_variance_ratio_.cumsum()
    return np.round(shares[:NUM_COMPONENTS], 4).tolist()


def chance_cumulative(num_rows: int, hidden_size: int) -> list[float]:
    """Return what `explained_variance` is of normal random numbers, the mean of 100 draws."""
    draws = np.random.default_rng(0).standard_normal((100, num_rows, hidden_size))
    shares = np.mean([explained_variance(rows) for rows in draws], axis=0)
    return shares.round(4).tolist()


def _rounded(values: Tensor) -> list[Any]:
    return torch.round(values.double(), decimals=4).tolist()
