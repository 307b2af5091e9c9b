"""Digits are read, one layer is trained on them, and every number of the figure is there."""

import gzip

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from experiments.__main__ import main
from experiments.harmonic_loss.mnist import class_means, read_digits, run, train
from harmonic_sft.results import read_results


@pytest.fixture
def digits(tmp_path):
    """A folder of 300 training and 50 test images: class k has bright rows 2 k and 2 k + 1."""
    rng = np.random.default_rng(0)

    def draw(count):
        labels = rng.integers(10, size=count, dtype=np.uint8)
        images = rng.integers(40, size=(count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 2] += 200
        return images, labels

    images, labels = draw(300)
    np.savez(tmp_path / "train_0_20000.npz", images=images, labels=labels)
    images, labels = draw(50)
    for kind, array, header in (("images-idx3", images, 16), ("labels-idx1", labels, 8)):
        data = gzip.compress(bytes(header) + array.tobytes())
        (tmp_path / f"t10k-{kind}-ubyte.gz").write_bytes(data)
    return tmp_path


def test_digits_are_read_from_an_archive_or_from_idx_files(digits):
    (images, labels), (test_images, test_labels) = read_digits(digits)
    assert images.shape == (300, 784)
    assert test_images.shape == (50, 784)
    assert images.max() <= 1
    bright = images.view(-1, 14, 56).mean(-1).argmax(-1)
    assert torch.equal(bright, labels)
    assert torch.equal(test_images.view(-1, 14, 56).mean(-1).argmax(-1), test_labels)
    with np.load(digits / "train_0_20000.npz") as arrays:
        raw = {"images-idx3": (arrays["images"], 16), "labels-idx1": (arrays["labels"], 8)}
        for kind, (array, header) in raw.items():
            data = gzip.compress(bytes(header) + array.tobytes())
            (digits / f"train-{kind}-ubyte.gz").write_bytes(data)
    (digits / "train_0_20000.npz").unlink()
    (from_idx, labels_from_idx), _ = read_digits(digits)
    assert torch.equal(from_idx, images)
    assert torch.equal(labels_from_idx, labels)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte\.gz"):
        read_digits(tmp_path)


def test_class_means_are_means_of_the_images():
    images, labels = torch.rand(20, 784), torch.arange(20) % 10
    means = class_means(images, labels)
    for label in range(10):
        torch.testing.assert_close(means[label], images[labels == label].mean(0))


def test_training_stops_when_the_loss_falls_no_more(digits, monkeypatch):
    monkeypatch.setattr("experiments.harmonic_loss.mnist.MIN_DELTA", 100.0)
    training, test = read_digits(digits)
    found = train("linear", 0, training, test, 100)
    assert found["num_epochs"] == 11  # the first counts as progress


def test_what_is_trained_is_not_trained_again(digits, monkeypatch, tmp_path):
    payload = run(digits, 2, 20, tmp_path / "out")
    assert [(row["head"], row["seed"]) for row in payload["rows"]] == [
        ("linear", 0),
        ("dist", 0),
        ("linear", 1),
        ("dist", 1),
    ]
    assert payload["num_training"] == 300
    assert min(row["accuracy"] for row in payload["rows"]) > 0.5
    assert all(row["share_near_zero"] <= row["share_below"] for row in payload["rows"])
    assert payload["accuracy"]["dist"]["interval"] is not None
    monkeypatch.setattr("experiments.harmonic_loss.mnist.train", pytest.fail)
    assert run(digits, 2, 20, tmp_path / "out") == payload


@pytest.mark.slow
def test_the_command_draws_weights_and_class_means(digits, tmp_path, capsys):
    command = ["harmonic_loss", "--figure", "4-mnist", "--out", str(tmp_path / "out")]
    assert main([*command, "--quick", "--mnist", str(digits)]) == 0
    assert "cosine" in capsys.readouterr().out
    payload = read_results(tmp_path / "out" / "figure_4-mnist.json")
    assert np.shape(payload["weights"]["dist"]) == np.shape(payload["class_means"]) == (10, 784)
    assert imread(tmp_path / "out" / "figure_4-mnist.png").std() > 0.01
    assert main([*command, "--draw"]) == 0
