"""Weights kept in the layout that a CPU multiplies fastest, for modules that ask for it."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ._support.arguments import check_module


def pack_weights(module: nn.Module) -> int:
    """Keeps the frozen weights of a module in oneDNN's own layout, which a CPU multiplies faster.

    The copy is made at the first call with each weight, and takes as much memory as the weight,
    until the weight is freed or :func:`unpack_weights` is called. It is used in bf16, where it
    helps most with few tokens, and in fp32 on CPUs with AVX-512 that are not Intel's, from about
    128 tokens. Parameters and ``state_dict`` stay as they are.

    A weight that has changed is packed again: after ``load_state_dict()``, ``.to()``, ``weight.data
    = ...``, ``swap_tensors`` and writes in place. A weight that has been trained since, or another
    parameter in its place, is used unpacked.

    Warning:
        Writes that PyTorch does not count are not noticed, and the old weight is used: through
        ``weight.data``, its storage, NumPy or DLPack, by a collective of ``torch.distributed``, by
        another process, by a kernel that PyTorch does not know, or by a fused optimizer with
        gradients that no backward made. Call :func:`unpack_weights` before such a write, and this
        function again after it. docs/memory.md has examples.

    Args:
        module: its :class:`torch.nn.Linear` layers, including fused ones, are packed.

    Returns:
        The number of weights that will be packed.

    Raises:
        ValueError: a weight is not frozen (``requires_grad`` is True), not on the CPU, a view or an
            inference tensor; nothing is packed then.
        TypeError: ``module`` is not an ``nn.Module``, or a weight is a tensor subclass.
        NotImplementedError: a weight's dtype is not float64, float32, float16 or bfloat16.

    Examples::

        >>> layer = FusedLinearGELU(16, 32, dtype=torch.bfloat16).requires_grad_(False)
        >>> pack_weights(layer)
        1
        >>> layer(torch.randn(1, 16, dtype=torch.bfloat16)).shape
        torch.Size([1, 32])
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
    """Undoes :func:`pack_weights` and frees the copies.

    Args:
        module: the module whose weights were packed, or a part of it.

    Returns:
        The number of weights that were packed, or would have been.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``.

    Examples::

        >>> layer = FusedLinear(16, 32).requires_grad_(False)
        >>> pack_weights(layer), unpack_weights(layer)
        (1, 1)
    """
    check_module("unpack_weights", module)
    return sum(torch.ops.fused._unpack_weight(weight) for _, weight in _weights(module))


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    seen = set()
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and id(layer.weight) not in seen:
            seen.add(id(layer.weight))
            yield f"{name}.weight".lstrip("."), layer.weight
