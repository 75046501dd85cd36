"""``gain``: what fusing would bring a model. ``python -m torch_fused_linear.gain`` is the same.

named.py    models by name
ways.py     a model in each way that is compared
share.py    the part of a call's time that lies in what can be fused
result.py   what was found, and the verdict
picture.py  as bars
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..fuse import fuse_, unfuse_
from ..timing import clock_for, in_one_line, measure
from .result import Gain, Mode
from .share import share_of
from .ways import COMPILED, EAGER, FUSED, OURS, Ways, distance, loss_of

__all__ = ["Gain", "Mode", "gain"]


def gain(
    model: nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] = loss_of,
    step: bool = False,
    compile: bool = False,
    seconds: float = 5.0,
    progress: bool = True,
) -> Gain:
    """Measures what :func:`fuse_` and :func:`compile_options` bring a model.

    ::

        print(torch_fused_linear.gain(model, x, step=True))

    Everything is run on copies, so that the model, its gradients, buffers and hooks, the inputs
    and torch's random numbers stay as they are. All ways take turns in one process, and a way is
    called faster only where three quarters of its rounds were faster than three quarters of the
    other's. Run it where ``torch.autocast`` is in force to measure that.

    Args:
        model: on the device and in the dtype that are meant. Its parameters are copied once.
        inputs: what it is called with.
        kwargs: what it is called with by keyword.
        loss: the loss of its output, for the step. By default the ``loss`` that the output has, or
            the mean of all floating-point tensors in it.
        step: also measure a training step: loss and all gradients, without an optimizer.
        compile: also measure ``torch.compile``, and that with our pass. Compiling takes from
            seconds to minutes.
        seconds: how long to time each mode, or longer until there are nine rounds.
        progress: say on standard error what is being done.

    Returns:
        What was found. It can be printed, and drawn by ``save_picture(path)``; its ``verdict`` is
        a sentence.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``, is scripted, traced or exported, or cannot be
            copied.
        ValueError: its output has no floating-point tensor.
        Exception: what the model itself raises when it is called so.
    """
    model = getattr(model, "_orig_mod", model)  # of a compiled model, what was compiled
    fuse_(model, dry_run=True)  # raises what it is for whatever is not a model
    say = (lambda text: print(f"gain: {text}", file=sys.stderr, flush=True)) if progress else str
    devices, state = range(torch.cuda.device_count()), random.getstate()
    with torch.random.fork_rng(devices):
        ways = Ways(model, inputs, kwargs or {}, loss)
        try:
            return found(ways, step, compile, seconds, say)
        finally:
            unfuse_(ways.fused)
            random.setstate(state)


def found(ways: Ways, step: bool, compile: bool, seconds: float, say: Callable) -> Gain:
    modes = {}
    if ways.report.fused or compile:
        for name in ("inference", *["step"] * step):
            ways.set_mode(name == "step")
            modes[name] = measured(ways, name, compile, seconds, say)
    kind = ways.device.type
    is_cast = torch.is_autocast_enabled(kind)
    dtypes = {str(p.dtype).removeprefix("torch.") for p in ways.plain.parameters()}
    cast = f", autocast {torch.get_autocast_dtype(kind)}".replace("torch.", "") if is_cast else ""
    device = torch.cuda.get_device_name(ways.device) if kind == "cuda" else "CPU"
    return Gain(ways.report, device, ", ".join(sorted(dtypes)) + cast, modes)


def measured(ways: Ways, name: str, compile: bool, seconds: float, say: Callable) -> Mode:
    step = name == "step"
    names = [EAGER, *[FUSED] * bool(ways.report.fused), *[COMPILED, OURS] * compile]
    contenders = {way: ways.contender(way, step) for way in names}
    eager = contenders[EAGER]
    say(f"{name}: profiling")
    wanted = ways.result(eager, step)
    if not step and not wanted:
        raise ValueError("gain: expected an output with a floating-point tensor in it, got none")
    with ways.nudged():
        rounding = distance(ways.result(eager, step), wanted)
    share = share_of(ways.contender(FUSED, step), ways.device)
    mode = Mode(share, rounding)

    # With dropout a compiled model draws other numbers than eager, and is not compared.
    is_random = step and compile and distance(ways.result(eager, step, 1), wanted) > 20 * rounding
    for way in names[1:]:
        if way in (COMPILED, OURS):
            say(f"{name}: compiling for {way}")
        try:
            result = ways.result(contenders[way], step)
            if way == FUSED or not is_random:
                mode.apart[way] = distance(result, wanted)
        except Exception as failure:
            mode.failed[way] = in_one_line(failure)
            del contenders[way]
    say(f"{name}: timing {', '.join(contenders)}")
    times, failed = measure(list(contenders.values()), clock_for(ways.device), seconds)
    mode.times.update(times)
    mode.failed.update(failed)
    mode.replaced.update(ways.replaced if compile else {})
    if ways.device.type == "cuda":
        mode.memory.update({way: ways.peak(contenders[way]) for way in times})
    return mode
