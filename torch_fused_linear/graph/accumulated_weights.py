"""Weights' gradients of compiled graphs that the product adds to what is there.

A graph has to give a gradient, and cannot know what will be there when its backward runs. So the
operator that makes it looks, by the weight, and where it has added gives zeros without memory.

This takes two passes at places of their own. Which gradient is a result of the graph is known once
forward and backward are recorded; what the backward reads is known once the two are parted.
"""

from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from .. import accumulation
from .._support.torch_internals import OpOverload, runs_as_cuda_graphs
from ..activations import NUMBERS
from .criterion import is_static
from .identity import GraphPass
from .rewriting import arguments_of, replace, result_of

_fused = torch.ops.fused


def are_wanted() -> bool:
    # A CUDA graph would go on adding to the memory that it was captured with.
    return accumulation.was_asked_for and not runs_as_cuda_graphs()


class WeightsPass(GraphPass):
    """Makes the gradient of a parameter an operator of its own, where it is the graph's result.

    It belongs in Inductor's ``joint_custom_pre_pass``.
    """

    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes) if are_wanted() else ():
            if node.target in _FORMULAS and _gives_gradient_of_parameter(node):
                replace(graph, node, _FORMULAS[node.target], arguments_of(node))

    def uuid(self) -> str:
        return f"{super().uuid()} {are_wanted()} {accumulation.widened}"


def _gives_gradient_of_parameter(node: Node) -> bool:
    gradient, weight = result_of(node, 1), arguments_of(node)["weight"]
    value = weight.meta["val"]
    if gradient is None or weight.op != "placeholder" or value.dim() != 2 or not is_static(value):
        return False
    users = list(gradient.users)
    return [user.op for user in users] == ["output"] and users[0].args[0].count(gradient) == 1


class StoragesPass(GraphPass):
    """Tells those operators what else their graph reads, which must not be written meanwhile.

    It belongs in Inductor's ``post_grad_custom_pre_pass``; without it torch adds the gradients.
    """

    def __call__(self, graph: Graph) -> None:
        operator = _fused._accumulated_weight_gradient.default
        sums = graph.find_nodes(op="call_function", target=operator)
        if not sums:
            return
        inputs = graph.find_nodes(op="placeholder")
        read = [n for n in inputs if isinstance(n.meta.get("val"), torch.Tensor)]
        with graph.inserting_after(inputs[-1]), read[0].meta["val"].fake_mode:
            storages = graph.call_function(_fused._storages.default, (read,))
            storages.meta["val"] = _fused._storages([n.meta["val"] for n in read])
        for node in sums:
            node.kwargs = {"storages": storages}


def _apart(backward: OpOverload) -> Callable:
    def formula(grad_output, input, weight, saved, activation, output_mask, **previous):
        wants_input, _, wants_bias = output_mask
        grad_bias = None
        if activation != NUMBERS["none"]:
            grad_output, grad_bias = _fused._activation_backward(
                grad_output, saved, activation, wants_bias
            )
        others = [wants_input, False, wants_bias and grad_bias is None]
        layer = grad_output, input, weight, None, NUMBERS["none"], others
        grad_input, _, sums, *of_previous = backward(*layer, *previous.values())
        is_wide = weight.itemsize == 2 and accumulation.widened.get(weight.shape, False)
        dtype = torch.float32 if is_wide else weight.dtype
        grad_weight = _fused._accumulated_weight_gradient(grad_output, input, weight, dtype)
        return grad_input, grad_weight, sums if grad_bias is None else grad_bias, *of_previous

    return formula


_STEPS = _fused._linear_backward.default, _fused._linear_backward_across.default
_FORMULAS = {step: _apart(step) for step in _STEPS}
