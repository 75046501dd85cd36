"""Recognises gated layers, act(gate(x)) * up(x), and the block with a layer after it."""

from dataclasses import dataclass, replace

from torch.fx import Node

from . import matching
from .matching import Linear, find_linear, only_user, own_activation, value
from .spellings import arguments, kind


@dataclass
class Gated:
    """A gated layer; the last of the nodes is its result."""

    nodes: list[Node]
    activation: str
    gate: Linear  # whose result goes through the activation; without `up`, both are its halves
    up: Linear | None
    gate_is_first: bool = True  # of one layer's halves
    down: Linear | None = None  # takes the result, and is all that does


def find_gated(node: Node) -> list[Gated]:
    """The gated layer whose product the node is, before it the block with the layer after it."""
    if kind(node) != "mul" or node.kwargs or len(node.args) != 2:
        return []
    for activated, up in (node.args, node.args[::-1]):
        if not isinstance(activated, Node) or not isinstance(up, Node) or activated is up:
            return []
        same_type = matching.dtype_of(activated) == matching.dtype_of(up) == matching.dtype_of(node)
        if not same_type or len(activated.users) != 1 or len(up.users) != 1:
            continue
        if not (found := _of_factors(activated, up)):
            continue
        found.nodes.append(node)
        user = only_user(node)
        down = user and find_linear(user)
        others = down and (down.weight, down.bias)
        if not down or down.input is not node or node in others or own_activation(user):
            return [found]
        return [replace(found, nodes=[*found.nodes, *down.nodes], down=down), found]
    return []


def _of_factors(activated: Node, up: Node) -> Gated | None:
    if name := own_activation(activated):  # an operator of ours that has it inside
        return _of_layers(activated, up, name, [])
    args = arguments(activated) if kind(activated) in ("relu", "gelu", "silu") else None
    z = args and args["input"]
    activation = isinstance(z, Node) and matching.find_activation(z)
    if not activation or activation.nodes != [activated] or own_activation(z):
        return None
    found = _of_layers(z, up, activation.name, [activated])
    return found or _of_halves(z, up, activation.name, activated)


def _of_layers(z: Node, up: Node, name: str, nodes: list[Node]) -> Gated | None:
    gate_layer, up_layer = find_linear(z), find_linear(up)
    if not gate_layer or not up_layer or own_activation(up):
        return None
    shapes = [list(value(layer.nodes[-1]).shape) for layer in (gate_layer, up_layer)]
    if gate_layer.input is not up_layer.input or not matching.same(*shapes):
        return None
    return Gated([*gate_layer.nodes, *up_layer.nodes, *nodes], name, gate_layer, up_layer)


def _of_halves(z: Node, up: Node, name: str, activated: Node) -> Gated | None:
    if kind(z) != "getitem" or kind(up) != "getitem" or z.args[0] is not up.args[0]:
        return None
    both, indices = z.args[0], (z.args[1], up.args[1])
    if sorted(map(str, indices)) != ["0", "1"] or len(both.users) != 2 or kind(both) != "chunk":
        return None
    args = arguments(both)
    layer = args and isinstance(args["input"], Node) and find_linear(args["input"])
    if not layer or own_activation(layer.nodes[-1]) or len(layer.nodes[-1].users) != 1:
        return None
    shape = value(layer.nodes[-1]).shape
    in_halves = args.get("chunks") == 2 and args.get("dim", 0) in (-1, len(shape) - 1)
    if not in_halves or not isinstance(shape[-1], int) or shape[-1] % 2:
        return None
    return Gated([*layer.nodes, both, z, up, activated], name, layer, None, indices == (0, 1))
