"""The spellings of a call that mean the same, in graphs of torch calls and of ATen operators."""

import operator

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..activations import OPERATORS

_aten, _fused = torch.ops.aten, torch.ops.fused

# One name for the spellings of a call that mean the same; methods by their names.
_FUNCTIONS = {
    F.linear: "linear",
    _aten.linear: "linear",
    _fused.linear: "linear",
    torch.conv2d: "conv2d",
    _aten.conv2d: "conv2d",
    **{getattr(_fused, name): name for name in OPERATORS},
    torch.addmm: "addmm",
    _aten.addmm: "addmm",
    torch.matmul: "matmul",
    torch.mm: "matmul",
    operator.matmul: "matmul",
    _aten.matmul: "matmul",
    _aten.mm: "matmul",
    torch.add: "add",
    operator.add: "add",
    operator.iadd: "add_",
    _aten.add: "add",
    torch.mul: "mul",
    operator.mul: "mul",
    torch.pow: "pow",
    operator.pow: "pow",
    torch.square: "square",
    _aten.square: "square",
    torch.tanh: "tanh",
    torch.relu: "relu",
    torch.relu_: "relu",
    F.relu: "relu",
    _aten.relu: "relu",
    _aten.relu_: "relu",
    F.gelu: "gelu",
    _aten.gelu: "gelu",
    F.silu: "silu",
    _aten.silu: "silu",
    _aten.silu_: "silu",
    F.dropout: "dropout",
    torch.dropout: "dropout",
    _aten.dropout: "dropout",
    torch.t: "t",
    _aten.t: "t",
    torch.transpose: "transpose",
    _aten.transpose: "transpose",
    torch.permute: "permute",
    _aten.permute: "permute",
    getattr: "getattr",
    operator.getitem: "getitem",
    torch.chunk: "chunk",
    _aten.chunk: "chunk",
    torch.reshape: "view",
    torch.flatten: "view",
    torch.unflatten: "view",
    torch.squeeze: "view",
    torch.unsqueeze: "view",
    _aten.view: "view",
    _aten._unsafe_view: "view",
    _aten.reshape: "view",
    _aten.contiguous: "view",
    _aten.flatten: "view",
    _aten.squeeze: "view",
    _aten.unsqueeze: "view",
}
_METHODS = {
    **{name: name for name in ("addmm", "matmul", "add", "mul", "pow", "square", "tanh", "relu")},
    **{name: name for name in ("t", "transpose", "permute", "chunk")},
    **{"mm": "matmul", "__matmul__": "matmul", "__add__": "add", "add_": "add_", "relu_": "relu"},
    # Whatever keeps every element in its place when the tensor is read row by row.
    **dict.fromkeys(
        ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous"), "view"
    ),
}
# What the arguments are called; some spellings say `self` for the first.
_ARGUMENTS = {
    "linear": ("input", "weight", "bias"),
    **dict.fromkeys(OPERATORS, ("input", "weight", "bias", "memory")),
    "linear_gelu": ("input", "weight", "bias", "approximate", "memory"),
    "conv2d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "addmm": ("input", "mat1", "mat2", "beta", "alpha"),
    "matmul": ("input", "other"),
    "add": ("input", "other"),
    "add_": ("input", "other"),
    "mul": ("input", "other"),
    "pow": ("input", "exponent"),
    "square": ("input",),
    "tanh": ("input",),
    "relu": ("input", "inplace"),
    "gelu": ("input", "approximate"),
    "silu": ("input", "inplace"),
    "chunk": ("input", "chunks", "dim"),
    "dropout": ("input", "p", "training", "inplace"),
}


def kind(node: Node) -> str | None:
    if node.op == "call_method":
        return _METHODS.get(node.target)
    if node.op != "call_function":
        return None
    target = getattr(node.target, "overloadpacket", node.target)
    return _FUNCTIONS.get(target) if callable(target) else None


def arguments(node: Node) -> dict | None:
    """The arguments by name; nothing where there are other ones than we know of."""
    names = _ARGUMENTS[kind(node)]
    if len(node.args) > len(names):
        return None
    found = {**dict(zip(names, node.args)), **node.kwargs}
    if "self" in found:
        found["input"] = found.pop("self")
    return found if found.keys() <= set(names) and "input" in found else None
