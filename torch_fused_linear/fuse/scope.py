"""Who sees the names that a function assigns, and what runs between two of its places."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import NamedTuple

from .steps import WHOLE, is_condition, is_harmless, mentions

GUARDED = ("Try", "TryStar", "With", "AsyncWith")  # which may go on after an exception
LOOPS = (ast.For, ast.AsyncFor, ast.While)
INNER = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.comprehension)
INNER += (ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)
CALLS = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)


class Origin(NamedTuple):
    """Where a name that is read got its value.

    Attributes:
        start: the last statement of the block that mentions it; at the beginning of an ``if``, of
            the block around that.
        guard: the condition of the ``if``.
    """

    start: ast.AST
    guard: ast.expr | None


class Scope:
    """One function.

    Attributes:
        node: of its syntax tree.
        code: what runs.
    """

    def __init__(self, node: ast.AST, code: CodeType) -> None:
        self.node, self.code = node, code
        self.parents = {c: p for p in ast.walk(node) for c in ast.iter_child_nodes(p)}

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """What `node` is in, the nearest first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def statement_of(self, node: ast.AST) -> ast.stmt:
        return next(p for p in self.around(node) if isinstance(p, ast.stmt))

    def before(self, statement: ast.AST) -> list[ast.AST]:
        """What stands before it in its block, the nearest first."""
        for block in vars(self.parents[statement]).values():
            if isinstance(block, list) and statement in block:
                return block[: block.index(statement)][::-1]
        return []

    def origin(self, read: ast.Name) -> Origin | None:
        part, guard = self.statement_of(read), None
        outer = self.parents[part]
        if isinstance(outer, ast.If) and part is outer.body[0] and is_condition(outer.test):
            part, guard = outer, outer.test
            if mentions(guard, read.id):
                return None
        start = next((s for s in self.before(part) if mentions(s, read.id)), None)
        return None if start is None else Origin(start, guard)

    def may_wait(self, node: ast.expr, origins: Mapping[ast.Name, Origin]) -> bool:
        """Whether what gives values to the names may run when `node`, which reads them, does."""
        if not origins:
            return True
        starts, part = [origin.start for origin in origins.values()], self.statement_of(node)
        is_guarded = any(origin.guard for origin in origins.values())
        before = self.before(self.parents[part] if is_guarded else part)
        since = before[: max(map(before.index, starts))]
        return (
            isinstance(part, WHOLE)
            and self._comes_first(node, part)
            and all(s in starts or passes(s) for s in since)
            and all(self._is_hidden(read.id) for read in origins)
        )

    def _is_hidden(self, name: str) -> bool:
        """Whether it is a local name that only this function's own code can read."""
        return name in self.code.co_varnames and name not in self.code.co_cellvars

    def _comes_first(self, node: ast.AST, part: ast.stmt) -> bool:
        """Whether the statement `part` calls nothing before `node`, and `node` once in any case."""
        around = list(self.around(node))
        if any(isinstance(p, INNER) for p in around[: around.index(part)]):
            return False
        own, here = {*ast.walk(node), *around}, (node.lineno, node.col_offset)
        return all(
            (n.lineno, n.col_offset) >= here or n in own
            for n in ast.walk(part)
            if isinstance(n, CALLS)
        )

    def takes_locals(self) -> bool:
        """Whether the function takes all its local names together, begun calls among them."""
        nodes = list(ast.walk(self.node))
        given = {n.func for n in nodes if isinstance(n, ast.Call) and n.args}
        return any(
            n.id in ("locals", "eval", "exec") or (n.id in ("vars", "dir") and n not in given)
            for n in nodes
            if isinstance(n, ast.Name)
        )

    def goes_on(self, node: ast.AST) -> bool:
        """Whether the function may go on after an exception there."""
        return any(type(p).__name__ in GUARDED for p in self.around(node))

    def is_read_by(self, name: str, start: ast.AST, reads: Mapping[ast.Name, Origin]) -> bool:
        """Whether only these nodes see what the statement `start` assigns to `name`."""
        for node in ast.walk(self.node):
            if isinstance(node, ast.AugAssign) and getattr(node.target, "id", None) == name:
                return False
        return not any(
            self._reaches(start, n)
            for n in mentions(self.node, name)
            if n not in reads and not isinstance(n.ctx, ast.Store)
        )

    def _reaches(self, start: ast.AST, read: ast.Name) -> bool:
        """Whether what the statement `start` assigns may be what `read` sees: not if a statement
        that must run before `read` assigns the same name, unless `start` lies between them."""
        around = list(self.around(read))
        loops = [p for p in self.around(start) if isinstance(p, LOOPS)]
        is_before = (read.lineno, read.col_offset) < (start.end_lineno, start.end_col_offset)
        if is_before and not any(p in loops for p in around):
            return False
        for inner in around[:-1]:
            between = [inner]
            for statement in self.before(inner):
                is_other = statement is not start and assignment(statement)[0] == read.id
                if is_other and not any(start in ast.walk(s) for s in between):
                    return False
                between.append(statement)
        return True


def assignment(statement: ast.AST) -> tuple[str | None, ast.expr | None]:
    """The name that is assigned, if it is one, and the value."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign):
        target = statement.target
    else:
        return None, None
    return (target.id, statement.value) if isinstance(target, ast.Name) else (None, None)


def passes(statement: ast.AST) -> bool:
    """Whether a layer may wait while the statement runs."""
    if isinstance(statement, ast.Assign):
        return all(map(is_local, statement.targets)) and is_harmless(statement.value)
    return isinstance(statement, ast.Pass) or is_docstring(statement)


def is_docstring(statement: ast.AST) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def is_local(target: ast.expr) -> bool:
    """Whether assigning to it changes names and nothing else."""
    parts = target.elts if isinstance(target, ast.Tuple) else [target]
    return all(isinstance(part, ast.Name) for part in parts)
