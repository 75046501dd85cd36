"""Weights kept as a CPU multiplies with them best, for modules that ask for it."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ._arguments import check_module


def pack_weights(module: nn.Module) -> int:
    """Lets the frozen weights of a module be kept in the layout that oneDNN multiplies with.

    The copy is made at the first call with each weight, and takes the memory of the weight once
    more, until the weight is freed or :func:`unpack_weights`. It is used in bf16, where it helps
    most with few tokens, and in fp32 on processors with AVX-512 that are not Intel's, from about
    128 tokens. Parameters and ``state_dict`` stay as they are.

    A weight that has changed is packed again: after ``load_state_dict()``, ``.to()``,
    ``weight.data = ...``, ``swap_tensors`` and writes in place. One that has been trained since,
    or another parameter put in its place, is used as it is.

    Warning:
        Writes that torch does not count are not noticed, and the old weight is used: through
        ``weight.data``, its storage, NumPy or DLPack, by a collective of ``torch.distributed``, by
        another process, by a kernel that torch does not know, or by a fused optimizer with
        gradients that no backward made. Call :func:`unpack_weights` before, and this function again
        after. docs/memory.md has examples.

    Args:
        module: its :class:`torch.nn.Linear` layers, fused ones among them, are meant.

    Returns:
        How many weights were declared.

    Raises:
        ValueError: if a weight is not frozen (``requires_grad`` False), not on the CPU, a view or
            an inference tensor; nothing is packed then.
        TypeError: if a weight is of a class of its own.
        NotImplementedError: if its dtype is not float64, float32, float16 or bfloat16.
    """
    check_module("pack_weights", module)
    declared = []
    try:
        for name, weight in _weights(module):
            if type(weight) not in (Tensor, nn.Parameter):
                raise TypeError(
                    f"pack_weights: {name!r} must be a plain tensor, got {type(weight).__name__}"
                )
            torch.ops.fused._pack_weight(weight, name)
            declared.append(weight)
    except (RuntimeError, TypeError, ValueError):
        for weight in declared:
            torch.ops.fused._unpack_weight(weight)
        raise
    return len(declared)


def unpack_weights(module: nn.Module) -> int:
    """Takes :func:`pack_weights` back and frees the copies.

    Args:
        module: the same, or a part of it.

    Returns:
        How many weights had been declared.
    """
    check_module("unpack_weights", module)
    return sum(torch.ops.fused._unpack_weight(weight) for _, weight in _weights(module))


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    seen = set()
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and id(layer.weight) not in seen:
            seen.add(id(layer.weight))
            yield f"{name}.weight".lstrip("."), layer.weight
