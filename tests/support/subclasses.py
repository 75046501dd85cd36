"""Subclasses of tensors as others write them, for what has to go the way of torch's functions."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Scaled(Tensor):
    """Its numbers times 2, kept apart: knows ATen's operators, as a quantised tensor does."""

    @staticmethod
    def __new__(cls, half: Tensor, requires_grad: bool = False) -> "Scaled":
        return Tensor._make_wrapper_subclass(
            cls,
            half.shape,
            strides=half.stride(),
            dtype=half.dtype,
            device=half.device,
            requires_grad=requires_grad,
        )

    def __init__(self, half: Tensor, requires_grad: bool = False) -> None:
        self.half_of_it = half

    def __repr__(self) -> str:
        return f"Scaled({self.half_of_it!r})"

    def __tensor_flatten__(self):
        return ["half_of_it"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride) -> "Scaled":
        return Scaled(inner["half_of_it"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.namespace != "aten":
            raise NotImplementedError(f"Scaled does not know {func}")
        if func in (torch.ops.aten.detach.default, torch.ops.aten.t.default):
            return cls(func(args[0].half_of_it))
        args, kwargs = tree_map_only(Scaled, lambda t: t.half_of_it * 2, (args, kwargs or {}))
        return func(*args, **kwargs)


class Negated(Tensor):
    """F.linear with it is the negative: knows functions of torch, and no operators."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if "fused" in str(func):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return -result if func in (F.linear, F.conv2d) else result


class Plain(Tensor):
    """Adds nothing."""
