"""Appendix G.1: ResNet-50 on ImageNet under a linear and a distance head. Not run at scale.

On eight GPUs, after `accelerate launch --config_file configs/accelerate/multi_gpu.yaml`:
-m experiments.harmonic_loss.imagenet FOLDER --head dist --batch 32

FOLDER has `train` and `val`, each with one folder of images for each class.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import ResNetConfig, ResNetModel

from harmonic_sft.models import build_head
from harmonic_sft.results import environment, write_results

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's channels
MILESTONES = (10, 30, 60, 80)  # epochs after which the learning rate is divided by ten
NUM_EPOCHS = 90
WIDTH = 2048  # of ResNet-50's last layer
LEAST_AREA = 0.08  # of an image that a random crop shows


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images of a folder of folders, one for each class, in the order of their names.

    Args:
        folder: Of the classes.
        size: Pixels of the squares that are returned.
        augment: Random crops and mirror images; else the center.

    Raises:
        ValueError: No class, or a class without an image.
    """

    def __init__(self, folder: Path, size: int, *, augment: bool):
        self.classes = sorted(path.name for path in folder.glob("*/"))
        self.size, self.augment = size, augment
        self.files = []
        for label, name in enumerate(self.classes):
            paths = sorted(path for path in (folder / name).iterdir() if path.is_file())
            if not paths:
                raise ValueError(f"folder: expected images in {str(folder / name)!r}, got none")
            self.files += [(path, label) for path in paths]
        if not self.files:
            raise ValueError(f"folder: expected folders of images in {str(folder)!r}, got none")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        with Image.open(path) as image:
            image = image.convert("RGB")
            box = _random_box(*image.size) if self.augment else _center(*image.size)
            pixels = np.asarray(image.resize((self.size, self.size), box=box), dtype=np.float32)
        values = (torch.from_numpy(pixels / 255) - torch.tensor(MEAN)) / torch.tensor(STD)
        values = values.permute(2, 0, 1)  # [3, size, size]
        if self.augment and torch.rand(()) < 0.5:
            values = values.flip(-1)
        return values, label


def _random_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Return a crop of 8 to 100 % of the area, up to 4 : 3 wide or high, cut to the image."""
    area = width * height * (LEAST_AREA + (1 - LEAST_AREA) * float(torch.rand(())))
    ratio = math.exp((2 * float(torch.rand(())) - 1) * math.log(4 / 3))
    w, h = min(width, math.sqrt(area * ratio)), min(height, math.sqrt(area / ratio))
    left, top = (float(torch.rand(())) * room for room in (width - w, height - h))
    return left, top, left + w, top + h


def _center(width: int, height: int) -> tuple[float, float, float, float]:
    """Return the central square whose side is 7 / 8 of the shorter side."""
    side = min(width, height) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


class Classifier(nn.Module):
    """ResNet-50 and a head; `forward` returns the loss of each image, or its logits."""

    def __init__(self, head: dict[str, Any], num_classes: int):
        super().__init__()
        self.body = ResNetModel(ResNetConfig())
        self.head = build_head(head, hidden_size=WIDTH, vocab_size=num_classes)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the loss `[N]` (nats) of images `[N, 3, size, size]`, or logits `[N, V]`."""
        states = self.body(images).pooler_output.flatten(1)  # [N, 2048]
        return self.head(states) if labels is None else self.head.nll(states, labels)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Train and evaluate, and write `resnet50_HEAD.json` into the output folder.

    Source:
        Baek et al. 2025, arXiv:2502.01628, App. G.1: 90 epochs, learning rate 0.1 divided by ten
        after 10, 30, 60 and 80. Its text leaves n, batch size, momentum and decay open, and no code
        is released; here 256, 0.9, 1e-4 and, as for its GPT-2, n = sqrt(width). It also
        has AutoAugment, which is missing here.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--head", choices=["linear", "dist"], default="dist")
    parser.add_argument("--h-exp", type=float, default=-math.sqrt(WIDTH) / 2)
    parser.add_argument("--size", type=int, default=224, help="pixels of a side")
    parser.add_argument("--batch", type=int, default=256, help="images of each process")
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate")
    parser.add_argument("--epochs", type=int, default=NUM_EPOCHS)
    parser.add_argument("--workers", type=int, default=8, help="processes that read images")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/resnet50"))
    options = parser.parse_args(arguments)
    accelerator = Accelerator()
    set_seed(options.seed)
    parts = {
        split: ImageFolder(options.folder / split, options.size, augment=split == "train")
        for split in ("train", "val")
    }
    if parts["train"].classes != parts["val"].classes:
        raise ValueError("folder: expected the same classes in train and val, got others")
    head: dict[str, Any] = {"name": "linear"}
    if options.head == "dist":
        head = {"name": "dist", "unit_sphere": False, "h_exp": options.h_exp, "eps": 1e-4}
    model: Any = Classifier(head, len(parts["val"].classes))
    optimizer: Any = torch.optim.SGD(
        model.parameters(), lr=options.rate, momentum=0.9, weight_decay=1e-4
    )
    train_loader, val_loader = (
        DataLoader(
            part, options.batch, shuffle=part.augment, num_workers=options.workers, drop_last=False
        )
        for part in parts.values()
    )
    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader
    )
    losses = []
    for epoch in range(options.epochs):
        rate = options.rate * 0.1 ** sum(epoch >= milestone for milestone in MILESTONES)
        optimizer.param_groups[0]["lr"] = rate
        losses.append(_train_epoch(accelerator, model, optimizer, train_loader))
        accelerator.print(f"epoch {epoch + 1}: loss {losses[-1]:.4f}")
    num_images = {split: len(part) for split, part in parts.items()}
    scores = _evaluate(accelerator, model, val_loader)
    found = {"head": head, "num_images": num_images, "losses": losses, **scores}
    accelerator.print(f"top-1 {found['top_1']:.4f}, top-5 {found['top_5']:.4f}")
    if accelerator.is_main_process:
        payload = {**found, "options": {k: str(v) for k, v in vars(options).items()}}
        write_results(
            options.output, f"resnet50_{options.head}", {**payload, "environment": environment()}
        )
    accelerator.end_training()
    return found


def _train_epoch(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> float:
    """Train one epoch and return its mean loss, in nats an image."""
    model.train()
    total, count = 0.0, 0
    for images, labels in loader:
        loss = model(images, labels)
        optimizer.zero_grad()
        accelerator.backward(loss.mean())
        optimizer.step()
        seen = accelerator.gather(loss.detach())
        total, count = total + float(seen.sum()), count + len(seen)
    return total / count


@torch.no_grad()
def _evaluate(accelerator: Accelerator, model: Any, loader: Any) -> dict[str, float]:
    """Return `top_1` and `top_5`, shares of the images from 0 to 1."""
    model.eval()
    hits = []
    for images, labels in loader:
        logits = model(images)
        best = logits.topk(min(5, logits.shape[-1])).indices
        hits.append(accelerator.gather_for_metrics(best == labels[:, None]))
    found = torch.cat(hits).double()
    return {"top_1": float(found[:, 0].mean()), "top_5": float(found.any(-1).double().mean())}


if __name__ == "__main__":
    main()
