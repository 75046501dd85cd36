"""The tables of measurements: what of the results each has, and in which order."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter

from .everything import everything
from .expect import expect, expect_on_a_cpu
from .results import (
    Result,
    duration,
    find,
    grouped,
    listing,
    median,
    medians,
    pivot,
    shape,
    table,
    times,
)

WHOLE = "{:.0f}".format
EVERYTHING = "everything"  # says itself where and when it was measured
MODES = ("forward", "step")
ACTIVATIONS = ("relu", "gelu")
CPU_LOSS = 0.97  # what the CPU's operators are held to
CPU_WORDS = {"I→O": "{shape}", "dtype": "{dtype}", "T": "{tokens}"}
POLICIES = ("auto", "batch_invariant")
PAIRS = {f"{a}, {m}": {"activation": a, "mode": m} for a in ACTIVATIONS for m in MODES}


def by_inner_size(results: Sequence[Result]) -> list[str]:
    found = find(results, suite="layer", dtype="bf16", tokens=8192)
    by_mode = dict(sorted(PAIRS.items(), key=lambda pair: pair[1]["mode"]))
    return pivot(found, ["sizes"], {"I": "{sizes[0]}", "O": "{sizes[1]}"}, by_mode, left=0)


def by_tokens(results: Sequence[Result]) -> list[str]:
    found = find(results, suite="layer", dtype="bf16", activation="relu")
    tokens = [t for (t,) in grouped(found, "tokens")]
    columns = {f"{m}, T={t}": {"mode": m, "tokens": t} for m in MODES for t in tokens}
    return pivot(found, ["sizes"], {"I→O": "{shape}"}, columns)


def by_dtype(results: Sequence[Result]) -> list[str]:
    found = find(results, suite="layer", tokens=8192)
    return pivot(found, ["sizes", "dtype"], {"I→O": "{shape}", "dtype": "{dtype}"}, PAIRS)


def largest(results: Sequence[Result]) -> list[str]:
    words = {"T x I→O": "{tokens} x {shape}, {dtype}, {activation}", "": "{mode}"}
    names = ("ours", "cublaslt", "eager", "mm")
    return listing(find(results, suite="headline"), words, [(n, medians(n)) for n in names])


def memory(mode: str, results: Sequence[Result]) -> list[str]:
    cases = find(results, suite="memory", mode=mode)
    names = ("ours", "low", "mlp", "mlp-low", "eager")  # "mlp" is of several layers
    numbers = [(n, medians(n, form=WHOLE)) for n in names if any(n in c["numbers"] for c in cases)]
    return listing(cases, {"layers": "{shape}", "activation": "{activation}"}, numbers)


def memory_of_models(results: Sequence[Result]) -> list[str]:
    words = {"model": "{model}, {dtype}", "activation": "{activation}", "": "{mode}"}
    heads = {"fused": "`fuse_`", "fused-low": '`fuse_(memory="low")`', "eager": "eager"}
    numbers = [(head, medians(name, form=WHOLE)) for name, head in heads.items()]
    return listing(find(results, suite="memory-models"), words, numbers)


def one_pass(results: Sequence[Result]) -> list[str]:
    words = {"T x O": "{tokens} x {sizes[0]}", "activation": "{activation}", "gradient": "{mode}"}
    numbers = [("ours", medians("ours")), ("eager", medians("eager")), ("a copy", medians("copy"))]
    return listing(find(results, suite="activation"), words, numbers)


def on_a_cpu(mode: str, name: str, results: Sequence[Result]) -> list[str]:
    def marked(result: Result) -> str:
        """Bold where it is a loss."""
        ratio = times(result, name)
        return f"**{ratio}**" if ratio and float(ratio) < CPU_LOSS else ratio

    def order(key: tuple) -> tuple:
        return (key[0] != "fp32", *key[1:])

    columns = {a: {"activation": a, "mode": mode} for a in (*ACTIVATIONS, "gelu-erf")}
    keys, found = ["dtype", "sizes", "tokens"], find(results, suite="cpu")
    return pivot(found, keys, CPU_WORDS, columns, marked, order, left=2)


def cpu_compiled(results: Sequence[Result]) -> list[str]:
    cases = [r for r in find(results, suite="cpu") if median(r, "compile")]
    words = {**CPU_WORDS, "activation": "{activation}", "": "{mode}"}
    return listing(cases, words, [(n, medians(n)) for n in ("ours", "eager", "compile")])


def gated_blocks(suite: str, results: Sequence[Result]) -> list[str]:
    """All who have run, in microseconds or MiB, and how ours compares with eager."""
    cases = find(results, suite=suite)
    keys = itemgetter("sizes", "dtype", "tokens")
    cases.sort(key=lambda r: (*keys(r["case"]), r["case"]["mode"] == "step"))
    columns = {name: (name,) for name in ("low", "ours", "eager", "mm", "compile")}
    columns |= {"Liger": ("liger",), "QuACK": ("quack", "quack-tuned"), "CODA": ("coda",)}
    if suite != "gated-memory":
        del columns["low"]
    measured = {name for result in cases for name in result.get("numbers", {})}
    dtype = " {dtype}" if len(grouped(cases, "dtype")) > 1 else ""
    numbers = [
        (head, medians(*names, form=WHOLE))
        for head, names in columns.items()
        if measured.intersection(names)
    ]
    words = {"": f"{{shape}}{dtype} {{mode}}, T={{tokens}}"}
    return listing(cases, words, [*numbers, ("times", times)])


def beside_other_libraries(results: Sequence[Result]) -> list[str]:
    cases = [r for mode in ("step", "graph") for r in find(results, suite="rivals", mode=mode)]
    others = ("quack", "quack-tuned", "flash-attn", "flash-attn-fused", "apex")

    def fastest(result: Result, names: Sequence[str]) -> float:
        return min(value for name in names if (value := median(result, name)))

    numbers = [
        ("layers / `FusedMLP`", medians("ours", "mlp")),
        ("eager", medians("eager")),
        ("mm", medians("mm")),
        ("QuACK", medians(*others[:2])),
        ("flash-attention", medians(*others[2:4])),
        ("apex", medians("apex")),
        ("times", lambda r: f"{fastest(r, others) / fastest(r, ('ours', 'mlp')):.2f}"),
    ]
    return listing(cases, {"block": "{shape}, T={tokens}, {activation}, {mode}"}, numbers)


def several_gpus(results: Sequence[Result]) -> list[str]:
    def memory(result: Result) -> str:
        return " / ".join(map(WHOLE, result.get("memory", {}).values()))

    words = {"block": "{part}, d={width}", "arrangement": "{arrangement}"}
    numbers = [("plain", medians("plain"))]
    for name, head in (("layers", "layers"), ("fuse_", "`fuse_`")):
        numbers += [(head, medians(name)), ("times", partial(times, name=name, than="plain"))]
    numbers.append(("MiB: plain / layers / `fuse_`", memory))
    return listing(find(results, suite="distributed"), words, numbers)


def own_products(results: Sequence[Result]) -> list[str]:
    """The best order of each kernel, beside the bare product and eager's forward."""
    cases = find(results, suite="hopper")
    kernels = [r for r in cases if "shapes" in r["case"] and "variant" not in r["case"]]
    names = {str(r["case"]["shapes"]): r["case"]["shapes"] for r in kernels}
    bare = find(cases, mode="bare")
    rows = []
    for mode in ("backward", "forward"):
        for (activation,) in grouped(find(kernels, mode=mode), "activation"):
            for shapes in names.values():
                here = find(kernels, mode=mode, activation=activation, shapes=shapes)
                if not here:
                    continue
                sizes = ["x".join(map(str, shapes[k])) for k in ("tile", "cluster", "epilogue")]
                how = "pingpong" if shapes["pingpong"] else "cooperative"
                row = [f"{mode}, {activation}", " ".join([how, *sizes])]
                for b in bare:
                    case = {"sizes": b["case"]["sizes"], "tokens": b["case"]["tokens"]}
                    best = min(median(r, "ours") for r in find(here, **case))
                    row.append(f"{best / median(b, 'mm' if mode == 'backward' else 'linear'):.2f}")
                rows.append(row)
    sizes = [f"{b['case']['tokens']} x {shape(b['case'])}" for b in bare]
    return table(["", "kernel", *sizes], rows, words=2)


