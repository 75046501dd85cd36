"""Reads gated layers, ``act(gate(x)) * up(x)``, from the code of a function.

Their calls may stand in the product itself or in statements before it, where a name holds what they
return until then. They can wait for the product if nobody else sees what they return and nothing
that could matter runs in between.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .steps import WHOLE, Step, dotted, is_condition, is_harmless, mentions, step_of

# What reads the function, of reading.py, which imports this file.
Reader = Any


class Form(NamedTuple):
    """One product of two factors.

    Attributes:
        node: the multiplication.
        act: the activation's call.
        gate: the call of the layer before it; where there is no `up`, of the one layer for both.
        up: the call of the other layer.
        halves: what makes two of the one layer's result, ``h.chunk(2, -1)``.
        reads: the names between the calls, with the statement that assigns each.
    """

    node: ast.BinOp
    act: Step
    gate: Step
    up: Step | None
    halves: ast.Call | None
    reads: tuple[tuple[ast.Name, ast.stmt], ...]

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

    @property
    def nodes(self) -> list[ast.expr]:
        return [form.node for form in self.forms]


def product_of(reader: Reader, node: ast.AST | None) -> Product | None:
    parts = [node]
    if isinstance(node, ast.IfExp):
        parts = [node.body, node.orelse] if is_condition(node.test) else []
    forms = [_form(reader, part) for part in parts]
    if not forms or None in forms or not _may_wait(reader, node, forms):
        return None
    return Product(node, node, node, forms=tuple(forms))


def _form(reader: Reader, node: ast.AST | None) -> Form | None:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return None
    for activated, other in ((node.left, node.right), (node.right, node.left)):
        reads: list = []
        value, half = _origin(reader, activated, reads)
        act = step_of(value) if half is None else None
        if act is None or len(act.node.args) != (act.callee is not None):
            continue
        value, half = _origin(reader, act.data, reads)
        rest, other_half = _origin(reader, other, reads)
        if half is None and other_half is None:
            gate, up = step_of(value), step_of(rest)
            if _is_bare(gate) and _is_bare(up) and _is_same(gate.data, up.data):
                return Form(node, act, gate, up, None, tuple(reads))
        elif value is rest and {half, other_half} == {0, 1} and is_chunk(value):
            layer, part = _origin(reader, halved(value), reads)
            gate = step_of(layer) if part is None else None
            if _is_bare(gate):
                return Form(node, act, gate, None, value, tuple(reads))
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


def _origin(reader: Reader, node: ast.expr, reads: list) -> tuple[ast.expr | None, int | None]:
    """What a name stands for, by the statement of the same block that assigned it last, and which
    of the two things that it unpacks; any other expression as it is."""
    if not isinstance(node, ast.Name):
        return node, None
    start = next((s for s in _before(reader, node) if mentions(s, node.id)), None)
    if not isinstance(start, ast.Assign) or len(start.targets) != 1:
        return None, None
    target = start.targets[0]
    names = [getattr(t, "id", "") for t in getattr(target, "elts", [target])]
    if names.count(node.id) != 1 or len(set(names)) != len(names):
        return None, None
    reads.append((node, start))
    if isinstance(target, ast.Name):
        return start.value, None
    return (start.value, names.index(node.id)) if len(names) == 2 and all(names) else (None, None)


def _statement(reader: Reader, node: ast.AST) -> ast.stmt:
    return next(p for p in reader.around(node) if isinstance(p, ast.stmt))


def _before(reader: Reader, node: ast.AST) -> Iterator[ast.stmt]:
    """The statements before the one that `node` is in, in its block, the nearest first."""
    statement = _statement(reader, node)
    for block in vars(reader.parents[id(statement)]).values():
        if isinstance(block, list) and any(s is statement for s in block):
            index = next(k for k, s in enumerate(block) if s is statement)
            yield from block[:index][::-1]


def _may_wait(reader: Reader, node: ast.AST, forms: list[Form]) -> bool:
    """Whether the calls of the forms may wait until `node`."""
    reads = {id(read): (read.id, start) for form in forms for read, start in form.reads}
    starts = {id(start) for _, start in reads.values()}
    if not starts:
        return True
    part, before = _statement(reader, node), list(_before(reader, node))
    last = max(k for k, s in enumerate(before) if id(s) in starts)
    return (
        isinstance(part, WHOLE)
        and reader.comes_first(node, part)
        and all(id(s) in starts or reader.passes(s) for s in before[: last + 1])
        and all(reader.is_hidden(name) for name, _ in reads.values())
        and all(reader.is_read_by(name, start, {*reads}) for name, start in reads.values())
    )
