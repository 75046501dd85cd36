"""Calls of one tensor, as they are written, and what an expression may do."""

from __future__ import annotations

import ast
from dataclasses import dataclass

METHODS = ("relu", "relu_")
# What an expression may be made of that runs between a layer and its activation.
HARMLESS = (
    *(ast.Name, ast.Constant, ast.Attribute, ast.expr_context, ast.operator, ast.unaryop),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.boolop, ast.Compare, ast.cmpop, ast.IfExp),
    *(ast.Tuple, ast.Subscript, ast.Slice, ast.keyword),
)
WHOLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)


@dataclass(frozen=True)
class Step:
    """A call of one tensor.

    Attributes:
        node: the call.
        callee: what is called; None for ``h.relu()``.
        data: the tensor's expression.
        is_sole: whether nobody but this call sees what the step before returned, and nothing of
            consequence runs between the two.
        guard: the condition under which it comes; None if it always does.
    """

    node: ast.Call
    callee: ast.expr | None
    data: ast.expr
    is_sole: bool = True
    guard: ast.expr | None = None

    @property
    def is_bare(self) -> bool:
        """Whether the tensor is all that is given."""
        return self.callee is not None and len(self.node.args) + len(self.node.keywords) == 1

    def options(self) -> dict[str, object]:
        """What is given beside the tensor by name; of what is no constant, the expression."""
        given = {k.arg: k.value for k in self.node.keywords if k.arg != "input"}
        return {k: v.value if isinstance(v, ast.Constant) else v for k, v in given.items()}


Run = tuple[Step, ...]


def dotted(node: ast.AST) -> list[str]:
    """``a.b.c`` as its parts; empty if it is not of this kind."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return [*before, node.attr] if before else []
    return [node.id] if isinstance(node, ast.Name) else []


def is_harmless(*nodes: ast.AST) -> bool:
    return all(isinstance(n, HARMLESS) for node in nodes for n in ast.walk(node))


def is_condition(node: ast.AST) -> bool:
    """Harmless: a layer may wait while it is asked."""
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    inner = {id(part) for call in calls for part in (call, call.func)}
    return all(dotted(call.func) == ["len"] and is_harmless(*call.args) for call in calls) and all(
        isinstance(n, HARMLESS) for n in ast.walk(node) if id(n) not in inner
    )


def mentions(node: ast.AST, name: str) -> list[ast.Name]:
    return [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == name]


def step_of(node: ast.AST | None) -> Step | None:
    if not isinstance(node, ast.Call):
        return None
    first, *others = [*node.args, *node.keywords] or [None]
    if first is None:
        is_method = isinstance(node.func, ast.Attribute) and node.func.attr in METHODS
        return Step(node, None, node.func.value) if is_method else None
    data = first.value if getattr(first, "arg", "") == "input" else first
    if not isinstance(data, ast.expr) or isinstance(data, ast.Starred):
        return None
    if not is_harmless(*others) or any(getattr(o, "arg", "") in (None, "input") for o in others):
        return None
    return Step(node, node.func, data) if is_callee(node.func) else None


def is_callee(node: ast.expr) -> bool:
    """``self.a.b``, ``self.layers[i]``, ``layer`` or ``getattr(self, name)``."""
    if isinstance(node, ast.Call):
        return dotted(node.func) == ["getattr"] and len(node.args) == 2
    return is_harmless(node) and isinstance(node, (ast.Name, ast.Attribute, ast.Subscript))