def first_calls(results: Sequence[Result]) -> list[str]:
    """How long the drawn problems took, in milliseconds."""
    names = {"ours": "the first step", "each": "for each plan", "later": "the second step"}
    cases = find(results, suite="first-calls")
    rows = []
    for name, words in names.items():
        found = sorted(value for r in cases if (value := median(r, name)) is not None)
        if found:
            limits = {median(r, "limit") for r in cases} if name == "each" else ()
            shares = [found[int(share * (len(found) - 1))] for share in (0.5, 0.9, 1)]
            limit = ", ".join(f"{value:g}" for value in limits)
            rows.append([words, str(len(found)), *(f"{value:.1f}" for value in shares), limit])
    return table(["", "problems", "median", "90 %", "the worst", "limit"], rows, words=1)


def cold_start(results: Sequence[Result]) -> list[str]:
    words = {"program": "{program}", "": "{mode}"}
    numbers = [(f"{n}, s", medians(n, form="{:.3f}".format)) for n in ("ours", "eager")]
    return listing(find(results, suite="cold-start"), words, [*numbers, ("times", times)])


def accumulation(results: Sequence[Result]) -> list[str]:
    def kernels(name: str, result: Result) -> str:
        """Launches: a name that runs several times stands once, with "3 x " before it."""
        counts = [re.match(r"(\d+) x ", kernel) for kernel in result["kernels"][name]]
        return str(sum(int(count[1]) if count else 1 for count in counts))

    words = {"block": "{shape}", "T each": "{tokens}", "": "{mode}"}
    names = ("ours", "apart", "eager", "compile", "compile+pass")
    numbers = [(name, medians(name)) for name in names]
    numbers += [(f"over {name}", partial(times, than=name)) for name in ("apart", "eager")]
    numbers += [("compiled", partial(times, name="compile+pass", than="compile"))]
    numbers += [(f"kernels, {name}", partial(kernels, name)) for name in ("ours", "apart")]
    return listing(find(results, suite="accumulation"), words, numbers)


