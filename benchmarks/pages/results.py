"""Results as the files have them, and what the tables write of one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]
Numbers = dict[str, dict[str, float]]


def by_machine(paths: Iterable[Path]) -> dict[str, list[Result]]:
    """Results of each machine with their file's header; where files overlap, the latest says.

    What it says anew is under "before": who was compared then may not have run again.
    """
    contents = [json.loads(path.read_text()) for path in paths]
    merged: dict[str, dict[str, Result]] = {}
    for content in sorted(contents, key=lambda c: c["header"]["date"]):
        here = merged.setdefault(content["header"]["machine"], {})
        for result in content["results"]:
            key = json.dumps(result["case"], sort_keys=True)
            here[key] = {**result, "header": content["header"], "before": here.get(key)}
    return {name: list(results.values()) for name, results in merged.items()}


def times(numbers: Numbers, name: str = "ours") -> str:
    """How many times eager's speed ours has."""
    if name not in numbers or "eager" not in numbers:
        return ""
    return f"{numbers['eager']['median'] / numbers[name]['median']:.2f}"


def find(results: Iterable[Result], **wanted: object) -> list[Result]:
    return [r for r in results if all(r["case"].get(key) == value for key, value in wanted.items())]


def times_of(results: Iterable[Result], name: str = "ours", **wanted: object) -> str:
    found = find(results, **wanted)
    return times(found[0].get("numbers", {}), name) if found else ""


def values(results: Iterable[Result], key: str) -> list:
    """All that a case may be in one respect, in order."""
    return sorted({str(r["case"][key]): r["case"][key] for r in results}.values())


def shape(case: dict[str, Any]) -> str:
    if "conv" in case:
        return convolution(**case["conv"])
    return "→".join(map(str, case["sizes"]))


def convolution(channels, out, kernel, size, stride, groups, last) -> str:
    """As the bench itself names it."""
    words = [f"{channels}→{out}", f"{kernel}x{kernel}"]
    if stride > 1:
        words.append(f"stride {stride}")
    if groups > 1:
        words.append("depthwise" if groups == channels else f"groups {groups}")
    return " ".join([*words, f"@{size}", "NHWC" if last else "NCHW"])


def duration(microseconds: float) -> str:
    if microseconds >= 1000:
        return f"{microseconds / 1000:.2f} ms"
    return f"{microseconds:.{1 if microseconds < 100 else 0}f} µs"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> list[str]:
    """Markdown; the first `words` columns are words, the others are numbers."""
    ruler = ["---"] * words + ["--:"] * (len(head) - words)
    return ["| " + " | ".join(row) + " |" for row in (head, ruler, *rows)]
