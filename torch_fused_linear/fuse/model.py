"""The modules of a model, and the chains of calls in their code.

What an expression in the code stands for is found for one module and at this moment. It decides
what is worth a call of ours, and what the report says; not what that call does.
"""

import ast
import builtins
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from ..nn.gated import FusedGatedMLP
from ..nn.mlp import FusedMLP
from . import plain
from .families import NAMES
from .parts import CHILDREN, ITERATORS, WHOLE, Bounds, bounds_of, parts_called
from .runs import Step, runs_of, step_of
from .source import Text, Unreadable, code_of, codes_in, place_of, unwrapped

FUSED = (FusedMLP, FusedGatedMLP)
CONTAINERS = (list, tuple, dict, nn.ModuleList, nn.ModuleDict, nn.Sequential)
OWN_LOOK_UP = object.__getattribute__
MOST_NAMES = 7  # that stand for one another


@dataclass(eq=False)
class Element:
    """One step of a chain, which is a run of calls for one module."""

    owner: nn.Module  # in whose code, or as whose child, it stands
    values: list[object]  # what is called, several in a loop
    step: Step
    text: Text | None = None  # the code that it is in; None for a child of an nn.Sequential
    parts: list[list["Element"]] = field(default_factory=list)  # of each form of a product
    resolver: "Resolver | None" = None

    @property
    def place(self) -> tuple[nn.Module, ast.AST]:
        return self.owner, self.step.node

    @property
    def where(self) -> str:
        return f"{self.text.code.co_filename}:{self.step.node.lineno}" if self.text else ""

    def kinds(self, *, is_plain: bool = False) -> list[str | None]:
        """Returns the activation that each of its values is, or with `is_plain` is now."""
        options, _ = self.step.options()
        refused = [is_plain and plain.activation_objection(v, options) for v in self.values]
        kinds = [plain.RULES.activation_kind(value, options) for value in self.values]
        return [None if reason else kind for kind, reason in zip(kinds, refused)]

    def of(self, test: Callable[[object], bool]) -> list[Any]:
        return [*filter(test, self.values)]

    def is_square(self) -> bool:
        if self.step.callee is None or not self.step.is_square:
            return self.step.is_square
        more = tuple(getattr(node, "value", None) for node in self.step.node.args[1:])
        known = [plain.RULES.is_square(value, more) for value in self.values]
        return any(known) and all(known) and not self.step.node.keywords


Chain = list[Element]


class Model:
    """The modules of a model with their names and the chains in their code: in the functions that
    mention an activation, with `with_layers` in all."""

    def __init__(self, root: nn.Module, with_layers: bool = False) -> None:
        self.with_layers = with_layers
        self.paths: dict[nn.Module, str] = {}
        self.frozen: dict[str, str] = {}  # why a module was not entered
        self.resolvers: list[Resolver] = []  # of the functions that are read
        self.unread: dict[nn.Module, tuple[str, str]] = {}  # why code is not believed, and where
        self.apart: dict[nn.Module, str] = {}  # containers that no code calls, and why
        self._holders: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        self._text, self._runs = cache(Text), cache(runs_of)
        self._visit(root, "")
        self.modules = {path: module for module, path in self.paths.items()}
        self.names = {id(module): path for path, module in named(root)}  # of frozen ones too

    def _visit(self, module: nn.Module, path: str) -> None:
        cls = type(module)
        reason = "cannot be hashed" if cls.__hash__ is None else frozen_reason(module)
        if reason:
            self.frozen[path] = f"{cls.__name__} {reason}"
        elif module not in self.paths:
            self.paths[module] = path
            for name, child in children(module).items():
                self._visit(child, f"{path}.{name}" if path else name)
                if type(child).__hash__ is not None and child in self.paths:
                    self._holders.setdefault(child, []).append((module, name))

    def chains(self, module: nn.Module) -> Iterator[Chain]:
        if isinstance(module, FUSED) or not any(plain.is_layer(m) for _, m in named(module)):
            return
        holds_layers = self.with_layers and any(plain.is_linear(m) for p, m in named(module) if p)
        for function in functions_of(type(module)):
            is_read = holds_layers or function is nn.Sequential.forward
            if is_read or self._mentions_activation(module, function):
                yield from self.read(module, function)

    def read(self, module: nn.Module, function: FunctionType) -> list[Chain]:
        try:
            text = self._text(function)
        except Unreadable as error:
            is_said = not self.with_layers or self._mentions_activation(module, function)
            if is_said or self._mentions_layer(module, function):
                self.unread.setdefault(module, (str(error), place_of(function.__code__)))
            return []
        if function is nn.Sequential.forward:
            is_torchs = text.file[1] == nn.modules.container.__file__
            is_loop = is_torchs and type(module).__iter__ is nn.Sequential.__iter__
            chain = self._sequence(module) if is_loop else []
            return [chain[slice(*bounds)] for bounds in self._parts(module)] if chain else []
        resolver = Resolver(module, text)

        def element(step: Step) -> Element:
            is_method = step.callee is None
            values = [plain.called_in(step.node)] if is_method else resolver.values(step.callee)
            parts = [[*map(element, form.steps)] for form in step.forms]
            return Element(module, values, step, text, parts, resolver)

        chains = [[element(step) for step in run] for run in self._runs(text)]
        if text.takes_locals():
            if any(e.of(plain.is_layer) for chain in chains for e in chain):
                reason = f"{function.__qualname__} takes all its local names together"
                self.unread.setdefault(module, (reason, place_of(function.__code__)))
            return []
        self.resolvers.append(resolver)
        return chains

    def _mentions_activation(self, module: nn.Module, function: FunctionType) -> bool:
        for name in mentioned(function):
            held = vars(module).get(name, module._modules.get(name))
            inner = held._modules.values() if isinstance(held, nn.Module) else ()  # as block.act
            found = (held, function.__globals__.get(name), *inner)
            if name in (*NAMES, "relu_", "getattr") or any(map(plain.is_activation, found)):
                return True
        return False

    def _mentions_layer(self, module: nn.Module, function: FunctionType) -> bool:
        held = [vars(module).get(n, module._modules.get(n)) for n in mentioned(function)]
        held += [value for found in held for value in children(found).values()]  # as attention.out
        return any(map(plain.is_linear, held))

    def _parts(self, sequential: nn.Module) -> list[Bounds]:
        """The bounds of what is called of it: all, where that is not known."""
        found: dict[Bounds | None, None] = {}
        for holder, name in self._holders.get(sequential, ()):
            before = len(found)
            try:
                for function in functions_of(type(holder)):
                    found |= dict.fromkeys(parts_called(name, self._text(function)))
            except Unreadable:
                return [WHOLE]
            if len(found) == before:  # other code calls it
                return [WHOLE]
        parts = [part for part in found if part is not None]
        if found and not parts:
            holder = type(self._holders[sequential][0][0]).__name__
            self.apart[sequential] = f"the code of {holder} calls its layers one by one"
        return [WHOLE] if not found or WHOLE in parts else parts

    def _sequence(self, sequential: nn.Module) -> Chain:
        calls = (ast.parse("module(input)", mode="eval").body for _ in sequential._modules)
        children = zip(sequential._modules.values(), calls)
        return [Element(sequential, [child], step_of(call)) for child, call in children]


