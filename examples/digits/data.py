"""Images of handwritten digits: scikit-learn's, or MNIST's four files."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

MNIST_FILES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}

# Mean and standard deviation of all training pixels, which are scaled to [0, 1] first.
DIGITS_STATISTICS = (0.305, 0.376)
MNIST_STATISTICS = (0.1307, 0.3081)  # the constants that everybody uses for MNIST


class DataError(Exception):
    """The data cannot be had; the message tells the user what to do."""


@dataclass(frozen=True)
class Dataset:
    """Flattened, normalised images `[N, height * width]` with their labels `[N]`."""

    title: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    image_shape: tuple[int, int]

    def to(self, device: torch.device, dtype: torch.dtype) -> Dataset:
        """The same data on `device`, with images of `dtype`."""
        return Dataset(
            self.title,
            self.train_images.to(device, dtype),
            self.train_labels.to(device),
            self.test_images.to(device, dtype),
            self.test_labels.to(device),
            self.image_shape,
        )


def load_digits() -> Dataset:
    """The 1797 real 8x8 digits that scikit-learn ships; a fixed fifth is kept for the test."""
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    digits = datasets.load_digits()
    # The split is not the user's seed: accuracies of different seeds stay comparable.
    train_x, test_x, train_y, test_y = train_test_split(
        digits.images, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )
    return _dataset(
        "scikit-learn's handwritten digits", 16, DIGITS_STATISTICS, train_x, train_y, test_x, test_y
    )


def load_mnist(directory: Path) -> Dataset:
    """MNIST from its four files, in `directory` or where torchvision puts them below it."""
    folders = (directory / "MNIST" / "raw", directory)
    paths = {part: _find(folders, file) for part, file in MNIST_FILES.items()}
    missing = [MNIST_FILES[part] for part, path in paths.items() if path is None]
    if missing:
        raise DataError(
            f"MNIST is not there: no {', '.join(missing)} (plain or .gz) in "
            f"{' or '.join(map(str, folders))}.\n"
            "Get the files with torchvision (pip install torchvision):\n"
            '  python -c "from torchvision.datasets import MNIST; '
            f'MNIST({str(directory)!r}, download=True)"\n'
            "or name the directory that holds them with --data DIR."
        )
    arrays = {part: read_idx(path) for part, path in paths.items() if path is not None}
    for split in ("train", "test"):
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels) or not len(images):
            raise DataError(
                f"the MNIST files of the {split} images do not fit together: images have the shape "
                f"{images.shape}, labels {labels.shape}"
            )
        if labels.max() > 9:
            raise DataError(f"{paths[f'{split}_labels']}: label {labels.max()} is none of ten")
    if arrays["train_images"].shape[1:] != arrays["test_images"].shape[1:]:
        raise DataError("MNIST: training and test images differ in size")
    return _dataset("MNIST", 255, MNIST_STATISTICS, **arrays)


def read_idx(path: Path) -> np.ndarray:
    """Read a file of unsigned bytes in the idx format, plain or gzipped.

    The format: two zero bytes, the type (8 is unsigned byte), the number of dimensions, each
    dimension as a big-endian 32-bit integer, then the values in row-major order.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read, get it again: {error}") from error
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or len(raw) < 4 + 4 * raw[3]:
        raise DataError(f"{path} is damaged, get it again: it does not start as an idx file does")
    shape = tuple(int(size) for size in np.frombuffer(raw, ">u4", count=raw[3], offset=4))
    header = 4 + 4 * len(shape)
    if len(raw) - header != math.prod(shape):
        raise DataError(
            f"{path} is damaged, get it again: its header promises {math.prod(shape)} values "
            f"{shape}, it holds {len(raw) - header}"
        )
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def _find(folders: Sequence[Path], name: str) -> Path | None:
    """The file `name` or `name`.gz, in the first of `folders` that has it."""
    candidates = [folder / file for folder in folders for file in (name, f"{name}.gz")]
    return next((path for path in candidates if path.is_file()), None)


def _dataset(
    title: str,
    white: int,
    statistics: tuple[float, float],
    train_images: np.ndarray,
    train_labels: np.ndarray,
    test_images: np.ndarray,
    test_labels: np.ndarray,
) -> Dataset:
    """Scale the images from [0, `white`] to [0, 1], normalise and flatten them."""
    mean, deviation = statistics

    def flat(images: np.ndarray) -> Tensor:
        scaled = images.reshape(len(images), -1).astype(np.float32) / white
        return torch.from_numpy((scaled - mean) / deviation)

    def integers(labels: np.ndarray) -> Tensor:
        return torch.from_numpy(labels.astype(np.int64))

    height, width = train_images.shape[1:]
    return Dataset(
        title,
        flat(train_images),
        integers(train_labels),
        flat(test_images),
        integers(test_labels),
        (height, width),
    )
