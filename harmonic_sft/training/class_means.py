"""Prototypes from data: the mean of what the head sees of each class."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from harmonic_sft.data.masking import IGNORE_INDEX
from harmonic_sft.models import HarmonicClassifier
from harmonic_sft.models.head import SphereHead


@torch.no_grad()
def class_means(model: HarmonicClassifier, batches: Iterable[dict[str, Tensor]]) -> Tensor:
    """Return the mean of the frozen features of every class.

    For a head on the unit sphere the features are normalized first, so that the normalized mean is
    the direction of highest likelihood under a von Mises-Fisher distribution.

    Args:
        model: In evaluation mode.
        batches: `input_ids`, `attention_mask` and `labels`, on the model's device.

    Returns:
        `[V, D]`, float32, on the model's device.

    Raises:
        ValueError: A class without a labeled row.
    """
    head = model.dist_head
    on_sphere = isinstance(head, SphereHead) and head.unit_sphere
    shape = (model.num_classes(model.config), model.config.text_config.hidden_size)
    totals = torch.zeros(shape, dtype=torch.float64, device=model.device)  # [V, D]
    counts = torch.zeros(len(totals), 1, dtype=torch.float64, device=model.device)
    for batch in batches:
        inputs: dict[str, Any] = {key: value for key, value in batch.items() if key != "labels"}
        hidden_states = model.model(**inputs).last_hidden_state
        states = model.select(hidden_states, inputs.get("attention_mask"))  # [B, S, D]
        labels = batch["labels"].reshape(states.shape[:2])
        scored = labels != IGNORE_INDEX
        features, labels = states[scored].double(), labels[scored]  # [N, D], [N]
        totals.index_add_(0, labels, normalize(features, dim=-1) if on_sphere else features)
        counts.index_add_(0, labels, torch.ones_like(counts[labels]))
    empty = (counts.squeeze(-1) == 0).nonzero().flatten().tolist()
    if empty:
        labels = model.config.id2label or {}
        names = [labels[index] for index in empty[:3]]
        raise ValueError(
            f"head.init: expected training rows of every class for class_means, got none of {names}"
            f"{' ...' if len(empty) > 3 else ''}. Add rows, or set head.init: random"
        )
    return (totals / counts).float()
