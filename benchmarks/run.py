"""Measures one case: builds its contenders, times them, and makes a record of it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from benchmarks import contenders, memory
from benchmarks.cases import MEMORY_MODES, Case
from benchmarks.models import Models
from benchmarks.results import Record
from torch_fused_linear import plans
from torch_fused_linear.timing import (
    Call,
    Contender,
    Number,
    clock_for,
    in_one_line,
    measure,
    wall_clock,
)

T = TypeVar("T")


def host_clock(call: Call, times: int) -> float:
    """The CPU's time for the calls, without waiting for the GPU."""
    torch.cuda.synchronize()
    seconds = wall_clock(call, times)
    torch.cuda.synchronize()
    return seconds


def attempted(names: Sequence[str], make: Callable[[str], T], record: Record) -> dict[str, T]:
    """Makes a contender of each name; the record lists those that failed."""
    made = {}
    for name in names:
        try:
            made[name] = make(name)
        except Exception as failure:
            record.failed[name] = in_one_line(failure)
    return made


def memory_record(case: Case, names: Sequence[str], device: torch.device) -> Record:
    record = Record(case, unit="MiB")
    models = Models(case, device) if case.model else None
    if models:
        kept = partial(memory.of_model, models=models)
    else:
        (data,) = contenders.data_sets(case, device)
        kept = partial(memory.of_network, case=case, data=data)
    found = attempted(names, kept, record)
    record.numbers = {name: Number.once(size / 2**20) for name, size in found.items()}
    record.replaced = models.replaced() if models else {}
    return record


def timed_record(
    case: Case, names: Sequence[str], device: torch.device, seconds: float, kernels: bool
) -> Record:
    record = Record(case, unit="us")
    models = Models(case, device) if case.model else None
    if models:
        make = models.contender
    else:
        make = partial(contenders.contender, case=case, sets=contenders.data_sets(case, device))
    ready = attempted(names, make, record)
    of_host = case.suite.endswith("host") and device.type == "cuda"
    clock = host_clock if of_host else clock_for(device)
    with plans.patience(0):
        record.numbers, failed = measure(list(ready.values()), clock, seconds)
    record.failed.update(failed)
    running = [ready[name] for name in record.numbers]
    if models:
        record.replaced = models.replaced()
        record.observed = models.observed(running, seconds)
    if kernels:
        record.kernels = {entrant.name: kernels_of(entrant, device) for entrant in running}
    return record


def kernels_of(entrant: Contender, device: torch.device) -> list[str]:
    counts = Counter(event.name for event in contenders.events_of(entrant, device))
    return [name if count == 1 else f"{count} x {name}" for name, count in counts.items()]


def entrants(case: Case, names: Sequence[str], device: torch.device) -> list[str]:
    """Those of `names` that can do what `case` asks for."""
    return [name for name in names if contenders.applies(name, case, device)]


def measure_case(
    case: Case, names: Sequence[str], device: torch.device, seconds: float, kernels: bool = False
) -> Record:
    """Everything about one case, measured for `names` as `entrants` gives them."""
    torch.manual_seed(0)
    if case.mode in MEMORY_MODES:
        record = memory_record(case, names, device)
    else:
        record = timed_record(case, names, device, seconds, kernels)
    clean_up(names, device)
    return record


def clean_up(names: Sequence[str], device: torch.device) -> None:
    """So that the next case finds the process as this one did."""
    if any(name in contenders.COMPILED for name in names):
        torch._dynamo.reset()
        gc.collect()
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if free < total / 2:  # giving memory back costs time, so not for every small case
            gc.collect()
            torch.cuda.empty_cache()
