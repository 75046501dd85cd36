"""What an expression in a module's code stands for, for one module and at this moment.

It decides what is worth a call of ours, and what the report says; not what that call does.
"""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Iterator
from types import FunctionType, ModuleType

from torch import nn

from .source import Text
from .syntax import dotted

ITERATORS = {"enumerate", "reversed", "zip", "list", "tuple", "iter"}
CHILDREN = {"children", "modules", "values", "named_children", "items", "named_modules"}
MOST_NAMES = 7  # that stand for one another


class Resolver:
    """Of one method of one module."""

    def __init__(self, owner: nn.Module, text: Text) -> None:
        self.owner, self.text = owner, text
        self.scopes = (cells(text.function), text.function.__globals__, vars(builtins))
        self.open: list[str] = []  # names that are being looked up
        arguments = {a.arg for a in ast.walk(text.node.args) if isinstance(a, ast.arg)}
        # What is given to each local name: ``*x`` for one of what x yields, None for an argument.
        self.assigned: dict[str, list[ast.expr | None]]
        self.assigned = {name: [None] for name in arguments - {text.self_name}}
        for node in ast.walk(text.node):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(target, node.value)
            elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
                self._assign(node.target, node.value)
            elif isinstance(node, (ast.For, ast.comprehension)):
                self._assign(node.target, ast.Starred(node.iter))
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                self.assigned.setdefault(node.id, [])

    def _assign(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Name) and value is not None:
            self.assigned.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Tuple):
            for k, part in enumerate(target.elts):
                if isinstance(value, ast.Starred):
                    self._assign(part, _part_of_each(value, k, len(target.elts)))
                elif isinstance(value, ast.Tuple) and k < len(value.elts):
                    self._assign(part, value.elts[k])

    def values(self, node: ast.expr) -> list[object]:
        """What it may be; empty if that is not known."""
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Starred):
            return self._each(node.value)
        if isinstance(node, ast.Attribute):
            return self._attributes(node.value, node.attr)
        if isinstance(node, ast.Call):
            return self._call(node)
        if not isinstance(node, ast.Subscript):
            return []
        return [v for held in self.values(node.value) for v in _part(held, node.slice)]

    def _name(self, name: str) -> list[object]:
        if name == self.text.self_name:
            return [self.owner]
        if name not in self.assigned:
            return [scope[name] for scope in self.scopes if name in scope][:1]
        if name in self.open or len(self.open) == MOST_NAMES:
            return []
        found = []
        self.open.append(name)
        for value in self.assigned[name]:
            if value is None:  # an argument: any layer that we have
                found += [module for path, module in named(self.owner) if path]
            else:
                found += self.values(value)
        self.open.pop()
        return found

    def _each(self, node: ast.expr) -> list[object]:
        """What it yields, one by one; all that may come, which is enough to know."""
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ITERATORS:
            return [v for argument in node.args for v in self._each(argument)]
        return self._call(node) if isinstance(node, ast.Call) else self._children(node)

    def _children(self, node: ast.expr) -> list[object]:
        return [v for held in self.values(node) for v in children(held).values()]

    def _call(self, node: ast.Call) -> list[object]:
        if dotted(node.func) == ["getattr"] and len(node.args) == 2:
            base, name = node.args
            is_known = isinstance(name, ast.Constant)
            return self._attributes(base, str(name.value)) if is_known else self._each(base)
        if isinstance(node.func, ast.Attribute) and node.func.attr in CHILDREN and not node.args:
            return self._children(node.func.value)
        return []

    def _attributes(self, node: ast.expr, name: str) -> list[object]:
        """Without running a property."""
        if self.text.class_name and name.startswith("__") and not name.endswith("__"):
            name = f"_{self.text.class_name.lstrip('_')}{name}"
        found = [_attribute(base, name) for base in self.values(node)]
        return [value for value in found if value is not None]


def _part_of_each(each: ast.Starred, k: int, number: int) -> ast.Starred:
    """One part of what is unpacked in each turn; of all parts, where no zip tells them apart."""
    node = each.value
    is_zip = isinstance(node, ast.Call) and dotted(node.func) == ["zip"]
    return ast.Starred(node.args[k]) if is_zip and len(node.args) == number else each


def _part(held: object, index: ast.expr) -> list[object]:
    """What an index, or any index where it is no constant, takes out of it."""
    found = children(held)
    try:
        key = ast.literal_eval(index)
    except ValueError:
        return list(found.values())
    if isinstance(key, int):
        return list(found.values())[key:][:1] if -len(found) <= key else []
    return [found[key]] if isinstance(key, str) and key in found else []


def _attribute(base: object, name: str) -> object:
    if isinstance(base, ModuleType):
        return vars(base).get(name)
    if not isinstance(base, nn.Module):
        return None
    for held in (vars(base), base._modules):
        if name in held:
            return held[name]
    found = inspect.getattr_static(type(base), name, None)
    found = getattr(found, "__func__", found)  # a function may be a staticmethod
    return found if callable(found) and not isinstance(found, type) else None


def cells(function: FunctionType) -> dict[str, object]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # is filled later
            found[name] = None
    return found


def named(
    module: nn.Module, path: str = "", seen: set | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """``named_modules``, of modules that cannot be hashed too."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from named(child, f"{path}.{name}" if path else name, seen)


def children(held: object) -> dict[object, object]:
    """What a module, a list or a dictionary holds."""
    if isinstance(held, nn.Module):
        held = held._modules
    elif isinstance(held, (list, tuple)):
        held = dict(enumerate(held))
    items = held.items() if isinstance(held, dict) else ()
    return {key: value for key, value in items if value is not None}
