"""The modules of a model, and the chains of calls in their code."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..nn.gated import FusedGatedMLP
from ..nn.mlp import FusedMLP
from . import plain
from .families import NAMES
from .plain import hooks_objection
from .resolve import Resolver, named
from .runs import Product, Step, step_of
from .source import Text, Unreadable, code_of, names, place_of, unwrapped

FUSED = (FusedMLP, FusedGatedMLP)


@dataclass(eq=False)
class Element:
    """One step of a chain, which is a run of calls for one module."""

    owner: nn.Module  # in whose code, or as whose child, it stands
    values: list[object]  # what is called, several in a loop
    step: Step
    text: Text | None = None  # the code that it is in; None for a child of an nn.Sequential
    parts: list[list[Element]] = field(default_factory=list)  # of each form of a product

    @property
    def place(self) -> tuple[nn.Module, ast.AST]:
        return self.owner, self.step.node

    @property
    def where(self) -> str:
        return "" if self.text is None else self.text.place(self.step.node)

    def kinds(self, *, is_plain: bool = False) -> list[str | None]:
        """What each of its values is as an activation, or as one that is plain now."""
        options, _ = self.step.options()
        refused = [is_plain and plain.activation_objection(v, options) for v in self.values]
        kinds = [plain.activation_kind(value, options) for value in self.values]
        return [None if reason else kind for kind, reason in zip(kinds, refused)]

    def of(self, test: Callable[[object], bool]) -> list[Any]:
        return [*filter(test, self.values)]

    def is_activation(self) -> bool:
        return bool(self.of(plain.is_activation))

    def is_square(self) -> bool:
        if self.step.callee is None or not self.step.is_square:
            return self.step.is_square
        more = tuple(getattr(node, "value", None) for node in self.step.node.args[1:])
        known = [plain.is_square(value, more) for value in self.values]
        return any(known) and all(known) and not self.step.node.keywords


Chain = list[Element]


class Model:
    """What there is to know before anything is decided."""

    def __init__(self, root: nn.Module) -> None:
        self.paths: dict[nn.Module, str] = {}
        self.frozen: dict[str, str] = {}  # why a module was not entered
        self.unread: dict[nn.Module, tuple[str, str]] = {}  # why code is not believed, and where
        self._text = cache(Text)
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
            for name, child in module._modules.items():
                if child is not None:
                    self._visit(child, f"{path}.{name}" if path else name)

    def chains(self, module: nn.Module) -> Iterator[Chain]:
        is_one = isinstance(module, FUSED) or self._is_inner(module)
        if is_one or not any(plain.is_layer(m) for _, m in named(module)):
            return
        for function in functions_of(type(module)):
            if function is nn.Sequential.forward:
                if walks_children(module):
                    yield self._flatten(module)
            elif self._mentions_activation(module, function):
                yield from self.read(module, function)

    def read(self, module: nn.Module, function: FunctionType) -> list[Chain]:
        try:
            text = self._text(function)
        except Unreadable as error:
            self.unread.setdefault(module, (str(error), place_of(function.__code__)))
            return []
        resolver = Resolver(module, text)

        def element(step: Step) -> Element:
            is_method = step.callee is None
            values = [plain.called_in(step.node)] if is_method else resolver.values(step.callee)
            forms = step.forms if isinstance(step, Product) else ()
            parts = [[*map(element, form.steps)] for form in forms]
            return Element(module, values, step, text, parts)

        chains = [[element(step) for step in run] for run in text.runs]
        if text.scope.takes_locals():
            if any(e.of(plain.is_layer) for chain in chains for e in chain):
                reason = f"{function.__qualname__} takes all its local names together"
                self.unread.setdefault(module, (reason, place_of(function.__code__)))
            return []
        return chains

    def _mentions_activation(self, module: nn.Module, function: FunctionType) -> bool:
        code = code_of(function)
        for name in names(code) | set(code.co_freevars):
            held = vars(module).get(name, module._modules.get(name))
            inner = held._modules.values() if isinstance(held, nn.Module) else ()  # as block.act
            found = (held, function.__globals__.get(name), *inner)
            if name in (*NAMES, "relu_", "getattr") or any(map(plain.is_activation, found)):
                return True
        return False

    def _flatten(self, sequential: nn.Module) -> Chain:
        chain = []
        for child in sequential._modules.values():
            if self._is_inner(child) and child is not sequential:
                chain += self._flatten(child)
            else:
                call = ast.parse("module(input)", mode="eval").body
                chain.append(Element(sequential, [child], step_of(call)))
        return chain

    def _is_inner(self, module: nn.Module) -> bool:
        """Whether it stands for its children in the nn.Sequential around it."""
        if not is_sequential(module) or not (path := self.paths.get(module)):
            return False
        outer = self.modules[path.rpartition(".")[0]]
        return is_sequential(outer) and not hooks_objection(module)


def functions_of(cls: type) -> list[FunctionType]:
    """The methods that run, without those that a child has replaced for good."""
    found: list[FunctionType] = []
    replaced = {"__init__"}  # has run
    for base in cls.__mro__:
        for name, value in vars(base).items() if base not in (nn.Module, object) else ():
            if name in replaced:
                continue
            function = unwrapped(value)
            if function is not None:
                found.append(function)
            if function is None or "super" not in code_of(function).co_names:
                replaced.add(name)
    return found


def frozen_reason(module: nn.Module) -> str | None:
    """Why a change of functions would not reach the code that is run, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "is scripted or traced"
    if isinstance(module, torch.fx.GraphModule):
        return "is traced or exported to a graph"
    return None


def is_sequential(module: object) -> bool:
    """Whether it does what nn.Sequential does; torchvision's MLP has only a constructor more."""
    if not isinstance(module, nn.Sequential) or type(module).__hash__ is None:
        return False
    return type(module).forward is nn.Sequential.forward and walks_children(module)


def walks_children(module: nn.Sequential) -> bool:
    """Whether nn.Sequential's forward means its children, one by one."""
    return type(module).__iter__ is nn.Sequential.__iter__


def pass_over(chain: Chain, start: int) -> int:
    """The index of the first element from `start` that is neither dropout nor identity."""
    while start < len(chain) and chain[start].of(plain.is_passed):
        start += 1
    return start
