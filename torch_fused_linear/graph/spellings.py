"""The spellings of a call that mean the same, in graphs of torch calls and of ATen operators."""

import operator

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..activations import OPERATORS

_aten, _fused = torch.ops.aten, torch.ops.fused

# Functions with one name in torch, ATen and among the methods.
_ALIKE = ("addmm", "matmul", "add", "mul", "pow", "square", "tanh", "relu", "t", "transpose")
_ALIKE += ("permute", "chunk")
# Whatever keeps every element in its place when the tensor is read row by row.
_VIEWS = ("reshape", "flatten", "squeeze", "unsqueeze")

# One name for the spellings of a call that mean the same; methods by their names.
_FUNCTIONS = {
    **{getattr(where, name): name for where in (torch, _aten) for name in _ALIKE},
    **{getattr(where, name): "view" for where in (torch, _aten) for name in _VIEWS},
    **dict.fromkeys((torch.unflatten, _aten.view, _aten._unsafe_view, _aten.contiguous), "view"),
    **{getattr(_fused, name): name for name in OPERATORS},
    **dict.fromkeys((F.linear, _aten.linear, _fused.linear), "linear"),
    **dict.fromkeys((torch.conv2d, _aten.conv2d), "conv2d"),
    **dict.fromkeys((torch.mm, operator.matmul, _aten.mm), "matmul"),
    operator.add: "add",
    operator.iadd: "add_",
    operator.mul: "mul",
    operator.pow: "pow",
    **dict.fromkeys((torch.relu_, F.relu, _aten.relu_), "relu"),
    **dict.fromkeys((F.gelu, _aten.gelu), "gelu"),
    **dict.fromkeys((F.silu, _aten.silu, _aten.silu_), "silu"),
    **dict.fromkeys((F.dropout, torch.dropout, _aten.dropout), "dropout"),
    getattr: "getattr",
    operator.getitem: "getitem",
}
_METHODS = {
    **{name: name for name in _ALIKE},
    **{"mm": "matmul", "__matmul__": "matmul", "__add__": "add", "add_": "add_", "relu_": "relu"},
    **dict.fromkeys((*_VIEWS, "view", "unflatten", "contiguous"), "view"),
}
# The names of the arguments; some spellings call the first one `self`.
_ARGUMENTS = {
    "linear": ("input", "weight", "bias"),
    **dict.fromkeys(OPERATORS, ("input", "weight", "bias", "memory")),
    "linear_gelu": ("input", "weight", "bias", "approximate", "memory"),
    "conv2d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "addmm": ("input", "mat1", "mat2", "beta", "alpha"),
    **dict.fromkeys(("matmul", "add", "add_", "mul"), ("input", "other")),
    "pow": ("input", "exponent"),
    **dict.fromkeys(("square", "tanh"), ("input",)),
    **dict.fromkeys(("relu", "silu"), ("input", "inplace")),
    "gelu": ("input", "approximate"),
    "chunk": ("input", "chunks", "dim"),
    "dropout": ("input", "p", "training", "inplace"),
}


def called(node: Node) -> object:
    """Returns the function or method name that a node calls, whichever overload it is."""
    return getattr(node.target, "overloadpacket", node.target)


def kind(node: Node) -> str | None:
    if node.op == "call_method":
        return _METHODS.get(node.target)
    if node.op != "call_function":
        return None
    target = called(node)
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
