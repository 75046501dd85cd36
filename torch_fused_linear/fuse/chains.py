"""Steps that follow upon each other in a model, and what may become one call among them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from . import fit
from .call import activation_kind
from .classes import SEQUENTIAL, origin
from .reading import Step, Text
from .report import Block
from .resolve import Value
from .rewrite import can_change

OPERATORS = {  # of each activation: the operator before, and the fused one
    "none": (None, "linear"),
    "relu": ("ReLU", "linear_relu"),
    "gelu_tanh": ("GELU (tanh)", "linear_gelu (tanh)"),
    "gelu_erf": ("GELU (erf)", "linear_gelu (erf)"),
    "silu": ("SiLU", "linear_silu"),
    "gelu": ("GELU", "linear_gelu"),  # which of the two is known when it runs
}


@dataclass
class Element:
    """One step of a chain.

    Attributes:
        owner: the module in whose code, or as whose child, it stands.
        values: what is called, with the path from the model: several in a loop.
        text: the code that it is in; None for a child of an nn.Sequential.
        at: the numbers of its run and step there; for a child its name.
        step: as it was read.
    """

    owner: nn.Module
    values: list[Value]
    text: Text | None
    at: object
    step: Step | None = None
    cls: type | None = None

    @property
    def place(self) -> tuple:
        where = self.at if self.text is None else (id(self.step.node),)
        return id(self.owner), where

    @property
    def where(self) -> str:
        return "" if self.text is None else self.text.place(self.step.node)

    def options(self) -> dict | None:
        """The constants that are given beside the tensor; the rest is known when it runs."""
        given = self.step.options() if self.step is not None else {}
        return {k: v for k, v in given.items() if not isinstance(v, ast.AST)} or None

    def kinds(self) -> list[str | None]:
        """What each of its values would be as an activation."""
        return [activation_kind(v.value, self.options()) for v in self.values]

    def of(self, test: Callable[[object], bool]) -> list[Value]:
        return [v for v in self.values if test(v.value)]


Chain = list[Element]


@dataclass
class Layer:
    """A call of linear layers or convolutions, with that of the activation they are to apply."""

    linear: Element
    layers: list[Value]
    kind: str = "none"
    activation: Element | None = None
    drops_before: bool = False  # a dropout between linear layer and activation
    drops_after: bool = False
    next: Layer | None = None
    meets_parameters: bool = False  # straight after the activation comes another module with some

    @property
    def is_convolution(self) -> bool:
        return isinstance(self.layers[0].value, nn.Conv2d)

    @property
    def memory_pays(self) -> bool:
        """Whether less is kept with low memory. GELU's and SiLU's output can be computed anew by
        the layer after it; ReLU's is kept by that layer, or by a normalisation or whatever else
        with parameters comes there, and bits of it beside that would be more."""
        if self.is_convolution or self.activation is None or len(self.layers) > 1:
            return False
        dropped = self.drops_before or self.drops_after
        meets_next = self.next is not None and not dropped
        if self.kind != "relu":
            return meets_next
        return not meets_next and (dropped or not self.meets_parameters)


def is_sequential(module: object) -> bool:
    """Whether it does what nn.Sequential does; torchvision's MLP has only a constructor more."""
    cls = origin(type(module))
    return (
        isinstance(module, nn.Sequential)
        and cls.forward is nn.Sequential.forward
        and cls.__iter__ is nn.Sequential.__iter__
    )


def is_activation(element: Element) -> bool:
    if element.step is not None and element.step.callee is None:
        return True
    return bool(element.of(fit.is_activation))


def is_changeable(element: Element) -> bool:
    return element.step.is_bare and can_change(element.text, element.step)


def pass_over(chain: Chain, start: int) -> int:
    """The index of the first element from `start` that is neither dropout nor identity."""
    while start < len(chain) and any(fit.is_passed(v.value) for v in chain[start].values):
        start += 1
    return start


def drops(elements: Chain) -> bool:
    """Whether there is a dropout that can act, in training."""
    found = (v.value for element in elements for v in element.values)
    return any(getattr(value, "p", 1 if callable(value) and not isinstance(value, nn.Module) else 0)
               != 0 for value in found)  # fmt: skip


def has_parameters(value: object) -> bool:
    return isinstance(value, nn.Module) and next(value.parameters(), None) is not None


def blocks(layers: Iterable[Layer], classes: dict[nn.Module, type], path_of) -> Iterator[Block]:
    """For the report: layers one after the other, with the code in the `classes` to come."""
    followers = {id(layer.next) for layer in layers}
    for layer in layers:
        if id(layer) in followers:
            continue
        element = layer.linear
        texts = getattr(classes[element.owner], "__fused_texts__", {})
        key = SEQUENTIAL if element.text is None else (
            element.cls, element.text.function.__name__)  # fmt: skip
        chain, before, after = [], [], []
        while layer is not None and layer not in chain:
            chain.append(layer)
            for value in layer.layers:
                operator, fused = OPERATORS[layer.kind]
                product = "MatMul"
                if layer.is_convolution:
                    product, fused = "Conv2d", "conv2d_relu"
                drops = ["Dropout"]
                before += [product] + ["BiasAdd"] * (value.value.bias is not None)
                before += drops * layer.drops_before + [operator] * (operator is not None)
                after += [fused] + drops * layer.drops_before
                before, after = (o + drops * layer.drops_after for o in (before, after))
            layer = layer.next
        paths = tuple(value.path for layer in chain for value in layer.layers)
        owner, kind = element.owner, origin(type(element.owner)).__name__
        text = texts[key].text if key in texts else ""
        yield Block(path_of[owner], kind, paths, tuple(before), tuple(after), element.where, text)
