"""Figure 4, right: are the weights of a linear classifier of digits digits themselves?"""

import gzip
import math
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

from experiments.harmonic_loss.cells import kept
from harmonic_sft.eval.statistics import t_interval
from harmonic_sft.models import build_head

HEADS = {
    "linear": {"name": "linear"},
    "dist": {"name": "dist", "h_exp": -28.0, "unit_sphere": False, "eps": 1e-4},
}
NUM_PIXELS, NUM_CLASSES = 784, 10
BATCH_SIZE = 64
NUM_EPOCHS = 100
PATIENCE, MIN_DELTA = 10, 1e-4  # of the training loss
NEAR_ZERO = 0.01
Digits = tuple[Tensor, Tensor]


def read_digits(folder: Path) -> tuple[Digits, Digits]:
    """Return the training and test images `[N, 784]`, 0 to 1, with their labels `[N]`.

    Args:
        folder: Holds t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz and the training images
            as files of that kind or as train_0_20000.npz, the first 20,000.
    """
    archive = folder / "train_0_20000.npz"
    if archive.is_file():
        with np.load(archive) as arrays:
            training = _digits(arrays["images"], arrays["labels"])
    else:
        training = _read_idx(folder, "train")
    return training, _read_idx(folder, "t10k")


def run(digits: Path, num_seeds: int, num_epochs: int, folder: Path) -> dict[str, Any]:
    """Train both heads for every seed, or read what was trained.

    Args:
        digits: See `read_digits`.
        num_seeds: Seeds 0, 1, ...
        num_epochs: At most; at least 1.
        folder: For one file for each head and seed.

    Returns:
        `rows`, one for each head and seed (see `train`) without the weights; `weights` of seed 0
        by head; `class_means` `[10, 784]`, rounded as the weights are; the mean
        `accuracy` with its 95 % t interval by head, and `p_value` of the paired t-test,
        None where there is no difference to test.
    """
    training, test = read_digits(digits)
    rows = []
    for seed in range(num_seeds):
        for head in HEADS:
            path = folder / "cells" / f"mnist-{head}-num_epochs={num_epochs}-seed_{seed}.json"
            rows.append(kept(path, partial(train, head, seed, training, test, num_epochs)))
    accuracy = {head: [r["accuracy"] for r in rows if r["head"] == head] for head in HEADS}
    p_value = float(stats.ttest_rel(*accuracy.values()).pvalue)
    weights = [row.pop("weight") for row in rows]
    return {
        "rows": rows,
        "weights": dict(zip(HEADS, weights, strict=False)),
        "num_training": len(training[1]),
        "class_means": torch.round(class_means(*training).double(), decimals=4).tolist(),
        "accuracy": {
            head: {"mean": fmean(values), "interval": t_interval(values)["half_width"]}
            for head, values in accuracy.items()
        },
        "p_value": p_value if math.isfinite(p_value) else None,
    }


def train(head: str, seed: int, training: Digits, test: Digits, num_epochs: int) -> dict[str, Any]:
    """Train one layer until its loss falls no more.

    Returns:
        `head`, `seed`, `num_epochs`, the last `loss` (nats), test `accuracy` (0 to 1),
        `cosine` (the mean over classes of that between weight and class mean), `share_near_zero`
        (weights below 0.01 in magnitude), `share_below` (below 0.01, as the released picture
        counts) and `weight` `[10, 784]`.

    Source:
        Baek et al. 2025, arXiv:2502.01628, as released: weights N(0, 1 / 28 ** 2), AdamW with
        1e-3, batches of 64, up to 100 epochs with patience 10; the paper's text says 10 epochs.
    """
    torch.manual_seed(seed)
    layer = build_head(HEADS[head], hidden_size=NUM_PIXELS, vocab_size=NUM_CLASSES)
    nn.init.normal_(layer.weight, std=NUM_PIXELS**-0.5)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=True)
    images, labels = training
    best, waited, epoch, loss = float("inf"), 0, 0, 0.0
    while epoch < num_epochs and waited < PATIENCE:
        epoch, total = epoch + 1, torch.zeros(())
        batches = torch.randperm(len(labels)).split(BATCH_SIZE)
        for rows in batches:
            nll = layer.nll(images[rows], labels[rows]).mean()
            optimizer.zero_grad()
            nll.backward()
            optimizer.step()
            total += nll.detach()
        loss = total.item() / len(batches)
        waited = 0 if best - loss > MIN_DELTA else waited + 1
        best = loss if waited == 0 else best
    weight = layer.weight.detach()
    cosines = F.cosine_similarity(weight, class_means(*training))
    with torch.no_grad():
        hits = layer(test[0]).argmax(-1) == test[1]
    return {
        "head": head,
        "seed": seed,
        "num_epochs": epoch,
        "loss": loss,
        "accuracy": hits.double().mean().item(),
        "cosine": cosines.mean().item(),
        "share_near_zero": (weight.abs() < NEAR_ZERO).double().mean().item(),
        "share_below": (weight < NEAR_ZERO).double().mean().item(),
        "weight": torch.round(weight.double(), decimals=4).tolist(),
    }


def class_means(images: Tensor, labels: Tensor) -> Tensor:
    """Return the mean image of every class, `[10, 784]`."""
    members = F.one_hot(labels, NUM_CLASSES).T.to(images)  # [10, N]
    return members @ images / members.sum(1, keepdim=True)


def _read_idx(folder: Path, name: str) -> Digits:
    arrays = []
    for kind, offset in (("images-idx3", 16), ("labels-idx1", 8)):
        path = folder / f"{name}-{kind}-ubyte.gz"
        arrays.append(np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=offset))
    return _digits(*arrays)


def _digits(images: np.ndarray, labels: np.ndarray) -> Digits:
    pixels = torch.tensor(images.reshape(-1, NUM_PIXELS), dtype=torch.float32) / 255
    return pixels, torch.tensor(labels, dtype=torch.long)
