"""Reads from the code of a module's class which calls follow straight upon each other.

``hidden = self.fc1(x)`` and then ``hidden = self.act(hidden)``, or ``self.act(self.fc1(x))``:
nobody but ``act`` sees what ``fc1`` returns, so that ``fc1`` may apply ``act`` itself. Such a
sequence of calls is a *run*. It proves something only if neither module is used anywhere else in
the code of the model, which `Code.misuse` looks for. What cannot be read proves nothing.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType

from torch import nn

# Reading these of a layer does not depend on what its forward does.
HARMLESS = {"weight", "bias", "in_features", "out_features", "in_channels", "out_channels"}
# Methods that treat a module as a whole.
WHOLE = {"parameters", "named_parameters", "state_dict", "load_state_dict", "train", "eval", "to"}
FUNCTIONS = {"dropout", "relu", "gelu"}  # calls that pass one value on, as modules do


@dataclass(frozen=True)
class Step:
    """A call of one argument: of ``self.<name>``, or of a function like ``F.<name>``.

    Attributes:
        name: the attribute's, or the function's.
        is_module: which of the two.
        text: the function as it is written.
        p: of a dropout function, the attribute of ``self`` that is its probability.
        is_sole: whether nobody but this call sees what the step before returned.
    """

    name: str
    is_module: bool
    text: str = ""
    p: str | None = None
    is_sole: bool = True


Run = tuple[Step, ...]


class Code:
    """The code of all the classes in a model."""

    def __init__(self, classes: Iterable[type]) -> None:
        self._functions = {cls: _functions(cls) for cls in classes}
        self._runs: dict[type, tuple[Run, ...]] = {}

    def runs(self, cls: type) -> tuple[Run, ...]:
        """All runs in the methods of a class."""
        if cls not in self._runs:
            nodes = filter(None, map(_parse, self._functions[cls]))
            self._runs[cls] = tuple(run for node in nodes for run in _runs_in(node.body) if run)
        return self._runs[cls]

    def is_readable(self, cls: type) -> bool:
        forward = getattr(cls, "forward", None)
        return isinstance(forward, FunctionType) and _parse(forward) is not None

    def misuse(self, cls: type, name: str, places: int) -> str | None:
        """Why it is not certain that ``self.<name>`` of `cls` is used in so many places only."""
        uses = 0
        for function in self._mentioning(cls, name):
            node = _parse(function)
            if node is None:
                return f"the source of {cls.__name__}.{function.__name__} cannot be read"
            uses += sum(_name_of_self(use) == name for use in _uses(node))
        if uses != places:
            return f"{cls.__name__} uses {name!r} elsewhere too"
        for other in self._functions:
            for function in self._mentioning(other, name):
                if _calls_from_outside(function, name):
                    return f"{other.__name__} calls {name!r} from outside"
        return None

    def takes_apart(self, cls: type, name: str) -> bool:
        """Whether a method may run parts of ``self.<name>``, an nn.Sequential, or see between."""
        for function in self._mentioning(cls, name):
            node = _parse(function)
            nodes = list(ast.walk(node)) if node is not None else []
            harmless = {id(n.func) for n in nodes if isinstance(n, ast.Call)}
            for n in nodes:
                if isinstance(n, ast.Attribute) and n.attr in HARMLESS | WHOLE:
                    inner = n.value.value if isinstance(n.value, ast.Subscript) else n.value
                    harmless.add(id(inner))
            if any(_name_of_self(n) == name and id(n) not in harmless for n in _uses(node)):
                return True
        return False

    def _mentioning(self, cls: type, name: str) -> list[FunctionType]:
        return [f for f in self._functions[cls] if name in _names(f.__code__)]


def _functions(cls: type) -> list[FunctionType]:
    """The methods of a class and its bases, without those that a child replaced for good."""
    found: dict[str, list[FunctionType]] = {}
    for base in cls.__mro__:
        if base in (nn.Module, object):
            continue
        for name, value in vars(base).items():
            value = getattr(value, "__func__", getattr(value, "fget", value))
            value = inspect.unwrap(value) if callable(value) else value
            if not isinstance(value, FunctionType):
                continue
            earlier = found.setdefault(name, [])
            if all("super" in _names(f.__code__) for f in earlier):
                # with what a decorator without functools.wraps has hidden
                cells = [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
                earlier += [value, *(c for c in cells if isinstance(c, FunctionType))]
    return [function for versions in found.values() for function in versions]


def _is_full(cell) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _names(code: CodeType) -> set[str]:
    """The names of all attributes and globals that a function mentions."""
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


@lru_cache(maxsize=256)
def _index(source: str) -> dict[tuple[str, int], ast.FunctionDef]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return {}
    return {
        (node.name, min([node.lineno, *(d.lineno for d in node.decorator_list)])): node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }


def _parse(function: FunctionType) -> ast.FunctionDef | None:
    function = inspect.unwrap(function)
    code = function.__code__
    # linecache knows the cells of notebooks too
    source = "".join(linecache.getlines(code.co_filename, function.__globals__))
    return _index(source).get((code.co_name, code.co_firstlineno))


def _name_of_self(node: ast.AST) -> str | None:
    if (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    ):
        return node.attr
    return None


def _uses(function: ast.FunctionDef | None) -> Iterator[ast.Attribute]:
    """Every ``self.<name>`` that is read, but for its size and parameters."""
    nodes = list(ast.walk(function)) if function is not None else []
    harmless = {
        id(node.value)
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr in HARMLESS
    }
    for node in nodes:
        if _name_of_self(node) and isinstance(node.ctx, ast.Load) and id(node) not in harmless:
            yield node


def _calls_from_outside(function: FunctionType, name: str) -> bool:
    """Whether it calls ``<something>.<name>(...)``, where that is neither self nor a library."""
    node = _parse(function)
    for call in ast.walk(node) if node is not None else ():
        target = call.func if isinstance(call, ast.Call) else None
        if isinstance(target, ast.Attribute) and target.attr == name:
            root = target.value
            while isinstance(root, ast.Attribute):
                root = root.value
            known = isinstance(root, ast.Name) and isinstance(
                function.__globals__.get(root.id), ModuleType
            )
            if not known and not _name_of_self(target):
                return True
    return False


def _runs_in(block: list[ast.stmt]) -> Iterator[Run]:
    run: list[Step] = []
    variable = None  # holds the value of the run so far
    for statement in block:
        target, value = _assignment(statement)
        steps, source = _unnest(value)
        if run and steps and isinstance(source, ast.Name) and source.id == variable:
            # The name that held the value before must not go on holding it.
            is_sole = target == variable or isinstance(statement, ast.Return)
            run += [replace(steps[0], is_sole=is_sole), *steps[1:]]
        else:
            yield tuple(run)
            run = steps
        variable = target if steps else None
        for part in ast.iter_child_nodes(statement):
            if not isinstance(part, ast.stmt):
                yield from _runs_inside(source if part is value else part)
        for field in ("body", "orelse", "finalbody"):
            yield from _runs_in(getattr(statement, field, []))
        for part in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
            yield from _runs_in(part.body)
    yield tuple(run)


def _runs_inside(node: ast.AST) -> Iterator[Run]:
    """Runs that are part of a larger expression."""
    steps, source = _unnest(node)
    yield tuple(steps)
    for part in ast.iter_child_nodes(source):
        if not isinstance(part, ast.stmt):
            yield from _runs_inside(part)


def _assignment(statement: ast.stmt) -> tuple[str | None, ast.expr | None]:
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


def _unnest(value: ast.AST | None) -> tuple[list[Step], ast.AST | None]:
    """``self.b(self.a(x))`` as its steps, the first first, and ``x``."""
    steps = []
    while (step := _step(value)) is not None:
        steps.append(step)
        value = value.args[0]
    return steps[::-1], value


def _step(value: ast.AST | None) -> Step | None:
    if not isinstance(value, ast.Call) or not value.args or isinstance(value.args[0], ast.Starred):
        return None
    name = _name_of_self(value.func)
    if name is not None:
        alone = len(value.args) == 1 and not value.keywords
        return Step(name, is_module=True) if alone else None
    text = ast.unparse(value.func)
    name = text.rpartition(".")[2]
    if name not in FUNCTIONS:
        return None
    arguments = {k.arg: k.value for k in value.keywords}
    p = arguments.get("p", value.args[1] if len(value.args) > 1 else None)
    return Step(name, is_module=False, text=text, p=_name_of_self(p) if p is not None else None)
