"""``fuse_script_``: the operators in the graph of a scripted or traced module.

TorchScript compiles the text of functions, so a model that ``fuse_`` has changed scripts as the
plain one. Here the graph is changed, which holds products and activations whoever wrote them.
"""

import torch
from torch import Tensor

from .._support.torch_internals import (
    Graph,
    Node,
    TensorType,
    Value,
    copy_of_own_class,
    script_graphs,
)
from ..activations import ACTIVATIONS, Activation, name_of_gelu
from .report import Block, Report, Skipped

_STEMS = {name.partition("_")[0] for name in ACTIVATIONS}
PASSIVE = ("prim::GetAttr", "prim::Constant")
ACTS = {f"aten::{stem}{end}": stem for stem in _STEMS for end in ("", "_")}


def fuse_script_(scripted: torch.jit.ScriptModule) -> Report:
    """Replaces linear layers or convolutions and their activations in a scripted or traced module
    by fused operators, in place, in all its methods.

    ``linear → act`` becomes :func:`linear_relu`, :func:`linear_gelu` or :func:`linear_silu`,
    ``conv2d → relu`` becomes :func:`conv2d_relu`, and ``act(gate(x)) * up(x)`` becomes
    :func:`linear_glu`, or with the layer after it :func:`gated_mlp`. Values that are used elsewhere
    too, code in a ``with`` block such as ``torch.autocast``, and layers between which something is
    written are left alone. Parameters stay the same tensors. The module can be saved, and runs in
    C++ if the library is loaded (:func:`library_path`).

    Args:
        scripted: a module that ``torch.jit.script``, ``torch.jit.trace`` or ``torch.jit.load``
            returned. It may have run before. Other modules of its class stay as they are.

    Returns:
        A report, as of :func:`fuse_`.

    Raises:
        TypeError: ``scripted`` is no scripted or traced module.

    Examples::

        >>> scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 16), nn.ReLU()))
        >>> len(fuse_script_(scripted).fused)
        1
    """
    held = getattr(scripted, "_actual_script_module", scripted)  # of a traced module
    if not isinstance(held, torch.jit.RecursiveScriptModule):
        raise TypeError(
            f"fuse_script_: expected a scripted or traced module, got {type(scripted).__name__}"
        )
    scripted, module = held, copy_of_own_class(held._c)
    methods = [_Method(graph, scripted) for graph in script_graphs(module)]
    fused = tuple(block for method in methods for block in method.fused)
    if fused:
        scripted._reconstruct(module)
    return Report(fused, tuple(place for method in methods for place in method.skipped))


