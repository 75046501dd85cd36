"""The tables of measurements: what of the results each has, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from .expect import expect, expect_on_a_cpu
from .overview import everything
from .results import Result, duration, find, shape, table, times, times_of, values

EVERYTHING = "everything"  # says itself where and when it was measured
MODES = ("forward", "step")
ACTIVATIONS = ("relu", "gelu")
CPU_ACTIVATIONS = ("relu", "gelu", "gelu-erf")
CPU_LOSS = 0.97  # what the CPU's operators are held to


def by_inner_size(results: Sequence[Result]) -> list[str]:
    layers = find(results, suite="layer", dtype="bf16", tokens=8192)
    columns = [(mode, activation) for mode in MODES for activation in ACTIVATIONS]
    rows = [
        [str(sizes[0]), str(sizes[1])]
        + [times_of(layers, sizes=sizes, mode=m, activation=a) for m, a in columns]
        for sizes in values(layers, "sizes")
    ]
    return table(["I", "O", *(f"{a}, {m}" for m, a in columns)], rows, words=0)


def by_tokens(results: Sequence[Result]) -> list[str]:
    layers = find(results, suite="layer", dtype="bf16", activation="relu")
    tokens = values(layers, "tokens")
    rows = [
        [shape({"sizes": sizes})]
        + [times_of(layers, sizes=sizes, mode=m, tokens=t) for m in MODES for t in tokens]
        for sizes in values(layers, "sizes")
    ]
    return table(["I→O", *(f"{m}, T={t}" for m in MODES for t in tokens)], rows, words=1)


def by_dtype(results: Sequence[Result]) -> list[str]:
    layers = find(results, suite="layer", tokens=8192)
    columns = [(activation, mode) for activation in ACTIVATIONS for mode in MODES]
    rows = [
        [shape({"sizes": sizes}), dtype]
        + [times_of(found, dtype=dtype, activation=a, mode=m) for a, m in columns]
        for sizes in values(layers, "sizes")
        for found in [find(layers, sizes=sizes)]
        for dtype in values(found, "dtype")
    ]
    return table(["I→O", "dtype", *(f"{a}, {m}" for a, m in columns)], rows, words=2)


def largest(results: Sequence[Result]) -> list[str]:
    names = ("ours", "cublaslt", "eager", "mm")
    rows = []
    for result in find(results, suite="headline"):
        case, numbers = result["case"], result.get("numbers", {})
        label = f"{case['tokens']} x {shape(case)}, {case['dtype']}, {case['activation']}"
        rows.append([label, case["mode"]])
        rows[-1] += [duration(numbers[n]["median"]) if n in numbers else "" for n in names]
    return table(["T x I→O", "", *names], rows, words=2)


def memory(mode: str, results: Sequence[Result]) -> list[str]:
    cases = find(results, suite="memory", mode=mode)
    wanted = ("ours", "low", "mlp", "mlp-low", "eager")
    names = [n for n in wanted if any(n in case["numbers"] for case in cases)]
    rows = []
    for result in cases:
        case = result["case"]
        kept = (result["numbers"].get(n) for n in names)  # "mlp" is of several layers
        numbers = [f"{number['median']:.0f}" if number else "" for number in kept]
        rows.append([shape(case), case["activation"], *numbers])
    return table(["layers", "activation", *names], rows, words=2)


def memory_of_models(results: Sequence[Result]) -> list[str]:
    rows = []
    for result in find(results, suite="memory-models"):
        case, numbers = result["case"], result["numbers"]
        label = [f"{case['model']}, {case['dtype']}", case["activation"], case["mode"]]
        names = ("fused", "fused-low", "eager")
        rows.append(label + [f"{numbers[n]['median']:.0f}" for n in names])
    head = ["model", "activation", "", "`fuse_`", '`fuse_(memory="low")`', "eager"]
    return table(head, rows, words=3)


def one_pass(results: Sequence[Result]) -> list[str]:
    rows = []
    for result in find(results, suite="activation"):
        case, numbers = result["case"], result["numbers"]
        label = [f"{case['tokens']} x {case['sizes'][0]}", case["activation"], case["mode"]]
        rows.append(label + [duration(numbers[n]["median"]) for n in ("ours", "eager", "copy")])
    return table(["T x O", "activation", "gradient", "ours", "eager", "a copy"], rows, words=3)


def marked(ratio: str) -> str:
    """Bold where it is a loss."""
    return f"**{ratio}**" if ratio and float(ratio) < CPU_LOSS else ratio


def on_a_cpu(mode: str, name: str, results: Sequence[Result]) -> list[str]:
    cases = find(results, suite="cpu")
    rows = [
        [shape({"sizes": sizes}), dtype, str(tokens)]
        + [marked(times_of(found, name, mode=mode, activation=a)) for a in CPU_ACTIVATIONS]
        for dtype in values(cases, "dtype")[::-1]
        for sizes in sorted(values(cases, "sizes"))
        for tokens in sorted(values(cases, "tokens"))
        for found in [find(cases, dtype=dtype, sizes=sizes, tokens=tokens)]
        if found
    ]
    return table(["I→O", "dtype", "T", *CPU_ACTIVATIONS], rows, words=2)


def cpu_compiled(results: Sequence[Result]) -> list[str]:
    rows = []
    for result in find(results, suite="cpu"):
        case, numbers = result["case"], result.get("numbers", {})
        if "compile" in numbers:
            label = [shape(case), case["dtype"], str(case["tokens"]), case["activation"]]
            times = [duration(numbers[n]["median"]) for n in ("ours", "eager", "compile")]
            rows.append([*label, case["mode"], *times])
    head = ["I→O", "dtype", "T", "activation", "", "ours", "eager", "compile"]
    return table(head, rows, words=5)


def gated_blocks(suite: str, results: Sequence[Result]) -> list[str]:
    """All who have run, in microseconds or MiB, and how ours compares with eager."""
    cases = find(results, suite=suite)
    cases.sort(key=lambda r: (r["case"]["sizes"], r["case"]["dtype"], r["case"]["tokens"]))
    columns = {name: (name,) for name in ("low", "ours", "eager", "mm", "compile")}
    columns |= {"Liger": ("liger",), "QuACK": ("quack", "quack-tuned")}
    if suite != "gated-memory":
        del columns["low"]
    measured = {name for result in cases for name in result.get("numbers", {})}
    columns = {head: names for head, names in columns.items() if measured.intersection(names)}
    several_dtypes = len(values(cases, "dtype")) > 1
    rows = []
    for result in cases:
        case, numbers = result["case"], result.get("numbers", {})
        dtype = f" {case['dtype']}" if several_dtypes else ""
        row = [f"{shape(case)}{dtype} {case['mode']}, T={case['tokens']}"]
        for names in columns.values():
            medians = (numbers[name]["median"] for name in names if name in numbers)
            row.append(" / ".join(f"{median:.0f}" for median in medians))
        rows.append([*row, times(numbers)])
    return table(["", *columns, "times"], rows, words=1)


def beside_other_libraries(results: Sequence[Result]) -> list[str]:
    columns = {
        "layers / `FusedMLP`": ("ours", "mlp"),
        "eager": ("eager",),
        "mm": ("mm",),
        "QuACK": ("quack", "quack-tuned"),
        "flash-attention": ("flash-attn", "flash-attn-fused"),
        "apex": ("apex",),
    }
    others = [name for head in ("QuACK", "flash-attention", "apex") for name in columns[head]]
    rows = []
    for result in (
        r for mode in ("step", "graph") for r in find(results, suite="rivals", mode=mode)
    ):
        case = result["case"]
        medians = {name: number["median"] for name, number in result["numbers"].items()}
        row = [f"{shape(case)}, T={case['tokens']}, {case['activation']}, {case['mode']}"]
        for names in columns.values():
            row.append(" / ".join(duration(medians[name]) for name in names if name in medians))
        best = min(medians[name] for name in others if name in medians)
        rows.append([*row, f"{best / min(medians['ours'], medians['mlp']):.2f}"])
    return table(["block", *columns, "times"], rows, words=1)


def several_gpus(results: Sequence[Result]) -> list[str]:
    rows = []
    for result in find(results, suite="distributed"):
        case, numbers = result["case"], result["numbers"]
        row = [f"{case['part']}, d={case['width']}", case["arrangement"]]
        row.append(duration(numbers["plain"]["median"]))
        for name in ("layers", "fuse_"):
            ratio = numbers["plain"]["median"] / numbers[name]["median"]
            row += [duration(numbers[name]["median"]), f"{ratio:.2f}"]
        memory = result.get("memory", {})
        rows.append([*row, " / ".join(f"{mib:.0f}" for mib in memory.values())])
    head = ["block", "arrangement", "plain", "layers", "times", "`fuse_`", "times"]
    return table([*head, "MiB: plain / layers / `fuse_`"], rows, words=2)


def own_products(results: Sequence[Result]) -> list[str]:
    """The best order of each kernel, beside the bare product and eager's forward."""
    cases = find(results, suite="hopper")
    kernels = [r for r in cases if "shapes" in r["case"] and "variant" not in r["case"]]
    names = {str(r["case"]["shapes"]): r["case"]["shapes"] for r in kernels}
    bare = find(cases, mode="bare")
    rows = []
    for mode in ("backward", "forward"):
        for activation in values(find(kernels, mode=mode), "activation"):
            for shapes in names.values():
                here = find(kernels, mode=mode, activation=activation, shapes=shapes)
                if not here:
                    continue
                sizes = ["x".join(map(str, shapes[k])) for k in ("tile", "cluster", "epilogue")]
                how = "pingpong" if shapes["pingpong"] else "cooperative"
                row = [f"{mode}, {activation}", " ".join([how, *sizes])]
                for b in bare:
                    case = {"sizes": b["case"]["sizes"], "tokens": b["case"]["tokens"]}
                    best = min(r["numbers"]["ours"]["median"] for r in find(here, **case))
                    beside = "mm" if mode == "backward" else "linear"
                    row.append(f"{best / b['numbers'][beside]['median']:.2f}")
                rows.append(row)
    sizes = [f"{b['case']['tokens']} x {shape(b['case'])}" for b in bare]
    return table(["", "kernel", *sizes], rows, words=2)


