"""Reads from the code of a function which calls follow straight upon each other.

``h = self.fc1(x)`` and then ``h = self.act(h)``, or ``self.act(self.fc1(x))``: nobody but ``act``
sees what ``fc1`` returns, and nothing that could matter runs in between, so that both may be one
call. Such a sequence of calls is a *run*. The text is believed only if compiling the file that it
is in gives the very code that runs.
"""

from __future__ import annotations
import __future__

import ast
import linecache
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, lru_cache
from types import CodeType, FunctionType

from .products import product_of
from .steps import WHOLE, Run, Step, is_condition, is_harmless, mentions, step_of

GUARDED = ("Try", "TryStar", "With", "AsyncWith")  # which may go on after an exception
LOOPS = ("For", "AsyncFor", "While")
INNER = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.comprehension)
INNER += (ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)
CALLS = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)


FUTURE = 0  # what `from __future__ import` sets in a code's flags
for _feature in __future__.all_feature_names:
    FUTURE |= getattr(__future__, _feature).compiler_flag
# The code, as the user wrote it, of functions that have been rewritten.
ORIGINALS: weakref.WeakKeyDictionary[FunctionType, CodeType] = weakref.WeakKeyDictionary()


class Unreadable(Exception):
    """Says why the source of a function cannot be had, or believed."""


class Text:
    """The text of a function, where it is, and what is in it."""

    def __init__(self, function: FunctionType) -> None:
        self.function, self.code = function, code_of(function)
        code, self.file = self.code, self.code.co_filename
        # linecache knows the cells of notebooks too
        linecache.checkcache(self.file)
        self.lines = linecache.getlines(self.file, function.__globals__)
        if not self.lines:
            raise Unreadable(
                f"there is no source of {function.__qualname__}, which takes a file or a cell of a "
                "notebook; layers of this package need none"
            )
        self.flags = code.co_flags & FUTURE
        try:
            nodes, codes = index("".join(self.lines), self.file, self.flags)
        except (SyntaxError, ValueError) as error:
            raise Unreadable(f"the source of {function.__qualname__} does not compile") from error
        key = code.co_name, code.co_firstlineno
        if len(nodes.get(key, ())) != 1 or not any(same(code, c) for c in codes.get(key, ())):
            raise Unreadable(
                f"the code of {function.__qualname__} is not what is in the file; it was changed "
                "since it was loaded, or made by other code"
            )
        (self.around,) = nodes[key]  # itself last
        self.node = self.around[-1]
        if getattr(self.node, "type_params", None):
            raise Unreadable(f"{function.__qualname__} has type parameters")

    @property
    def class_name(self) -> str | None:
        """Of the class around it, whose name is put before private ones."""
        classes = [n.name for n in self.around if isinstance(n, ast.ClassDef)]
        return classes[-1] if classes else None

    @property
    def self_name(self) -> str:
        """Its first argument's; empty if it has none by position."""
        arguments = self.node.args
        first = [*arguments.posonlyargs, *arguments.args][:1]
        return first[0].arg if first else ""

    @cached_property
    def numbers(self) -> dict[int, int]:
        """By which number a node is found again in another tree of the same text."""
        return {id(node): k for k, node in enumerate(ast.walk(self.node))}

    def numbers_of(self, step: Step) -> list[int]:
        """Of a step's call; of a product, those of all its forms."""
        return [self.numbers[id(node)] for node in step.nodes]

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for run in _Reader(self.node, self.code).read() if run)

    @cached_property
    def takes_locals(self) -> bool:
        """Whether the function takes all its local names together, to which ours would come."""
        nodes = list(ast.walk(self.node))
        given = {id(n.func) for n in nodes if isinstance(n, ast.Call) and n.args}
        read = [n for n in nodes if isinstance(n, ast.Name)]
        return any(
            n.id in ("locals", "eval", "exec") or (n.id in ("vars", "dir") and id(n) not in given)
            for n in read
        )

    def place(self, node: ast.AST) -> str:
        return f"{self.file}:{node.lineno}"


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def key_of(node: ast.AST) -> tuple[str, int]:
    """The name and first line that the code of a function's node has."""
    lines = [node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]
    return getattr(node, "name", "<lambda>"), min(lines)


@lru_cache(maxsize=32)
def index(source: str, file: str, flags: int) -> tuple[dict, dict]:
    """The functions of a file, each behind the classes and functions around it, and their code."""
    nodes: dict[tuple[str, int], list] = {}

    def visit(node: ast.AST, around: tuple[ast.AST, ...]) -> None:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            around = (*around, node)
        if isinstance(node, FUNCTIONS):
            nodes.setdefault(key_of(node), []).append(around)
        for child in ast.iter_child_nodes(node):
            visit(child, around)

    visit(ast.parse(source), ())
    return nodes, codes_in(compile(source, file, "exec", flags, dont_inherit=True))


