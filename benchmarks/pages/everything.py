"""The tables that list all GPU results, and where ours loses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .results import Result, duration, find, median, medians, shape, table, times

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
    """What the table shows of the grid: bf16, many tokens, and small layers with few; of small
    networks also fp32, in which reinforcement learning trains them."""
    if case["suite"] == "mlp-small":
        return case["dtype"] in ("bf16", "fp32")
    if case["dtype"] != "bf16":
        return False
    if case["suite"] == "layer":
        return case["tokens"] == (8192 if min(case["sizes"]) >= 768 else 512)
    return case["suite"] == "ffn" and case["tokens"] >= 8192


def is_selected_convolution(case: dict[str, Any]) -> bool:
    return case["suite"] == "conv" and case["dtype"] == "bf16" and case["conv"]["last"]


def latest_with(result: Result | None, *groups: Sequence[str]) -> Result | None:
    """The latest run in which one of each group of contenders took part."""
    while result is not None:
        if all(any(median(result, name) for name in names) for names in groups):
            return result
        result = result.get("before")
    return None


def times_compiled(result: Result) -> str:
    """In the latest run in which torch.compile took part, its fastest mode's time over ours."""
    found = latest_with(result, ["ours"], COMPILED)
    if found is None:
        return ""
    theirs = min(value for name in COMPILED if (value := median(found, name)))
    return f"{theirs / median(found, 'ours'):.2f}"


def selection(results: Iterable[Result], chosen: Chosen, what: Sequence[str]) -> list[str]:
    """A table of the training steps, and one of the forwards."""
    rows: dict[str, list[list[str]]] = {"step": [], "forward": []}
    for result in results:
        case = result["case"]
        if not chosen(case):
            continue
        words = [shape(case)] + [case["dtype"]] * (case["dtype"] != "bf16")
        graph = " in a CUDA graph" if case["mode"] == "graph" else ""
        row = [", ".join(words) + graph, str(case["tokens"]), case["activation"]]
        row += [medians("ours")(result), medians("eager")(result), times(result)]
        if case["mode"] == "forward":
            rows["forward"].append(row)
        else:
            rows["step"].append([*row, times_compiled(result)])
    lines = []
    for mode, here in rows.items():
        if here:
            head = [*what, "activation", mode, "eager", "times", "times compile"][: len(here[0])]
            lines += [""] * bool(lines) + table(head, here, words=3)
    return lines


def models(results: Iterable[Result]) -> list[str]:
    """Whole models: ours beside what it was put into, and how much of it there was."""
    lines = []
    for name, head in MODEL_HEADS.items():
        beside, rows = OURS[name][1], []
        for result in results:
            run, case = latest_with(result, [name], [beside]), result["case"]
            if run is None:
                continue
            mode = {"forward": "inference", "train": "step, AdamW"}.get(case["mode"], "step")
            words = [case["model"], case["activation"]]
            words += [case["dtype"]] * (case["dtype"] != "bf16")
            row = [", ".join(words), "×".join(map(str, case["sizes"])), mode]
            row += [medians(beside)(run), medians(name)(run), times(run, name, beside)]
            rows.append([*row, str(result.get("replaced", {}).get(name, "-"))])
        if rows:
            lines += [""] * bool(lines)
            lines += table(["model", "batch × tokens", "", *head], rows, words=3)
    return lines


def losses(results: Iterable[Result], what: str) -> list[str]:
    """Every case of the whole grid in which a way of ours is slower than what it replaces."""
    compared, rows = 0, []
    for result in results:
        case = result["case"]
        for name, (title, beside) in OURS.items():
            run = latest_with(result, [name], [beside])
            if case["suite"] not in TIMED or run is None:
                continue
            compared += 1
            mine, theirs = median(run, name), median(run, beside)
            if theirs / mine < LOSS:
                amount = "×".join(map(str, case["sizes"])) if case.get("model") else case["tokens"]
                words = [case.get("model") or shape(case), str(amount), case["dtype"]]
                words += [case["activation"], case["mode"], title]
                where = f"{case['suite']}: {', '.join(words)}"
                rows.append([where, duration(mine), duration(theirs), times(run, name, beside)])
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
        f"Measured on {header['machine']} ({software}), {header['date'][:10]}; bf16 where nothing "
        "else is said, medians of interleaved rounds."
    )


def everything(results: Sequence[Result]) -> list[str]:
    """Of one machine: what all suites say of layers, models and convolutions."""
    # What the others say is told by pages of their own.
    elsewhere = ("models", "conv", "cpu", "distributed", "cold-start", "gated-cpu", "accumulation")
    of_layers = [r for r in results if r["case"]["suite"] not in elsewhere]
    of_models, convs = find(results, suite="models"), find(results, suite="conv")
    blocks = selection(of_layers, is_selected, ["layers", "tokens"])
    of_convs = selection(convs, is_selected_convolution, ["layer", "images"])
    parts = (
        ("Whole models", of_models, MODELS_ABOUT, models(of_models), "whole models"),
        ("Blocks and layers", of_layers, LAYERS_ABOUT, blocks, "layers and blocks"),
        ("Convolutions", convs, CONVOLUTIONS_ABOUT, of_convs, "convolutions"),
    )
    lines = []
    for title, here, about, tables, what in parts:
        if here:
            lines += [""] * bool(lines) + [f"## {title}", "", f"{measured(here)} {about}", ""]
            lines += [*tables, "", *losses(here, what)]
    return lines
