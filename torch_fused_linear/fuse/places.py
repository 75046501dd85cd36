"""Calls that are to become one, and what the report says of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from ..activations import ACTIVATIONS
from . import plain
from .model import Chain
from .report import Block

LABELS = {"gelu": "GELU", **{name: a.label for name, a in ACTIVATIONS.items()}}
OPERATORS = {  # of each activation; which of the two GELUs is known when it runs, for the second
    "": "linear",
    "gelu": "linear_gelu",
    **{name: a.label_of_operator for name, a in ACTIVATIONS.items()},
}
Names = list[str]


@dataclass(eq=False)
class Place:
    """A call of linear layers or convolutions, with that of the activation they are to apply."""

    steps: Chain  # the layer's call, or the product of a gated layer, and what is one with it
    # The layers of each call, several in a loop. Of a gated layer gate and up, or the one for both,
    # and the layer after them where it is part of the same call.
    sets: list[list[nn.Module]]
    kind: str = ""  # of the activation; empty for a layer alone
    drops_after: bool = False  # whether a dropout that can act follows
    next: Place | None = None  # the layer after them, which hands over its gradient
    meets_parameters: bool = False  # whether a module with some follows

    @property
    def is_gated(self) -> bool:
        return bool(self.steps[0].parts)

    @property
    def drops_before(self) -> bool:
        """Whether a dropout that can act lies between them."""
        return drops(self.steps)

    @property
    def layers(self) -> list[nn.Module]:
        return [layer for layers in self.sets for layer in layers]

    @property
    def is_convolution(self) -> bool:
        return isinstance(self.layers[0], nn.Conv2d)

    @property
    def hands_over(self) -> bool:
        """Whether a linear layer after it may take part in its backward."""
        has_down = self.is_gated and len(self.steps) > 1
        return bool(self.kind) and not self.is_convolution and not has_down

    @property
    def memory_pays(self) -> bool:
        """Whether less is kept with low memory. GELU's and SiLU's output can be computed anew by
        the layer after it, and up's product in a gated block; ReLU's is kept by that layer, or by a
        normalisation or whatever else with parameters comes there, and bits of it beside that would
        be more."""
        if self.is_gated:
            return len(self.sets[0]) == 3 or (self.next is not None and not self.drops_before)
        if self.is_convolution or not self.kind or len(self.layers) > 1:
            return False
        is_dropped = self.drops_before or self.drops_after
        meets_next = self.next is not None and not is_dropped
        if self.kind != "relu":
            return meets_next
        return not meets_next and (is_dropped or not self.meets_parameters)

    def operators(self, layers: list[nn.Module]) -> tuple[Names, Names]:
        """What runs for one call before it is fused, and after."""
        drop, label = ["Dropout"] * self.drops_before, LABELS.get(self.kind, "")
        if not self.is_gated:
            fused = "conv2d_relu" if self.is_convolution else OPERATORS[self.kind]
            return [*products(layers), *drop, *[label] * bool(label)], [fused, *drop]
        number = len(self.steps[0].parts[0]) - 1  # of layers without the one after them
        gate, up, down = layers[:1], layers[1:number], layers[number:]
        act = [label, *products(up)] if up else ["Chunk", label]
        before = [*products(gate), *act, "Mul", *drop, *products(down)]
        if down and drop:
            return before, [f"linear_glu ({label})", *drop, "linear"]
        return before, [f"{'gated_mlp' if down else 'linear_glu'} ({label})"]


def products(layers: list[nn.Module]) -> Names:
    """The operators of layers alone."""
    found = []
    for layer in layers:
        found.append("Conv2d" if isinstance(layer, nn.Conv2d) else "MatMul")
        found += ["BiasAdd"] * (layer.bias is not None)
    return found


def drops(elements: Chain) -> bool:
    """Whether there is a dropout among them that can act, in training."""
    found = [value for element in elements for value in element.of(plain.is_passed)]
    return any(getattr(value, "p", 0) != 0 or not isinstance(value, nn.Module) for value in found)


def blocks(places: Iterable[Place], names: Mapping[int, str]) -> Iterator[Block]:
    """For the report: places one after the other."""
    followers = {id(place.next) for place in places}
    for place in places:
        if id(place) in followers or not place.kind:
            continue
        first, chain = place.steps[0], []
        operators: tuple[Names, Names] = [], []
        while place is not None and place not in chain:
            chain.append(place)
            for layers in place.sets:
                for whole, part in zip(operators, place.operators(layers)):
                    whole += [*part, *["Dropout"] * place.drops_after]
            place = place.next
        layers = tuple(names.get(id(layer), "") for place in chain for layer in place.layers)
        before, after = map(tuple, operators)
        kind = type(first.owner).__name__
        yield Block(names[id(first.owner)], kind, layers, before, after, first.where)
