"""What a node of a graph of torch calls does beside giving a result."""

import inspect
import operator

import torch
from torch.fx import Node

_SWITCHES = ("_enter_", "_exit_", "_set_grad_enabled")


def switches_mode(node: Node) -> bool:
    """Whether the nodes after it may run in another mode (autocast, gradients, ...) than those
    before it. A call without a value that nobody uses is made for what it does."""
    if node.op not in ("call_function", "call_method"):
        return False
    idle = not node.users and not node.meta.keys() & {"example_value", "val"}
    return idle or getattr(node.target, "__name__", "").startswith(_SWITCHES)


def may_write(node: Node) -> bool:
    """Whether the node may write to a tensor that it has not made."""
    if node.op == "call_method":
        return node.target.endswith("_") and not node.target.endswith("__")
    if node.op == "call_module":
        return True
    if node.op != "call_function":
        return False
    target, kwargs = node.target, node.kwargs
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(getattr(target, name)._schema.is_mutable for name in target.overloads())
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if kwargs.get("out") is not None or kwargs.get("inplace"):
        return True
    module, name = getattr(target, "__module__", "") or "", getattr(target, "__name__", "_")
    if module in ("_operator", "operator"):
        return name == "setitem" or (name.startswith("i") and hasattr(operator, f"__{name}__"))
    if name.endswith("_"):
        return True
    return module.startswith("torch.nn") and _is_in_place(target, node.args)


def _is_in_place(function, args: tuple) -> bool:
    """Whether a positional argument is `inplace=True`."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of a function in C
        return False
    return "inplace" in names[: len(args)] and bool(args[names.index("inplace")])
