"""Layers under torch's plans of tensor parallelism, ``ColwiseParallel`` and ``RowwiseParallel``.

A plan shards a layer's weight and puts two hooks on the layer: the first makes a distributed tensor
of the input, the second gives the output its layout and mostly makes an ordinary tensor of it. Our
operator runs between the two, and so before the second what followed it: an activation of each
element, which does not care where the elements are. It does care whether they are whole sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .._torch_internals import (
    given_to_distribute_module,
    is_distributed_module,
    prepares_output,
)

_OTHERS = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


def is_spread(layer: nn.Module) -> bool:
    """Whether the layer's forward hooks are the two of such a plan, and nobody else's."""
    if is_dynamo_compiling() or not is_distributed_module(layer):
        return False
    return (
        type(layer) is nn.Linear
        and _output_of(layer) is not None
        and _given(layer, "_forward_pre_hooks", "input_fn") is not None
        and not any(layer.__dict__.get(kind) for kind in _OTHERS)
    )


def has_whole_sums(layer: nn.Module) -> bool:
    """Whether an activation may come before the second hook."""
    plan = _output_of(layer)
    layouts = plan.args[0]
    return prepares_output(plan.func, "ColwiseParallel") and not any(
        layout.is_partial() for layout in layouts
    )


def between_hooks(
    layer: nn.Module, operator: Callable, input: Tensor, *rest: Any, **options: Any
) -> Any:
    """The operator in the place of the layer's own forward."""
    (before,), (after,) = layer._forward_pre_hooks.values(), layer._forward_hooks.values()
    prepared = before(layer, (input,))
    return after(layer, (prepared,), operator(prepared, *rest, **options))


def _output_of(layer: nn.Module) -> functools.partial | None:
    """What the second hook calls with the layouts, if it is a plan's."""
    function = _given(layer, "_forward_hooks", "output_fn")
    if type(function) is not functools.partial:
        return None
    styles = ("ColwiseParallel", "RowwiseParallel")
    return function if any(prepares_output(function.func, style) for style in styles) else None


def _given(layer: nn.Module, kind: str, name: str) -> Any:
    """What ``distribute_module`` was given for its hook, if that is the layer's only one."""
    hooks = list(layer.__dict__[kind].values())
    return given_to_distribute_module(hooks[0], name) if len(hooks) == 1 else None
