"""Tensors of classes of their own (quantised, distributed, ...), which torch's functions know.

Such a class handles what torch's own functions call, and has never heard of our operators. So
whatever is given one runs ``F.linear`` and the activation: here for the functions of this package,
so that a class may override them as torch's (``__torch_function__``), in C++ for the operators.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.compiler import is_dynamo_compiling

from . import report
from .activations import ACTIVATIONS

# Tensors, and what stands for them while a graph is traced: the operators are for them.
_PLAIN = (Tensor, nn.Parameter, FakeTensor, FunctionalTensor)
_OBJECTION = "(no kernel: tensor subclass) + reference"


def is_foreign(tensor: object) -> bool:
    """Whether it is a tensor of a class that has to be asked what to do with it."""
    return type(tensor) not in _PLAIN and isinstance(tensor, Tensor)


def _begin(operator: str, input: Tensor, weight: Tensor, memory: str = "default") -> None:
    if memory not in ("default", "low"):
        raise ValueError(f"{operator}: memory must be 'default' or 'low', got '{memory}'")
    if not is_dynamo_compiling():
        report.note(operator, input, weight, _OBJECTION)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _begin("linear", input, weight)
    return F.linear(input, weight, bias)


def linear_relu(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, memory: str = "default"
) -> Tensor:
    _begin("linear_relu", input, weight, memory)
    return F.relu(F.linear(input, weight, bias))


def linear_gelu(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    approximate: str = "tanh",
    memory: str = "default",
) -> Tensor:
    _begin("linear_gelu", input, weight, memory)
    return F.gelu(F.linear(input, weight, bias), approximate=approximate)


def mlp(
    input: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    activation: str = "relu",
    memory: str = "default",
) -> Tensor:
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"mlp: activation must be 'relu', 'gelu_tanh' or 'gelu_erf', got '{activation}'"
        )
    _begin("mlp", input, weights[0], memory)
    approximate = ACTIVATIONS[activation].approximate
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        input = F.linear(input, weight, bias)
        input = F.gelu(input, approximate=approximate) if approximate else F.relu(input)
    return F.linear(input, weights[-1], biases[-1])


def conv2d_relu(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: list[int] | int = 1,
    padding: list[int] | int = 0,
    dilation: list[int] | int = 1,
    groups: int = 1,
) -> Tensor:
    _begin("conv2d_relu", input, weight)
    return F.relu(F.conv2d(input, weight, bias, stride, padding, dilation, groups))


# Asked by csrc/dispatch/subclasses.cpp, by this key and no other.
_library = torch.library.Library("fused", "IMPL")
_library.impl("_any_foreign", lambda tensors: any(map(is_foreign, tensors)), "BackendSelect")
