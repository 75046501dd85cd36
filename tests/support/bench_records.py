"""Records of the benchmark, made up."""

from __future__ import annotations

from benchmarks.cases import Case
from benchmarks.results import Record
from torch_fused_linear.timing import Number

STEP = Case("layer", (8, 16), 4, "fp32", "relu", "step")


def record_of(case: Case = STEP, **medians: float) -> Record:
    numbers = {name.replace("_", "-"): Number.once(value) for name, value in medians.items()}
    return Record(case, "us", numbers)
