"""The data of examples/mnist.py: MNIST's files, whole, damaged and missing; the loss; pictures."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from mnist_files import write_mnist

from examples.digits import data as digits_data
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


def cut(raw: bytes) -> bytes:
    return raw[:-100]


def one_less(labels: bytes) -> bytes:
    return labels[:4] + struct.pack(">I", len(labels) - 9) + labels[8:-1]


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
        ("train-labels-idx1-ubyte", one_less, "do not fit together"),
        ("t10k-labels-idx1-ubyte.gz", None, r"^(?!.*train-images).*t10k-labels.*download=True"),
    ],
)  # fmt: skip
def test_damaged_and_missing_mnist_is_told(tmp_path: Path, file: str, damage, says: str) -> None:
    write_mnist(tmp_path)
    path = tmp_path / file
    path.write_bytes(damage(path.read_bytes())) if damage else path.unlink()
    with pytest.raises(digits_data.DataError) as raised:
        digits_data.load_mnist(tmp_path)
    message, shown = str(raised.value), {None: tmp_path, one_less: "train"}.get(damage, path)
    assert re.search(says, message, re.DOTALL) and str(shown) in message