def mentioned(function: FunctionType) -> set[str]:
    """The names of what is not local, in a function and in those in it."""
    codes = codes_in(code_of(function))
    return {name for code in codes for name in code.co_names + codes[0].co_freevars}


def functions_of(cls: type) -> list[FunctionType]:
    """The methods that run, without those that a child has replaced for good."""
    found: dict[FunctionType, None] = {}  # one may have several names
    replaced = {"__init__"}  # has run
    for base in cls.__mro__:
        for name, value in vars(base).items() if base not in (nn.Module, object) else ():
            if name in replaced:
                continue
            function = unwrapped(value)
            if function is not None:
                found[function] = None
            if function is None or "super" not in code_of(function).co_names:
                replaced.add(name)
    return [*found]


def frozen_reason(module: nn.Module) -> str | None:
    """Why a change of functions would not reach the code that is run, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "is scripted or traced"
    if isinstance(module, torch.fx.GraphModule):
        return "is traced or exported to a graph"
    return None


def is_sequential(module: object) -> bool:
    """Returns whether it runs as nn.Sequential; torchvision's MLP only adds a constructor."""
    if not isinstance(module, nn.Sequential) or type(module).__hash__ is None:
        return False
    names = "forward", "__iter__"
    return all(getattr(type(module), n) is getattr(nn.Sequential, n) for n in names)


def pass_over(chain: Chain, start: int) -> int:
    """The index of the first element from `start` that is neither dropout nor identity."""
    while start < len(chain) and chain[start].of(plain.is_passed):
        start += 1
    return start


# --- what an expression stands for --------------------------------------------------------------


