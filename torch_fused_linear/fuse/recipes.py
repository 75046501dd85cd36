"""Functions that do nothing but call an activation, such as ``lambda x: F.relu(x)``."""

from __future__ import annotations

import ast
import weakref
from types import CodeType, FunctionType

from torch.compiler import is_dynamo_compiling

from .source import Text, Unreadable, code_of
from .syntax import dotted, is_docstring, step_of

Recipe = tuple[list[str], dict]
_known: weakref.WeakKeyDictionary[CodeType, Recipe | None] = weakref.WeakKeyDictionary()


def called_by(function: FunctionType) -> tuple[object, dict]:
    """What a function calls with its argument, if it does no more, and the options of that call."""
    code = code_of(function)
    if code not in _known and not is_dynamo_compiling():
        _known[code] = _recipe(function)
    recipe = _known.get(code)
    if recipe is None or function.__defaults__ is not None:
        return None, {}
    (name, *attributes), options = recipe
    value = function.__globals__.get(name)
    for attribute in attributes:
        value = getattr(value, attribute, None)
    return (None, {}) if value is function else (value, options)


def _recipe(function: FunctionType) -> Recipe | None:
    """The name of what is called, part by part, and the options."""
    try:
        node = Text(function).node
    except Unreadable:
        return None
    if isinstance(node, ast.Lambda):
        step = step_of(node.body)
    else:
        *before, last = node.body
        is_one = isinstance(last, ast.Return) and all(map(is_docstring, before))
        step = step_of(last.value) if is_one and isinstance(node, ast.FunctionDef) else None
    if step is None or step.callee is None or len(step.node.args) != 1:
        return None
    code, path, options = code_of(function), dotted(step.callee), step.options()
    is_argument = code.co_varnames == (getattr(step.data, "id", None),) and code.co_argcount == 1
    is_constant = not any(isinstance(value, ast.AST) for value in options.values())
    is_global = bool(path) and path[0] in code.co_names
    return (path, options) if is_argument and is_constant and is_global else None
