"""Images of handwritten digits: scikit-learn's, or MNIST."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# Mean and standard deviation of all training pixels, which are scaled to [0, 1] first.
DIGITS_STATISTICS = (0.305, 0.376)
MNIST_STATISTICS = (0.1307, 0.3081)  # the constants that everybody uses for MNIST


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
        """Returns the data on `device`, with images of `dtype`."""
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
    title = "scikit-learn's handwritten digits"
    return _dataset(title, 16, DIGITS_STATISTICS, train_x, train_y, test_x, test_y)


def load_mnist(directory: Path) -> Dataset:
    """MNIST as torchvision keeps it in a directory; downloaded where it is not there."""
    from torchvision.datasets import MNIST

    splits = (MNIST(directory, train=is_train, download=True) for is_train in (True, False))
    parts = (part.numpy() for split in splits for part in (split.data, split.targets))
    return _dataset("MNIST", 255, MNIST_STATISTICS, *parts)


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
