"""Plans: how each product is done on this GPU, found by measuring, once, and remembered.

cuBLASLt offers several algorithms for a product, and a layer can be done in several ways: with the
library's fused epilogue, with our own kernel after a plain product, or as eager does it. Which is
the fastest differs from GPU to GPU and from size to size by up to a half. So the first time that a
problem is met, the candidates are tried on the spot, and the fastest that is as exact as eager is
kept: what NVIDIA's nvmath-python calls plan, autotune and execute, done inside of the operator.
Token counts between two powers of two share a plan.

Nothing is measured while a CUDA graph is captured, under
``torch.use_deterministic_algorithms(True)``, and with a budget of 0; the choice is then a fixed
rule's, or that of plans loaded from a file. Timing decides which algorithm runs, so two processes
may differ in the last bits; with the same file they do not.

A plan from a file is tried for its exactness before its first use in a process, as one that was
measured is.

Environment variables: ``TORCH_FUSED_LINEAR_PLANS`` names a file that is read at first and written
when the process ends (several processes may share it); ``TORCH_FUSED_LINEAR_BUDGET_MS`` is the
budget; ``TORCH_FUSED_LINEAR_VERBOSE=1`` prints a line for every decision.
"""

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path as _Path
from typing import Any

import torch
from torch import Tensor, nn

from ._switch import Switch as _Switch
from ._torch_internals import floats_in as _floats_in


def save(path: str | os.PathLike) -> None:
    """Writes this process's plans for the current GPU to a file, at once and as a whole.

    Args:
        path: of the file; the plans that an old one has for this GPU are replaced. What it holds
            for others, or in lines that this version does not understand, stays.

    Raises:
        RuntimeError: there is no GPU, or the file cannot be written.
    """
    torch.ops.fused._plans_save(os.fspath(path))


def load(path: str | os.PathLike) -> int:
    """Reads plans from a file, which take the place of what this process has measured.

    Args:
        path: of a file that :func:`save` wrote.

    Returns:
        How many plans there were.

    Raises:
        ValueError: the file cannot be read, is damaged, or was made for another model of GPU,
            version of cuBLASLt or driver. Nothing of it is used then.
        RuntimeError: there is no GPU.
    """
    return torch.ops.fused._plans_load(os.fspath(path))


def clear() -> None:
    """Forgets all plans: every problem is measured anew when it is next met."""
    torch.ops.fused._plans_clear()


def show() -> str:
    """A line for each plan: pass, problem (rows x inner x columns), strategy, times, origin."""
    return "\n".join(sorted(torch.ops.fused._plans_show()))


def verbose(level: int) -> None:
    """Sets how much is told on standard error.

    Args:
        level: nothing (0, the default), a line for every decision (1), and what every candidate
            took (2).

    Raises:
        ValueError: it is another number.
    """
    torch.ops.fused._plans_set_verbosity(level)


class budget(_Switch):
    """Sets how long a problem may be measured, for the whole process.

    A plain call sets it; as a context manager or a decorator it is put back at the end.

    Args:
        milliseconds: per problem; 0 switches measuring off. 200 at first. Small problems take less;
            loading kernels for the first time may take some more.

    Raises:
        ValueError: it is negative, or more than a million.
        TypeError: it is no number.
    """

    _get, _set = "_plans_budget", "_plans_set_budget"
    _argument, _expected, _types = "milliseconds", "a number", (int, float)

    def __init__(self, milliseconds: float) -> None:
        super().__init__(milliseconds)


class patience(_Switch):
    """Sets how long a token count goes by the plan of a neighbour before it is measured itself.

    Token counts between two powers of two share a plan. One outside of them whose neighbour, with
    up to four times or a quarter of the tokens, has been measured takes that plan at first, if it
    is as exact as eager there; measuring every size at once would not pay where sizes change all
    the time. A plain call sets it; as a context manager or a decorator it is put back at the end.

    Args:
        calls: of a problem, until it is measured; 0: at once. 256 at first.

    Raises:
        ValueError: it is negative.
        TypeError: it is no integer.
    """

    _get, _set = "_plans_patience", "_plans_set_patience"
    _argument, _expected, _types = "calls", "an integer", (int,)

    def __init__(self, calls: int) -> None:
        super().__init__(calls)


