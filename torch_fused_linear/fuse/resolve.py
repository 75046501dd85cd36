"""What an expression in a module's code stands for, for one module and at this moment.

It decides what is worth a call of ours, and what the report says; not what that call does.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import NamedTuple

from torch import nn

from .reading import Text, Unreadable, cells, code_of, is_docstring
from .steps import dotted

MISSING = object()
ITERATORS = {"enumerate", "reversed", "zip", "list", "tuple", "iter"}
CHILDREN = {"children", "modules", "values", "named_children", "items", "named_modules"}


class Value(NamedTuple):
    """Attributes: path from the module, dots between; of what is no child, the text."""

    path: str
    value: object


class Resolver:
    """Of one method of one module."""

    def __init__(self, owner: nn.Module, text: Text) -> None:
        self.owner, self.text = owner, text
        self.cells = cells(text.function)
        self.open: set[str] = set()  # names that are being looked up
        self.assigned: dict[str, list[tuple[ast.expr | None, ast.expr | None]]] = {}
        arguments = [a.arg for a in ast.walk(text.node.args) if isinstance(a, ast.arg)]
        self.self_name = text.self_name
        for name in arguments:
            if name != text.self_name:
                self.assigned[name] = [(None, None)]
        for node in ast.walk(text.node):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(target, node.value, None)
            elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
                self._assign(node.target, node.value, None)
            elif isinstance(node, (ast.For, ast.comprehension)):
                self._assign(node.target, None, node.iter)
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                self.assigned.setdefault(node.id, [])

    def _assign(self, target: ast.expr, value: ast.expr | None, iterated: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            self.assigned.setdefault(target.id, []).append((value, iterated))
        elif isinstance(target, ast.Tuple):
            is_zip = isinstance(iterated, ast.Call) and dotted(iterated.func) == ["zip"]
            zipped = iterated.args if is_zip and len(iterated.args) == len(target.elts) else []
            for k, part in enumerate(target.elts):
                one = value.elts[k : k + 1] if isinstance(value, ast.Tuple) else []
                if one or iterated is not None:  # all that may come, which is enough to know
                    self._assign(part, *one or [None], *zipped[k : k + 1] or [iterated])

    def values(self, node: ast.expr, depth: int = 0) -> list[Value]:
        """What it may be; empty if that is not known."""
        if depth > 8:
            return []
        if isinstance(node, ast.Name):
            return self._name(node.id, depth)
        if isinstance(node, ast.Attribute):
            found = [self._attribute(v, node.attr) for v in self.values(node.value, depth + 1)]
            return [v for v in found if v is not None]
        if isinstance(node, ast.Subscript):
            index = node.slice
            if isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.USub):
                index = ast.Constant(-getattr(index.operand, "value", 0))
            found = [c for v in self.values(node.value, depth + 1) for c in children(v)]
            if isinstance(index, ast.Constant) and isinstance(index.value, (int, str)):
                return _at(found, index.value)
            return found
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        return []

    def _name(self, name: str, depth: int) -> list[Value]:
        if name == self.self_name:
            return [Value("", self.owner)]
        if name in self.open:
            return []
        if name in self.assigned:
            found = []
            self.open.add(name)
            for value, iterated in self.assigned[name]:
                if value is None and iterated is None:  # an argument: any layer that we have
                    found += [Value(n, m) for n, m in named(self.owner) if n]
                elif value is not None:
                    found += self.values(value, depth + 1)
                else:
                    found += self._iterated(iterated, depth + 1)
            self.open.discard(name)
            return found
        scope = (self.cells, self.text.function.__globals__, vars(builtins))
        value = next((s[name] for s in scope if name in s), MISSING)
        return [] if value is MISSING else [Value(name, value)]

    def _iterated(self, node: ast.expr, depth: int) -> list[Value]:
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ITERATORS:
            return [v for a in node.args for v in self._iterated(a, depth + 1)]
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        return [c for v in self.values(node, depth + 1) for c in children(v)]

    def _call(self, node: ast.Call, depth: int) -> list[Value]:
        if dotted(node.func) == ["getattr"] and len(node.args) == 2:
            found = self.values(node.args[0], depth + 1)
            if isinstance(node.args[1], ast.Constant):
                found = [self._attribute(v, str(node.args[1].value)) for v in found]
                return [v for v in found if v is not None]
            return [c for v in found for c in children(v)]
        if isinstance(node.func, ast.Attribute) and node.func.attr in CHILDREN and not node.args:
            return [c for v in self.values(node.func.value, depth + 1) for c in children(v)]
        return []

    def _attribute(self, base: Value, name: str) -> Value | None:
        """Without running a property."""
        if self.text.class_name and name.startswith("__") and not name.endswith("__"):
            name = f"_{self.text.class_name.lstrip('_')}{name}"
        path = f"{base.path}.{name}" if base.path else name
        if isinstance(base.value, nn.Module):
            own = vars(base.value)
            for held in (own, own.get("_modules", {})):
                if name in held:
                    return Value(path, held[name])
            found = next((vars(c)[name] for c in type(base.value).__mro__ if name in vars(c)), None)
            found = getattr(found, "__func__", found)  # a function may be a staticmethod
            return Value(path, found) if callable(found) and not isinstance(found, type) else None
        if isinstance(base.value, ModuleType):
            value = vars(base.value).get(name, MISSING)
            return None if value is MISSING else Value(path, value)
        return None


def recipe(function: FunctionType) -> tuple[list[str], dict | None] | None:
    """What a function of one argument calls with it, if it does nothing else."""
    try:
        node = Text(function).node
    except Unreadable:
        return None
    body = [node.body] if isinstance(node, ast.Lambda) else node.body
    body = body[1:] if len(body) > 1 and is_docstring(body[0]) else body
    call = body[0].value if isinstance(body[0], ast.Return) else body[0]
    code, is_one = code_of(function), function.__defaults__ is None and len(body) == 1
    if not is_one or not isinstance(call, ast.Call) or len(call.args) != 1:
        return None
    path, given = dotted(call.func), getattr(call.args[0], "id", None)
    constants = all(isinstance(k.value, ast.Constant) and k.arg for k in call.keywords)
    if code.co_varnames != (given,) or code.co_argcount != 1 or not constants:
        return None
    options = {k.arg: k.value.value for k in call.keywords}
    return (path, options or None) if path and path[0] in code.co_names else None


def named(module: nn.Module, path: str = "", seen: set | None = None) -> Iterator[Value]:
    """``named_modules``, of modules that cannot be hashed too."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield Value(path, module)
    for name, child in module._modules.items():
        if child is not None:
            yield from named(child, f"{path}.{name}" if path else name, seen)


def children(of: Value) -> list[Value]:
    held = of.value
    if isinstance(held, nn.Module):
        items = held._modules.items()
    elif isinstance(held, dict):
        items = held.items()
    elif isinstance(held, (list, tuple)):
        items = enumerate(held)
    else:
        return []
    join = f"{of.path}.{{}}" if of.path else "{}"
    return [Value(join.format(k), v) for k, v in items if v is not None]


def _at(found: list[Value], index: int | str) -> list[Value]:
    if isinstance(index, str):
        return [v for v in found if v.path.rpartition(".")[2] == index]
    return [found[index]] if -len(found) <= index < len(found) else []
