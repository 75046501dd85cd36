"""Pictures: a model's blocks before and after fuse_, and what `gain` measured, as bars."""

from collections.abc import Mapping
from itertools import pairwise, repeat
from operator import sub
from os import PathLike

from ..activations import ACTIVATIONS

WIDTH, HEIGHT, GAP = 1.35, 0.5, 0.4  # of a box, and between boxes
ROW = 1.0
# The fused box is as wide as what it stands for, so that the eye sees what went into it.
LABELS = {a.operator: a.label.partition(" ")[0] for a in ACTIVATIONS.values()}  # without the form
COLOURS = {
    **dict.fromkeys(("MatMul", "Conv2d"), "#cfe3f5"),
    **dict.fromkeys(("BiasAdd", "Mul"), "#e3edd2"),
    **dict.fromkeys(LABELS.values(), "#fbe0c3"),
    "Dropout": "#eceff1",
    "linear": "#2a6f97",
}
GATED = ("gated_mlp", "linear_glu")
INK = "#12304a"
FAINT = "#6b7a86"
BARS = ("#9aa5b1", "#56b4e9", "#e69f00", "#009e73", "#0072b2")  # for the colour-blind as well
Bar = tuple[float, float, float]  # the median and the quartiles
ARROW = {"arrowstyle": "-|>", "color": INK, "lw": 1.1, "shrinkA": 0, "shrinkB": 0}


def new_figure(width: float, height: float):
    try:
        from matplotlib.figure import Figure  # without pyplot: no global state
    except ImportError as error:
        raise ImportError("save_picture: expected matplotlib to be installed, got none") from error
    return Figure(figsize=(width, height), dpi=130)


def draw_bars(
    path: str | PathLike, title: str, panels: Mapping[str, tuple[Mapping[str, Bar], float]]
) -> None:
    """A panel for each name that has bars, scaled by a factor; whiskers are the quartiles."""
    panels = {name: (bars, scale) for name, (bars, scale) in panels.items() if bars}
    labels = dict.fromkeys(label for bars, _ in panels.values() for label in bars)
    colours = dict(zip(labels, BARS))  # of a way the same in all panels
    figure = new_figure(9, 0.7 + 1.9 * len(panels))
    figure.set_layout_engine("constrained")
    figure.suptitle(title if panels else f"{title}: nothing was measured", fontsize=11)
    for row, (name, (bars, scale)) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(len(panels), 1, row)
        middles, lows, highs = ([scale * n for n in numbers] for numbers in zip(*bars.values()))
        whiskers = list(map(sub, middles, lows)), list(map(sub, highs, middles))
        each = [colours[label] for label in bars]
        drawn = axes.barh(list(bars), middles, height=0.6, color=each, xerr=whiskers)
        axes.bar_label(drawn, fmt="%.4g", padding=4, fontsize=9)
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_title(name, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def draw_blocks(path: str | PathLike, patterns: dict) -> None:
    """Two rows for each kind of block: the operators before, and after in the same columns."""
    columns = max((len(before) for before, _ in patterns), default=1)
    width = columns * (WIDTH + GAP) + 1.6
    height = max(len(patterns), 1) * 3 * ROW + 0.3
    figure = new_figure(width, height)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    if not patterns:
        axes.text(0.3, height / 2, "nothing was fused", color=INK, va="center")
    for k, ((before, after), blocks) in enumerate(patterns.items()):
        kinds = list(dict.fromkeys(block.kind for block in blocks))
        shown = ", ".join(kinds[:3]) + (" ..." if len(kinds) > 3 else "")
        draw_pattern(axes, 0.45 + 3 * ROW * k, before, after, f"{len(blocks)} × {shown}")
    # letters stay letters: searchable, and small
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "torch_fused_linear"}):
        figure.savefig(path)


def draw_pattern(
    axes, top: float, before: tuple[str, ...], after: tuple[str, ...], title: str
) -> None:
    axes.text(0.3, top, title, color=INK, fontsize=11, fontweight="bold", va="center")
    rows = {"before": zip(before, range(len(before)), repeat(1))}
    rows["after"] = ((name, *span) for name, span in zip(after, spans(before, after)))
    for k, (name, boxes) in enumerate(rows.items()):
        y = top + 0.75 + ROW * k
        axes.text(0.3, y, name, color=FAINT, fontsize=9, va="center")
        ends = [draw_box(axes, *box, y) for box in boxes]
        for (_, start), (end, _) in pairwise(ends):
            axes.annotate("", (end, y), (start, y), arrowprops=ARROW)


def spans(before: tuple[str, ...], after: tuple[str, ...]) -> list[tuple[int, int]]:
    """Returns for each operator after fusing its first column, and how many operators before it
    replaces.

    A fused operator replaces all from its MatMul or Conv2d up to the next one, except dropouts,
    which follow it. ``mlp`` and a gated operator replace several such groups.
    """
    products = ("MatMul", "Conv2d")
    starts = [i for i, operator in enumerate(before) if operator in products] + [len(before)]
    found: list[tuple[int, int]] = []
    for operator in after:
        if operator == "Dropout":
            column, span = sum(found[-1]), 1
        else:
            column = starts.pop(0)
            if operator.startswith("mlp"):  # "mlp (ReLU)" is of two layers, "mlp (ReLU) × 3" of 3
                del starts[: int(operator.rpartition("×")[2]) - 1 if "×" in operator else 1]
            if operator.startswith(GATED):  # to its product, and with the layer after it
                product = before.index("Mul", column)
                starts = [start for start in starts if start > product]
                del starts[: operator.startswith(GATED[0])]
            end = starts[0]
            span = end - column - before[column:end].count("Dropout")
        found.append((column, span))
    return found


def draw_box(axes, operator: str, column: int, span: int, y: float) -> tuple[float, float]:
    from matplotlib.patches import FancyBboxPatch

    x = 1.3 + column * (WIDTH + GAP)
    width = span * WIDTH + (span - 1) * GAP
    fused = operator.startswith(("linear", "conv2d", "mlp", GATED[0]))
    colour = COLOURS.get("linear" if fused else operator.partition(" ")[0], "#ffffff")
    style = "round,pad=0,rounding_size=0.08"
    box = (x, y - HEIGHT / 2), width, HEIGHT
    axes.add_patch(FancyBboxPatch(*box, boxstyle=style, facecolor=colour, edgecolor=INK, lw=0.8))
    colour = "white" if fused else INK
    axes.text(x + width / 2, y, operator, color=colour, fontsize=9.5, ha="center", va="center")
    return x, x + width
