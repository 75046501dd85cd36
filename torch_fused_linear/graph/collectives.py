"""Layers beside a collective, which torch's asynchronous tensor parallelism runs piece by piece.

Under ``torch._inductor.config._micro_pipeline_tp`` the compiler looks for plain products that are
fed by an all-gather or feed a reduce-scatter, and lets communication and computation overlap. It
does not know our operators.
"""

import operator
from collections.abc import Callable, Iterable

import torch
from torch.fx import Node

from .matching import Linear
from .spellings import called, kind

# Functions between a collective and a product, which wait or put the parts in another order.
_MOVES = (torch.cat, torch.chunk, torch.split, operator.getitem, torch.Tensor.chunk)
_MOVING_METHODS = ("chunk", "split", "to")


def is_beside_one(linear: Linear) -> bool:
    """Returns whether the layer's input was gathered, or its result is reduced and scattered."""
    return _reaches("all_gather_into_tensor", [linear.input], lambda n: n.all_input_nodes) or (
        _reaches("reduce_scatter_tensor", linear.nodes[-1].users, lambda n: n.users)
    )


def _reaches(
    collective: str, starts: Iterable[Node], step: Callable[[Node], Iterable[Node]]
) -> bool:
    """Returns whether the collective is among the nodes, or after some that only move elements."""
    open_ends = list(starts)
    seen = set(open_ends)
    while open_ends:
        node = open_ends.pop()
        if _collective(node) == collective:
            return True
        fresh = [other for other in step(node) if other not in seen] if _moves(node) else []
        seen.update(fresh)
        open_ends += fresh
    return False


def _collective(node: Node) -> str | None:
    name = getattr(called(node), "_qualified_op_name", "")
    return name.removeprefix("_c10d_functional::") if name.startswith("_c10d_func") else None


def _moves(node: Node) -> bool:
    moves = _MOVING_METHODS if node.op == "call_method" else _MOVES
    return node.target in moves or kind(node) == "view" or _collective(node) == "wait_tensor"
