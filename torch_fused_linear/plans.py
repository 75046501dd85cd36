"""Plans: how each product is computed on this GPU, measured once and remembered.

cuBLASLt offers several algorithms for a product, and a layer can be computed in several ways: with
the library's fused epilogue, with our own kernel after a plain product, or as eager PyTorch does
it. The fastest way differs from GPU to GPU and from size to size, by up to a half. So when a
problem is first met, the candidates are timed on the spot, and the fastest that is as exact as
eager is kept. (NVIDIA's nvmath-python calls this plan, autotune and execute.) Token counts between
two powers of two share a plan.

Nothing is measured while a CUDA graph is captured, under
``torch.use_deterministic_algorithms(True)``, and with a budget of 0. A fixed rule, or plans from a
file, then decide. Timing decides which algorithm runs, so two processes may differ in the last
bits; with the same file they do not.

A plan from a file is checked for its exactness before its first use in a process, like a measured
one.

Environment variables: ``TORCH_FUSED_LINEAR_PLANS`` names a file that is read at the start and
written when the process ends (several processes may share it); ``TORCH_FUSED_LINEAR_BUDGET_MS`` is
the budget; ``TORCH_FUSED_LINEAR_VERBOSE=1`` prints a line for every decision.
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

from ._support.switch import Switch as _Switch
from ._support.torch_internals import floats_in as _floats_in


def save(path: str | os.PathLike) -> None:
    """Writes this process's plans for the current GPU to a file, all at once.

    Args:
        path: the file. The plans that an existing file has for this GPU are replaced; those for
            other GPUs, and lines that this version does not understand, stay.

    Raises:
        RuntimeError: there is no GPU, or the file cannot be written.

    Examples::

        >>> # needs a GPU
        >>> plans.save("plans.txt")
    """
    torch.ops.fused._plans_save(os.fspath(path))


def load(path: str | os.PathLike) -> int:
    """Reads plans from a file; they replace the plans that this process has measured.

    Args:
        path: a file that :func:`save` wrote.

    Returns:
        The number of plans.

    Raises:
        ValueError: the file cannot be read, is damaged, or was made for another model of GPU,
            version of cuBLASLt or driver. Nothing of it is used then.
        RuntimeError: there is no GPU.

    Examples::

        >>> # needs a GPU
        >>> plans.save("plans.txt")
        >>> count = plans.load("plans.txt")
    """
    return torch.ops.fused._plans_load(os.fspath(path))


def clear() -> None:
    """Forgets all plans. Every problem is measured again when it is next met.

    Examples::

        >>> plans.clear()
        >>> plans.show()
        ''
    """
    torch.ops.fused._plans_clear()


def show() -> str:
    """Returns a line for each plan: pass, problem (rows x inner x columns), strategy, times and
    origin.

    Returns:
        The lines as one string; empty on a CPU.

    Examples::

        >>> lines = plans.show().splitlines()
    """
    return "\n".join(sorted(torch.ops.fused._plans_show()))


def verbose(level: int) -> None:
    """Sets how much is printed on standard error about decisions.

    Args:
        level: 0 (the default) prints nothing, 1 a line for every decision, 2 every candidate's time
            as well.

    Raises:
        ValueError: ``level`` is another number.

    Examples::

        >>> plans.verbose(0)
    """
    torch.ops.fused._plans_set_verbosity(level)


class budget(_Switch):
    """Sets how long a problem may be measured, for the whole process.

    A plain call sets it. As a context manager or a decorator it restores the former budget at the
    end.

    Args:
        milliseconds: for each problem; 200 by default. 0 switches measuring off. Small problems
            take less. Loading kernels for the first time may take some more.

    Raises:
        ValueError: ``milliseconds`` is negative, or more than a million.
        TypeError: ``milliseconds`` is no number.

    Examples::

        >>> with plans.budget(50):
        ...     plans.get_budget()
        50.0
    """

    _get, _set = "_plans_budget", "_plans_set_budget"
    _argument, _expected, _types = "milliseconds", "a number", (int, float)

    def __init__(self, milliseconds: float) -> None:
        super().__init__(milliseconds)


class patience(_Switch):
    """Sets how many calls with a new token count use a neighbour's plan before it is measured.

    Token counts between two powers of two share a plan. Another token count first uses the plan of
    its neighbour, with up to four times or a quarter of the tokens, if one was measured and is as
    exact as eager there. Measuring every size at once would not pay if sizes change all the time. A
    plain call sets the number. As a context manager or a decorator it restores the former one at
    the end.

    Args:
        calls: calls of a problem until it is measured; 0 measures at once. 256 by default.

    Raises:
        ValueError: ``calls`` is negative.
        TypeError: ``calls`` is no integer.

    Examples::

        >>> with plans.patience(0):
        ...     plans.get_patience()
        0
    """

    _get, _set = "_plans_patience", "_plans_set_patience"
    _argument, _expected, _types = "calls", "an integer", (int,)

    def __init__(self, calls: int) -> None:
        super().__init__(calls)


def get_patience() -> int:
    """Returns the patience in force.

    Returns:
        The number of calls; :class:`patience` explains it.

    Examples::

        >>> with plans.patience(10):
        ...     plans.get_patience()
        10
    """
    return torch.ops.fused._plans_patience()


def get_budget() -> float:
    """Returns the budget in force.

    Returns:
        Milliseconds for each problem.

    Examples::

        >>> with plans.budget(50):
        ...     plans.get_budget()
        50.0
    """
    return torch.ops.fused._plans_budget()


def warmup(module: nn.Module, *inputs: Any, **kwargs: Any) -> None:
    """Runs a module once, so that all plans for these very sizes exist: for servers, and before a
    CUDA graph is captured.

    It runs the forward under the grad mode in force and, if gradients are enabled and the output
    has any, the backward. Gradients, buffers and the random state are afterwards as they were. On a
    terminal it shows after two seconds how many plans exist so far; how many there will be is not
    known before the run is over.

    Args:
        module: a module or callable.
        inputs, kwargs: the arguments that it is called with, of the sizes that will be used.

    Examples::

        >>> plans.warmup(FusedMLP(16, 64, 16), torch.randn(32, 16))
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
    """Shows plans and seconds so far in a line on standard error, wiped at the end."""
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

    Call it in every process of the group, for example after :func:`warmup` in one of them or in
    all. The other processes forget their own decisions. From then on nothing that has a plan is
    measured.

    Args:
        group: a process group of ``torch.distributed``. Default: all processes.
        source: the rank within the group of the process whose plans are used.

    Returns:
        The number of plans.

    Raises:
        RuntimeError: the source could not save its plans; every process raises this then.
        ValueError: this process has another model of GPU, version of cuBLASLt or driver than the
            source. It keeps its own plans then.

    Examples::

        >>> # needs several processes
        >>> plans.broadcast()
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