def codes_in(code: CodeType) -> dict[tuple[str, int], list[CodeType]]:
    """A file's code and that of all functions in it, by name and first line."""
    found: dict[tuple[str, int], list] = {}
    waiting = [code]
    while waiting:
        code = waiting.pop()
        found.setdefault((code.co_name, code.co_firstlineno), []).append(code)
        waiting += [c for c in code.co_consts if isinstance(c, CodeType)]
    return found


_CODE = ("code", "names", "varnames", "freevars", "cellvars", "flags", "argcount")
_CODE += ("kwonlyargcount", "posonlyargcount", "exceptiontable")


def same(one: CodeType, other: CodeType) -> bool:
    """Whether two code objects do the same; where they are from is no matter."""
    return (
        all(getattr(one, f"co_{n}", None) == getattr(other, f"co_{n}", None) for n in _CODE)
        and len(one.co_consts) == len(other.co_consts)
        and all(
            same(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType)
            # repr tells 0 from False and from -0.0, in tuples too
            else type(a) is type(b) and a == b and (repr(a) == repr(b) or type(a) is frozenset)
            for a, b in zip(one.co_consts, other.co_consts)
        )
    )  # fmt: skip


def code_of(function: FunctionType) -> CodeType:
    """As the user wrote it."""
    return ORIGINALS.get(function, function.__code__)


def unwrapped(function: object) -> FunctionType | None:
    """The function under decorators that tell it (functools.wraps)."""
    while isinstance(function, FunctionType) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function if isinstance(function, FunctionType) else None


def cells(function: FunctionType) -> dict[str, object]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # is filled later
            found[name] = None
    return found


def place_of(code: CodeType) -> str:
    return f"{code.co_filename}:{code.co_firstlineno}"