def batch_invariance(results: Sequence[Result]) -> list[str]:
    """The time under "auto" and under "batch_invariant", and what is left of auto's speed."""

    def beside(result: Result) -> str:
        ratio = times(result, "batch_invariant", "auto")
        return f"{medians(*POLICIES)(result)}: {ratio or 'failed'}"

    found = [r for r in find(results, suite="invariance") if r["case"]["activation"] != "none"]
    modes = {"forward": "forward", "in a CUDA graph": "forward, captured", "step": "step"}
    words = {"block": "{shape}, {activation}", "T": "{tokens}"}
    columns = {head: {"mode": mode} for head, mode in modes.items()}
    return pivot(found, ["sizes", "activation", "tokens"], words, columns, beside)


def invariant_product(results: Sequence[Result]) -> list[str]:
    """One layer without activation, beside Triton's products; their names tell the tile."""
    others = ("auto", "triton 128x128", "triton 128x256")
    numbers = [(name, medians(name)) for name in ("batch_invariant", *others)]
    numbers += [(f"over {n}", partial(times, name="batch_invariant", than=n)) for n in others]
    words = {"T x I→O": "{tokens} x {shape}"}
    return listing(find(results, suite="invariance", activation="none"), words, numbers)


def float8(kept: bool, results: Sequence[Result]) -> list[str]:
    """Ours, the others, and how many times as much they take; of memory kept, or of time."""
    found = [r for r in find(results, suite="float8") if (r["case"]["mode"] == "saved") == kept]
    words = {"block": "{shape}, {activation}{depth}"} | ({} if kept else {"": "{mode}"})
    heads = {"torchao": "torchao", "ours in bf16": "ours in bf16", "compile": "bf16 compiled"}
    form = WHOLE if kept else duration
    numbers = [(head, medians(n, form=form)) for n, head in ({"ours": "ours"} | heads).items()]
    numbers += [(f"{head} / ours", partial(times, than=name)) for name, head in heads.items()]
    return listing(found, words, numbers)


def float8_training(results: Sequence[Result]) -> list[str]:
    """Means over seeds, each with its standard deviation; the difference from bf16 by seed."""

    def spread(values: Sequence[float], form: str) -> str:
        deviation = statistics.stdev(values) if len(values) > 1 else 0
        return f"{statistics.fmean(values):{form}} ± {deviation:.4f}"

    rows = []
    found = find(results, suite="float8-training")
    for arm in ("bf16", "torchao", "ours"):
        mine = [r for r in found if median(r, arm) is not None]
        pairs = [(median(r, arm), median(r, "bf16")) for r in mine]
        apart = [a - b for a, b in pairs if b is not None]
        if mine:
            speed = statistics.median(r["speed"][arm] for r in mine)
            difference = spread(apart, "+.4f") if arm != "bf16" and apart else ""
            loss = spread([a for a, _ in pairs], ".4f")
            rows.append([arm, str(len(mine)), loss, difference, f"{speed:,.0f}"])
    return table(["", "runs", "loss", "difference by seed", "tokens per second"], rows, words=1)


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
    "gated blocks beside CODA": partial(gated_blocks, "gated-coda"),
    "gated blocks on a CPU": partial(gated_blocks, "gated-cpu"),
    "calls of gated blocks": partial(gated_blocks, "gated-host"),
    "memory of gated blocks": partial(gated_blocks, "gated-memory"),
    "several GPUs": several_gpus,
    "own products": own_products,
    "accumulation": accumulation,
    "batch invariance": batch_invariance,
    "a batch-invariant product": invariant_product,
    "FP8 steps": partial(float8, False),
    "FP8 memory": partial(float8, True),
    "FP8 training": float8_training,
    "first calls": first_calls,
    "cold start": cold_start,
}
