"""Calls of one tensor as they are written, and who sees the names that a function assigns."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType

METHODS = ("relu", "relu_", "square")
# What an expression may be made of that runs between a layer and its activation.
HARMLESS = (
    *(ast.Name, ast.Constant, ast.Attribute, ast.expr_context, ast.operator, ast.unaryop),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.boolop, ast.Compare, ast.cmpop, ast.IfExp),
    *(ast.Tuple, ast.Subscript, ast.Slice, ast.keyword),
)
WHOLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)
GUARDED = ("Try", "TryStar", "With", "AsyncWith")  # which may go on after an exception
LOOPS = (ast.For, ast.AsyncFor, ast.While)
INNER = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.comprehension)
INNER += (ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)
CALLS = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)


@dataclass(frozen=True)
class Step:
    """A call of one tensor."""

    node: ast.expr
    callee: ast.expr | None  # None for ``h.relu()``, ``h.pow(2)`` and ``h ** 2``
    data: ast.expr  # the tensor
    # Nobody else sees what the step before returned, and nothing that matters runs in between.
    is_sole: bool = True
    guard: ast.If | None = None  # the ``if`` under which it comes

    @property
    def is_bare(self) -> bool:
        """Whether the tensor is all that is given."""
        return self.callee is not None and len(self.node.args) + len(self.node.keywords) == 1

    @property
    def is_square(self) -> bool:
        """Whether it is written like a square; ``torch.square`` may still be another function."""
        if isinstance(self.node, ast.BinOp):
            return isinstance(self.node.op, ast.Pow)
        name = getattr(self.node, "func", None)
        return getattr(name, "attr", getattr(name, "id", "")) in ("square", "pow")

    def options(self) -> dict[str, object]:
        """What is given beside the tensor by name; of what is no constant, the expression."""
        keywords = getattr(self.node, "keywords", [])
        given = {k.arg: k.value for k in keywords if k.arg != "input"}
        return {k: v.value if isinstance(v, ast.Constant) else v for k, v in given.items()}


Run = tuple[Step, ...]


def step_of(node: ast.AST | None) -> Step | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and is_two(node.right):
        return Step(node, None, node.left)
    if not isinstance(node, ast.Call):
        return None
    first, *others = [*node.args, *node.keywords] or [None]
    if first is None:
        is_method = isinstance(node.func, ast.Attribute) and node.func.attr in METHODS
        return Step(node, None, node.func.value) if is_method else None
    if isinstance(node.func, ast.Attribute) and node.func.attr == "pow" and is_two(first):
        return None if others else Step(node, None, node.func.value)
    data = first.value if getattr(first, "arg", "") == "input" else first
    if not isinstance(data, ast.expr) or isinstance(data, ast.Starred):
        return None
    if not is_harmless(*others) or any(getattr(o, "arg", "") in (None, "input") for o in others):
        return None
    return Step(node, node.func, data) if is_callee(node.func) else None


def is_two(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value == 2


def is_callee(node: ast.expr) -> bool:
    """``self.a.b``, ``self.layers[i]``, ``layer`` or ``getattr(self, name)``."""
    if isinstance(node, ast.Call):
        return dotted(node.func) == ["getattr"] and len(node.args) == 2
    return is_harmless(node) and isinstance(node, (ast.Name, ast.Attribute, ast.Subscript))


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
    if isinstance(node, ast.Call) and dotted(node.func) == ["len"]:
        return is_harmless(*node.args) and not node.keywords
    return isinstance(node, HARMLESS) and all(map(is_condition, ast.iter_child_nodes(node)))


def mentions(node: ast.AST, name: str) -> list[ast.Name]:
    return [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == name]


def assignment(statement: ast.AST) -> tuple[str | None, ast.expr | None]:
    """The name that is assigned, if it is one, and the value."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    else:
        target = statement.target if isinstance(statement, ast.AnnAssign) else None
    return (target.id, statement.value) if isinstance(target, ast.Name) else (None, None)


def passes(statement: ast.AST) -> bool:
    """Whether a layer may wait while the statement runs, which changes only names."""
    if not isinstance(statement, ast.Assign):
        return isinstance(statement, ast.Pass) or is_docstring(statement)
    targets = [part for t in statement.targets for part in getattr(t, "elts", [t])]
    return all(isinstance(t, ast.Name) for t in targets) and is_harmless(statement.value)


def is_docstring(statement: ast.AST) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class Scope:
    """One function, in its syntax tree and as the code that runs."""

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

    def guard_of(self, read: ast.Name) -> ast.If | None:
        """The ``if`` that begins with what reads the name, if a layer may wait for its answer."""
        part = self.statement_of(read)
        outer = self.parents[part]
        if isinstance(outer, ast.If) and part is outer.body[0] and is_condition(outer.test):
            return None if mentions(outer.test, read.id) else outer
        return None

    def origin(self, read: ast.Name) -> ast.AST | None:
        """The last statement of the block that mentions the name before it is read there, or in
        the first statement of an ``if``."""
        part = self.guard_of(read) or self.statement_of(read)
        return next((s for s in self.before(part) if mentions(s, read.id)), None)

    def may_wait(self, node: ast.expr, origins: Mapping[ast.Name, ast.AST]) -> bool:
        """Whether what gives values to the names may run when `node`, which reads them, does."""
        if not origins:
            return True
        part = self.statement_of(node)
        before = self.before((isinstance(node, ast.Name) and self.guard_of(node)) or part)
        since = before[: max(map(before.index, origins.values()))]
        return (
            isinstance(part, WHOLE)
            and self._comes_first(node, part)
            and all(s in origins.values() or passes(s) for s in since)
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

    def is_read_by(self, name: str, start: ast.AST, reads: Container[ast.Name]) -> bool:
        """Whether only these nodes see what the statement `start` assigns to `name`."""
        return not any(
            self._reaches(start, n)
            for n in mentions(self.node, name)
            if n not in reads
            if not isinstance(n.ctx, ast.Store) or isinstance(self.parents[n], ast.AugAssign)
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
