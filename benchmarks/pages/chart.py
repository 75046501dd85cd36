"""README's chart, times as fast as eager, as an SVG: the same numbers give the same bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .results import Result, find, median, shape

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")  # told apart by the colour-blind as well
WIDTH, LEFT, RIGHT, BAR, GAP, TOP = 700, 235, 40, 13, 10, 60  # LEFT is for the rows' names
# Models as they come, with their own activation.
MODELS = {
    ("GPT-2 small", "gelu"): "GPT-2 small, GELU tanh",
    ("ViT-B/16", "gelu-erf"): "ViT-B/16, GELU erf",
    ("BERT-base", "gelu-erf"): "BERT-base, GELU erf",
    ("OPT-125M", "relu"): "OPT-125M, ReLU",
    ("DLRM top MLP", "relu"): "DLRM top MLP, ReLU",
    ("TD3 critic", "relu"): "TD3 critic, ReLU, fp32",
    ("VGG-16", "relu"): "VGG-16, ReLU",
    ("ResNet-50, folded", "relu"): "ResNet-50, folded, ReLU",
}
BLOCKS = {"relu": "ReLU", "gelu": "GELU tanh"}
# Of each series what it is called, and whose times it has; of several contenders the fastest.
SERIES = {"fused": "fuse_", "compile": "torch.compile", "pass": "with our pass"}
TIMES_OF = {
    "fused": ("fused",),
    "compile": ("compile", "reduce-overhead"),
    "pass": ("compile+pass", "reduce-overhead+pass"),
}


def text(x: float, y: float, content: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{content}</text>'


def line(x: float, bottom: float, colour: str) -> str:
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{bottom:.0f}" stroke="{colour}"/>'


def chart(rows: Mapping[str, Mapping[str, float]], series: Mapping[str, str]) -> str:
    """A group of bars for each row, at most one of each series.

    Args:
        rows: of each, eager's time over a contender's, by the contender.
        series: of each contender, at most four, what it is called.
    """
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
        text(
            16,
            24,
            "Training step, times as fast as eager PyTorch",
            'font-size="16" font-weight="bold"',
        ),
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
    for (model, activation), label in MODELS.items():
        for result in find(
            results, suite="models", model=model, activation=activation, mode="step"
        ):
            for series, names in TIMES_OF.items():
                times = [time for name in names if (time := median(result, name))]
                if times:
                    row = rows.setdefault(label, {})
                    row[series] = median(result, "eager") / min(times)
    blocks = find(results, suite="ffn", dtype="bf16", tokens=8192, mode="step")
    for result in sorted(blocks, key=lambda r: (r["case"]["sizes"], r["case"]["activation"])):
        if activation := BLOCKS.get(result["case"]["activation"]):
            times = median(result, "eager") / median(result, "ours")
            rows[f"{shape(result['case'])}, {activation}"] = {"fused": times}
    return chart(rows, SERIES)
