"""Results as the files have them, and what the tables write of one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]
Cell = Callable[[Result], str]


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


def find(results: Iterable[Result], **wanted: object) -> list[Result]:
    return [r for r in results if all(r["case"].get(key) == value for key, value in wanted.items())]


def grouped(
    results: Iterable[Result], *keys: str, order: Callable | None = None
) -> dict[tuple, list]:
    """The results by what their cases are in these respects, in order."""
    groups: dict[tuple, list[Result]] = {}
    for result in results:
        values = (result["case"][key] for key in keys)
        key = tuple(tuple(v) if isinstance(v, list) else v for v in values)
        groups.setdefault(key, []).append(result)
    return {key: groups[key] for key in sorted(groups, key=order)}


def latest_with(result: Result | None, *groups: Sequence[str]) -> Result | None:
    """The latest run in which one of each group of contenders took part."""
    while result is not None:
        if all(any(median(result, name) for name in names) for names in groups):
            return result
        result = result.get("before")
    return None


# --- cells ----------------------------------------------------------------------------------------


def median(result: Result, name: str) -> float | None:
    number = result.get("numbers", {}).get(name)
    return None if number is None else number["median"]


def least(result: Result, names: Iterable[str]) -> float | None:
    """The time of the fastest of these that took part."""
    return min(filter(None, (median(result, name) for name in names)), default=None)


def times(result: Result, name: str = "ours", than: str = "eager") -> str:
    """How many times the other's speed one has."""
    mine, other = median(result, name), median(result, than)
    return "" if mine is None or other is None else f"{other / mine:.2f}"


def duration(microseconds: float) -> str:
    if microseconds >= 1000:
        return f"{microseconds / 1000:.2f} ms"
    return f"{microseconds:.{1 if microseconds < 100 else 0}f} µs"


def medians(*names: str, form: Callable[[float], str] = duration) -> Cell:
    """The times of each of these that took part, with strokes between them."""
    return lambda result: " / ".join(
        form(value) for value in (median(result, name) for name in names) if value is not None
    )


def of_case(form: str) -> Cell:
    """The fields of a case by their names, and what the tables make of them."""

    def cell(result: Result) -> str:
        case = result["case"]
        dtype, mode = case.get("dtype"), case.get("mode")
        made = {
            "shape": shape(case),
            "rare_dtype": "" if dtype == "bf16" else f", {dtype}",
            "in_graph": " in a CUDA graph" if mode == "graph" else "",
            "depth": f", LLaMA of {case['layers']} layers" if "layers" in case else "",
            "use": {"forward": "inference", "train": "step, AdamW"}.get(mode, "step"),
        }
        return form.format_map(case | made)

    return cell


def shape(case: Mapping[str, Any]) -> str:
    if "conv" in case:
        return convolution(**case["conv"])
    return ("×" if "model" in case else "→").join(map(str, case.get("sizes", ())))


def convolution(channels, out, kernel, size, stride, groups, last) -> str:
    """The name in the benchmark's output and the tables."""
    words = [f"{channels}→{out}", f"{kernel}x{kernel}"]
    if stride > 1:
        words.append(f"stride {stride}")
    if groups > 1:
        words.append("depthwise" if groups == channels else f"groups {groups}")
    return " ".join([*words, f"@{size}", "NHWC" if last else "NCHW"])


# --- tables ---------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> list[str]:
    """Markdown; the first `words` columns are words, the others are numbers."""
    ruler = ["---"] * words + ["--:"] * (len(head) - words)
    return ["| " + " | ".join(row) + " |" for row in (head, ruler, *rows)]


def listing(
    results: Iterable[Result], words: Mapping[str, str], numbers: Sequence[tuple[str, Cell]]
) -> list[str]:
    """A row for each result; a column has its head, and what stands below it of a result."""
    columns = [*((head, of_case(form)) for head, form in words.items()), *numbers]
    rows = [[cell(result) for _, cell in columns] for result in results]
    return table([head for head, _ in columns], rows, words=len(words))


def pivot(
    results: Iterable[Result],
    keys: Sequence[str],
    words: Mapping[str, str],
    columns: Mapping[str, Mapping[str, object]],
    cell: Cell = times,
    order: Callable | None = None,
    left: int | None = None,
) -> list[str]:
    """A row for all results that are alike in these keys, a column for those of some conditions;
    `left` is how many columns hold words, of all that `words` has unless said otherwise."""
    rows = []
    for group in grouped(results, *keys, order=order).values():
        row = [of_case(form)(group[0]) for form in words.values()]
        found = (find(group, **where) for where in columns.values())
        rows.append([*row, *(cell(here[0]) if here else "" for here in found)])
    return table([*words, *columns], rows, words=len(words) if left is None else left)
