"""The chart of README, as an SVG: the same results give the same bytes."""

from __future__ import annotations

from collections.abc import Sequence

from .results import Result, find, shape

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
SERIES = {"step": ("training step", "#0072b2"), "forward": ("inference", "#e69f00")}

LEFT, WIDTH, BAR, GAP, TOP = 235, 700, 13, 10, 60
LARGEST = 2.5  # the end of the axis; a larger value is an error


def bars(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Eager's time over ours, of each row of the chart and each series."""
    rows: dict[str, dict[str, float]] = {}
    for (model, activation), label in MODELS.items():
        for result in find(results, suite="models", model=model, activation=activation):
            numbers = result["numbers"]
            times = numbers["eager"]["median"] / numbers["fused"]["median"]
            rows.setdefault(label, {})[result["case"]["mode"]] = times
    blocks = find(results, suite="ffn", dtype="bf16", tokens=8192, mode="step")
    for result in sorted(blocks, key=lambda r: (r["case"]["sizes"], r["case"]["activation"])):
        case, numbers = result["case"], result["numbers"]
        if case["activation"] in BLOCKS:
            label = f"{shape(case)}, {BLOCKS[case['activation']]}"
            times = numbers["eager"]["median"] / numbers["ours"]["median"]
            rows.setdefault(label, {})["step"] = times
    return rows


def at(times: float) -> float:
    if not 0 < times <= LARGEST:
        raise ValueError(f"{times} is outside of the axis")
    return LEFT + times / LARGEST * (WIDTH - LEFT - 40)


def text(x: float, y: float, content: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{content}</text>'


def line(x: float, bottom: float, colour: str) -> str:
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{bottom:.0f}" stroke="{colour}"/>'


def chart(rows: dict[str, dict[str, float]]) -> str:
    height = TOP + sum(len(row) * BAR + GAP for row in rows.values()) + 46
    bottom = height - 46
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="14" fill="#222222">',
        "<title>Time of eager PyTorch over time with fused layers</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        text(16, 24, "Times as fast as eager PyTorch", 'font-size="16" font-weight="bold"'),
    ]
    for index, (name, colour) in enumerate(SERIES.values()):
        x = 400 + 150 * index
        parts.append(f'<rect x="{x}" y="13" width="13" height="13" fill="{colour}"/>')
        parts.append(text(x + 20, 24, name))
    for tick in (0, 0.5, 1, 1.5, 2):
        x = LEFT + tick / LARGEST * (WIDTH - LEFT - 40)
        parts.append(line(x, bottom, "#222222" if tick == 1 else "#dddddd"))
        label = "1 = eager" if tick == 1 else f"{tick:g}"
        parts.append(text(x, bottom + 18, label, 'text-anchor="middle"'))
    axis = "eager's time divided by ours; longer is faster"
    parts.append(text((LEFT + WIDTH - 40) / 2, bottom + 38, axis, 'text-anchor="middle"'))
    y = float(TOP)
    for label, row in rows.items():
        parts.append(text(LEFT - 10, y + len(row) * BAR / 2 + 5, label, 'text-anchor="end"'))
        for mode in (mode for mode in SERIES if mode in row):
            width = at(row[mode]) - LEFT
            bar = f'<rect x="{LEFT}" y="{y:.0f}" width="{width:.1f}" height="{BAR - 1}"'
            parts.append(f'{bar} fill="{SERIES[mode][1]}"/>')
            number = f"{row[mode]:.2f}"
            parts.append(text(LEFT + width + 5, y + BAR - 2, number, 'font-size="12"'))
            y += BAR
        y += GAP
    return "\n".join([*parts, "</svg>", ""])
