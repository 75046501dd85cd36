"""What was found of a model, as text, as data for JSON, and in a sentence."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any

from ..fuse.report import Report
from ..timing import Number
from .share import Share
from .ways import COMPILED, EAGER, FUSED, OURS

HOW = {FUSED: "fuse_(model)", OURS: "torch.compile(model, options=compile_options())"}
HOW |= {COMPILED: "torch.compile(model)", EAGER: "the model as it is"}
# Two correct results are apart by about what the last digit of each weight makes.
LARGEST = 20


@dataclass(frozen=True)
class Mode:
    """What was measured in inference, or of a training step.

    Attributes:
        share: the part of the time that lies in what can be fused.
        times (dict): microseconds of a call, by way; each has a ``median`` and quartiles.
        memory (dict): bytes that a call takes at most, by way; on a GPU.
        apart (dict): how far results (of a step, gradients) are from eager's, as a part of them.
        rounding: how far eager's are when each weight's last binary digit is another.
        failed (dict): what became of the ways that could not be run.
        replaced (dict): how often the pass of ``torch.compile`` put in each operator.
    """

    share: Share
    rounding: float
    apart: dict[str, float] = field(default_factory=dict)
    times: dict[str, Number] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, int] = field(default_factory=dict)

    def ratio(self, name: str, reference: str = EAGER) -> float:
        return self.times[reference].median / self.times[name].median

    def is_faster(self, name: str, reference: str = EAGER) -> bool:
        """Whether three quarters of its rounds were faster than three quarters of the other's."""
        return self.times[name].q3 < self.times[reference].q1

    def beside_eager(self, name: str) -> str:
        """How many times as fast as eager it is, where noise can be ruled out."""
        if name == EAGER:
            return ""
        differs = self.is_faster(name) or self.is_faster(EAGER, name)
        return f"{self.ratio(name):.2f} times eager" if differs else "within noise"

    def fastest(self, *names: str) -> str | None:
        found = [name for name in names if name in self.times]
        return min(found, key=lambda name: self.times[name].median, default=None)

    @property
    def wrong(self) -> list[str]:
        """Ways of ours whose results are farther from eager's than rounding takes them."""
        limit = LARGEST * self.rounding
        return [
            name for name in (FUSED, OURS) if name in self.apart and not self.apart[name] <= limit
        ]

    @property
    def verdict(self) -> str:
        if self.wrong:
            return f"do not use {HOW[self.wrong[0]]}: its results are not eager's; please report it"
        for name, reference in ((FUSED, EAGER), (OURS, COMPILED)):
            if name in self.failed and reference not in self.failed:
                return f"do not use {HOW[name]}: it failed; please report it"
        ours, theirs = self.fastest(FUSED, OURS), self.fastest(EAGER, COMPILED)
        if ours is None:
            return "leave it: nothing was measured"
        less = self.memory[ours] / self.memory[theirs] if self.memory else 1.0
        memory = f", with {less:.2f} of its memory" if less < 0.98 else ""
        if self.is_faster(ours, theirs):
            beside = [name for name in (theirs, EAGER) if name in self.times]
            gains = [f"{self.ratio(ours, name):.2f} times {name}" for name in dict.fromkeys(beside)]
            return f"use {HOW[ours]}: {', '.join(gains)}{memory}"
        if self.is_faster(theirs, ours):
            return (
                f"leave it: {HOW[theirs]} is faster, {self.ratio(theirs, ours):.2f} times{memory}"
            )
        return f"leave it: the gain is within noise{memory}"

    def share_in_words(self) -> str:
        if not self.share.fusable:
            return "nothing that can be fused runs; torch may take a fast path of its own"
        return (
            f"{self.share.part:.0%} of the time is in layers that can be fused; if all but their "
            f"matrix products were free: {self.share.most:.2f} times eager"
        )

    def lines(self) -> list[str]:
        lines = [self.share_in_words()]
        for name, time in self.times.items():
            quartiles = f"{scaled(time.q1)} to {scaled(time.q3)}"
            row = f"  {name:18} {scaled(time.median):>9} ms  ({quartiles})"
            if name in self.memory:
                row += f"  {self.memory[name] / 2**20:.0f} MiB"
            lines.append(f"{row}  {self.beside_eager(name)}".rstrip())
        lines += [f"  {name:18} failed: {why}" for name, why in self.failed.items()]
        for name, apart in self.apart.items():
            lines.append(
                f"  {name} differs from eager by {apart:.1e} of its size; the last digit of each "
                f"weight makes {self.rounding:.1e}"
                if apart
                else f"  {name} gives eager's bits"
            )
        if OURS in self.times:
            put_in = ", ".join(f"{count} {operator}" for operator, count in self.replaced.items())
            lines.append(f"  {OURS} put in {put_in or 'nothing'}")
        return [*lines, f"  {self.verdict}"]


@dataclass(frozen=True)
class Gain:
    """What fusing brings a model.

    Attributes:
        report: what :func:`torch_fused_linear.fuse_` fuses in it and leaves alone.
        device: its name.
        dtype: of the parameters, or of autocast.
        modes (dict): ``"inference"`` and, if asked for, ``"step"``; empty if nothing can be fused.
    """

    report: Report
    device: str
    dtype: str
    modes: dict[str, Mode]

    @property
    def verdict(self) -> str:
        """A sentence for each mode."""
        if not self.modes:
            return "leave it: nothing in it can be fused"
        return "; ".join(f"{name}: {mode.verdict}" for name, mode in self.modes.items())

    def as_dict(self) -> dict[str, Any]:
        """All of it in numbers, text and lists, for JSON."""
        found = asdict(self)
        for name, mode in self.modes.items():
            found["modes"][name]["verdict"] = mode.verdict
            found["modes"][name]["share"] |= {"part": mode.share.part, "most": mode.share.most}
        return {**found, "verdict": self.verdict}

    def save_picture(self, path: str | PathLike) -> None:
        """Draws times and memory as bars.

        Args:
            path: the file to write; its ending names the format, such as ``.svg`` or ``.png``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from .picture import draw_bars

        panels = {}
        for name, mode in self.modes.items():
            panels[f"{name}, ms: {mode.verdict}"] = {
                way: (n.median / 1e3, n.q1 / 1e3, n.q3 / 1e3, mode.beside_eager(way))
                for way, n in mode.times.items()
            }
            if mode.memory:
                sizes = {way: size / 2**20 for way, size in mode.memory.items()}
                panels[f"{name}, MiB at most"] = {way: (n, n, n, "") for way, n in sizes.items()}
        title = f"{self.device}, {self.dtype}" + ("" if panels else f": {self.verdict}")
        draw_bars(path, title, panels)

    def __str__(self) -> str:
        lines = [f"{self.device}, {self.dtype}", str(self.report).split("\n", 1)[0]]
        for name, mode in self.modes.items():
            first, *rest = mode.lines()
            lines += ["", f"{name}: {first}", *rest]
        if not self.modes:
            lines.append(self.verdict)
        elif self.device == "CPU":
            lines += ["", "On a CPU most layers run PyTorch's own kernels, fused or not."]
        return "\n".join(lines)


def scaled(microseconds: float) -> str:
    milliseconds = microseconds / 1e3
    return f"{milliseconds:.{max(0, 3 - len(str(int(milliseconds))))}f}"
