"""A few steps of the real ResNet-50 on a tiny folder of images, under both heads."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.harmonic_loss.imagenet import Classifier, ImageFolder, main
from harmonic_sft.results import read_results


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Two classes, dark and bright, of 6 training and 3 validation images of two sizes."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 3)):
        for name, start in (("bright", 150), ("dark", 0)):
            place = folder / split / name
            place.mkdir(parents=True)
            for number in range(count):
                shape = (40, 48 - 8 * (number % 2), 3)
                pixels = start + rng.integers(100, size=shape, dtype=np.uint8)
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.png")
    return folder


def test_it_is_the_real_resnet_50():
    model = Classifier({"name": "linear"}, 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032


def test_images_are_read_with_the_class_of_their_folder(images):
    center = ImageFolder(images / "val", 32, augment=False)
    assert center.classes == ["bright", "dark"]
    assert [label for _, label in center] == [0, 0, 0, 1, 1, 1]
    (bright, _), (dark, _) = center[0], center[5]
    assert bright.shape == (3, 32, 32)
    assert bright.mean() > 0.5 > dark.mean()
    assert torch.equal(center[0][0], bright)
    crops = ImageFolder(images / "train", 32, augment=True)
    assert not torch.equal(crops[0][0], crops[0][0])


def test_folders_without_images_are_refused(images, tmp_path):
    with pytest.raises(ValueError, match=r"folder: expected folders of images in .*, got none"):
        ImageFolder(tmp_path, 32, augment=False)
    (tmp_path / "cat").mkdir()
    with pytest.raises(ValueError, match=r"folder: expected images in .*cat.*, got none"):
        ImageFolder(tmp_path, 32, augment=False)
    (tmp_path / "train").symlink_to(images / "train")
    (tmp_path / "val" / "dark").mkdir(parents=True)
    (tmp_path / "val" / "dark" / "0.png").symlink_to(images / "val" / "dark" / "0.png")
    with pytest.raises(ValueError, match="folder: expected the same classes in train and val"):
        main([str(tmp_path), "--workers", "0"])


@pytest.mark.slow
@pytest.mark.parametrize("head", ["linear", "dist"])
def test_two_epochs_run_and_write_what_was_found(head, images, tmp_path):
    small = ["--size", "32", "--batch", "4", "--workers", "0", "--epochs", "2", "--rate", "0.01"]
    found = main([str(images), "--head", head, *small, "--output", str(tmp_path)])
    assert len(found["losses"]) == 2
    assert all(math.isfinite(loss) for loss in found["losses"])
    assert 0 <= found["top_1"] <= found["top_5"] == 1  # of two classes
    kept = read_results(tmp_path / f"resnet50_{head}.json")
    assert (kept["head"]["name"], kept["top_1"]) == (head, found["top_1"])
    assert kept["num_images"] == {"train": 12, "val": 6}
