"""The pass that puts our operators into graphs that `torch.compile` has captured.

It works before autograd, so that the backward is ours as well: later the compiler has taken
activations apart and chosen what is kept. It has three targets. A lone layer with its activation
becomes one operator. Layers in a chain become `fused::mlp`, which the compiler traces through, so
that the compiled backward has every hidden layer's activation gradient within the next one's step.
A gated layer becomes `fused::linear_glu`, with the layer after it `fused::gated_mlp`. A convolution
with its ReLU becomes one operator as well, where that is asked for.

Each decision is made here, once: no later pass takes an operator out again. Where kernels of the
compiler are quicker (criterion.py), an activation stays torch's behind `fused::linear`, and a gated
layer is told to leave the pass of its backward to ATen.
"""

import copy
import logging
import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

from .._support.torch_internals import HigherOrderOperator, overlaps_collectives
from ..activations import ACTIVATIONS
from . import collectives, effects, matching, matching_conv, matching_gated, spellings
from .criterion import compiler_gates, convolution_pays, has_choice, is_between_passes
from .identity import GraphPass
from .rewriting import arguments_of

logger = logging.getLogger("torch_fused_linear")
_fused = torch.ops.fused
# The operators whose body runs where it stands, as part of the graph around it.
_IN_PLACE = ("wrap", "tag_activation_checkpoint", "invoke_subgraph")
_GATED = (_fused.linear_glu, _fused.gated_mlp)


class FusionPass(GraphPass):
    """Replaces linear layers and their activations in a graph, in place.

    What it looks for, and what it leaves alone, is described in
    :func:`torch_fused_linear.compile_options`, which is how to use it. It can also be called on a
    graph captured by Dynamo or ``torch.export``, by a pass or a backend of your own.

    Args:
        conv: whether convolutions with ReLU are replaced, too.

    Attributes:
        replaced: how many times each operator was put in, over all graphs so far; a
            :class:`collections.Counter` over names such as ``"linear_relu"``.
    """

    def __init__(self, conv: bool = False) -> None:
        self.conv = conv
        self.options = (conv,)
        self.replaced: Counter[str] = Counter()
        self._bodies = WeakKeyDictionary()  # by module: the graph before, and what was put in

    def __call__(self, graph: Graph) -> None:
        self._put_back_bodies(graph)
        before = copy.deepcopy(graph)
        counts = Counter(_Rewrite(graph, self.conv).run())
        if counts and graph.owning_module is not None:
            self._bodies[graph.owning_module] = before, counts
        self.replaced.update(counts)
        if counts:
            each = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
            logger.info("put into a graph: %s", each)

    def _put_back_bodies(self, graph: Graph) -> None:
        """Undoes the pass in graphs that this one gives to scan, cond and their like, which make
        backward graphs of their own. Such graphs come before the one that calls them, which alone
        says what they are for."""
        for node in graph.nodes if graph.owning_module is not None else ():
            target = node.target
            if not isinstance(target, HigherOrderOperator) or target.__name__.startswith(_IN_PLACE):
                continue
            for name in (n.target for n in node.all_input_nodes if n.op == "get_attr"):
                value = operator.attrgetter(name)(graph.owning_module)  # a weight, say, has none
                for body in getattr(value, "modules", tuple)():
                    if body in self._bodies:
                        body.graph, counts = self._bodies.pop(body)
                        self.replaced -= counts


def apply(module: GraphModule, fusion: FusionPass) -> None:
    """Runs the pass over a captured module and, before it, every graph inside of it, such as the
    bodies of checkpoints."""
    for part in reversed(list(module.modules())):
        if isinstance(part, GraphModule):
            fusion(part.graph)
            part.recompile()


@dataclass
class _Layer:
    """A linear layer, its activation, and what stands between the two."""

    linear: matching.Linear
    activation: str | None = None
    between: list[Node] | tuple = ()
    nodes: list[Node] | tuple = ()  # of the activation; none where the operator has it inside

    @property
    def output(self) -> Node:
        return self.nodes[-1] if self.nodes else self.linear.nodes[-1]


