"""Gradients of weights that the product itself adds to the existing gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from ._support.torch_internals import forget_compiled
from .activations import NUMBERS

_library = torch.library.Library("fused", "FRAGMENT")
was_asked_for = False  # graphs that are compiled from then on look for sums
# By shape: whether graphs give fp32 gradients for 16-bit weights, as the last such weight has.
widened: dict[torch.Size, bool] = {}


def _main_grad(weight: Tensor, added: bool) -> Tensor | None:
    if added:
        weight.grad_added_to_main_grad = True
        return None
    return getattr(weight, "main_grad", None)


_library.impl("_main_grad", _main_grad, "BackendSelect")
_library.define("_storages(Tensor[] tensors) -> Tensor")


@torch.library.impl(_library, "_storages", "CompositeExplicitAutograd")
def _storages(tensors: list[Tensor]) -> Tensor:
    """Returns the addresses of the tensors' memory."""
    return torch.tensor([t.untyped_storage()._cdata for t in tensors], device="cpu")


@torch.library.register_fake("fused::_storages", lib=_library)
def _fake_storages(tensors: list[Tensor]) -> Tensor:
    return torch.empty(len(tensors), dtype=torch.int64, device="cpu")


# Not a meta kernel, whose result would have no one device: addresses are on the CPU.
@torch.library.register_fake("fused::_accumulated_weight_gradient", lib=_library)
def _fake_weight_gradient(
    grad_output: Tensor, input: Tensor, weight: Tensor, dtype: torch.dtype, storages: object = None
) -> Tensor:
    layer = grad_output, input, weight, None, NUMBERS["none"]
    return torch.ops.fused._linear_backward(*layer, [False, True, False])[1].to(dtype)


