"""The demo's data: MNIST's and Fashion-MNIST's files, whole, damaged and missing; the tutorial."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from mnist_files import write_idx, write_mnist
from test_demo import PICTURES, assert_real_pictures, one_thread, run_demo

from examples.demo import data as demo_data
from examples.demo.__main__ import main
from examples.demo.training import RECIPES, sigmoid_loss

__all__ = ["one_thread"]  # a fixture for every test here


@pytest.mark.parametrize("suffixes", [("", ".gz"), (".gz", "")])
@pytest.mark.parametrize("folder", ["MNIST/raw", "."])
def test_reads_idx_files(tmp_path: Path, folder: str, suffixes: tuple[str, str]) -> None:
    written = write_mnist(tmp_path / folder, suffixes)
    data = demo_data.load_mnist(tmp_path)
    mean, deviation = demo_data.MNIST_STATISTICS
    for split in ("train", "test"):
        images = getattr(data, f"{split}_images").double() * deviation + mean
        expected = written[f"{split}_images"].reshape(-1, 784) / 255
        np.testing.assert_allclose(images.numpy(), expected, atol=1e-6)
        labels = getattr(data, f"{split}_labels")
        assert labels.dtype is torch.int64
        np.testing.assert_array_equal(labels.numpy(), written[f"{split}_labels"])
    assert data.image_shape == (28, 28)


def test_tutorial_learns_mnist_files(tmp_path: Path) -> None:
    write_mnist(tmp_path / "data" / "MNIST" / "raw")
    process = run_demo("--recipe", "tutorial", "--data", tmp_path / "data", "--out", tmp_path)
    assert process.returncode == 0, process.stderr
    output = process.stdout
    assert "784-30-10 with ReLU" in output
    assert "SGD lr 0.1 momentum 0, batch 256" in output
    first = re.search(r"^loss at batch 0 +([\d.]+) +([\d.]+) +0.6833$", output, re.MULTILINE)
    last = re.search(r"^loss at batch 9 +([\d.]+) +([\d.]+) +0.0566$", output, re.MULTILINE)
    accuracy = re.search(r"^test accuracy +([\d.]+) +([\d.]+) +0.9146$", output, re.MULTILINE)
    # 2700 images make ten whole batches of 256, and the rest is dropped as the tutorial does.
    assert float(first.group(1)) == pytest.approx(0.693, abs=0.1)  # ten coins are ten ln 2 / 10
    assert float(last.group(1)) < 0.75 * float(first.group(1))
    assert float(accuracy.group(1)) > 0.5
    for found in (first, last, accuracy):
        assert float(found.group(1)) == pytest.approx(float(found.group(2)), abs=2e-3)
    assert_real_pictures(tmp_path)


def test_tutorial_runs_on_fashion_mnist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own folder and mean, the names of clothes, and nothing that was published for MNIST."""
    written = write_mnist(tmp_path / "FashionMNIST" / "raw")
    data = demo_data.load("fashion-mnist", tmp_path)
    mean, deviation = demo_data.FASHION_STATISTICS
    images = data.train_images.double() * deviation + mean
    expected = written["train_images"].reshape(-1, 784) / 255
    np.testing.assert_allclose(images.numpy(), expected, atol=1e-6)
    assert data.classes[9] == "boot" and len(data.classes) == 10
    arguments = ["--recipe", "tutorial", "--dataset", "fashion-mnist", "--data", str(tmp_path)]
    assert main(["--device", "cpu", *arguments, "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "Fashion-MNIST: 2700 training and 200 test images of 28x28" in output
    assert "784-30-10 with ReLU" in output and "on other images" in output
    assert "published" not in output
    assert_real_pictures(tmp_path)


@pytest.mark.skipif(not demo_data.DEBIAN.exists(), reason="needs Debian's dataset-fashion-mnist")
def test_reads_the_true_fashion_mnist() -> None:
    data = demo_data.load("fashion-mnist", Path("data"))
    assert data.train_images.shape == (60000, 784) and data.test_images.shape == (10000, 784)
    assert data.train_labels.bincount().tolist() == [6000] * 10
    assert abs(data.train_images.mean()) < 1e-3 and abs(data.train_images.std() - 1) < 1e-3


def test_missing_fashion_mnist_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(demo_data.DataError, match=r"FashionMNIST\(.*download=True") as raised:
        demo_data.load_mnist(tmp_path, "fashion-mnist")
    assert "apt install dataset-fashion-mnist" in str(raised.value)


def test_tutorial_on_the_digits_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--recipe", "tutorial", "--dataset", "digits", "--out", str(tmp_path)]
    assert main(["--device", "cpu", *arguments]) == 0
    output = capsys.readouterr().out
    assert "64-30-10 with ReLU" in output
    assert "the tutorial's network is 784-30-10 on MNIST" in output
    assert "published" not in output


def test_tutorial_loss_has_the_tutorials_gradient() -> None:
    logits = torch.randn(7, 10, dtype=torch.float64, requires_grad=True)
    labels = torch.arange(7)
    loss = sigmoid_loss(logits, labels)
    output, target = torch.sigmoid(logits), torch.eye(10, dtype=torch.float64)[labels]
    shown = -(target * output.log() + (1 - target) * (1 - output).log()).mean()
    torch.testing.assert_close(loss / RECIPES["tutorial"].loss_divisor, shown)
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, (output - target) / 7)


def test_missing_mnist_says_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    arguments = ["--dataset", "mnist", "--data", str(tmp_path), "--out", str(tmp_path)]
    assert main(["--device", "cpu", *arguments]) == 2
    message = capsys.readouterr().err
    assert "t10k-labels-idx1-ubyte" in message and "train-images" not in message
    assert "download=True" in message and str(tmp_path) in message
    assert not any((tmp_path / name).exists() for name in PICTURES)


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
    with pytest.raises(demo_data.DataError, match=says) as raised:
        demo_data.load_mnist(tmp_path)
    assert str(path) in str(raised.value)


def test_mnist_files_that_do_not_fit_together(tmp_path: Path) -> None:
    parts = write_mnist(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte", parts["train_labels"][:-1])
    with pytest.raises(demo_data.DataError, match="do not fit together"):
        demo_data.load_mnist(tmp_path)
