"""Bars of times as fast as eager, as an SVG: the same numbers give the same bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")  # told apart by the colour-blind as well
WIDTH, RIGHT, BAR, GAP, TOP = 700, 40, 13, 10, 60


def text(x: float, y: float, content: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{content}</text>'


def line(x: float, bottom: float, colour: str) -> str:
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{bottom:.0f}" stroke="{colour}"/>'


def chart(
    rows: Mapping[str, Mapping[str, float]], series: Mapping[str, str], left: int = 235
) -> str:
    """A group of bars for each row, at most one of each series; `left` is for the rows' names.

    Args:
        rows: of each, eager's time over a contender's, by the contender.
        series: of each contender, at most four, what it is called.
        left: where the axis begins.
    """
    largest = max((times for row in rows.values() for times in row.values()), default=1.0)
    end = max(2.5, math.ceil(2 * largest) / 2)
    step = 0.5 if end <= 5 else math.ceil(end / 5)
    colours = dict(zip(series, COLOURS))
    height = TOP + sum(len(row) * BAR + GAP for row in rows.values()) + 46
    bottom = height - 46

    def at(times: float) -> float:
        return left + times / end * (WIDTH - left - RIGHT)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="14" fill="#222222">',
        "<title>Time of eager PyTorch over time with fused layers</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        text(16, 24, "Times as fast as eager PyTorch", 'font-size="16" font-weight="bold"'),
    ]
    for index, (name, label) in enumerate(series.items()):
        x, y = WIDTH - 150 * (len(series) - index), 13 if len(series) < 3 else 33
        parts.append(f'<rect x="{x}" y="{y}" width="13" height="13" fill="{colours[name]}"/>')
        parts.append(text(x + 20, y + 11, label))
    for k in range(math.ceil(end / step)):
        tick = k * step
        parts.append(line(at(tick), bottom, "#222222" if tick == 1 else "#dddddd"))
        label = "1 = eager" if tick == 1 else f"{tick:g}"
        parts.append(text(at(tick), bottom + 18, label, 'text-anchor="middle"'))
    axis = "eager's time divided by ours; longer is faster"
    parts.append(text((left + WIDTH - RIGHT) / 2, bottom + 38, axis, 'text-anchor="middle"'))
    y = float(TOP)
    for label, row in rows.items():
        parts.append(text(left - 10, y + len(row) * BAR / 2 + 5, label, 'text-anchor="end"'))
        for name in (name for name in series if name in row):
            width = at(row[name]) - left
            bar = f'<rect x="{left}" y="{y:.0f}" width="{width:.1f}" height="{BAR - 1}"'
            parts.append(f'{bar} fill="{colours[name]}"/>')
            parts.append(text(left + width + 5, y + BAR - 2, f"{row[name]:.2f}", 'font-size="12"'))
            y += BAR
        y += GAP
    return "\n".join([*parts, "</svg>", ""])
