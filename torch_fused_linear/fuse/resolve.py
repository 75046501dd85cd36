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
            match node:
                case ast.Assign(targets, value):
                    for target in targets:
                        self._assign(target, value)
                case ast.AnnAssign(target, value=value) | ast.NamedExpr(target, value):
                    self._assign(target, value)
                case ast.For(target, each) | ast.comprehension(target, each):
                    self._assign(target, ast.Starred(each))
                case ast.Name(name, ast.Store() | ast.Del()):
                    self.assigned.setdefault(name, [])

    def _assign(self, target: ast.expr, value: ast.expr | None) -> None:
        match target, value:
            case ast.Name(name), ast.expr():
                self.assigned.setdefault(name, []).append(value)
            case ast.Tuple(parts), ast.Tuple(values):
                for part, given in zip(parts, values):
                    self._assign(part, given)
            case ast.Tuple(parts), ast.Starred(each):
                is_zip = isinstance(each, ast.Call) and getattr(each.func, "id", "") == "zip"
                is_apart = is_zip and len(each.args) == len(parts)
                for k, part in enumerate(parts):
                    self._assign(part, ast.Starred(each.args[k]) if is_apart else value)

    def values(self, node: ast.expr) -> list[object]:
        """What it may be; empty if that is not known."""
        match node:
            case ast.Name(name):
                return self._name(name)
            case ast.Starred(value):
                return self._each(value)
            case ast.Attribute(value, name):
                return self._attributes(value, name)
            case ast.Subscript(value, index):
                return [v for held in self.values(value) for v in _part(held, index)]
            case ast.Call(ast.Name("getattr"), [value, ast.Constant(name)]):
                return self._attributes(value, str(name))
            case ast.Call(ast.Name("getattr"), [value, _]):
                return self._each(value)
            case ast.Call(ast.Attribute(value, name), []) if name in CHILDREN:
                return self._children(value)
        return []

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
        return (self.values if isinstance(node, ast.Call) else self._children)(node)

    def _children(self, node: ast.expr) -> list[object]:
        return [v for held in self.values(node) for v in children(held).values()]

    def _attributes(self, node: ast.expr, name: str) -> list[object]:
        """Without running a property."""
        if self.text.class_name and name.startswith("__") and not name.endswith("__"):
            name = f"_{self.text.class_name.lstrip('_')}{name}"
        found = [_attribute(base, name) for base in self.values(node)]
        return [value for value in found if value is not None]


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
