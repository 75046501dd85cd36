"""Times and memory of a model's ways, as bars."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike

from .ways import COMPILED, EAGER, FUSED, OURS

# Told apart by the colour-blind as well.
COLOURS = {EAGER: "#9aa5b1", COMPILED: "#e69f00", FUSED: "#56b4e9", OURS: "#009e73"}
Bar = tuple[float, float, float, str]  # its length, the quartiles, and what is said of it


def draw_bars(path: str | PathLike, title: str, panels: Mapping[str, Mapping[str, Bar]]) -> None:
    """A panel for each title, and in it a bar for each way; whiskers are the quartiles."""
    try:
        from matplotlib.figure import Figure  # without pyplot: no global state
    except ImportError as error:
        raise ImportError("save_picture: expected matplotlib to be installed, got none") from error

    rows = sum(map(len, panels.values()))
    size = (9, 0.6 + 0.75 * len(panels) + 0.32 * rows)
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    figure.suptitle(title, fontsize=11, fontweight="bold")
    heights = [1 + len(bars) for bars in panels.values()]
    grid = figure.add_gridspec(len(panels), 1, height_ratios=heights) if panels else ()
    for place, (name, bars) in zip(grid, panels.items()):
        axes = figure.add_subplot(place)
        for way, (value, low, high, said) in bars.items():
            error = [[value - low], [high - value]] if high > low else None
            axes.barh(way, value, height=0.6, color=COLOURS.get(way, "#0072b2"), xerr=error)
            axes.annotate(f"  {value:.4g}   {said}", (high, way), va="center", fontsize=9)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.35 * max(bar[2] for bar in bars.values()))
        axes.set_title(name, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
