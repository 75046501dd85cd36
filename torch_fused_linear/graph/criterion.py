"""What pays in a compiled graph: an operator of ours, or its formula in ATen.

An operator is opaque to the compiler, which fuses a formula with what stands around it. So an
operator pays where it saves a pass over memory that nothing else makes anyway. Passes are counted
in numbers that are read or written for each element of a layer's result.
"""

from functools import cache

import torch
from torch import Tensor
from torch.fx import Node

from .._library import build_info
from .spellings import kind

CONVOLUTION_PASS = 2  # bias and ReLU, in a kernel of the compiler's
# What a convolution of ours has to save, as it costs the CPU more than the compiler's. On an H200
# two that should have saved 12 and 24 microseconds made a ResNet-50 of 1.87 ms take 1.98.
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


def is_pointwise(node: Node) -> bool:
    """Whether the values come out of a kernel that the compiler can write more into."""
    while kind(node) == "view":
        node = node.args[0]
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def feeds_pointwise(node: Node) -> bool:
    """Whether a kernel of the compiler's reads the values anyway."""
    users = [(user, kind(user) == "view") for user in node.users]
    return any(feeds_pointwise(user) if views else is_pointwise(user) for user, views in users)


def convolution_pays(result: Tensor) -> bool:
    bandwidth = bandwidth_of(result.device)
    if bandwidth is None or not is_static(result):
        return bandwidth is None
    moved = CONVOLUTION_PASS * result.numel() * result.element_size()
    return moved / bandwidth > CALL
