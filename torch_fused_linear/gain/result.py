"""The result of ``gain``: as text, as data for JSON, as bars, and in a sentence."""

from dataclasses import dataclass, field
from os import PathLike

from .._support.picture import draw_bars
from ..fuse.report import Report
from ..report import table
from ..timing import Number

EAGER, FUSED, COMPILED, OURS = "eager", "fuse_", "torch.compile", "compile_options()"
# Two correct results are apart by about what the rounding of each weight makes.
LARGEST = 20
NOISE = "within noise"
HEAD = ("", "ms", "quartiles", "MiB", "beside eager", "results differ by")


def milliseconds(us: float) -> str:
    """Formats microseconds as milliseconds, with four digits and at most three decimals."""
    whole = len(f"{us / 1e3:.0f}")
    return f"{us / 1e3:.{max(4 - whole, 0)}f}"


@dataclass
class Mode:
    """The measurements of inference, or of a training step.

    Attributes:
        share: the part of the time, from 0 to 1, that is spent in layers that can be fused.
        most: how many times as fast as eager the model would be if only matrix products took time
            there.
        rounding: how far eager's results differ when weights move by their rounding.
        times (dict): microseconds of a call, by way; each has a ``median`` and quartiles.
        memory (dict): the most bytes that a call takes, by way; on a GPU.
        apart (dict): how far results (of a step, gradients) differ from eager's, relative to them.
        failed (dict): the errors of the ways that could not be run.
    """

    share: float = 0.0
    most: float = 1.0
    rounding: float = 0.0
    times: dict[str, Number] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    apart: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def ratio(self, name: str, reference: str) -> str:
        """Returns how many times as fast it is, or that the difference is within the quartiles."""
        mine, other = self.times[name], self.times[reference]
        gap = max(other.q1 - mine.q3, mine.q1 - other.q3)
        if gap > max(mine.q3 - mine.q1, other.q3 - other.q1):
            return f"{other.median / mine.median:.2f} times"
        return NOISE

    @property
    def verdict(self) -> str:
        for name, reference in ((FUSED, EAGER), (OURS, COMPILED)):
            if not self.apart.get(name, 0.0) <= LARGEST * self.rounding:  # also where it is NaN
                return f"do not use {name}: its results are not eager's; please report it"
            if name in self.failed and reference not in self.failed:
                return f"do not use {name}: it failed; please report it"
        ways = sorted(self.times, key=lambda way: self.times[way].median)
        ours = next((way for way in ways if way in (FUSED, OURS)), None)
        theirs = next((way for way in ways if way in (EAGER, COMPILED)), None)
        if not ours or not theirs:
            return "leave it: nothing was measured"
        is_noise = self.ratio(ours, theirs) == NOISE
        if ours != ways[0] and not is_noise:
            return f"leave it: {theirs} is faster, {self.ratio(theirs, ours)}"
        faster_than = [] if is_noise else [way for way in ways if way in (theirs, EAGER)]
        gains = [f"{self.ratio(ours, way)} {way}" for way in faster_than]
        if self.memory and self.memory[ours] < 0.95 * self.memory[theirs]:
            less = self.memory[ours] / self.memory[theirs]
            gains.append(f"{less:.2f} of the memory of {theirs}")
        return f"use {ours}: {', '.join(gains)}" if gains else f"leave it: the gain is {NOISE}"

    def lines(self) -> list[str]:
        share = f"{self.share:.0%} of the time is in layers that can be fused; if all but their "
        share += f"matrix products were free: {self.most:.2f} times eager"
        rows = [
            (
                way,
                milliseconds(time.median),
                f"{milliseconds(time.q1)} to {milliseconds(time.q3)}",
                f"{self.memory[way] / 2**20:.0f}" if way in self.memory else "",
                self.ratio(way, EAGER) if way != EAGER and EAGER in self.times else "",
                f"{self.apart[way]:.1e}" if way in self.apart else "",
            )
            for way, time in self.times.items()
        ]
        return [
            share if self.share else "nothing that can be fused runs; torch may have a fast path",
            *(["", *table(HEAD, rows)] if rows else []),
            *(f"{way} failed: {why}" for way, why in self.failed.items()),
            f"(eager's results differ by {self.rounding:.1e} when weights move by their rounding)",
            self.verdict,
        ]


@dataclass(frozen=True)
class Gain:
    """The result of :func:`torch_fused_linear.gain`. Printed, it is a report.

    Attributes:
        report: what :func:`torch_fused_linear.fuse_` fuses in the model and leaves alone.
        where: the device's name, and the dtype.
        modes (dict): ``"inference"`` and, if asked for, ``"step"``; empty if nothing can be fused.
    """

    report: Report
    where: str
    modes: dict[str, Mode]

    @property
    def verdict(self) -> str:
        """Returns a sentence for each mode."""
        each = "; ".join(f"{name}: {mode.verdict}" for name, mode in self.modes.items())
        return each or "leave it: nothing in it can be fused"

    def save_picture(self, path: str | PathLike) -> None:
        """Draws times and memory as bars.

        Args:
            path: the file to write; its ending names the format, such as ``.svg`` or ``.png``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        panels = {}
        for name, mode in self.modes.items():
            times = {way: (n.median, n.q1, n.q3) for way, n in mode.times.items()}
            panels[f"{name}, ms"] = times, 1e-3
            panels[f"{name}, MiB at most"] = {w: (n,) * 3 for w, n in mode.memory.items()}, 2**-20
        draw_bars(path, self.where, panels)

    def __str__(self) -> str:
        lines = [self.where, str(self.report).split("\n", 1)[0]]
        for name, mode in self.modes.items():
            first, *rest = mode.lines()
            lines += ["", f"{name}: {first}", *rest]
        if not self.modes:
            lines.append(self.verdict)
        elif self.where.startswith("CPU"):
            lines += ["", "On a CPU most layers run PyTorch's own kernels, fused or not."]
        return "\n".join(lines)
