"""Calls that are to become one, and what the report says of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from ..activations import ACTIVATIONS
from .model import Chain, Element
from .report import Block
from .resolve import Value

LABELS = {"gelu": "GELU", **{name: a.label for name, a in ACTIVATIONS.items()}}
OPERATORS = {  # of each activation; which of the two GELUs is known when it runs, for the first
    "none": "linear",
    "gelu": "linear_gelu",
    **{name: a.label_of_operator for name, a in ACTIVATIONS.items()},
}
Names = list[str]


@dataclass(eq=False)
class Place:
    """A call of linear layers or convolutions, with that of the activation they are to apply.

    Attributes:
        first: the layer's call.
        sets: the layers of each call, several in a loop.
        activation: the last call of those that are one; None for a layer alone.
        drops_before: whether a dropout that can act lies between layer and activation.
        drops_after: whether one comes after them.
        next: the layer after them, which hands over its gradient.
        meets_parameters: whether a module with some comes straight after them.
    """

    first: Element
    sets: list[list[Value]]
    kind: str = "none"
    activation: Element | None = None
    drops_before: bool = False
    drops_after: bool = False
    next: Place | None = None
    meets_parameters: bool = False

    @property
    def layers(self) -> list[Value]:
        return [value for values in self.sets for value in values]

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
        is_dropped = self.drops_before or self.drops_after
        meets_next = self.next is not None and not is_dropped
        if self.kind != "relu":
            return meets_next
        return not meets_next and (is_dropped or not self.meets_parameters)

    def operators(self, layers: list[Value]) -> tuple[Names, Names]:
        """What runs for one call before it is fused, and after."""
        label = [] if self.kind == "none" else [LABELS[self.kind]]
        fused = "conv2d_relu" if self.is_convolution else OPERATORS[self.kind]
        drop = ["Dropout"] * self.drops_before
        return [*products(*layers), *drop, *label], [fused, *drop]


@dataclass(eq=False)
class GatedPlace(Place):
    """``act(gate(x)) * up(x)``, and the layer after it where that is part of the same call.

    Attributes:
        sets: gate and up, or the one for both, and the layer after them.
        is_stacked: whether gate and up are one layer.
        has_down: whether the layer after them is there.
    """

    is_stacked: bool = False
    has_down: bool = False

    @property
    def memory_pays(self) -> bool:
        """In a block up's product can be made again; what a fused layer gets can be computed."""
        is_block = self.has_down and not self.is_stacked
        return is_block or (self.next is not None and not self.drops_before)

    def operators(self, layers: list[Value]) -> tuple[Names, Names]:
        gate, *others = layers
        down = products(others.pop()) if self.has_down else []
        label, drop = LABELS[self.kind], ["Dropout"] * self.drops_before
        act = ["Chunk", label] if self.is_stacked else [label, *products(*others)]
        before = [*products(gate), *act, "Mul", *drop, *down]
        if down and drop:
            return before, [f"linear_glu ({label})", *drop, "linear"]
        return before, [f"{'gated_mlp' if down else 'linear_glu'} ({label})"]


def products(*layers: Value) -> Names:
    """The operators of layers alone."""
    found = []
    for _, layer in layers:
        found.append("Conv2d" if isinstance(layer, nn.Conv2d) else "MatMul")
        found += ["BiasAdd"] * (layer.bias is not None)
    return found


def drops(elements: Chain) -> bool:
    """Whether there is a dropout that can act, in training."""
    found = [v.value for element in elements for v in element.values]
    return any(
        getattr(value, "p", 0) != 0 if isinstance(value, nn.Module) else callable(value)
        for value in found
    )


def has_parameters(value: object) -> bool:
    return isinstance(value, nn.Module) and next(value.parameters(), None) is not None


def blocks(places: Iterable[Place], paths: Mapping[nn.Module, str]) -> Iterator[Block]:
    """For the report: places one after the other."""
    followers = {id(place.next) for place in places}
    for place in places:
        if id(place) in followers:
            continue
        element, chain = place.first, []
        before: Names = []
        after: Names = []
        while place is not None and place not in chain:
            chain.append(place)
            drop = ["Dropout"] * place.drops_after
            for layers in place.sets:
                one, other = place.operators(layers)
                before += [*one, *drop]
                after += [*other, *drop]
            place = place.next
        layers = tuple(value.path for place in chain for value in place.layers)
        owner, kind = element.owner, type(element.owner).__name__
        yield Block(paths[owner], kind, layers, tuple(before), tuple(after), element.where)