def get_patience() -> int:
    """The patience in force, in calls."""
    return torch.ops.fused._plans_patience()


def get_budget() -> float:
    """The budget in force, in milliseconds per problem."""
    return torch.ops.fused._plans_budget()


def warmup(module: nn.Module, *inputs: Any, **kwargs: Any) -> None:
    """Runs a module once, so that all plans which it needs are there, measured for its very sizes:
    for servers, and for before a CUDA graph is captured.

    Forward only, under the grad mode in force; where gradients are enabled and the output has any,
    backward too. Gradients, buffers and the random state are afterwards as they were. A terminal is
    told after two seconds how many plans there are by now; how many there will be is not known
    before the run is over.

    Args:
        module: any module or callable.
        inputs, kwargs: what it is called with, of the sizes that will be used.
    """
    parameters = list(module.parameters()) if isinstance(module, nn.Module) else []
    tensors = [t for t in (*inputs, *kwargs.values(), *parameters) if isinstance(t, Tensor)]
    buffers = list(module.buffers()) if isinstance(module, nn.Module) else []
    leaves = [t for t in tensors if t.requires_grad and t.is_leaf]
    devices = {t.device for t in (*tensors, *buffers) if t.is_cuda}
    before = [buffer.clone() for buffer in buffers]
    try:
        with _told_on_a_terminal(), torch.random.fork_rng(devices), patience(0):
            roots = [t for t in _floats_in(module(*inputs, **kwargs)) if t.requires_grad]
            if roots and leaves and torch.is_grad_enabled():
                ones = [torch.ones_like(t) for t in roots]
                torch.autograd.grad(roots, leaves, ones, allow_unused=True)
    finally:
        with torch.no_grad():
            for buffer, old in zip(buffers, before):
                buffer.copy_(old)


_SECONDS_UNTOLD = 2.0


@contextlib.contextmanager
def _told_on_a_terminal() -> Iterator[None]:
    """A line on standard error with the plans and the seconds so far, wiped at the end."""
    if not sys.stderr.isatty():
        yield
        return
    begin, over = time.monotonic(), threading.Event()

    def tell() -> None:
        line, wait = "", _SECONDS_UNTOLD
        while not over.wait(wait):
            plans, seconds = len(torch.ops.fused._plans_show()), time.monotonic() - begin
            line, wait = f"plans.warmup: {plans} plans in {seconds:.0f} s", 0.5
            print(f"\r{line}", end="", file=sys.stderr, flush=True)
        if line:
            print(f"\r{' ' * len(line)}\r", end="", file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def broadcast(group: Any = None, source: int = 0) -> int:
    """Gives the plans of one process to all, so that all compute the same bits in the same way.

    Every process of the group calls it, for example after :func:`warmup` in one of them, or in all:
    what the others have decided is forgotten. From then on nothing that has a plan is measured.

    Args:
        group: of processes, as ``torch.distributed`` has it; all of them by default.
        source: whose plans they are, by its rank within the group.

    Returns:
        How many plans there were.

    Raises:
        RuntimeError: the source could not save its plans, which every process then raises.
        ValueError: this process has another model of GPU, version of cuBLASLt or driver than the
            source. It keeps its own plans then.
    """
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        path = _Path(folder) / "plans"
        is_source = dist.get_rank(group) == source
        sent: list[Any] = [None]
        if is_source:
            try:
                save(path)
                sent = [path.read_bytes()]
            except Exception as failure:  # the others wait
                sent = [str(failure)]
        dist.broadcast_object_list(sent, group=group, group_src=source)
        if isinstance(sent[0], str):
            raise RuntimeError(f"plans.broadcast: rank {source} of the group failed: {sent[0]}")
        if not is_source:
            path.write_bytes(sent[0])
            load(path)  # where it cannot be used this raises, and nothing is lost
            clear()
        return load(path)
