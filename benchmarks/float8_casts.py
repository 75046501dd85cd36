"""Times the casts to FP8 beside a copy of as many bytes: how near they come to its bandwidth.

    python -m benchmarks.float8_casts --json FILE     on a GPU of capability 8.9 or newer
    python -m benchmarks.float8_casts --tiny          on a CPU, too: does it run?

Each cast is two kernels on a GPU, and reads its tensors twice. Inputs alternate, so that none is in
the cache from the call before, and all of them are captured in one CUDA graph.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package, where not installed

import torch
from torch import Tensor

import torch_fused_linear  # noqa: F401  (it loads the operators)
from benchmarks import suite
from benchmarks.contenders import events_of, graph_of
from benchmarks.results import result
from torch_fused_linear.timing import Contender, Number, clock_for, measure

ops = torch.ops.fused
GELU_TANH, GELU_ERF, SILU = 2, 3, 4  # the operators' numbers
ENOUGH = 2**28  # bytes of inputs, which outgrow every cache
KERNELS = ("maximum_kernel", "cast_kernel")

Cast = Callable[..., Any]


def casts(scale: Tensor) -> dict[str, tuple[Cast, int, int]]:
    """The call, the tensors that it reads, and the FP8 copies that it writes, as in training: an
    activation's cast is by rows, and the backward writes its columns."""
    return {
        "x to e4m3": (lambda x: ops._float8_cast(x, False, False), 1, 2),
        "dy to e5m2, sums": (lambda x: ops._float8_cast(x, True, True), 1, 2),
        "gelu_tanh": (lambda z: ops._float8_activation(z, GELU_TANH, False), 1, 1),
        "gelu_erf": (lambda z: ops._float8_activation(z, GELU_ERF, False), 1, 1),
        "gelu_tanh backward": (
            lambda g, z: ops._float8_activation_backward(g, z, GELU_TANH, True, scale),
            2,
            3,
        ),
        "silu gating": (lambda g, u: ops._float8_gating(g, u, SILU, False), 2, 1),
        "silu gating backward": (
            lambda d, g, u: ops._float8_gating_backward(d, g, u, SILU, False, True, scale),
            3,
            5,
        ),
    }


def over_sets(call: Cast, sets: list[tuple], device: torch.device) -> Callable[[], Any]:
    """Calls it once with each of the sets, as one graph on a GPU."""

    def each() -> None:
        for operands in sets:
            call(*operands)

    return graph_of(each) if device.type == "cuda" else each


def of_one(number: Number, sets: int) -> Number:
    """The number of one of so many calls."""
    return Number(
        number.median / sets, number.q1 / sets, number.q3 / sets, number.rounds, number.calls
    )


def rows(given: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    begin = time.perf_counter()
    tokens, widths = (32, [64]) if given.tiny else (8192, [1024, 4096, 16384])
    for width in widths:
        for name, cast in casts(torch.ones((), device=device)).items():
            if given.limit and time.perf_counter() - begin > given.limit:
                return
            case = {"suite": "float8-casts", "cast": name, "tokens": tokens, "width": width}
            yield row_of(case, *cast, given, device)


def row_of(
    case: dict[str, Any],
    call: Cast,
    read: int,
    copies: int,
    given: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    shape = case["tokens"], case["width"]
    size = shape[0] * shape[1]
    many = 2 if given.tiny else max(2, -(-ENOUGH // (size * 2)))
    like = {"device": device, "dtype": torch.bfloat16}
    sets = [tuple(torch.randn(shape, **like) for _ in range(read)) for _ in range(many)]
    moved = size * (2 * 2 * read + copies)
    target, *sources = (torch.empty(moved // 2, device=device, dtype=torch.uint8) for _ in range(3))
    runs = {
        "call": over_sets(call, sets, device),
        "copy": over_sets(target.copy_, [(source,) for source in sources], device),
    }
    contenders = [Contender(*run) for run in runs.items()]
    numbers, failed = measure(contenders, clock_for(device), given.seconds)
    counts = {"call": many, "copy": len(sources)}
    numbers = {name: of_one(number, counts[name]) for name, number in numbers.items()}
    if device.type == "cuda" and "call" in numbers:
        numbers |= by_kernel(lambda: call(*sets[0]), device)
    row = {**result(case, "us", numbers), "bytes": moved}
    return {**row, "failed": failed} if failed else row


def by_kernel(call: Callable[[], Any], device: torch.device) -> dict[str, Number]:
    """The microseconds of each of the two kernels."""
    call()
    events = [events_of(Contender("cast", call), device) for _ in range(5)]
    found = {}
    for kernel in KERNELS:
        times = [sum(e.self_device_time_total for e in one if kernel in e.name) for one in events]
        found[kernel] = Number.over(times, 1)
    return found


def in_words(row: dict[str, Any]) -> str:
    case, medians = row["case"], {n: v["median"] for n, v in row["numbers"].items()}
    parts = [f"{name} {value:,.1f}" for name, value in medians.items()]
    if {"call", "copy"} <= set(medians) and medians["call"]:
        parts.append(f"{row['bytes'] / medians['call'] / 1e3:,.0f} GB/s")
        parts.append(f"of a copy's bandwidth {medians['copy'] / medians['call']:.2f}")
    parts += [f"{name} failed: {why}" for name, why in row.get("failed", {}).items()]
    return f"{case['cast']}, {case['tokens']}x{case['width']}, us: " + ", ".join(parts)


def main(arguments: list[str]) -> list[dict[str, Any]]:
    given = suite.parser(__doc__, seconds=0.2).parse_args(arguments)
    return suite.run(rows, in_words, given, arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
