"""Reads from the code of a function which calls follow straight upon each other.

``h = self.fc1(x)`` and then ``h = self.act(h)``, or ``self.act(self.fc1(x))``: nobody but ``act``
sees what ``fc1`` returns, and nothing that could matter runs in between, so that both may be one
call. Such a sequence of calls is a *run*.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from .products import product_of
from .scope import Scope, assignment
from .steps import WHOLE, Run, Step, mentions, step_of

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
    origin = scope.origin(read) if isinstance(read, ast.Name) else None
    if origin is None:
        return run
    part, (name, value) = scope.statement_of(read), assignment(origin.start)
    reads = [n for n in mentions(part, read.id) if isinstance(n.ctx, ast.Load)]
    if name is None or value not in found or reads != [read] or not isinstance(part, WHOLE):
        return run
    is_sole = assignment(part)[0] == name and not scope.goes_on(part)  # it takes the name over
    if origin.guard is None and not is_sole:
        is_sole = scope.is_read_by(name, origin.start, {read: origin})
    is_sole = is_sole and scope.may_wait(read, {read: origin})
    first, *later = (replace(step, guard=origin.guard) for step in run)
    return (*found.pop(value), replace(first, is_sole=is_sole), *later)
