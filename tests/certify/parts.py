"""The parts there are; the module of each has a class Trial that tries one unit."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Found = dict[str, Any]


class Trial(Protocol):
    """How a part tries its units, on a device."""

    def __init__(self, device: str, measured: bool) -> None: ...

    def one(self, seed: int, unit: int) -> Found:
        """Tries one; what it found is summed over all. "failures" lists what is wrong."""

    def verdict(self, found: Found) -> list[str]:
        """What is wrong with the sum, beside the failures of single units."""


@dataclass(frozen=True)
class Part:
    name: str
    about: str
    unit: str  # what is counted
    count: int | None  # how often, unless said otherwise; None: as often as the trial has units
    module: str
    on_gpu_only: bool = False

    def trial(self, device: str, measured: bool) -> Trial:
        return importlib.import_module(f"certify.{self.module}").Trial(device, measured)


FUZZ = "random operators, chains, sizes, layouts, dtypes, policies against fp64, beside eager"
FAULTS = "calls into the libraries and the system that fail, at each of their occurrences"
SOAK = "training with changing shapes in threads, against a serial run and plain torch"
TORCH = "the generic checks of torch.testing._internal, over every operator and layer"
CONFIGS = "random configurations of Inductor, for a model of our layers under our pass"
SANITIZERS = "C++ tests under the compiler's sanitizers, our CUDA kernels under compute-sanitizer"
PARTS = (
    Part("fuzz", FUZZ, "cases", 100_000, "fuzz"),
    Part("faults", FAULTS, "cases", 200, "faults"),
    Part("soak", SOAK, "seconds", 600, "soak"),
    Part("torch", TORCH, "checks", None, "torch_checks"),
    Part("configs", CONFIGS, "configurations", 200, "configs"),
    Part("sanitizers", SANITIZERS, "tools", 6, "sanitizers"),
    Part("speed", "random shapes, ours beside eager", "shapes", 300, "speed", on_gpu_only=True),
)
ALL = {part.name: part for part in PARTS}


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def that_make_sense(device: str) -> list[str]:
    return [p.name for p in PARTS if device == "cuda" or not p.on_gpu_only]
