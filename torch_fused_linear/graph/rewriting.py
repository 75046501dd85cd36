"""Operators of ours in a graph of forward and backward, and what is put in their place."""

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from .._support.torch_internals import trace_in_aten


def arguments_of(node: Node) -> dict[str, Any]:
    target = getattr(node.target, "default", node.target)
    schema = target._schema.arguments
    given = dict(zip((a.name for a in schema), node.args)) | node.kwargs
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def result_of(node: Node, index: int) -> Node | None:
    found = (u for u in node.users if u.target is operator.getitem and u.args[1] == index)
    return next(found, None)


def replace(graph: Graph, node: Node, formula: Callable, given: dict[str, Any]) -> None:
    """Puts what the formula calls in the place of the node, which gives several tensors."""
    nodes = {name: value for name, value in given.items() if isinstance(value, Node)}

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        return formula(**(given | dict(zip(nodes, tensors))))

    traced = trace_in_aten(call, [n.meta["val"] for n in nodes.values()])
    traced.graph.eliminate_dead_code()
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), nodes.values()))
    with graph.inserting_before(node):
        results = graph.graph_copy(traced.graph, copies)
    for old, new in copies.items():
        if old.op != "placeholder":
            new.meta = {**node.meta, **old.meta}  # forward or backward, recomputed or kept
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
