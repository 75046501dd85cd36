"""Tensors of classes of their own (quantised, nested, ...), which torch's functions know.

Such a class handles what torch's own functions call, and has never heard of our operators. So a
call with one runs ``F.linear`` and the activation, which the class may override
(``__torch_function__``). The functions of this package see to it themselves, the operators by the
kernels at the end, which csrc/dispatch/subclasses.h asks.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from . import report
from ._arguments import check
from ._torch_internals import FakeTensor, FunctionalTensor, tree_leaves
from .activations import ACTIVATIONS, OPERATORS, of_operator

# Tensors, and what stands for them while a graph is traced: the operators are for them.
PLAIN = (Tensor, nn.Parameter, FakeTensor, FunctionalTensor)
_known: tuple[type, ...] = PLAIN


def is_foreign(tensor: object) -> bool:
    """Returns whether a tensor is of a class that must be asked how to handle it."""
    return type(tensor) not in _known and isinstance(tensor, Tensor)


def know(*classes: type) -> None:
    """Lets the operators see tensors of these classes, which know what to do with them."""
    global _known
    _known = (*_known, *(cls for cls in classes if cls not in _known))


# --- the operators' results by torch's own functions, with the operators' arguments --------------


def _begin(operator: str, input: Tensor, weight: Tensor, **arguments: str) -> None:
    check(operator, **arguments)
    if not is_dynamo_compiling():
        report.note(operator, input, weight, "(no kernel: tensor subclass)")


def layer(operator, input, weight, bias=None, *, approximate="tanh", memory="default") -> Tensor:
    """Computes ``linear`` or an operator with an activation; ``approximate`` is for GELU alone."""
    _begin(operator, input, weight, approximate=approximate, memory=memory)
    output = F.linear(input, weight, bias)
    activation = of_operator(operator, approximate)
    return output if activation is None else activation(output)


def mlp(input, weights, biases, activation="relu", *, memory="default") -> Tensor:
    _begin("mlp", input, weights[0], activation=activation, memory=memory)
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        input = ACTIVATIONS[activation](F.linear(input, weight, bias))
    return F.linear(input, weights[-1], biases[-1])


def glu(
    name, input, gate, up=None, gate_bias=None, up_bias=None, *, activation="silu", memory="default"
) -> Tensor:
    if up is None and up_bias is not None:
        raise ValueError(f"{name}: up_bias must be None without up: gate_bias is both")
    if up is None and (gate.dim() != 2 or gate.shape[0] % 2):
        expected = "shape [2 * hidden, in], gate's rows first"
        raise ValueError(f"{name}: without up, gate must have {expected}, got {list(gate.shape)}")
    _begin(name, input, gate, activation=activation, memory=memory)
    z = F.linear(input, gate, gate_bias)
    first, second = z.chunk(2, -1) if up is None else (z, F.linear(input, up, up_bias))
    return ACTIVATIONS[activation](first) * second


def gated_mlp(
    input, gate, up, down, gate_bias=None, up_bias=None, down_bias=None, **options
) -> Tensor:
    hidden = glu("gated_mlp", input, gate, up, gate_bias, up_bias, **options)
    return F.linear(hidden, down, down_bias)


def conv2d_relu(input, weight, bias=None, *geometry) -> Tensor:
    _begin("conv2d_relu", input, weight)
    return F.relu(F.conv2d(input, weight, bias, *geometry))


# --- the kernels ---------------------------------------------------------------------------------


def _if_foreign(compute, *args, **kwargs) -> Tensor | None:
    """The result, or ``None`` where the operator itself is for these tensors."""
    return compute(*args, **kwargs) if any(map(is_foreign, tree_leaves(args))) else None


kernels = torch.library.Library("fused", "IMPL")
COMPUTES = {name: partial(layer, name) for name in ("linear", *OPERATORS)}
COMPUTES |= {"linear_glu": partial(glu, "linear_glu")}
COMPUTES |= {f.__name__: f for f in (mlp, gated_mlp, conv2d_relu)}
for _name, _compute in COMPUTES.items():
    # Called by C++, by this key and no other.
    kernels.impl(f"_if_foreign_{_name}", partial(_if_foreign, _compute), "BackendSelect")
