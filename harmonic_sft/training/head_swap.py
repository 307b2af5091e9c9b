"""The change of heads before any training: what it costs, and the exponent that fits best."""

import copy
import functools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.utils import broadcast_object_list
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.utils.data import Subset

from harmonic_sft.data.loading import LoadedData
from harmonic_sft.data.masking import IGNORE_INDEX
from harmonic_sft.data.streams import StreamedRows, collate_placed
from harmonic_sft.eval import unigram_loss
from harmonic_sft.losses import DistillLoss
from harmonic_sft.models import HarmonicHeadModel, Head
from harmonic_sft.models.head import FLAT, SphereHead
from harmonic_sft.training.batches import batches_on, labelled_states
from harmonic_sft.training.run_config import RunConfig
from harmonic_sft.training.trainer import HarmonicTrainer
from harmonic_sft.training.training_section import METRICS

logger = logging.getLogger(__name__)
NUM_TOKENS = 1024
STEEPNESS = (FLAT / 1.01, 4096.0)  # least and greatest -h_exp; a search that ends there is flat
SCALES = (1e-3, 1e3)  # of the prototypes off the sphere


def evaluate(trainer: HarmonicTrainer, prefix: str) -> dict[str, float]:
    """Evaluate and return the metrics without the prefix that transformers logs them under."""
    return plain_metrics(trainer.evaluate(metric_key_prefix=prefix), prefix)


