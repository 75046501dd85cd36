"""The two pictures that the demo leaves behind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Figure without pyplot: no global state, and PNG always goes through the Agg backend.
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

# The first curve is a broad light band and the second a thin dark dashed line upon it, because
# the two nearly coincide and both are to be seen.
CURVE_STYLES = (
    {"color": "#7fb8e6", "linewidth": 5.0, "solid_capstyle": "round"},
    {"color": "#12304a", "linewidth": 1.3, "linestyle": (0, (4, 2))},
)
MARKERS = ({"marker": "o", "markersize": 9}, {"marker": "o", "markersize": 3})
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


def draw_learning(path: Path, title: str, loss_name: str, curves: Sequence[Curve]) -> None:
    """Loss (left) and test accuracy (right) of all `curves` over the epochs."""
    figure = Figure(figsize=(11, 4.6), dpi=130, layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold")
    losses, accuracies = figure.subplots(1, 2)
    # Single batches are noise; means over the same batches for every curve show the course.
    batches = math.ceil(max(len(curve.loss) for curve in curves) / LOSS_POINTS)
    for curve, style, marker in zip(curves, CURVE_STYLES, MARKERS, strict=True):
        at, loss = means(curve.loss_at, batches), means(curve.loss, batches)
        losses.plot(at, loss, label=curve.name, **style)
        accuracies.plot(curve.accuracy_at, curve.accuracy, label=curve.name, **style, **marker)
    each = f"every {batches} batches" if batches > 1 else "each batch"
    losses.set(title=f"Training loss, mean of {each}", ylabel=f"{loss_name} (log)", yscale="log")
    accuracies.set(title="Accuracy on the test images", ylabel="right answers")
    accuracies.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    for axes in (losses, accuracies):
        axes.set_xlabel("epochs (passes over the training images)")
        axes.set_xlim(left=0)
        axes.grid(True, which="both", color="#e6e9ec", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
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
    classes: Sequence[str] = tuple("0123456789"),
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

    gap = " " if all(len(name) == 1 for name in classes) else "\n"
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
            f"read {classes[predicted[index]]},{gap}is {classes[true[index]]}",
            fontsize=8,
            color=WRONG if wrong else RIGHT,
            fontweight="bold" if wrong else "normal",
        )
        for spine in axes.spines.values():
            spine.set(color=WRONG if wrong else "#d5dade", linewidth=2.2 if wrong else 0.8)
    figure.savefig(path)
