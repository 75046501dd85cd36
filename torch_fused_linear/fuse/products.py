"""Reads gated layers, ``act(gate(x)) * up(x)``, from the code of a function.

Their calls may stand in the product itself or in statements before it, where a name holds what they
return until then. They can wait for the product if nobody else sees what they return and nothing
that could matter runs in between.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import NamedTuple

from .scope import Origin, Scope
from .steps import Step, dotted, is_condition, is_harmless, step_of


class Form(NamedTuple):
    """One product of two factors.

    Attributes:
        node: the multiplication.
        act: the activation's call.
        gate: the call of the layer before it; where there is no `up`, of the one layer for both.
        up: the call of the other layer.
        halves: what makes two of the one layer's result, ``h.chunk(2, -1)``.
        reads: the names between the calls, and where each got its value.
    """

    node: ast.BinOp
    act: Step
    gate: Step
    up: Step | None
    halves: ast.Call | None
    reads: dict[ast.Name, Origin]

    @property
    def layers(self) -> list[Step]:
        return [self.gate] if self.up is None else [self.gate, self.up]


@dataclass(frozen=True)
class Product(Step):
    """A gated layer as the first step of a run.

    Attributes:
        forms: the product, or in ``a * b if c else d * e`` both.
    """

    forms: tuple[Form, ...] = ()


def product_of(scope: Scope, node: ast.AST) -> Product | None:
    parts = [node]
    if isinstance(node, ast.IfExp):
        parts = [node.body, node.orelse] if is_condition(node.test) else []
    forms = [_form(scope, part) for part in parts]
    if not forms or None in forms:
        return None
    reads = {read: origin for form in forms for read, origin in form.reads.items()}
    is_sole = all(scope.is_read_by(read.id, reads[read].start, reads) for read in reads)
    if not is_sole or not scope.may_wait(node, reads):
        return None
    return Product(node, node, node, forms=tuple(forms))


def _form(scope: Scope, node: ast.AST | None) -> Form | None:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return None
    for activated, other in ((node.left, node.right), (node.right, node.left)):
        reads: dict[ast.Name, Origin] = {}
        value, half = _origin(scope, activated, reads)
        act = step_of(value) if half is None else None
        if act is None or len(act.node.args) != (act.callee is not None):
            continue
        value, half = _origin(scope, act.data, reads)
        rest, other_half = _origin(scope, other, reads)
        if half is None and other_half is None:
            gate, up = step_of(value), step_of(rest)
            if _is_bare(gate) and _is_bare(up) and _is_same(gate.data, up.data):
                return Form(node, act, gate, up, None, reads)
        elif value is rest and {half, other_half} == {0, 1} and is_chunk(value):
            layer, part = _origin(scope, halved(value), reads)
            gate = step_of(layer) if part is None else None
            if _is_bare(gate):
                return Form(node, act, gate, None, value, reads)
    return None


def _is_bare(step: Step | None) -> bool:
    return step is not None and step.is_bare and len(step.node.args) == 1


def _is_same(one: ast.expr, other: ast.expr) -> bool:
    return is_harmless(one) and ast.dump(one) == ast.dump(other)


def is_torch_chunk(node: ast.Call) -> bool:
    return dotted(node.func) == ["torch", "chunk"]


def is_chunk(node: ast.AST | None) -> bool:
    """``h.chunk(2, dim=-1)`` or ``torch.chunk(h, 2, dim=-1)``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    given = [*node.args[is_torch_chunk(node) :], *(k.value for k in node.keywords)]
    return node.func.attr == "chunk" and len(node.args) > 0 and is_harmless(*given)


def halved(chunk: ast.Call) -> ast.expr:
    return chunk.args[0] if is_torch_chunk(chunk) else chunk.func.value


def _origin(scope: Scope, node: ast.expr, reads: dict) -> tuple[ast.expr | None, int | None]:
    """What a name stands for, and which of the two things that it unpacks; any other expression as
    it is."""
    if not isinstance(node, ast.Name):
        return node, None
    origin = scope.origin(node)
    if origin is None or origin.guard is not None or not isinstance(origin.start, ast.Assign):
        return None, None
    reads[node] = origin
    target, *others = origin.start.targets
    names = [getattr(t, "id", "") for t in getattr(target, "elts", [target])]
    if others or names.count(node.id) != 1 or len(set(names)) != len(names):
        return None, None
    if isinstance(target, ast.Name):
        return origin.start.value, None
    both = len(names) == 2 and all(names)
    return (origin.start.value, names.index(node.id)) if both else (None, None)
