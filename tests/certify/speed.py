"""Random shapes, ours beside eager, as the benchmark measures them; plans are measured first."""

from __future__ import annotations

import random

import gpu_gate
import torch

from benchmarks import machine
from benchmarks.cases import Case
from benchmarks.results import Record
from certify import parts
from certify.parts import Found
from torch_fused_linear import plans

WIDTHS = (64, 100, 256, 384, 768, 1000, 1024, 1536, 2048, 3072, 4096, 5120, 8192)


def drawn(seed: int, unit: int) -> Case:
    """A layer or a block of two; tokens evenly over the powers of two, and not only powers."""
    choice = random.Random(f"{seed} {unit}")
    suite = choice.choice(("layer", "ffn"))
    first, second = choice.choice(WIDTHS), choice.choice(WIDTHS)
    sizes = (first, second) if suite == "layer" else (first, second, first)
    tokens = round(2 ** choice.uniform(0, 14))
    dtype = choice.choice(("bf16", "fp16", "fp32"))
    activation = choice.choice(("relu", "gelu", "gelu-erf"))
    return Case(suite, sizes, tokens, dtype, activation, choice.choice(("forward", "step")))


class Trial(parts.Trial):
    def __init__(self, device: str, measured: bool) -> None:
        super().__init__(device, measured)
        plans.budget(200)
        machine.warm_up(torch.device(device))

    def one(self, seed: int, unit: int) -> Found:
        return judged(gpu_gate.measured(drawn(seed, unit), torch.device(self.device)))


def judged(record: Record, again=gpu_gate.measured_again) -> Found:
    """Measures again where ours looks slower, as the gate of speed does."""
    verdict = gpu_gate.judge([record], again)
    ratios = verdict["worst_ratios"]
    return {
        "failures": [f"{label}: {ratios[label]} of eager's speed" for label in verdict["below"]],
        "measured": verdict["measured"],
        "below": len(verdict["below"]),
        "ratios": list(ratios.values()),
    }
