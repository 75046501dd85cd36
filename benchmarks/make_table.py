"""Makes the tables of docs/performance.md that list all GPU results, of the files beside this.

    python benchmarks/make_table.py            rewrite what is between the two markers
    python benchmarks/make_table.py --check    exit with 1 if it is not what the results say

It needs nothing but Python: neither torch nor the built library.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- benchmark table: begin -->"
END = "<!-- benchmark table: end -->"

LOSS = 0.98  # slower than this part of eager's speed; the bench marks the same
# Ways of ours: how they are called, and what each is compared with.
OURS = {
    "ours": ("ours", "eager"),
    "mlp": ("`FusedMLP`", "eager"),
    "fused": ("`fuse_`", "eager"),
    "compile+pass": ("our pass", "compile"),
}
COMPILED = ("compile", "max-autotune", "reduce-overhead")
MODEL_PAIRS = {"fused": "eager", "compile+pass": "compile"}  # ours, and what it is compared with
MODEL_HEADS = {
    "fused": ["eager", "`fuse_`", "times", "blocks"],
    "compile+pass": ["compile", "with our pass", "times", "operators"],
}
TIMED = ("layer", "ffn", "mlp-small", "headline", "host", "activation", "conv", "models")
LAYERS_ABOUT = (
    "Blocks of two layers, small networks and single layers. A step is forward and backward with "
    "all gradients; times: eager's time over ours; times compile: that of the fastest "
    "`torch.compile` mode measured, in the latest run it took part in. `gelu` is the tanh form."
)
CONVOLUTIONS_ABOUT = (
    "Convolution, bias and ReLU on images that are channels-last in memory; `@` is their height "
    "and width. Eager is `nn.Conv2d` and `nn.ReLU(inplace=True)`. A step is forward and backward "
    "with all gradients (of the layer with 3 channels not that of the images); times: eager's time "
    "over ours; times compile: that of `torch.compile`."
)
MODELS_ABOUT = (
    "Whole models with random weights and without dropout; a step is loss, backward and all "
    "gradients. Times: eager's time over that after `fuse_`; in the second table the time of "
    "`torch.compile` over that of `torch.compile` with `compile_options()`. The last columns count "
    "the blocks fused and the operators put in; a graph that several layers share, as in a step of "
    "OPT, counts once. `gelu` is the tanh form."
)

Result = dict[str, Any]
Chosen = Callable[[dict[str, Any]], bool]
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


def is_selected(case: dict[str, Any]) -> bool:
    """What the table shows of the grid: bf16, many tokens, and small layers with few."""
    if case["dtype"] != "bf16":
        return False
    if case["suite"] == "layer":
        return case["tokens"] == (8192 if min(case["sizes"]) >= 768 else 512)
    return case["suite"] == "mlp-small" or (case["suite"] == "ffn" and case["tokens"] >= 8192)


def is_selected_convolution(case: dict[str, Any]) -> bool:
    return case["suite"] == "conv" and case["dtype"] == "bf16" and case["conv"]["last"]


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


def fastest(numbers: Numbers, names: Iterable[str]) -> float | None:
    return min((numbers[name]["median"] for name in names if name in numbers), default=None)


def ratio(numbers: Numbers, others: Iterable[str]) -> str:
    mine, theirs = fastest(numbers, ["ours"]), fastest(numbers, others)
    return "" if mine is None or theirs is None else f"{theirs / mine:.2f}"


def numbers_with(result: Result | None, *names: str) -> Numbers:
    """Of the latest run in which all of these took part; none: there was no such run."""
    while result is not None:
        numbers = result.get("numbers", {})
        if all(name in numbers for name in names):
            return numbers
        result = result.get("before")
    return {}


def ratio_to_compiled(result: Result | None) -> str:
    """Of the latest run in which torch.compile took part."""
    while result is not None:
        if found := ratio(result.get("numbers", {}), COMPILED):
            return found
        result = result.get("before")
    return ""


def beside_eager(numbers: Numbers) -> list[str]:
    times = [duration(numbers[n]["median"]) if n in numbers else "" for n in ("ours", "eager")]
    return [*times, ratio(numbers, ["eager"])]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> list[str]:
    """Markdown; the first `words` columns are words, the others are numbers."""
    ruler = ["---"] * words + ["--:"] * (len(head) - words)
    return ["| " + " | ".join(row) + " |" for row in (head, ruler, *rows)]


def selection(results: Iterable[Result], chosen: Chosen, what: Sequence[str]) -> list[str]:
    """A table of the training steps, and one of the forwards."""
    rows: dict[str, list[list[str]]] = {"step": [], "forward": []}
    for result in results:
        case, numbers = result["case"], result.get("numbers", {})
        if not chosen(case):
            continue
        graph = " in a CUDA graph" if case["mode"] == "graph" else ""
        row = [shape(case) + graph, str(case["tokens"]), case["activation"], *beside_eager(numbers)]
        if case["mode"] == "forward":
            rows["forward"].append(row)
        else:
            rows["step"].append([*row, ratio_to_compiled(result)])
    lines = []
    for mode, here in rows.items():
        if here:
            head = [*what, "activation", mode, "eager", "times", "times compile"][: len(here[0])]
            lines += [""] * bool(lines) + table(head, here, words=3)
    return lines


def models(results: Iterable[Result]) -> list[str]:
    """Whole models: ours beside what it was put into, and how much of it there was."""
    lines = []
    for name, beside in MODEL_PAIRS.items():
        rows = []
        for result in results:
            case, numbers = result["case"], numbers_with(result, name, beside)
            if not numbers:
                continue
            both = [numbers[n]["median"] for n in (beside, name)]
            mode = "inference" if case["mode"] == "forward" else "step"
            words = [
                case["model"],
                case["activation"],
                *[case["dtype"]] * (case["dtype"] != "bf16"),
            ]
            row = [", ".join(words), "×".join(map(str, case["sizes"]))]
            row += [mode, *map(duration, both), f"{both[0] / both[1]:.2f}"]
            rows.append([*row, str(result.get("replaced", {}).get(name, "-"))])
        if rows:
            head = ["model", "batch × tokens", "", *MODEL_HEADS[name]]
            lines += [""] * bool(lines) + table(head, rows, words=3)
    return lines


def losses(results: Iterable[Result], what: str) -> list[str]:
    """Every case of the whole grid in which a way of ours is slower than what it replaces."""
    compared, rows = 0, []
    for result in results:
        case = result["case"]
        for name, (title, beside) in OURS.items():
            numbers = numbers_with(result, name, beside)
            if case["suite"] not in TIMED or not numbers:
                continue
            compared += 1
            mine, theirs = numbers[name]["median"], numbers[beside]["median"]
            if theirs / mine < LOSS:
                amount = "×".join(map(str, case["sizes"])) if case.get("model") else case["tokens"]
                words = [case.get("model") or shape(case), str(amount), case["dtype"]]
                words += [case["activation"], case["mode"], title]
                where = f"{case['suite']}: {', '.join(words)}"
                rows.append([where, duration(mine), duration(theirs), f"{theirs / mine:.2f}"])
    limit = f"more than {1 - LOSS:.0%} slower than eager (with our pass: than without, compiled)"
    if not rows:
        return [f"None of {compared} measurements of {what} is {limit}."]
    verb = "is" if len(rows) == 1 else "are"
    summary = f"{len(rows)} of {compared} measurements of {what} {verb} {limit}:"
    return [summary, "", *table(["suite: case", "ours", "beside", "times"], rows, words=1)]


def measured(results: Iterable[Result]) -> str:
    """Where, with what and when; of several runs, the latest."""
    header = max((result["header"] for result in results), key=lambda header: header["date"])
    software = f"torch {header['torch']}"
    if header["device"] == "cuda":
        software += f", cuBLASLt {header['cublaslt']}, driver {header['driver']}"
    return (
        f"Measured on {header['machine']} ({software}), {header['date'][:10]}; bf16, medians of "
        "interleaved rounds."
    )


def section(results: list[Result]) -> list[str]:
    whole = [result for result in results if result["case"]["suite"] == "models"]
    convs = [result for result in results if result["case"]["suite"] == "conv"]
    # What the others say is told by pages of their own.
    elsewhere = ("models", "conv", "cpu", "distributed", "cold-start", "gated-cpu")
    layers = [r for r in results if r["case"]["suite"] not in elsewhere]
    parts = []
    if whole:
        about = f"{measured(whole)} {MODELS_ABOUT}"
        lost = losses(whole, "whole models")
        parts.append(["## Whole models", "", about, "", *models(whole), "", *lost])
    if layers:
        tables = selection(layers, is_selected, ["layers", "tokens"])
        about = f"{measured(layers)} {LAYERS_ABOUT}"
        lost = losses(layers, "layers and blocks")
        parts.append(["## Blocks and layers", "", about, "", *tables, "", *lost])
    if convs:
        tables = selection(convs, is_selected_convolution, ["layer", "images"])
        about = f"{measured(convs)} {CONVOLUTIONS_ABOUT}"
        lost = losses(convs, "convolutions")
        parts.append(["## Convolutions", "", about, "", *tables, "", *lost])
    return ["\n\n".join("\n".join(part) for part in parts)] if parts else []


def render(paths: Iterable[Path]) -> str:
    sections = [section(results) for results in by_machine(paths).values()]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) or "No results yet."


def replaced(text: str, content: str) -> str:
    """`text` with `content` between the markers; ValueError if they are not there, in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no line {BEGIN} with a line {END} after it")
    return f"{before}{BEGIN}\n\n{content}\n\n{END}{after}"


def rewrite(page: Path, change: Callable[[str], str], check: bool, name: str) -> int:
    """Writes what `change` makes of the page, or only compares; -> the exit status of `name`."""
    try:
        text = page.read_text()
        wanted = change(text)
    except (OSError, ValueError) as error:
        print(f"{name}: {page}: {error}", file=sys.stderr)
        return 2
    if check:
        if text != wanted:
            print(f"{page} is out of date; run python benchmarks/{name}.py")
        return int(text != wanted)
    page.write_text(wanted)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if out of date")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args(arguments)
    paths = sorted(given.results.glob("*.json"))
    return rewrite(
        given.page, lambda text: replaced(text, render(paths)), given.check, "make_table"
    )


if __name__ == "__main__":
    sys.exit(main())
