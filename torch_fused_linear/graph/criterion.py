"""Decides what pays in a compiled graph: an operator of ours, or its formula in ATen.

An operator is opaque to the compiler, which fuses a formula with its neighbours. So an operator
pays if it saves a pass over memory that nothing else makes anyway. Passes are counted in numbers
that are read or written for each element of a layer's result.
"""

from functools import cache

import torch
from torch import Tensor
from torch.fx import Node

from .._support.library import build_info
from ..policy import get_policy
from .matching import dtype_of, value
from .spellings import called, kind

# Functions that the compiler splits into kernels which begin and end element by element, beside
# those that ATen declares to be pointwise.
_PASSES = {"dropout", "layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"}
_PASSES |= {"softmax", "log_softmax"}
_CASTS = {"to", "float", "double", "half", "bfloat16", "type_as"}
# Functions of the module operator by ATen's names.
_OPERATORS = {"iadd": "add", "isub": "sub", "imul": "mul", "truediv": "div", "itruediv": "div"}

CONVOLUTION_PASS = 2  # bias and ReLU, in a kernel of the compiler's
# The time that our convolution must save, because its call costs the CPU more than the compiler's.
# On an H200 two that should have saved 12 and 24 microseconds slowed a ResNet-50 from 1.87 ms to
# 1.98 ms.
CALL = 30e-6  # seconds
REACHED = 0.9  # of the memory's bandwidth, as 4.4 TB/s of an H200's


@cache
def bandwidth_of(device: torch.device) -> float | None:
    """How many bytes a second are read and written; nothing for a CPU, where the operators always
    stay."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    # Twice a cycle; the clock is in kHz, the width in bits.
    return REACHED * 2e3 * found.memory_clock_rate * found.memory_bus_width / 8


@cache
def has_hopper_products(device: torch.device) -> bool:
    is_built = device.type == "cuda" and build_info()["hopper"]
    return is_built and torch.cuda.get_device_capability(device) == (9, 0)


def is_static(*tensors: Tensor) -> bool:
    """A decision by symbolic sizes would hold for some of them only."""
    return all(isinstance(size, int) for tensor in tensors for size in tensor.shape)


def has_choice(*tensors: Tensor) -> bool:
    """Returns whether there is a decision to make between an operator and its formula."""
    if not is_static(*tensors) or get_policy() == "batch_invariant":
        return False  # a formula rounds at other places
    return bandwidth_of(tensors[0].device) is not None


# --- activations --------------------------------------------------------------------------------


def is_between_passes(result: Node) -> bool:
    """Returns whether kernels of the compiler read the activation's result and make its gradient.
    They can begin with the activation and end with its derivative.
    """
    return _reads(result) and _makes_gradient(result)


def _reads(result: Node) -> bool:
    return any(_reads(user) if _passes_on(user) else _is_pass(user) for user in result.users)


def _makes_gradient(result: Node) -> bool:
    """Several users' gradients are summed by the compiler, and a sum gives its own to each of what
    it adds."""
    while len(result.users) == 1:
        (user,) = result.users
        if not _passes_on(user) and _name(user) not in ("add", "sub"):
            return _is_pass(user)
        result = user
    return len(result.users) > 1


def _passes_on(node: Node) -> bool:
    return kind(node) == "view" or (_name(node) in _CASTS and not _casts(node))


def _casts(node: Node) -> bool:
    return value(node) is None or dtype_of(node) != dtype_of(node.args[0])


def _is_pass(node: Node) -> bool:
    name = _name(node)
    if name in _PASSES or name in _CASTS:
        return True
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet else []
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


def _name(node: Node) -> str:
    """Returns ATen's name of the node's function."""
    if node.op not in ("call_function", "call_method"):
        return ""
    target = called(node)
    name = (target if isinstance(target, str) else getattr(target, "__name__", "")).strip("_")
    return _OPERATORS.get(name, name)


# --- gated layers -------------------------------------------------------------------------------


def compiler_gates(result: Tensor, gate_bias, up_bias, down: Tensor | None, activation) -> bool:
    """Returns whether the pass of a gated layer's backward is left to the compiler.

    Our pass also sums the gradients of biases, for which the compiler reads everything once more.
    On Hopper GPUs one of our products has the pass in it (csrc/gemm/hopper.h), and hides it if its
    sums are long enough.
    """
    if any(bias is not None and bias.requires_grad for bias in (gate_bias, up_bias)):
        return False
    if down is None or activation == "relu":
        return True
    width, hidden = down.shape
    fits = result.element_size() == 2 and width >= 1024 and width % 8 == hidden % 8 == 0
    return not (fits and result.numel() * hidden <= 1e12 and has_hopper_products(result.device))


# --- convolutions -------------------------------------------------------------------------------


def convolution_pays(result: Tensor) -> bool:
    bandwidth = bandwidth_of(result.device)
    if bandwidth is None or not is_static(result):
        return bandwidth is None
    moved = CONVOLUTION_PASS * result.numel() * result.element_size()
    return moved / bandwidth > CALL
