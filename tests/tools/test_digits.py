"""The data of examples/mnist.py: MNIST's files, whole, damaged and missing; the loss; pictures."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from mnist_files import write_idx, write_mnist

from examples.digits import data as digits_data
from examples.digits import pictures
from examples.digits.networks import CLASSES, sigmoid_loss


@pytest.mark.parametrize("suffixes", [("", ".gz"), (".gz", "")])
@pytest.mark.parametrize("folder", ["MNIST/raw", "."])
def test_reads_idx_files(tmp_path: Path, folder: str, suffixes: tuple[str, str]) -> None:
    written = write_mnist(tmp_path / folder, suffixes)
    data = digits_data.load_mnist(tmp_path)
    mean, deviation = digits_data.MNIST_STATISTICS
    for split in ("train", "test"):
        images = getattr(data, f"{split}_images").double() * deviation + mean
        expected = written[f"{split}_images"].reshape(-1, 784) / 255
        np.testing.assert_allclose(images.numpy(), expected, atol=1e-6)
        labels = getattr(data, f"{split}_labels")
        assert labels.dtype is torch.int64
        np.testing.assert_array_equal(labels.numpy(), written[f"{split}_labels"])
    assert data.image_shape == (28, 28)


def test_tutorial_loss_has_the_tutorials_gradient() -> None:
    logits = torch.randn(7, 10, dtype=torch.float64, requires_grad=True)
    labels = torch.arange(7)
    loss = sigmoid_loss(logits, labels)
    output, target = torch.sigmoid(logits), torch.eye(10, dtype=torch.float64)[labels]
    shown = -(target * output.log() + (1 - target) * (1 - output).log()).mean()
    torch.testing.assert_close(loss / CLASSES, shown)
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, (output - target) / 7)


def refused(folder: Path) -> str:
    with pytest.raises(digits_data.DataError) as raised:
        digits_data.load_mnist(folder)
    return str(raised.value)


def test_missing_mnist_says_how_to_get_it(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    message = refused(tmp_path)
    assert "t10k-labels-idx1-ubyte" in message and "train-images" not in message
    assert "download=True" in message and str(tmp_path) in message


def cut(raw: bytes) -> bytes:
    return raw[:-100]


@pytest.mark.parametrize(
    ("file", "damage", "says"),
    [
        ("train-images-idx3-ubyte", cut, r"promises 2116800 values .* holds 2116700"),
        ("train-images-idx3-ubyte", lambda raw: raw[:9], "does not start as an idx file"),
        ("train-images-idx3-ubyte", lambda raw: b"", "does not start as an idx file"),
        ("train-images-idx3-ubyte", lambda raw: b"<!DOCTYPE html>", "does not start as an idx"),
        ("train-labels-idx1-ubyte", lambda raw: raw[:-1] + b"\x0a", "label 10 is none of ten"),
        ("t10k-images-idx3-ubyte.gz", cut, "cannot be read"),
        ("t10k-images-idx3-ubyte.gz", lambda raw: b"not gzip", "cannot be read"),
    ],
)  # fmt: skip
def test_damaged_mnist_names_the_file(tmp_path: Path, file: str, damage, says: str) -> None:
    write_mnist(tmp_path)
    path = tmp_path / file
    path.write_bytes(damage(path.read_bytes()))
    message = refused(tmp_path)
    assert re.search(says, message) and str(path) in message


def test_mnist_files_that_do_not_fit_together(tmp_path: Path) -> None:
    parts = write_mnist(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte", parts["train_labels"][:-1])
    assert "do not fit together" in refused(tmp_path)


# ------------------------------------------------------------------------------------- pictures


def test_pictures_of_very_little_and_of_nonsense(tmp_path: Path) -> None:
    one = pictures.Curve("one", [0.1], [float("nan")], [], [])
    pictures.draw_learning(tmp_path / "loss.png", "title", "loss", one, one)
    few, labels = np.zeros((3, 8, 8)), np.array([1, 2, 3])
    pictures.draw_predictions(tmp_path / "few.png", "title", few, labels + 1, labels)
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("loss.png", "few.png"))
