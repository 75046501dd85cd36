"""The pass that puts our operators into graphs that `torch.compile` has captured.

It works before autograd, so that the backward is ours as well. A lone layer with its activation
becomes one operator; layers in a chain become `fused::mlp`, which the compiler traces through, so
that the compiled backward has every hidden layer's activation gradient within the next one's step.
A convolution with its ReLU becomes one operator as well, where that is asked for.
"""

import copy
import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

from .._torch_internals import HigherOrderOperator, overlaps_collectives
from ..activations import ACTIVATIONS
from . import collectives, effects, matching, matching_conv, matching_gated, spellings
from .criterion import convolution_pays
from .identity import CountingPass

_fused = torch.ops.fused
# The operators whose body runs where it stands, as part of the graph around it.
_IN_PLACE = ("wrap", "tag_activation_checkpoint", "invoke_subgraph")


class FusionPass(CountingPass):
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
        counts = Counter(_Rewrite(graph).run_gated())
        rewrite = _Rewrite(graph)
        counts.update(rewrite.run())
        if self.conv:
            counts.update(rewrite.run_convolutions())
        if counts and graph.owning_module is not None:
            self._bodies[graph.owning_module] = before, counts
        self.count(self.replaced, counts, "put into a graph")

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
    """One run over one graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.switches = [i for node, i in self.order.items() if effects.switches_mode(node)]
        self.writers = [node for node in graph.nodes if effects.may_write(node)]
        self.overlapped = overlaps_collectives()
        self.now: dict[Node, Node] = {}  # what stands for a node that has been replaced

    # ---- each run replaces what it finds, and gives the names of the operators put in ----

    def run(self) -> Iterator[str]:
        for chain in self.chains():
            if len(chain) > 1:
                yield self.replace_chain(chain)
            elif chain[0].nodes:  # else there is no activation, or it is in ours already
                yield self.replace_layer(chain[0])

    def run_gated(self) -> Iterator[str]:
        for node in list(self.graph.nodes):
            for found in matching_gated.find_gated(node):
                if self.may_join(found.nodes):
                    yield self.replace_gated(found)
                    break

    def run_convolutions(self) -> Iterator[str]:
        for node in list(self.graph.nodes):
            relu, operands = matching_conv.find_relu_of_conv(node) or (None, ())
            joins = relu and self.in_one_mode([node, relu])
            if joins and convolution_pays(matching.value(node)):
                yield self.replace_convolution(node, relu, operands)

    # ---- what there is ----

    def layers(self) -> list[_Layer]:
        found: dict[Node, _Layer] = {}
        for node in self.graph.nodes:
            linear = matching.find_linear(node)
            if linear is None or not self.may_join(linear.nodes):
                continue
            if self.overlapped and collectives.is_beside_one(linear):
                continue
            for inner in linear.nodes[:-1]:  # the product of a sum that is a layer itself
                found.pop(inner, None)
            found[node] = self.with_activation(linear)
        return list(found.values())

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
        for layer in self.layers():
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
        """Whether the first of the nodes may be run where the last is: nothing that it reads is
        written in between, and the mode is the same."""
        places, members = [self.order[node] for node in nodes], set(nodes)
        writers = [self.order[node] for node in self.writers if node not in members]
        is_written = any(min(places) < i < max(places) for i in writers)
        return not is_written and self.in_one_mode(nodes)

    # ---- replacing ----

    def replace_layer(self, layer: _Layer) -> str:
        linear, result = layer.linear, layer.linear.nodes[-1]
        with self.graph.inserting_before(result):
            activation = ACTIVATIONS[layer.activation]
            operator = getattr(_fused, activation.operator).default
            new = self.call(operator, self.operands(linear), result, activation.options)
        self.replace(result, new)
        self.replace(layer.output, layer.between[-1] if layer.between else new)
        self.erase([*linear.nodes, *layer.nodes])
        return activation.operator

    def replace_chain(self, chain: list[_Layer]) -> str:
        linears, last = [layer.linear for layer in chain], chain[-1]
        result = last.linear.nodes[-1]
        ways = [dict(matching.walk(a.output))[b.input] for a, b in zip(chain, linears[1:])]
        with self.graph.inserting_before(result):
            inputs, weights, biases = map(list, zip(*map(self.operands, linears)))
            args = (inputs[0], weights, biases, chain[0].activation)
            memories = {spellings.arguments(x.nodes[-1]).get("memory") for x in linears}
            how = {"memory": "low"} if "low" in memories else {}
            new = self.call(_fused.mlp.default, args, result, how)
            if last.activation and not last.nodes:  # it was inside of an operator that goes
                activation = ACTIVATIONS[last.activation]
                is_square = activation.name == "relu2"
                name = "relu" if is_square else activation.operator.removeprefix("linear_")
                new = self.call(getattr(F, name), (new,), result, activation.options)
                new = self.call(torch.square, (new,), result, {}) if is_square else new
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
        return target.overloadpacket.__name__

    def halves(self, tensor: Node) -> list[Node]:
        both = self.graph.call_method("chunk", (tensor, 2))
        parts = [self.graph.call_function(operator.getitem, (both, k)) for k in (0, 1)]
        for part, fake in zip(parts, matching.value(tensor).chunk(2), strict=True):
            part.meta = {"example_value": fake}
        return parts

    def replace_convolution(self, convolution: Node, relu: Node, operands: tuple) -> str:
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
