"""Times first calls, in which plans are made, beside eager's, each contender in fresh processes.

    python benchmarks/first_calls.py --json FILE     on a GPU
    python benchmarks/first_calls.py --tiny          on a CPU, too: does it run?

The first training step of 60 problems: layers and blocks of two, up to 4096→16384 with up to 65536
tokens, drawn by a seed; the second step, and what the first may take. And a first and a second pass
over many lengths with a block 1024→4096→1024 and GELU (tanh): training on 300 lengths of 256 to
8192 tokens in bf16, on 60 in fp32, and inference on 500 batches of 1 to 512 in bf16.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package, where not installed

import torch
from torch import Tensor, nn

import torch_fused_linear as tfl
from benchmarks import contenders, machine
from benchmarks.cases import DTYPES, KINDS
from benchmarks.pages import tables
from benchmarks.results import result, write
from torch_fused_linear.activations import ACTIVATIONS
from torch_fused_linear.timing import Call, Number

CONTENDERS = ("ours", "eager")
# The limit for a first step: this part of the budget, and this many milliseconds more.
SHARE, MORE = 1.5, 50.0
# The least and the most of tokens, inputs and outputs; the two of these are multiples of 8.
BOUNDS = ((64, 65536), (64, 4096), (64, 16384))
TINY_BOUNDS = ((4, 32), (8, 16), (8, 32))
# A pass's dtype, how many lengths, the least and the most, and whether it trains.
PASSES = {
    "training, bf16": ("bf16", 300, (256, 8192), True),
    "training, fp32": ("fp32", 60, (256, 8192), True),
    "inference, bf16": ("bf16", 500, (1, 512), False),
}


def drawn(draw: random.Random, bounds: tuple[int, int], multiple: int = 8) -> int:
    """Between `bounds`, each doubling as likely as another."""
    value = math.exp(draw.uniform(*map(math.log, bounds)))
    return min(bounds[1], max(bounds[0], round(value / multiple) * multiple))


def problems(count: int, bounds: Sequence[tuple[int, int]] = BOUNDS) -> list[dict]:
    """Sizes, tokens, dtype and activation of each; the same at every call."""
    draw, found = random.Random(1), []
    tokens, inputs, outputs = bounds
    for index in range(count):
        i, o = drawn(draw, inputs), drawn(draw, outputs)
        kind = draw.choice(("relu", "gelu", "silu"))
        sizes = [i, o, i] if index % 2 else [i, o]
        case = {"suite": "first-calls", "sizes": sizes, "tokens": drawn(draw, tokens, 1)}
        case |= {"dtype": draw.choice(("bf16", "fp16", "fp32")), "activation": kind}
        found.append(case | {"mode": "first step"})
    return found


# --- in a process of its own --------------------------------------------------------------------


def network(sizes: Sequence[int], activation: str, name: str, **options) -> nn.Module:
    first, *rest = (nn.Linear(i, o, **options) for i, o in pairwise(sizes))
    model = nn.Sequential(first, ACTIVATIONS[KINDS[activation]].module(), *rest)
    if name == "ours":
        tfl.fuse_(model)
    return model


def step_of(model: nn.Module, x: Tensor, grad: Tensor | None) -> Call:
    if grad is None:
        return torch.no_grad()(partial(model, x))
    return contenders.step_of(partial(model, x), [x, *model.parameters()], grad)


def milliseconds(steps: Sequence[Call], device: torch.device) -> float:
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    begin = time.perf_counter()
    for step in steps:
        step()
    synchronize()
    return (time.perf_counter() - begin) * 1e3


def single_steps(name: str, device: torch.device, tiny: bool) -> list[list[float]]:
    """For each problem the times of the first step and the second, and how many plans were made."""
    found = []
    for case in problems(2, TINY_BOUNDS) if tiny else problems(60):
        options = {"device": device, "dtype": DTYPES[case["dtype"]]}
        model = network(case["sizes"], case["activation"], name, **options)
        x = torch.randn(case["tokens"], case["sizes"][0], **options).requires_grad_()
        grad = torch.randn(case["tokens"], case["sizes"][-1], **options)
        tfl.plans.clear()
        with tfl.plans.patience(0):
            times = [milliseconds([step_of(model, x, grad)], device) for _ in range(2)]
        found.append([*times, len(tfl.plans.show().splitlines())])
    return found


def passes(program: str, name: str, device: torch.device, tiny: bool) -> list[float]:
    """The times of the first pass and of the second."""
    dtype, count, (low, high), trains = PASSES[program]
    width, count, high = (16, 4, low + 8) if tiny else (1024, count, high)
    options = {"device": device, "dtype": DTYPES[dtype]}
    model = network((width, 4 * width, width), "gelu", name, **options)
    x = torch.randn(high, width, **options)
    draw = random.Random(0)
    parts = [x[: draw.randint(low, high)] for _ in range(count)]
    steps = [step_of(model, part, part if trains else None) for part in parts]
    return [milliseconds(steps, device) for _ in range(2)]


def run(program: str, name: str, tiny: bool) -> list:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    for width in (8, 16):  # CUDA, cuBLAS and the autograd thread are there
        small = torch.randn(width, width, device=device, requires_grad=True)
        nn.functional.linear(small, small).sum().backward()
    return passes(program, name, device, tiny) if program else single_steps(name, device, tiny)


# --- the command --------------------------------------------------------------------------------


def in_own_process(program: str, name: str, tiny: bool) -> list:
    command = [sys.executable, __file__, "--one", program, name, *["--tiny"] * tiny]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def of_problems(tiny: bool) -> list[dict]:
    """`each` is what the first step takes beyond the second, by the number of plans made."""
    found = {name: in_own_process("", name, tiny) for name in CONTENDERS}
    cases = problems(2, TINY_BOUNDS) if tiny else problems(60)
    results = []
    for case, (first, later, plans), (eager, *_) in zip(cases, found["ours"], found["eager"]):
        values = {"ours": first, "later": later, "each": max(0.0, first - later) / max(1, plans)}
        values |= {"eager": eager, "limit": SHARE * tfl.plans.get_budget() + MORE}
        results.append(result(case, "ms", {n: Number.once(v) for n, v in values.items()}))
    return results


def of_passes(program: str, repeats: int, tiny: bool) -> list[dict]:
    rounds = [
        {name: in_own_process(program, name, tiny) for name in CONTENDERS} for _ in range(repeats)
    ]
    results = []
    for index, mode in enumerate(("first pass", "second pass")):
        numbers = {
            name: Number.over([times[name][index] / 1e3 for times in rounds], calls=1)
            for name in CONTENDERS
        }
        case = {"suite": "cold-start", "program": program, "mode": mode}
        results.append(result(case, "s", numbers))
    return results


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    parser.add_argument("--repeats", type=int, default=3, help="processes of a pass; default: 3")
    parser.add_argument("--tiny", action="store_true", help="does it run?")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one:
        print(json.dumps(run(*given.one, given.tiny)))
        return
    results = of_problems(given.tiny)
    for program in PASSES:
        results += of_passes(program, given.repeats, given.tiny)
    print(*tables.first_calls(results), "", *tables.cold_start(results), sep="\n")
    if given.json:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        write(given.json, machine.header(device, arguments), results)


if __name__ == "__main__":
    main(sys.argv[1:])
