"""Small files in MNIST's format."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np

from examples.digits import data as digits_data


def write_idx(path: Path, values: np.ndarray) -> None:
    """`values` in the idx format, gzipped where the name ends in .gz."""
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    raw = header + values.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def write_mnist(directory: Path, suffixes: tuple[str, str] = ("", ".gz")) -> dict[str, np.ndarray]:
    """A tiny MNIST that a network can learn: digit d is a bright bar in rows 2d and 2d + 1.

    The training files get the first suffix, the test files the second.
    """
    random = np.random.default_rng(0)
    parts: dict[str, np.ndarray] = {}
    for split, count in (("train", 2700), ("test", 200)):
        labels = random.integers(0, 10, count)
        images = random.integers(0, 60, (count, 28, 28))
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 2] += 190
        parts[f"{split}_images"], parts[f"{split}_labels"] = images, labels
    for part, name in digits_data.MNIST_FILES.items():
        write_idx(directory / (name + suffixes[part.startswith("test")]), parts[part])
    return parts
