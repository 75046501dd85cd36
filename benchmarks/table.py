"""The table on the terminal: one line a case, printed as soon as it is measured."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.cases import MEMORY_MODES, SUITES, Case
from benchmarks.results import LOSS, REFERENCES, YARDSTICKS, Record

LOSS_MARK = "<"


def number(value: float) -> str:
    return f"{value:.{2 if value < 100 else 1 if value < 1000 else 0}f}"


def ratio(value: float | None, lost: bool = False) -> str:
    return "-" if value is None else f"{value:.2f}{LOSS_MARK if lost else ' '}"


class Table:
    """Lines of equal layout for the cases of one suite, whose contenders are `names`."""

    def __init__(self, cases: Sequence[Case], names: Sequence[str]) -> None:
        self.names = names
        self.ours = [name for name in SUITES[cases[0].suite].ours if name in names]
        self.shape_width = max(len(case.shape) for case in cases)
        self.unit = "MiB" if cases[0].mode in MEMORY_MODES else "us"
        self.has_models = bool(cases[0].model)
        yardsticks = [name for name in YARDSTICKS if name in names]
        titles = {"copy": "of copy", "conv": "of conv"}
        self.yardstick = titles.get(yardsticks[0], "of GEMM") if yardsticks else None
        self.columns = [*self.names, *(f"{name} x" for name in self.ours)]
        self.columns += [f"n {name}" for name in self.ours if self.has_models]
        self.columns += [self.yardstick] if self.yardstick else []
        self.columns += ["spread"] if self.unit == "us" else []

    def head(self) -> str:
        return self._line(("shape", "T", "dtype", "act", self.unit), self.columns)

    def line(self, record: Record) -> str:
        case, numbers = record.case, record.numbers

        def cell(name: str) -> str:
            if name in numbers:
                return number(numbers[name].median)
            return "failed" if name in record.failed else "-"

        cells = [cell(name) for name in self.names]
        cells += [ratio(record.speedup(name), record.lost(name)) for name in self.ours]
        cells += [str(record.replaced.get(name, "-")) for name in self.ours if self.has_models]
        ours = numbers.get(self.ours[0]) if self.ours else None
        cells += [ratio(record.fraction("ours"))] if self.yardstick else []
        spread = f"{(ours.q3 - ours.q1) / ours.median:.1%}" if ours else "-"
        cells += [spread] if self.unit == "us" else []
        label = (case.shape, case.tokens, case.dtype, case.activation, case.mode)
        return self._line(label, cells)

    def _line(self, label: Sequence[object], cells: Sequence[str]) -> str:
        shape, tokens, dtype, activation, mode = label
        left = f"{shape:<{self.shape_width}} {tokens:>6} {dtype:<5} {activation:<8} {mode:<11}"
        widths = (max(8, len(column) + 1) for column in self.columns)
        return left + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths))

    def foot(self, records: Sequence[Record]) -> str:
        compared = [r for r in records for name in self.ours if r.speedup(name) is not None]
        lost = [r for r in records for name in self.ours if r.lost(name)]
        others = " or ".join(dict.fromkeys(REFERENCES.get(name, "eager") for name in self.ours))
        return (
            f"x: times better than {others}; {len(lost)} of {len(compared)} below {LOSS:.2f}"
            f" (marked {LOSS_MARK})"
            + ("; n: blocks fused, operators put in" if self.has_models else "")
        )


def details(record: Record) -> list[str]:
    """Lines for what the table has no room for: reasons of failure, kernels."""
    lines = [f"  {name} failed: {reason}" for name, reason in record.failed.items()]
    for name, kernels in record.kernels.items():
        lines += [f"  {name}: {kernel}" for kernel in kernels]
    for name, seen in record.observed.items():
        lines.append(f"  {name}: " + ", ".join(f"{what} {n:.0f}" for what, n in seen.items()))
    return lines
