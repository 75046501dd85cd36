"""The modules of a model, and the chains of calls in their code."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType

import torch
from torch import nn

from ..nn.gated import FusedGatedMLP
from ..nn.mlp import FusedMLP
from . import fit
from .chains import Chain, Element, is_activation, is_sequential, walks_children
from .families import NAMES
from .plain import hooks_objection
from .products import Product
from .reading import Text, Unreadable, code_of, names, place_of, unwrapped
from .resolve import Resolver, Value, named
from .steps import Step

FUSED = (FusedMLP, FusedGatedMLP)


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
        self._texts: dict = {}
        self._visit(root, "")
        self.modules = {path: module for module, path in self.paths.items()}

    def _visit(self, module: nn.Module, path: str) -> None:
        if type(module).__hash__ is None:
            self.frozen[path] = f"{type(module).__name__} cannot be hashed"
            return
        if module in self.paths:
            return
        if path and (reason := frozen_reason(module)):
            self.frozen[path] = f"{type(module).__name__} {reason}"
            return
        self.paths[module] = path
        for name, child in module._modules.items():
            if child is not None:
                self._visit(child, join(path, name))

    def chains(self, module: nn.Module) -> Iterator[Chain]:
        if is_sequential(module):
            if not self._is_inner(module):
                yield self._flatten(module)
            return
        if isinstance(module, FUSED) or not any(fit.is_layer(m) for _, m in named(module)):
            return
        for function in functions_of(type(module)):
            if function is nn.Sequential.forward:
                if walks_children(module):
                    yield self._flatten(module)
            elif self._mentions_activation(module, function):
                yield from self.read(module, function)

    def read(self, module: nn.Module, function: FunctionType) -> list[Chain]:
        try:
            text = self._texts.get(function) or Text(function)
        except Unreadable as error:
            self.unread.setdefault(module, (str(error), place_of(function.__code__)))
            return []
        self._texts[function] = text
        resolver, path = Resolver(module, text), self.paths[module]

        def element(step: Step) -> Element:
            values = [] if step.callee is None else resolver.values(step.callee)
            values = [Value(join(path, v.path), v.value) for v in values]
            forms = step.forms if isinstance(step, Product) else ()
            parts = [[element(s) for s in (form.act, *form.layers)] for form in forms]
            return Element(module, values, text, step=step, parts=parts)

        chains = [[element(step) for step in run] for run in text.runs]
        if not text.takes_locals:
            return chains
        if any(map(meet, chains)):
            reason = f"{function.__qualname__} takes all its local names together"
            self.unread.setdefault(module, (reason, place_of(function.__code__)))
        return []

    def _mentions_activation(self, module: nn.Module, function) -> bool:
        code = code_of(function)
        for name in names(code) | set(code.co_freevars):
            held = vars(module).get(name, module._modules.get(name))
            if name in (*NAMES, "relu_", "getattr") or fit.is_activation(held):
                return True
            if fit.is_activation(function.__globals__.get(name)):
                return True
            if isinstance(held, nn.Module) and any(map(fit.is_activation, held._modules.values())):
                return True  # block.act, or a list of them
        return False

    def _flatten(self, sequential: nn.Module) -> Chain:
        chain = []
        for name, child in sequential._modules.items():
            if self._is_inner(child) and child is not sequential:
                chain += self._flatten(child)
            else:
                path = join(self.paths[sequential], name)
                chain.append(Element(sequential, [Value(path, child)], None, name))
        return chain

    def _is_inner(self, module: nn.Module) -> bool:
        """Whether it stands for its children in the nn.Sequential around it."""
        return (
            is_sequential(module)
            and is_sequential(self.modules.get(self.paths.get(module, "").rpartition(".")[0]))
            and self.paths.get(module) != ""
            and not hooks_objection(module)
        )


def functions_of(cls: type) -> list[FunctionType]:
    """The methods that run, without those that a child has replaced for good."""
    found: list[FunctionType] = []
    replaced: set[str] = set()
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


def meet(chain: Chain) -> bool:
    """Whether a layer and an activation are in it."""
    return any(e.parts for e in chain) or (
        any(e.of(fit.is_layer) for e in chain) and any(map(is_activation, chain))
    )


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
