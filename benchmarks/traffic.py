"""The suites that count bytes: the one-pass gradient of an activation, and memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.cases import DTYPES, KINDS, Case
from benchmarks.contenders import (
    conditions_of,
    in_turns,
    network_of,
    step_of,
)
from benchmarks.models import Models
from benchmarks.models import step_of as model_step
from benchmarks.operands import Operands, sets_needed
from torch_fused_linear.activations import ACTIVATIONS
from torch_fused_linear.timing import Call, Contender

# ------------------------------------------------------------------- gradient of an activation


def saved_for(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """What the backward reads beside the gradient: for ours, and for eager, which has no masks."""
    rows, columns = case.tokens, case.sizes[0]
    values = torch.randn(rows, columns, dtype=DTYPES[case.dtype], device=device)
    if case.mode == "from input":
        return values, values
    values.relu_()
    if case.mode == "from output":
        return values, values
    padded = -columns % 128 + columns  # cuBLASLt's bit mask has rows of whole 16 bytes
    mask = torch.randint(0, 256, (rows, padded // 8), dtype=torch.uint8, device=device)
    return mask, values


def activation_calls(name: str, case: Case, device: torch.device) -> tuple[Call, int]:
    """One call of contender `name` on data of its own, and the bytes that it has to move."""
    ours, eager = saved_for(case, device)
    grad, kind = torch.randn_like(eager), KINDS[case.activation]
    if name == "ours":
        run = torch.ops.fused._activation_backward
        moved = 2 * grad.nbytes + ours.nbytes + grad[0].nbytes
        return lambda: run(grad, ours, kind, True), moved
    if name == "copy":
        target = torch.empty_like(grad)
        return lambda: target.copy_(grad), 2 * grad.nbytes
    form = ACTIVATIONS[kind].approximate

    def separately() -> Tensor:
        if kind == "relu":
            dz = torch.ops.aten.threshold_backward(grad, eager, 0)
        else:
            dz = torch.ops.aten.gelu_backward(grad, eager, approximate=form)
        return dz.sum(0)

    # The gradient once more for the sum: three passes are its way of doing it, and count as such.
    return separately, 3 * grad.nbytes + eager.nbytes + grad[0].nbytes


def activation_contender(name: str, case: Case, device: torch.device) -> tuple[Contender, int]:
    per_set = 3 * case.tokens * case.sizes[0] * DTYPES[case.dtype].itemsize
    made = [activation_calls(name, case, device) for _ in range(sets_needed(per_set, device))]
    return Contender(name, in_turns([call for call, _ in made])), made[0][1]


# ------------------------------------------------------------------------------------- memory


def saved_bytes(compute: Callable[[], Tensor], device: torch.device) -> int:
    """What is left of the memory that `compute` has taken when its output is let go and its graph
    is not. Asking hooks for what they are given would change what layers of low memory keep."""

    def graph_of(output: Tensor) -> object:
        """Of a sum: the node of a Python function lets go of what it keeps with its output."""
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


def hidden_elements(case: Case) -> int:
    return case.tokens * sum(case.sizes[1:-1] or case.sizes[1:])


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


def memory_of(name: str, case: Case, data: Operands) -> float:
    """In bytes."""
    with conditions_of(name, case):
        network, leaves = network_of(name, case, data), data.leaves
        if case.mode == "peak":
            return peak_bytes(step_of(network, data), leaves)
        if case.mode == "B/element":
            kept = saved_bytes(lambda: network(data.input), data.input.device)
            return kept / hidden_elements(case)
        # The input is new each time, as the output of a layer before would be.
        return saved_bytes(
            lambda: network(data.input.detach().clone().requires_grad_()), data.input.device
        )


def memory_of_model(name: str, models: Models) -> float:
    """In bytes."""
    with conditions_of(name, models.case):
        call, leaves = models.call(name)
        if models.case.mode == "peak":
            return peak_bytes(model_step(call, leaves), leaves)
        return saved_bytes(call, models.device)
