"""The modules of a model, and the chains of calls in their code."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType

import torch
from torch import nn

from ..nn.gated import FusedGatedMLP
from ..nn.mlp import FusedMLP
from . import plain
from .families import NAMES
from .plain import hooks_objection
from .resolve import Resolver, Value, named
from .runs import Product
from .source import Text, Unreadable, code_of, names, place_of, unwrapped
from .syntax import Step, step_of

FUSED = (FusedMLP, FusedGatedMLP)


@dataclass(eq=False)
class Element:
    """One step of a chain, which is a run of calls for one module.

    Attributes:
        owner: the module in whose code, or as whose child, it stands.
        values: what is called, with the path from the model: several in a loop.
        step: as it was read; of a child of an nn.Sequential, what its forward does.
        text: the code that it is in; None for such a child.
        parts: of each form of a product: its activation, its layer or both layers.
    """

    owner: nn.Module
    values: list[Value]
    step: Step
    text: Text | None = None
    parts: list[list[Element]] = field(default_factory=list)

    @property
    def place(self) -> tuple[nn.Module, ast.AST]:
        return self.owner, self.step.node

    @property
    def where(self) -> str:
        return "" if self.text is None else self.text.place(self.step.node)

    def options(self) -> dict:
        """The constants that are given beside the tensor; the rest is known when it runs."""
        return {k: v for k, v in self.step.options().items() if not isinstance(v, ast.AST)}

    def kinds(self, *, is_plain: bool = False) -> list[str | None]:
        """What each of its values is as an activation, or as one that is plain now."""
        if self.step.callee is None:  # h.relu(), or h ** 2
            return [None if self.step.is_square else "relu"]
        found = [(v.value, self.options()) for v in self.values]
        objections = [plain.activation_objection(*given) if is_plain else None for given in found]
        return [
            None if objection else plain.activation_kind(*given)
            for given, objection in zip(found, objections)
        ]

    def of(self, test: Callable[[object], bool]) -> list[Value]:
        return [v for v in self.values if test(v.value)]

    def is_activation(self) -> bool:
        if self.step.callee is None:
            return not self.step.is_square
        return bool(self.of(plain.is_activation))

    def is_square(self) -> bool:
        if self.step.callee is None or not self.step.is_square:
            return self.step.is_square
        more = tuple(getattr(node, "value", None) for node in self.step.node.args[1:])
        known = [plain.is_square(v.value, more) for v in self.values]
        return any(known) and all(known) and not self.step.node.keywords


Chain = list[Element]


class Model:
    """What there is to know before anything is decided.

    Attributes:
        paths: the first path to each module.
        modules: by path.
        frozen: of each module that was not entered, why.
        unread: of a module whose code cannot be believed, why, and where it is.
    """

    def __init__(self, root: nn.Module) -> None:
        self.paths: dict[nn.Module, str] = {}
        self.frozen: dict[str, str] = {}
        self.unread: dict[nn.Module, tuple[str, str]] = {}
        self._text = cache(Text)
        self._visit(root, "")
        self.modules = {path: module for module, path in self.paths.items()}

    def _visit(self, module: nn.Module, path: str) -> None:
        cls = type(module)
        reason = "cannot be hashed" if cls.__hash__ is None else frozen_reason(module)
        if reason:
            self.frozen[path] = f"{cls.__name__} {reason}"
        elif module not in self.paths:
            self.paths[module] = path
            for name, child in module._modules.items():
                if child is not None:
                    self._visit(child, join(path, name))

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
        resolver, path = Resolver(module, text), self.paths[module]

        def element(step: Step) -> Element:
            values = [] if step.callee is None else resolver.values(step.callee)
            values = [Value(join(path, v.path), v.value) for v in values]
            forms = step.forms if isinstance(step, Product) else ()
            parts = [[element(s) for s in (form.act, *form.layers)] for form in forms]
            return Element(module, values, step, text, parts)

        chains = [[element(step) for step in run] for run in text.runs]
        if text.scope.takes_locals():
            values = (v.value for chain in chains for e in chain for v in e.values)
            if any(map(plain.is_layer, values)):
                reason = f"{function.__qualname__} takes all its local names together"
                self.unread.setdefault(module, (reason, place_of(function.__code__)))
            return []
        return chains

    def _mentions_activation(self, module: nn.Module, function: FunctionType) -> bool:
        code = code_of(function)
        for name in names(code) | set(code.co_freevars):
            held = vars(module).get(name, module._modules.get(name))
            if name in (*NAMES, "relu_", "getattr") or plain.is_activation(held):
                return True
            if plain.is_activation(function.__globals__.get(name)):
                return True
            if isinstance(held, nn.Module) and any(
                map(plain.is_activation, held._modules.values())
            ):
                return True  # block.act, or a list of them
        return False

    def _flatten(self, sequential: nn.Module) -> Chain:
        chain = []
        for name, child in sequential._modules.items():
            if self._is_inner(child) and child is not sequential:
                chain += self._flatten(child)
            else:
                path = join(self.paths[sequential], name)
                call = ast.parse("module(input)", mode="eval").body
                chain.append(Element(sequential, [Value(path, child)], step_of(call)))
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


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