class _Rewrite:
    """One run over one graph: everything is found before anything is changed."""

    def __init__(self, graph: Graph, conv: bool) -> None:
        self.graph = graph
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.switches = [i for node, i in self.order.items() if effects.switches_mode(node)]
        self.writers = [node for node in graph.nodes if effects.may_write(node)]
        self.overlapped = overlaps_collectives()
        self.now: dict[Node, Node] = {}  # what stands for a node that has been replaced
        self.layers: dict[Node, _Layer] = {}  # by the result
        self.gated: list[matching_gated.Gated] = []
        self.in_gated: set[Node] = set()  # the nodes of those
        self.own_gated: list[Node] = []
        self.convolutions: list[tuple[Node, Node, tuple]] = []
        for node in graph.nodes:
            self.find_layer(node)
            self.find_gated(node)
            if conv:
                self.find_convolution(node)
        self.leave_to_gated()

    def run(self) -> Iterator[str]:
        """Replaces what was found, and gives the names of the operators put in."""
        for found in self.gated:
            yield self.replace_gated(found)
        for chain in self.chains():
            if len(chain) > 1:
                yield self.replace_chain(chain)
            elif name := self.replace_layer(chain[0]):
                yield name
        for node in self.own_gated:
            self.tell_gated(node)
        for convolution in self.convolutions:
            yield self.replace_convolution(*convolution)

    # ---- what there is ----

    def find_layer(self, node: Node) -> None:
        linear = matching.find_linear(node)
        if linear is None or not self.may_join(linear.nodes):
            return
        if self.overlapped and collectives.is_beside_one(linear):
            return
        for inner in linear.nodes[:-1]:  # the product of a sum that is a layer itself
            self.layers.pop(inner, None)
        self.layers[node] = self.with_activation(linear)

    def find_gated(self, node: Node) -> None:
        if spellings.called(node) in _GATED:
            self.own_gated.append(node)
        for found in matching_gated.find_gated(node):
            if self.in_gated.isdisjoint(found.nodes) and self.may_join(found.nodes):
                self.gated.append(found)
                self.in_gated.update(found.nodes)
                break

    def find_convolution(self, node: Node) -> None:
        relu, operands = matching_conv.find_relu_of_conv(node) or (None, ())
        joins = relu and self.in_one_mode([node, relu])
        if joins and convolution_pays(matching.value(node)):
            self.convolutions.append((node, relu, operands))

    def leave_to_gated(self) -> None:
        """Forgets the layers that are a part of a gated one."""
        for result, layer in [*self.layers.items()]:
            if not self.in_gated.isdisjoint(layer.linear.nodes):
                del self.layers[result]

    def with_activation(self, linear: matching.Linear) -> _Layer:
        result = linear.nodes[-1]
        if own := matching.own_activation(result):
            return _Layer(linear, own)
        for node, path in matching.walk(result):
            activation = matching.find_activation(node)
            if activation and self.in_one_mode([result, *activation.nodes]):
                return _Layer(linear, activation.name, path, activation.nodes)
        return _Layer(linear)

    def chains(self) -> list[list[_Layer]]:
        """Layers, each fed by the one before, of one activation; most are of one layer."""
        chains: dict[Node, list[_Layer]] = {}  # by the output of the last
        for layer in self.layers.values():
            chain = chains.get(self.source(layer, chains), [])
            # Between two activations a layer belongs with the later one.
            head = chain[:-1] if chain and chain[0].activation != chain[-1].activation else []
            chain = chain[len(head) :]
            if chain and self.may_follow(chain, layer):
                del chains[chain[-1].output]
                if head:
                    chains[head[-1].output] = head
                chains[layer.output] = [*chain, layer]
            else:
                chains[layer.output] = [layer]
        return list(chains.values())

    def source(self, layer: _Layer, outputs: dict[Node, list[_Layer]]) -> Node | None:
        """The layer's output that feeds this one, through what `walk` goes over."""
        node = layer.linear.input
        while node not in outputs:
            if spellings.kind(node) not in ("view", "dropout") or not node.args:
                return None
            node = node.args[0]
        return node

    def may_follow(self, chain: list[_Layer], layer: _Layer) -> bool:
        last, source = chain[-1], layer.linear.input
        ways = dict(matching.walk(last.output))
        if last.activation is None or source not in ways or len(source.users) != 1:
            return False
        if source in (layer.linear.weight, layer.linear.bias):
            return False  # one user, and yet used twice
        # Rows stay rows: what arrives is shaped as if nothing had been reshaped on the way.
        rows = matching.value(chain[0].linear.input).shape[:-1]
        width = matching.value(last.linear.nodes[-1]).shape[-1]
        if not matching.same([*rows, width], list(matching.value(source).shape)):
            return False
        return self.may_join([*self.members(chain), *ways[source], *layer.linear.nodes])

    @staticmethod
    def members(chain: list[_Layer]) -> list[Node]:
        """Every node that goes when the chain is replaced, bar the ways between the layers."""
        return [n for x in chain for n in (*x.linear.nodes, *x.between, *x.nodes)]

    # ---- what may be moved ----

    def in_one_mode(self, nodes: list[Node]) -> bool:
        places = [self.order[node] for node in nodes]
        return not any(min(places) < i < max(places) for i in self.switches)

    def may_join(self, nodes: list[Node]) -> bool:
        """Returns whether the first of the nodes may run where the last is: nothing that it reads
        is written in between, and the mode is the same.
        """
        places, members = [self.order[node] for node in nodes], set(nodes)
        writers = [self.order[node] for node in self.writers if node not in members]
        is_written = any(min(places) < i < max(places) for i in writers)
        return not is_written and self.in_one_mode(nodes)

    # ---- replacing ----

    def replace_layer(self, layer: _Layer) -> str | None:
        """A layer alone, unless there is nothing to change."""
        linear, result = layer.linear, layer.linear.nodes[-1]
        if self.leaves_activation(layer):
            return self.replace_product(layer)
        if not layer.nodes:  # there is no activation, or it is in ours already
            return None
        with self.graph.inserting_before(result):
            activation = ACTIVATIONS[layer.activation]
            operator = getattr(_fused, activation.operator).default
            new = self.call(operator, self.operands(linear), result, activation.options)
        self.replace(result, new)
        self.replace(layer.output, layer.between[-1] if layer.between else new)
        self.erase([*linear.nodes, *layer.nodes])
        return activation.operator

    def leaves_activation(self, layer: _Layer) -> bool:
        """Returns whether the compiler's own kernels can take the activation."""
        linear = layer.linear
        if layer.activation is None or self.memory_of(linear) == "low":
            return False
        fakes = map(matching.value, (linear.nodes[-1], linear.input))
        return is_between_passes(layer.output) and has_choice(*fakes)

    @staticmethod
    def memory_of(linear: matching.Linear) -> str:
        return spellings.arguments(linear.nodes[-1]).get("memory", "default")

    def replace_product(self, layer: _Layer) -> str | None:
        """The product alone, in front of torch's activation."""
        result = layer.linear.nodes[-1]
        if spellings.called(result) is _fused.linear:
            return None
        with self.graph.inserting_before(result):
            new = self.call(_fused.linear.default, self.operands(layer.linear), result)
            if not layer.nodes:  # it was inside of an operator that goes
                new = self.activated(new, layer.activation, result)
        self.replace(result, new)
        self.erase(layer.linear.nodes)
        return "linear"

    def activated(self, node: Node, name: str, like: Node) -> Node:
        activation = ACTIVATIONS[name]
        is_square = name == "relu2"
        function = "relu" if is_square else activation.operator.removeprefix("linear_")
        new = self.call(getattr(F, function), (node,), like, activation.options)
        return self.call(torch.square, (new,), like) if is_square else new

    def replace_chain(self, chain: list[_Layer]) -> str:
        linears, last = [layer.linear for layer in chain], chain[-1]
        result = last.linear.nodes[-1]
        ways = [dict(matching.walk(a.output))[b.input] for a, b in zip(chain, linears[1:])]
        with self.graph.inserting_before(result):
            inputs, weights, biases = map(list, zip(*map(self.operands, linears)))
            args = (inputs[0], weights, biases, chain[0].activation)
            is_low = "low" in map(self.memory_of, linears)
            how = {"memory": "low"} if is_low else {}
            new = self.call(_fused.mlp.default, args, result, how)
            if last.activation and not last.nodes:  # it was inside of an operator that goes
                new = self.activated(new, last.activation, result)
        self.replace(result, new)
        between = [node for way in ways for node in way]
        self.erase([*self.members(chain[:-1]), *between, *last.linear.nodes])
        return "mlp"

    def replace_gated(self, found: matching_gated.Gated) -> str:
        result = found.nodes[-1]
        with self.graph.inserting_before(result):
            input, gate, gate_bias = self.operands(found.gate)
            up = up_bias = None
            if found.up is not None:
                _, up, up_bias = self.operands(found.up)
            elif not found.gate_is_first:
                up, gate = self.halves(gate)
                if gate_bias is not None:
                    up_bias, gate_bias = self.halves(gate_bias)
            target, args = _fused.linear_glu.default, (input, gate, up, gate_bias, up_bias)
            if found.down is not None:
                _, down, down_bias = self.operands(found.down)
                target = _fused.gated_mlp.default
                args = (input, gate, up, down, gate_bias, up_bias, down_bias)
            new = self.call(target, args, result, {"activation": found.activation})
        self.replace(result, new)
        self.erase(found.nodes)
        self.tell_gated(new)
        return target.overloadpacket.__name__

    def tell_gated(self, node: Node) -> None:
        """Has the pass of the layer's backward left to the compiler, where that pays."""
        given = arguments_of(node)
        names = ("input", "gate_bias", "up_bias", "down")
        fakes = [given.get(name) and matching.value(given[name]) for name in names]
        result = matching.value(node)
        if given["memory"] != "default" or result is None or fakes[0] is None:
            return
        input, *others = fakes
        if has_choice(result, input) and compiler_gates(result, *others, given["activation"]):
            node.kwargs = {**node.kwargs, "memory": "compiled"}

    def halves(self, tensor: Node) -> list[Node]:
        both = self.graph.call_method("chunk", (tensor, 2))
        parts = [self.graph.call_function(operator.getitem, (both, k)) for k in (0, 1)]
        for part, fake in zip(parts, matching.value(tensor).chunk(2), strict=True):
            part.meta = {"example_value": fake}
        return parts

    def replace_convolution(self, convolution: Node, relu: Node, operands: tuple) -> str:
        operands = tuple(self.current(x) if isinstance(x, Node) else x for x in operands)
        with self.graph.inserting_before(convolution):
            new = self.call(_fused.conv2d_relu.default, operands, convolution)
        self.replace(relu, new)
        self.erase([convolution, relu])
        return "conv2d_relu"

    def replace(self, old: Node, new: Node) -> None:
        old.replace_all_uses_with(new)
        self.now[old] = new

    def current(self, node: Node) -> Node:
        """The node as it stands: a match of another layer may have named one that is gone."""
        while node in self.now:
            node = self.now[node]
        return node

    def operands(self, linear: matching.Linear) -> tuple[Node, Node, Node | None]:
        input, weight = self.current(linear.input), self.current(linear.weight)
        bias = None if linear.bias is None else self.current(linear.bias)
        if not linear.transposed:
            return input, weight, bias
        base = matching.untransposed(linear.weight)
        if base and self.may_join([linear.weight, *linear.nodes]):
            return input, self.current(base), bias
        turned = self.graph.call_method("t", (weight,))
        turned.meta = {"example_value": matching.value(weight).t()}
        return input, turned, bias

    def call(self, target, args: tuple, like: Node, kwargs: dict | None = None) -> Node:
        new = self.graph.call_function(target, args, kwargs or {})
        new.meta = dict(like.meta)
        return new

    def erase(self, nodes: list[Node]) -> None:
        for node in sorted(nodes, key=self.order.__getitem__, reverse=True):
            self.graph.erase_node(node)
