"""The parts there are; the module of each has a class Trial that tries one unit."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

Found = dict[str, Any]


class Trial:
    """How a part tries its units, on a device."""

    def __init__(self, device: str, measured: bool) -> None:
        torch.set_num_threads(1)
        self.device = device

    def one(self, seed: int, unit: int) -> Found:
        """Tries one; what it found is summed over all. "failures" lists what is wrong."""
        raise NotImplementedError

    def plain(self, seed: int, unit: int) -> None:
        """Does of a unit what plain torch does of it, which may end the process."""

    @staticmethod
    def verdict(found: Found, device: str) -> list[str]:
        """Faults of the sum, beside the failures of single units."""
        return []

    @staticmethod
    def environment() -> dict[str, str]:
        """Environment variables that the process needs from its start on."""
        return {}


@dataclass(frozen=True)
class Part:
    name: str
    about: str
    unit: str  # what is counted
    count: int | None  # how often, unless said otherwise; None: as often as the trial has units
    module: str
    on_gpu_only: bool = False

    @property
    def trial(self) -> type[Trial]:
        return importlib.import_module(f"certify.{self.module}").Trial


FUZZ = "random operators, chains, sizes, layouts, dtypes, policies against fp64, beside eager"
FAULTS = "calls into the libraries and the system that fail, at each of their occurrences"
SOAK = "training with changing shapes in threads, against a serial run and plain torch"
TORCH = "torch's own checks, gradcheck and opcheck among them, over every operator"
CONFIGS = "random configurations of Inductor, for a model of our layers under our pass"
SANITIZERS = "C++ tests under the compiler's sanitizers, our CUDA kernels under compute-sanitizer"
PARTS = (
    Part("fuzz", FUZZ, "cases", 100_000, "fuzz"),
    Part("faults", FAULTS, "cases", 200, "faults"),
    Part("soak", SOAK, "seconds", 600, "soak"),
    Part("torch", TORCH, "checks", None, "torch_checks"),
    Part("configs", CONFIGS, "configurations", 200, "configs"),
    Part("sanitizers", SANITIZERS, "tools", None, "sanitizers"),
    Part("speed", "random shapes, ours beside eager", "shapes", 300, "speed", on_gpu_only=True),
)
ALL = {part.name: part for part in PARTS}


def that_make_sense(device: str) -> Sequence[str]:
    return [p.name for p in PARTS if device == "cuda" or not p.on_gpu_only]
