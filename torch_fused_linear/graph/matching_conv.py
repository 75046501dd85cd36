"""Recognises a convolution and the ReLU after it in a graph of torch calls, before autograd."""

import torch
from torch.fx import Node

from .._support.torch_internals import FakeTensor
from .matching import find_activation, has_kernel, same, value
from .spellings import arguments, kind

_conv2d_relu = torch.ops.fused.conv2d_relu.default


def find_relu_of_conv(node: Node) -> tuple[Node, tuple] | None:
    """The ReLU of the convolution that the node is, and what our operator takes in their place."""
    args = arguments(node) if kind(node) == "conv2d" else None
    activation = find_activation(node)
    if args is None or "weight" not in args or activation is None or activation.name != "relu":
        return None
    tensors = [args["input"], args["weight"], args.get("bias")]
    operands = [t for t in tensors if t is not None]
    if not all(isinstance(t, Node) for t in operands):
        return None
    fakes, result = [value(t) for t in operands], value(node)
    geometry = _geometry(args, fakes[1])
    if geometry is None or any(fake is None for fake in (*fakes, result)):
        return None
    if not has_kernel([*fakes, result]) or not _keeps_strides(fakes, geometry, result):
        return None
    return activation.nodes[-1], (*tensors, *geometry)


def _geometry(args: dict, weight: FakeTensor | None) -> tuple | None:
    """Stride, padding, dilation and groups in numbers."""
    stride, dilation = _pair(args.get("stride", 1)), _pair(args.get("dilation", 1))
    padding, groups = args.get("padding", 0), args.get("groups", 1)
    if weight is None or weight.dim() != 4 or stride is None or dilation is None:
        return None
    if padding == "valid":
        padding = 0
    elif padding == "same":
        around = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:])]
        # An uneven number is put more to one side, which needs a step of its own.
        if not all(isinstance(n, int) and n % 2 == 0 for n in around):
            return None
        padding = [n // 2 for n in around]
    padding = _pair(padding)
    if padding is None or not isinstance(groups, int):
        return None
    return stride, padding, dilation, groups


def _pair(number) -> list[int] | None:
    numbers = list(number) if isinstance(number, (list, tuple)) else [number]
    if len(numbers) not in (1, 2) or not all(isinstance(n, int) for n in numbers):
        return None
    return [numbers[0], numbers[-1]]


def _keeps_strides(fakes: list[FakeTensor], geometry: tuple, result: FakeTensor) -> bool:
    with result.fake_mode, torch.no_grad(), torch.autocast(result.device.type, enabled=False):
        # Autocast casts for both.
        input, weight, *bias = (f.to(result.dtype) for f in fakes)
        try:
            ours = _conv2d_relu(input, weight, bias[0] if bias else None, *geometry)
        except (ValueError, TypeError, RuntimeError):  # whatever it refuses
            return False
    # Later nodes may view the result, so it must keep its strides.
    return same(list(ours.shape), list(result.shape)) and same(_strides(ours), _strides(result))


def _strides(fake: FakeTensor) -> list:
    """Those that mean something."""
    return [s for n, s in zip(fake.shape, fake.stride()) if not same(n, 1)]
