"""Measures one case: builds its contenders, times them, and makes a record of it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from benchmarks import contenders, gated, traffic
from benchmarks.cases import MEMORY_MODES, Case
from benchmarks.first_calls import first_calls_record
from benchmarks.models import Models
from benchmarks.operands import random_sets
from benchmarks.results import Record
from torch_fused_linear import plans
from torch_fused_linear.timing import (
    Call,
    Contender,
    Number,
    clock_for,
    in_one_line,
    measure,
)


def memory_record(case: Case, names: Sequence[str], device: torch.device) -> Record:
    per_element = case.mode == "B/element"
    record = Record(case, unit="B" if per_element else "MiB")
    models = Models(case, device) if case.model else None
    (data,) = [None] if models else random_sets(case, device)
    for name in names:
        try:
            if models:
                kept = traffic.memory_of_model(name, models)
                models.copies.clear()  # of each but the original
            else:
                kept = traffic.memory_of(name, case, data)
            record.numbers[name] = Number.once(kept if per_element else kept / 2**20)
        except Exception as failure:
            record.failed[name] = in_one_line(failure)
    record.replaced = models.replaced() if models else {}
    return record


def timed_record(
    case: Case, names: Sequence[str], device: torch.device, seconds: float, kernels: bool
) -> Record:
    record = Record(case, unit="us")
    ready: list[Contender] = []
    models = Models(case, device) if case.model else None
    make = models.contender if models else maker(record, device)
    for name in names:
        try:
            ready.append(make(name))
        except Exception as failure:
            record.failed[name] = in_one_line(failure)
    clock = clock_for(device, host=case.suite.endswith("host"))
    with plans.patience(0):
        record.numbers, failed = measure(ready, clock, seconds)
    record.failed.update(failed)
    if models:
        record.replaced = models.replaced()
        record.observed = models.observed([e for e in ready if e.name in record.numbers])
    if kernels:
        running = (entrant for entrant in ready if entrant.name in record.numbers)
        record.kernels = {entrant.name: kernels_of(entrant, device) for entrant in running}
    return record


def maker(record: Record, device: torch.device) -> Callable[[str], Contender]:
    """What makes the contenders of a case, all on the same data."""
    case = record.case
    if case.suite != "activation":
        sets = random_sets(case, device)
        return lambda name: contenders.contender(name, case, sets)

    def make(name: str) -> Contender:
        entrant, record.bytes_moved[name] = traffic.activation_contender(name, case, device)
        return entrant

    return make


def kernels_of(entrant: Contender, device: torch.device) -> list[str]:
    """What one call runs on `device`: kernels of the GPU, or operators on the CPU."""
    on_gpu = device.type == "cuda"
    kind = torch.profiler.ProfilerActivity
    with (
        entrant.conditions(),
        torch.profiler.profile(
            activities=[kind.CUDA if on_gpu else kind.CPU], acc_events=True
        ) as profile,
    ):
        synchronized(entrant.call, device)
    wanted = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    counts = Counter(event.name for event in profile.events() if event.device_type == wanted)
    return [name if count == 1 else f"{count} x {name}" for name, count in counts.items()]


def synchronized(call: Call, device: torch.device) -> None:
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()


def entrants(case: Case, names: Sequence[str], device: torch.device) -> list[str]:
    """Those of `names` that can do what `case` asks for."""
    if case.suite == "activation":
        return [name for name in names if name in ("ours", "eager", "copy")]
    if case.mode in MEMORY_MODES:
        known = ("eager", *contenders.POLICIES, *gated.OTHERS)
        names = [name for name in names if name in known]
    return [name for name in names if contenders.applies(name, case, device)]


def measure_case(
    case: Case, names: Sequence[str], device: torch.device, seconds: float, kernels: bool = False
) -> Record:
    """Everything about one case, measured for `names` as `entrants` gives them."""
    torch.manual_seed(0)
    if case.mode in MEMORY_MODES:
        record = memory_record(case, names, device)
    elif case.suite == "first-calls":
        record = first_calls_record(case, names, device)
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
