"""Times and memory of a model's ways, as bars."""

from __future__ import annotations

from os import PathLike

from .result import Gain
from .ways import COMPILED, EAGER, FUSED, OURS

# Told apart by the colour-blind as well.
COLOURS = {EAGER: "#9aa5b1", COMPILED: "#e69f00", FUSED: "#0072b2", OURS: "#009e73"}


def draw(path: str | PathLike, gain: Gain) -> None:
    """A panel for the time of each mode and one for its memory; whiskers are the quartiles."""
    try:
        from matplotlib.figure import Figure  # without pyplot: no global state
    except ImportError as error:
        raise ImportError("save_picture: expected matplotlib to be installed, got none") from error

    panels = []
    for name, mode in gain.modes.items():
        bars = {way: (n.median / 1e3, n.q1 / 1e3, n.q3 / 1e3) for way, n in mode.times.items()}
        panels.append((f"{name}, ms", bars))
        if mode.memory:
            bars = {way: (size / 2**20,) * 3 for way, size in mode.memory.items()}
            panels.append((f"{name}, MiB at most", bars))
    figure = Figure(figsize=(9, 0.9 + 1.9 * max(1, len(panels))), dpi=130, layout="constrained")
    figure.suptitle(f"{gain.device}, {gain.dtype}", fontweight="bold")
    if not panels:
        figure.text(0.05, 0.4, gain.verdict)
    for index, (title, bars) in enumerate(panels):
        axes = figure.add_subplot(len(panels), 1, index + 1)
        for way, (value, low, high) in bars.items():
            axes.barh(way, value, color=COLOURS[way], xerr=[[value - low], [high - value]])
            axes.annotate(f" {value:.4g}", (high, way), va="center", fontsize=9)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
