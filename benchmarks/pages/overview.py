"""The tables that list all GPU results, and where ours loses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .results import Numbers, Result, duration, shape, table

LOSS = 0.98  # slower than this part of eager's speed; the bench marks the same
# Ways of ours: how they are called, and what each is compared with.
OURS = {
    "ours": ("ours", "eager"),
    "mlp": ("`FusedMLP`", "eager"),
    "fused": ("`fuse_`", "eager"),
    "compile+pass": ("our pass", "compile"),
    "reduce-overhead+pass": ("our pass, CUDA graphs", "reduce-overhead"),
}
COMPILED = ("compile", "max-autotune", "reduce-overhead")
# Ours, and what it is compared with.
MODEL_PAIRS = {name: OURS[name][1] for name in ("fused", "compile+pass", "reduce-overhead+pass")}
MODEL_HEADS = {
    "fused": ["eager", "`fuse_`", "times", "blocks"],
    "compile+pass": ["compile", "with our pass", "times", "operators"],
    "reduce-overhead+pass": ["reduce-overhead", "with our pass", "times", "operators"],
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

Chosen = Callable[[dict[str, Any]], bool]


def is_selected(case: dict[str, Any]) -> bool:
    """What the table shows of the grid: bf16, many tokens, and small layers with few."""
    if case["dtype"] != "bf16":
        return False
    if case["suite"] == "layer":
        return case["tokens"] == (8192 if min(case["sizes"]) >= 768 else 512)
    return case["suite"] == "mlp-small" or (case["suite"] == "ffn" and case["tokens"] >= 8192)


def is_selected_convolution(case: dict[str, Any]) -> bool:
    return case["suite"] == "conv" and case["dtype"] == "bf16" and case["conv"]["last"]


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
            mode = {"forward": "inference", "train": "step, AdamW"}.get(case["mode"], "step")
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


def everything(results: Sequence[Result]) -> list[str]:
    """Of one machine: what all suites say of layers, models and convolutions."""
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