def names(code: CodeType) -> set[str]:
    """The names of all attributes and globals that a function and those in it mention."""
    inner = (names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


def is_docstring(statement: ast.AST) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def is_local(target: ast.expr) -> bool:
    """Whether assigning to it changes names and nothing else."""
    parts = target.elts if isinstance(target, ast.Tuple) else [target]
    return all(isinstance(part, ast.Name) for part in parts)


class _Reader:
    """Finds the runs of one function."""

    def __init__(self, node: ast.AST, code: CodeType) -> None:
        self.function, self.code = node, code
        self.parents = {id(c): p for p in ast.walk(node) for c in ast.iter_child_nodes(p)}
        self.joined: dict[int, tuple[Run, bool, ast.expr | None]] = {}  # by the name's read

    def read(self) -> Iterator[Run]:
        if not isinstance(self.function, ast.Lambda):
            yield from self._block(self.function.body)

    def _block(self, block: list[ast.stmt]) -> Iterator[Run]:
        for k, statement in enumerate(block):
            target, value = _assignment(statement)
            for run in self._runs(statement):
                if before := self.joined.pop(id(run[0].data), None):
                    earlier, is_sole, guard = before
                    later = (replace(s, guard=guard) for s in run)
                    run = (*earlier, replace(next(later), is_sole=is_sole), *later)
                if target and run[-1].node is value and (taken := self._taken(block, k, target)):
                    read, is_sole, guard = taken
                    self.joined[id(read)] = run, is_sole, guard
                else:
                    yield run
            if not isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                for field in ("body", "orelse", "finalbody"):
                    yield from self._block(getattr(statement, field, []))
                for part in getattr(statement, "handlers", getattr(statement, "cases", [])):
                    yield from self._block(part.body)

    def _taken(self, block, k: int, name: str) -> tuple[ast.Name, bool, ast.expr | None] | None:
        """Which call takes the value that statement k gives to `name`; whether it alone sees it;
        and under which condition."""
        passes = True
        for statement in block[k + 1 :]:
            if mentions(statement, name):
                break
            passes = passes and self.passes(statement)
        else:
            return None
        part, guard = statement, None
        if isinstance(statement, ast.If) and is_condition(statement.test):
            part, guard = statement.body[0], statement.test
            if mentions(guard, name):
                return None
        if not isinstance(part, WHOLE):
            return None
        reads = [n for n in mentions(part, name) if isinstance(n.ctx, ast.Load)]
        if len(reads) != 1:
            return None
        step = step_of(self.parents[id(reads[0])])
        if step is None and isinstance(self.parents[id(reads[0])], (ast.Attribute, ast.keyword)):
            step = step_of(self.parents[id(self.parents[id(reads[0])])])
        if step is None or step.data is not reads[0]:
            return None
        return reads[0], passes and self._is_sole(name, block[k], part, reads[0], guard), guard

    def passes(self, statement: ast.stmt) -> bool:
        """Whether a layer may wait while the statement runs."""
        if isinstance(statement, ast.Assign):
            return all(map(is_local, statement.targets)) and is_harmless(statement.value)
        return isinstance(statement, ast.Pass) or is_docstring(statement)

    def _is_sole(self, name: str, start: ast.stmt, part: ast.stmt, read: ast.Name, guard) -> bool:
        """Whether only `read`, in the statement `part`, sees what `start` assigns to `name`."""
        if not self.is_hidden(name) or not self.comes_first(read, part):
            return False
        target, _ = _assignment(part)
        in_try = any(type(p).__name__ in GUARDED for p in self.around(part))
        if guard is not None or (target == name and not in_try):
            return target == name and not in_try
        return self.is_read_by(name, start, {id(read)})

    def is_hidden(self, name: str) -> bool:
        """Whether it is a local name that only this function's own code can read."""
        return name in self.code.co_varnames and name not in self.code.co_cellvars

    def comes_first(self, node: ast.AST, part: ast.stmt) -> bool:
        """Whether the statement `part` calls nothing before `node`, and `node` once in any case."""
        for outer in self.around(node):
            if outer is part:
                break
            if isinstance(outer, INNER):
                return False
        own, here = {id(n) for n in ast.walk(node)}, (node.lineno, node.col_offset)
        return all(
            (n.lineno, n.col_offset) >= here or id(n) in own or any(m is node for m in ast.walk(n))
            for n in ast.walk(part)
            if isinstance(n, CALLS)
        )

    def is_read_by(self, name: str, start: ast.stmt, reads: set[int]) -> bool:
        """Whether only these nodes see what the statement `start` assigns to `name`."""
        return not any(
            self._reaches(start, n)
            for n in mentions(self.function, name)
            if id(n) not in reads and not isinstance(n.ctx, ast.Store)
        ) and not any(
            isinstance(n, ast.AugAssign) and getattr(n.target, "id", None) == name
            for n in ast.walk(self.function)
        )

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        while id(node) in self.parents:
            node = self.parents[id(node)]
            yield node

    def _reaches(self, start: ast.stmt, read: ast.Name) -> bool:
        """Whether what the statement `start` assigns may be what `read` sees: not if a statement
        that must run before `read` assigns the same name, unless `start` lies between them."""
        loops = [p for p in self.around(start) if type(p).__name__ in LOOPS]
        is_before = (read.lineno, read.col_offset) < (start.end_lineno, start.end_col_offset)
        if is_before and not any(p in loops for p in self.around(read)):
            return False
        name, inner = read.id, read
        for outer in self.around(read):
            for field in ("body", "orelse", "finalbody"):
                block = getattr(outer, field, None)
                if isinstance(block, list) and any(s is inner for s in block):
                    index = next(k for k, s in enumerate(block) if s is inner)
                    for m in range(index - 1, -1, -1):
                        between = block[m + 1 : index + 1]
                        is_other = _assignment(block[m])[0] == name and block[m] is not start
                        if is_other and not any(n is start for s in between for n in ast.walk(s)):
                            return False
            inner = outer
        return True

    def _runs(self, node: ast.AST) -> Iterator[Run]:
        """Runs in the expressions of a statement, or in part of an expression."""
        steps, source = _unnest(node) if isinstance(node, ast.expr) else ((), node)
        parts = [k.value for s in steps for k in s.node.keywords if k.arg != "input"]
        parts += [a for s in steps for a in s.node.args if a is not s.data]
        product = product_of(self, source)
        if product or steps:
            yield (product, *steps) if product else steps
        if steps and not product:
            parts.insert(0, source)
        else:
            parts[:0] = [p for p in ast.iter_child_nodes(source) if not isinstance(p, ast.stmt)]
        for part in parts:
            if not isinstance(part, (ast.Lambda, ast.excepthandler, ast.match_case)):
                yield from self._runs(part)


def _assignment(statement: ast.AST) -> tuple[str | None, ast.expr | None]:
    """The name that is assigned, if it is one, and the value that is assigned or returned."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign):
        target = statement.target
    elif isinstance(statement, (ast.Return, ast.Expr)):
        return None, statement.value
    else:
        return None, None
    return (target.id if isinstance(target, ast.Name) else None), statement.value


def _unnest(value: ast.AST | None) -> tuple[Run, ast.AST | None]:
    """``self.b(self.a(x))`` as its steps, the first first, and ``x``."""
    steps: list[Step] = []
    while (step := step_of(value)) is not None:
        steps.append(step)
        value = step.data
    return tuple(steps[::-1]), value
