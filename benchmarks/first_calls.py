"""The suite `first-calls`: what the first training step takes, in which plans are made."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence

import torch

from benchmarks.cases import Case
from benchmarks.contenders import conditions_of, network_of, step_of
from benchmarks.operands import Operands
from benchmarks.results import Record
from torch_fused_linear import plans
from torch_fused_linear.timing import Call, Number, in_one_line

# What a first call may take: so much of the budget, and so many milliseconds.
SHARE, MORE = 1.5, 50.0


def milliseconds(call: Call, device: torch.device) -> float:
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) * 1e3


def two_steps(case: Case, name: str, device: torch.device) -> list[float]:
    """Milliseconds of the first step and of the second."""
    data = Operands.random(case, device)
    with conditions_of(name, case):
        step = step_of(network_of(name, case, data), data)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return [milliseconds(step, device) for _ in range(2)]


@functools.cache
def warm_up(device: torch.device) -> None:
    """Another problem: what is done once in a process is no matter of the first call."""
    small = Case("first-calls", (72, 136, 72), 40, "bf16", "relu", "first step")
    for name in ("eager", "mlp"):
        two_steps(small, name, device)


def first_calls_record(case: Case, names: Sequence[str], device: torch.device) -> Record:
    """`each` is what the first step takes beyond the second, by the number of plans made."""
    warm_up(device)
    record = Record(case, unit="ms")
    record.numbers["limit"] = Number.once(SHARE * plans.get_budget() + MORE)
    for name in names:
        plans.clear()
        is_block = name == "ours" and len(case.sizes) > 2
        try:
            with plans.patience(0):
                first, later = two_steps(case, "mlp" if is_block else name, device)
        except Exception as failure:
            record.failed[name] = in_one_line(failure)
            continue
        record.numbers[name] = Number.once(first)
        if name == "ours":
            made = len(plans.show().splitlines())
            record.numbers["later"] = Number.once(later)
            record.numbers["each"] = Number.once(max(0.0, first - later) / max(1, made))
    return record


def summary(records: Sequence[Record]) -> str:
    done = [record for record in records if "ours" in record.numbers]
    if not done:
        return "no first step was measured"
    limit = done[0].numbers["limit"].median
    lines = [
        f"limit: {SHARE:g} times the budget of {plans.get_budget():g} ms, and {MORE:g} ms; each: "
        "the first step beyond the second, for each plan made"
    ]
    for name, what in (("ours", "first steps"), ("each", "each plan")):
        times = {record.case: record.numbers[name].median for record in done}
        worst = max(times, key=times.__getitem__)
        over = sum(value > limit for value in times.values())
        lines.append(
            f"{what}: median {statistics.median(times.values()):.1f} ms, worst "
            f"{times[worst]:.1f} ms, {over} of {len(done)} above the limit; the worst: {worst}"
        )
    return "\n".join(lines)