class Resolver:
    """Finds the objects that expressions in one method of one module stand for."""

    def __init__(self, owner: nn.Module, text: Text) -> None:
        self.owner, self.text = owner, text
        # A private name gets the name of the class around the function before it.
        self.class_name = text.function.__qualname__.rpartition(".")[0].rpartition(".")[2]
        self.scopes = (cells(text.function), text.function.__globals__, vars(builtins))
        self.open: list[str] = []  # names that are being looked up
        by_position = [*text.node.args.posonlyargs, *text.node.args.args]
        self.self_name = by_position[0].arg if by_position else ""
        arguments = {a.arg for a in ast.walk(text.node.args) if isinstance(a, ast.arg)}
        # The values assigned to each local name: ``*x`` for an element of x, None for an argument.
        self.assigned: dict[str, list[ast.expr | None]]
        self.assigned = {name: [None] for name in arguments - {self.self_name}}
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
        """Returns the objects that an expression may stand for; empty if that is not known."""
        match node:
            case ast.Name(name):
                return self._name(name)
            case ast.Starred(value):
                return self._each(value)
            case ast.Attribute(value, name):
                return self._attributes(value, name)
            case ast.Subscript(value, ast.Slice() as index):
                return [_slice(held, index) for held in self.values(value)]
            case ast.Subscript(value, index):
                return [v for held in self.values(value) for v in _part(held, index)]
            case ast.Call(ast.Name("getattr"), [value, ast.Constant(name)]):
                return self._attributes(value, str(name))
            case ast.Call(ast.Name("getattr"), [value, _]):
                return self._each(value)
            case ast.Call(ast.Attribute(value, name), []) if name in CHILDREN:
                return self._children(value)
        return []

    def is_given(self, node: ast.expr) -> bool:
        """Returns whether it is an argument, so that it may stand for any layer that we have."""
        match node:
            case ast.Starred(value):
                return self.is_given(value)
            case ast.Call(ast.Name(name), [*given]) if name in ITERATORS:
                return any(map(self.is_given, given))
            case ast.Name(name) if name in self.assigned and name not in self.open:
                self.open.append(name)
                found = any(v is None or self.is_given(v) for v in self.assigned[name])
                self.open.pop()
                return found
        return False

    def is_stored(self, node: ast.expr) -> bool:
        """Returns whether looking it up runs no code of the user's: names, attributes that are
        stored in modules, and items of torch's containers.
        """
        match node:
            case ast.Name() | ast.Constant():
                return True
            case ast.Attribute(value, name) | ast.Call(
                ast.Name("getattr"), [value, ast.Constant(str(name))], []
            ):
                held = self.values(value) if self.is_stored(value) else []
                return bool(held) and all(_is_stored(base, self._mangled(name)) for base in held)
            case ast.Subscript(value, ast.Name() | ast.Constant()):
                held = self.values(value) if self.is_stored(value) else []
                return bool(held) and all(type(base) in CONTAINERS for base in held)
        return False

    def _name(self, name: str) -> list[object]:
        if name == self.self_name:
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
        """Returns all objects that iterating over it may yield."""
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ITERATORS:
            return [v for argument in node.args for v in self._each(argument)]
        return (self.values if isinstance(node, ast.Call) else self._children)(node)

    def _children(self, node: ast.expr) -> list[object]:
        return [v for held in self.values(node) for v in children(held).values()]

    def _attributes(self, node: ast.expr, name: str) -> list[object]:
        """Without running a property."""
        found = [_attribute(base, self._mangled(name)) for base in self.values(node)]
        return [value for value in found if value is not None]

    def _mangled(self, name: str) -> str:
        is_private = self.class_name and name.startswith("__") and not name.endswith("__")
        return f"_{self.class_name.lstrip('_')}{name}" if is_private else name


def _part(held: object, index: ast.expr) -> list[object]:
    """Returns the objects that an index selects; all of them if the index is no constant."""
    found = children(held)
    try:
        key = ast.literal_eval(index)
    except ValueError:
        return list(found.values())
    if isinstance(key, int):
        return list(found.values())[key:][:1] if -len(found) <= key else []
    return [found[key]] if isinstance(key, str) and key in found else []


def _slice(held: object, index: ast.Slice) -> list[object]:
    """Returns the objects in a slice; all of them if its bounds are no constants."""
    return [*children(held).values()][slice(*bounds_of(index) or WHOLE)]


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


def _is_stored(base: object, name: str) -> bool:
    """Returns whether the attribute is looked up without code of the user's, here and in
    subclasses.
    """
    if isinstance(base, ModuleType):
        return name in vars(base)
    if not isinstance(base, nn.Module) or type(base).__getattribute__ is not OWN_LOOK_UP:
        return False
    found = [inspect.getattr_static(cls, name, None) for cls in subclasses_of(type(base))]
    if any(hasattr(type(value), "__get__") and not inspect.isroutine(value) for value in found):
        return False  # a property, say
    is_held = any(name in held for held in (base._modules, base._parameters, base._buffers))
    is_torchs = type(base).__getattr__ is nn.Module.__getattr__
    return name in vars(base) or found[0] is not None or (is_held and is_torchs)


def subclasses_of(cls: type) -> list[type]:
    """The class and all that are made of it."""
    found = dict.fromkeys([cls])
    for each in type.__subclasses__(cls):
        found |= dict.fromkeys(subclasses_of(each))
    return [*found]


def cells(function: FunctionType) -> dict[str, object]:
    held = zip(function.__code__.co_freevars, function.__closure__ or ())
    empty = CellType()  # filled later
    return {name: None if cell == empty else cell.cell_contents for name, cell in held}


def named(
    module: nn.Module, path: str = "", seen: set | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """``named_modules``, of modules that cannot be hashed too."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield path, module
    for name, child in children(module).items():
        yield from named(child, f"{path}.{name}" if path else name, seen)


def children(held: object) -> dict[object, object]:
    """Returns the objects that a module, a list or a dictionary holds, by their keys."""
    if isinstance(held, nn.Module):
        held = held._modules
    elif isinstance(held, (list, tuple)):
        held = dict(enumerate(held))
    items = held.items() if isinstance(held, dict) else ()
    return {key: value for key, value in items if value is not None}
