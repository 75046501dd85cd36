"""A picture a suite: how ours and others compare with eager and with the bare products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

# Figure without pyplot: no global state, and PNG always goes through the Agg backend.
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from benchmarks.results import Record

# What is drawn of a suite: at most four of these, the first that took part, eager being the scale.
NAMES = {
    "ours": "ours: fused layers",
    "fused": "the model after fuse_",
    "mlp": "mlp: FusedMLP, one operator",
    "compile+pass": "torch.compile with our pass",
    "packed": "ours, weights packed",
    "compile": "torch.compile",
    "max-autotune": "torch.compile, max-autotune",
    "reduce-overhead": "torch.compile, reduce-overhead",
    "cublaslt": "ours, policy cublaslt",
    "mlp-cublaslt": "FusedMLP, policy cublaslt",
    "liger": "Liger's LigerSwiGLUMLP",
    "quack-tuned": "QuACK, tuned",
    "quack": "QuACK",
    "flash-attn": "flash-attention's FusedMLP",
    "flash-attn-fused": "flash-attention's FusedMLP, GELU fused",
    "apex": "apex",
    "addmm": "torch._addmm_activation",
    "nvmath": "nvmath-python",
}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # told apart by the colour-blind as well
MARKERS = {"relu": "o", "gelu": "s", "gelu-erf": "D", "silu": "^"}
FILLED = {"bf16": "full", "fp16": "none", "fp32": "left"}
LOSING_SIDE = "#fdecea"
TIMES_EAGER = "times as fast as eager (1: equal)"

Metric = Callable[[Record, str], float | None]


def draw(path: Path, title: str, records: Sequence[Record]) -> bool:
    """Draws `records` of one suite: a column a mode, a row a metric. False: nothing to compare."""
    copied = any("copy" in record.numbers for record in records)
    yardstick = "fraction of a copy's bandwidth" if copied else "fraction of the bare products"
    if any("conv" in record.numbers for record in records):
        yardstick = "fraction of the bare convolution"
    metrics: dict[str, Metric] = {TIMES_EAGER: speedup, yardstick: Record.fraction}
    drawn = {
        label: metric
        for label, metric in metrics.items()
        if any(metric(record, name) is not None for record in records for name in NAMES)
    }
    names = [
        name
        for name in NAMES
        if any(metric(record, name) is not None for record in records for metric in drawn.values())
    ][: len(COLOURS)]
    if not drawn:
        return False

    modes = list(dict.fromkeys(record.case.mode for record in records))
    places = list(dict.fromkeys(place(record) for record in records))
    height = 1.6 + len(drawn) * (0.9 + 0.34 * len(places))
    figure = Figure(figsize=(3 + 4.2 * len(modes), height), dpi=120, layout="constrained")
    head = figure.suptitle(title, fontsize=12, fontweight="bold")
    while head.get_window_extent().width > figure.bbox.width and head.get_fontsize() > 6:
        head.set_fontsize(head.get_fontsize() - 1)
    grid = figure.subplots(len(drawn), len(modes), squeeze=False, sharey=True, sharex="row")
    for row, (label, metric) in zip(grid, drawn.items()):
        for axes, mode in zip(row, modes):
            chosen = [record for record in records if record.case.mode == mode]
            panel(axes, chosen, places, names, metric)
            axes.set(xlabel=label)
            if label == TIMES_EAGER:
                axes.axvspan(1e-6, 1, color=LOSING_SIDE, zorder=0)
            if axes in grid[0]:
                axes.set_title(mode)
    add_legend(figure, legend(records, names))
    figure.savefig(path)
    return True


def add_legend(figure: Figure, handles: Sequence[Line2D]) -> None:
    """Below everything, in as many columns as are not cut off at the figure's edges."""
    for columns in range(6, 0, -1):
        drawn = figure.legend(
            handles=handles, loc="outside lower center", ncols=columns, frameon=False
        )
        figure.draw_without_rendering()  # only then its size is known
        if drawn.get_window_extent().width <= figure.bbox.width or columns == 1:
            return
        drawn.remove()


def speedup(record: Record, name: str) -> float | None:
    return None if name == "eager" else record.times(name)


def place(record: Record) -> str:
    case = record.case
    # The shape of a model names batch and sizes, and T would be pixels where it reads images.
    return case.shape if case.model else f"{case.shape}   {case.amount}"


def panel(
    axes: Axes,
    records: Sequence[Record],
    places: Sequence[str],
    names: Sequence[str],
    metric: Metric,
) -> None:
    """One dot for each contender and case; points of one place are spread over its line."""
    values = []
    for record in records:
        for index, name in enumerate(names):
            value = metric(record, name)
            if value is None:
                continue
            values.append(value)
            offset = (index - (len(names) - 1) / 2) * 0.6 / len(names)
            axes.plot(
                value,
                places.index(place(record)) + offset,
                marker=MARKERS[record.case.activation],
                fillstyle=FILLED[record.case.dtype],
                markerfacecoloralt="white",
                color=COLOURS[index],
                markersize=5.5,
                linestyle="none",
            )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    if values:
        low, high = axes.get_xlim()
        axes.set_xlim(min(low, 0.9, 0.95 * min(values)), max(high, 1.1, 1.05 * max(values)))
    axes.axvline(1, color="#555555", linewidth=1)
    axes.set_yticks(range(len(places)), places)
    axes.set_ylim(len(places) - 0.5, -0.5)
    axes.grid(True, axis="x", color="#e6e9ec", linewidth=0.7)
    for line in range(1, len(places)):
        axes.axhline(line - 0.5, color="#eef0f2", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend(records: Sequence[Record], names: Sequence[str]) -> list[Line2D]:
    def key(label: str, **style: object) -> Line2D:
        return Line2D([], [], linestyle="none", label=label, markersize=6, **style)

    kinds = dict.fromkeys((r.case.activation, r.case.dtype) for r in records)
    return [
        *(key(NAMES[name], marker="o", color=COLOURS[i]) for i, name in enumerate(names)),
        *(
            key(
                f"{activation} {dtype}",
                marker=MARKERS[activation],
                fillstyle=FILLED[dtype],
                markerfacecoloralt="white",
                color="#555555",
            )
            for activation, dtype in kinds
        ),
    ]
