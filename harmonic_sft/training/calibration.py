"""Calibration of a new distance head before training: the exponent that fits it best."""

import copy
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from accelerate.utils import broadcast_object_list
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from harmonic_sft.data.streams import PlacedCollator, StreamedRows
from harmonic_sft.models import HarmonicHeadModel, Head
from harmonic_sft.models.head import SphereHead

NUM_TOKENS = 1024
STEEPNESS = (1 / 64, 4096.0)  # least and greatest -h_exp
SCALES = (1e-3, 1e3)  # of the prototypes off the sphere


class Calibration(NamedTuple):
    """What fits best.

    Attributes:
        h_exp: The exponent.
        scale: Factor on the prototypes; 1 on the sphere.
        loss: On the tokens that it was fitted to, in nats.
        tokens: How many there were.
    """

    h_exp: float
    scale: float
    loss: float
    tokens: int


@torch.no_grad()
def calibrate_(model: HarmonicHeadModel, batches: Iterable[dict[str, Any]]) -> Calibration:
    """Give a distance head the exponent, and off the sphere the prototypes' length, that fit best.

    Both have the least loss on `NUM_TOKENS` labelled tokens. The loss is convex in the exponent:
    logits are proportional to it. Tied prototypes keep their length, since the embeddings would
    change with them.

    Args:
        model: On its device. Its head is changed in place.
        batches: Of training data, as the model takes them; read until there are tokens enough.

    Raises:
        ValueError: The head has no exponent that its logits are proportional to, or no token is
            labelled.
    """
    head = model.dist_head
    if not head.scaled_by_h_exp:
        raise ValueError(
            f"h_exp.calibrate: expected logits proportional to h_exp, got {head.settings()}"
        )
    hidden_states, labels = _labelled_states(model, batches)
    scale, tied = 1.0, model.config.tie_word_embeddings
    if isinstance(head, SphereHead) and not head.unit_sphere and not tied:
        weight = head.weight.clone()

        def loss_at(log_scale: float) -> float:
            head.weight.copy_(weight * math.exp(log_scale))
            return _best_exponent(head, hidden_states, labels)[1]

        found = minimize_scalar(
            loss_at,
            bounds=[math.log(edge) for edge in SCALES],
            method="bounded",
            options={"xatol": 0.02},
        )
        scale = math.exp(found.x)
        head.weight.copy_(weight * scale)
    h_exp, loss = _best_exponent(head, hidden_states, labels)
    model.h_exp = h_exp
    return Calibration(h_exp, scale, loss, len(labels))


def agreed(calibration: Calibration) -> Calibration:
    """Return the main process's result on all processes."""
    return broadcast_object_list([calibration])[0]


@torch.no_grad()
def apply_calibration_(model: HarmonicHeadModel, calibration: Calibration) -> None:
    """Change a head that is as it was loaded by what was found before."""
    model.dist_head.weight.mul_(calibration.scale)
    model.h_exp = calibration.h_exp


def first_batches(
    data: Any, collator: Any, batch_size: int, device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """Yield batches of training data without moving a stream on, spread evenly over a table."""
    if isinstance(data, StreamedRows):
        data = copy.deepcopy(data)  # the library's streams remember how far they were read
        data.share(process_index=0, num_processes=1, batch_size=batch_size)
        collator = PlacedCollator(collator)
    else:
        count, wanted = len(data), min(len(data), NUM_TOKENS)
        data = Subset(data, [index * count // wanted for index in range(wanted)])
    for batch in DataLoader(data, batch_size=batch_size, collate_fn=collator):
        batch.pop("places", None)
        yield {key: value.to(device) for key, value in batch.items()}


def _labelled_states(
    model: HarmonicHeadModel, batches: Iterable[dict[str, Any]]
) -> tuple[Tensor, Tensor]:
    """Return hidden states `[N, D]` and labels `[N]` of the first labelled tokens."""
    was_training = model.training
    model.eval()
    found: list[tuple[Tensor, Tensor]] = []
    for batch in batches:
        inputs = dict(batch)
        labels = inputs.pop("labels")
        hidden_states = model.model(**inputs).last_hidden_state
        states = model.select(hidden_states, inputs.get("attention_mask"))
        labels = model.targets(labels).reshape(states.shape[:2])
        scored = labels != -100
        found.append((states[scored], labels[scored]))
        if sum(len(part) for _, part in found) >= NUM_TOKENS:
            break
    model.train(was_training)
    hidden_states, labels = (torch.cat(parts)[:NUM_TOKENS] for parts in zip(*found, strict=True))
    if not len(labels):
        raise ValueError("h_exp.calibrate: expected labelled tokens, got none")
    return hidden_states, labels


def _best_exponent(head: Head, hidden_states: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the exponent with the least mean loss on the head as it is, and that loss."""
    assert head.h_exp is not None, "calibrate_ has looked"
    logits = head(hidden_states) / -head.h_exp  # [N, V], at the exponent -1
    own = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)

    def loss_at(log_steepness: float) -> float:
        steepness = math.exp(log_steepness)
        normalizers = torch.logsumexp(logits * steepness, -1)
        return float((normalizers - own * steepness).mean())

    found = minimize_scalar(
        loss_at,
        bounds=[math.log(edge) for edge in STEEPNESS],
        method="bounded",
        options={"xatol": 1e-3},
    )
    return -math.exp(found.x), float(found.fun)
