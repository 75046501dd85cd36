"""Reads from the code of a function which calls follow straight upon each other.

``h = self.fc1(x)`` and then ``h = self.act(h)``, or ``self.act(self.fc1(x))``: nobody but ``act``
sees what ``fc1`` returns, and nothing that could matter runs in between, so that both may be one
call. Such a sequence of calls is a *run*. It may begin with a *product*, a gated layer
``act(gate(x)) * up(x)``, whose calls stand in it or in statements before.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from .syntax import (
    WHOLE,
    Run,
    Scope,
    Step,
    assignment,
    dotted,
    is_condition,
    is_harmless,
    mentions,
    step_of,
)

INNER_FUNCTIONS = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)


def runs_of(scope: Scope) -> list[Run]:
    """Those of a function, but not of functions in it."""
    found: dict[ast.expr, Run] = {}  # by the last call
    body = [] if isinstance(scope.node, ast.Lambda) else scope.node.body
    for statement in _statements(body):
        for run in _runs_in(scope, statement):
            run = _joined(scope, found, run)
            found[run[-1].node] = run
    return list(found.values())


def _statements(block: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in block:
        yield statement
        if not isinstance(statement, INNER_FUNCTIONS):
            for field in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, field, []))
            for part in getattr(statement, "handlers", getattr(statement, "cases", [])):
                yield from _statements(part.body)


def _runs_in(scope: Scope, node: ast.AST) -> Iterator[Run]:
    """Runs in the expressions of a statement, or in part of an expression."""
    steps, source = _unnest(node) if isinstance(node, ast.expr) else ((), node)
    product = product_of(scope, source)
    if product or steps:
        yield (product, *steps) if product else steps
    for part in [source] if steps and not product else ast.iter_child_nodes(source):
        if not isinstance(part, (ast.stmt, ast.Lambda, ast.excepthandler, ast.match_case)):
            yield from _runs_in(scope, part)


def _unnest(value: ast.expr) -> tuple[Run, ast.expr]:
    """``self.b(self.a(x))`` as its steps, the first first, and ``x``."""
    steps: list[Step] = []
    while (step := step_of(value)) is not None:
        steps.append(step)
        value = step.data
    return tuple(steps[::-1]), value


def _joined(scope: Scope, found: dict[ast.expr, Run], run: Run) -> Run:
    """The run behind the one that gave the name its value which it begins with."""
    read = run[0].data
    start = scope.origin(read) if isinstance(read, ast.Name) else None
    part, (name, value) = scope.statement_of(run[0].node), assignment(start)
    if name is None or value not in found or not isinstance(part, WHOLE):
        return run
    if [n for n in mentions(part, name) if isinstance(n.ctx, ast.Load)] != [read]:
        return run
    guard = scope.guard_of(read)
    is_sole = assignment(part)[0] == name and not scope.goes_on(part)  # it takes the name over
    if guard is None and not is_sole:
        is_sole = scope.is_read_by(name, start, {read})
    is_sole = is_sole and scope.may_wait(read, {read: start})
    first, *later = (replace(step, guard=guard) for step in run)
    return (*found.pop(value), replace(first, is_sole=is_sole), *later)


# --- gated layers ---------------------------------------------------------------


class Form(NamedTuple):
    """One product of two factors."""

    node: ast.BinOp
    act: Step
    layers: tuple[Step, ...]  # the one before the activation and the other, or the one for both
    halves: ast.Call | None  # makes two of that one's result, ``h.chunk(2, -1)``
    reads: dict[ast.Name, ast.AST]  # names between the calls, and what gives them their values


@dataclass(frozen=True)
class Product(Step):
    """A gated layer as the first step of a run."""

    forms: tuple[Form, ...] = ()  # of ``a * b if c else d * e`` there are two


def product_of(scope: Scope, node: ast.AST) -> Product | None:
    parts = [node]
    if isinstance(node, ast.IfExp):
        parts = [node.body, node.orelse] if is_condition(node.test) else []
    forms = [_form(scope, part) for part in parts]
    if not forms or None in forms:
        return None
    reads = {read: start for form in forms for read, start in form.reads.items()}
    is_sole = all(scope.is_read_by(read.id, start, reads) for read, start in reads.items())
    if not is_sole or not scope.may_wait(node, reads):
        return None
    return Product(node, node, node, forms=tuple(forms))


def _form(scope: Scope, node: ast.AST | None) -> Form | None:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return None
    for activated, other in ((node.left, node.right), (node.right, node.left)):
        reads: dict[ast.Name, ast.AST] = {}
        value, half = _origin(scope, activated, reads)
        act = step_of(value) if half is None else None
        if act is None or act.is_square or len(act.node.args) != (act.callee is not None):
            continue
        value, half = _origin(scope, act.data, reads)
        rest, other_half = _origin(scope, other, reads)
        if half is None and other_half is None:
            gate, up = step_of(value), step_of(rest)
            if _is_bare(gate) and _is_bare(up) and _is_same(gate.data, up.data):
                return Form(node, act, (gate, up), None, reads)
        elif value is rest and {half, other_half} == {0, 1} and (data := halved(value)):
            layer, part = _origin(scope, data, reads)
            gate = step_of(layer) if part is None else None
            if _is_bare(gate):
                return Form(node, act, (gate,), value, reads)
    return None


def _is_bare(step: Step | None) -> bool:
    return step is not None and step.is_bare and len(step.node.args) == 1


def _is_same(one: ast.expr, other: ast.expr) -> bool:
    return is_harmless(one) and ast.dump(one) == ast.dump(other)


def is_torch_chunk(node: ast.Call) -> bool:
    return dotted(node.func) == ["torch", "chunk"]


def halved(node: ast.AST | None) -> ast.expr | None:
    """The tensor of ``h.chunk(2, dim=-1)`` or ``torch.chunk(h, 2, dim=-1)``."""
    if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != "chunk":
        return None
    data, *given = [*([] if is_torch_chunk(node) else [node.func.value]), *node.args, None]
    return data if is_harmless(*given[:-1], *node.keywords) else None


def _origin(scope: Scope, node: ast.expr, reads: dict) -> tuple[ast.expr | None, int | None]:
    """What a name stands for, and which of the two things that it unpacks; any other expression as
    it is."""
    if not isinstance(node, ast.Name):
        return node, None
    start = None if scope.guard_of(node) else scope.origin(node)
    if not isinstance(start, ast.Assign) or len(start.targets) != 1:
        return None, None
    reads[node] = start
    target = start.targets[0]
    if isinstance(target, ast.Name) and target.id == node.id:
        return start.value, None
    names = [getattr(t, "id", "") for t in getattr(target, "elts", [])]
    is_pair = len({*names}) == len(names) == 2 and all(names)
    return (start.value, names.index(node.id)) if is_pair and node.id in names else (None, None)
