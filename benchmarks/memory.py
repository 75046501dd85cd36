"""The suites of memory: what a step keeps for its backward, and takes at most."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.contenders import conditions_of, network_of, network_step, step_of
from benchmarks.models import Models
from benchmarks.operands import Operands
from torch_fused_linear.timing import Call


def saved_bytes(compute: Callable[[], Tensor], device: torch.device) -> int:
    """The memory that `compute` still holds when its output is freed and its graph
    is not. Asking hooks for what they are given would change what layers of low memory keep."""

    def graph_of(output: Tensor) -> object:
        """Returns a sum's node: a Python function's node frees its tensors with its output."""
        return output.sum().grad_fn

    graph_of(compute())  # workspaces are taken once and kept
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        graph = graph_of(compute())
        left = torch.cuda.memory_allocated(device) - before
        del graph
        return left
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        graph = graph_of(compute())
    del graph
    return sum(event.self_cpu_memory_usage for event in profile.key_averages())


def peak_bytes(step: Call, leaves: list[Tensor]) -> int:
    """The most that a step takes beside what was there before it; gradients are part of it."""
    step()  # workspaces are taken once and kept
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def of_network(name: str, case: Case, data: Operands) -> int:
    with conditions_of(name, case):
        network = network_of(name, case, data)
        if case.mode == "peak":
            return peak_bytes(network_step(network, data), data.leaves)
        # The input is new each time, as the output of a layer before would be.
        return saved_bytes(
            lambda: network(data.input.detach().clone().requires_grad_()), data.input.device
        )


def of_model(name: str, models: Models) -> int:
    with conditions_of(name, models.case):
        call, leaves = models.call(name)
        models.copies.clear()  # of each but the original
        if models.case.mode == "peak":
            return peak_bytes(step_of(call, leaves), leaves)
        return saved_bytes(call, models.device)