class _Method:
    """The graph of one method, changed when it is made."""

    def __init__(self, graph: Graph, scripted: torch.jit.ScriptModule) -> None:
        self.graph, self.scripted = graph, scripted
        self.fused: list[Block] = []
        self.skipped: list[Skipped] = []
        self._change(graph, False)
        graph.lint()

    def _change(self, block, is_in_with: bool) -> None:
        """Changes the nodes of a block or the whole graph, and of the blocks in it."""
        depth, inner = int(is_in_with), []
        self.here: set[int] = set()  # values that the block makes outside of `with`
        for node in block.nodes():
            depth += {"prim::Enter": 1, "prim::Exit": -1}.get(node.kind(), 0)
            self.here |= {value.unique() for value in node.outputs() if depth == 0}
            inner += [(b, depth > 0) for b in node.blocks()]
        # A change removes nodes, of which a list of all would hold what is gone.
        for kinds, change in (
            (("aten::mul",), self._fuse_gated),
            (tuple(ACTS), self._fuse_layer),
            (("aten::linear",), self._follow),
        ):
            for node in [n for n in block.nodes() if n.kind() in kinds]:
                change(node)
        for block, is_in_with in inner:
            self._change(block, is_in_with)

    def _fuse_layer(self, act: Node) -> None:
        value = last = act.inputsAt(0)
        if value.node().kind() == "aten::dropout" and _kind(act) is ACTIVATIONS["relu"]:
            value = value.node().inputsAt(0)
        layer = value.node()
        if layer.kind() != "aten::linear" and not _is_conv(layer):
            return
        if reason := self._objection(act, last, value):
            place = layer.sourceRange().splitlines()[0]
            self.skipped.append(Skipped(self._path(layer), reason, place))
            return
        # a dropout between the two comes after the operator then
        kind, drop, before = _kind(act), ("Dropout",) * (last != value), _operators(layer)
        if _is_conv(layer):
            name, options = "conv2d_relu", ()
        else:
            name, options = kind.operator, (*filter(None, [kind.approximate]), "default")
        path = self._path(layer)
        act.output().replaceAllUsesWith(last)
        act.destroy()
        self._put(value, name, [*layer.inputs(), *options], [layer])
        self.fused.append(Block("", "", (path,), (*before, *drop, kind.label), (name, *drop)))

    def _objection(self, act: Node, last: Value, value: Value) -> str | None:
        """Why an activation must stay one, of `last`, which is a layer's value or a dropout's."""
        kind = _kind(act)
        if kind is None or (_is_conv(value.node()) and kind is not ACTIVATIONS["relu"]):
            return f"{act.kind()}: there is no operator for it"
        if any(len(v.uses()) > 1 for v in (value, last)):
            return "what it returns is read elsewhere too"
        if any(v.unique() not in self.here for v in (value, last, act.output())):
            return "it lies in a `with` block or another branch than its activation"
        return None

    def _fuse_gated(self, mul: Node) -> None:
        for factor in (0, 1):
            act, other = mul.inputsAt(factor).node(), mul.inputsAt(1 - factor)
            kind = _kind(act)
            found = kind and (self._of_two(act, other.node()) or self._of_one(act, other.node()))
            if not found:
                continue
            nodes, layers, given = found
            values = [v for node in (*nodes, act) for v in node.outputs()]
            if any(len(v.uses()) > 1 or v.unique() not in self.here for v in values):
                continue
            nodes = (*nodes, act)
            down = self._down_of(mul)
            if down is not None and not self._move_together([*nodes, mul, down]):
                down = None
            if down is not None or self._move_together([*nodes, mul]):
                self._replace_gated(mul, down, nodes, layers, given, kind)
            return

    def _move_together(self, nodes: list[Node]) -> bool:
        """Moves them so that nothing runs between them; False where that cannot be."""
        for node, after in zip(nodes[-2::-1], nodes[::-1]):
            if not self.graph.alias_db().move_before_topologically_valid(node, after):
                return False
        # A node that writes to their inputs may have been moved between them.
        wanted = [node.outputsAt(0).unique() for node in nodes]
        active = [n for n in nodes[-1].owningBlock().nodes() if n.kind() not in PASSIVE]
        order = [next((value.unique() for value in n.outputs()), None) for n in active]
        start = order.index(wanted[0])
        return order[start : start + len(wanted)] == wanted

    def _down_of(self, mul: Node) -> Node | None:
        """The layer that alone takes the product."""
        result, uses = mul.output(), mul.output().uses()
        if len(uses) != 1 or result.unique() not in self.here:
            return None
        down = uses[0].user
        is_layer = down.kind() == "aten::linear" and down.inputsAt(0) == result
        return down if is_layer and down.output().unique() in self.here else None

    def _of_two(self, act: Node, up: Node) -> tuple | None:
        """Returns the nodes before the activation, the layers and the operator's arguments if gate
        and up are separate layers.
        """
        gate = act.inputsAt(0).node()
        if gate.kind() != "aten::linear" or up.kind() != "aten::linear":
            return None
        (x, gate_weight, gate_bias), (y, up_weight, up_bias) = gate.inputs(), up.inputs()
        shapes = [self._shape(gate_weight), self._shape(up_weight)]
        if x.unique() != y.unique() or shapes[0] is None or shapes[0] != shapes[1]:
            return None
        return (up, gate), (gate, up), [x, gate_weight, up_weight, gate_bias, up_bias]

    def _of_one(self, act: Node, unpack: Node) -> tuple | None:
        """Returns the nodes before the activation, the layer and the operator's arguments if gate
        and up are the halves of one layer.
        """
        if unpack.kind() != "prim::ListUnpack" or act.inputsAt(0).node() != unpack:
            return None
        chunk = unpack.inputsAt(0).node()
        if chunk.kind() != "aten::chunk" or act.inputsAt(0).offset() != 0:
            return None
        layer, parts, dim = chunk.inputs()
        layer = layer.node()
        if layer.kind() != "aten::linear" or (parts.toIValue(), dim.toIValue()) != (2, -1):
            return None
        x, weight, bias = layer.inputs()
        shape = self._shape(weight)
        if shape is None or shape[0] % 2:
            return None
        return (layer, chunk, unpack), (layer,), [x, weight, None, bias, None]

    def _replace_gated(self, mul, down, nodes, layers, given, kind: Activation) -> None:
        name, result, gone = "linear_glu", mul.output(), [mul]
        before = [operator for layer in layers for operator in _operators(layer)]
        before += ["Chunk"] * (len(layers) == 1) + [kind.label, "Mul"]
        if down is not None:
            name, result, gone = "gated_mlp", down.output(), [down, mul]
            given = [*given[:3], down.inputsAt(1), *given[3:], down.inputsAt(2)]
            layers, before = (*layers, down), [*before, *_operators(down)]
        paths = tuple(map(self._path, layers))
        self._put(result, name, [*given, kind.name, "default"], [*gone, *reversed(nodes)])
        self.fused.append(Block("", "", paths, tuple(before), (f"{name} ({kind.label})",)))

    def _follow(self, layer: Node) -> None:
        """Has a linear layer behind an operator take part in its backward."""
        source = layer.inputsAt(0).node()
        source = source.inputsAt(0).node() if source.kind() == "aten::dropout" else source
        if source.kind().startswith("fused::") and layer.output().unique() in self.here:
            self._put(layer.output(), "linear", [*layer.inputs()], [layer])

    def _put(self, result: Value, name: str, given: list, gone: list[Node]) -> None:
        """An operator in the place of nodes, the last of which comes first."""
        values = [v if isinstance(v, Value) else self.graph.insertConstant(v) for v in given]
        node = self.graph.create(f"fused::{name}", values, 1)
        node.insertBefore(gone[0])
        for constant in (v.node() for v, what in zip(values, given) if v is not what):
            constant.moveBefore(node)
        node.output().setType(TensorType.get())
        self.here.add(node.output().unique())
        result.replaceAllUsesWith(node.output())
        for node in gone:
            node.destroy()

    def _path(self, layer: Node) -> str:
        """The path of the module that holds a layer's weight."""
        return ".".join(_attributes(layer.inputsAt(1))[:-1])

    def _shape(self, weight: Value) -> torch.Size | None:
        """Returns the shape of a parameter or buffer."""
        held = self.scripted
        for name in _attributes(weight):
            held = getattr(held, name)
        return held.shape if isinstance(held, Tensor) else None


def _attributes(value: Value) -> list[str]:
    """The names on the way from the module to what it holds; none for anything else."""
    names, node = [], value.node()
    while node.kind() == "prim::GetAttr":
        names.insert(0, node.s("name"))
        node = node.inputsAt(0).node()
    return names if node.kind() == "prim::Param" else []


def _is_conv(layer: Node) -> bool:
    """Returns whether the padding is given in numbers, which the operator takes."""
    return layer.kind() == "aten::conv2d" and str(layer.inputsAt(4).type()) == "List[int]"


def _kind(act: Node) -> Activation | None:
    stem = ACTS.get(act.kind())
    name = name_of_gelu(act.inputsAt(1).toIValue()) if stem == "gelu" else stem
    return ACTIVATIONS.get(name)


def _operators(layer: Node) -> list[str]:
    """Lists the operators that run for a layer alone."""
    product = "Conv2d" if layer.kind() == "aten::conv2d" else "MatMul"
    return [product] + ["BiasAdd"] * (not layer.inputsAt(2).node().mustBeNone())
