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
OPERATORS = {  # of each activation; which of the two GELUs is known when it runs, for the second
    "": "linear",
    "gelu": "linear_gelu",
    **{name: a.label_of_operator for name, a in ACTIVATIONS.items()},
}
Names = list[str]


@dataclass(eq=False)
class Place:
    """A call of linear layers or convolutions, with that of the activation they are to apply.

    Attributes:
        first: the layer's call, or the product of a gated layer.
        sets: the layers of each call, several in a loop. Of a gated layer gate and up, or the one
            for both, and the layer after them where it is part of the same call.
        kind: of the activation; empty for a layer alone.
        last: the last of the calls that are one.
        drops_before: whether a dropout that can act lies between first and last.
        drops_after: whether one comes after them.
        next: the layer after them, which hands over its gradient.
        meets_parameters: whether a module with some comes straight after them.
    """

    first: Element
    sets: list[list[Value]]
    kind: str = ""
    last: Element | None = None
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
    def hands_over(self) -> bool:
        """Whether a linear layer after it may take part in its backward."""
        has_down = self.first.parts and self.last is not self.first
        return bool(self.kind) and not self.is_convolution and not has_down

    @property
    def memory_pays(self) -> bool:
        """Whether less is kept with low memory. GELU's and SiLU's output can be computed anew by
        the layer after it, and up's product in a gated block; ReLU's is kept by that layer, or by a
        normalisation or whatever else with parameters comes there, and bits of it beside that would
        be more."""
        if self.first.parts:
            return len(self.sets[0]) == 3 or (self.next is not None and not self.drops_before)
        if self.is_convolution or not self.kind or len(self.layers) > 1:
            return False
        is_dropped = self.drops_before or self.drops_after
        meets_next = self.next is not None and not is_dropped
        if self.kind != "relu":
            return meets_next
        return not meets_next and (is_dropped or not self.meets_parameters)

    def operators(self, layers: list[Value]) -> tuple[Names, Names]:
        """What runs for one call before it is fused, and after."""
        drop, label = ["Dropout"] * self.drops_before, LABELS.get(self.kind, "")
        if not self.first.parts:
            fused = "conv2d_relu" if self.is_convolution else OPERATORS[self.kind]
            return [*products(layers), *drop, *[label] * bool(label)], [fused, *drop]
        number = len(self.first.parts[0]) - 1  # of layers without the one after them
        gate, up, down = layers[:1], layers[1:number], layers[number:]
        act = [label, *products(up)] if up else ["Chunk", label]
        before = [*products(gate), *act, "Mul", *drop, *products(down)]
        if down and drop:
            return before, [f"linear_glu ({label})", *drop, "linear"]
        return before, [f"{'gated_mlp' if down else 'linear_glu'} ({label})"]


def products(layers: list[Value]) -> Names:
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


def blocks(places: Iterable[Place], paths: Mapping[nn.Module, str]) -> Iterator[Block]:
    """For the report: places one after the other."""
    followers = {id(place.next) for place in places}
    for place in places:
        if id(place) in followers:
            continue
        element, chain = place.first, []
        operators: tuple[Names, Names] = [], []
        while place is not None and place not in chain:
            chain.append(place)
            for layers in place.sets:
                for whole, part in zip(operators, place.operators(layers)):
                    whole += [*part, *["Dropout"] * place.drops_after]
            place = place.next
        layers = tuple(value.path for place in chain for value in place.layers)
        before, after = map(tuple, operators)
        kind = type(element.owner).__name__
        yield Block(paths[element.owner], kind, layers, before, after, element.where)
