"""The tables that list all GPU results, and where ours loses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from .results import (
    Result,
    find,
    latest_with,
    least,
    listing,
    median,
    medians,
    of_case,
    table,
    times,
)

LOSS = 0.98  # slower than this part of eager's speed; what is nearer may be noise
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
    "fused": ("eager", "`fuse_`", "blocks"),
    "compile+pass": ("compile", "with our pass", "operators"),
    "reduce-overhead+pass": ("reduce-overhead", "with our pass", "operators"),
}
SENSORS = {"MHz": "MHz", "W": "mean W"}  # by its column's head, the name in Record.observed
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
    "`torch.compile` over that of `torch.compile` with `compile_options()`. Kernels: the same of "
    "the sums of what their kernels take, which do not wait for the CPU; again: the same of one "
    "contender twice, which is noise; MHz: the clock of the two in their turns; W: the power of "
    "each in a loop of its own. The last columns count the blocks fused and the operators put in; "
    "a graph that several layers share, as in a step of OPT, counts once. `gelu` is the tanh form."
)


def is_selected(result: Result) -> bool:
    """The grid's points in the table: bf16, many tokens, and small layers with few; of small
    networks also fp32, in which reinforcement learning trains them."""
    case = result["case"]
    suite, tokens = case["suite"], case["tokens"]
    if suite == "mlp-small":
        return case["dtype"] in ("bf16", "fp32")
    if case["dtype"] != "bf16":
        return False
    if suite == "layer":
        return tokens == (8192 if min(case["sizes"]) >= 768 else 512)
    return case["conv"]["last"] if suite == "conv" else suite == "ffn" and tokens >= 8192


def times_compiled(result: Result) -> str:
    """In the latest run in which torch.compile took part, its fastest mode's time over ours."""
    found = latest_with(result, ["ours"], COMPILED)
    if found is None:
        return ""
    return f"{least(found, COMPILED) / median(found, 'ours'):.2f}"


def selection(results: Iterable[Result], layers: str, amount: str) -> list[str]:
    """A table of the training steps, and one of the forwards."""
    words = {layers: "{shape}{rare_dtype}{in_graph}", amount: "{tokens}"}
    words["activation"] = "{activation}"
    numbers = [("eager", medians("eager")), ("times", times), ("times compile", times_compiled)]
    lines = []
    for mode, columns in (("step", numbers), ("forward", numbers[:-1])):
        here = [r for r in results if (r["case"]["mode"] == "forward") == (mode == "forward")]
        if here:
            lines += [""] * bool(lines) + listing(here, words, [(mode, medians("ours")), *columns])
    return lines


def models(results: Iterable[Result]) -> list[str]:
    """Whole models: ours beside what it was put into, and how much of it there was."""
    words = {
        "model": "{model}, {activation}{rare_dtype}",
        "batch × tokens": "{shape}",
        "": "{use}",
    }
    results = sorted(results, key=of_case("{model} {dtype} {activation} {mode}"))
    lines = []
    for name, (theirs, ours, count) in MODEL_HEADS.items():
        beside = OURS[name][1]
        runs = [run for r in results if (run := latest_with(r, [name], [beside]))]
        numbers = [
            (theirs, medians(beside)),
            (ours, medians(name)),
            ("times", partial(times, name=name, than=beside)),
            ("kernels", partial(times_of_kernels, name=name, than=beside)),
            ("again", partial(times, name=f"{beside} again", than=beside)),
            *((title, partial(both_of, what, beside, name)) for title, what in SENSORS.items()),
            (count, lambda r, name=name: str(r.get("replaced", {}).get(name, "-"))),
        ]
        numbers = [(head, cell) for head, cell in numbers if any(map(cell, runs))]
        if runs:
            lines += [""] * bool(lines) + listing(runs, words, numbers)
    return lines


def times_of_kernels(result: Result, name: str, than: str) -> str:
    seen = result.get("observed", {})
    return f"{seen[than]['kernels'] / seen[name]['kernels']:.2f}" if name in seen else ""


def both_of(what: str, one: str, other: str, result: Result) -> str:
    found = (result.get("observed", {}).get(name, {}).get(what) for name in (one, other))
    return " / ".join(f"{value:.0f}" for value in found if value is not None)


def losses(results: Iterable[Result], what: str) -> list[str]:
    """Every case of the whole grid in which a way of ours is slower than what it replaces."""
    compared = [
        (run, name, title, beside)
        for result in results
        for name, (title, beside) in OURS.items()
        if result["case"]["suite"] in TIMED and (run := latest_with(result, [name], [beside]))
    ]
    rows = []
    for run, name, title, beside in compared:
        if median(run, beside) / median(run, name) < LOSS:
            layers = "{model}, {shape}" if "model" in run["case"] else "{shape}, {tokens}"
            where = of_case(f"{{suite}}: {layers}, {{dtype}}, {{activation}}, {{mode}}, {title}")
            both = medians(name)(run), medians(beside)(run)
            rows.append([where(run), *both, times(run, name, beside)])
    limit = f"more than {1 - LOSS:.0%} slower than eager (with our pass: than without, compiled)"
    if not rows:
        return [f"None of {len(compared)} measurements of {what} is {limit}."]
    verb = "is" if len(rows) == 1 else "are"
    summary = f"{len(rows)} of {len(compared)} measurements of {what} {verb} {limit}:"
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
    """One machine's results of all suites for layers, models and convolutions."""
    # The other suites have pages of their own.
    elsewhere = ("models", "conv", "cpu", "distributed", "cold-start", "accumulation")
    elsewhere += ("gated-cpu", "gated-coda", "invariance")
    elsewhere += ("float8", "float8-casts", "float8-training")
    of_layers = [r for r in results if r["case"]["suite"] not in elsewhere]
    of_models, convs = find(results, suite="models"), find(results, suite="conv")
    blocks = selection([*filter(is_selected, of_layers)], "layers", "tokens")
    of_convs = selection([*filter(is_selected, convs)], "layer", "images")
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
