"""README's chart, times as fast as eager, as an SVG: the same numbers give the same bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .expect import MODELS, WAYS
from .results import Result, find, least, median, of_case, shape

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")  # told apart by the colour-blind as well
WIDTH, LEFT, RIGHT, BAR, GAP, TOP = 700, 235, 40, 13, 10, 60  # LEFT is for the rows' names
BOLD = 'font-size="16" font-weight="bold"'
ACTIVATIONS = {"relu": "ReLU", "gelu": "GELU tanh", "gelu-erf": "GELU erf", "silu": "SwiGLU"}
# By its name here, which of the ways it is.
SERIES = {"fuse_": "`fuse_`", "torch.compile": "compile", "with our pass": "our pass"}


def text(x: float, y: float, content: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{content}</text>'


def line(x: float, bottom: float, colour: str) -> str:
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{bottom:.0f}" stroke="{colour}"/>'


def chart(rows: Mapping[str, Mapping[str, float]], series: Sequence[str]) -> str:
    """A group of bars for each row, eager's time over that of at most four series."""
    largest = max((times for row in rows.values() for times in row.values()), default=1.0)
    end = max(2.5, math.ceil(2 * largest) / 2)
    step = 0.5 if end <= 5 else math.ceil(end / 5)
    colours = dict(zip(series, COLOURS))
    height = TOP + sum(len(row) * BAR + GAP for row in rows.values()) + 46
    bottom = height - 46

    def at(times: float) -> float:
        return LEFT + times / end * (WIDTH - LEFT - RIGHT)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="14" fill="#222222">',
        "<title>Time of eager PyTorch over that of each way, of a training step</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        text(16, 24, "Training step, times as fast as eager PyTorch", BOLD),
    ]
    for index, name in enumerate(series):
        x, y = WIDTH - 150 * (len(series) - index), 13 if len(series) < 3 else 33
        parts.append(f'<rect x="{x}" y="{y}" width="13" height="13" fill="{colours[name]}"/>')
        parts.append(text(x + 20, y + 11, name))
    for k in range(math.ceil(end / step)):
        tick = k * step
        parts.append(line(at(tick), bottom, "#222222" if tick == 1 else "#dddddd"))
        label = "1 = eager" if tick == 1 else f"{tick:g}"
        parts.append(text(at(tick), bottom + 18, label, 'text-anchor="middle"'))
    axis = "eager's time over that of each; longer is faster"
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, bottom + 38, axis, 'text-anchor="middle"'))
    y = float(TOP)
    for label, row in rows.items():
        parts.append(text(LEFT - 10, y + len(row) * BAR / 2 + 5, label, 'text-anchor="end"'))
        for name in (name for name in series if name in row):
            width = at(row[name]) - LEFT
            bar = f'<rect x="{LEFT}" y="{y:.0f}" width="{width:.1f}" height="{BAR - 1}"'
            parts.append(f'{bar} fill="{colours[name]}"/>')
            parts.append(text(LEFT + width + 5, y + BAR - 2, f"{row[name]:.2f}", 'font-size="12"'))
            y += BAR
        y += GAP
    return "\n".join([*parts, "</svg>", ""])


def readme_chart(results: Sequence[Result]) -> str:
    """Training steps; torch.compile in the faster of two modes, as people would choose it."""
    rows: dict[str, dict[str, float]] = {}
    for model, activation in MODELS:
        named = find(results, suite="models", model=model, activation=activation, mode="step")
        for result in named:
            label = of_case(f"{{model}}, {ACTIVATIONS[activation]}{{rare_dtype}}")(result)
            for series, way in SERIES.items():
                if time := least(result, WAYS[way]):
                    rows.setdefault(label, {})[series] = median(result, "eager") / time
    blocks = find(results, suite="ffn", dtype="bf16", tokens=8192, mode="step")
    for result in sorted(blocks, key=lambda r: (r["case"]["sizes"], r["case"]["activation"])):
        if (activation := result["case"]["activation"]) != "gelu-erf":
            times = median(result, "eager") / median(result, "ours")
            rows[f"{shape(result['case'])}, {ACTIVATIONS[activation]}"] = {"fuse_": times}
    return chart(rows, list(SERIES))
