"""What README's chart shows."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.chart import chart

from .results import Result, find, median, shape

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
SERIES = {"step": "training step", "forward": "inference"}


def readme_chart(results: Sequence[Result]) -> str:
    rows: dict[str, dict[str, float]] = {}
    for (model, activation), label in MODELS.items():
        for result in find(results, suite="models", model=model, activation=activation):
            times = median(result, "eager") / median(result, "fused")
            rows.setdefault(label, {})[result["case"]["mode"]] = times
    blocks = find(results, suite="ffn", dtype="bf16", tokens=8192, mode="step")
    for result in sorted(blocks, key=lambda r: (r["case"]["sizes"], r["case"]["activation"])):
        if activation := BLOCKS.get(result["case"]["activation"]):
            times = median(result, "eager") / median(result, "ours")
            rows[f"{shape(result['case'])}, {activation}"] = {"step": times}
    return chart(rows, SERIES)
