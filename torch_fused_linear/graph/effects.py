"""The side effects of a node in a graph of torch calls."""

import inspect
from functools import cache
from typing import Any

import torch
from torch.fx import Node

from .._support.torch_internals import OpOverload, OpOverloadPacket, aten_schemas

_SWITCHES = ("_enter_", "_exit_", "_set_grad_enabled")

# Functions of the module operator, which exist as methods within underscores, too.
_IN_PLACE = {"setitem", "delitem", "iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul"}
_IN_PLACE |= {"imod", "imul", "ior", "ipow", "irshift", "isub", "itruediv", "ixor"}

# Whose functions write to nothing but what their names, their schemas or their arguments tell of.
_KNOWN = (
    *("torch", "torch.functional", "torch.nn.functional", "torch._tensor", "torch._lowrank"),
    *("math", "_operator", "builtins"),
)


def switches_mode(node: Node) -> bool:
    """Returns whether the nodes after it may run in another mode (autocast, gradients, ...) than
    those before it. A call without a value that nothing uses is made for its side effect.
    """
    if node.op not in ("call_function", "call_method"):
        return False
    idle = not node.users and not node.meta.keys() & {"example_value", "val"}
    return idle or getattr(node.target, "__name__", "").startswith(_SWITCHES)


def may_write(node: Node) -> bool:
    """Returns whether the node may write to a tensor that it has not made. Drawing random numbers,
    as dropout does, does not count: our operators draw none.
    """
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    target = node.target
    if isinstance(target, OpOverload):
        return target._schema.is_mutable or _writes_undeclared(_named(node, [target._schema]))
    if isinstance(target, OpOverloadPacket):
        name, known = target.__name__, True
        schemas = [getattr(target, overload)._schema for overload in target.overloads()]
    else:
        name = target if node.op == "call_method" else getattr(target, "__name__", "")
        known = node.op == "call_method" or _is_known(target)
        schemas = _aten().get(name, [])
    if not known or _in_place_by_name(name) or any(_writes(node, s) for s in schemas):
        return True
    arguments = _named(node, schemas)
    # without a name for every argument nothing is known
    return arguments is None or _writes_undeclared(arguments)


def _is_known(function: Any) -> bool:
    module = getattr(function, "__module__", None)  # methods in C have none
    return module is None or module in _KNOWN or module.startswith("torch._C")


def _in_place_by_name(name: str) -> bool:
    if name.startswith("__"):
        return name.strip("_") in _IN_PLACE
    return name.endswith("_") or name in _IN_PLACE or name in ("setattr", "delattr")


_aten = cache(aten_schemas)


def _writes(node: Node, schema: torch.FunctionSchema) -> bool:
    """Returns whether it is given an argument that the schema declares as written."""
    return any(
        argument.alias_info is not None
        and argument.alias_info.is_write
        and (argument.name in node.kwargs or (k < len(node.args) and not argument.kwarg_only))
        for k, argument in enumerate(schema.arguments)
    )


def _named(node: Node, schemas: list[torch.FunctionSchema]) -> dict[str, Any] | None:
    """The arguments by name, as any of the schemas or the function itself has them."""
    if node.op == "call_method" or (schemas and not inspect.isfunction(node.target)):
        given = {a.name: value for s in schemas for a, value in zip(s.arguments, node.args)}
        return given | node.kwargs
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except TypeError:  # a call that fails
        return None
    except ValueError:  # of a function in C
        return dict(node.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _writes_undeclared(arguments: dict[str, Any]) -> bool:
    """Returns whether the arguments make operators and functions write without declaring it."""
    if arguments.get("inplace") or arguments.get("out") is not None:
        return True
    if arguments.get("max_norm") is not None:  # of embeddings, whose rows are then normalised
        return True
    if arguments.get("running_mean") is None and arguments.get("running_var") is None:
        return False
    flags = [arguments.get(name) for name in ("training", "train", "use_input_stats")]
    return not any(flag is False for flag in flags)