def first_calls(results: Sequence[Result]) -> list[str]:
    """How long the drawn problems took, in milliseconds."""
    names = {"ours": "the first step", "each": "for each plan", "later": "the second step"}
    rows = []
    for name, words in names.items():
        cases = find(results, suite="first-calls")
        found = sorted(r["numbers"][name]["median"] for r in cases if name in r["numbers"])
        if found:
            limits = {r["numbers"]["limit"]["median"] for r in cases} if name == "each" else ()
            shares = [found[int(share * (len(found) - 1))] for share in (0.5, 0.9, 1)]
            limit = ", ".join(f"{value:g}" for value in limits)
            rows.append([words, str(len(found)), *(f"{value:.1f}" for value in shares), limit])
    return table(["", "problems", "median", "90 %", "the worst", "limit"], rows, words=1)


def cold_start(results: Sequence[Result]) -> list[str]:
    rows = []
    for result in find(results, suite="cold-start"):
        case, numbers = result["case"], result["numbers"]
        seconds = [f"{numbers[name]['median']:.3f}" for name in ("ours", "eager")]
        rows.append([case["program"], case["mode"], *seconds, times(numbers)])
    return table(["program", "", "ours, s", "eager, s", "times"], rows, words=2)


TABLES: dict[str, Callable[[Sequence[Result]], list[str]]] = {
    EVERYTHING: everything,
    "expect": expect,
    "on a CPU, in short": expect_on_a_cpu,
    "by inner size": by_inner_size,
    "by tokens": by_tokens,
    "by dtype": by_dtype,
    "the largest": largest,
    "memory kept": partial(memory, "saved"),
    "memory at the peak": partial(memory, "peak"),
    "memory of models": memory_of_models,
    "one pass": one_pass,
    "on a CPU, inference": partial(on_a_cpu, "forward", "ours"),
    "on a CPU, packed": partial(on_a_cpu, "forward", "packed"),
    "on a CPU, step": partial(on_a_cpu, "step", "ours"),
    "on a CPU, compiled": cpu_compiled,
    "beside other libraries": beside_other_libraries,
    "gated blocks": partial(gated_blocks, "gated"),
    "gated blocks on a CPU": partial(gated_blocks, "gated-cpu"),
    "calls of gated blocks": partial(gated_blocks, "gated-host"),
    "memory of gated blocks": partial(gated_blocks, "gated-memory"),
    "several GPUs": several_gpus,
    "own products": own_products,
    "first calls": first_calls,
    "cold start": cold_start,
}
