"""Measures one case: builds its contenders, times them, and makes a record of it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks import contenders, memory
from benchmarks.cases import MEMORY_MODES, Case
from benchmarks.models import Models
from benchmarks.results import Record
from torch_fused_linear import plans
from torch_fused_linear.timing import Contender, Number, clock_for, in_one_line, measure


def memory_record(case: Case, names: Sequence[str], device: torch.device) -> Record:
    record = Record(case, unit="MiB")
    models = Models(case, device) if case.model else None
    (data,) = [None] if models else contenders.data_sets(case, device)
    for name in names:
        try:
            if models:
                kept = memory.of_model(name, models)
                models.copies.clear()  # of each but the original
            else:
                kept = memory.of_network(name, case, data)
            record.numbers[name] = Number.once(kept / 2**20)
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
    if models:
        make = models.contender
    else:
        make = partial(contenders.contender, case=case, sets=contenders.data_sets(case, device))
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


def kernels_of(entrant: Contender, device: torch.device) -> list[str]:
    """What one call runs on `device`: kernels of the GPU, or operators on the CPU."""
    on_gpu = device.type == "cuda"
    kind = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with (
        entrant.conditions(),
        torch.profiler.profile(activities=[kind], acc_events=True) as profile,
    ):
        entrant.call()
        if on_gpu:
            torch.cuda.synchronize()
    wanted = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    counts = Counter(event.name for event in profile.events() if event.device_type == wanted)
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