def plain_metrics(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the metrics of an evaluation alone, without the prefix of their names."""
    kept = (*METRICS, "tokens", "documents", "h_exp", "post_hoc")
    plain = {key.removeprefix(f"{prefix}_"): value for key, value in metrics.items()}
    return {key: value for key, value in plain.items() if key.startswith(kept)}


def measure_swap(
    trainer: HarmonicTrainer, data: LoadedData
) -> tuple[dict[str, dict[str, float]], dict[str, float] | None]:
    """Evaluate the base with its own head; to calibrate, evaluate the new one and fit its h_exp.

    Returns:
        Metrics of the evaluation split by head, and the fit. `old_head` is there if the base has
        one. Without calibration there is neither a fit nor `swapped`, the new head before it.
    """
    model, old_head, swap, h_exp = trainer.model, trainer.old_head, {}, trainer.run_config.h_exp
    if old_head is not None:
        new_head, device = model.dist_head, old_head.weight.device
        model.dist_head = old_head.to(model.device)
        try:
            swap["old_head"] = evaluate(trainer, "old_head")
        finally:
            model.dist_head = new_head
            old_head.to(device)
    if h_exp is None or not h_exp.calibrate:
        return swap, None
    swap["swapped"] = evaluate(trainer, "swapped")
    batch_size = trainer.args.per_device_eval_batch_size
    batches = first_batches(data.train, data.collator, batch_size, model.device)
    # All processes use the fit of the main one.
    fit = broadcast_object_list([fit_h_exp(model, batches)])[0]
    apply_fit_(trainer, fit)
    logger.info(
        "Calibrated on %d tokens: h_exp %.3g, prototypes times %.3g.",
        fit["tokens"],
        fit["h_exp"],
        fit["scale"],
    )
    return swap, fit


def check_base(
    run: RunConfig,
    data: LoadedData,
    swap: dict[str, dict[str, float]],
    unigrams: float | None,
) -> None:
    """Refuse a base that predicts held-out text no better than the frequencies of its tokens.

    The base's own head is judged at its best temperature. `unigrams` is the loss of the training
    text's frequencies, in nats. It is None for a stream: then the frequencies of the held-out text
    itself are used, which predict it a little better.
    """
    if not run.check_base or run.model.from_scratch or "old_head" not in swap:
        return
    if unigrams is None:
        labels = eval_labels(data)
        unigrams = unigram_loss(labels, np.bincount(labels, minlength=int(labels.max()) + 1))
    loss = swap["old_head"]["post_hoc_loss"]
    if loss >= unigrams:
        raise ValueError(
            f"model.base: expected a base whose own head does better on the held-out text than its "
            f"unigrams, {unigrams:.2f} nats, got {loss:.2f} at its best temperature. Its body was "
            "probably not loaded with the weights it was trained with: check model.base, "
            "model.revision and the tokenizer. For text that the base cannot know, set "
            "check_base: false"
        )


def eval_labels(data: LoadedData) -> np.ndarray:
    """Return what is predicted in the evaluation rows, `[N]`."""
    rows = (data.eval[index]["labels"] for index in range(len(data.eval)))
    labels = np.concatenate([np.atleast_1d(row) for row in rows])
    return labels[labels != IGNORE_INDEX]


@torch.no_grad()
def apply_fit_(trainer: HarmonicTrainer, fit: dict[str, float]) -> None:
    """Give a newly loaded head what `fit_h_exp` found, and anneal from there.

    The ratio of end to start stays that of the run, unless classes would be alike at the end.
    """
    h_exp, loss = trainer.run_config.h_exp, trainer.run_config.loss
    assert h_exp is not None, "only a distance head is fitted"
    assert loss is not None, "a file names its loss"
    trainer.model.dist_head.weight.mul_(fit["scale"])
    # A loss may hold a copy of the prototypes, except distillation, which holds the old head.
    if fit["scale"] != 1 and not isinstance(loss, DistillLoss):
        trainer.model.loss_fn = loss.prepare(trainer.model.dist_head)
    trainer.model.h_exp = fit["h_exp"]
    if h_exp.schedule != "learned":
        end = min(fit["h_exp"] * h_exp.end / h_exp.start, -FLAT)
        trainer.anneal(replace(h_exp, start=fit["h_exp"], end=end))


@torch.no_grad()
def fit_h_exp(model: HarmonicHeadModel, batches: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Fit the exponent of a distance head and, off the sphere, the length of its prototypes.

    The fit has the least loss on `NUM_TOKENS` labelled tokens. Logits are proportional to the
    exponent, so this is temperature scaling, and the loss is convex in it. Tied prototypes keep
    their length, since the embeddings would change with them.

    Args:
        model: In evaluation mode, on its device, with logits proportional to its exponent. It is
            left as it is.
        batches: Of training data, as the model takes them; read until there are enough tokens.

    Returns:
        `h_exp`; `scale`, a factor on the prototypes that is 1 on the sphere; the `loss`, in nats,
        and how many `tokens` it was taken on.

    Source:
        Guo et al. 2017, On Calibration of Modern Neural Networks, arXiv:1706.04599, Sec. 4.2.
    """
    head = model.dist_head
    hidden_states, labels = _labelled_states(model, batches)
    is_tied = model.config.tie_word_embeddings

    def loss_at(log_scale: float) -> float:
        return _fit_at(head, math.exp(log_scale), hidden_states, labels)["loss"]

    scale = 1.0
    is_free = any(isinstance(part, SphereHead) and not part.unit_sphere for part in head.modules())
    if is_free and not is_tied:
        scale = math.exp(_minimize(loss_at, SCALES, tolerance=0.02))
    fit = _fit_at(head, scale, hidden_states, labels)
    if -fit["h_exp"] < FLAT:
        raise ValueError(
            "h_exp.calibrate: expected prototypes of which the label's is nearer than others on "
            f"average, got a best h_exp of {fit['h_exp']:.3g}, at which all are alike. Was the "
            "base loaded with its weights? Set h_exp.calibrate: false to train in spite of it"
        )
    return fit


def first_batches(
    data: Any, collator: Any, batch_size: int, device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """Return first batches of a stream, which keeps its place, or batches spread over a table."""
    if isinstance(data, StreamedRows):
        data = copy.deepcopy(data)  # the library's streams remember how far they were read
        data.share(process_index=0, num_processes=1, batch_size=batch_size)
        collator = functools.partial(collate_placed, collator)
    else:
        count, wanted = len(data), min(len(data), NUM_TOKENS)
        data = Subset(data, [index * count // wanted for index in range(wanted)])
    return batches_on(device, data, collator, batch_size)


def _labelled_states(
    model: HarmonicHeadModel, batches: Iterable[dict[str, Any]]
) -> tuple[Tensor, Tensor]:
    """Return hidden states `[N, D]` and labels `[N]` of the first labelled tokens."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for batch in batches:
        pairs.append(labelled_states(model, batch))
        if sum(len(labels) for _, labels in pairs) >= NUM_TOKENS:
            break
    hidden_states, labels = (torch.cat(parts)[:NUM_TOKENS] for parts in zip(*pairs, strict=True))
    if not len(labels):
        raise ValueError("h_exp.calibrate: expected labelled tokens, got none")
    return hidden_states, labels


def _fit_at(head: Head, scale: float, hidden_states: Tensor, labels: Tensor) -> dict[str, float]:
    """Fit the exponent alone, by the mean loss with prototypes times `scale`."""
    assert head.h_exp is not None, "the run's file was checked"
    weight = head.weight.clone()
    head.weight.mul_(scale)
    logits = head(hidden_states) / -head.h_exp  # [N, V], at the exponent -1
    head.weight.copy_(weight)

    def loss_at(log_steepness: float) -> float:
        return float(F.cross_entropy(logits * math.exp(log_steepness), labels))

    best = _minimize(loss_at, STEEPNESS, tolerance=1e-3)
    h_exp, loss = -math.exp(best), loss_at(best)
    return {"h_exp": h_exp, "scale": scale, "loss": loss, "tokens": len(labels)}


def _minimize(loss_fn: Any, bounds: tuple[float, float], *, tolerance: float) -> float:
    """Return the logarithm of the value within `bounds` at which a loss is least."""
    logs = [math.log(bound) for bound in bounds]
    least = minimize_scalar(loss_fn, bounds=logs, method="bounded", options={"xatol": tolerance})
    return float(least.x)
