"""The two pictures of mnist.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Figure without pyplot: no global state, and PNG always goes through the Agg backend.
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

FUSED, APART = "#0072b2", "#d55e00"
WRONG = "#c62828"
RIGHT = "#2e3d49"
LOSS_POINTS = 120


@dataclass(frozen=True)
class Curve:
    """How one network learned; positions count epochs."""

    name: str
    loss_at: Sequence[float]
    loss: Sequence[float]
    accuracy_at: Sequence[float]
    accuracy: Sequence[float]


def draw_learning(path: Path, title: str, loss_name: str, ours: Curve, other: Curve) -> None:
    """Loss and test accuracy of one network over the epochs, and how far the other's loss is.

    Two curves that coincide would hide each other.
    """
    figure = Figure(figsize=(12, 4.2), dpi=130, layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold")
    losses, apart, accuracies = figure.subplots(1, 3)
    # Single batches are noise; means over some of them show the course.
    batches = math.ceil(len(ours.loss) / LOSS_POINTS)
    at = means(ours.loss_at, batches)
    each = f"mean of every {batches} batches" if batches > 1 else "each batch"
    losses.plot(at, means(ours.loss, batches), color=FUSED)
    losses.set(title=f"Loss of the {ours.name} network, {each}", yscale="log", ylabel=loss_name)
    differences = [abs(a - b) for a, b in zip(ours.loss, other.loss, strict=True)]
    apart.plot(at, means(differences, batches), color=APART)
    apart.set(title=f"... and its distance from the {other.name} one's", ylabel=loss_name)
    apart.ticklabel_format(axis="y", scilimits=(0, 0))
    accuracies.plot(ours.accuracy_at, ours.accuracy, "o-", color=FUSED, markersize=4)
    accuracies.set(title="Accuracy on the test images", ylabel="right answers")
    accuracies.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    for axes in (losses, apart, accuracies):
        axes.set_xlabel("epochs (passes over the training images)")
        axes.set_xlim(left=0)
        axes.grid(True, which="both", color="#e6e9ec", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    apart.set_ylim(bottom=0)
    figure.savefig(path)


def means(values: Sequence[float], group: int) -> list[float]:
    """The mean of every `group` consecutive values; the last group may be shorter."""
    return [float(np.mean(values[i : i + group])) for i in range(0, len(values), group)]


def draw_predictions(
    path: Path,
    title: str,
    images: np.ndarray,
    predicted: np.ndarray,
    true: np.ndarray,
    rows: int = 4,
    columns: int = 10,
) -> None:
    """A grid of test images `[N, height, width]`: at most one row of misread ones, marked, first.

    Of a good network's mistakes a plain excerpt would show one or none.
    """
    misread = np.flatnonzero(predicted != true)
    correct = np.flatnonzero(predicted == true)
    chosen = np.concatenate([misread[:columns], correct])[: rows * columns]
    if len(chosen) < rows * columns:  # few are right: fill up with the other misread ones
        chosen = np.concatenate([chosen, misread[columns:]])[: rows * columns]

    figure = Figure(figsize=(columns * 1.05, rows * 1.5 + 0.9), dpi=130, layout="constrained")
    figure.suptitle(
        f"{title}\n{len(misread)} of {len(true)} test images misread"
        + (" (framed in red)" if len(misread) else ""),
        fontsize=13,
        fontweight="bold",
    )
    for axes in figure.subplots(rows, columns).flat:
        axes.set_visible(False)
    for axes, index in zip(figure.axes, chosen, strict=False):
        wrong = predicted[index] != true[index]
        axes.set_visible(True)
        axes.imshow(images[index], cmap="gray_r", interpolation="nearest")
        axes.set(xticks=[], yticks=[])
        axes.set_title(
            f"read {predicted[index]}, is {true[index]}",
            fontsize=8,
            color=WRONG if wrong else RIGHT,
            fontweight="bold" if wrong else "normal",
        )
        for spine in axes.spines.values():
            spine.set(color=WRONG if wrong else "#d5dade", linewidth=2.2 if wrong else 0.8)
    figure.savefig(path)
