"""``gain``: what fusing would bring a model. ``python -m torch_fused_linear.gain`` is the same.

measuring.py  copies of the model, one for each way that is compared, and what is measured of them
result.py     what was found, and the verdict
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..fuse import fuse_, unfuse_
from .measuring import Copies, loss_of, measured
from .result import FUSED, Gain, Mode

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

    Copies are run, so that the model, its gradients and buffers, the inputs and torch's random
    numbers stay as they are. All ways take turns, and a way is called faster only where three
    quarters of its rounds were faster than three quarters of the other's.

    Args:
        model: on the device and in the dtype that are meant. Its parameters are copied once.
        inputs: what it is called with.
        kwargs: what it is called with by keyword.
        loss: the loss of its output, for the step. By default the ``loss`` that the output has, or
            the mean of all floating-point tensors in it.
        step: also measure a training step: loss and all gradients, without an optimizer.
        compile: also measure ``torch.compile``, and that with our pass; it takes up to minutes.
        seconds: how long to time each mode, or longer until there are nine rounds.
        progress: say on standard error what is being done.

    Returns:
        What was found. It can be printed, and drawn by ``save_picture(path)``; its ``verdict`` is
        a sentence.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``, is scripted, traced or exported, or it or an
            input cannot be copied.
        ValueError: its output has no floating-point tensor.
        Exception: what the model itself raises when it is called so.
    """
    model = getattr(model, "_orig_mod", model)  # of a compiled model, what was compiled
    fuse_(model, dry_run=True)  # raises what it is for whatever is not a model
    modes, state = {}, random.getstate()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        for name in ("inference", *["step"] * step):
            copies = Copies(model, inputs, kwargs or {}, loss, name == "step")
            try:
                if copies.report.fused or compile:
                    modes[name] = measured(copies, compile, seconds, name if progress else "")
            finally:
                unfuse_(copies.models[FUSED])
                random.setstate(state)
    kind = copies.device.type
    device = torch.cuda.get_device_name(copies.device) if kind == "cuda" else "CPU"
    return Gain(copies.report, f"{device}, {copies.dtype}".replace("torch.", ""), modes)