class AccumulationHandle:
    """Ends what :func:`torch_fused_linear.accumulate_gradients` began: by ``remove()``, or at the
    end of a ``with`` block. Gradients stay as they are.
    """

    def __init__(self, into: str, dtype: torch.dtype | None) -> None:
        self._into, self._dtype = into, dtype
        self._weights: dict[int, Tensor] = {}  # by id, which they keep while they are here
        self._dtypes: list[tuple[Tensor, torch.dtype | None]] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> AccumulationHandle:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Ends the accumulation: from now on PyTorch adds these weights' gradients, unless another
        handle covers them.

        Examples::

            >>> handle = accumulate_gradients(FusedLinear(16, 32))
            >>> handle.remove()
        """
        for hook in self._hooks:
            hook.remove()
        for weight in self._weights.values():
            torch.ops.fused._accumulate(weight, self._into, begins=False)
        for parameter, dtype in self._dtypes:
            if parameter.grad is None or dtype in (None, parameter.grad.dtype):
                parameter.grad_dtype = dtype
        self._hooks, self._weights, self._dtypes = [], {}, []

    def _add(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if id(parameter) in self._weights or type(parameter) not in (Tensor, nn.Parameter):
                continue
            if self._dtype is not None and parameter.dtype in (torch.float16, torch.bfloat16):
                self._dtypes.append((parameter, parameter.grad_dtype))
                parameter.grad_dtype = self._dtype
            if parameter.dim() in (1, 2) and parameter.is_floating_point():
                if parameter.dim() == 2 and parameter.itemsize == 2:
                    widened[parameter.shape] = parameter.grad_dtype == torch.float32
                torch.ops.fused._accumulate(parameter, self._into, begins=True)
                self._weights[id(parameter)] = parameter

    def _follow(self, model: nn.Module) -> None:
        """Follows the whole parameters that FSDP2 lends its modules, which are not the module's
        own.
        """
        from torch.distributed.fsdp import FSDPModule

        def held_by(module: nn.Module) -> Iterator[dict[str, Tensor]]:
            yield module._parameters
            for child in module.children():
                if not isinstance(child, FSDPModule):
                    yield from held_by(child)

        add_held = torch.compiler.disable(self._add_held)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # walked once, as forward costs time
                add = partial(add_held, [*held_by(module)])
                self._hooks.append(module.register_forward_pre_hook(add))

    def _add_held(self, held: list[dict[str, Tensor]], *_: object) -> None:
        self._add(parameter for parameters in held for parameter in parameters.values())


def accumulate_gradients(
    target: nn.Module | Tensor | Iterable[Tensor],
    into: Literal["grad", "main_grad"] = "grad",
    *,
    dtype: torch.dtype | None = None,
) -> AccumulationHandle:
    """Lets the fused layers' backward add a weight's gradient to the existing one in the product.

    With several micro-batches PyTorch computes a weight's gradient, and adds it to ``.grad`` in a
    second pass over memory. Here the product writes the sum (``beta = 1``), in the dtype of
    ``.grad``: the weight's, or fp32 for 16-bit weights (``Tensor.grad_dtype``), which also saves
    one rounding for each micro-batch. In eager mode the kernel that sums a bias's gradient does the
    same. All operators of this library take part, whatever module calls them. PyTorch's own layers
    accumulate as before.

    The semantics are PyTorch's. The first micro-batch writes, the others add, in place. Hooks after
    the accumulation see the sum. If something would see this micro-batch's gradient alone (tensor
    hooks on the weight, ``torch.autograd.grad``, ``create_graph``, anomaly mode), or ``.grad`` does
    not fit (another dtype, device, layout or class), PyTorch accumulates; :func:`explain` says why.

    Under FSDP2 the parameters that its modules compute with are followed. With
    ``reduce_dtype=torch.float32`` pass ``dtype=torch.float32``. Graphs of ``torch.compile`` with
    :func:`compile_options` add as well, for 16-bit weights of one shape with the ``grad_dtype``
    that was asked for last. A call that asks for another dtype makes the compiler trace such graphs
    again.

    Args:
        target: a module, whose parameters take part, or parameters. Weights ``[out, in]`` and
            biases ``[out]`` among them are accumulated.
        into: ``"grad"``, or ``"main_grad"`` for Megatron-LM: the gradient is added to the weight's
            attribute ``main_grad`` if there is one, of the weight's shape, in fp32 or the weight's
            dtype, and ``grad_added_to_main_grad`` is set; otherwise the gradient is in ``.grad``.
        dtype: ``torch.float32`` sets ``grad_dtype`` of the 16-bit parameters: their gradients are
            computed and kept in fp32. ``None`` leaves it as it is.

    Returns:
        A handle with ``remove()``, which is also a context manager.

    Raises:
        ValueError: ``into`` or ``dtype`` is none of these, or a weight or bias is no leaf.
        TypeError: ``target`` holds something that is no tensor.
        RuntimeError: a parameter has a gradient of another dtype than ``dtype``.

    Examples::

        >>> model = nn.Sequential(FusedLinearGELU(16, 32), FusedLinear(32, 4))
        >>> with accumulate_gradients(model):
        ...     for micro_batch in torch.randn(4, 8, 16):
        ...         model(micro_batch).square().mean().backward()
        >>> model[0].weight.grad.shape
        torch.Size([32, 16])
    """
    if into not in ("grad", "main_grad"):
        raise ValueError(f"accumulate_gradients: into must be 'grad' or 'main_grad', got {into!r}")
    if dtype not in (None, torch.float32):
        raise ValueError(f"accumulate_gradients: dtype must be torch.float32 or None, got {dtype}")
    global was_asked_for
    before = was_asked_for, dict(widened)
    was_asked_for = True
    handle = AccumulationHandle(into, dtype)
    try:
        handle._add(_parameters(target))
        if isinstance(target, nn.Module) and torch.distributed.is_available():
            handle._follow(target)
    except BaseException:
        handle.remove()
        raise
    finally:
        if before != (was_asked_for, widened):
            forget_compiled()
    return handle


def _parameters(target: nn.Module | Tensor | Iterable[Tensor]) -> Iterator[Tensor]:
    if isinstance(target, nn.Module):
        yield from target.parameters()
        return
    is_one = isinstance(target, Tensor) or not isinstance(target, Iterable)
    for parameter in [target] if is_one else target:
        if not isinstance(parameter, Tensor):
            got = type(parameter).__name__
            raise TypeError(f"accumulate_gradients: expected a module or parameters, got {got}")
        yield parameter
