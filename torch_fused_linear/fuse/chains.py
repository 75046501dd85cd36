"""Finds, in a model, the sequences of modules that are called one upon the other's output."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from . import safety
from .families import full_name
from .reading import Code, Step


@dataclass
class Element:
    """One step of a chain: what is called as `owner.name` on the step before's output.

    Attributes:
        path: from the model.
        owner: the module whose attribute it is.
        name: of the attribute; of a function that is called instead, as it is written.
        value: the module, a function that is an attribute, or `Dropout` or `Function` for a call
            in the owner's code.
        is_sole: whether nobody else sees the step before's output.
    """

    path: str
    owner: nn.Module
    name: str
    value: object
    is_sole: bool = True

    @property
    def place(self) -> tuple[int, str]:
        return id(self.owner), self.name


@dataclass(frozen=True)
class Dropout:
    """``F.dropout`` in the code of a forward; `p` is None where it cannot be told."""

    p: float | None


@dataclass(frozen=True)
class Function:
    """``F.relu`` or ``F.gelu`` in the code of a forward."""

    text: str


Chain = list[Element]
COMPILED = "torch._dynamo.eval_frame.OptimizedModule"  # by name: importing it takes a second


def frozen_reason(module: nn.Module) -> str | None:
    """Why a change of the module's children would not reach the code that is run, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "is scripted or traced"
    if isinstance(module, torch.fx.GraphModule):
        return "is traced or exported to a graph"
    if full_name(type(module)) == COMPILED or module._compiled_call_impl is not None:
        return "is compiled"
    return None


class Model:
    """The modules of a model and their code.

    Attributes:
        paths: the first path to each module.
        places: where each module is registered: in which module, under which name.
        frozen: of each module that was not entered, why.
    """

    def __init__(self, root: nn.Module) -> None:
        self.paths: dict[nn.Module, str] = {}
        self.frozen: dict[str, str] = {}
        # `a.b` and `c.b` are two places unless a is c, however often a itself is registered
        self.places: dict[nn.Module, list[tuple[nn.Module, str]]] = defaultdict(list)
        self._visit(root, "")
        self.modules = {path: module for module, path in self.paths.items()}
        self.code = Code({type(module) for module in self.paths})

    def _visit(self, module: nn.Module, path: str) -> None:
        if module in self.paths:
            return
        if path and (reason := frozen_reason(module)):
            self.frozen[path] = f"{type(module).__name__} {reason}"
            return
        self.paths[module] = path
        for name, child in module._modules.items():
            if child is not None:
                self.places[child].append((module, name))
                self._visit(child, join(path, name))

    def is_shared(self, module: nn.Module) -> bool:
        return len(self.places[module]) > 1

    def chains(self) -> Iterator[Chain]:
        for module, path in self.paths.items():
            if is_sequential(module):
                if not self._is_flattened(module):
                    yield self._flatten(module)
            elif any(map(safety.is_layer, module._modules.values())):
                for run in self.code.runs(type(module)):
                    yield [self._element(module, path, step) for step in run]

    def _flatten(self, sequential: nn.Module) -> Chain:
        chain = []
        for name, child in sequential._modules.items():
            if self._is_flattened(child):
                chain += self._flatten(child)
            else:
                chain.append(Element(join(self.paths[sequential], name), sequential, name, child))
        return chain

    def _is_flattened(self, module: nn.Module) -> bool:
        """Whether it stands for its children in the nn.Sequential around it."""
        return (
            is_sequential(module)
            and len(self.places[module]) == 1
            and is_sequential(self.places[module][0][0])
            and not safety.hooks_objection(module)
        )

    def _element(self, owner: nn.Module, path: str, step: Step) -> Element:
        if step.is_module:
            value = vars(owner).get(step.name, owner._modules.get(step.name))
            return Element(join(path, step.name), owner, step.name, value, step.is_sole)
        if step.name == "dropout":
            called = Dropout(getattr(owner, step.p, None) if step.p else None)
        else:
            called = Function(step.text)
        return Element(path, owner, step.text, called, step.is_sole)


def is_sequential(module: nn.Module) -> bool:
    """Whether it does what nn.Sequential does; torchvision's MLP has only a constructor more."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and type(module).__iter__ is nn.Sequential.__iter__
        and "forward" not in vars(module)
    )


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
