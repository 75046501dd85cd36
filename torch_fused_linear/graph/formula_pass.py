"""The pass that writes operators of ours out in ATen where that pays.

It works on the graph of forward and backward together, before it is parted in two: so the compiler
chooses what of a formula it keeps for the backward and what it computes again.
"""

import operator
from collections import Counter

import torch
from torch.fx import Graph, Node

from .. import accumulation
from .._torch_internals import unset_fake_temporarily
from ..activations import ACTIVATIONS
from ..policy import get_policy
from ..report import note
from . import accumulated_weights, criterion
from .identity import CountingPass
from .rewriting import arguments_of, replace, result_of

_aten, _fused = torch.ops.aten, torch.ops.fused


class FormulaPass(CountingPass):
    """Writes fused operators out in ATen, in place, where the compiler's own kernels are quicker.

    It belongs in Inductor's ``joint_custom_pre_pass``, where
    :func:`torch_fused_linear.compile_options` puts it.

    Attributes:
        written_out: how many times each operator was, over all graphs that were compiled so far; a
            graph that comes out of the compiler's cache is not counted.
    """

    def __init__(self) -> None:
        self.written_out: Counter[str] = Counter()

    def __call__(self, graph: Graph) -> None:
        counts: Counter[str] = Counter()
        # A formula rounds at other places, and the compiler's product goes by the number of rows.
        nodes = [] if get_policy() == "batch_invariant" else list(graph.nodes)
        for node in nodes:
            formula, is_better = _FORMULAS.get(node.target, (None, None))
            values = [n.meta.get("val") for n in node.all_input_nodes] if formula else []
            if not values or not criterion.is_static(*values):
                continue
            given = arguments_of(node)
            is_on_gpu = criterion.bandwidth_of(values[0].device) is not None
            if not is_on_gpu or not is_better(node, given):
                continue
            name = node.target.overloadpacket.__name__
            with unset_fake_temporarily():  # what is traced makes no rows
                note(name, values[0], values[-1], "written out in a compiled graph")
            replace(graph, node, formula, given)
            counts[name] += 1
        self.count(self.written_out, counts, "written out in a graph")
        if accumulated_weights.are_wanted():
            accumulated_weights.take_apart(graph)

    def uuid(self) -> str:
        return f"{super().uuid()} {accumulated_weights.are_wanted()} {accumulation.widened}"


# --- each formula has the arguments of its operator, and a function says where it is better -------


def linear_aux(input, weight, bias, activation):
    preactivation = _fused.linear(input, weight, bias)
    return ACTIVATIONS[activation](preactivation), preactivation


def _is_read_anyway(node, given) -> bool:
    """As by dropout, whose pass may as well begin with the activation."""
    output = result_of(node, 0)
    is_in_aten = given["activation"] != "relu" and output is not None  # ReLU's bits are not
    return is_in_aten and criterion.feeds_pointwise(output)


def _gradient(grad, saved, activation):
    form = ACTIVATIONS[activation].approximate
    if form is not None:
        return _aten.gelu_backward(grad, saved, approximate=form)
    if activation == "silu":
        return _aten.silu_backward(grad, saved)
    if activation == "relu2":
        grad = grad * (2 * saved)
    return _aten.threshold_backward(grad, saved, 0)


def linear_backward(grad_output, input, weight, saved, activation, output_mask):
    grad = _gradient(grad_output, saved, activation)
    return _fused._linear_backward(grad, input, weight, None, "none", output_mask)


def _is_made_in_passing(node, given) -> bool:
    saved = given["saved"]
    has_values = saved is not None and saved.meta["val"].is_floating_point()
    return has_values and criterion.is_pointwise(given["grad_output"])


def glu_backward(grad_output, gate, up, activation, output_mask, down, hidden=None):
    if down is not None:
        grad_output = grad_output @ down
    z, factor = gate.chunk(2, -1) if up is None else (gate, up)
    activated = ACTIVATIONS[activation](z)
    grads = _gradient(grad_output * factor, z, activation), grad_output * activated
    nothing = grad_output.new_empty(0)
    if up is None:
        grads = torch.cat(grads, -1), nothing
    return *grads, nothing, nothing, activated * factor if hidden is None else hidden


def _is_gated_in_one_pass(node, given) -> bool:
    """It is, but for biases' gradients, for which the compiler would read all once more."""
    given["hidden"] = _hidden_of_forward(given["gate"], given["up"])
    return not _is_in_product(given) and not any(given["output_mask"][2:4])


def _is_in_product(given) -> bool:
    """Whether our product (csrc/gemm/hopper.h) hides it, by sums as long as a tile's pass."""
    down, grad = given["down"], given["grad_output"].meta["val"]
    if down is None or given["activation"] == "relu":
        return False
    width, hidden = down.meta["val"].shape
    fits = grad.element_size() == 2 and width >= 1024 and width % 8 == hidden % 8 == 0
    return fits and grad.numel() * hidden <= 1e12 and criterion.has_hopper_products(grad.device)


def _hidden_of_forward(gate: Node, up: Node | None) -> Node | None:
    """What the forward has made of these very pre-activations."""
    forward = gate.args[0] if gate.target is operator.getitem else None
    if forward is None or forward.target is not _fused._linear_glu_aux.default:
        return None
    is_same = gate is result_of(forward, 1) and up in (None, result_of(forward, 2))
    return result_of(forward, 0) if is_same else None


_FORMULAS = {
    _fused._linear_aux.default: (linear_aux, _is_read_anyway),
    _fused._linear_backward.default: (linear_backward, _is_made_in_passing),
    _fused._glu_backward.default: (glu_backward, _is_gated_in_one_pass),
}
