"""Tensors of classes of their own (quantised, distributed, ...), which torch's functions know.

Such a class handles what torch's own functions call, and has never heard of our operators. So
whatever is given one runs ``F.linear`` and the activation: here for the functions of this package,
so that a class may override them as torch's (``__torch_function__``), in C++ for the operators.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from . import report
from ._torch_internals import FakeTensor, FunctionalTensor
from .activations import ACTIVATIONS, check_activation

# Tensors, and what stands for them while a graph is traced: the operators are for them.
PLAIN = (Tensor, nn.Parameter, FakeTensor, FunctionalTensor)
_known: tuple[type, ...] = PLAIN
_OBJECTION = "(no kernel: tensor subclass) + reference"


def is_foreign(tensor: object) -> bool:
    """Whether it is a tensor of a class that has to be asked what to do with it."""
    return type(tensor) not in _known and isinstance(tensor, Tensor)


def know(*classes: type) -> None:
    """Lets the operators see tensors of these classes, which know what to do with them."""
    global _known
    _known = (*_known, *(cls for cls in classes if cls not in _known))


def _begin(operator: str, input: Tensor, weight: Tensor, memory: str = "default") -> None:
    if memory not in ("default", "low"):
        raise ValueError(f"{operator}: memory must be 'default' or 'low', got '{memory}'")
    if not is_dynamo_compiling():
        report.note(operator, input, weight, _OBJECTION)


def layer(
    operator: str,
    activate: Callable[[Tensor], Tensor] | None,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    memory: str = "default",
) -> Tensor:
    _begin(operator, input, weight, memory)
    output = F.linear(input, weight, bias)
    return output if activate is None else activate(output)


def mlp(
    input: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    activation: str,
    memory: str,
) -> Tensor:
    check_activation("mlp", activation)
    _begin("mlp", input, weights[0], memory)
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        input = ACTIVATIONS[activation](F.linear(input, weight, bias))
    return F.linear(input, weights[-1], biases[-1])


def _glu(
    operator: str,
    input: Tensor,
    gate: Tensor,
    up: Tensor | None,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: str,
    memory: str,
) -> Tensor:
    check_activation(operator, activation)
    if up is None and up_bias is not None:
        raise ValueError(f"{operator}: up_bias must be None without up: gate_bias is both")
    if up is None and (gate.dim() != 2 or gate.shape[0] % 2):
        raise ValueError(
            f"{operator}: without up, gate must have shape [2 * hidden, in], gate's rows first, "
            f"got {list(gate.shape)}"
        )
    _begin(operator, input, gate, memory)
    z = F.linear(input, gate, gate_bias)
    first, second = z.chunk(2, -1) if up is None else (z, F.linear(input, up, up_bias))
    return ACTIVATIONS[activation](first) * second


def linear_glu(
    input: Tensor,
    gate: Tensor,
    up: Tensor | None,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: str,
    memory: str,
) -> Tensor:
    return _glu("linear_glu", input, gate, up, gate_bias, up_bias, activation, memory)


def gated_mlp(
    input: Tensor,
    gate: Tensor,
    up: Tensor | None,
    down: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    memory: str,
) -> Tensor:
    hidden = _glu("gated_mlp", input, gate, up, gate_bias, up_bias, activation, memory)
    return F.linear(hidden, down, down_bias)


def conv2d_relu(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int] | int,
    padding: list[int] | int,
    dilation: list[int] | int,
    groups: int,
) -> Tensor:
    _begin("conv2d_relu", input, weight)
    return F.relu(F.conv2d(input, weight, bias, stride, padding, dilation, groups))


# Asked by C++, by this key and no other.
_library = torch.library.Library("fused", "IMPL")
_library.impl("_any_foreign", lambda tensors: any(map(is_foreign, tensors)), "BackendSelect")
