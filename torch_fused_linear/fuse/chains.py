"""Steps that follow upon each other in a model, and what may become one call among them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from torch import nn

from ..activations import ACTIVATIONS
from . import fit
from .reading import Text
from .report import Block
from .resolve import Value
from .steps import Step

OPERATORS = {  # of each activation: the operator before, and the fused one
    "none": (None, "linear"),
    "gelu": ("GELU", "linear_gelu"),  # which of the two is known when it runs
    **{name: (a.label, a.label_of_operator) for name, a in ACTIVATIONS.items()},
}


@dataclass
class Element:
    """One step of a chain.

    Attributes:
        owner: the module in whose code, or as whose child, it stands.
        values: what is called, with the path from the model: several in a loop.
        text: the code that it is in; None for a child of an nn.Sequential.
        name: of a child.
        step: as it was read.
        parts: of each form of a product: its activation, its layer or both layers.
    """

    owner: nn.Module
    values: list[Value]
    text: Text | None
    name: str = ""
    step: Step | None = None
    parts: list[list[Element]] = field(default_factory=list)

    @property
    def place(self) -> tuple:
        return id(self.owner), self.name if self.text is None else id(self.step.node)

    @property
    def where(self) -> str:
        return "" if self.text is None else self.text.place(self.step.node)

    def options(self) -> dict | None:
        """The constants that are given beside the tensor; the rest is known when it runs."""
        given = self.step.options() if self.step is not None else {}
        return {k: v for k, v in given.items() if not isinstance(v, ast.AST)} or None

    def kinds(self) -> list[str | None]:
        """What each of its values would be as an activation."""
        return [fit.activation_kind(v.value, self.options()) for v in self.values]

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

    def operators(self) -> tuple[list[str], list[str]]:
        """What runs for it before it is fused and after."""
        before, after = [], []
        for value in self.layers:
            operator, fused = OPERATORS[self.kind]
            fused = "conv2d_relu" if self.is_convolution else fused
            before += products(value) + ["Dropout"] * self.drops_before
            before += [operator] * (operator is not None) + ["Dropout"] * self.drops_after
            after += [fused] + ["Dropout"] * (self.drops_before + self.drops_after)
        return before, after


@dataclass
class Gated(Layer):
    """``act(gate(x)) * up(x)``, and the layer after it where it is part of the same call.

    Attributes:
        sets: the layers of each call: gate and up, or the one for both, and the layer after them.
        is_stacked: whether gate and up are one layer.
        down: the layer after them.
    """

    sets: list[list[Value]] = field(default_factory=list)
    is_stacked: bool = False
    down: Element | None = None

    @property
    def memory_pays(self) -> bool:
        """In a block up's product can be made again; what a fused layer gets can be computed."""
        is_block = self.down is not None and not self.is_stacked
        return is_block or (self.next is not None and not self.drops_before)

    def operators(self) -> tuple[list[str], list[str]]:
        before, after = [], []
        label, drop = OPERATORS[self.kind][0], ["Dropout"] * self.drops_before
        for first, *others in self.sets:
            act = ["Chunk", label] if self.is_stacked else [label, *products(others.pop(0))]
            before += [*products(first), *act, "Mul", *drop]
            before += [operator for value in others for operator in products(value)]
            fused = f"gated_mlp ({label})" if others else f"linear_glu ({label})"
            after += [f"linear_glu ({label})", "Dropout", "linear"] if others and drop else [fused]
            before, after = (o + ["Dropout"] * self.drops_after for o in (before, after))
        return before, after


def products(value: Value) -> list[str]:
    """The operators of a layer alone."""
    product = "Conv2d" if isinstance(value.value, nn.Conv2d) else "MatMul"
    return [product] + ["BiasAdd"] * (value.value.bias is not None)


def is_sequential(module: object) -> bool:
    """Whether it does what nn.Sequential does; torchvision's MLP has only a constructor more."""
    is_one = isinstance(module, nn.Sequential)
    return is_one and type(module).forward is nn.Sequential.forward and walks_children(module)


def walks_children(module: nn.Sequential) -> bool:
    """Whether nn.Sequential's forward means its children, one by one."""
    return type(module).__iter__ is nn.Sequential.__iter__


def is_activation(element: Element) -> bool:
    if element.step is not None and element.step.callee is None:
        return True
    return bool(element.of(fit.is_activation))


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


def blocks(layers: Iterable[Layer], path_of) -> Iterator[Block]:
    """For the report: layers one after the other."""
    followers = {id(layer.next) for layer in layers}
    for layer in layers:
        if id(layer) in followers:
            continue
        element = layer.linear
        chain, before, after = [], [], []
        while layer is not None and layer not in chain:
            chain.append(layer)
            for whole, part in zip((before, after), layer.operators()):
                whole += part
            layer = layer.next
        paths = tuple(value.path for layer in chain for value in layer.layers)
        owner, kind = element.owner, type(element.owner).__name__
        yield Block(path_of[owner], kind, paths, tuple(before), tuple(after), element.where)
