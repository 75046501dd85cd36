"""The table that answers first: of a model and a dtype, what to expect."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from .results import Result, find, latest_with, least, shape, table

# The model as it comes, with its own activation.
MODELS = {
    ("ViT-B/16", "gelu-erf"): "ViT-B/16, GELU",
    ("BERT-base", "gelu-erf"): "BERT-base, GELU",
    ("GPT-2 small", "gelu"): "GPT-2 small, GELU (tanh)",
    ("OPT-125M", "relu"): "OPT-125M, ReLU",
    ("LLaMA, 16 layers", "silu"): "LLaMA, 16 layers, SwiGLU",
    ("DLRM top MLP", "relu"): "DLRM top MLP, ReLU",
    ("TD3 critic", "relu"): "TD3 critic, ReLU",
    ("VGG-16", "relu"): "VGG-16, ReLU",
    ("ResNet-50, folded", "relu"): "ResNet-50, folded",
}
LAYERS = (((64, 64), 512), ((1024, 4096), 8192), ((4096, 16384), 8192))  # sizes, tokens
MODES = ("forward", "step")
# The fastest of several contenders counts.
WAYS = {
    "eager": ("eager",),
    "compile": ("compile", "reduce-overhead"),
    "`fuse_`": ("fused",),
    "our pass": ("compile+pass", "reduce-overhead+pass"),
}
LEVEL = 0.02  # what is nearer to the fastest is called level with it


def ratio(found: Sequence[Result], names: Sequence[str], beside: Sequence[str]) -> str:
    """The ratio of the fastest of each, in the latest run in which both took part."""
    run = latest_with(found[0] if found else None, names, beside)
    return f"{least(run, beside) / least(run, names):.2f}" if run else ""


def fastest(found: Sequence[Result]) -> str:
    """The ways that were the fastest, each beside eager in its latest run."""
    beside = {way: ratio(found, names, WAYS["eager"]) for way, names in WAYS.items()}
    times = {way: float(text) for way, text in beside.items() if text}
    best = max(times.values(), default=0.0)
    return ", ".join(way for way, value in times.items() if value >= best * (1 - LEVEL))


def expect(results: Sequence[Result]) -> list[str]:
    rows = []
    for (model, activation), label in MODELS.items():
        named = find(results, suite="models", model=model, activation=activation)
        here = [r for r in named if r["case"]["dtype"] != "amp"]  # which has no inference
        by_mode = [find(here, mode=mode) for mode in MODES]
        if not here:
            continue
        row = [label, here[0]["case"]["dtype"]]
        for found in by_mode:
            row.append(ratio(found, WAYS["`fuse_`"], WAYS["eager"]))
            row.append(ratio(found, WAYS["our pass"], WAYS["compile"]))
        rows.append([*row, fastest(by_mode[1] or by_mode[0])])
    for sizes, tokens in LAYERS:
        layers = find(results, suite="layer", sizes=list(sizes), tokens=tokens, activation="relu")
        for dtype in dict.fromkeys(r["case"]["dtype"] for r in layers):
            row = [f"layer {shape({'sizes': sizes})}, ReLU", dtype]
            for mode in MODES:
                row += [ratio(find(layers, dtype=dtype, mode=mode), ["ours"], ["eager"]), ""]
            rows.append([*row, ""])
    head = ["your model", "dtype", "inference, `fuse_`", "inference, our pass", "step, `fuse_`"]
    return table([*head, "step, our pass", "fastest step"], rows, words=2)


CPU_COLUMNS = {
    "inference, to 32 tokens": ("forward", range(33)),
    "inference, 256 and more": ("forward", range(33, 1 << 20)),
    "step": ("step", range(1 << 20)),
}


def expect_on_a_cpu(results: Sequence[Result]) -> list[str]:
    """Over all sizes and thread counts: the median and the range, of eager's time over ours."""
    cases, rows = find(results, suite="cpu"), []
    for dtype in sorted({r["case"]["dtype"] for r in cases}, reverse=True):
        for activation in ("relu", "gelu", "gelu-erf"):
            row = [dtype, activation]
            for mode, tokens in CPU_COLUMNS.values():
                here = find(cases, dtype=dtype, activation=activation, mode=mode)
                found = [r for r in here if r["case"]["tokens"] in tokens]
                times = sorted(
                    float(text) for r in found if (text := ratio([r], ["ours"], ["eager"]))
                )
                row.append(
                    f"{median(times):.2f} ({times[0]:.2f} to {times[-1]:.2f})" if times else ""
                )
            rows.append(row)
    return table(["dtype", "activation", *CPU_COLUMNS], rows, words=2)
