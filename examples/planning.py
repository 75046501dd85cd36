"""Planning: the first call, the tuned calls, and plans that are saved.

cuBLASLt offers several algorithms for a product, and a layer can be done in several ways: with the
fused epilogue, with a kernel of ours after a plain product, or as eager does it. What is fastest
differs between GPUs and sizes. So the first time that a GPU meets a problem, the candidates are
tried on the spot, on scratch memory, and the fastest that is as exact as eager is kept. NVIDIA's
nvmath-python has the same as three calls, plan, autotune and execute; here it is done inside of the
operator, and the code that uses it does not change:

    first call     measures, for at most about `plans.budget` milliseconds per problem (200)
    later calls    look the plan up
    plans.show()   says what was decided
    plans.save()   writes it to a file; plans.load() in another process spares the measuring there
    plans.warmup() runs a module once, for servers, and for before a CUDA graph is captured
    plans.clear()  forgets it all

Token counts between two powers of two share a plan, so batches of changing size do not measure for
ever. Nothing is measured with a budget of 0, while a CUDA graph is captured, and under
`torch.use_deterministic_algorithms(True)`: a fixed rule then decides, or what was loaded.

The environment does it without a line of code: TORCH_FUSED_LINEAR_PLANS=plans.txt reads the file
at the start and writes it at the end, TORCH_FUSED_LINEAR_VERBOSE=1 prints every decision.

On a CPU there are no plans: the operators run PyTorch's and oneDNN's own kernels, which choose for
themselves, so that there is nothing to measure. The script then shows just that: the budget can be
set and read, `show` is empty, and `save` says why it refuses. A picture of times there would show
noise, so there is none.

    python examples/planning.py
"""

from __future__ import annotations

import math
import signal
import time
from argparse import ArgumentDefaultsHelpFormatter as WithDefaults
from argparse import ArgumentParser
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from torch_fused_linear import FusedMLP, plans

CALLS = 30


def milliseconds(model: nn.Module, x: Tensor) -> float:
    """One training step by the wall clock: a GPU's plans are measured by the CPU's hand."""
    if x.is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    model(x).sum().backward()
    if x.is_cuda:
        torch.cuda.synchronize()
    model.zero_grad(set_to_none=True)
    return 1e3 * (time.perf_counter() - begin)


def course(what: str, model: nn.Module, x: Tensor) -> list[float]:
    """The times of the first call, and of those after it."""
    times = [milliseconds(model, x) for _ in range(CALLS)]
    print(f"{what:40} first {times[0]:9.2f} ms, later {median(times[1:]):7.3f} ms")
    return times


def show_budget() -> dict[str, float]:
    """A plain call sets the budget, a `with` block puts it back."""
    budgets = {"before": plans.get_budget()}
    with plans.budget(50):
        budgets["inside"] = plans.get_budget()
    budgets["after"] = plans.get_budget()
    print(f"budget in milliseconds per problem: {budgets}")
    return budgets


def on_a_cpu(model: nn.Module, x: Tensor, file: Path) -> dict:
    """Without a GPU nothing is planned."""
    milliseconds(model, x)
    shown = plans.show()
    print(f"plans.show(): {shown!r}, for there is nothing to decide")
    try:
        plans.save(file)
        refusal = ""
    except RuntimeError as error:
        refusal = str(error).splitlines()[0]
    print(f"plans.save(): {refusal}")
    return {"shown": shown, "refusal": refusal}


def on_a_gpu(model: nn.Module, x: Tensor, file: Path) -> dict:
    """By rule, measured, and from a file; a warm-up beforehand takes what any library does once."""
    courses = {}
    plans.clear()
    with plans.budget(0):
        milliseconds(model, x)
        courses["by rule"] = course("a budget of 0: by rule", model, x)

    plans.clear()
    with plans.budget(200):
        courses["measured"] = course("a budget of 200: measured", model, x)
        shown = plans.show()
        print(f"\nplans.show():\n{shown}\n")
        # Between the same two powers of two: nothing is measured again.
        fewer = x[: x.shape[0] * 3 // 4]
        courses["fewer tokens"] = course("three quarters of the tokens", model, fewer)

    plans.save(file)
    plans.clear()
    loaded = plans.load(file)  # as another process would
    print(f"{loaded} plans loaded from {file}")
    with plans.budget(0):
        courses["from a file"] = course("from the file", model, x)

    plans.clear()
    with plans.budget(200):
        plans.warmup(model, x)
        courses["after warmup"] = course("after plans.warmup", model, x)
    return {"courses": courses, "shown": shown, "loaded": loaded}


# The names in the picture. A call with fewer tokens is other work, so it is not drawn.
DRAWN = {
    "measured": ("new to the process: the first call measures", "#d55e00"),
    "by rule": ("nothing may be measured: plans by rule", "#e69f00"),
    "from a file": ("plans from a file", "#0072b2"),
    "after warmup": ("plans.warmup was there before", "#009e73"),
}


def draw(path: Path, courses: dict[str, list[float]], title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.4), dpi=130, layout="constrained")
    axes = figure.subplots()
    for name, (label, colour) in DRAWN.items():
        if name in courses:
            calls = range(1, len(courses[name]) + 1)
            axes.plot(calls, courses[name], "o-", color=colour, markersize=4, label=label)
    axes.set(title=title, xlabel="call, one after the other", yscale="log")
    axes.set(ylabel="milliseconds", xticks=[1, *range(5, CALLS + 1, 5)])
    axes.yaxis.set_major_formatter("{x:g}")
    low, high = axes.get_ylim()
    axes.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(4 * high)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#e6e9ec", linewidth=0.7)
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> dict:
    """Runs the example; -> its numbers."""
    parser = ArgumentParser(description=__doc__.split("\n")[0], formatter_class=WithDefaults)
    add = parser.add_argument
    add("--out", type=Path, default=Path("example_pictures"), help="folder for picture and plans")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)

    budgets = show_budget()
    file = given.out / "plans.txt"
    if given.device == "cpu":
        model, x = FusedMLP(96, 384, 96), torch.randn(256, 96)
        return {"budgets": budgets, **on_a_cpu(model, x, file)}
    half = {"device": given.device, "dtype": torch.bfloat16}
    sizes, rows = (768, 3072, 768), 8192
    model, x = FusedMLP(*sizes, **half), torch.randn(rows, sizes[0], **half)
    numbers = on_a_gpu(model, x, file)
    path = given.out / "planning.png"
    about = f"training step of {'→'.join(map(str, sizes))}, {rows} rows, {given.device}"
    draw(path, numbers["courses"], f"Only the first call of a new size measures\n{about}")
    print(path)
    return {"budgets": budgets, **numbers}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, without a traceback
    main()
