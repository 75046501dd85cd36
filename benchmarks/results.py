"""One record a case, and the JSON file that holds them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cases import Case
from benchmarks.pages.everything import LOSS, OURS
from torch_fused_linear.timing import Number

# A fraction is taken of the fastest of these, which do less than the layer does.
YARDSTICKS = ("mm", "linear", "conv", "copy")
# The reference of each contender; the others' is eager. The same contender once more shows noise.
REFERENCES = {name: beside for name, (_, beside) in OURS.items()} | {"compile again": "compile"}


@dataclass
class Record:
    """The measurements of one case; in every unit, less is better."""

    case: Case
    unit: str  # "us" or "ms" per call, or "MiB"
    numbers: dict[str, Number] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, list[str]] = field(default_factory=dict)
    # For whole models: blocks that fuse_ found, and operators that the pass put in.
    replaced: dict[str, int] = field(default_factory=dict)
    # For whole models on a GPU, by contender: "kernels", the microseconds that kernels run of one
    # call; "peak", in MiB; "MHz", the median clock of its turns; "mean W", machine.power.
    observed: dict[str, dict[str, float]] = field(default_factory=dict)

    def speedup(self, name: str) -> float | None:
        """How many times better than what it is compared with."""
        mine, other = (self.numbers.get(n) for n in (name, REFERENCES.get(name, "eager")))
        return other.median / mine.median if mine and other and mine.median else None

    def failed_alone(self, name: str) -> bool:
        """Returns whether it failed and its reference did not: that is a failure of ours."""
        return name in self.failed and REFERENCES.get(name, "eager") not in self.failed

    def fraction(self, name: str) -> float | None:
        """The part that is reached of the speed of the bare products."""
        if name not in self.numbers or name in YARDSTICKS:
            return None
        bare = [self.numbers[n].median for n in YARDSTICKS if n in self.numbers]
        return min(bare) / self.numbers[name].median if bare else None

    def lost(self, name: str = "ours") -> bool:
        speedup = self.speedup(name)
        return speedup is not None and speedup < LOSS

    def as_json(self) -> dict[str, Any]:
        value = {key: value for key, value in asdict(self).items() if value}
        for key in ("model", "conv"):
            if not value["case"][key]:
                del value["case"][key]  # as in files from before there were any
        return value


def result(case: dict[str, Any], unit: str, numbers: Mapping[str, Number]) -> dict[str, Any]:
    """As a record is in the file, of a case that is none of the suites'."""
    return {"case": case, "unit": unit, "numbers": {n: asdict(v) for n, v in numbers.items()}}


def save(path: Path, header: Mapping[str, Any], records: list[Record]) -> None:
    write(path, header, [record.as_json() for record in records])


def write(path: Path, header: Mapping[str, Any], results: list[dict[str, Any]]) -> None:
    """Writes the file as a whole or not at all: it is never seen half written."""
    content = {"header": header, "results": results}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
